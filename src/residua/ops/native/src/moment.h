// Second moments of rows in fp64, and distances to a mean.
#pragma once
#include "doubles.h"

namespace residua::RESIDUA_ISA {

constexpr int kMomentChunk = 64;  // rows that are widened at a time
constexpr int kMomentTile = 4;    // rows of the result per register block
constexpr int kMomentVectors = kDoubles / 2;
constexpr int kMomentColumns = kMomentVectors * kDoubles;

RESIDUA_INLINE int64_t moment_width(int64_t dim) { return round_up(dim, kMomentRows); }

struct MomentBlock {
  double *rows, *sums;  // [kMomentChunk][width], [kMomentRows][width]
  float* row;

  MomentBlock(Arena& arena, int64_t dim)
      : rows(arena.doubles(kMomentChunk * moment_width(dim))),
        sums(arena.doubles(kMomentRows * moment_width(dim))),
        row(arena.floats(padded(dim))) {}
};

// NaN and Inf times 0 are NaN, and no other number is.
inline bool all_finite(const float* x, int64_t n) {
  Vec poison = set1(0.0f);
  float rest = 0.0f;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) poison = fma(load(x + i), set1(0.0f), poison);
  for (; i < n; i++) rest += x[i] * 0.0f;
  return sum_of(poison) + rest == 0.0f;
}

// Row `index` of a head as floats, in `buffer` if it is stored as something else.
RESIDUA_INLINE const float* widened(const MomentArgs& args, int64_t head, int64_t index, float* buffer) {
  const float* found = buffer;
  with_type(args.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const T* x = head_of<T>(args.x, head / args.shape.heads, head % args.shape.heads) + index * args.x.row;
    if constexpr (std::is_same_v<T, float>) {
      found = x;
    } else {
      widen(x, buffer, args.shape.dim);
    }
  });
  return found;
}

// Chooses the rows of one head, and finds their mean if it is asked for.
inline void moment_rows(const MomentArgs& args, int64_t head, MomentHead& to, void* scratch) {
  const int64_t total = args.shape.queries, dim = args.shape.dim;
  Arena arena{static_cast<char*>(scratch)};
  const MomentBlock block(arena, dim);
  const uint8_t* counted = args.counted ? args.counted + head * total : nullptr;
  to.count = 0;
  for (int64_t d = 0; d < dim; d++) to.mean[d] = 0.0;
  for (int64_t i = 0; i < total; i++) {
    const float* row = widened(args, head, i, block.row);
    if ((counted && !counted[i]) || !all_finite(row, dim)) continue;
    to.rows[to.count++] = i;
    for (int64_t d = 0; args.centred && d < dim; d++) to.mean[d] += row[d];
  }
  for (int64_t d = 0; d < dim; d++) to.mean[d] /= to.count ? to.count : 1;
}

// sums[i][j] += sum over the chunk of x[first + i] x[j], for j from the diagonal on.
inline void add_products(const MomentBlock& block, int64_t count, int64_t width, int64_t first) {
  for (int64_t i = 0; i < kMomentRows; i += kMomentTile) {
    for (int64_t j = first; j < width; j += kMomentColumns) {
      Doubles acc[kMomentTile][kMomentVectors] = {};
      const double* x = block.rows;
      for (int64_t r = 0; r < count; r++, x += width) {
#pragma GCC unroll 4
        for (int t = 0; t < kMomentTile; t++) {
#pragma GCC unroll 4
          for (int c = 0; c < kMomentVectors; c++) {
            acc[t][c] += x[first + i + t] * doubles(x + j + c * kDoubles);
          }
        }
      }
      for (int t = 0; t < kMomentTile; t++) {
        for (int c = 0; c < kMomentVectors; c++) {
          doubles(block.sums + (i + t) * width + j + c * kDoubles) += acc[t][c];
        }
      }
    }
  }
}

// Rows [first, first + kMomentRows) of a head's matrix from the diagonal on, and their mirror image.
inline void moment_task(const MomentArgs& args, int64_t head, const MomentHead& from, int64_t first,
                        void* scratch) {
  const int64_t dim = args.shape.dim, width = moment_width(dim);
  Arena arena{static_cast<char*>(scratch)};
  const MomentBlock block(arena, dim);
  std::memset(block.rows, 0, kMomentChunk * width * sizeof(double));
  std::memset(block.sums, 0, kMomentRows * width * sizeof(double));
  for (int64_t begin = 0; begin < from.count; begin += kMomentChunk) {
    const int64_t count = least(kMomentChunk, from.count - begin);
    for (int64_t r = 0; r < count; r++) {
      const float* row = widened(args, head, from.rows[begin + r], block.row);
      for (int64_t d = first; d < dim; d++) block.rows[r * width + d] = row[d] - from.mean[d];
    }
    add_products(block, count, width, first);
  }
  double* moment = args.moment + head * dim * dim;
  const double count = from.count ? static_cast<double>(from.count) : 1.0;
  for (int64_t i = first; i < least(dim, first + kMomentRows); i++) {
    for (int64_t j = i; j < dim; j++) {
      moment[i * dim + j] = moment[j * dim + i] = block.sums[(i - first) * width + j] / count;
    }
  }
}

inline size_t moment_scratch(const MomentArgs& args) {
  Arena arena{nullptr};
  const MomentBlock block(arena, args.shape.dim);
  return arena.used;
}

// Distances of some rows of x [.., rank] to a mean.
inline void distances(const float* x, int64_t rank, const int64_t* rows, int64_t count, const float* mean,
                      float* out) {
  for (int64_t r = 0; r < count; r++) {
    const float* row = x + rows[r] * rank;
    Vec sums = set1(0.0f);
    float sum = 0.0f;
    int64_t i = 0;
    for (; i + kLanes <= rank; i += kLanes) {
      const Vec difference = load(row + i) - load(mean + i);
      sums = fma(difference, difference, sums);
    }
    for (; i < rank; i++) sum += (row[i] - mean[i]) * (row[i] - mean[i]);
    out[r] = std::sqrt(sum + sum_of(sums));
  }
}

}  // namespace residua::RESIDUA_ISA
