// The exported functions: choose the kernels, check what could read out of bounds, cut the work into tasks.
#include "dispatch.h"

#include <algorithm>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace residua {

#if defined(__x86_64__)
static bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & (1u << 29));
}
#endif

// Best first; null where the compiler or the processor lacks the instruction set.
const Kernels* kernels_of(int32_t isa) {
#if defined(__x86_64__)
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  if (isa == 0) return avx512 && __builtin_cpu_supports("avx512bf16") ? kernels_avx512bf16() : nullptr;
  if (isa == 1) return avx512 ? kernels_avx512() : nullptr;
  if (isa == 2) return avx2 ? kernels_avx2() : nullptr;
#endif
  return isa == 3 ? kernels_generic() : nullptr;
}

namespace {

// Offsets ascend from 0 and stay within the tokens, and every index names a token.
bool sound(const Groups& g, int64_t heads) {
  for (int64_t h = 0; h < heads; h++) {
    const int64_t* offsets = g.offsets + h * (g.groups + 1);
    if (offsets[0] != 0 || offsets[g.groups] > g.tokens) return false;
    for (int64_t c = 0; c < g.groups; c++) {
      if (offsets[c] > offsets[c + 1]) return false;
    }
    const int64_t* order = g.order + h * g.tokens;
    for (int64_t i = 0; i < g.tokens; i++) {
      if (order[i] < 0 || order[i] >= g.tokens) return false;
    }
  }
  return true;
}

// Query rows per task: queries and outputs of a block stay in the second-level cache beside a tile of keys.
int64_t rows_limit(const Shape& s) {
  const int64_t bytes = (s.dim + padded(s.value_dim)) * static_cast<int64_t>(sizeof(float));
  return std::clamp<int64_t>((448 << 10) / bytes, 48, 512);
}

int64_t kept_keys(const AttendArgs& a, int64_t batch, int64_t head, int64_t group) {
  const Shape& s = a.shape;
  const int64_t kv_head = batch * s.kv_heads + head / (s.heads / s.kv_heads);
  const int64_t* offsets = a.kv.offsets + kv_head * (a.kv.groups + 1);
  const uint8_t* cells = a.cells + ((batch * s.heads + head) * a.query.groups + group) * a.kv.groups;
  int64_t keys = 0;
  for (int64_t c = 0; c < a.kv.groups; c++) keys += cells[c] ? offsets[c + 1] - offsets[c] : 0;
  return keys;
}

// Query groups, large ones in even parts, the most expensive first so that the threads finish together.
std::vector<AttendTask> attend_tasks(const AttendArgs& a) {
  const int64_t limit = rows_limit(a.shape);
  std::vector<AttendTask> tasks;
  for (int64_t head = 0; head < a.shape.batch * a.shape.heads; head++) {
    const int64_t b = head / a.shape.heads, h = head % a.shape.heads;
    const int64_t* offsets = a.query.offsets + head * (a.query.groups + 1);
    for (int64_t g = 0; g < a.query.groups; g++) {
      const int64_t begin = offsets[g], size = offsets[g + 1] - begin;
      if (!size) continue;
      const int64_t keys = kept_keys(a, b, h, g) + a.summary_count;
      const int64_t parts = (size + limit - 1) / limit;
      for (int64_t p = 0; p < parts; p++) {
        const int64_t from = begin + size * p / parts, to = begin + size * (p + 1) / parts;
        tasks.push_back({b, h, g, from, to, (to - from) * keys});
      }
    }
  }
  std::stable_sort(tasks.begin(), tasks.end(),
                   [](const AttendTask& x, const AttendTask& y) { return x.cost > y.cost; });
  return tasks;
}

// Rows of no group come last in the order: 0 and -inf.
void clear_ungrouped(const AttendArgs& a) {
  const Shape& s = a.shape;
  const int64_t bytes = a.out_dtype == kFloat32 ? 4 : 2;
  for (int64_t head = 0; head < s.batch * s.heads; head++) {
    const int64_t* order = a.query.order + head * a.query.tokens;
    char* out = static_cast<char*>(a.out.data) +
                (head / s.heads * a.out.batch + head % s.heads * a.out.head) * bytes;
    for (int64_t i = a.query.offsets[head * (a.query.groups + 1) + a.query.groups]; i < a.query.tokens; i++) {
      std::fill_n(out + order[i] * a.out.row * bytes, s.value_dim * bytes, char{0});
      a.lse[head * s.queries + order[i]] = -__builtin_huge_valf();
    }
  }
}

void keep_empty(const KmeansArgs& a, int64_t head, int64_t begin, int64_t end) {
  for (int64_t c = head * a.groups + begin; c < head * a.groups + end; c++) {
    if (!a.sizes[c]) std::copy_n(a.centres + c * a.rank, a.rank, a.means + c * a.rank);
  }
}

constexpr int64_t kRowsPerTask = 960;  // of projections, corrections and assignments

// Labels, means and sizes from the centres; order and offsets are room.
Status lloyd_step(const KmeansArgs& a, const Kernels& kernels, int64_t threads, int64_t* order,
                  int64_t* offsets) {
  Status status = over_parts(threads, a.heads, a.tokens, kRowsPerTask, kernels.assign_scratch(a),
                             with_args(kernels.assign_task, a));
  if (status != kOk) return status;
  status = parallel(threads, a.heads, 0, [&](int64_t head, void*) {
    int64_t* edges = offsets + head * (a.groups + 1);
    sort_labels(a.labels + head * a.tokens, a.tokens, a.groups, order + head * a.tokens, edges);
    for (int64_t c = 0; c < a.groups; c++) a.sizes[head * a.groups + c] = edges[c + 1] - edges[c];
  });
  if (status != kOk) return status;
  const MeansArgs m = means_args(a.x, a.heads, a.tokens, a.rank, a.groups, order, offsets, a.means);
  return over_parts(threads, a.heads, a.groups, kGroupsPerTask, 2 * padded(a.rank) * sizeof(float),
                    [&](int64_t head, int64_t begin, int64_t end, void* scratch) {
                      kernels.means_task(m, head, begin, end, scratch);
                      keep_empty(a, head, begin, end);
                    });
}

constexpr int64_t kMinAnchors = 6, kMaxAnchors = 300;

// Anchors of a task of `slot_means`, in whole row blocks. Every task packs all keys for itself, so there are
// only as many as keep the threads busy; an anchor's sums do not depend on the cut.
int64_t slot_anchors(const SlotsArgs& a, int64_t threads) {
  const int64_t heads = std::max<int64_t>(1, a.shape.batch * a.shape.kv_heads);
  const auto idle = [&](int64_t tasks) { return round_up(tasks, threads) - tasks; };
  int64_t parts = 1;
  while (8 * idle(heads * parts) > round_up(heads * parts, threads)) parts++;
  const int64_t even = round_up((a.shape.queries + parts - 1) / parts, kMinAnchors);
  return std::clamp(even, kMinAnchors, kMaxAnchors);
}

constexpr int64_t kGatherRows = 512;
constexpr int64_t kMixColumns = 4 * kTile;  // whole panels
constexpr int64_t kWaveFloats = 8 << 20;    // of pool covariances that are held at once
constexpr int64_t kPoolTasks = 32;          // of a head, about: pools differ in size

// The members of every pool and the shares of the pools; false if a group names no pool.
bool sort_into_pools(const CovarianceArgs& a, std::vector<int64_t>& members, std::vector<int64_t>& starts,
                     std::vector<float>& share) {
  const int64_t heads = a.shape.batch * a.shape.kv_heads, groups = a.kv.groups, rows = a.shape.queries;
  members.resize(heads * groups);
  starts.resize(heads * (a.pools + 1));
  share.assign(heads * rows * a.pools, 0.0f);
  for (int64_t i = 0; i < heads * groups; i++) {
    if (a.pool[i] < 0 || a.pool[i] >= a.pools) return false;
  }
  for (int64_t head = 0; head < heads; head++) {
    const int64_t* pool = a.pool + head * groups;
    sort_labels(pool, groups, a.pools, members.data() + head * groups, starts.data() + head * (a.pools + 1));
    for (int64_t row = head * rows; row < (head + 1) * rows; row++) {
      for (int64_t g = 0; g < groups; g++) share[row * a.pools + pool[g]] += a.share[row * groups + g];
    }
  }
  return true;
}

}  // namespace
}  // namespace residua

