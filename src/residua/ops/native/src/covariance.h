// How the keys' coordinates and the values vary together inside K/V groups, and mixtures of that over groups.
#pragma once
#include "linear.h"

namespace residua::RESIDUA_ISA {

// A pool's numbers [R x Dv covariances, then R variances] are columns of a matrix [pools][columns] that lies in
// memory as panels [panel][pools][kPanel], ready for the product that mixes the pools.
inline int64_t covariance_columns(const CovarianceArgs& args) {
  return args.rank * (args.shape.value_dim + 1);
}

struct CovarianceBlock {
  int64_t rank, depth, width;  // padded: coordinates and a one, values
  float *factor, *rows, *x, *first, *values, *sums, *x_sum, *x_square, *numbers;

  CovarianceBlock(Arena& arena, const CovarianceArgs& args)
      : rank(args.rank), depth(padded(args.rank + 1)), width(padded(args.shape.value_dim)) {
    factor = arena.floats(args.shape.dim * round_up(rank, kPanel));
    rows = arena.floats(kTile * args.shape.dim);
    x = arena.floats(kTile * depth);
    first = arena.floats(width);
    values = arena.floats(kTile * width);
    sums = arena.floats((rank + 1) * width);
    x_sum = arena.floats(depth);
    x_square = arena.floats(depth);
    numbers = arena.floats(round_up(covariance_columns(args), kPanel));
  }

  void reset() {
    std::memset(sums, 0, (rank + 1) * width * sizeof(float));
    std::memset(x_sum, 0, depth * sizeof(float));
    std::memset(x_square, 0, depth * sizeof(float));
  }
};

// sums[i] += sum_t x[t][i] * values[t] for a block of coordinates, all columns of the values.
template <int ROWS>
inline void add_outer(const float* x, int64_t depth, const float* values, int64_t width, int64_t count,
                      float* sums) {
  for (int64_t column = 0; column < width; column += kPanel) {
    with_vectors(least(kPanel, width - column) / kLanes, [&](auto vectors) {
      constexpr int VECTORS = decltype(vectors)::value;
      Vec acc[ROWS][VECTORS];
      clear(acc);
#pragma GCC unroll 4
      for (int64_t t = 0; t < count; t++) {
        Vec b[VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) b[j] = load(values + t * width + column + j * kLanes);
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++) {
          Vec a = set1(x[t * depth + i]);
#pragma GCC unroll 4
          for (int j = 0; j < VECTORS; j++) acc[i][j] = fma(a, b[j], acc[i][j]);
        }
      }
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; i++) {
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) {
          float* to = sums + i * width + column + j * kLanes;
          store(to, load(to) + acc[i][j]);
        }
      }
    });
  }
}

// The sums of one tile: coordinates around the centroid, values around the group's first one. The last
// coordinate is 1 and sums the values.
template <class T>
inline void absorb_covariance(const CovarianceArgs& args, const T* k, const T* v, const float* centroid,
                              const int64_t* tokens, int64_t count, CovarianceBlock& block) {
  const int64_t dim = args.shape.dim, value_dim = args.shape.value_dim;
  // keys off their centroid, values off the first one
  for (int64_t t = 0; t < count; t++) {
    float *row = block.rows + t * dim, *value = block.values + t * block.width;
    widen(k + tokens[t] * args.k.row, row, dim);
    for (int64_t d = 0; d < dim; d++) row[d] -= centroid[d];
    widen(v + tokens[t] * args.v.row, value, value_dim);
    for (int64_t d = 0; d < value_dim; d++) value[d] -= block.first[d];
    for (int64_t d = value_dim; d < block.width; d++) value[d] = 0.0f;
  }
  // x = keys @ factor
  for (int64_t t = 0; t < count; t += kRowBlock) {
    with_rows(least(kRowBlock, count - t), [&](auto n) {
      product<decltype(n)::value>(block.rows + t * dim, dim, block.factor, dim, block.rank, block.depth,
                                  block.x + t * block.depth);
    });
  }
  // sums of x and of its squares
  for (int64_t t = 0; t < count; t++) {
    float* x = block.x + t * block.depth;
    for (int64_t r = block.rank; r < block.depth; r++) x[r] = r == block.rank ? 1.0f : 0.0f;
    for (int64_t r = 0; r < block.depth; r += kLanes) {
      const Vec here = load(x + r);
      store(block.x_sum + r, load(block.x_sum + r) + here);
      store(block.x_square + r, fma(here, here, load(block.x_square + r)));
    }
  }
  // sums of x^T values
  for (int64_t r = 0; r <= block.rank; r += kRowBlock) {
    with_rows(least(kRowBlock, block.rank + 1 - r), [&](auto n) {
      add_outer<decltype(n)::value>(block.x + r, block.depth, block.values, block.width, count,
                                    block.sums + r * block.width);
    });
  }
}

