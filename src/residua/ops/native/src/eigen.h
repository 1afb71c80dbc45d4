// Eigenvectors of a small symmetric matrix: Householder reflections to a tridiagonal matrix, then implicit QL
// steps. All inner loops run along rows; rows of the result are the eigenvectors.
#pragma once
#include "doubles.h"

namespace residua::RESIDUA_ISA {

constexpr int kMaxSweeps = 60;      // per eigenvalue; two are usual
constexpr double kNothing = 1e-200;  // a squared length that is none, where the largest entry is 1

inline double dot(const double* a, const double* b, int64_t n) {
  Doubles sums = {};
  int64_t i = 0;
  for (; i + kDoubles <= n; i += kDoubles) sums += doubles(a + i) * doubles(b + i);
  double sum = 0;
  for (; i < n; i++) sum += a[i] * b[i];
  for (int l = 0; l < kDoubles; l++) sum += sums[l];
  return sum;
}

RESIDUA_INLINE void add_scaled(double* to, const double* x, double factor, int64_t n) {
  for (int64_t i = 0; i < n; i++) to[i] += factor * x[i];
}

// to += sum_r factors[r] * rows[r]; rows are `stride` apart.
inline void add_rows(double* to, const double* rows, int64_t stride, const double* factors, int64_t count,
                     int64_t n) {
  int64_t r = 0;
  for (; r + 4 <= count; r += 4) {
    const double *a = rows + r * stride, *b = a + stride, *c = b + stride, *d = c + stride;
    const double fa = factors[r], fb = factors[r + 1], fc = factors[r + 2], fd = factors[r + 3];
    for (int64_t i = 0; i < n; i++) to[i] += (fa * a[i] + fb * b[i]) + (fc * c[i] + fd * d[i]);
  }
  for (; r < count; r++) add_scaled(to, rows + r * stride, factors[r], n);
}

// The matrix, both triangles; what a step needs beside it; and the rotations of one QL sweep. Rows are an odd
// number of cache lines apart, so that a column does not crowd into a few sets of the cache.
struct EigenBlock {
  int64_t stride;
  double *a, *q, *diagonal, *off, *tau, *image, *cosines, *sines;

