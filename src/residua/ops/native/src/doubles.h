// Vectors of doubles, for the small matrices that are computed in fp64.
#pragma once
#include "softmax_block.h"

namespace residua::RESIDUA_ISA {

#if defined(RESIDUA_AVX512)
constexpr int kDoubles = 8;
#elif defined(RESIDUA_AVX2)
constexpr int kDoubles = 4;
#else
constexpr int kDoubles = 2;
#endif
using Doubles = double __attribute__((vector_size(kDoubles * sizeof(double)), aligned(8), may_alias));

RESIDUA_INLINE Doubles& doubles(double* p) { return *reinterpret_cast<Doubles*>(p); }
RESIDUA_INLINE const Doubles& doubles(const double* p) { return *reinterpret_cast<const Doubles*>(p); }

}  // namespace residua::RESIDUA_ISA