// Adds the sums of a group of `size` keys to the numbers of its pool; what is not finite adds nothing.
inline void add_covariance(const CovarianceArgs& args, int64_t size, CovarianceBlock& block) {
  const int64_t value_dim = args.shape.value_dim;
  const float share = size ? 1.0f / static_cast<float>(size) : 0.0f;
  const float* value_sum = block.sums + block.rank * block.width;
  const auto add = [](float* to, float more) { *to += std::isfinite(more) ? more : 0.0f; };
  float* to = block.numbers;
  for (int64_t r = 0; r < block.rank; r++, to += value_dim) {
    const float *sum = block.sums + r * block.width, mean = block.x_sum[r] * share;
    for (int64_t d = 0; d < value_dim; d++) add(to + d, sum[d] - mean * value_sum[d]);
  }
  for (int64_t r = 0; r < block.rank; r++) {
    const float variance = block.x_square[r] - block.x_sum[r] * block.x_sum[r] * share;
    add(to + r, variance < 0.0f ? 0.0f : variance);  // by rounding
  }
}

// Pools [begin, end) of one K/V head, into the head's panels: the mean over all keys of a pool, each around
// the means of its own group.
inline void covariance_task(const CovarianceArgs& args, const Pools& pools, int64_t head, int64_t begin,
                            int64_t end, float* panels, void* scratch) {
  const Shape& s = args.shape;
  const int64_t groups = args.kv.groups, columns = round_up(covariance_columns(args), kPanel);
  const int64_t* order = args.kv.order + head * args.kv.tokens;
  const int64_t* offsets = args.kv.offsets + head * (groups + 1);
  const int64_t* members = pools.members + head * groups;
  const int64_t* starts = pools.starts + head * (pools.count + 1);
  Arena arena{static_cast<char*>(scratch)};
  CovarianceBlock block(arena, args);
  pack_matrix(args.factor + head * s.dim * args.rank, s.dim, args.rank, block.factor);
  with_type(args.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const T* k = head_of<T>(args.k, head / s.kv_heads, head % s.kv_heads);
    const T* v = head_of<T>(args.v, head / s.kv_heads, head % s.kv_heads);
    for (int64_t p = begin; p < end; p++) {
      int64_t total = 0;
      std::memset(block.numbers, 0, columns * sizeof(float));
      for (int64_t m = starts[p]; m < starts[p + 1]; m++) {
        const int64_t g = members[m], from = offsets[g], size = offsets[g + 1] - from;
        if (!size) continue;
        block.reset();
        widen(v + order[from] * args.v.row, block.first, s.value_dim);
        for (int64_t done = 0; done < size; done += kTile) {
          absorb_covariance(args, k, v, args.centroids + (head * groups + g) * s.dim, order + from + done,
                            least(kTile, size - done), block);
        }
        add_covariance(args, size, block);
        total += size;
      }
      const Vec share = set1(total ? 1.0f / static_cast<float>(total) : 0.0f);
      for (int64_t c = 0; c < columns; c += kLanes) store(block.numbers + c, load(block.numbers + c) * share);
      for (int64_t c = 0; c < columns; c += kPanel) {
        std::memcpy(panels + c * pools.count + p * kPanel, block.numbers + c, kPanel * sizeof(float));
      }
    }
  });
}

// Columns [begin, end) of share x panels, whole panels but for the last one.
inline void mix_task(const CovarianceArgs& args, const Pools& pools, int64_t head, int64_t begin, int64_t end,
                     const float* panels) {
  const int64_t rows = args.shape.queries, inner = pools.count;
  const int64_t slopes = args.rank * args.shape.value_dim;
  const float* share = pools.share + head * rows * inner;
  alignas(kAlign) float block[kRowBlock * kTile];
  for (int64_t first = begin; first < end; first += kPanel) {
    const int64_t used = least(kPanel, end - first);
    const int64_t here = used < slopes - first ? used : slopes - first;  // the others are variances
    for (int64_t i = 0; i < rows; i += kRowBlock) {
      const int64_t count = least(kRowBlock, rows - i);
      with_rows(count, [&](auto n) {
        panel_scores<decltype(n)::value, kPanelVectors>(share + i * inner, inner, panels + first * inner,
                                                        inner, block);
      });
      for (int64_t r = 0; r < count; r++) {
        const int64_t row = head * rows + i + r;
        for (int64_t c = 0; c < here; c++) args.slope[row * slopes + first + c] = block[r * kTile + c];
        for (int64_t c = here > 0 ? here : 0; c < used; c++) {
          args.curve[row * args.rank + first + c - slopes] = block[r * kTile + c];
        }
      }
    }
  }
}

inline size_t covariance_scratch(const CovarianceArgs& args) {
  Arena arena{nullptr};
  CovarianceBlock block(arena, args);
  return arena.used;
}

}  // namespace residua::RESIDUA_ISA
