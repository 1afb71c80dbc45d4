// The attention mass of every K/V group at every anchor, in logs, without ever holding all scores.
#pragma once
#include "softmax_block.h"

namespace residua::RESIDUA_ISA {

struct MassBlock {
  float *anchors, *top, *total, *buffer, *columns, *scores, *rescale;

  MassBlock(Arena& arena, const MassArgs& args) {
    const int64_t rows = args.shape.queries, dim = args.shape.dim;
    anchors = arena.floats(rows * dim);
    top = arena.floats(rows);
    total = arena.floats(rows);
    buffer = arena.floats(kLanes * padded(dim));
    columns = arena.floats(kTile * dim);
    scores = arena.floats(kRowBlock * kTile);
    rescale = arena.floats(kLanesMax);
  }
};

// Scores of a row block with `count` packed keys, computing no more vectors than the keys fill.
template <int ROWS>
inline void tile_scores(const float* left, const float* columns, int64_t count, int64_t dim, float* scores) {
  for (int64_t panel = 0; panel < count; panel += kPanel) {
    const int64_t vectors = (least(kPanel, count - panel) + kLanes - 1) / kLanes;
    const float* right = columns + panel * dim;
    with_vectors(vectors, [&](auto n) {
      panel_scores<ROWS, decltype(n)::value>(left, dim, right, dim, scores + panel);
    });
  }
  for (int i = 0; i < ROWS; i++) {
    for (int64_t t = count; t < round_up(count, kLanes); t++) scores[i * kTile + t] = -kInf;
  }
}

// Adds one tile of keys to the running log-sum-exp of every anchor.
inline void absorb_mass(const MassArgs& args, MassBlock& block, int64_t count, float slope) {
  const int64_t rows = args.shape.queries, dim = args.shape.dim;
  for (int64_t first = 0; first < rows; first += kRowBlock) {
    with_rows(least(kRowBlock, rows - first), [&](auto width) {
      constexpr int ROWS = decltype(width)::value;
      tile_scores<ROWS>(block.anchors + first * dim, block.columns, count, dim, block.scores);
      soften<ROWS>(block.scores, round_up(count, kLanes), slope, block.top + first, block.total + first,
                   block.rescale);
    });
  }
}

// The running log-sum-exp of every anchor over the `size` keys of one group -> block.top, block.total.
template <class T>
inline void mass_of_group(const MassArgs& args, MassBlock& block, const T* k, const int64_t* tokens,
                          int64_t size, float slope) {
  const T* keys[kTile];
  for (int64_t i = 0; i < args.shape.queries; i++) {
    block.top[i] = -kInf;
    block.total[i] = 0.0f;
  }
  for (int64_t first = 0; first < size; first += kTile) {
    const int64_t count = least(kTile, size - first);
    for (int64_t t = 0; t < count; t++) keys[t] = k + tokens[first + t] * args.k.row;
    pack_columns<FloatDot>(keys, count, args.shape.dim, block.buffer, block.columns);
    absorb_mass(args, block, count, slope);
  }
}

// A task covers `task_groups` K/V groups of one K/V head and every anchor of its query heads.
inline void mass_task(const MassArgs& args, int64_t task, void* scratch) {
  const Shape& s = args.shape;
  const int64_t groups = args.kv.groups, parts = (groups + args.task_groups - 1) / args.task_groups;
  const int64_t head = task / parts, begin = task % parts * args.task_groups;
  const int64_t end = least(groups, begin + args.task_groups);
  const int64_t* order = args.kv.order + head * args.kv.tokens;
  const int64_t* offsets = args.kv.offsets + head * (groups + 1);
  Arena arena{static_cast<char*>(scratch)};
  MassBlock block(arena, args);
  const float scale = positive_scale(args.scale), sign = scale_sign(args.scale);
  const float* anchors = args.anchors + head * s.queries * s.dim;
  for (int64_t i = 0; i < s.queries; i++) {
    for (int64_t d = 0; d < s.dim; d++) block.anchors[i * s.dim + d] = anchors[i * s.dim + d] * sign;
  }
  with_type(args.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const T* k = head_of<T>(args.k, head / s.kv_heads, head % s.kv_heads);
    for (int64_t g = begin; g < end; g++) {
      mass_of_group(args, block, k, order + offsets[g], offsets[g + 1] - offsets[g], scale * 1.44269504f);
      float* out = args.mass + head * s.queries * groups + g;
      for (int64_t i = 0; i < s.queries; i++) {
        const float top = block.top[i];
        const bool single = std::isinf(top) && (top > 0.0f || block.total[i] == 0.0f);
        out[i * groups] = single ? top : top * scale + std::log(block.total[i]);
      }
    }
  });
}

inline size_t mass_scratch(const MassArgs& args) {
  Arena arena{nullptr};
  MassBlock block(arena, args);
  return arena.used;
}

}  // namespace residua::RESIDUA_ISA
