// The C interface: plain structs that `abi.py` mirrors field by field, and the list of kernels that each instruction
// set compiles. Nothing here depends on an instruction set.
#pragma once
#include <cstddef>
#include <cstdint>

namespace residua {

constexpr int kAbiVersion = 8;

enum Dtype : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };
enum Status : int32_t { kOk = 0, kNoMemory = 1, kBadPartition = 2, kBadIsa = 3 };

// [B, H, N, D] with strides in elements; the last dimension is contiguous.
struct View {
  void* data;
  int64_t batch, head, row;
};

// A Partition: order [B, H, tokens] and offsets [B, H, groups + 1], both contiguous.
struct Groups {
  const int64_t* order;
  const int64_t* offsets;
  int64_t tokens, groups;
};

struct Shape {
  int64_t batch, heads, kv_heads, queries, keys, dim, value_dim;
};

struct AttendArgs {
  Shape shape;
  Groups query, kv;
  View q, k, v, out;
  float* lse;              // [B, H, Nq]
  const uint8_t* cells;    // [B, H, Cq, Ck]
  const float* summary_keys;  // [B, H, Cq, T, D]
  const float* summary_values;  // [B, H, Cq, T, Dv]
  const float* summary_weight;  // [B, H, Cq, T]
  const float* basis;   // [B, Hkv, D, R]: a Drift, or null
  const float* origin;  // [B, H, Cq, R]
  const float* curve;   // [B, H, Cq, R]
  const float* slope;   // [B, H, Cq, R, Dv]
  int64_t summary_count, rank;  // T, R
  float scale, max_bend;
  int32_t dtype, out_dtype;
};

// Exact attention of a few rows over all keys. Keys are cut into `chunks` parts whose results are merged in
// order, so that the result does not depend on the number of threads.
struct RowsArgs {
  Shape shape;  // queries = M
  View q, k, v, out;
  const uint8_t* key_mask;  // [B, Nk] or null
  float* partial;           // [B, H, row blocks, chunks, (1 or 2) * block rows * (padded Dv + 2)]
  int64_t block_rows, chunks;
  const uint8_t* kept;    // [B, H, M, Ck] or null: the same rows over the keys of these groups alone
  const int64_t* labels;  // [B, Hkv, Nk], the groups of the keys; null without `kept`
  const int64_t* order;   // [B, Hkv, Nk], the keys group by group; null without `kept`
  int64_t groups;         // Ck
  float* part;            // [B, H, M, Dv]
  float* part_lse;        // [B, H, M]
  float scale;
  int32_t dtype, pad;
};

struct MassArgs {
  Shape shape;  // queries = anchors per K/V head (H / Hkv * Cq), value_dim unused
  Groups kv;
  const float* anchors;  // [B, Hkv, queries, D]
  View k;
  float* mass;  // [B, Hkv, queries, Ck]
  int64_t task_groups;
  float scale;
  int32_t dtype;
};

struct SlotsArgs {
  Shape shape;  // queries = anchors per K/V head (H / Hkv * Cq)
  Groups kv;
  const float* anchors;  // [B, Hkv, queries, D]
  View k, v;
  const int32_t* slots;   // [B, Hkv, queries, Ck], negative: none
  const float* log_mass;  // [B, Hkv, queries, T]
  const int64_t* near;    // [B, Hkv, Ck] or null: groups are visited in the order of these numbers
  float* keys;            // [B, Hkv, queries, T, D]
  float* values;          // [B, Hkv, queries, T, Dv]
  float* weight;          // [B, Hkv, queries, T] or null: log_mass - scale * anchor . key
  int64_t count;          // T
  float scale;
  int32_t dtype;
};

