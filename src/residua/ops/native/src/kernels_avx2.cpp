#define RESIDUA_ISA avx2
#define RESIDUA_AVX2 1
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "kernels.h"
const residua::Kernels* residua::kernels_avx2() { return avx2::table("avx2"); }
#else
#include "abi.h"
const residua::Kernels* residua::kernels_avx2() { return nullptr; }
#endif
