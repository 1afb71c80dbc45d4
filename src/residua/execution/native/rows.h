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

// Partial results of one task: out [rows][width], then top and total.
inline float* partial_of(const RowsArgs& args, int64_t task) {
  return args.partial + task * args.block_rows * (padded(args.shape.value_dim) + 2);
}

template <class Dot, class T>
inline void absorb_range(const RowsArgs& args, const RowsPlace& at, SoftmaxBlock<Dot>& block) {
  const Shape& s = args.shape;
  const int64_t kv_head = at.head / (s.heads / s.kv_heads);
  const T* k = head_of<T>(args.k, at.batch, kv_head);
  const T* v = head_of<T>(args.v, at.batch, kv_head);
  const uint8_t* mask = args.key_mask ? args.key_mask + at.batch * s.keys : nullptr;
  const int64_t stop = s.keys * (at.chunk + 1) / args.chunks;
  int64_t token = s.keys * at.chunk / args.chunks;
  const T *keys[kTile], *values[kTile];
  while (token < stop) {
    int64_t count = 0;
    for (; token < stop && count < kTile; token++) {
      if (mask && !mask[token]) continue;
      keys[count] = k + token * args.k.row;
      values[count++] = v + token * args.v.row;
    }
    if (!count) break;
    // Neighbours in memory need no prefetch: the hardware sees them coming.
    block.absorb(keys, values, count, s.value_dim, nullptr, nullptr);
  }
}

template <class Dot, class T>
inline void rows_of_chunk(const RowsArgs& args, int64_t task, void* scratch) {
  const Shape& s = args.shape;
  const RowsPlace at(args, task, args.chunks);
  const int64_t width = padded(s.value_dim);
  RunningSoftmax state;
  state.out = partial_of(args, task);
  state.top = state.out + args.block_rows * width;
  state.total = state.top + args.block_rows;
  state.reset(at.rows, width);
  Arena arena{static_cast<char*>(scratch)};
  SoftmaxBlock<Dot> block(arena, at.rows, s.dim, s.value_dim, args.scale, state);
  const T* q = head_of<T>(args.q, at.batch, at.head) + at.begin * args.q.row;
  for (int64_t i = 0; i < at.rows; i++) block.set_query(i, q + i * args.q.row, scale_sign(args.scale));
  absorb_range<Dot, T>(args, at, block);
}

inline void rows_task(const RowsArgs& args, int64_t task, void* scratch) {
  with_type(args.dtype, [&](auto* type) {
    rows_of_chunk<FloatDot, std::remove_pointer_t<decltype(type)>>(args, task, scratch);
  });
}

// Joins the chunks of one row block in order. A row that saw no key at all is 0.
inline void rows_merge(const RowsArgs& args, int64_t task) {
  const RowsPlace at(args, task, 1);
  const int64_t width = padded(args.shape.value_dim);
  const float scale = positive_scale(args.scale);
  bool any = !args.key_mask && args.shape.keys > 0;
  for (int64_t t = 0; args.key_mask && t < args.shape.keys; t++) {
    any |= args.key_mask[at.batch * args.shape.keys + t] != 0;
  }
  float* out = head_of<float>(args.out, at.batch, at.head) + at.begin * args.out.row;
  for (int64_t i = 0; i < at.rows; i++, out += args.out.row) {
    const float* first = partial_of(args, task * args.chunks);
    const int64_t step = args.block_rows * (width + 2);
    const float* tops = first + args.block_rows * width + i;
    const float* totals = tops + args.block_rows;
    float top = -kInf, total = 0.0f;
    for (int64_t c = 0; c < args.chunks; c++) top = tops[c * step] > top ? tops[c * step] : top;
    const float shift = top == -kInf ? 0.0f : top;
    for (int64_t d = 0; d < args.shape.value_dim; d++) out[d] = 0.0f;
    for (int64_t c = 0; c < args.chunks; c++) {
      const float share = std::exp((tops[c * step] - shift) * scale);
      const float* part = first + c * step + i * width;
      total += totals[c * step] * share;
      for (int64_t d = 0; d < args.shape.value_dim; d++) out[d] += part[d] * share;
    }
    for (int64_t d = 0; any && d < args.shape.value_dim; d++) out[d] /= total;
  }
}

}  // namespace residua::RESIDUA_ISA
