// The exported functions of the small stages: eigenvectors, moments, sorting, probe rows, and the budget.
#include "dispatch.h"

#include <cmath>
#include <cstring>

namespace residua {
namespace {

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

constexpr int64_t kFinitePart = 1 << 18;
constexpr int64_t kMatmulColumns = 256;
constexpr int64_t kPeakRows = 1024;
constexpr int64_t kSlotRows = 8;  // query groups of a task of `choose_slots`

// On a busy machine a second thread costs more than a fraction of a millisecond of work.
int64_t threads_for(int64_t threads, int64_t elements) { return elements < (1 << 20) ? 1 : threads; }

bool in_range(const int64_t* labels, int64_t count, int64_t groups) {
  return std::all_of(labels, labels + count, [&](int64_t label) { return label < groups; });
}

// How many rows of every group are needed so that `count` are found going round the groups.
int64_t rounds_for(const int64_t* offsets, int64_t groups, int64_t count, int64_t* sizes) {
  for (int64_t c = 0; c < groups; c++) sizes[c] = offsets[c + 1] - offsets[c];
  std::sort(sizes, sizes + groups);
  int64_t rounds = 0;
  for (int64_t c = 0; c < groups; c++) {  // each group from here on has at least sizes[c] rows
    const int64_t more = std::min(sizes[c] - rounds, (count + groups - c - 1) / (groups - c));
    rounds += more;
    count -= more * (groups - c);
    if (count <= 0) break;
  }
  return rounds;
}

// A distance and an index as one number that sorts like the pair; NaN comes last.
uint64_t ranked(float distance, int64_t index) {
  const uint64_t high = distance != distance ? 0xffffffffu : bits_of(distance);
  return high << 32 | static_cast<uint64_t>(index);
}

// The rows of one head: round after round the next nearest of every group, then rows of no group.
// Nothing is allocated here, as a helper thread may not throw.
void central_rows_of(const CentralArgs& a, const Kernels& kernels, int64_t head, const float* means,
                  const int64_t* order, const int64_t* offsets, void* scratch) {
  const float* x = a.x + head * a.tokens * a.rank;
  uint64_t* keys = static_cast<uint64_t*>(scratch);  // [tokens]
  int64_t* sizes = reinterpret_cast<int64_t*>(keys + a.tokens);  // [groups]
  float* distance = reinterpret_cast<float*>(sizes + a.groups);  // [tokens]
  const int64_t rounds = rounds_for(offsets, a.groups, a.count, sizes);
  for (int64_t c = 0; c < a.groups; c++) {
    const int64_t begin = offsets[c], end = offsets[c + 1];
    kernels.distances(x, a.rank, order + begin, end - begin, means + c * a.rank, distance + begin);
    for (int64_t i = begin; i < end; i++) keys[i] = ranked(distance[i], order[i]);
    std::partial_sort(keys + begin, keys + begin + std::min(rounds, end - begin), keys + end);
  }
  int64_t* rows = a.rows + head * a.count;
  int64_t found = 0;
  for (int64_t round = 0; round < rounds; round++) {
    for (int64_t c = 0; c < a.groups && found < a.count; c++) {
      if (offsets[c] + round < offsets[c + 1]) rows[found++] = keys[offsets[c] + round] & 0xffffffffu;
    }
  }
  for (int64_t i = offsets[a.groups]; found < a.count; i++) rows[found++] = order[i];
}

struct Cell {
  uint32_t key;  // ascending is better
  uint32_t index;
};

// Stable sort by key, a digit of 11 bits at a time; the result is in one of the two places.
const Cell* sort_cells(Cell* cells, Cell* other, int64_t count) {
  for (int shift = 0; shift < 32; shift += 11) {
    int64_t starts[2049] = {};
    for (int64_t i = 0; i < count; i++) starts[(cells[i].key >> shift & 2047) + 1]++;
    for (int d = 0; d < 2048; d++) starts[d + 1] += starts[d];
    for (int64_t i = 0; i < count; i++) other[starts[cells[i].key >> shift & 2047]++] = cells[i];
    std::swap(cells, other);
  }
  return cells;
}

// The floats in descending order, as ascending numbers.
uint32_t descending(float value) {
  const uint32_t bits = bits_of(value + 0.0f);  // one zero, not two
  return bits >> 31 ? bits : ~bits & 0x7fffffffu;
}

// Lists all cells that hold pairs, and keeps the best one of every query group: it costs `least` pairs in all.
// -> how many cells are listed
int64_t list_cells(const SpendArgs& a, int64_t head, Cell* cells, uint8_t* kept, int64_t* least) {
  const float* log_share = a.log_share + head * a.query_groups * a.kv_groups;
  const float* log_sizes = a.log_sizes + head * a.kv_groups;
  const int64_t *queries = a.query_sizes + head * a.query_groups, *keys = a.kv_sizes + head * a.kv_groups;
  int64_t listed = 0;
  for (int64_t q = 0; q < a.query_groups; q++) {
    const int64_t row = q * a.kv_groups;
    int64_t best = 0;
    float most = -__builtin_huge_valf();
    for (int64_t c = 0; queries[q] && c < a.kv_groups; c++) {
      if (!keys[c]) continue;
      float value = log_share[row + c] - log_sizes[c];
      if (value != value) value = __builtin_huge_valf();  // what is wrong must reach the output
      if (value > most) {
        most = value;
        best = c;
      }
      cells[listed++] = {descending(value), static_cast<uint32_t>(row + c)};
    }
    if (!a.kv_groups || !queries[q] || !keys[best]) continue;
    kept[row + best] = 1;
    *least += queries[q] * keys[best];
  }
  return listed;
}

// Spends what is `left` on cells in their order, in a few passes: a cell that is too large is passed over.
void fill_cells(const SpendArgs& a, int64_t head, const Cell* cells, int64_t found, int64_t left,
                uint8_t* kept) {
  const int64_t *queries = a.query_sizes + head * a.query_groups, *keys = a.kv_sizes + head * a.kv_groups;
  for (int64_t pass = 0; pass < a.passes; pass++) {
    int64_t wanted = 0, spent = 0;
    for (int64_t i = 0; i < found; i++) {
      const int64_t index = cells[i].index;
      if (kept[index]) continue;
      const int64_t cost = queries[index / a.kv_groups] * keys[index % a.kv_groups];
      if (cost > left) continue;
      wanted += cost;
      if (wanted > left) break;
      kept[index] = 1;
      spent = wanted;
    }
    left -= spent;
  }
}

float shift_of(float top) { return std::isinf(top) ? 0.0f : top; }

// The log of each slot's mass, and each group's share of all of it. `sums` [single + merged] is room.
void sum_slots(const ChooseArgs& a, const float* mass, const int32_t* slots, float* sums, float* total,
               float* share) {
  const int64_t count = a.single + a.merged;
  std::fill_n(sums, count, 0.0f);
  for (int64_t c = 0; c < a.kv_groups; c++) {
    if (slots[c] >= 0 && !(mass[c] <= total[slots[c]])) total[slots[c]] = mass[c];
  }
  for (int64_t c = 0; c < a.kv_groups; c++) {
    if (slots[c] >= a.single) sums[slots[c]] += std::exp(mass[c] - shift_of(total[slots[c]]));
  }
  for (int64_t t = a.single; t < count; t++) total[t] = std::log(sums[t]) + shift_of(total[t]);
  float top = -__builtin_huge_valf(), everything = 0.0f;
  for (int64_t t = 0; t < count; t++) top = total[t] > top ? total[t] : top;
  for (int64_t t = 0; t < count; t++) everything += std::exp(total[t] - shift_of(top));
  everything = std::log(everything) + shift_of(top);
  for (int64_t c = 0; c < a.kv_groups; c++) {
    if (slots[c] >= 0) share[c] = std::exp(mass[c] - everything);
  }
}

// The cells are sorted once for all budgets.
void spend_head(const SpendArgs& a, int64_t head, void* scratch) {
  const int64_t count = a.query_groups * a.kv_groups;
  uint8_t* first = a.cells + head * count;
  std::fill_n(first, count, uint8_t{0});
  Cell* listed = static_cast<Cell*>(scratch);
  int64_t least = 0;
  const int64_t found = list_cells(a, head, listed, first, &least);
  const Cell* cells = sort_cells(listed, listed + count, found);
  for (int64_t b = a.budgets - 1; b >= 0; b--) {  // the first one last: the others start from its best cells
    uint8_t* kept = a.cells + (b * a.heads + head) * count;
    if (b) std::copy_n(first, count, kept);
    fill_cells(a, head, cells, found, a.budget[b * a.heads + head] - least, kept);
  }
}

// One query group: its heaviest skipped groups get a slot each, the others that of their neighbourhood. False if
// there is none for them.
bool choose_row(const ChooseArgs& a, int64_t head, int64_t row, void* scratch) {
  uint64_t* heaviest = static_cast<uint64_t*>(scratch);  // [Ck]
  float* sums = reinterpret_cast<float*>(heaviest + a.kv_groups);
  const int64_t groups = a.kv_groups, kv_head = head / a.heads_per_kv, place = head * a.query_groups + row;
  const float* mass = a.log_mass + place * groups;
  const uint8_t* kept = a.cells + place * groups;
  const int64_t *near = a.near + kv_head * groups, *kv = a.kv_offsets + kv_head * (groups + 1);
  const int64_t* queries = a.query_offsets + head * (a.query_groups + 1) + row;
  int32_t* slots = a.slots + place * groups;
  float *total = a.slot_mass + place * (a.single + a.merged), *share = a.share + place * groups;
  const bool any = a.wanted[head] && queries[1] > queries[0];
  int64_t skipped = 0;
  for (int64_t c = 0; c < groups; c++) {
    slots[c] = -1;
    share[c] = 0.0f;
    if (!any || kept[c] || kv[c] == kv[c + 1]) continue;
    slots[c] = static_cast<int32_t>(a.single + near[c]);
    const uint64_t key = mass[c] != mass[c] ? 0 : descending(mass[c]);  // NaN is the heaviest
    heaviest[skipped++] = key << 32 | static_cast<uint64_t>(c);
  }
  std::fill_n(total, a.single + a.merged, -__builtin_huge_valf());
  if (skipped > a.single && !a.merged) {
    std::fill_n(slots, groups, -1);
    return false;
  }
  const int64_t alone = std::min(a.single, skipped);
  std::nth_element(heaviest, heaviest + alone, heaviest + skipped);
  std::sort(heaviest, heaviest + alone);
  for (int64_t i = 0; i < alone; i++) slots[heaviest[i] & 0xffffffffu] = static_cast<int32_t>(i);
  sum_slots(a, mass, slots, sums, total, share);
  return true;
}

}  // namespace
}  // namespace residua

