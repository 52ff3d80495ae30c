// The same attention with products of bfloat16 numbers, two to a lane, where the processor has them. Codes of a cache and
// bfloat16 entries are exact in that type; queries and weights are rounded to it, sums are float32.
#pragma once
#include "attention.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define MLA_HAS_BF16 1

namespace mla {

inline int64_t paired(int64_t n) { return (n + 31) / 32 * 32; }  // channels of a row of a tile

inline __m512bh bits(__m512i v) { return (__m512bh)v; }
inline vf add_products(vf acc, __m512i a, __m512i b) { return (vf)_mm512_dpbf16_ps((__m512)acc, bits(a), bits(b)); }

template <class T>
inline __m512i thirty_two(const T* p) {
  return (__m512i)_mm512_cvtne2ps_pbh((__m512)load(p + LANES), (__m512)load(p));
}
template <>
inline __m512i thirty_two(const bf16* p) { return _mm512_loadu_si512(p); }

// Tokens' channels as bfloat16, zeros behind them: natural [TOKENS, paired(width)].
template <class T>
inline void narrow_rows(const T* from, int64_t stride, int tokens, int width, uint16_t* natural) {
  int64_t wide = paired(width);
  for (int t = 0; t < tokens; t++) {
    const T* row = from + t * stride;
    int c = 0;
    for (; c + 32 <= width; c += 32) _mm512_storeu_si512(natural + t * wide + c, thirty_two(row + c));
    if (c < width) {
      T held[32] = {};
      memcpy(held, row + c, (width - c) * sizeof(T));
      _mm512_storeu_si512(natural + t * wide + c, thirty_two(held));
    }
    const char* next = (const char*)(row + TOKENS * stride);
    for (size_t at = 0; at < width * sizeof(T); at += 64) __builtin_prefetch(next + at);
  }
  if (tokens < TOKENS) memset(natural + tokens * wide, 0, (TOKENS - tokens) * wide * sizeof(uint16_t));
}

inline void narrow_rows(const Store& s, int64_t first, int64_t offset, int tokens, int width, uint16_t* natural) {
  int64_t at = first * s.width + offset;
  switch (s.type) {
    case BF16:
      return narrow_rows((const bf16*)s.data + at, s.width, tokens, width, natural);
    case INT8:
      return narrow_rows((const int8_t*)s.data + at, s.width, tokens, width, natural);
    case FP8:
      return narrow_rows((const fp8*)s.data + at, s.width, tokens, width, natural);
  }
}

// Pairs of channels by token: turned [paired(width) / 2, TOKENS] of two numbers each.
inline void turn_pairs(const uint16_t* natural, int width, uint32_t* turned) {
  int64_t wide = paired(width);
  for (int64_t c = 0; c < wide; c += 32) {
    vf block[LANES];
    for (int t = 0; t < TOKENS; t++) memcpy(&block[t], natural + t * wide + c, 64);
    transpose(block);
    for (int i = 0; i < LANES; i++) memcpy(turned + (c / 2 + i) * TOKENS, &block[i], 64);
  }
}

// Pairs of tokens by channel: in place of rows t and t + 1, their first sixteen channels and so on, [TOKENS / 2, wide].
inline void pair_tokens(const uint16_t* natural, int width, uint32_t* pairs) {
  int64_t wide = paired(width);
  alignas(64) static const uint16_t low[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                               8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  __m512i first = _mm512_load_si512(low), second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
  for (int t = 0; t < TOKENS; t += 2)
    for (int64_t c = 0; c < wide; c += 32) {
      __m512i a = _mm512_loadu_si512(natural + t * wide + c), b = _mm512_loadu_si512(natural + (t + 1) * wide + c);
      _mm512_storeu_si512(pairs + t / 2 * wide + c, _mm512_permutex2var_epi16(a, first, b));
      _mm512_storeu_si512(pairs + t / 2 * wide + c + LANES, _mm512_permutex2var_epi16(a, second, b));
    }
}

template <int N>
inline void score_pairs(const uint32_t* q, int64_t heads, const uint32_t* turned, int64_t pairs, vf* acc) {
  for (int64_t c = 0; c < pairs; c++) {
    __m512i key = _mm512_loadu_si512(turned + c * TOKENS);
    for (int h = 0; h < N; h++) acc[h] = add_products(acc[h], _mm512_set1_epi32((int)q[c * heads + h]), key);
  }
}

template <int N, int V>
inline void weigh_pairs(const uint32_t* weights, const uint32_t* values, int64_t wide, float* out, int64_t ldo) {
  vf acc[N][V];
  for (int h = 0; h < N; h++)
    for (int v = 0; v < V; v++) acc[h][v] = load(out + h * ldo + v * LANES);
  for (int t = 0; t < TOKENS / 2; t++) {
    __m512i value[V];
    for (int v = 0; v < V; v++) value[v] = _mm512_loadu_si512(values + t * wide + v * LANES);
    for (int h = 0; h < N; h++) {
      __m512i weight = _mm512_set1_epi32((int)weights[h * (TOKENS / 2) + t]);
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

// As `attend`, which see.
inline void attend_bf16(const Keys& keys, const float* q, int64_t ldq, int heads, int64_t begin, int64_t end,
                        float softcap, const Tile& tile, float* out, float* top, float* mass) {
  const Store &a = *keys.first, &b = *keys.second;
  int64_t wide_a = paired(keys.first_width), wide_b = paired(keys.second_width);
  int64_t wide_out = keys.latent ? wide_a : wide_b;
  int64_t width_out = padded(keys.latent ? keys.first_width : keys.second_width);
  uint16_t* first = (uint16_t*)tile.natural;
  uint16_t* second = first + TOKENS * wide_a;
  uint32_t* turned = (uint32_t*)tile.turned;
  uint32_t* pairs = turned + (wide_a + wide_b) / 2 * TOKENS;
  uint32_t* queries = (uint32_t*)tile.queries;  // [pairs of channels, H]
  uint32_t* weights = (uint32_t*)tile.weights;  // [H, TOKENS / 2]
  memset(out, 0, heads * width_out * sizeof(float));
  auto ask = [&](int64_t offset, int width, uint32_t* to) {
    for (int h = 0; h < heads; h++)
      for (int64_t c = 0; c < paired(width); c += 2) {
        const float* from = q + h * ldq + offset + c;
        uint32_t low = c < width ? narrow(from[0]).bits : 0, high = c + 1 < width ? narrow(from[1]).bits : 0;
        to[c / 2 * heads + h] = low | high << 16;
      }
  };
  ask(0, keys.first_width, queries);
  uint32_t* queries_b = queries + wide_a / 2 * heads;
  if (keys.latent) ask(padded(keys.first_width), keys.second_width, queries_b);
  for (int h = 0; h < heads; h++) {
    top[h] = -INFINITY;
    store(tile.mass + h * TOKENS, vf{});
  }
  vf places;
  for (int i = 0; i < LANES; i++) places[i] = (float)i;
  for (int64_t s = begin; s < end; s += TOKENS) {
    int tokens = (int)(end - s < TOKENS ? end - s : TOKENS);
    int64_t at_a = keys.row * a.room + s, at_b = keys.row * b.room + s;
    narrow_rows(a, at_a, keys.offset, tokens, keys.first_width, first);
    narrow_rows(b, at_b, keys.offset, tokens, keys.second_width, second);
    turn_pairs(first, keys.first_width, turned);
    if (keys.latent) turn_pairs(second, keys.second_width, turned + wide_a / 2 * TOKENS);
    pair_tokens(keys.latent ? first : second, keys.latent ? keys.first_width : keys.second_width, pairs);
    vf scales_a = a.scales ? load_first(a.scales + at_a, tokens) : all(1.0f);
    vf scales_b = b.scales ? load_first(b.scales + at_b, tokens) : all(1.0f);
    auto some = [&](auto count, int h0) {
      constexpr int N = decltype(count)::value;
      vf acc[N] = {};
      score_pairs<N>(queries + h0, heads, turned, wide_a / 2, acc);
      if (keys.latent) {
        vf more[N] = {};
        if (!a.scales && !b.scales)
          for (int h = 0; h < N; h++) more[h] = acc[h];
        score_pairs<N>(queries_b + h0, heads, turned + wide_a / 2 * TOKENS, wide_b / 2, more);
        for (int h = 0; h < N; h++)
          acc[h] = a.scales || b.scales ? acc[h] * scales_a + more[h] * scales_b : more[h];
      }
      for (int h = 0; h < N; h++) {
        vf x = acc[h];
        if (softcap != 0)
          for (int i = 0; i < LANES; i++) x[i] = softcap * std::tanh(x[i] / softcap);
        vf p = weights_of(x, places < (float)tokens, top[h0 + h], tile.mass + (h0 + h) * TOKENS,
                          out + (h0 + h) * width_out, width_out);
        if (keys.latent && a.scales) p *= scales_a;
        __m256i narrowed = (__m256i)_mm512_cvtneps_pbh((__m512)p);
        memcpy(weights + (h0 + h) * (TOKENS / 2), &narrowed, 32);
      }
    };
    in_blocks(heads, some);
    int h = 0;
    for (; h + 4 <= heads; h += 4)
      weigh_all<4>(weights + h * (TOKENS / 2), pairs, wide_out, width_out, out + h * width_out);
    for (; h + 2 <= heads; h += 2)
      weigh_all<2>(weights + h * (TOKENS / 2), pairs, wide_out, width_out, out + h * width_out);
    for (; h < heads; h++)
      weigh_all<1>(weights + h * (TOKENS / 2), pairs, wide_out, width_out, out + h * width_out);
  }
  for (int h = 0; h < heads; h++) mass[h] = sum(load(tile.mass + h * TOKENS));
}

}  // namespace mla
#endif