// Which slot every skipped group of a query group gets.
struct ChooseArgs {
  int64_t heads, heads_per_kv, query_groups, kv_groups, single, merged;  // heads = B x H
  const float* log_mass;         // [heads, Cq, Ck]
  const uint8_t* cells;          // [heads, Cq, Ck]
  const int64_t* query_offsets;  // [heads, Cq + 1]
  const int64_t* kv_offsets;     // [heads / heads_per_kv, Ck + 1]
  const int64_t* near;           // [heads / heads_per_kv, Ck]
  const uint8_t* wanted;         // [heads]
  int32_t* slots;                // [heads, Cq, Ck]
  float* slot_mass;              // [heads, Cq, single + merged]
  float* share;                  // [heads, Cq, Ck]
};

// slope and curve = share x covariances and variances of the pools of groups.
struct CovarianceArgs {
  Shape shape;  // kv_heads, queries = M, keys, dim, value_dim
  Groups kv;
  View k, v;
  const float* factor;     // [B, Hkv, D, R]
  const float* centroids;  // [B, Hkv, Ck, D]
  const float* share;      // [B, Hkv, M, Ck]
  const int64_t* pool;     // [B, Hkv, Ck], the pool of every group
  float* slope;            // [B, Hkv, M, R, Dv]
  float* curve;            // [B, Hkv, M, R]
  int64_t rank, pools;
  int32_t dtype, pad;
};

// Which groups are in each pool, and the shares of the pools: made from the arguments above.
struct Pools {
  const int64_t* members;  // [B, Hkv, Ck], groups pool by pool
  const int64_t* starts;   // [B, Hkv, pools + 1]
  const float* share;      // [B, Hkv, M, pools]
  int64_t count;
};

struct KmeansArgs {
  int64_t heads, tokens, rank, groups, steps;
  const float* x;          // [G, N, R]
  const float* centres;    // [G, C, R]
  const uint8_t* valid;    // [G, N] or null
  int64_t* labels;         // [G, N]
  float* means;            // [G, C, R]
  int64_t* sizes;          // [G, C]
};

struct MeansArgs {
  Shape shape;  // heads, queries = tokens, dim
  Groups groups;
  View x;
  float* means;  // [B, H, C, D]
  int32_t dtype, pad;
};

struct GatherArgs {
  int64_t batch, heads, tokens, rows, row_bytes;
  View x;  // strides in bytes
  const int64_t* order;  // [B, H, rows]
  char* out;             // [B, H, rows, row_bytes]
};

struct ProjectArgs {
  Shape shape;  // heads, queries = tokens, dim
  View x;
  const float* factor;  // [B, H, D, R]
  float* out;           // [B, H, N, R]
  int64_t rank;
  float min_rms;
  int32_t normalise, dtype, pad;
};

struct AffineArgs {
  Shape shape;  // heads, queries = tokens, value_dim
  View x, out;  // x is fp32
  const float* left;   // [B, H, Dv, R]
  const float* right;  // [B, H, R, Dv]
  const float* bias;   // [B, H, Dv]
  int64_t rank;
  int32_t out_dtype, pad;
};

struct EigenArgs {
  int64_t count, size;
  const double* matrix;  // [count, n, n], symmetric
  double* values;        // [count, n], ascending
  double* vectors;       // [count, n, n], one eigenvector per row
};

struct FitArgs {
  int64_t heads, rows, dim, rank, subspace;  // without a subspace the rank is the dim
  double ridge, feature_eps, max_leverage, min_energy;
  const float* x;         // [heads, M, Dv]
  const float* residual;  // [heads, M, Dv]
  const float* weights;   // [heads, M]
  float* left;            // [heads, Dv, R]
  float* right;           // [heads, R, Dv]
  float* bias;            // [heads, Dv]
  float* left_out;        // [heads, M, Dv]
};

// out = x y for every matrix; y is [inner][columns], or [columns][inner] if `transposed`.
struct MatmulArgs {
  int64_t matrices, rows, inner, columns, transposed;
  const float* x;  // [matrices, rows, inner]
  const float* y;
  float* out;  // [matrices, rows, columns]
};

struct DirectionsArgs {
  int64_t heads, dim, rank, steps;
  double scale, min_variance, tiny, shift;
  const double* spread;      // [heads, D, D]
  const double* covariance;  // [heads, D, D]
  float* to_query;           // [heads, D, R]
  float* to_key;             // [heads, D, R]
};

