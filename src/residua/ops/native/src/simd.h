// One vector type per instruction set, with the few operations the kernels need. The file that includes this
// defines RESIDUA_ISA (the name space) and one of RESIDUA_AVX512, RESIDUA_AVX2 or neither.
//
// Everything lives in a name space per instruction set and uses no templates of the standard library: a weak
// symbol compiled with AVX-512 must never be the one that the linker keeps for the generic code.
#pragma once
#include "dtype.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define RESIDUA_INLINE inline __attribute__((always_inline))

#if defined(RESIDUA_AVX512)
#include "simd_avx512.h"
#elif defined(RESIDUA_AVX2)
#include "simd_avx2.h"
#else
#include "simd_generic.h"
#endif

namespace residua::RESIDUA_ISA {

constexpr float kInf = __builtin_huge_valf();

RESIDUA_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// 2^x for x <= 0, relative error below 2e-7; 0 far below the normal range; NaN stays NaN.
RESIDUA_INLINE Vec exp2_of(Vec x) {
  x = max_or_second(set1(kExp2Min), x);  // this order keeps a NaN in x
  Vec whole = round_even(x);
  Vec f = x - whole;
  Vec p = set1(1.5353362e-4f);
  p = fma(p, f, set1(1.3398875e-3f));
  p = fma(p, f, set1(9.618437e-3f));
  p = fma(p, f, set1(5.5503324e-2f));
  p = fma(p, f, set1(2.4022648e-1f));
  p = fma(p, f, set1(6.9314718e-1f));
  p = fma(p, f, set1(1.0f));
  return times_two_to(p, whole);
}

}  // namespace residua::RESIDUA_ISA
