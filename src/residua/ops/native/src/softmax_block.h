// A block of query rows that absorbs keys tile by tile: attention with a running softmax.
#pragma once
#include "block.h"

namespace residua::RESIDUA_ISA {

// Hands out aligned pieces of one scratch allocation; with a null base it only measures.
struct Arena {
  char* base;
  size_t used = 0;

  float* floats(int64_t count) {
    float* piece = base ? reinterpret_cast<float*>(base + used) : nullptr;
    used += round_up(count * sizeof(float), kAlign);
    return piece;
  }
  double* doubles(int64_t count) { return reinterpret_cast<double*>(floats(2 * count)); }
  template <class T>
  T* many(int64_t count) {
    return reinterpret_cast<T*>(floats(count * (sizeof(T) / sizeof(float))));
  }
};

// Running state that blocks with different kinds of products can share.
struct RunningSoftmax {
  float *out, *top, *total;  // [rows][width], [rows], [rows]

  RunningSoftmax() = default;
  RunningSoftmax(Arena& arena, int64_t rows, int64_t width)
      : out(arena.floats(rows * width)), top(arena.floats(rows)), total(arena.floats(rows)) {}

  void reset(int64_t rows, int64_t width) {
    std::memset(out, 0, rows * width * sizeof(float));
    std::memset(total, 0, rows * sizeof(float));
    for (int64_t i = 0; i < rows; i++) top[i] = -kInf;
  }

  // Divides row i by its total and gives its natural log-sum-exp. Scores that were all -inf give 0 / 0 = NaN,
  // as a dense softmax does.
  float finish(int64_t i, int64_t width, float scale) {
    const Vec factor = set1(1.0f / total[i]);
    float* row = out + i * width;
    for (int64_t d = 0; d < width; d += kLanes) store(row + d, load(row + d) * factor);
    return top[i] == -kInf && total[i] == 0.0f ? -kInf : top[i] * scale + std::log(total[i]);
  }
};

// The softmax needs a positive slope, so a scale's sign (or its being 0) goes into the queries.
inline float positive_scale(float scale) { return scale == 0.0f ? 1.0f : std::fabs(scale); }
inline float scale_sign(float scale) { return scale > 0.0f ? 1.0f : scale < 0.0f ? -1.0f : 0.0f; }

// Rows that the next tile will read, fetched into the second-level cache while this one is computed: rows of
// a group are scattered over memory, and no hardware guesses them.
struct Prefetch {
  const char* rows[4 * kTile];
  int64_t bytes[4 * kTile];
  int64_t count = 0, done = 0;

  void add(const void* row, int64_t size) {
    rows[count] = static_cast<const char*>(row);
    bytes[count++] = size;
  }

  RESIDUA_INLINE void advance(int64_t steps) {
    for (; steps > 0 && done < count; steps--, done++) {
      for (int64_t i = 0; i < bytes[done]; i += kAlign) __builtin_prefetch(rows[done] + i, 0, 2);
    }
  }
};

// A second state that absorbs only some of the keys: those that `mask` [rows][kTile] names in the current tile.
struct Split {
  RunningSoftmax state;
  uint8_t* mask;
  float *scores, *rescale;

  Split(Arena& arena, int64_t rows)
      : mask(reinterpret_cast<uint8_t*>(arena.floats(rows * kTile / 4))),
        scores(arena.floats(kRowBlock * kTile)), rescale(arena.floats(kLanesMax)) {}
};

template <class Dot>
struct SoftmaxBlock {
  int64_t rows, dim, depth, width;  // depth: words of a query; width: padded value dim
  float slope;                      // scale * log2(e), positive
  RunningSoftmax state;
  Split* split = nullptr;
  float *q, *buffer, *columns, *values, *scores, *rescale;

  SoftmaxBlock(Arena& arena, int64_t rows, int64_t dim, int64_t value_dim, float scale, RunningSoftmax state)
      : rows(rows), dim(dim), depth(words<Dot>(dim)), width(padded(value_dim)),
        slope(positive_scale(scale) * 1.44269504f), state(state) {
    q = arena.floats(rows * depth);
    buffer = arena.floats(kLanes * padded(depth));
    columns = arena.floats(kTile * depth);
    values = arena.floats(words<Dot>(kTile) * width);
    scores = arena.floats(kRowBlock * kTile);
    rescale = arena.floats(kLanesMax);
  }

