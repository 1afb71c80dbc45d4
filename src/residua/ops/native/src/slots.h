// Softmax-weighted means of the keys and values of the K/V groups that share a slot, at every anchor.
#pragma once
#include "softmax_block.h"

#include <algorithm>

namespace residua::RESIDUA_ISA {

constexpr int64_t kSlotKeys = 2 * kTile;  // packed at once: most groups are not cut
constexpr int64_t kLineFloats = kAlign / sizeof(float);

struct SlotBlock {
  int64_t key_width, width;  // padded: keys, keys and values
  float *anchors, *buffer, *columns, *rows, *weights;

  SlotBlock(Arena& arena, const Shape& shape, int64_t count)
      : key_width(padded(shape.dim)), width(key_width + padded(shape.value_dim)) {
    anchors = arena.floats(count * shape.dim);
    buffer = arena.floats(kLanes * key_width);
    columns = arena.floats(kSlotKeys * shape.dim);
    rows = arena.floats(kSlotKeys * width);
    weights = arena.floats(kRowBlock * kSlotKeys);
  }
};

// Groups in the order in which they are visited, sorted by `near`: those that share a slot follow each other,
// so that its sums stay in the near caches meanwhile.
inline void visiting_order(const int64_t* near, int64_t groups, int64_t* visit) {
  for (int64_t g = 0; g < groups; g++) visit[g] = (near ? near[g] * groups : 0) + g;
  if (near) std::sort(visit, visit + groups);
  for (int64_t g = 0; g < groups; g++) visit[g] %= groups;
}

// Keys of one K/V group, at most kSlotKeys, cut evenly.
struct SlotStretch {
  int64_t place = -1, group = -1, begin = 0, end = 0;

  // Moves on to the next stretch that has keys; false after the last one.
  bool advance(const int64_t* visit, const int64_t* offsets, int64_t groups) {
    while (group < 0 || end == offsets[group + 1]) {
      if (++place == groups) return false;
      group = visit[place];
      end = offsets[group];
    }
    begin = end;
    const int64_t left = offsets[group + 1] - begin;
    end = begin + left / ((left + kSlotKeys - 1) / kSlotKeys);
    return true;
  }
};

// One anchor's part in a group: the log-mass of its slot, and where the sums go.
struct SlotTarget {
  float log_mass;
  float *key, *value;
};

// to[i] += sum_t weights[i][t] * rows[t], for VECTORS vectors of columns of which `columns` floats count.
template <int ROWS, int VECTORS>
inline void add_weighted_rows(const float* weights, const float* rows, int64_t count, int64_t width,
                              int64_t columns, float* const (&to)[ROWS]) {
  Vec acc[ROWS][VECTORS];
  clear(acc);
#pragma GCC unroll 4
  for (int64_t t = 0; t < count; t++) {
    Vec b[VECTORS];
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) b[j] = load(rows + t * width + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) {
      Vec a = set1(weights[i * kSlotKeys + t]);
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS; j++) acc[i][j] = fma(a, b[j], acc[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; i++) {
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) {
      alignas(kAlign) float part[kLanes];
      float* sum = to[i] + j * kLanes;
      if ((j + 1) * kLanes <= columns) {
        store(sum, load(sum) + acc[i][j]);
      } else {
        store(part, acc[i][j]);
        for (int64_t d = 0; d < columns - j * kLanes; d++) sum[d] += part[d];
      }
    }
  }
}

// All `dim` columns, in even chunks of at most kPanelVectors vectors.
template <int ROWS>
inline void add_weighted(const float* weights, const float* rows, int64_t count, int64_t width, int64_t dim,
                         float* const (&to)[ROWS]) {
  int64_t left = (dim + kLanes - 1) / kLanes;
  int64_t chunks = (left + kPanelVectors - 1) / kPanelVectors;
  float* here[ROWS];
  for (int64_t column = 0; left > 0; chunks--) {
    const int64_t vectors = (left + chunks - 1) / chunks;
    for (int i = 0; i < ROWS; i++) here[i] = to[i] + column;
    with_vectors(vectors, [&](auto n) {
      add_weighted_rows<ROWS, decltype(n)::value>(weights, rows + column, count, width, dim - column, here);
    });
    column += vectors * kLanes;
    left -= vectors;
  }
}

// Scores of ROWS anchors with `count` packed keys become weights exp(scale * score - log_mass), at most 1: the
// power is at most 0 but for rounding, which huge scores make large. NaN stays NaN.
template <int ROWS>
inline void slot_weights(const SlotsArgs& args, const float* anchors, const SlotTarget* targets,
                         int64_t count, SlotBlock& block) {
  const int64_t dim = args.shape.dim;
  for (int64_t panel = 0; panel < count; panel += kPanel) {
    const float* right = block.columns + panel * dim;
    with_vectors((least(kPanel, count - panel) + kLanes - 1) / kLanes, [&](auto n) {
      panel_scores<ROWS, decltype(n)::value, FloatDot, kSlotKeys>(anchors, dim, right, dim,
                                                                 block.weights + panel);
    });
  }
  const Vec scale = set1(args.scale), log2e = set1(1.44269504f), zero = set1(0.0f);
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; i++) {
    const Vec mass = set1(-targets[i].log_mass);
    for (int64_t t = 0; t < count; t += kLanes) {
      float* at = block.weights + i * kSlotKeys + t;
      const Vec power = fma(load(at), scale, mass) * log2e;
      store(at, exp2_of(select(greater(power, zero), zero, power)));
    }
  }
}

