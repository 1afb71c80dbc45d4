// How coordinates and values vary together inside each K/V group, around the group's means.
#pragma once
#include "means.h"
#include "softmax_block.h"

namespace residua::RESIDUA_ISA {

struct CovarianceBlock {
  int64_t rank, width;  // width: padded value dim
  float *mean, *value_mean, *run, *row, *offsets, *values, *sums, *variance, *keep;

  CovarianceBlock(Arena& arena, const CovarianceArgs& args)
      : rank(args.rank), width(padded(args.shape.value_dim)) {
    const int64_t widest = width > padded(rank) ? width : padded(rank);
    mean = arena.floats(rank);
    value_mean = arena.floats(width);
    run = arena.floats(widest);
    row = arena.floats(widest);
    offsets = arena.floats(rank * kTile);
    values = arena.floats(kTile * width);
    sums = arena.floats(rank * width);
    variance = arena.floats(rank);
    keep = arena.floats(kLanesMax);
  }

  // Adds `count` rows that lie around their means: offsets [rank][kTile] x values [count][width].
  void absorb(int64_t count) {
    for (int64_t r = 0; r < rank; r++) {
      const float* off = offsets + r * kTile;
      float sum = 0.0f;
      for (int64_t t = 0; t < count; t++) sum += off[t] * off[t];
      variance[r] += sum;
    }
    for (int64_t first = 0; first < rank; first += kRowBlock) {
      with_rows(least(kRowBlock, rank - first), [&](auto n) {
        weighted_sum<decltype(n)::value>(offsets + first * kTile, values, count, width, keep,
                                         sums + first * width);
      });
    }
  }
};

template <class T>
inline void covariance_of(const CovarianceArgs& args, const float* x, const T* v, const int64_t* tokens,
                          int64_t size, CovarianceBlock& block) {
  const int64_t rank = args.rank, dim = args.shape.value_dim, width = block.width;
  mean_of(x, args.x.row, tokens, size, rank, block.run, block.row, block.mean);
  mean_of(v, args.v.row, tokens, size, dim, block.run, block.row, block.value_mean);
  std::memset(block.sums, 0, rank * width * sizeof(float));
  std::memset(block.variance, 0, rank * sizeof(float));
  for (int64_t first = 0; first < size; first += kTile) {
    const int64_t count = least(kTile, size - first);
    for (int64_t t = 0; t < count; t++) {
      const float* from = x + tokens[first + t] * args.x.row;
      float* row = block.values + t * width;
      for (int64_t r = 0; r < rank; r++) block.offsets[r * kTile + t] = from[r] - block.mean[r];
      widen(v + tokens[first + t] * args.v.row, row, dim);
      for (int64_t d = 0; d < dim; d++) row[d] -= block.value_mean[d];
      for (int64_t d = dim; d < width; d++) row[d] = 0.0f;
    }
    block.absorb(count);
  }
}

// K/V groups [begin, end) of one K/V head.
inline void covariance_task(const CovarianceArgs& args, int64_t head, int64_t begin, int64_t end,
                            void* scratch) {
  const Shape& s = args.shape;
  const int64_t rank = args.rank, dim = s.value_dim;
  const int64_t* order = args.kv.order + head * args.kv.tokens;
  const int64_t* offsets = args.kv.offsets + head * (args.kv.groups + 1);
  Arena arena{static_cast<char*>(scratch)};
  CovarianceBlock block(arena, args);
  for (int i = 0; i < kLanesMax; i++) block.keep[i] = 1.0f;
  const float* x = head_of<float>(args.x, head / s.kv_heads, head % s.kv_heads);
  with_type(args.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const T* v = head_of<T>(args.v, head / s.kv_heads, head % s.kv_heads);
    for (int64_t g = begin; g < end; g++) {
      const int64_t size = offsets[g + 1] - offsets[g], at = (head * args.kv.groups + g) * rank;
      covariance_of(args, x, v, order + offsets[g], size, block);
      const float share = size ? 1.0f / static_cast<float>(size) : 0.0f;
      for (int64_t r = 0; r < rank; r++) {
        float* out = args.covariance + (at + r) * dim;
        for (int64_t d = 0; d < dim; d++) out[d] = block.sums[r * block.width + d] * share;
        args.variance[at + r] = block.variance[r] * share;
      }
    }
  });
}

inline size_t covariance_scratch(const CovarianceArgs& args) {
  Arena arena{nullptr};
  CovarianceBlock block(arena, args);
  return arena.used;
}

}  // namespace residua::RESIDUA_ISA