struct PeaksArgs {
  Shape shape;  // heads, queries = rows, dim
  View x;
  float* peaks;     // [B, H, rows], the largest finite magnitude
  uint8_t* finite;  // [B, H, rows]
  int32_t dtype, pad;
};

struct FiniteArgs {
  int64_t count;
  const float* x;   // [count]
  int32_t* finite;  // 1 if all are
};

struct SortArgs {
  int64_t heads, tokens, groups;
  const int64_t* labels;  // [heads, tokens], negative: no group
  int64_t* order;         // [heads, tokens]
  int64_t* offsets;       // [heads, groups + 1]
};

// Means of products of the rows that are counted and finite.
struct MomentArgs {
  Shape shape;  // heads, queries = rows, dim
  View x;
  const uint8_t* counted;  // [B, H, rows] or null
  double* moment;          // [B, H, D, D]
  int32_t centred, dtype;
};

// What a head's tasks share: the rows that are taken, and their mean.
struct MomentHead {
  int64_t* rows;
  double* mean;
  int64_t count;
};

struct CentralArgs {
  int64_t heads, tokens, rank, groups, count;
  const float* x;         // [heads, tokens, rank]
  const int64_t* labels;  // [heads, tokens]
  int64_t* rows;          // [heads, count]
};

struct SpendArgs {
  int64_t heads, query_groups, kv_groups, passes, budgets;
  const float* log_share;      // [heads, Cq, Ck]
  const float* log_sizes;      // [heads, Ck]
  const int64_t* query_sizes;  // [heads, Cq]
  const int64_t* kv_sizes;     // [heads, Ck]
  const int64_t* budget;       // [budgets, heads]
  uint8_t* cells;              // [budgets, heads, Cq, Ck]
};

// Every struct that crosses the interface once: `abi.py` compares names and sizes with its own when it loads.
#define RESIDUA_STRUCTS(STRUCT)                                                                                 \
  STRUCT(View) STRUCT(Groups) STRUCT(Shape) STRUCT(AttendArgs) STRUCT(RowsArgs) STRUCT(MassArgs)                \
  STRUCT(SlotsArgs) STRUCT(ChooseArgs) STRUCT(CovarianceArgs) STRUCT(KmeansArgs) STRUCT(MeansArgs)              \
  STRUCT(GatherArgs) STRUCT(ProjectArgs) STRUCT(AffineArgs) STRUCT(EigenArgs) STRUCT(FitArgs) STRUCT(MatmulArgs) \
  STRUCT(DirectionsArgs) STRUCT(PeaksArgs) STRUCT(FiniteArgs) STRUCT(SortArgs) STRUCT(MomentArgs)               \
  STRUCT(CentralArgs) STRUCT(SpendArgs)

// Part of a query group: rows [begin, end) of the head's order.
struct AttendTask {
  int64_t batch, head, group, begin, end, cost;
};

constexpr int kTile = 64;     // keys per tile
constexpr int kAlign = 64;    // bytes; also pads every scratch array
constexpr int kLanesMax = 16;  // widest vector, in floats
constexpr int kMomentRows = 32;  // rows of a matrix of moments per task

// Always inlined: these are shared by files that are compiled for different instruction sets.
__attribute__((always_inline)) inline int64_t round_up(int64_t n, int64_t step) {
  return (n + step - 1) / step * step;
}
__attribute__((always_inline)) inline int64_t padded(int64_t dim) { return round_up(dim, kLanesMax); }