// ROWS anchors meet one stretch of keys: weights, then weighted keys and values onto the sums of their slots.
template <int ROWS>
inline void add_to_slots(const SlotsArgs& args, const float* anchors, const SlotTarget* targets,
                         int64_t count, SlotBlock& block) {
  const Shape& s = args.shape;
  float *keys[ROWS], *values[ROWS];
  for (int i = 0; i < ROWS; i++) {
    keys[i] = targets[i].key;
    values[i] = targets[i].value;
    // The sums of all slots are too many for the near caches; they arrive while the scores are computed.
    for (int64_t d = 0; d < s.dim; d += kLineFloats) __builtin_prefetch(keys[i] + d, 1, 2);
    for (int64_t d = 0; d < s.value_dim; d += kLineFloats) __builtin_prefetch(values[i] + d, 1, 2);
  }
  slot_weights<ROWS>(args, anchors, targets, count, block);
  add_weighted<ROWS>(block.weights, block.rows, count, block.width, s.dim, keys);
  add_weighted<ROWS>(block.weights, block.rows + block.key_width, count, block.width, s.value_dim, values);
}

// The anchors [begin, end) of one K/V head that have a slot in the group, side by side in block.anchors, and
// their targets. How many they are.
inline int64_t gather_anchors(const SlotsArgs& args, int64_t head, int64_t begin, int64_t end, int64_t group,
                              SlotTarget* targets, SlotBlock& block) {
  const Shape& s = args.shape;
  int64_t count = 0;
  for (int64_t a = head * s.queries + begin; a < head * s.queries + end; a++) {
    const int64_t slot = args.slots[a * args.kv.groups + group];
    if (slot < 0) continue;
    const int64_t at = a * args.count + slot;
    std::memcpy(block.anchors + count * s.dim, args.anchors + a * s.dim, s.dim * sizeof(float));
    targets[count++] = {args.log_mass[at], args.keys + at * s.dim, args.values + at * s.value_dim};
  }
  return count;
}

// The keys of a stretch as the right operand of the scores, and keys and values as rows to be summed.
template <class T>
inline void pack_stretch(const SlotsArgs& args, const T* k, const T* v, const int64_t* tokens, int64_t count,
                         SlotBlock& block) {
  const T* keys[kSlotKeys];
  for (int64_t t = 0; t < count; t++) keys[t] = k + tokens[t] * args.k.row;
  pack_columns<FloatDot>(keys, count, args.shape.dim, block.buffer, block.columns);
  for (int64_t t = 0; t < count; t++) {
    float* row = block.rows + t * block.width;
    widen(keys[t], row, args.shape.dim);
    for (int64_t d = args.shape.dim; d < block.key_width; d++) row[d] = 0.0f;
    row += block.key_width;
    widen(v + tokens[t] * args.v.row, row, args.shape.value_dim);
    for (int64_t d = args.shape.value_dim; d < block.width - block.key_width; d++) row[d] = 0.0f;
  }
}

