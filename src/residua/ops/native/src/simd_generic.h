// Any processor: 4 lanes through the compiler's own vector types (SSE2, NEON, or plain scalars).
#pragma once

namespace residua::RESIDUA_ISA {

constexpr int kLanes = 4;
constexpr int kRowBlock = 6;
constexpr int kPanelVectors = 2;
constexpr float kExp2Min = -127.0f;  // exponent field 0: multiplies by zero

typedef float Floats __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));

struct Vec {
  Floats v;
};
using Mask = Ints;

RESIDUA_INLINE Vec set1(float x) { return {Floats{x, x, x, x}}; }
RESIDUA_INLINE Vec load(const float* p) {
  Vec a;
  std::memcpy(&a.v, p, sizeof a.v);
  return a;
}
RESIDUA_INLINE void store(float* p, Vec a) { std::memcpy(p, &a.v, sizeof a.v); }
RESIDUA_INLINE Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
RESIDUA_INLINE Vec operator-(Vec a, Vec b) { return {a.v - b.v}; }
RESIDUA_INLINE Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
RESIDUA_INLINE Vec fma(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }
RESIDUA_INLINE Mask greater(Vec a, Vec b) { return a.v > b.v; }
RESIDUA_INLINE Mask equal(Vec a, Vec b) { return a.v == b.v; }
RESIDUA_INLINE Vec select(Mask m, Vec yes, Vec no) { return {m ? yes.v : no.v}; }
// The larger one; the second if either is NaN.
RESIDUA_INLINE Vec max_or_second(Vec a, Vec b) { return select(greater(a, b), a, b); }
// Adding 1.5 * 2^23 leaves no bits for a fraction; |a| is below 2^22 here.
RESIDUA_INLINE Vec round_even(Vec a) {
  Vec big = set1(12582912.0f);
  return (a + big) - big;
}
RESIDUA_INLINE Vec times_two_to(Vec a, Vec whole) {
  Floats shifted = whole.v + (12582912.0f + 127.0f);
  Ints bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits <<= 23;
  Floats power;
  std::memcpy(&power, &bits, sizeof power);
  return {a.v * power};
}
RESIDUA_INLINE float sum_of(Vec a) { return (a.v[0] + a.v[1]) + (a.v[2] + a.v[3]); }
RESIDUA_INLINE float max_of(Vec a) {
  float x = a.v[0] > a.v[1] ? a.v[0] : a.v[1];
  float y = a.v[2] > a.v[3] ? a.v[2] : a.v[3];
  return x > y ? x : y;
}

// Rows become columns.
RESIDUA_INLINE void transpose(Vec (&rows)[kLanes]) {
  Vec t[kLanes];
  for (int i = 0; i < kLanes; i++) t[i].v = Floats{rows[0].v[i], rows[1].v[i], rows[2].v[i], rows[3].v[i]};
  for (int i = 0; i < kLanes; i++) rows[i] = t[i];
}

RESIDUA_INLINE Vec load_half(const Half* p) {
  return {Floats{half_to_float(p[0]), half_to_float(p[1]), half_to_float(p[2]), half_to_float(p[3])}};
}
RESIDUA_INLINE void store_half(Half* p, Vec a) {
  for (int i = 0; i < kLanes; i++) p[i] = float_to_half(a.v[i]);
}

}  // namespace residua::RESIDUA_ISA
