// The same attention with products of bfloat16 numbers, two to a lane, where the processor has them. Codes of a cache and
// bfloat16 entries are exact in that type; queries and weights are rounded to it, sums are float32.
#pragma once
#include "attention.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define MLA_HAS_BF16 1

namespace mla {

constexpr int BLOCK = 2 * TOKENS;  // tokens at a time, two vectors of scores a head

inline vf add_products(vf acc, __m512i a, __m512i b) {
  return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
}
inline __m512i narrowed(vf low, vf high) { return (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low); }

template <class T>
inline __m512i thirty_two(const T* p) {
  return narrowed(load(p), load(p + LANES));
}
template <>
inline __m512i thirty_two(const bf16* p) { return _mm512_loadu_si512(p); }

template <class T>
inline __m512i some_of_32(const T* p, int n) {
  T held[32] = {};
  memcpy(held, p, n * sizeof(T));
  return thirty_two(held);
}

// Of up to SIZE tokens, as bfloat16, zeros behind them, either or both of
//   turned [paired(width) / 2, SIZE]: pairs of channels by token, for scores;
//   pairs [SIZE / 2, paired(width)]: pairs of tokens by channel, for values.
template <int SIZE, class T>
inline void arrange(const T* from, int64_t stride, int tokens, int width, uint32_t* turned, uint32_t* pairs) {
  int64_t wide = paired(width);
  alignas(64) static const uint16_t low[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                               8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  __m512i first = _mm512_load_si512(low), second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
  for (int t0 = 0; t0 < SIZE; t0 += TOKENS) {
    int here = tokens - t0 < TOKENS ? tokens - t0 : TOKENS;
    const T* rows = from + t0 * stride;
    for (int t = 0; t < here && SIZE == BLOCK; t++) {  // the next ones
      const char* next = (const char*)(rows + (t + SIZE) * stride);
      for (size_t at = 0; at < width * sizeof(T); at += 64) __builtin_prefetch(next + at);
    }
    for (int c = 0; c < width; c += 32) {
      vf block[TOKENS];
      int some = width - c;
      if (some >= 32 && here == TOKENS)
        for (int t = 0; t < TOKENS; t++) block[t] = (vf)thirty_two(rows + t * stride + c);
      else
        for (int t = 0; t < TOKENS; t++)
          block[t] = t < here ? (vf)some_of_32(rows + t * stride + c, some < 32 ? some : 32) : vf{};
      if (pairs) {
        uint32_t* to = pairs + t0 / 2 * wide + c;
        for (int t = 0; t < TOKENS; t += 2, to += wide) {
          __m512i a = (__m512i)block[t], b = (__m512i)block[t + 1];
          _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, first, b));
          _mm512_storeu_si512(to + LANES, _mm512_permutex2var_epi16(a, second, b));
        }
      }
      if (turned) {
        transpose(block);
        for (int i = 0; i < LANES; i++) memcpy(turned + (c / 2 + i) * SIZE + t0, &block[i], 64);
      }
    }
  }
}

inline void arrange(const Store& s, int64_t token, int64_t offset, int tokens, int width, uint32_t* turned,
                    uint32_t* pairs) {
  int64_t at = token * s.width + offset;
  switch (s.type) {
    case BF16:
      return arrange<BLOCK>((const bf16*)s.data + at, s.width, tokens, width, turned, pairs);
    case INT8:
      return arrange<BLOCK>((const int8_t*)s.data + at, s.width, tokens, width, turned, pairs);
    case FP8:
      return arrange<BLOCK>((const fp8*)s.data + at, s.width, tokens, width, turned, pairs);
  }
}

// Queries q [H, ldq] as pairs of channels: to [paired(width) / 2, H].
inline void pair_queries(const float* q, int64_t ldq, int heads, int width, uint32_t* to) {
  for (int h = 0; h < heads; h++)
    for (int c = 0; c < width; c += 32) {
      const float* from = q + h * ldq + c;
      float held[32] = {};
      memcpy(held, from, (width - c < 32 ? width - c : 32) * sizeof(float));
      uint32_t both[LANES];
      _mm512_storeu_si512(both, narrowed(load(held), load(held + LANES)));
      for (int i = 0; i < LANES; i++) to[(c / 2 + i) * heads + h] = both[i];
    }
}

