// Products of a few rows with a large matrix: the matrix is read once, in the type it is kept in, and widened on the way.
#pragma once
#include <algorithm>

#include "layout.h"
#include "simd.h"

namespace mla {

// sums[m] of N rows of w, from `w` on `stride` apart, with M rows of x.
template <int N, int M, class W>
inline void dots(const W* w, int64_t stride, const float* x, int64_t ldx, int k, float* sums) {
  vf acc[N][M] = {};
  constexpr int LINE = 64 / sizeof(W) > LANES ? 64 / sizeof(W) : LANES;  // numbers of a line of memory
  auto take = [&](int at) {
    vf weight[N];
    for (int n = 0; n < N; n++) weight[n] = load(w + n * stride + at);
    for (int m = 0; m < M; m++) {
      vf given = load(x + m * ldx + at);
      for (int n = 0; n < N; n++) acc[n][m] += weight[n] * given;
    }
  };
  int at = 0;
  for (; at + LINE <= k; at += LINE) {
    for (int n = 0; n < N; n++) __builtin_prefetch(w + (N + n) * stride + at);  // the next rows: memory is what a step waits for
    for (int i = 0; i < LINE; i += LANES) take(at + i);
  }
  for (; at + LANES <= k; at += LANES) take(at);
  if (at < k)
    for (int n = 0; n < N; n++) {
      vf weight = load_first(w + n * stride + at, k - at);
      for (int m = 0; m < M; m++) acc[n][m] += weight * load_first(x + m * ldx + at, k - at);
    }
  for (int n = 0; n < N; n++)
    for (int m = 0; m < M; m++) sums[n * M + m] = sum(acc[n][m]);
}

template <int N, class W, class Put>
inline void rows_of(const W* w, int64_t stride, const float* x, int64_t ldx, int rows, int k, Put put) {
  float sums[N * 4];
  int m = 0;
  for (; m + 4 <= rows; m += 4) {
    dots<N, 4>(w, stride, x + m * ldx, ldx, k, sums);
    for (int n = 0; n < N; n++)
      for (int i = 0; i < 4; i++) put(m + i, n, sums[n * 4 + i]);
  }
  switch (rows - m) {
    case 3:
      dots<N, 3>(w, stride, x + m * ldx, ldx, k, sums);
      break;
    case 2:
      dots<N, 2>(w, stride, x + m * ldx, ldx, k, sums);
      break;
    case 1:
      dots<N, 1>(w, stride, x + m * ldx, ldx, k, sums);
      break;
    default:
      return;
  }
  int left = rows - m;
  for (int n = 0; n < N; n++)
    for (int i = 0; i < left; i++) put(m + i, n, sums[n * left + i]);
}

// put(m, n, value) for outputs n in [begin, end) of all rows.
template <class W, class Put>
inline void multiply(const W* w, const Linear& l, int begin, int end, const float* x, int64_t ldx, int rows, Put put) {
  auto kept = [&](int base) {
    return [&, base](int m, int n, float value) {
      n += base;
      if (l.scale) value *= l.scale[n];
      if (l.bias) value += l.bias[n];
      put(m, n, value);
    };
  };
  int n = begin;
  for (; n + 4 <= end; n += 4) rows_of<4>(w + (int64_t)n * l.k, l.k, x, ldx, rows, l.k, kept(n));
  for (; n < end; n++) rows_of<1>(w + (int64_t)n * l.k, l.k, x, ldx, rows, l.k, kept(n));
}

template <class Put>
inline void apply(const Linear& l, int begin, int end, const float* x, int64_t ldx, int rows, Put put) {
  switch (l.type) {
    case F32:
      return multiply((const float*)l.w, l, begin, end, x, ldx, rows, put);
    case BF16:
      return multiply((const bf16*)l.w, l, begin, end, x, ldx, rows, put);
    case INT8:
      return multiply((const int8_t*)l.w, l, begin, end, x, ldx, rows, put);
    case FP8:
      return multiply((const fp8*)l.w, l, begin, end, x, ldx, rows, put);
  }
}

inline void norm(const Norm& how, const float* x, float* out, int width) {
  if (how.kind == NO_NORM) {
    if (out != x) memcpy(out, x, width * sizeof(float));
    return;
  }
  double total = 0, squares = 0;
  for (int i = 0; i < width; i++) total += x[i];
  double mean = how.kind == LAYER ? total / width : 0;
  for (int i = 0; i < width; i++) squares += (x[i] - mean) * (x[i] - mean);
  float factor = (float)(1.0 / __builtin_sqrt(squares / width + how.eps)), shift = (float)mean;
  for (int i = 0; i < width; i++) out[i] = (x[i] - shift) * factor * how.weight[i] + (how.bias ? how.bias[i] : 0.0f);
}

inline vf tanh_of(vf u) {
  vf e = exponential(all(-2.0f) * u);
  return (1.0f - e) / (1.0f + e);
}

inline vf activate(vf x, int how) {
  switch (how) {
    case SILU:
      return x / (1.0f + exponential(-x));
    case GELU_TANH:
      return 0.5f * x * (1.0f + tanh_of(0.7978845608f * (x + 0.044715f * x * x * x)));
    case RELU:
      return maximum(x, vf{});
  }
  vf out;
  for (int i = 0; i < LANES; i++) out[i] = 0.5f * x[i] * (1.0f + __builtin_erff(x[i] * 0.70710678f));
  return out;
}

}  // namespace mla
