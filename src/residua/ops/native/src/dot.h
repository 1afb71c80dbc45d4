// What a product is made of. FloatDot multiplies floats. PairDot multiplies pairs of bfloat16, two per 32-bit
// word, and adds both products to a float: half the steps, where the processor has the instruction. Words are
// carried in float arrays and only ever moved, so the loops around them are the same.
#pragma once
#include "pack.h"

namespace residua::RESIDUA_ISA {

struct FloatDot {
  static constexpr int kPack = 1;  // elements per word

  static RESIDUA_INLINE Vec step(Vec a, Vec b, Vec sum) { return fma(a, b, sum); }

  template <class T>
  static void fill(const T* row, int64_t dim, float* words) {
    widen(row, words, dim);
  }

  // A row that already lies in memory as its words.
  static const float* in_place(const float* row, int64_t) { return row; }
  static const float* in_place(const void*, int64_t) { return nullptr; }

  template <int ROWS>
  static void pack_weights(float*) {}

  // Rows as they are: [count][padded(dim)], zeros in the padding.
  template <class T>
  static void pack_rows(const T* const* rows, int64_t count, int64_t dim, float* tile) {
    const int64_t width = padded(dim);
    for (int64_t i = 0; i < count; i++) {
      widen(rows[i], tile + i * width, dim);
      for (int64_t d = dim; d < width; d++) tile[i * width + d] = 0.0f;
    }
  }
};

#if defined(RESIDUA_BF16)
struct PairDot {
  static constexpr int kPack = 2;

  static RESIDUA_INLINE Vec step(Vec a, Vec b, Vec sum) {
    return {_mm512_dpbf16_ps(sum.v, (__m512bh)a.v, (__m512bh)b.v)};
  }

  static void fill(const BFloat* row, int64_t dim, float* words) {
    if (dim % 2) words[dim / 2] = 0.0f;
    std::memcpy(words, row, dim * sizeof(BFloat));
  }

  static const float* in_place(const BFloat* row, int64_t dim) {
    return dim % 2 ? nullptr : reinterpret_cast<const float*>(row);
  }

  // Weights [ROWS][kTile] become pairs at the start of each row.
  template <int ROWS>
  static RESIDUA_INLINE void pack_weights(float* weights) {
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++, weights += kTile) {
      for (int j = 0; j < kTile; j += 2 * kLanes) {
        const __m512bh pairs = _mm512_cvtne2ps_pbh(load(weights + j + kLanes).v, load(weights + j).v);
        store(weights + j / 2, {(__m512)pairs});
      }
    }
  }

  // Two rows in the halves of each word: [(count + 1) / 2][padded(dim)].
  static void pack_rows(const BFloat* const* rows, int64_t count, int64_t dim, float* tile) {
    const int64_t width = padded(dim);
    for (int64_t i = 0; i < count; i += 2, tile += width) {
      const bool alone = i + 1 == count;
      const BFloat *low = rows[i], *high = rows[alone ? i : i + 1];
      const uint32_t mask = alone ? 0u : 0xffff0000u;
      for (int64_t d = 0; d < dim; d++) {
        const uint32_t word = low[d].bits | ((static_cast<uint32_t>(high[d].bits) << 16) & mask);
        std::memcpy(tile + d, &word, sizeof word);
      }
      for (int64_t d = dim; d < width; d++) tile[d] = 0.0f;
    }
  }
};
#endif

template <class Dot>
RESIDUA_INLINE constexpr int64_t words(int64_t elements) {
  return (elements + Dot::kPack - 1) / Dot::kPack;
}

// Up to kTile rows as the right operand, transposed: panels of kPanel columns, [panel][words][kPanel].
// Missing columns of the last panel are zero. `rows[i]` is the i-th row, `buffer` holds kLanes padded rows.
template <class Dot, class T>
inline void pack_columns(const T* const* rows, int64_t count, int64_t dim, float* buffer, float* tile) {
  const int64_t depth = words<Dot>(dim), width = padded(depth);
  for (int64_t first = 0; first < round_up(count, kPanel); first += kLanes) {
    const float* ready[kLanes];
    const bool whole = depth % kLanes == 0 && first + kLanes <= count;
    for (int64_t i = 0; i < kLanes; i++) {
      ready[i] = whole ? Dot::in_place(rows[first + i], dim) : nullptr;
      if (ready[i]) continue;
      float* row = buffer + i * width;
      const int64_t filled = first + i < count ? depth : 0;
      if (filled) Dot::fill(rows[first + i], dim, row);
      std::memset(row + filled, 0, (width - filled) * sizeof(float));
      ready[i] = row;
    }
    transpose_rows(ready, depth, tile + first / kPanel * kPanel * depth + first % kPanel);
  }
}

}  // namespace residua::RESIDUA_ISA
