// The 16-bit storage types and their scalar conversions, rounding to nearest even.
#pragma once
#include <cstdint>
#include <cstring>

namespace residua::RESIDUA_ISA {

struct BFloat {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

inline uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  return u;
}
inline float float_of(uint32_t u) {
  float x;
  std::memcpy(&x, &u, sizeof x);
  return x;
}

inline float bfloat_to_float(BFloat x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }

inline BFloat float_to_bfloat(float x) {
  uint32_t u = bits_of(x);
  uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  uint32_t quiet_nan = (u >> 16) | 0x40u;
  return {static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded)};
}

inline float half_to_float(Half x) {
  uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  uint32_t rest = x.bits & 0x7fffu;
  if (rest >= 0x7c00u) return float_of(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));
  // Read as a float the exponent is 112 too small; the product also normalises subnormals.
  return float_of(sign | bits_of(float_of(rest << 13) * 0x1p112f));
}

inline Half float_to_half(float x) {
  uint32_t u = bits_of(x);
  uint16_t sign = static_cast<uint16_t>((u >> 16) & 0x8000u);
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
  if (u >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // rounds to infinity
  if (u < 0x38800000u) {
    // Subnormal: adding 0.5 aligns the mantissa to the last bit of a half and rounds it.
    return {static_cast<uint16_t>(sign | (bits_of(float_of(u) + 0.5f) - 0x3f000000u))};
  }
  u += 0xc8000fffu + ((u >> 13) & 1u);
  return {static_cast<uint16_t>(sign | (u >> 13))};
}

}  // namespace residua::RESIDUA_ISA