// scores [N, BLOCK] = their sums over pairs of channels, times the tokens' scales [BLOCK] if there are, plus what is there if
// `more`. (In a function of its own: its sums need all registers.)
template <int N>
__attribute__((noinline)) void score_pairs(const uint32_t* q, int64_t heads, const uint32_t* turned, int64_t pairs,
                                           const float* scales, bool more, float* scores) {
  vf acc[N][2] = {};
  for (int64_t c = 0; c < pairs; c++) {
    __m512i low = _mm512_loadu_si512(turned + c * BLOCK), high = _mm512_loadu_si512(turned + c * BLOCK + TOKENS);
#pragma GCC unroll 16
    for (int h = 0; h < N; h++) {
      __m512i query = _mm512_set1_epi32((int)q[c * heads + h]);
      acc[h][0] = add_products(acc[h][0], query, low);
      acc[h][1] = add_products(acc[h][1], query, high);
    }
  }
#pragma GCC unroll 16
  for (int h = 0; h < N; h++)
    for (int i = 0; i < 2; i++) {
      float* to = scores + h * BLOCK + i * TOKENS;
      vf x = scales ? acc[h][i] * load(scales + i * TOKENS) : acc[h][i];
      store(to, more ? load(to) + x : x);
    }
}

template <int N, int V>
inline void weigh_pairs(const uint32_t* weights, const uint32_t* values, int64_t wide, float* out, int64_t ldo) {
  vf acc[N][V];
  for (int h = 0; h < N; h++)
    for (int v = 0; v < V; v++) acc[h][v] = load(out + h * ldo + v * LANES);
  for (int t = 0; t < BLOCK / 2; t++) {
    __m512i value[V];
    for (int v = 0; v < V; v++) value[v] = _mm512_loadu_si512(values + t * wide + v * LANES);
    for (int h = 0; h < N; h++) {
      __m512i weight = _mm512_set1_epi32((int)weights[h * (BLOCK / 2) + t]);
      for (int v = 0; v < V; v++) acc[h][v] = add_products(acc[h][v], weight, value[v]);
    }
  }
  for (int h = 0; h < N; h++)
    for (int v = 0; v < V; v++) store(out + h * ldo + v * LANES, acc[h][v]);
}

template <int N>
inline void weigh_all(const uint32_t* weights, const uint32_t* values, int64_t wide, int64_t width, float* out) {
  int64_t c = 0;
  for (; c + 4 * LANES <= width; c += 4 * LANES) weigh_pairs<N, 4>(weights, values + c, wide, out + c, width);
  for (; c < width; c += LANES) weigh_pairs<N, 1>(weights, values + c, wide, out + c, width);
}

inline bool suits_bf16(const Store& a, const Store& b) { return a.type != F32 && (b.type != F32 || b.width == 0); }

// As `weights_of`, of a block's scores x [BLOCK] of a head, which become weights; those of a latent are `scaled`, and all
// bfloat16 in `to` [BLOCK / 2].
inline void block_weights(float* x, int tokens, const float* scales, float& top, float* sums, float* out, int64_t width,
                          uint32_t* to) {
  for (int i = tokens; i < BLOCK; i++) x[i] = -INFINITY;
  vf low = load(x), high = load(x + TOKENS);
  __mmask16 above = _mm512_cmp_ps_mask((__m512)maximum(low, high), _mm512_set1_ps(top), _CMP_GT_OQ);
  if (above) {
    float most = largest(maximum(low, high)), shrink = std::exp(top - most);
    top = most;
    store(sums, load(sums) * shrink);
    for (int64_t c = 0; c < width; c += LANES) store(out + c, load(out + c) * shrink);
  }
  float from = top > -INFINITY ? top : 0.0f;  // -inf: no score is any larger
  low = exponential(low - from);
  high = exponential(high - from);
  store(sums, load(sums) + (low + high));
  if (scales) {
    low *= load(scales);
    high *= load(scales + TOKENS);
  }
  _mm512_storeu_si512(to, narrowed(low, high));
}