// Anchors [begin, end) of the query heads of one K/V head. An anchor's sums do not depend on which others
// share its task or its row block: each has accumulators of its own, and all add in the same order.
template <class T>
inline void slots_of_anchors(const SlotsArgs& args, int64_t head, int64_t begin, int64_t end, Arena& arena) {
  const Shape& s = args.shape;
  const int64_t* order = args.kv.order + head * args.kv.tokens;
  const int64_t* offsets = args.kv.offsets + head * (args.kv.groups + 1);
  const T* k = head_of<T>(args.k, head / s.kv_heads, head % s.kv_heads);
  const T* v = head_of<T>(args.v, head / s.kv_heads, head % s.kv_heads);
  SlotBlock block(arena, s, end - begin);
  SlotTarget* targets = arena.many<SlotTarget>(end - begin);
  int64_t* visit = arena.many<int64_t>(args.kv.groups);
  visiting_order(args.near ? args.near + head * args.kv.groups : nullptr, args.kv.groups, visit);
  int64_t active = 0, gathered = -1;
  SlotStretch now, next;
  for (bool more = next.advance(visit, offsets, args.kv.groups); more;) {
    now = next;
    if (now.group != gathered) {
      active = gather_anchors(args, head, begin, end, now.group, targets, block);
      gathered = now.group;
    }
    more = next.advance(visit, offsets, args.kv.groups);
    if (!active) continue;
    Prefetch ahead;
    for (int64_t t = next.begin; more && t < next.end; t++) {
      ahead.add(k + order[t] * args.k.row, s.dim * sizeof(T));
      ahead.add(v + order[t] * args.v.row, s.value_dim * sizeof(T));
    }
    const int64_t count = now.end - now.begin, rows_per_step = ahead.count * kRowBlock / active + 1;
    pack_stretch(args, k, v, order + now.begin, count, block);
    for (int64_t first = 0; first < active; first += kRowBlock) {
      ahead.advance(rows_per_step);
      with_rows(least(kRowBlock, active - first), [&](auto n) {
        add_to_slots<decltype(n)::value>(args, block.anchors + first * s.dim, targets + first, count, block);
      });
    }
  }
}

// The log-weight with which each key has its slot's mass at the anchor.
inline void weigh_slots(const SlotsArgs& args, int64_t head, int64_t begin, int64_t end) {
  const int64_t dim = args.shape.dim;
  for (int64_t a = head * args.shape.queries + begin; a < head * args.shape.queries + end; a++) {
    const float* anchor = args.anchors + a * dim;
    for (int64_t t = a * args.count; t < (a + 1) * args.count; t++) {
      const float* key = args.keys + t * dim;
      Vec products = set1(0.0f);
      int64_t d = 0;
      for (; d + kLanes <= dim; d += kLanes) products = fma(load(anchor + d), load(key + d), products);
      float score = sum_of(products);
      for (; d < dim; d++) score += anchor[d] * key[d];
      args.weight[t] = args.log_mass[t] - args.scale * score;
    }
  }
}

// One task: the sums of all slots of anchors [begin, end) of one K/V head, and the log-weights of their keys.
inline void slots_task(const SlotsArgs& args, int64_t head, int64_t begin, int64_t end, void* scratch) {
  const Shape& s = args.shape;
  const int64_t first = (head * s.queries + begin) * args.count, count = (end - begin) * args.count;
  std::memset(args.keys + first * s.dim, 0, count * s.dim * sizeof(float));
  std::memset(args.values + first * s.value_dim, 0, count * s.value_dim * sizeof(float));
  Arena arena{static_cast<char*>(scratch)};
  with_type(args.dtype, [&](auto* type) {
    slots_of_anchors<std::remove_pointer_t<decltype(type)>>(args, head, begin, end, arena);
  });
  if (args.weight) weigh_slots(args, head, begin, end);
}

inline size_t slots_scratch(const SlotsArgs& args, int64_t anchors) {
  Arena arena{nullptr};
  SlotBlock block(arena, args.shape, anchors);
  arena.many<SlotTarget>(anchors);
  arena.many<int64_t>(args.kv.groups);
  return arena.used;
}

}  // namespace residua::RESIDUA_ISA