// Every kernel once: what it returns, its name, its arguments. The table below and what fills it (`kernels.h`) are
// made from this list, so that a kernel that is missing, swapped or of another type does not compile. A kernel runs
// one task, with scratch memory of its own; `x_scratch` says how many bytes that is.
#define RESIDUA_KERNELS(KERNEL)                                                                                  \
  KERNEL(size_t, attend_scratch, (const Shape&, int64_t rows, int64_t rank))                                     \
  KERNEL(void, attend_task, (const AttendArgs&, const AttendTask&, void* scratch))                               \
  KERNEL(void, rows_task, (const RowsArgs&, int64_t task, void* scratch))                                        \
  KERNEL(void, rows_merge, (const RowsArgs&, int64_t task))                                                      \
  KERNEL(size_t, mass_scratch, (const MassArgs&))                                                                \
  KERNEL(void, mass_task, (const MassArgs&, int64_t task, void* scratch))                                        \
  KERNEL(size_t, slots_scratch, (const SlotsArgs&, int64_t anchors))                                             \
  KERNEL(void, slots_task, (const SlotsArgs&, int64_t head, int64_t begin, int64_t end, void* scratch))          \
  KERNEL(size_t, covariance_scratch, (const CovarianceArgs&))                                                    \
  KERNEL(void, covariance_task,                                                                                  \
         (const CovarianceArgs&, const Pools&, int64_t head, int64_t begin, int64_t end, float* panels,          \
          void* scratch))                                                                                        \
  KERNEL(void, mix_task,                                                                                         \
         (const CovarianceArgs&, const Pools&, int64_t head, int64_t begin, int64_t end, const float* panels))   \
  KERNEL(size_t, assign_scratch, (const KmeansArgs&))                                                            \
  KERNEL(void, assign_task, (const KmeansArgs&, int64_t head, int64_t begin, int64_t end, void* scratch))        \
  KERNEL(void, means_task, (const MeansArgs&, int64_t head, int64_t begin, int64_t end, void* scratch))          \
  KERNEL(size_t, project_scratch, (const ProjectArgs&))                                                          \
  KERNEL(void, project_task, (const ProjectArgs&, int64_t head, int64_t begin, int64_t end, void* scratch))      \
  KERNEL(size_t, affine_scratch, (const AffineArgs&))                                                            \
  KERNEL(void, affine_task, (const AffineArgs&, int64_t head, int64_t begin, int64_t end, void* scratch))        \
  KERNEL(size_t, eigh_scratch, (const EigenArgs&))                                                               \
  KERNEL(void, eigh_task, (const EigenArgs&, int64_t task, void* scratch))                                       \
  KERNEL(size_t, fit_scratch, (const FitArgs&))                                                                  \
  KERNEL(void, fit_task, (const FitArgs&, int64_t head, void* scratch))                                          \
  KERNEL(size_t, matmul_scratch, (const MatmulArgs&))                                                            \
  KERNEL(void, matmul_task, (const MatmulArgs&, int64_t matrix, int64_t begin, int64_t end, void* scratch))      \
  KERNEL(size_t, directions_scratch, (const DirectionsArgs&))                                                    \
  KERNEL(void, directions_task, (const DirectionsArgs&, int64_t head, void* scratch))                            \
  KERNEL(void, peaks_task, (const PeaksArgs&, int64_t head, int64_t begin, int64_t end, void* scratch))          \
  KERNEL(size_t, moment_scratch, (const MomentArgs&))                                                            \
  KERNEL(void, moment_rows, (const MomentArgs&, int64_t head, MomentHead&, void* scratch))                       \
  KERNEL(void, moment_task, (const MomentArgs&, int64_t head, const MomentHead&, int64_t first, void* scratch))  \
  KERNEL(bool, all_finite, (const float* x, int64_t count))                                                      \
  KERNEL(void, distances,                                                                                        \
         (const float* x, int64_t rank, const int64_t* rows, int64_t count, const float* mean, float* out))

// The kernels of one instruction set.
struct Kernels {
  const char* isa;
#define RESIDUA_FIELD(result, kernel, arguments) result(*kernel) arguments;
  RESIDUA_KERNELS(RESIDUA_FIELD)
#undef RESIDUA_FIELD
};

const Kernels* kernels_avx512bf16();
const Kernels* kernels_avx512();
const Kernels* kernels_avx2();
const Kernels* kernels_generic();

}  // namespace residua