// As `attend`, which see.
inline void attend_bf16(const Keys& keys, const float* q, int64_t ldq, int heads, int64_t begin, int64_t end,
                        float softcap, const Tile& tile, float* out, float* top, float* mass) {
  const Store &a = *keys.first, &b = *keys.second;
  int64_t wide_a = paired(keys.first_width), wide_b = paired(keys.second_width);
  int64_t wide_out = keys.latent ? wide_a : wide_b;
  int64_t width_out = padded(keys.latent ? keys.first_width : keys.second_width);
  uint32_t* turned = (uint32_t*)tile.turned;
  uint32_t* turned_b = turned + wide_a / 2 * BLOCK;
  uint32_t* pairs = (uint32_t*)tile.natural;
  uint32_t* queries = (uint32_t*)tile.queries;  // [pairs of channels, H]
  uint32_t* queries_b = queries + wide_a / 2 * heads;
  uint32_t* weights = (uint32_t*)tile.weights;  // [H, BLOCK / 2]
  alignas(64) float scores[9 * BLOCK], scales_a[BLOCK], scales_b[BLOCK];
  memset(out, 0, heads * width_out * sizeof(float));
  pair_queries(q, ldq, heads, keys.first_width, queries);
  if (keys.latent) pair_queries(q + padded(keys.first_width), ldq, heads, keys.second_width, queries_b);
  for (int h = 0; h < heads; h++) {
    top[h] = -INFINITY;
    store(tile.mass + h * TOKENS, vf{});
  }
  int tokens;
  for (int64_t s = begin; s < end; s += tokens) {
    tokens = block_of<BLOCK>(s, end);
    int64_t at_a = place(a, keys.row, s), at_b = place(b, keys.row, s);
    arrange(a, at_a, keys.offset, tokens, keys.first_width, turned, keys.latent ? pairs : nullptr);
    if (keys.second_width)
      arrange(b, at_b, keys.offset, tokens, keys.second_width, keys.latent ? turned_b : nullptr,
              keys.latent ? nullptr : pairs);
    auto read = [&](const Store& store, int64_t at, float* to) -> const float* {
      if (!store.scales) return nullptr;
      if (tokens < BLOCK) memset(to, 0, BLOCK * sizeof(float));
      memcpy(to, store.scales + at, tokens * sizeof(float));
      return to;
    };
    const float *of_a = read(a, at_a, scales_a), *of_b = read(b, at_b, scales_b);
    auto some = [&](auto count, int h0) {
      constexpr int N = decltype(count)::value;
      score_pairs<N>(queries + h0, heads, turned, wide_a / 2, of_a, false, scores);
      if (keys.latent) score_pairs<N>(queries_b + h0, heads, turned_b, wide_b / 2, of_b, true, scores);
      if (softcap != 0)
        for (int i = 0; i < N * BLOCK; i++) scores[i] = softcap * std::tanh(scores[i] / softcap);
      for (int h = h0; h < h0 + N; h++)
        block_weights(scores + (h - h0) * BLOCK, tokens, keys.latent ? of_a : nullptr, top[h], tile.mass + h * TOKENS,
                      out + h * width_out, width_out, weights + h * (BLOCK / 2));
    };
    in_blocks(heads, some);
    for (int h = 0; h < heads;) {
      int left = heads - h;
      auto weigh = [&](auto count) {
        constexpr int N = decltype(count)::value;
        weigh_all<N>(weights + h * (BLOCK / 2), pairs, wide_out, width_out, out + h * width_out);
        h += N;
      };
      if (left == 5 || left == 9)
        weigh(std::integral_constant<int, 5>{});
      else if (left >= 4)
        weigh(std::integral_constant<int, 4>{});
      else if (left == 3)
        weigh(std::integral_constant<int, 3>{});
      else
        weigh(std::integral_constant<int, 1>{});
    }
  }
  for (int h = 0; h < heads; h++) mass[h] = sum(load(tile.mass + h * TOKENS));
}

}  // namespace mla
#endif
