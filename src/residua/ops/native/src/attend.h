// Variable-block attention: the rows of one query group over the keys of its kept cells and its summary keys.
#pragma once
#include "drift.h"

namespace residua::RESIDUA_ISA {

// The keys of a query group, tile by tile: K/V groups are joined, so that only the last tile is not full.
struct KeyStream {
  const uint8_t* cells;    // [Ck]
  const int64_t* order;    // [Nk]
  const int64_t* offsets;  // [Ck + 1]
  int64_t groups, group = 0, position = 0;

  KeyStream(const AttendArgs& args, const AttendTask& task) {
    const Shape& s = args.shape;
    const int64_t kv_head = task.batch * s.kv_heads + task.head / (s.heads / s.kv_heads);
    groups = args.kv.groups;
    cells = args.cells + ((task.batch * s.heads + task.head) * args.query.groups + task.group) * groups;
    order = args.kv.order + kv_head * args.kv.tokens;
    offsets = args.kv.offsets + kv_head * (groups + 1);
  }

  // Up to kTile token indices; 0 when there are no more.
  int64_t next(int64_t* tokens) {
    int64_t count = 0;
    for (; group < groups && count < kTile; group++, position = 0) {
      if (!cells[group]) continue;
      const int64_t begin = offsets[group] + position;
      const int64_t taken = least(offsets[group + 1] - begin, kTile - count);
      for (int64_t i = 0; i < taken; i++) tokens[count + i] = order[begin + i];
      count += taken;
      if (begin + taken < offsets[group + 1]) {
        position += taken;
        break;
      }
    }
    return count;
  }
};

// Attends to the keys of the kept cells. While one tile is computed, the rows of the next one are prefetched.
// -> how many keys there were
template <class Dot, class T>
inline int64_t absorb_cells(const AttendArgs& args, const AttendTask& task, SoftmaxBlock<Dot>& block) {
  const int64_t kv_head = task.head / (args.shape.heads / args.shape.kv_heads);
  const T* k = head_of<T>(args.k, task.batch, kv_head);
  const T* v = head_of<T>(args.v, task.batch, kv_head);
  KeyStream stream(args, task);
  int64_t tokens[kTile], seen = 0;
  const T *keys[kTile], *values[kTile];
  for (int64_t count = stream.next(tokens); count;) {
    for (int64_t t = 0; t < count; t++) {
      keys[t] = k + tokens[t] * args.k.row;
      values[t] = v + tokens[t] * args.v.row;
    }
    const int64_t upcoming = stream.next(tokens);
    Prefetch next;
    for (int64_t t = 0; t < upcoming; t++) {
      next.add(k + tokens[t] * args.k.row, args.shape.dim * sizeof(T));
      next.add(v + tokens[t] * args.v.row, args.shape.value_dim * sizeof(T));
    }
    block.absorb(keys, values, count, args.shape.value_dim, nullptr, &next);
    seen += count;
    count = upcoming;
  }
  return seen;
}

// Attends to the summary keys, a tile at a time; their log-weights are added to the scores. Keys that are switched
// off (weight -inf) are left out, whatever else they hold. -> how many keys there were
inline int64_t absorb_summary(const AttendArgs& args, const AttendTask& task, SoftmaxBlock<FloatDot>& block) {
  const Shape& s = args.shape;
  const int64_t group = (task.batch * s.heads + task.head) * args.query.groups + task.group;
  const int64_t start = group * args.summary_count;
  const float *keys[kTile], *values[kTile];
  alignas(kAlign) float bias[kTile];
  int64_t count = 0, seen = 0;
  for (int64_t t = 0; t < args.summary_count; t++) {
    const float weight = args.summary_weight[start + t];
    if (weight != -kInf) {
      keys[count] = args.summary_keys + (start + t) * s.dim;
      values[count] = args.summary_values + (start + t) * s.value_dim;
      bias[count++] = weight / positive_scale(args.scale);
    }
    if (count == kTile || (count && t + 1 == args.summary_count)) {
      block.absorb(keys, values, count, s.value_dim, bias, nullptr);
      seen += count;
      count = 0;
    }
  }
  return seen;
}

inline bool any_summary(const AttendArgs& args, const AttendTask& task) {
  const int64_t group = (task.batch * args.shape.heads + task.head) * args.query.groups + task.group;
  const float* weight = args.summary_weight + group * args.summary_count;
  for (int64_t t = 0; t < args.summary_count; t++) {
    if (weight[t] != -kInf) return true;
  }
  return false;
}

// The same for summary keys with a drift: their log-weights and values depend on the row.
template <class T>
inline int64_t absorb_drifting(const AttendArgs& args, const AttendTask& task, const int64_t* tokens,
                               SoftmaxBlock<FloatDot>& block, DriftBlock& drift) {
  drift.place<T>(args, task, tokens);
  drift.lower(block.state, positive_scale(args.scale));
  const int64_t seen = absorb_summary(args, task, block);
  drift.join(args, task, block.state, block.slope);
  return seen;
}

// Loads the rows of the task, with the sign of the scale.
template <class T, class Block>
inline void set_queries(const AttendArgs& args, const AttendTask& task, const int64_t* tokens, Block& block) {
  const T* q = head_of<T>(args.q, task.batch, task.head);
  for (int64_t i = 0; i < block.rows; i++) {
    block.set_query(i, q + tokens[i] * args.q.row, scale_sign(args.scale));
  }
}

// Divides each row by its total, and stores it with its log-sum-exp; a row that saw no key is 0 and -inf. Under a
// drift all scores were lowered by `bend`, which returns here.
inline void write_rows(const AttendArgs& args, const AttendTask& task, const int64_t* tokens, bool any,
                       const float* bend, RunningSoftmax& state) {
  const Shape& s = args.shape;
  const int64_t width = padded(s.value_dim);
  float* lse = args.lse + (task.batch * s.heads + task.head) * s.queries;
  for (int64_t i = 0; i < task.end - task.begin; i++) {
    lse[tokens[i]] = any ? state.finish(i, width, positive_scale(args.scale)) : -kInf;
    if (bend) lse[tokens[i]] += bend[i];
    narrow_to(state.out + i * width, args.out, args.out_dtype, task.batch, task.head, tokens[i], s.value_dim);
  }
}

// One task: the rows [begin, end) of a query group over their kept cells, then over the summary keys.
template <class Dot, class T>
inline void attend_rows_of_group(const AttendArgs& args, const AttendTask& task, void* scratch) {
  const Shape& s = args.shape;
  const int64_t head = task.batch * s.heads + task.head, count = task.end - task.begin;
  const int64_t* tokens = args.query.order + head * args.query.tokens + task.begin;
  Arena arena{static_cast<char*>(scratch)};
  RunningSoftmax state(arena, count, padded(s.value_dim));
  state.reset(count, padded(s.value_dim));
  SoftmaxBlock<Dot> block(arena, count, s.dim, s.value_dim, args.scale, state);
  set_queries<T>(args, task, tokens, block);
  int64_t seen = absorb_cells<Dot, T>(args, task, block);
  DriftBlock drift(arena, s, count, args.rank);
  const bool summary = any_summary(args, task), drifts = summary && args.basis;
  const auto absorb_more = [&](SoftmaxBlock<FloatDot>& more) {
    seen += drifts ? absorb_drifting<T>(args, task, tokens, more, drift) : absorb_summary(args, task, more);
  };
  if constexpr (Dot::kPack == 1) {
    if (summary) absorb_more(block);
  } else if (summary) {
    // Summary keys stand for many keys: they keep full precision, on the same running state.
    SoftmaxBlock<FloatDot> exact(arena, count, s.dim, s.value_dim, args.scale, state);
    set_queries<T>(args, task, tokens, exact);
    absorb_more(exact);
  }
  write_rows(args, task, tokens, seen > 0, drifts ? drift.bend : nullptr, state);
}

inline void attend_task(const AttendArgs& args, const AttendTask& task, void* scratch) {
  with_type(args.dtype, [&](auto* type) {
    attend_rows_of_group<FloatDot, std::remove_pointer_t<decltype(type)>>(args, task, scratch);
  });
}

// Enough for a block of either kind and one more for summary keys; for exact rows too.
inline size_t attend_scratch(const Shape& shape, int64_t rows, int64_t rank) {
  Arena arena{nullptr};
  DriftBlock drift(arena, shape, rows, rank);
  Split split(arena, rows);
  RunningSoftmax state(arena, rows, padded(shape.value_dim));
  SoftmaxBlock<FloatDot> block(arena, rows, shape.dim, shape.value_dim, 1.0f, state);
#if defined(RESIDUA_BF16)
  SoftmaxBlock<PairDot> pairs(arena, rows, shape.dim, shape.value_dim, 1.0f, state);
#endif
  return arena.used;
}

}  // namespace residua::RESIDUA_ISA
