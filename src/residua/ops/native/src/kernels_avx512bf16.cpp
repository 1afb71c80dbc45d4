// AVX-512 with products of bfloat16 pairs: attention over bfloat16 tensors, everything else as in AVX-512.
#define RESIDUA_ISA avx512bf16
#define RESIDUA_AVX512 1
#define RESIDUA_BF16 1
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && \
    defined(__AVX512BF16__)
#include "attend.h"
#include "rows.h"

namespace residua {
namespace avx512bf16 {

// Pairs cannot carry the sign of a scale that is not positive; such calls take the kernels of AVX-512.
inline void attend_bf16(const AttendArgs& args, const AttendTask& task, void* scratch) {
  if (args.dtype != kBFloat16 || !(args.scale > 0.0f)) return kernels_avx512()->attend_task(args, task, scratch);
  attend_rows_of_group<PairDot, BFloat>(args, task, scratch);
}

// A few rows are probes: other results are measured against them, so their weights are not rounded to bfloat16.
constexpr int64_t kMaxProbes = 256;

inline void rows_bf16(const RowsArgs& args, int64_t task, void* scratch) {
  const bool pairs = args.dtype == kBFloat16 && args.scale > 0.0f && args.shape.queries > kMaxProbes;
  if (!pairs) return kernels_avx512()->rows_task(args, task, scratch);
  rows_of_chunk<PairDot, BFloat>(args, task, scratch);
}

inline Kernels extend(Kernels kernels) {
  kernels.isa = "avx512bf16";
  kernels.attend_scratch = attend_scratch;
  kernels.attend_task = attend_bf16;
  kernels.rows_task = rows_bf16;
  return kernels;
}

}  // namespace avx512bf16

const Kernels* kernels_avx512bf16() {
  static const Kernels kernels = avx512bf16::extend(*kernels_avx512());
  return &kernels;
}

}  // namespace residua
#else
#include "abi.h"
const residua::Kernels* residua::kernels_avx512bf16() { return nullptr; }
#endif
