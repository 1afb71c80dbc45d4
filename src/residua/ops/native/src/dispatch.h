// What the exported functions share: the choice of kernels, and the cutting of work into tasks.
#pragma once
#include "abi.h"
#include "threads.h"

#include <algorithm>
#include <new>

#define RESIDUA_EXPORT extern "C" __attribute__((visibility("default")))

namespace residua {

constexpr int64_t kGroupsPerTask = 32;  // of means

// Best first; null where the compiler or the processor lacks the instruction set.
const Kernels* kernels_of(int32_t isa);

// Runs f(kernels) and turns what can go wrong into a status: nothing may be thrown through a C interface.
template <class Run>
int32_t with_kernels(int32_t isa, const Run& run) {
  const Kernels* kernels = kernels_of(isa);
  if (!kernels) return kBadIsa;
  try {
    return run(*kernels);
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
}

// work(head, begin, end, scratch) over fixed parts of `total` per head.
template <class Work>
Status over_parts(int64_t threads, int64_t heads, int64_t total, int64_t part, size_t scratch,
                  const Work& work) {
  const int64_t parts = (total + part - 1) / part;
  return parallel(threads, heads * parts, scratch, [&](int64_t i, void* own) {
    const int64_t begin = i % parts * part;
    work(i / parts, begin, std::min(total, begin + part), own);
  });
}

// Stable counting sort of the labels of one head; tokens of no group come last.
inline void sort_labels(const int64_t* labels, int64_t tokens, int64_t groups, int64_t* order,
                        int64_t* offsets) {
  std::fill_n(offsets, groups + 1, 0);
  for (int64_t i = 0; i < tokens; i++) {
    if (labels[i] >= 0) offsets[labels[i]]++;
  }
  int64_t next = 0;
  for (int64_t c = 0; c <= groups; c++) {  // where each group starts
    const int64_t size = offsets[c];
    offsets[c] = next;
    next += size;
  }
  for (int64_t i = 0; i < tokens; i++) {
    order[labels[i] >= 0 ? offsets[labels[i]]++ : next++] = i;
  }
  for (int64_t c = groups; c > 0; c--) offsets[c] = offsets[c - 1];
  offsets[0] = 0;
}

}  // namespace residua
