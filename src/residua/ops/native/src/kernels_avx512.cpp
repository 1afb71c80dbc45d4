#define RESIDUA_ISA avx512
#define RESIDUA_AVX512 1
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "kernels.h"
const residua::Kernels* residua::kernels_avx512() { return avx512::table("avx512"); }
#else
#include "abi.h"
const residua::Kernels* residua::kernels_avx512() { return nullptr; }
#endif