  EigenBlock(Arena& arena, int64_t n) {
    stride = ((n + 7) / 8 | 1) * 8;
    a = arena.doubles(n * stride);
    q = arena.doubles(n * stride);
    diagonal = arena.doubles(n);
    off = arena.doubles(n);
    tau = arena.doubles(n);
    image = arena.doubles(n);
    cosines = arena.doubles(n);
    sines = arena.doubles(n);
  }
};

// A = Q T Q^T: reflection k clears row k beyond its neighbour; its vector stays in that row.
inline void tridiagonalise(const EigenBlock& m, int64_t n) {
  for (int64_t k = 0; k < n; k++) {
    double* v = m.a + k * m.stride + k + 1;
    const int64_t size = n - k - 1;
    m.diagonal[k] = m.a[k * m.stride + k];
    m.off[k] = size ? v[0] : 0.0;
    m.tau[k] = 0.0;
    const double rest = size > 1 ? dot(v + 1, v + 1, size - 1) : 0.0;
    if (!(rest > kNothing)) continue;
    const double norm = std::sqrt(v[0] * v[0] + rest);
    m.off[k] = v[0] > 0 ? -norm : norm;
    for (int64_t i = 0; i < size; i++) v[i] /= norm;  // a tiny row would make tau, and its square, infinite
    v[0] += v[0] > 0 ? 1.0 : -1.0;
    m.tau[k] = 2.0 / dot(v, v, size);
    double* w = m.image;
    for (int64_t i = 0; i < size; i++) w[i] = 0.0;
    add_rows(w, m.a + (k + 1) * m.stride + k + 1, m.stride, v, size, size);
    const double tau = m.tau[k], along = 0.5 * tau * tau * dot(v, w, size);
    for (int64_t i = 0; i < size; i++) w[i] = tau * w[i] - along * v[i];
    for (int64_t i = 0; i < size; i++) {
      double* row = m.a + (k + 1 + i) * m.stride + k + 1;
      const double vi = v[i], wi = w[i];
      for (int64_t j = 0; j < size; j++) row[j] -= vi * w[j] + wi * v[j];
    }
  }
}

// Q^T in m.a, from the reflections in its rows.
inline void accumulate(const EigenBlock& m, int64_t n) {
  for (int64_t i = 0; i < n * m.stride; i++) m.q[i] = 0.0;
  for (int64_t i = 0; i < n; i++) m.q[i * m.stride + i] = 1.0;
  for (int64_t k = n - 1; k >= 0; k--) {
    if (m.tau[k] == 0.0) continue;
    const double* v = m.a + k * m.stride + k + 1;
    const int64_t size = n - k - 1;
    double* w = m.image;
    for (int64_t i = 0; i < size; i++) w[i] = 0.0;
    add_rows(w, m.q + (k + 1) * m.stride + k + 1, m.stride, v, size, size);
    for (int64_t i = 0; i < size; i++) {
      add_scaled(m.q + (k + 1 + i) * m.stride + k + 1, w, -m.tau[k] * v[i], size);
    }
  }
  for (int64_t i = 0; i < n; i++) {
    for (int64_t j = 0; j < n; j++) m.a[i * m.stride + j] = m.q[j * m.stride + i];
  }
}

// Rotates rows (i, i + 1) for i = last - 1 .. first; a strip of columns at a time, so that a row is read once.
inline void rotate_rows(const EigenBlock& m, int64_t n, int64_t first, int64_t last) {
  constexpr int kStrip = 4;
  const int64_t stride = m.stride;
  int64_t column = 0;
  for (; column + kStrip * kDoubles <= n; column += kStrip * kDoubles) {
    Doubles upper[kStrip];
    for (int s = 0; s < kStrip; s++) upper[s] = doubles(m.a + last * stride + column + s * kDoubles);
    for (int64_t i = last - 1; i >= first; i--) {
      double* row = m.a + i * stride + column;
      const double c = m.cosines[i], sn = m.sines[i];
#pragma GCC unroll 4
      for (int s = 0; s < kStrip; s++) {
        const Doubles lower = doubles(row + s * kDoubles);
        doubles(row + stride + s * kDoubles) = sn * lower + c * upper[s];
        upper[s] = c * lower - sn * upper[s];
      }
    }
    for (int s = 0; s < kStrip; s++) doubles(m.a + first * stride + column + s * kDoubles) = upper[s];
  }
  for (int64_t i = last - 1; i >= first && column < n; i--) {
    double* row = m.a + i * stride;
    for (int64_t j = column; j < n; j++) {
      const double lower = row[j], upper = row[stride + j];
      row[stride + j] = m.sines[i] * lower + m.cosines[i] * upper;
      row[j] = m.cosines[i] * lower - m.sines[i] * upper;
    }
  }
}

// One implicit QL sweep over the block [first, last] of the tridiagonal matrix.
inline void sweep(const EigenBlock& m, int64_t n, int64_t first, int64_t last) {
  double *d = m.diagonal, *e = m.off;
  double g = (d[first + 1] - d[first]) / (2.0 * e[first]);
  const double root = std::sqrt(g * g + 1.0);
  g = d[last] - d[first] + e[first] / (g + (g < 0 ? -root : root));
  double s = 1.0, c = 1.0, shift = 0.0;
  int64_t i = last - 1;
  for (; i >= first; i--) {
    const double f = s * e[i], b = c * e[i];
    const double square = f * f + g * g;
    const double r = square > kNothing ? std::sqrt(square) : std::hypot(f, g);  // small squares lose digits
    e[i + 1] = r;
    if (!(r > 0.0)) break;  // the block falls apart here
    s = f / r;
    c = g / r;
    g = d[i + 1] - shift;
    const double t = (d[i] - g) * s + 2.0 * c * b;
    shift = s * t;
    d[i + 1] = g + shift;
    g = c * t - b;
    m.cosines[i] = c;
    m.sines[i] = s;
  }
  rotate_rows(m, n, i + 1, last);
  if (i >= first) {
    d[i + 1] -= shift;
  } else {
    d[first] -= shift;
    e[first] = g;
  }
  e[last] = 0.0;
}

// QL sweeps until every off-diagonal entry has vanished: a block ends where one is small beside its neighbours.
inline void diagonalise(const EigenBlock& m, int64_t n) {
  for (int64_t first = 0; first < n; first++) {
    for (int sweeps = 0; sweeps < kMaxSweeps; sweeps++) {
      int64_t last = first;
      for (; last + 1 < n; last++) {
        const double size = std::fabs(m.diagonal[last]) + std::fabs(m.diagonal[last + 1]);
        if (std::fabs(m.off[last]) <= 0x1p-53 * size + 1e-100) break;
      }
      if (last == first) break;
      sweep(m, n, first, last);
    }
  }
}

// The result of a matrix that cannot be decomposed: NaN.
inline void lose(double* values, double* vectors, int64_t n) {
  for (int64_t i = 0; i < n; i++) values[i] = __builtin_nan("");
  for (int64_t i = 0; i < n * n; i++) vectors[i] = __builtin_nan("");
}

// Matrix `task` of a batch. A matrix with NaN or Inf has NaN for everything.
inline void eigh_task(const EigenArgs& args, int64_t task, void* scratch) {
  const int64_t n = args.size;
  const double* matrix = args.matrix + task * n * n;
  double *values = args.values + task * n, *vectors = args.vectors + task * n * n;
  Arena arena{static_cast<char*>(scratch)};
  const EigenBlock m(arena, n);
  double largest = 0.0, poison = 0.0;
  for (int64_t i = 0; i < n * n; i++) {
    const double size = std::fabs(matrix[i]);
    largest = size > largest ? size : largest;
    poison += 0.0 * matrix[i];
  }
  if (poison != 0.0) return lose(values, vectors, n);
  const double unit = largest > 0.0 ? largest : 1.0;
  for (int64_t i = 0; i < n; i++) {
    for (int64_t j = 0; j < n; j++) m.a[i * m.stride + j] = matrix[i * n + j] / unit;
  }
  tridiagonalise(m, n);
  accumulate(m, n);
  diagonalise(m, n);
  for (int64_t i = 0; i < n; i++) poison += 0.0 * m.diagonal[i];
  if (poison != 0.0) return lose(values, vectors, n);  // NaN has no place in an order
  for (int64_t i = 0; i < n; i++) {  // ascending; equal ones keep their order
    int64_t place = 0;
    for (int64_t j = 0; j < n; j++) {
      place += m.diagonal[j] < m.diagonal[i] || (m.diagonal[j] == m.diagonal[i] && j < i);
    }
    values[place] = m.diagonal[i] * unit;
    std::memcpy(vectors + place * n, m.a + i * m.stride, n * sizeof(double));
  }
}

inline size_t eigh_scratch(const EigenArgs& args) {
  Arena arena{nullptr};
  const EigenBlock m(arena, args.size);
  return arena.used;
}

}  // namespace residua::RESIDUA_ISA
