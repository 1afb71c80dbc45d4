// AVX-512 F/BW/DQ/VL: 16 lanes, 32 registers.
#pragma once
#include <immintrin.h>

namespace residua::RESIDUA_ISA {

constexpr int kLanes = 16;
constexpr int kRowBlock = 6;     // query rows per register block
constexpr int kPanelVectors = 4;  // 6 x 4 accumulators + 4 operands + 1 broadcast of 32 registers
constexpr float kExp2Min = -151.0f;  // scalef rounds 2^-151 to zero

struct Vec {
  __m512 v;
};
using Mask = __mmask16;

RESIDUA_INLINE Vec set1(float x) { return {_mm512_set1_ps(x)}; }
RESIDUA_INLINE Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
RESIDUA_INLINE void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
RESIDUA_INLINE Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
RESIDUA_INLINE Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
RESIDUA_INLINE Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
RESIDUA_INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// The larger one; the second if either is NaN.
RESIDUA_INLINE Vec max_or_second(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
RESIDUA_INLINE Mask greater(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ); }
RESIDUA_INLINE Mask equal(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }
RESIDUA_INLINE Vec select(Mask m, Vec yes, Vec no) { return {_mm512_mask_mov_ps(no.v, m, yes.v)}; }
RESIDUA_INLINE Vec round_even(Vec a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
RESIDUA_INLINE Vec times_two_to(Vec a, Vec whole) { return {_mm512_scalef_ps(a.v, whole.v)}; }
RESIDUA_INLINE float sum_of(Vec a) { return _mm512_reduce_add_ps(a.v); }
RESIDUA_INLINE float max_of(Vec a) { return _mm512_reduce_max_ps(a.v); }

// Rows become columns, in registers.
RESIDUA_INLINE void transpose(Vec (&rows)[kLanes]) {
  __m512 t[16], u[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(rows[i].v, rows[i + 1].v);
    t[i + 1] = _mm512_unpackhi_ps(rows[i].v, rows[i + 1].v);
  }
  for (int i = 0; i < 16; i += 4) {
    __m512d a = _mm512_castps_pd(t[i]), b = _mm512_castps_pd(t[i + 1]);
    __m512d c = _mm512_castps_pd(t[i + 2]), d = _mm512_castps_pd(t[i + 3]);
    u[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
    u[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
    u[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
    u[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_f32x4(u[i], u[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_f32x4(u[i], u[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_f32x4(u[i + 8], u[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(u[i + 8], u[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; i++) {
    rows[i].v = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
    rows[i + 8].v = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
    rows[i + 4].v = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
    rows[i + 12].v = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

RESIDUA_INLINE Vec load_half(const Half* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
RESIDUA_INLINE void store_half(Half* p, Vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}

}  // namespace residua::RESIDUA_ISA
