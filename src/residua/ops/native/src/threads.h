// Runs independent tasks on a few threads. Threads live for one call: that costs tens of microseconds, and in
// return there is no pool to share, to fork or to shut down. On a busy machine a thread may start late; nobody
// waits for one that has not begun when the work is done.
#pragma once
#include "abi.h"

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
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

// For tests: every byte of scratch memory is set to this before every task, so that a result that depends on
// what was there before cannot stay unseen. 0xff makes NaN, 0x41 numbers such as 12; negative: off.
inline std::atomic<int> poison_byte{-1};

inline void prepare(void* scratch, size_t bytes) {
  const int byte = poison_byte.load(std::memory_order_relaxed);
  if (byte >= 0) std::memset(scratch, byte, bytes);
}

// What a late thread may still look at when the call is over.
struct Team {
  std::vector<Memory> scratch;
  std::mutex mutex;
  std::condition_variable left;
  int64_t active = 0;
  bool closed = false;
};

// work(i, scratch) for every i in [0, count), handed out in ascending order. A task runs on one thread, so a
// result never depends on the number of threads.
template <class Work>
Status parallel(int64_t threads, int64_t count, size_t scratch_bytes, const Work& work) {
  const int64_t wanted = count < threads ? count : threads;
  const auto team = std::make_shared<Team>();
  std::vector<Memory>& scratch = team->scratch;
  for (int64_t i = 0; i < (wanted > 1 ? wanted : 1); i++) {
    Memory piece = allocate(scratch_bytes);
    if (piece) scratch.push_back(std::move(piece));
  }
  if (scratch.empty()) return kNoMemory;  // with less memory than wanted, fewer threads do
  std::atomic<int64_t> next{0};
  auto run = [&](void* own) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      prepare(own, scratch_bytes);
      work(i, own);
    }
  };
  for (size_t i = 1; i < scratch.size(); i++) {
    try {
      std::thread([&run, team, i] {
        {
          const std::lock_guard<std::mutex> lock(team->mutex);
          if (team->closed) return;  // `run` may be gone
          team->active++;
        }
        run(team->scratch[i].get());
        const std::lock_guard<std::mutex> lock(team->mutex);
        team->active--;
        team->left.notify_one();
      }).detach();
    } catch (const std::system_error&) {
      break;  // the system gives no more threads; those that run finish the work
    }
  }
  run(scratch[0].get());
  std::unique_lock<std::mutex> lock(team->mutex);
  team->closed = true;
  team->left.wait(lock, [&] { return team->active == 0; });
  return kOk;
}

}  // namespace residua
