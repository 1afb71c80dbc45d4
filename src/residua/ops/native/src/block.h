// Register-blocked products and the running softmax: the inner loops of every kernel.
#pragma once
#include "dot.h"

namespace residua::RESIDUA_ISA {

template <int N>
struct Count {
  static constexpr int value = N;
};

// Calls f(Count<vectors>{}) for 1 .. kPanelVectors vectors.
template <class F>
RESIDUA_INLINE void with_vectors(int64_t vectors, F&& f) {
  static_assert(kPanelVectors == 2 || kPanelVectors == 4, "one case per width");
  if constexpr (kPanelVectors == 4) {
    if (vectors == 4) return f(Count<4>{});
    if (vectors == 3) return f(Count<3>{});
  }
  if (vectors == 2) return f(Count<2>{});
  f(Count<1>{});
}

// Calls f(Count<rows>{}) for a row block of 1 .. kRowBlock rows.
template <class F>
RESIDUA_INLINE void with_rows(int64_t rows, F&& f) {
  static_assert(kRowBlock == 6, "one case per width");
  switch (rows) {
    case 1: f(Count<1>{}); break;
    case 2: f(Count<2>{}); break;
    case 3: f(Count<3>{}); break;
    case 4: f(Count<4>{}); break;
    case 5: f(Count<5>{}); break;
    default: f(Count<6>{}); break;
  }
}

// acc[i][j] += sum_d left[i][d] * right[d][j]: rows of `left` are `stride` apart, `right` is one panel.
template <int ROWS, int VECTORS, class Dot = FloatDot>
RESIDUA_INLINE void multiply(const float* left, int64_t stride, const float* right, int64_t dim,
                             Vec (&acc)[ROWS][VECTORS]) {
#pragma GCC unroll 4
  for (int64_t d = 0; d < dim; d++) {
    Vec b[VECTORS];
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) b[j] = load(right + d * kPanel + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) {
      Vec a = set1(left[i * stride + d]);
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS; j++) acc[i][j] = Dot::step(a, b[j], acc[i][j]);
    }
  }
}

template <int ROWS, int VECTORS>
RESIDUA_INLINE void clear(Vec (&acc)[ROWS][VECTORS]) {
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; i++) {
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) acc[i][j] = set1(0.0f);
  }
}

// Products of a row block with one panel -> scores [ROWS][STRIDE], `scores` pointing at the panel's columns.
template <int ROWS, int VECTORS, class Dot = FloatDot, int STRIDE = kTile>
inline void panel_scores(const float* left, int64_t stride, const float* right, int64_t dim, float* scores) {
  Vec acc[ROWS][VECTORS];
  clear(acc);
  multiply<ROWS, VECTORS, Dot>(left, stride, right, dim, acc);
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; i++) {
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) store(scores + i * STRIDE + j * kLanes, acc[i][j]);
  }
}

// out[i] = out[i] * rescale[i] + sum_t weights[i][t] * rows[t], for VECTORS vectors of columns. Each call starts
// from zero, so that rounding grows with the tile, not with the sequence.
template <int ROWS, int VECTORS, class Dot>
inline void weighted_rows(const float* weights, const float* rows, int64_t count, int64_t width,
                          const float* rescale, float* out) {
  Vec acc[ROWS][VECTORS];
  clear(acc);
#pragma GCC unroll 4
  for (int64_t t = 0; t < count; t++) {
    Vec b[VECTORS];
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) b[j] = load(rows + t * width + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) {
      Vec a = set1(weights[i * kTile + t]);
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS; j++) acc[i][j] = Dot::step(a, b[j], acc[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; i++) {
    Vec factor = set1(rescale[i]);
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) {
      float* to = out + i * width + j * kLanes;
      store(to, fma(load(to), factor, acc[i][j]));
    }
  }
}

// All columns of `weighted_rows`, in even chunks of at most kPanelVectors vectors.
template <int ROWS, class Dot = FloatDot>
inline void weighted_sum(const float* weights, const float* rows, int64_t count, int64_t width,
                         const float* rescale, float* out) {
  int64_t left = width / kLanes;
  int64_t chunks = (left + kPanelVectors - 1) / kPanelVectors;
  for (int64_t column = 0; left > 0; chunks--) {
    const int64_t vectors = (left + chunks - 1) / chunks;
    const float* from = rows + column;
    float* to = out + column;
    with_vectors(vectors, [&](auto n) {
      weighted_rows<ROWS, decltype(n)::value, Dot>(weights, from, count, width, rescale, to);
    });
    column += vectors * kLanes;
    left -= vectors;
  }
}

// One step of the running softmax for ROWS rows. The first `columns` scores of each row, a whole number of
// vectors, become weights 2^((s - top) * slope), `top` and `total` advance, and `rescale` is what earlier
// results must be multiplied with.
//
// `top` never becomes NaN: a NaN score poisons the total instead. While every score is -inf, `top` is -inf
// and 0 is subtracted in its place.
template <int ROWS>
RESIDUA_INLINE void soften(float* scores, int64_t columns, float slope, float* top, float* total,
                           float* rescale) {
  constexpr int kSlots = kLanesMax;
  alignas(kAlign) float shift[kSlots], past[kSlots] = {};
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; i++) {  // the new maximum, and how far the old one was below it
    Vec high = set1(-kInf);
    for (int64_t j = 0; j < columns; j += kLanes) high = max_or_second(load(scores + i * kTile + j), high);
    float peak = max_of(high);
    peak = peak > top[i] ? peak : top[i];
    shift[i] = peak == -kInf ? 0.0f : peak;
    past[i] = top[i] - shift[i];
    top[i] = peak;
  }
  const Vec factor = set1(slope);
  for (int i = 0; i < ROWS; i += kLanes) store(rescale + i, exp2_of(load(past + i) * factor));
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; i++) {  // weights, and the new total
    const Vec base = set1(shift[i]);
    Vec sum = set1(0.0f);
#pragma GCC unroll 4
    for (int64_t j = 0; j < columns; j += kLanes) {
      Vec weight = exp2_of((load(scores + i * kTile + j) - base) * factor);
      store(scores + i * kTile + j, weight);
      sum = sum + weight;
    }
    total[i] = total[i] * rescale[i] + sum_of(sum);
  }
}

}  // namespace residua::RESIDUA_ISA