using namespace residua;

RESIDUA_PRIMITIVE(eigh, EigenArgs) {
  return parallel(threads, a.count, kernels.eigh_scratch(a), with_args(kernels.eigh_task, a));
}

RESIDUA_PRIMITIVE(fit_residual, FitArgs) {
  return parallel(threads, a.heads, kernels.fit_scratch(a), with_args(kernels.fit_task, a));
}

RESIDUA_PRIMITIVE(matmul, MatmulArgs) {
  return over_parts(threads_for(threads, a.matrices * a.rows * a.columns * a.inner / 16), a.matrices, a.columns,
                    kMatmulColumns, kernels.matmul_scratch(a), with_args(kernels.matmul_task, a));
}

RESIDUA_PRIMITIVE(directions, DirectionsArgs) {
  return parallel(threads, a.heads, kernels.directions_scratch(a), with_args(kernels.directions_task, a));
}

RESIDUA_PRIMITIVE(row_peaks, PeaksArgs) {
  const Shape& s = a.shape;
  return over_parts(threads_for(threads, s.batch * s.heads * s.queries * s.dim), s.batch * s.heads, s.queries,
                    kPeakRows, 0, with_args(kernels.peaks_task, a));
}

RESIDUA_PRIMITIVE(all_finite, FiniteArgs) {
  std::atomic<int32_t> finite{1};
  const Status status = over_parts(threads_for(threads, a.count), 1, a.count, kFinitePart, 0,
                                   [&](int64_t, int64_t begin, int64_t end, void*) {
                                     if (!kernels.all_finite(a.x + begin, end - begin)) finite = 0;
                                   });
  *a.finite = finite;
  return status;
}

