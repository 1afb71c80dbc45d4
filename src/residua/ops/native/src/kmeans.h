// The nearest centre of every row, fused with the products: no [N, C] matrix exists.
#pragma once
#include "softmax_block.h"

namespace residua::RESIDUA_ISA {

constexpr int64_t kAssignRows = 16 * kRowBlock;  // rows whose running best stays in the first-level cache

struct AssignBlock {
  float *best, *index, *buffer, *centres, *offsets;

  AssignBlock(Arena& arena, const KmeansArgs& args) {
    const int64_t centres_padded = round_up(args.groups, kTile);
    best = arena.floats(kAssignRows * kLanes);
    index = arena.floats(kAssignRows * kLanes);
    buffer = arena.floats(kLanes * padded(args.rank));
    centres = arena.floats(centres_padded * args.rank);
    offsets = arena.floats(centres_padded);
  }
};

// |x|^2 is the same for every centre, so the nearest one has the largest x.c - |c|^2 / 2. Padding has -inf.
inline void pack_centres(const KmeansArgs& args, const float* centres, AssignBlock& block) {
  const float* rows[kTile];
  for (int64_t first = 0; first < args.groups; first += kTile) {
    const int64_t count = least(kTile, args.groups - first);
    for (int64_t c = 0; c < count; c++) rows[c] = centres + (first + c) * args.rank;
    pack_columns<FloatDot>(rows, count, args.rank, block.buffer, block.centres + first * args.rank);
    for (int64_t c = 0; c < kTile; c++) {
      float norm = 0.0f;
      for (int64_t r = 0; c < count && r < args.rank; r++) norm += rows[c][r] * rows[c][r];
      block.offsets[first + c] = c < count ? -0.5f * norm : -kInf;
    }
  }
}

// Compares ROWS rows with one panel of centres. Per lane the first of equal scores stays; indices are
// floats, exact below 2^24.
template <int ROWS, int VECTORS>
inline void compare_panel(const float* rows, const float* panel, const float* offsets, int64_t rank,
                          int64_t first, float* best, float* index) {
  alignas(kAlign) float lane[kLanesMax];
  Vec acc[ROWS][VECTORS];
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; i++) {
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) acc[i][j] = load(offsets + j * kLanes);
  }
  multiply<ROWS, VECTORS>(rows, rank, panel, rank, acc);
  for (int l = 0; l < kLanes; l++) lane[l] = static_cast<float>(first + l);
  const Vec start = load(lane);
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; i++) {
    Vec high = load(best + i * kLanes), at = load(index + i * kLanes);
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) {
      const Mask better = greater(acc[i][j], high);
      at = select(better, start + set1(static_cast<float>(j * kLanes)), at);
      high = max_or_second(acc[i][j], high);
    }
    store(best + i * kLanes, high);
    store(index + i * kLanes, at);
  }
}

// The lowest index among the lanes that hold the best score.
RESIDUA_INLINE int64_t winner(const float* best, const float* index) {
  const Vec high = load(best);
  const Vec top = set1(max_of(high));
  const Vec lowest = select(equal(high, top), set1(0.0f) - load(index), set1(-kInf));
  return static_cast<int64_t>(-max_of(lowest));
}

// Labels of `count` rows: every panel of centres meets all of them while it is in the cache.
inline void assign_rows(const KmeansArgs& args, const float* x, int64_t count, AssignBlock& block,
                        int64_t* labels) {
  for (int64_t i = 0; i < count * kLanes; i++) {
    block.best[i] = -kInf;
    block.index[i] = 0.0f;
  }
  for (int64_t first = 0; first < args.groups; first += kPanel) {
    const float* panel = block.centres + first * args.rank;
    const int64_t vectors = (least(kPanel, args.groups - first) + kLanes - 1) / kLanes;
    for (int64_t i = 0; i < count; i += kRowBlock) {
      with_rows(least(kRowBlock, count - i), [&](auto rows) {
        with_vectors(vectors, [&](auto n) {
          compare_panel<decltype(rows)::value, decltype(n)::value>(
              x + i * args.rank, panel, block.offsets + first, args.rank, first, block.best + i * kLanes,
              block.index + i * kLanes);
        });
      });
    }
  }
  for (int64_t i = 0; i < count; i++) labels[i] = winner(block.best + i * kLanes, block.index + i * kLanes);
}

// Rows [begin, end) of one head; those that are not valid get -1.
inline void assign_task(const KmeansArgs& args, int64_t head, int64_t begin, int64_t end, void* scratch) {
  Arena arena{static_cast<char*>(scratch)};
  AssignBlock block(arena, args);
  pack_centres(args, args.centres + head * args.groups * args.rank, block);
  const float* x = args.x + head * args.tokens * args.rank;
  int64_t* labels = args.labels + head * args.tokens;
  for (int64_t i = begin; i < end; i += kAssignRows) {
    assign_rows(args, x + i * args.rank, least(kAssignRows, end - i), block, labels + i);
  }
  for (int64_t i = begin; args.valid && i < end; i++) {
    if (!args.valid[head * args.tokens + i]) labels[i] = -1;
  }
}

inline size_t assign_scratch(const KmeansArgs& args) {
  Arena arena{nullptr};
  AssignBlock block(arena, args);
  return arena.used;
}

}  // namespace residua::RESIDUA_ISA
