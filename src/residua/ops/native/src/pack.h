// Moving rows between the caller's tensors and the fp32 tiles that the kernels compute on.
#pragma once
#include "abi.h"
#include "simd.h"

namespace residua::RESIDUA_ISA {

constexpr int kPanel = kPanelVectors * kLanes;  // columns that one register block covers
static_assert(kTile % kPanel == 0 && kPanel % kLanes == 0, "a tile is a whole number of panels");

inline void widen(const float* from, float* to, int64_t n) { std::memcpy(to, from, n * sizeof(float)); }
inline void widen(const BFloat* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; i++) to[i] = bfloat_to_float(from[i]);
}
inline void widen(const Half* from, float* to, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, load_half(from + i));
  for (; i < n; i++) to[i] = half_to_float(from[i]);
}

inline void narrow(const float* from, float* to, int64_t n) { std::memcpy(to, from, n * sizeof(float)); }
inline void narrow(const float* from, BFloat* to, int64_t n) {
  for (int64_t i = 0; i < n; i++) to[i] = float_to_bfloat(from[i]);
}
inline void narrow(const float* from, Half* to, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store_half(to + i, load(from + i));
  for (; i < n; i++) to[i] = float_to_half(from[i]);
}

// Calls f with a null pointer of the storage type, to choose a template.
template <class F>
RESIDUA_INLINE void with_type(int32_t dtype, F&& f) {
  if (dtype == kFloat32) {
    f(static_cast<float*>(nullptr));
  } else if (dtype == kBFloat16) {
    f(static_cast<BFloat*>(nullptr));
  } else {
    f(static_cast<Half*>(nullptr));
  }
}

template <class T>
RESIDUA_INLINE T* head_of(const View& view, int64_t batch, int64_t head) {
  return static_cast<T*>(view.data) + batch * view.batch + head * view.head;
}

inline void narrow_to(const float* from, const View& view, int32_t dtype, int64_t batch, int64_t head,
                      int64_t row, int64_t n) {
  with_type(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    narrow(from, head_of<T>(view, batch, head) + row * view.row, n);
  });
}

// kLanes rows as consecutive columns of a panel: out [dim][kPanel]. Reads whole vectors of each row.
RESIDUA_INLINE void transpose_rows(const float* const (&rows)[kLanes], int64_t dim, float* out) {
  for (int64_t d = 0; d < dim; d += kLanes) {
    Vec block[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++) block[i] = load(rows[i] + d);
    transpose(block);
    const int64_t valid = least(kLanes, dim - d);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; i++) {
      if (i < valid) store(out + (d + i) * kPanel, block[i]);
    }
  }
}

}  // namespace residua::RESIDUA_ISA