RESIDUA_PRIMITIVE(sort_groups, SortArgs) {
  if (!in_range(a.labels, a.heads * a.tokens, a.groups)) return kBadPartition;
  return parallel(threads_for(threads, 8 * a.heads * a.tokens), a.heads, 0, [&](int64_t head, void*) {
    sort_labels(a.labels + head * a.tokens, a.tokens, a.groups, a.order + head * a.tokens,
                a.offsets + head * (a.groups + 1));
  });
}

RESIDUA_PRIMITIVE(second_moment, MomentArgs) {
  const int64_t heads = a.shape.batch * a.shape.heads, total = a.shape.queries, dim = a.shape.dim;
  std::vector<int64_t> rows(heads * total);
  std::vector<double> means(heads * dim);
  std::vector<MomentHead> chosen(heads);
  const Status status = parallel(threads, heads, kernels.moment_scratch(a), [&](int64_t head, void* scratch) {
    chosen[head] = {rows.data() + head * total, means.data() + head * dim, 0};
    kernels.moment_rows(a, head, chosen[head], scratch);
  });
  if (status != kOk) return status;
  return over_parts(threads, heads, dim, kMomentRows, kernels.moment_scratch(a),
                    [&](int64_t head, int64_t begin, int64_t, void* scratch) {
                      kernels.moment_task(a, head, chosen[head], begin, scratch);
                    });
}

