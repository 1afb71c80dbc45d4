// Products of many rows with a small matrix: response coordinates, and the probe fit's low-rank correction.
#pragma once
#include "softmax_block.h"

namespace residua::RESIDUA_ISA {

// A matrix [dim][columns] as panels [panel][dim][kPanel], zeros in the padding.
inline void pack_matrix(const float* from, int64_t dim, int64_t columns, float* to) {
  for (int64_t first = 0; first < columns; first += kPanel) {
    const int64_t width = least(kPanel, columns - first);
    for (int64_t d = 0; d < dim; d++, to += kPanel) {
      for (int64_t c = 0; c < kPanel; c++) to[c] = c < width ? from[d * columns + first + c] : 0.0f;
    }
  }
}

// out [rows][width] = left [rows][stride] x packed panels; no more vectors than `columns` fill.
template <int ROWS>
inline void product(const float* left, int64_t stride, const float* panels, int64_t dim, int64_t columns,
                    int64_t width, float* out) {
  alignas(kAlign) float block[ROWS * kTile];
  for (int64_t first = 0; first < columns; first += kPanel) {
    const int64_t used = least(kPanel, columns - first);
    const float* right = panels + first * dim;
    with_vectors((used + kLanes - 1) / kLanes, [&](auto n) {
      panel_scores<ROWS, decltype(n)::value>(left, stride, right, dim, block);
    });
    for (int i = 0; i < ROWS; i++) {
      std::memcpy(out + i * width + first, block + i * kTile, used * sizeof(float));
    }
  }
}

struct ProjectBlock {
  float *factor, *rows;

  ProjectBlock(Arena& arena, const ProjectArgs& args) {
    factor = arena.floats(args.shape.dim * round_up(args.rank, kPanel));
    rows = arena.floats(kRowBlock * args.shape.dim);
  }
};

// row /= max(its root mean square, minimum).
inline void divide_by_rms(float* row, int64_t n, float minimum) {
  Vec squares = set1(0.0f);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) squares = fma(load(row + i), load(row + i), squares);
  float sum = sum_of(squares);
  for (; i < n; i++) sum += row[i] * row[i];
  float rms = std::sqrt(sum / static_cast<float>(n));
  rms = rms < minimum ? minimum : rms;  // NaN stays NaN
  const float factor = 1.0f / rms;
  for (i = 0; i < n; i++) row[i] *= factor;
}

// Rows [begin, end) of one head: x @ factor, each divided by its root mean square if `normalise`.
inline void project_task(const ProjectArgs& args, int64_t head, int64_t begin, int64_t end, void* scratch) {
  const int64_t dim = args.shape.dim, rank = args.rank;
  Arena arena{static_cast<char*>(scratch)};
  ProjectBlock block(arena, args);
  pack_matrix(args.factor + head * dim * rank, dim, rank, block.factor);
  with_type(args.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const T* x = head_of<T>(args.x, head / args.shape.heads, head % args.shape.heads);
    float* out = args.out + (head * args.shape.queries + begin) * rank;
    for (int64_t first = begin; first < end; first += kRowBlock) {
      const int64_t count = least(kRowBlock, end - first);
      const float* left = block.rows;
      int64_t stride = dim;
      if constexpr (std::is_same_v<T, float>) {
        left = x + first * args.x.row;
        stride = args.x.row;
      } else {
        for (int64_t i = 0; i < count; i++) widen(x + (first + i) * args.x.row, block.rows + i * dim, dim);
      }
      with_rows(count, [&](auto rows) {
        product<decltype(rows)::value>(left, stride, block.factor, dim, rank, rank, out);
      });
      for (int64_t i = 0; i < count; i++, out += rank) {
        if (args.normalise) divide_by_rms(out, rank, args.min_rms);
      }
    }
  });
}

inline size_t project_scratch(const ProjectArgs& args) {
  Arena arena{nullptr};
  ProjectBlock block(arena, args);
  return arena.used;
}

struct AffineBlock {
  float *left, *right, *inner, *sums, *rescale;

  AffineBlock(Arena& arena, const AffineArgs& args) {
    const int64_t dim = args.shape.value_dim, width = padded(dim);
    left = arena.floats(dim * round_up(args.rank, kPanel));
    right = arena.floats(args.rank * width);
    inner = arena.floats(kRowBlock * kTile);
    sums = arena.floats(kRowBlock * width);
    rescale = arena.floats(kLanesMax);
  }
};

// sums += (rows x left) x right, kTile columns of `left` at a time.
template <int ROWS>
inline void add_low_rank(const AffineArgs& args, const float* rows, AffineBlock& block) {
  const int64_t dim = args.shape.value_dim, width = padded(dim);
  for (int64_t first = 0; first < args.rank; first += kTile) {
    const int64_t count = least(kTile, args.rank - first);
    product<ROWS>(rows, args.x.row, block.left + first * dim, dim, count, kTile, block.inner);
    weighted_sum<ROWS>(block.inner, block.right + first * width, count, width, block.rescale, block.sums);
  }
}

// Rows [begin, end) of one head: x + x @ left @ right + bias, in the output's dtype.
inline void affine_task(const AffineArgs& args, int64_t head, int64_t begin, int64_t end, void* scratch) {
  const int64_t dim = args.shape.value_dim, width = padded(dim), rank = args.rank;
  const int64_t b = head / args.shape.heads, h = head % args.shape.heads;
  Arena arena{static_cast<char*>(scratch)};
  AffineBlock block(arena, args);
  pack_matrix(args.left + head * dim * rank, dim, rank, block.left);
  std::memset(block.right, 0, rank * width * sizeof(float));
  for (int64_t r = 0; r < rank; r++) {
    std::memcpy(block.right + r * width, args.right + (head * rank + r) * dim, dim * sizeof(float));
  }
  for (int i = 0; i < kLanesMax; i++) block.rescale[i] = 1.0f;
  const float* x = head_of<float>(args.x, b, h);
  const float* bias = args.bias + head * dim;
  for (int64_t first = begin; first < end; first += kRowBlock) {
    const int64_t count = least(kRowBlock, end - first);
    for (int64_t i = 0; i < count; i++) {
      const float* row = x + (first + i) * args.x.row;
      for (int64_t d = 0; d < dim; d++) block.sums[i * width + d] = row[d] + bias[d];
      for (int64_t d = dim; d < width; d++) block.sums[i * width + d] = 0.0f;
    }
    with_rows(count, [&](auto rows) {
      add_low_rank<decltype(rows)::value>(args, x + first * args.x.row, block);
    });
    for (int64_t i = 0; i < count; i++) {
      narrow_to(block.sums + i * width, args.out, args.out_dtype, b, h, first + i, dim);
    }
  }
}

inline size_t affine_scratch(const AffineArgs& args) {
  Arena arena{nullptr};
  AffineBlock block(arena, args);
  return arena.used;
}

}  // namespace residua::RESIDUA_ISA
