// AVX2 + FMA + F16C: 8 lanes, 16 registers.
#pragma once
#include <immintrin.h>

namespace residua::RESIDUA_ISA {

constexpr int kLanes = 8;
constexpr int kRowBlock = 6;
constexpr int kPanelVectors = 2;  // 6 x 2 accumulators + 2 operands + 1 broadcast of 16 registers
constexpr float kExp2Min = -127.0f;  // exponent field 0: multiplies by zero

struct Vec {
  __m256 v;
};
using Mask = __m256;

RESIDUA_INLINE Vec set1(float x) { return {_mm256_set1_ps(x)}; }
RESIDUA_INLINE Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
RESIDUA_INLINE void store(float* p, Vec a) { _mm256_storeu_ps(p, a.v); }
RESIDUA_INLINE Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
RESIDUA_INLINE Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
RESIDUA_INLINE Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
RESIDUA_INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
// The larger one; the second if either is NaN.
RESIDUA_INLINE Vec max_or_second(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
RESIDUA_INLINE Mask greater(Vec a, Vec b) { return _mm256_cmp_ps(a.v, b.v, _CMP_GT_OQ); }
RESIDUA_INLINE Mask equal(Vec a, Vec b) { return _mm256_cmp_ps(a.v, b.v, _CMP_EQ_OQ); }
RESIDUA_INLINE Vec select(Mask m, Vec yes, Vec no) { return {_mm256_blendv_ps(no.v, yes.v, m)}; }
RESIDUA_INLINE Vec round_even(Vec a) {
  return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
RESIDUA_INLINE Vec times_two_to(Vec a, Vec whole) {
  __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(whole.v), _mm256_set1_epi32(127));
  return {_mm256_mul_ps(a.v, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)))};
}
RESIDUA_INLINE float sum_of(Vec a) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}
RESIDUA_INLINE float max_of(Vec a) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
}

// Rows become columns, in registers.
RESIDUA_INLINE void transpose(Vec (&rows)[kLanes]) {
  __m256 t[8], u[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(rows[i].v, rows[i + 1].v);
    t[i + 1] = _mm256_unpackhi_ps(rows[i].v, rows[i + 1].v);
  }
  for (int i = 0; i < 8; i += 4) {
    u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; i++) {
    rows[i].v = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
    rows[i + 4].v = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
  }
}

RESIDUA_INLINE Vec load_half(const Half* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
RESIDUA_INLINE void store_half(Half* p, Vec a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}

}  // namespace residua::RESIDUA_ISA