RESIDUA_PRIMITIVE(central_rows, CentralArgs) {
  if (!in_range(a.labels, a.heads * a.tokens, a.groups)) return kBadPartition;
  std::vector<int64_t> order(a.heads * a.tokens), offsets(a.heads * (a.groups + 1));
  std::vector<float> means(a.heads * a.groups * a.rank);
  const MeansArgs m = means_args(a.x, a.heads, a.tokens, a.rank, a.groups, order.data(), offsets.data(), means.data());
  const int64_t lists = (a.tokens + a.groups) * sizeof(int64_t) + a.tokens * sizeof(float);
  const size_t bytes = std::max<int64_t>(lists, 2 * padded(a.rank) * sizeof(float));
  return parallel(threads, a.heads, bytes, [&](int64_t head, void* scratch) {
    int64_t *own = order.data() + head * a.tokens, *edges = offsets.data() + head * (a.groups + 1);
    sort_labels(a.labels + head * a.tokens, a.tokens, a.groups, own, edges);
    kernels.means_task(m, head, 0, a.groups, scratch);
    central_rows_of(a, kernels, head, means.data() + head * a.groups * a.rank, own, edges, scratch);
  });
}

RESIDUA_PRIMITIVE(spend, SpendArgs) {
  const size_t bytes = 2 * a.query_groups * a.kv_groups * sizeof(Cell);
  const int64_t used = threads_for(threads, 8 * a.heads * a.query_groups * a.kv_groups);
  return parallel(used, a.heads, bytes, [&](int64_t head, void* scratch) { spend_head(a, head, scratch); });
}

RESIDUA_PRIMITIVE(choose_slots, ChooseArgs) {
  const int64_t named = a.heads / a.heads_per_kv * a.kv_groups;
  // Without merged slots there is one for every group that may be skipped; groups that are always kept (pinned keys)
  // may come on top.
  const int64_t neighbourhoods = std::max<int64_t>(1, a.merged);
  const auto known = [&](int64_t slot) { return slot >= 0 && slot < neighbourhoods; };
  if (!std::all_of(a.near, a.near + named, known)) return kBadPartition;
  const size_t bytes = a.kv_groups * sizeof(uint64_t) + (a.single + a.merged) * sizeof(float);
  const int64_t used = threads_for(threads, 16 * a.heads * a.query_groups * a.kv_groups);
  std::atomic<bool> housed{true};
  const Status status = over_parts(used, a.heads, a.query_groups, kSlotRows, bytes,
                                   [&](int64_t head, int64_t begin, int64_t end, void* scratch) {
                                     for (int64_t row = begin; row < end; row++) {
                                       if (!choose_row(a, head, row, scratch)) housed = false;
                                     }
                                   });
  return status == kOk && !housed ? kBadPartition : status;
}
