// Products of many small matrices, one by one: what a product is does not depend on those beside it.
#pragma once
#include "softmax_block.h"

namespace residua::RESIDUA_ISA {

struct MatmulBlock {
  float *panel, *buffer, *block;

  MatmulBlock(Arena& arena, int64_t inner)
      : panel(arena.floats(inner * kPanel)), buffer(arena.floats(kLanes * padded(inner))),
        block(arena.floats(kRowBlock * kTile)) {}
};

// Columns [first, first + used) of the right matrix as one panel [inner][kPanel], zeros behind them.
inline void pack_right(const MatmulArgs& args, const float* y, int64_t first, int64_t used, MatmulBlock& at) {
  const int64_t inner = args.inner;
  if (args.transposed) {
    const float* rows[kPanel];
    for (int64_t c = 0; c < used; c++) rows[c] = y + (first + c) * inner;
    return pack_columns<FloatDot>(rows, used, inner, at.buffer, at.panel);
  }
  for (int64_t d = 0; d < inner; d++) {
    float* to = at.panel + d * kPanel;
    std::memcpy(to, y + d * args.columns + first, used * sizeof(float));
    std::memset(to + used, 0, (kPanel - used) * sizeof(float));
  }
}

// Columns [begin, end) of one product.
inline void matmul_task(const MatmulArgs& args, int64_t matrix, int64_t begin, int64_t end, void* scratch) {
  const int64_t inner = args.inner, columns = args.columns;
  const float *x = args.x + matrix * args.rows * inner, *y = args.y + matrix * inner * columns;
  float* out = args.out + matrix * args.rows * columns;
  Arena arena{static_cast<char*>(scratch)};
  MatmulBlock at(arena, inner);
  for (int64_t first = begin; first < end; first += kPanel) {
    const int64_t used = least(kPanel, end - first);
    pack_right(args, y, first, used, at);
    for (int64_t i = 0; i < args.rows; i += kRowBlock) {
      const int64_t count = least(kRowBlock, args.rows - i);
      with_rows(count, [&](auto rows) {
        with_vectors((used + kLanes - 1) / kLanes, [&](auto vectors) {
          panel_scores<decltype(rows)::value, decltype(vectors)::value>(x + i * inner, inner, at.panel, inner,
                                                                        at.block);
        });
      });
      for (int64_t r = 0; r < count; r++) {
        std::memcpy(out + (i + r) * columns + first, at.block + r * kTile, used * sizeof(float));
      }
    }
  }
}

inline size_t matmul_scratch(const MatmulArgs& args) {
  Arena arena{nullptr};
  MatmulBlock block(arena, args.inner);
  return arena.used;
}

}  // namespace residua::RESIDUA_ISA
