// The paper's probe fit in fp64, a head per task: leading directions of the residuals, then a ridge regression.
// `Backend.fit_residual` computes the same in torch, with the reasons.
#pragma once
#include "eigen.h"
#include "moment.h"

namespace residua::RESIDUA_ISA {

// c = a b, with a [m][k], b [k][n].
inline void product(const double* a, const double* b, double* c, int64_t m, int64_t k, int64_t n) {
  for (int64_t i = 0; i < m * n; i++) c[i] = 0.0;
  for (int64_t i = 0; i < m; i++) add_rows(c + i * n, b, n, a + i * k, k, n);
}

// c = a a^T, with a [m][k].
inline void gram(const double* a, double* c, int64_t m, int64_t k) {
  for (int64_t i = 0; i < m; i++) {
    for (int64_t j = 0; j <= i; j++) c[i * m + j] = c[j * m + i] = dot(a + i * k, a + j * k, k);
  }
}

inline void transposed(const double* a, double* b, int64_t m, int64_t k) {
  for (int64_t i = 0; i < m; i++) {
    for (int64_t j = 0; j < k; j++) b[j * m + i] = a[i * k + j];
  }
}

// b = a^-1 b for a symmetric positive matrix [n][n], which its lower factor replaces; b [n][columns].
inline void solve(double* a, double* b, int64_t n, int64_t columns, double min_pivot) {
  for (int64_t i = 0; i < n; i++) {
    double *row = a + i * n, *to = b + i * columns;
    for (int64_t j = 0; j < i; j++) row[j] = (row[j] - dot(row, a + j * n, j)) / a[j * n + j];
    const double pivot = row[i] - dot(row, row, i);
    row[i] = std::sqrt(pivot > min_pivot ? pivot : min_pivot);
    for (int64_t j = 0; j < i; j++) add_scaled(to, b + j * columns, -row[j], columns);
    for (int64_t c = 0; c < columns; c++) to[c] /= row[i];
  }
  for (int64_t i = n - 1; i >= 0; i--) {
    double* to = b + i * columns;
    for (int64_t j = i + 1; j < n; j++) add_scaled(to, b + j * columns, -a[j * n + i], columns);
    for (int64_t c = 0; c < columns; c++) to[c] /= a[i * n + i];
  }
}

struct FitBlock {
  double *alpha, *lever;                            // [M]
  double *mean_x, *mean_r, *scale, *poison, *bias;  // [Dv]
  double *x, *r, *f, *ft, *s, *st;                  // [M][Dv]: centred, weighted, and turned
  double *right, *left, *y, *small;                 // [R][Dv], [Dv][R], [M][R], [n][n]
  double *values, *vectors, *rhs, *through, *mean_y;  // [n], [n][n], [n][R + M], [M][R], [R]
  void* eigen;

