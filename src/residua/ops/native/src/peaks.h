// The largest finite magnitude of every row, and whether a row is finite: on the bits, whatever the type.
#pragma once
#include "pack.h"

namespace residua::RESIDUA_ISA {

// Without the sign bit, floats sort like integers.
template <class Bits>
RESIDUA_INLINE Bits largest_bits(const Bits* x, int64_t n, Bits magnitude) {
  Bits largest = 0;
  for (int64_t i = 0; i < n; i++) {
    const Bits size = x[i] & magnitude;
    largest = size > largest ? size : largest;
  }
  return largest;
}

// One pass finds the largest; only a row that is not finite needs a second one.
template <class Bits>
RESIDUA_INLINE Bits peak_bits(const Bits* x, int64_t n, Bits magnitude, Bits infinite, bool* finite) {
  Bits peak = largest_bits(x, n, magnitude);
  *finite = peak < infinite;
  if (*finite) return peak;
  peak = 0;
  for (int64_t i = 0; i < n; i++) {
    const Bits size = x[i] & magnitude;
    if (size < infinite && size > peak) peak = size;
  }
  return peak;
}

// Rows [begin, end) of one head.
inline void peaks_task(const PeaksArgs& args, int64_t head, int64_t begin, int64_t end, void*) {
  const int64_t b = head / args.shape.heads, h = head % args.shape.heads, dim = args.shape.dim;
  for (int64_t i = begin; i < end; i++) {
    const int64_t to = head * args.shape.queries + i;
    bool finite;
    if (args.dtype == kFloat32) {
      const uint32_t* row = head_of<uint32_t>(args.x, b, h) + i * args.x.row;
      args.peaks[to] = float_of(peak_bits<uint32_t>(row, dim, 0x7fffffffu, 0x7f800000u, &finite));
    } else {
      const bool half = args.dtype == kFloat16;
      const uint16_t* row = head_of<uint16_t>(args.x, b, h) + i * args.x.row;
      const uint16_t peak = peak_bits<uint16_t>(row, dim, 0x7fff, half ? 0x7c00 : 0x7f80, &finite);
      args.peaks[to] = half ? half_to_float({peak}) : bfloat_to_float({peak});
    }
    args.finite[to] = finite;
  }
}

}  // namespace residua::RESIDUA_ISA