using namespace residua;

RESIDUA_EXPORT int32_t residua_abi_version() { return kAbiVersion; }

// Names and sizes of the structs of the interface: "View 32 Groups 32 ...".
RESIDUA_EXPORT const char* residua_structs() {
#define RESIDUA_SIZE(name) #name " " + std::to_string(sizeof(name)) + " " +
  static const std::string found = RESIDUA_STRUCTS(RESIDUA_SIZE) std::string();
#undef RESIDUA_SIZE
  return found.c_str();
}

RESIDUA_EXPORT void residua_poison(int32_t byte) { poison_byte = byte; }

// The name of an instruction set (0 is the best), or null where it cannot run.
RESIDUA_EXPORT const char* residua_isa(int32_t isa) {
  const Kernels* kernels = kernels_of(isa);
  return kernels ? kernels->isa : nullptr;
}

RESIDUA_PRIMITIVE(attend, AttendArgs) {
  const Shape& s = a.shape;
  if (!sound(a.query, s.batch * s.heads) || !sound(a.kv, s.batch * s.kv_heads)) return kBadPartition;
  clear_ungrouped(a);
  const std::vector<AttendTask> tasks = attend_tasks(a);
  int64_t rows = 1;
  for (const AttendTask& task : tasks) rows = std::max(rows, task.end - task.begin);
  return parallel(threads, tasks.size(), kernels.attend_scratch(s, rows, a.rank),
                  [&](int64_t i, void* scratch) { kernels.attend_task(a, tasks[i], scratch); });
}