  FitBlock(Arena& arena, const FitArgs& args) {
    const int64_t m = args.rows, d = args.dim, rank = args.rank, n = least(m, d);
    double** of_rows[] = {&alpha, &lever};
    double** of_dim[] = {&mean_x, &mean_r, &scale, &poison, &bias};
    double** of_both[] = {&x, &r, &f, &ft, &s, &st};
    for (double** piece : of_rows) *piece = arena.doubles(m);
    for (double** piece : of_dim) *piece = arena.doubles(d);
    for (double** piece : of_both) *piece = arena.doubles(m * d);
    right = arena.doubles(rank * d);
    left = arena.doubles(d * rank);
    y = arena.doubles(m * rank);
    small = arena.doubles(n * n);
    values = arena.doubles(n);
    vectors = arena.doubles(n * n);
    rhs = arena.doubles(n * (rank + m));
    through = arena.doubles(m * rank);
    mean_y = arena.doubles(rank);
    eigen = arena.floats(eigh_scratch({1, n, nullptr, nullptr, nullptr}) / sizeof(float));
  }
};

// Weights, means and scales; x and r centred, x also scaled; f and s with the roots of the weights.
inline void standardise(const FitArgs& args, int64_t head, FitBlock& b) {
  const int64_t m = args.rows, d = args.dim;
  const float *x = args.x + head * m * d, *r = args.residual + head * m * d;
  double total = 0.0;
  for (int64_t i = 0; i < m; i++) {
    const bool lost = !all_finite(x + i * d, d);  // its own output is lost, so it says nothing
    b.alpha[i] = lost ? 0.0 : args.weights[head * m + i];
    total += b.alpha[i];
    for (int64_t j = 0; j < d; j++) {
      b.x[i * d + j] = lost ? 0.0 : x[i * d + j];
      b.r[i * d + j] = lost ? 0.0 : r[i * d + j];
    }
  }
  for (int64_t j = 0; j < d; j++) b.mean_x[j] = b.mean_r[j] = b.scale[j] = b.poison[j] = 0.0;
  for (int64_t i = 0; i < m; i++) {
    b.alpha[i] /= total > 1e-300 ? total : 1e-300;
    for (int64_t j = 0; j < d; j++) {
      double& value = b.r[i * d + j];
      const double bad = value * 0.0;  // NaN where it is not finite: passed on to every row
      b.poison[j] += bad;
      value = bad == 0.0 ? value : 0.0;
      b.mean_x[j] += b.alpha[i] * b.x[i * d + j];
      b.mean_r[j] += b.alpha[i] * value;
    }
  }
  for (int64_t i = 0; i < m; i++) {
    for (int64_t j = 0; j < d; j++) {
      b.x[i * d + j] -= b.mean_x[j];
      b.r[i * d + j] -= b.mean_r[j];
      b.scale[j] += b.alpha[i] * b.x[i * d + j] * b.x[i * d + j];
    }
  }
  for (int64_t j = 0; j < d; j++) b.scale[j] = std::sqrt(b.scale[j] + args.feature_eps);
  for (int64_t i = 0; i < m; i++) {
    const double root = std::sqrt(b.alpha[i] * m);
    for (int64_t j = 0; j < d; j++) {
      b.x[i * d + j] /= b.scale[j];
      b.f[i * d + j] = root * b.x[i * d + j];
      b.s[i * d + j] = root * b.r[i * d + j];
    }
  }
  transposed(b.f, b.ft, m, d);
  transposed(b.s, b.st, m, d);
}

// Leading right singular vectors of s, from its smaller Gram matrix; directions that carry nothing are zero.
inline void directions(const FitArgs& args, FitBlock& b) {
  const int64_t m = args.rows, d = args.dim, n = least(m, d);
  if (!args.subspace) {
    for (int64_t i = 0; i < d * d; i++) b.right[i] = i % (d + 1) ? 0.0 : 1.0;
    std::memcpy(b.y, b.s, m * d * sizeof(double));
    return;
  }
  gram(d <= m ? b.st : b.s, b.small, n, d <= m ? m : d);
  double size = 1e-300;
  for (int64_t i = 0; i < n; i++) size = b.small[i * n + i] > size ? b.small[i * n + i] : size;
  eigh_task({1, n, b.small, b.values, b.vectors}, 0, b.eigen);
  for (int64_t r = 0; r < args.rank; r++) {
    const double energy = b.values[n - 1 - r];
    const double* vector = b.vectors + (n - 1 - r) * n;
    double* to = b.right + r * d;
    for (int64_t j = 0; j < d; j++) to[j] = 0.0;
    if (!(energy > args.min_energy * size)) continue;
    if (d <= m) {
      add_scaled(to, vector, 1.0, d);
    } else {
      add_rows(to, b.s, d, vector, m, d);
      for (int64_t j = 0; j < d; j++) to[j] /= std::sqrt(energy);
    }
  }
  for (int64_t i = 0; i < m; i++) {
    for (int64_t r = 0; r < args.rank; r++) {
      b.y[i * args.rank + r] = dot(b.s + i * d, b.right + r * d, d);
    }
  }
}

// left = argmin |y - f left|^2 + ridge |left|^2 in the smaller of its two forms, and each row's leverage.
inline void regress(const FitArgs& args, FitBlock& b) {
  const int64_t m = args.rows, d = args.dim, rank = args.rank, n = least(m, d);
  const bool wide = d > m;
  gram(wide ? b.f : b.ft, b.small, n, wide ? d : m);
  double speck = 0.0;
  for (int64_t i = 0; i < n; i++) speck += b.small[i * n + i];
  speck = 1e-12 * (speck / n > 1e-30 ? speck / n : 1e-30);
  speck = speck > args.ridge ? speck : args.ridge;
  // solve (G + ridge) z = [y, G] with G = f f^T, or (G + ridge) z = f^T with G = f^T f
  const int64_t columns = wide ? rank + m : m;
  for (int64_t i = 0; i < n; i++) {
    double* to = b.rhs + i * columns;
    if (wide) {
      std::memcpy(to, b.y + i * rank, rank * sizeof(double));
      std::memcpy(to + rank, b.small + i * n, m * sizeof(double));
    } else {
      std::memcpy(to, b.ft + i * m, m * sizeof(double));
    }
  }
  for (int64_t i = 0; i < n; i++) b.small[i * n + i] += speck;
  solve(b.small, b.rhs, n, columns, speck);
  // the leverage of a row: how much its own target moves its prediction
  for (int64_t i = 0; i < m; i++) {
    b.lever[i] = wide ? b.rhs[i * columns + rank + i] : 0.0;
    for (int64_t j = 0; !wide && j < d; j++) b.lever[i] += b.f[i * d + j] * b.rhs[j * m + i];
  }
  for (int64_t j = 0; j < d; j++) {
    double* to = b.left + j * rank;
    for (int64_t r = 0; r < rank; r++) to[r] = 0.0;
    if (wide) {
      add_rows(to, b.rhs, columns, b.ft + j * m, m, rank);
    } else {
      add_rows(to, b.y, rank, b.rhs + j * m, m, rank);
    }
  }
}

// One head: standardise, find the directions, regress; then what the fit leaves of each row if that row is left out of
// it (residual / (1 - leverage)), and the map in the units of the input.
inline void fit_task(const FitArgs& args, int64_t head, void* scratch) {
  const int64_t m = args.rows, d = args.dim, rank = args.rank;
  Arena arena{static_cast<char*>(scratch)};
  FitBlock b(arena, args);
  standardise(args, head, b);
  directions(args, b);
  regress(args, b);
  // left_out = (r - x left right) / (1 - leverage)
  product(b.x, b.left, b.through, m, d, rank);
  product(b.through, b.right, b.s, m, rank, d);
  for (int64_t i = 0; i < m; i++) {
    const double free = 1.0 - b.lever[i] - b.alpha[i];
    const double kept = free < 1.0 - args.max_leverage ? 1.0 - args.max_leverage : free;
    float* to = args.left_out + (head * m + i) * d;
    for (int64_t j = 0; j < d; j++) to[j] = static_cast<float>((b.r[i * d + j] - b.s[i * d + j]) / kept);
  }
  // left /= scale, bias = mean_r - mean_x left right
  for (int64_t j = 0; j < d; j++) {
    for (int64_t r = 0; r < rank; r++) b.left[j * rank + r] /= b.scale[j];
  }
  product(b.mean_x, b.left, b.mean_y, 1, d, rank);
  product(b.mean_y, b.right, b.bias, 1, rank, d);
  for (int64_t j = 0; j < d; j++) {
    args.bias[head * d + j] = static_cast<float>(b.mean_r[j] - b.bias[j] + b.poison[j]);
  }
  for (int64_t i = 0; i < d * rank; i++) {
    args.left[head * d * rank + i] = static_cast<float>(b.left[i]);
    args.right[head * d * rank + i] = static_cast<float>(b.right[i]);
  }
}

inline size_t fit_scratch(const FitArgs& args) {
  Arena arena{nullptr};
  const FitBlock block(arena, args);
  return arena.used;
}

}  // namespace residua::RESIDUA_ISA