  // Row `index` of the block becomes `row`, times a sign of -1, 0 or 1.
  template <class T>
  void set_query(int64_t index, const T* row, float sign) {
    Dot::fill(row, dim, q + index * depth);
    if constexpr (Dot::kPack == 1) {
      for (int64_t d = 0; sign != 1.0f && d < dim; d++) q[index * depth + d] *= sign;
    }
  }

  // One tile of at most kTile keys and values: packed once, then met by every row of the block. `bias` [kTile] is
  // added to the raw scores; `next` is prefetched meanwhile. Common head dims get loops of a fixed length.
  template <class T>
  void absorb(const T* const* keys, const T* const* value_rows, int64_t count, int64_t value_dim,
              const float* bias, Prefetch* next) {
    pack_columns<Dot>(keys, count, dim, buffer, columns);
    Dot::pack_rows(value_rows, count, value_dim, values);
    switch (dim) {
      case 64: absorb_tile<words<Dot>(64)>(count, bias, next); break;
      case 96: absorb_tile<words<Dot>(96)>(count, bias, next); break;
      case 128: absorb_tile<words<Dot>(128)>(count, bias, next); break;
      default: absorb_tile<0>(count, bias, next); break;
    }
  }

  // Absorbs `count` packed keys; `bias` [kTile] is added to the raw scores.
  template <int DEPTH>
  void absorb_tile(int64_t count, const float* bias, Prefetch* next) {
    const int64_t rows_per_step = next ? next->count * kRowBlock / rows + 1 : 0;
    int64_t first = 0;
    for (; first + kRowBlock <= rows; first += kRowBlock) {
      if (next) next->advance(rows_per_step);
      absorb_rows<DEPTH, kRowBlock>(first, count, bias);
    }
    if (first == rows) return;
    with_rows(rows - first, [&](auto rest) { absorb_rows<0, decltype(rest)::value>(first, count, bias); });
  }

  // ROWS rows: score, mask, online softmax, weighted values.
  template <int DEPTH, int ROWS>
  void absorb_rows(int64_t first, int64_t count, const float* bias) {
    const int64_t deep = DEPTH ? DEPTH : depth;
    for (int64_t panel = 0; panel < count; panel += kPanel) {
      panel_scores<ROWS, kPanelVectors, Dot>(q + first * deep, deep, columns + panel * deep, deep,
                                             scores + panel);
    }
    if (bias || count < kTile) finish_scores<ROWS>(count, bias);
    if (split) absorb_split<ROWS>(first, count);
    soften<ROWS>(scores, kTile, slope, state.top + first, state.total + first, rescale);
    Dot::template pack_weights<ROWS>(scores);
    weighted_sum<ROWS, Dot>(scores, values, words<Dot>(count), width, rescale, state.out + first * width);
  }

  // The same scores once more, for the state that sees only the keys of the mask.
  template <int ROWS>
  void absorb_split(int64_t first, int64_t count) {
    const uint8_t* mask = split->mask + first * kTile;
    uint8_t any = 0;
    for (int i = 0; i < ROWS * kTile; i++) any |= mask[i];
    if (!any) return;
    for (int i = 0; i < ROWS * kTile; i++) split->scores[i] = mask[i] ? scores[i] : -kInf;
    RunningSoftmax& part = split->state;
    soften<ROWS>(split->scores, kTile, slope, part.top + first, part.total + first, split->rescale);
    Dot::template pack_weights<ROWS>(split->scores);
    weighted_sum<ROWS, Dot>(split->scores, values, words<Dot>(count), width, split->rescale,
                            part.out + first * width);
  }

  // Adds the bias, and switches off what is behind the last key.
  template <int ROWS>
  void finish_scores(int64_t count, const float* bias) {
    for (int i = 0; i < ROWS; i++) {
      float* row = scores + i * kTile;
      for (int64_t t = 0; bias && t < count; t++) row[t] += bias[t];
      for (int64_t t = count; t < kTile; t++) row[t] = -kInf;
    }
  }
};

}  // namespace residua::RESIDUA_ISA