RESIDUA_PRIMITIVE(attend_rows, RowsArgs) {
  const Shape& s = a.shape;
  const int64_t listed = a.order ? s.batch * s.kv_heads * s.keys : 0;
  const auto known = [&](int64_t token) { return token >= 0 && token < s.keys; };
  if (!std::all_of(a.order, a.order + listed, known)) return kBadPartition;
  const int64_t blocks = s.batch * s.heads * ((s.queries + a.block_rows - 1) / a.block_rows);
  const size_t scratch_bytes = kernels.attend_scratch(s, std::min(s.queries, a.block_rows), 0);
  const Status status = parallel(threads, blocks * a.chunks, scratch_bytes, with_args(kernels.rows_task, a));
  if (status != kOk) return status;
  return parallel(threads, blocks, 0, [&](int64_t i, void*) { kernels.rows_merge(a, i); });
}

RESIDUA_PRIMITIVE(cell_mass, MassArgs) {
  const int64_t heads = a.shape.batch * a.shape.kv_heads;
  if (!sound(a.kv, heads)) return kBadPartition;
  const int64_t parts = (a.kv.groups + a.task_groups - 1) / a.task_groups;
  return parallel(threads, heads * parts, kernels.mass_scratch(a), with_args(kernels.mass_task, a));
}

RESIDUA_PRIMITIVE(slot_means, SlotsArgs) {
  const Shape& s = a.shape;
  const int64_t heads = s.batch * s.kv_heads;
  const int32_t* end = a.slots + heads * s.queries * a.kv.groups;
  const bool inside = std::all_of(a.slots, end, [&](int32_t slot) { return slot < a.count; });
  const int64_t named = a.near ? heads * a.kv.groups : 0;
  if (!std::all_of(a.near, a.near + named, [&](int64_t slot) { return slot >= 0 && slot < a.count; })) {
    return kBadPartition;
  }
  if (!inside || !sound(a.kv, heads)) return kBadPartition;
  if (!a.count) return kOk;  // then there are no outputs, and no memory for them
  const int64_t part = slot_anchors(a, std::max<int64_t>(threads, 1));
  return over_parts(threads, heads, s.queries, part, kernels.slots_scratch(a, part),
                    with_args(kernels.slots_task, a));
}

