// Exact attention of a few rows over all keys, the keys cut into chunks that are merged in a fixed order.
#pragma once
#include "softmax_block.h"

namespace residua::RESIDUA_ISA {

// Where a task stands: tasks run over batch, head, row block and chunk, the last one fastest.
struct RowsPlace {
  int64_t batch, head, begin, rows, chunk;

  RowsPlace(const RowsArgs& args, int64_t task, int64_t chunks) {
    const Shape& s = args.shape;
    const int64_t blocks = (s.queries + args.block_rows - 1) / args.block_rows;
    chunk = task % chunks;
    begin = task / chunks % blocks * args.block_rows;
    head = task / chunks / blocks % s.heads;
    batch = task / chunks / blocks / s.heads;
    rows = least(args.block_rows, s.queries - begin);
  }
};

// Partial results of one task: out [rows][width], then top and total; once more for the kept keys.
inline int64_t partial_size(const RowsArgs& args) {
  return args.block_rows * (padded(args.shape.value_dim) + 2);
}
inline float* partial_of(const RowsArgs& args, int64_t task) {
  return args.partial + task * partial_size(args) * (args.kept ? 2 : 1);
}
inline RunningSoftmax state_at(const RowsArgs& args, float* partial) {
  RunningSoftmax state;
  state.out = partial;
  state.top = partial + args.block_rows * padded(args.shape.value_dim);
  state.total = state.top + args.block_rows;
  return state;
}

// Whether each row keeps each of these keys -> mask [rows][kTile].
inline void fill_mask(const RowsArgs& args, const RowsPlace& at, int64_t kv_head, const int64_t* tokens,
                      int64_t count, uint8_t* mask) {
  const Shape& s = args.shape;
  const int64_t* labels = args.labels + (at.batch * s.kv_heads + kv_head) * s.keys;
  const uint8_t* kept = args.kept + ((at.batch * s.heads + at.head) * s.queries + at.begin) * args.groups;
  int64_t groups[kTile], places[kTile], known = 0;
  for (int64_t t = 0; t < count; t++) {
    const int64_t group = labels[tokens[t]];
    if (group >= 0 && group < args.groups) groups[known] = group, places[known++] = t;
  }
  std::memset(mask, 0, at.rows * kTile);
  for (int64_t i = 0; i < at.rows; i++, kept += args.groups, mask += kTile) {
    for (int64_t t = 0; t < known; t++) mask[places[t]] = kept[groups[t]];
  }
}

// Attends to the keys of one chunk that the key mask shows, a tile at a time.
template <class Dot, class T>
inline void absorb_range(const RowsArgs& args, const RowsPlace& at, SoftmaxBlock<Dot>& block) {
  const Shape& s = args.shape;
  const int64_t kv_head = at.head / (s.heads / s.kv_heads);
  const T* k = head_of<T>(args.k, at.batch, kv_head);
  const T* v = head_of<T>(args.v, at.batch, kv_head);
  const uint8_t* mask = args.key_mask ? args.key_mask + at.batch * s.keys : nullptr;
  // Group by group where some groups are kept: then most tiles hold no key that a row keeps.
  const int64_t* order = args.order ? args.order + (at.batch * s.kv_heads + kv_head) * s.keys : nullptr;
  const int64_t stop = s.keys * (at.chunk + 1) / args.chunks;
  int64_t place = s.keys * at.chunk / args.chunks, tokens[kTile];
  const T *keys[kTile], *values[kTile];
  while (place < stop) {
    int64_t count = 0;
    for (; place < stop && count < kTile; place++) {
      const int64_t token = order ? order[place] : place;
      if (mask && !mask[token]) continue;
      tokens[count] = token;
      keys[count] = k + token * args.k.row;
      values[count++] = v + token * args.v.row;
    }
    if (!count) break;
    if (block.split) fill_mask(args, at, kv_head, tokens, count, block.split->mask);
    // Neighbours in memory need no prefetch: the hardware sees them coming.
    Prefetch ahead;
    for (int64_t next = place; order && next < least(stop, place + kTile); next++) {
      ahead.add(k + order[next] * args.k.row, s.dim * sizeof(T));
      ahead.add(v + order[next] * args.v.row, s.value_dim * sizeof(T));
    }
    block.absorb(keys, values, count, s.value_dim, nullptr, order ? &ahead : nullptr);
  }
}

// One task: a row block over one chunk of the keys, into its partial results.
template <class Dot, class T>
inline void rows_of_chunk(const RowsArgs& args, int64_t task, void* scratch) {
  const Shape& s = args.shape;
  const RowsPlace at(args, task, args.chunks);
  const int64_t width = padded(s.value_dim);
  RunningSoftmax state = state_at(args, partial_of(args, task));
  state.reset(at.rows, width);
  Arena arena{static_cast<char*>(scratch)};
  SoftmaxBlock<Dot> block(arena, at.rows, s.dim, s.value_dim, args.scale, state);
  Split split(arena, at.rows);
  if (args.kept) {
    split.state = state_at(args, partial_of(args, task) + partial_size(args));
    split.state.reset(at.rows, width);
    block.split = &split;
  }
  const T* q = head_of<T>(args.q, at.batch, at.head) + at.begin * args.q.row;
  for (int64_t i = 0; i < at.rows; i++) block.set_query(i, q + i * args.q.row, scale_sign(args.scale));
  absorb_range<Dot, T>(args, at, block);
}

inline void rows_task(const RowsArgs& args, int64_t task, void* scratch) {
  with_type(args.dtype, [&](auto* type) {
    rows_of_chunk<FloatDot, std::remove_pointer_t<decltype(type)>>(args, task, scratch);
  });
}

// One row's chunks, `step` floats apart, joined in order: out [Dv], and the natural log-sum-exp of its scores.
inline float join_chunks(const RowsArgs& args, const float* first, int64_t step, int64_t row, float* out) {
  const int64_t width = padded(args.shape.value_dim);
  const float scale = positive_scale(args.scale);
  const float* tops = first + args.block_rows * width + row;
  const float* totals = tops + args.block_rows;
  float top = -kInf, total = 0.0f;
  for (int64_t c = 0; c < args.chunks; c++) top = tops[c * step] > top ? tops[c * step] : top;
  const float shift = top == -kInf ? 0.0f : top;
  for (int64_t d = 0; d < args.shape.value_dim; d++) out[d] = 0.0f;
  for (int64_t c = 0; c < args.chunks; c++) {
    const float share = std::exp((tops[c * step] - shift) * scale);
    const float* part = first + c * step + row * width;
    total += totals[c * step] * share;
    for (int64_t d = 0; d < args.shape.value_dim; d++) out[d] += part[d] * share;
  }
  for (int64_t d = 0; d < args.shape.value_dim; d++) out[d] /= total;
  return shift * scale + std::log(total);
}

// Whether a row keeps any key at all.
inline bool keeps_any(const RowsArgs& args, const RowsPlace& at, int64_t row) {
  const Shape& s = args.shape;
  const int64_t kv_head = at.head / (s.heads / s.kv_heads);
  const int64_t* labels = args.labels + (at.batch * s.kv_heads + kv_head) * s.keys;
  const uint8_t* kept =
      args.kept + ((at.batch * s.heads + at.head) * s.queries + at.begin + row) * args.groups;
  const uint8_t* mask = args.key_mask ? args.key_mask + at.batch * s.keys : nullptr;
  for (int64_t t = 0; t < s.keys; t++) {
    if ((!mask || mask[t]) && labels[t] >= 0 && labels[t] < args.groups && kept[labels[t]]) return true;
  }
  return false;
}

// Joins the chunks of one row block. A row that saw no key at all is 0.
inline void rows_merge(const RowsArgs& args, int64_t task) {
  const RowsPlace at(args, task, 1);
  const Shape& s = args.shape;
  bool any = !args.key_mask && s.keys > 0;
  for (int64_t t = 0; args.key_mask && t < s.keys; t++) any |= args.key_mask[at.batch * s.keys + t] != 0;
  const float* first = partial_of(args, task * args.chunks);
  const int64_t step = partial_of(args, 1) - partial_of(args, 0);
  float* out = head_of<float>(args.out, at.batch, at.head) + at.begin * args.out.row;
  for (int64_t i = 0; i < at.rows; i++, out += args.out.row) {
    join_chunks(args, first, step, i, out);
    for (int64_t d = 0; !any && d < s.value_dim; d++) out[d] = 0.0f;
    if (!args.kept) continue;
    const int64_t row = (at.batch * s.heads + at.head) * s.queries + at.begin + i;
    float* part = args.part + row * s.value_dim;
    args.part_lse[row] = join_chunks(args, first + partial_size(args), step, i, part);
    if (keeps_any(args, at, i)) continue;
    for (int64_t d = 0; d < s.value_dim; d++) part[d] = 0.0f;
    args.part_lse[row] = -kInf;
  }
}

}  // namespace residua::RESIDUA_ISA
