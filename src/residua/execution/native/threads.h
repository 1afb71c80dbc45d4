// Runs independent tasks on a few threads. Threads live for one call: that costs tens of microseconds, and in
// return there is no pool to share, to fork or to shut down.
#pragma once
#include "abi.h"

#include <atomic>
#include <cstdlib>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

namespace residua {

struct FreeDeleter {
  void operator()(void* p) const { std::free(p); }
};
using Memory = std::unique_ptr<void, FreeDeleter>;

inline Memory allocate(size_t bytes) {
  return Memory(std::aligned_alloc(kAlign, round_up(bytes ? bytes : 1, kAlign)));
}

// work(i, scratch) for every i in [0, count), handed out in ascending order. A task runs on one thread, so a
// result never depends on the number of threads.
template <class Work>
Status parallel(int64_t threads, int64_t count, size_t scratch_bytes, const Work& work) {
  const int64_t wanted = count < threads ? count : threads;
  std::vector<Memory> scratch;
  for (int64_t i = 0; i < (wanted > 1 ? wanted : 1); i++) {
    Memory piece = allocate(scratch_bytes);
    if (piece) scratch.push_back(std::move(piece));
  }
  if (scratch.empty()) return kNoMemory;  // with less memory than wanted, fewer threads do
  std::atomic<int64_t> next{0};
  auto run = [&](void* own) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) work(i, own);
  };
  std::vector<std::thread> helpers;
  helpers.reserve(scratch.size());
  for (size_t i = 1; i < scratch.size(); i++) {
    try {
      helpers.emplace_back(run, scratch[i].get());
    } catch (const std::system_error&) {
      break;  // the system gives no more threads; those that run finish the work
    }
  }
  run(scratch[0].get());
  for (auto& helper : helpers) helper.join();
  return kOk;
}

}  // namespace residua
