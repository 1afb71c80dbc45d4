// How the summary keys of a query group change together from row to row (`types.Drift`): all gain the same
// log-weight and the same value.
#pragma once
#include "linear.h"

namespace residua::RESIDUA_ISA {

struct DriftBlock {
  int64_t rows, rank, width;
  float *basis, *slope, *queries, *y, *weights, *rescale, *bend, *top, *total;

  DriftBlock(Arena& arena, const Shape& shape, int64_t rows, int64_t rank)
      : rows(rows), rank(rank), width(padded(shape.value_dim)) {
    basis = arena.floats(shape.dim * round_up(rank, kPanel));
    slope = arena.floats(rank * width);
    queries = arena.floats(kRowBlock * shape.dim);
    y = arena.floats(rows * rank);
    weights = arena.floats(kRowBlock * kTile);
    rescale = arena.floats(kLanesMax);
    bend = arena.floats(rows);
    top = arena.floats(rows);
    total = arena.floats(rows);
  }

  // y = q @ basis - origin of every row, and how far the log-weights bend there.
  template <class T>
  void place(const AttendArgs& args, const AttendTask& task, const int64_t* tokens) {
    const Shape& s = args.shape;
    const int64_t kv_head = task.batch * s.kv_heads + task.head / (s.heads / s.kv_heads);
    const int64_t group = (task.batch * s.heads + task.head) * args.query.groups + task.group;
    const float *origin = args.origin + group * rank, *curve = args.curve + group * rank;
    const T* q = head_of<T>(args.q, task.batch, task.head);
    pack_matrix(args.basis + kv_head * s.dim * rank, s.dim, rank, basis);
    for (int64_t first = 0; first < rows; first += kRowBlock) {
      const int64_t count = least(kRowBlock, rows - first);
      for (int64_t i = 0; i < count; i++) {
        widen(q + tokens[first + i] * args.q.row, queries + i * s.dim, s.dim);
      }
      with_rows(count, [&](auto n) {
        product<decltype(n)::value>(queries, s.dim, basis, s.dim, rank, rank, y + first * rank);
      });
    }
    // y -= origin, bend = min(sum_r y_r^2 curve_r, max_bend)
    for (int64_t i = 0; i < rows; i++) {
      float* row = y + i * rank;
      float sum = 0.0f;
      for (int64_t r = 0; r < rank; r++) {
        row[r] -= origin[r];
        sum += row[r] * curve[r] * row[r];  // its square alone may be infinite
      }
      bend[i] = sum > args.max_bend ? args.max_bend : sum;  // NaN stays NaN
    }
  }

  // Before the summary keys: to raise their scores is to lower all others. The total starts anew, so that it is
  // the summary keys' own at the end.
  void lower(RunningSoftmax& state, float scale) {
    for (int64_t i = 0; i < rows; i++) {
      top[i] = state.top[i] -= bend[i] / scale;
      total[i] = state.total[i];
      state.total[i] = 0.0f;
    }
  }

  // After them: their values gain y @ slope, weighted by their total, and the earlier total joins in.
  void join(const AttendArgs& args, const AttendTask& task, RunningSoftmax& state, float exponent) {
    const int64_t dim = args.shape.value_dim;
    const int64_t group = (task.batch * args.shape.heads + task.head) * args.query.groups + task.group;
    for (int64_t r = 0; r < rank; r++) {
      std::memcpy(slope + r * width, args.slope + (group * rank + r) * dim, dim * sizeof(float));
      for (int64_t d = dim; d < width; d++) slope[r * width + d] = 0.0f;
    }
    for (int i = 0; i < kLanesMax; i++) rescale[i] = 1.0f;
    // out += total of the summary x (y @ slope)
    for (int64_t first = 0; first < rows; first += kRowBlock) {
      with_rows(least(kRowBlock, rows - first),
                [&](auto n) { add_shift<decltype(n)::value>(first, state); });
    }
    // total += what was kept before, rescaled from the old maximum to the new one
    for (int64_t i = 0; i < rows; i++) top[i] -= state.top[i] == -kInf ? 0.0f : state.top[i];
    for (int64_t i = 0; i < rows; i += kLanes) {
      const Vec past = exp2_of(load(top + i) * set1(exponent));
      store(state.total + i, fma(load(total + i), past, load(state.total + i)));
    }
  }

  // ROWS rows of the output gain total x (y @ slope), kTile ranks at a time.
  template <int ROWS>
  void add_shift(int64_t first, RunningSoftmax& state) {
    for (int64_t start = 0; start < rank; start += kTile) {
      const int64_t count = least(kTile, rank - start);
      for (int i = 0; i < ROWS; i++) {
        const float* row = y + (first + i) * rank + start;
        for (int64_t r = 0; r < count; r++) weights[i * kTile + r] = row[r] * state.total[first + i];
      }
      weighted_sum<ROWS>(weights, slope + start * width, count, width, rescale, state.out + first * width);
    }
  }
};

}  // namespace residua::RESIDUA_ISA