// A few heads at a time: the covariances of all pools of many heads would be the largest thing in memory.
RESIDUA_PRIMITIVE(mixed_covariance, CovarianceArgs) {
  const Shape& s = a.shape;
  const int64_t heads = s.batch * s.kv_heads, columns = a.rank * (s.value_dim + 1);
  if (!sound(a.kv, heads)) return kBadPartition;
  std::vector<int64_t> members, starts;
  std::vector<float> share;
  if (!sort_into_pools(a, members, starts, share)) return kBadPartition;
  const Pools pools{members.data(), starts.data(), share.data(), a.pools};
  const int64_t floats = pools.count * round_up(columns, kTile);
  const int64_t part = std::max<int64_t>(1, pools.count / kPoolTasks);
  const int64_t wave = std::clamp<int64_t>(kWaveFloats / std::max<int64_t>(1, floats), 1, heads);
  const Memory panels = allocate(wave * floats * sizeof(float));
  if (!panels) return kNoMemory;
  float* all = static_cast<float*>(panels.get());
  for (int64_t base = 0; base < heads; base += wave) {
    const int64_t count = std::min(wave, heads - base);
    Status status =
        over_parts(threads, count, pools.count, part, kernels.covariance_scratch(a),
                   [&](int64_t head, int64_t begin, int64_t end, void* scratch) {
                     kernels.covariance_task(a, pools, base + head, begin, end, all + head * floats, scratch);
                   });
    if (status != kOk) return status;
    status = over_parts(threads, count, columns, kMixColumns, 0,
                        [&](int64_t head, int64_t begin, int64_t end, void*) {
                          kernels.mix_task(a, pools, base + head, begin, end, all + head * floats);
                        });
    if (status != kOk) return status;
  }
  return kOk;
}

RESIDUA_PRIMITIVE(kmeans, KmeansArgs) {
  std::vector<int64_t> order(a.heads * a.tokens), offsets(a.heads * (a.groups + 1));
  std::vector<float> centres(a.centres, a.centres + a.heads * a.groups * a.rank);
  KmeansArgs step = a;
  step.centres = centres.data();
  for (int64_t i = 0; i < a.steps; i++) {
    if (i) std::copy_n(a.means, centres.size(), centres.data());
    const Status status = lloyd_step(step, kernels, threads, order.data(), offsets.data());
    if (status != kOk) return status;
    if (std::equal(centres.begin(), centres.end(), a.means)) break;  // further steps change nothing
  }
  return kOk;
}

RESIDUA_PRIMITIVE(group_means, MeansArgs) {
  const int64_t heads = a.shape.batch * a.shape.heads;
  if (!sound(a.groups, heads)) return kBadPartition;
  return over_parts(threads, heads, a.groups.groups, kGroupsPerTask, 2 * padded(a.shape.dim) * sizeof(float),
                    with_args(kernels.means_task, a));
}

RESIDUA_PRIMITIVE(gather_rows, GatherArgs) {
  const int64_t count = a.batch * a.heads * a.rows;
  const bool inside =
      std::all_of(a.order, a.order + count, [&](int64_t token) { return token >= 0 && token < a.tokens; });
  if (!inside) return kBadPartition;
  return over_parts(threads, a.batch * a.heads, a.rows, kGatherRows, 0,
                    [&](int64_t head, int64_t begin, int64_t end, void*) {
                      const char* x = static_cast<const char*>(a.x.data) + head / a.heads * a.x.batch +
                                      head % a.heads * a.x.head;
                      for (int64_t i = head * a.rows + begin; i < head * a.rows + end; i++) {
                        std::copy_n(x + a.order[i] * a.x.row, a.row_bytes, a.out + i * a.row_bytes);
                      }
                    });
}

RESIDUA_PRIMITIVE(project, ProjectArgs) {
  return over_parts(threads, a.shape.batch * a.shape.heads, a.shape.queries, kRowsPerTask,
                    kernels.project_scratch(a), with_args(kernels.project_task, a));
}

RESIDUA_PRIMITIVE(add_affine, AffineArgs) {
  return over_parts(threads, a.shape.batch * a.shape.heads, a.shape.queries, kRowsPerTask,
                    kernels.affine_scratch(a), with_args(kernels.affine_task, a));
}
