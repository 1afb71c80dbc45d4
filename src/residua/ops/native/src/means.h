// Means of the rows of each group, summed in the order of the partition.
#pragma once
#include "pack.h"

namespace residua::RESIDUA_ISA {

// Rows that are summed before they join the total: keeps rounding small in big groups.
constexpr int64_t kMeansRun = 256;

inline void add_to(float* sum, const float* row, int64_t n) {
  int64_t d = 0;
  for (; d + kLanes <= n; d += kLanes) store(sum + d, load(sum + d) + load(row + d));
  for (; d < n; d++) sum[d] += row[d];
}

// The mean of `size` rows, in runs of kMeansRun; `run` and `row` are room.
template <class T>
inline void mean_of(const T* x, int64_t stride, const int64_t* tokens, int64_t size, int64_t dim, float* run,
                    float* row, float* mean) {
  std::memset(mean, 0, dim * sizeof(float));
  for (int64_t first = 0; first < size; first += kMeansRun) {
    std::memset(run, 0, dim * sizeof(float));
    for (int64_t i = first; i < least(size, first + kMeansRun); i++) {
      if constexpr (std::is_same_v<T, float>) {
        add_to(run, x + tokens[i] * stride, dim);
      } else {
        widen(x + tokens[i] * stride, row, dim);
        add_to(run, row, dim);
      }
    }
    add_to(mean, run, dim);
  }
  for (int64_t d = 0; size && d < dim; d++) mean[d] /= static_cast<float>(size);
}

// Groups [begin, end) of one head; scratch holds two padded rows.
inline void means_task(const MeansArgs& args, int64_t head, int64_t begin, int64_t end, void* scratch) {
  const int64_t dim = args.shape.dim, groups = args.groups.groups;
  const int64_t* order = args.groups.order + head * args.groups.tokens;
  const int64_t* offsets = args.groups.offsets + head * (groups + 1);
  float* run = static_cast<float*>(scratch);
  with_type(args.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const T* x = head_of<T>(args.x, head / args.shape.heads, head % args.shape.heads);
    for (int64_t g = begin; g < end; g++) {
      mean_of(x, args.x.row, order + offsets[g], offsets[g + 1] - offsets[g], dim, run, run + padded(dim),
              args.means + (head * groups + g) * dim);
    }
  });
}

}  // namespace residua::RESIDUA_ISA
