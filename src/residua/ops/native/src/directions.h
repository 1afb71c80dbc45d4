// The directions in which both queries and keys vary most, in fp64, one K/V head per task.
// `Backend.shared_directions` computes the same in torch, with the reasons.
#pragma once
#include "fit.h"

namespace residua::RESIDUA_ISA {

// The lower factor of a symmetric positive matrix [n][n], in its place; the upper triangle is left as it is.
inline void cholesky(double* a, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    double* row = a + i * n;
    for (int64_t j = 0; j < i; j++) row[j] = (row[j] - dot(row, a + j * n, j)) / a[j * n + j];
    row[i] = std::sqrt(row[i] - dot(row, row, i));
  }
}

struct DirectionsBlock {
  double *root, *turned, *inner, *basis, *image, *small;  // [n][n] x 3, [R][n] x 2, [R][R]

  DirectionsBlock(Arena& arena, int64_t n, int64_t rank)
      : root(arena.doubles(n * n)), turned(arena.doubles(n * n)), inner(arena.doubles(n * n)),
        basis(arena.doubles(rank * n)), image(arena.doubles(rank * n)), small(arena.doubles(rank * rank)) {}
};

// The rows of x [rank][n] become orthonormal; they span what they spanned.
inline void orthonormalise(double* x, double* small, int64_t rank, int64_t n) {
  gram(x, small, rank, n);
  double speck = 0.0;
  for (int64_t r = 0; r < rank; r++) speck = small[r * rank + r] > speck ? small[r * rank + r] : speck;
  speck = 1e-15 * speck + 2.2250738585072014e-308;
  for (int64_t r = 0; r < rank; r++) small[r * rank + r] += speck;
  cholesky(small, rank);
  for (int64_t r = 0; r < rank; r++) {
    double* row = x + r * n;
    for (int64_t j = 0; j < r; j++) add_scaled(row, x + j * n, -small[r * rank + j], n);
    for (int64_t i = 0; i < n; i++) row[i] /= small[r * rank + r];
  }
}

// Orthonormal rows `basis` [rank][n] that span about the leading eigenvectors of the matrix `inner`.
inline void lead(const DirectionsArgs& args, DirectionsBlock& b) {
  const int64_t n = args.dim, rank = args.rank;
  double size = 2.2250738585072014e-308;
  for (int64_t i = 0; i < n * n; i++) size = std::fabs(b.inner[i]) > size ? std::fabs(b.inner[i]) : size;
  for (int64_t i = 0; i < n * n; i++) b.inner[i] /= size;
  for (int64_t i = 0; i < n; i++) b.inner[i * n + i] += args.shift;
  for (int64_t r = 0; r < rank; r++) {
    for (int64_t i = 0; i < n; i++) {
      b.basis[r * n + i] = std::cos((i + 0.5) * r * (3.14159265358979323846 / n)) * std::sqrt(2.0 / n);
    }
  }
  for (int64_t step = 0; step < args.steps; step++) {
    product(b.basis, b.inner, b.image, rank, n, n);
    double* other = b.basis;
    b.basis = b.image;
    b.image = other;
    orthonormalise(b.basis, b.small, rank, n);
  }
  orthonormalise(b.basis, b.small, rank, n);
}

// One head: C = covariance + ridge = L L^T; basis = leading eigenvectors of L^T spread L; to_query = scale L basis^T,
// to_key = L^-T basis^T.
inline void directions_task(const DirectionsArgs& args, int64_t head, void* scratch) {
  const int64_t n = args.dim, rank = args.rank;
  const double *spread = args.spread + head * n * n, *covariance = args.covariance + head * n * n;
  Arena arena{static_cast<char*>(scratch)};
  DirectionsBlock b(arena, n, rank);
  double mean = 0.0;
  for (int64_t i = 0; i < n; i++) mean += covariance[i * n + i];
  const double ridge = args.min_variance * (mean / n) > args.tiny ? args.min_variance * (mean / n) : args.tiny;
  std::memcpy(b.root, covariance, n * n * sizeof(double));
  for (int64_t i = 0; i < n; i++) b.root[i * n + i] += ridge;
  cholesky(b.root, n);
  for (int64_t i = 0; i < n; i++) {
    for (int64_t j = i + 1; j < n; j++) b.root[i * n + j] = 0.0;
  }
  transposed(b.root, b.turned, n, n);
  // inner = root^T spread root, by way of (root^T spread), which needs the place of `turned` once more
  product(b.turned, spread, b.inner, n, n, n);
  std::memcpy(b.turned, b.inner, n * n * sizeof(double));
  product(b.turned, b.root, b.inner, n, n, n);
  lead(args, b);
  float *to_query = args.to_query + head * n * rank, *to_key = args.to_key + head * n * rank;
  for (int64_t i = 0; i < n; i++) {
    for (int64_t r = 0; r < rank; r++) {
      to_query[i * rank + r] = static_cast<float>(args.scale * dot(b.root + i * n, b.basis + r * n, n));
    }
  }
  // back substitution with L^T
  double* solved = b.turned;  // [n][rank]
  transposed(b.basis, solved, rank, n);
  for (int64_t i = n - 1; i >= 0; i--) {
    double* to = solved + i * rank;
    for (int64_t j = i + 1; j < n; j++) add_scaled(to, solved + j * rank, -b.root[j * n + i], rank);
    for (int64_t r = 0; r < rank; r++) {
      to[r] /= b.root[i * n + i];
      to_key[i * rank + r] = static_cast<float>(to[r]);
    }
  }
}

inline size_t directions_scratch(const DirectionsArgs& args) {
  Arena arena{nullptr};
  const DirectionsBlock block(arena, args.dim, args.rank);
  return arena.used;
}

}  // namespace residua::RESIDUA_ISA
