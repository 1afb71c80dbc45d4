// What the exported functions share: the choice of kernels, and the cutting of work into tasks.
#pragma once
#include "abi.h"
#include "threads.h"

#include <algorithm>
#include <new>

#define RESIDUA_EXPORT extern "C" __attribute__((visibility("default")))

// Defines a primitive, in global scope: its body sees the arguments `a`, the `kernels` of the instruction set and
// the number of `threads`. Python calls it as `residua_<name>`.
#define RESIDUA_PRIMITIVE(name, Args)                                                                  \
  static residua::Status name(const residua::Args& a, const residua::Kernels& kernels, int64_t threads); \
  RESIDUA_EXPORT int32_t residua_##name(const residua::Args* a, int32_t isa, int32_t threads) {        \
    return residua::with_kernels(isa, [&](const residua::Kernels& kernels) { return name(*a, kernels, threads); }); \
  }                                                                                                    \
  static residua::Status name([[maybe_unused]] const residua::Args& a,                                 \
                              [[maybe_unused]] const residua::Kernels& kernels,                        \
                              [[maybe_unused]] int64_t threads)

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

// A kernel with its arguments, as the work of `parallel` or `over_parts`.
template <class Args, class Kernel>
auto with_args(Kernel kernel, const Args& args) {
  return [kernel, &args](auto... place) { kernel(args, place...); };
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

// The means of contiguous rows x [heads, tokens, rank] by group.
inline MeansArgs means_args(const float* x, int64_t heads, int64_t tokens, int64_t rank, int64_t groups,
                            const int64_t* order, const int64_t* offsets, float* means) {
  MeansArgs m{};
  m.shape = {1, heads, heads, tokens, 0, rank, 0};
  m.groups = {order, offsets, tokens, groups};
  m.x = {const_cast<float*>(x), 0, tokens * rank, rank};
  m.means = means;
  return m;
}

}  // namespace residua
