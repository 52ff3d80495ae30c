// The same attention over INT8 latents in whole numbers, four products to a lane, where the processor has them (VNNI). The codes
// are used as they are; queries and weights become two bytes each, a finer rounding than bfloat16's. Rotary keys stay bfloat16.
#pragma once
#include "attention_bf16.h"

#if defined(MLA_HAS_BF16) && defined(__AVX512VNNI__)
#define MLA_HAS_VNNI 1

namespace mla {

constexpr int LONG_BLOCK = 4 * TOKENS;  // tokens at a time
constexpr int QUADS = LONG_BLOCK / 4;   // of tokens
constexpr int CHUNK = 64;               // channels of a register
constexpr float LARGEST = 32512.0f;     // 127 * 256: what two bytes hold of a weight or a query

inline int64_t chunked(int64_t n) { return (n + CHUNK - 1) / CHUNK * CHUNK; }

// Whether it pays: what pads the latent is computed too. (Sums of more than 512 products may pass 2^31.)
inline bool suits_int8(const Store& a, const Store& b, int rank) {
  return a.type == INT8 && a.scales && !b.scales && (b.type == BF16 || b.width == 0) && 4 * rank >= 3 * chunked(rank) && rank <= 512;
}

inline int64_t int8_floats(int rank, int rope, int heads) {  // of the memory that `attend_int8` works in
  int64_t wide = chunked(rank), keys = paired(rope) / 2;
  return 2 * wide / 4 * LONG_BLOCK + keys * LONG_BLOCK + heads * (wide / 2 + keys + 2 * QUADS + wide + LANES + 4);
}

inline __m512i quads(vi acc, __m512i codes, __m512i other) {
  return _mm512_dpbusd_epi32((__m512i)acc, codes, other);
}

// Codes + 128, as turned [wide / 4, LONG_BLOCK]: four channels by token; and as values [QUADS, wide]: four tokens by channel,
// where channel 16 l + 4 j + i of a chunk is at 16 j + 4 l + i.
inline void arrange_codes(const int8_t* from, int64_t stride, int tokens, int width, uint32_t* turned, uint32_t* values) {
  int64_t wide = chunked(width);
  __m512i offset = _mm512_set1_epi8((char)0x80);
  for (int t0 = 0; t0 < LONG_BLOCK; t0 += TOKENS) {
    int here = tokens - t0 < TOKENS ? tokens - t0 : TOKENS;
    const int8_t* rows = from + t0 * stride;
    for (int c = 0; c < width; c += CHUNK) {
      int some = width - c < CHUNK ? width - c : CHUNK;
      __mmask64 mask = some == CHUNK ? ~0ULL : (1ULL << some) - 1;
      __m512 block[TOKENS];
#pragma GCC unroll 16
      for (int t = 0; t < TOKENS; t++) {
        __m512i row = _mm512_maskz_loadu_epi8(t < here ? mask : 0, rows + t * stride + c);
        block[t] = (__m512)_mm512_xor_si512(row, offset);
      }
      uint32_t* to = values + t0 / 4 * wide + c;
#pragma GCC unroll 4
      for (int t = 0; t < TOKENS; t += 4, to += wide) {
        __m512i a = (__m512i)block[t], b = (__m512i)block[t + 1], e = (__m512i)block[t + 2], f = (__m512i)block[t + 3];
        __m512i ab = _mm512_unpacklo_epi8(a, b), ba = _mm512_unpackhi_epi8(a, b);
        __m512i ef = _mm512_unpacklo_epi8(e, f), fe = _mm512_unpackhi_epi8(e, f);
        _mm512_storeu_si512(to, _mm512_unpacklo_epi16(ab, ef));
        _mm512_storeu_si512(to + 16, _mm512_unpackhi_epi16(ab, ef));
        _mm512_storeu_si512(to + 32, _mm512_unpacklo_epi16(ba, fe));
        _mm512_storeu_si512(to + 48, _mm512_unpackhi_epi16(ba, fe));
      }
      transpose(block);
      for (int i = 0; i < LANES; i++) memcpy(turned + (c / 4 + i) * LONG_BLOCK + t0, &block[i], 64);
    }
  }
}

// n = 256 high + low, both signed bytes, for |n| <= LARGEST.
inline vi high_of(vi n) { return (n + 128) >> 8; }
inline vi low_of(vi n) { return n - (high_of(n) << 8); }
// Of sums with high and low bytes, of which the latter began at -128 times the sum of n: modulo 2^32, which the result fits.
inline vf joined(vi high, vi low) { return floats((high << 8) + low); }
inline vi whole(vf x) { return (vi)_mm512_cvtps_epi32((__m512)x); }
inline int32_t start_of(vi n) { return -128 * _mm512_reduce_add_epi32((__m512i)n); }
inline void store_bytes(int8_t* to, vi x) { _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)x)); }

// One head's query [width]: high and low bytes, four channels each, at to[2 heads c], where its sums start, and its unit (NaN
// for a query that is not finite).
inline float quad_query(const float* q, int heads, int width, uint32_t* to, int32_t& start) {
  vf most = {}, check = {};
  auto part = [&](int c) { return load_first(q + c, width - c < LANES ? (width - c < 0 ? 0 : width - c) : LANES); };
  for (int c = 0; c < width; c += LANES) {
    vf x = part(c);
    most = maximum(most, maximum(x, -x));
    check += x * 0.0f;
  }
  float size = largest(most), unit = size / LARGEST + sum(check);
  float factor = size > 0 ? LARGEST / size : 0.0f;
  vi all_of_it = {};
  for (int c = 0; c < chunked(width); c += LANES) {
    vi n = whole(part(c) * factor);
    all_of_it += n;
    int8_t bytes[2][LANES];
    store_bytes(bytes[0], high_of(n));
    store_bytes(bytes[1], low_of(n));
    for (int i = 0; i < LANES / 4; i++)
      for (int j = 0; j < 2; j++) memcpy(to + ((c / 4 + i) * heads) * 2 + j, bytes[j] + 4 * i, 4);
  }
  start = start_of(all_of_it);
  return unit;
}

// scores [N, LONG_BLOCK] of N heads: q [wide / 4, H, 2], rotary [pairs, H].
template <int N>
__attribute__((noinline)) void score_codes(const uint32_t* q, const int32_t* starts, const float* units, int64_t heads,
                                           const uint32_t* turned, int64_t count, const float* scales,
                                           const uint32_t* rotary, const uint32_t* keys, int64_t pairs, float* scores) {
  vi high[N][4], low[N][4];
#pragma GCC unroll 3
  for (int h = 0; h < N; h++)
    for (int i = 0; i < 4; i++) {
      high[h][i] = vi{};
      low[h][i] = vi{} + starts[h];
    }
  for (int64_t c = 0; c < count; c++) {
    __m512i code[4];
    for (int i = 0; i < 4; i++) code[i] = _mm512_loadu_si512(turned + c * LONG_BLOCK + i * TOKENS);
#pragma GCC unroll 3
    for (int h = 0; h < N; h++) {
      __m512i query = _mm512_set1_epi32((int)q[(c * heads + h) * 2]);
      for (int i = 0; i < 4; i++) high[h][i] = (vi)quads(high[h][i], code[i], query);
      query = _mm512_set1_epi32((int)q[(c * heads + h) * 2 + 1]);
      for (int i = 0; i < 4; i++) low[h][i] = (vi)quads(low[h][i], code[i], query);
    }
  }
  vf acc[N][4];
#pragma GCC unroll 3
  for (int h = 0; h < N; h++)
    for (int i = 0; i < 4; i++)
      acc[h][i] = joined(high[h][i], low[h][i]) * (units[h] * load(scales + i * TOKENS));
  for (int64_t c = 0; c < pairs; c++) {
    __m512i key[4];
    for (int i = 0; i < 4; i++) key[i] = _mm512_loadu_si512(keys + c * LONG_BLOCK + i * TOKENS);
#pragma GCC unroll 3
    for (int h = 0; h < N; h++) {
      __m512i query = _mm512_set1_epi32((int)rotary[c * heads + h]);
      for (int i = 0; i < 4; i++) acc[h][i] = add_products(acc[h][i], query, key[i]);
    }
  }
#pragma GCC unroll 3
  for (int h = 0; h < N; h++)
    for (int i = 0; i < 4; i++) store(scores + h * LONG_BLOCK + i * TOKENS, acc[h][i]);
}

// What a head's scores x [LONG_BLOCK] become: bytes high and low to [2, QUADS], and where sums start; gives the unit.
inline float code_weights(float* x, int tokens, const float* scales, float& top, float* sums, float* out, int64_t width,
                          uint32_t* to, int32_t& start) {
  for (int i = tokens; i < LONG_BLOCK; i++) x[i] = -INFINITY;
  vf part[4];
  for (int i = 0; i < 4; i++) part[i] = load(x + i * TOKENS);
  vf most = maximum(maximum(part[0], part[1]), maximum(part[2], part[3]));
  if (_mm512_cmp_ps_mask((__m512)most, _mm512_set1_ps(top), _CMP_GT_OQ)) {
    float next = largest(most), shrink = std::exp(top - next);
    top = next;
    store(sums, load(sums) * shrink);
    for (int64_t c = 0; c < width; c += LANES) store(out + c, load(out + c) * shrink);
  }
  float from = top > -INFINITY ? top : 0.0f;  // -inf: no score is any larger
  for (int i = 0; i < 4; i++) part[i] = exponential(part[i] - from);
  store(sums, load(sums) + ((part[0] + part[1]) + (part[2] + part[3])));
  for (int i = 0; i < 4; i++) part[i] *= load(scales + i * TOKENS);
  float size = largest(maximum(maximum(part[0], part[1]), maximum(part[2], part[3])));
  float factor = size > 0 ? LARGEST / size : 0.0f;
  vi all_of_it = {};
  for (int i = 0; i < 4; i++) {
    vi n = whole(part[i] * factor);
    all_of_it += n;
    store_bytes((int8_t*)to + i * LANES, high_of(n));
    store_bytes((int8_t*)(to + QUADS) + i * LANES, low_of(n));
  }
  start = start_of(all_of_it);
  return size / LARGEST;
}

// out [N, wide] += the tokens' values, weighed: of one chunk of channels.
template <int N>
__attribute__((noinline)) void weigh_codes(const uint32_t* weights, const int32_t* starts, const float* units,
                                           const uint32_t* values, int64_t wide, float* out) {
  vi high[N][4], low[N][4];
#pragma GCC unroll 3
  for (int h = 0; h < N; h++)
    for (int v = 0; v < 4; v++) {
      high[h][v] = vi{};
      low[h][v] = vi{} + starts[h];
    }
  for (int t = 0; t < QUADS; t++) {
    __m512i value[4];
    for (int v = 0; v < 4; v++) value[v] = _mm512_loadu_si512(values + t * wide + v * LANES);
#pragma GCC unroll 3
    for (int h = 0; h < N; h++) {
      __m512i weight = _mm512_set1_epi32((int)weights[h * 2 * QUADS + t]);
      for (int v = 0; v < 4; v++) high[h][v] = (vi)quads(high[h][v], value[v], weight);
      weight = _mm512_set1_epi32((int)weights[h * 2 * QUADS + QUADS + t]);
      for (int v = 0; v < 4; v++) low[h][v] = (vi)quads(low[h][v], value[v], weight);
    }
  }
#pragma GCC unroll 3
  for (int h = 0; h < N; h++)
    for (int v = 0; v < 4; v++) {
      float* to = out + h * wide + v * LANES;
      store(to, load(to) + units[h] * joined(high[h][v], low[h][v]));
    }
}

// As `attend`, which see.
inline void attend_int8(const Keys& keys, const float* q, int64_t ldq, int heads, int64_t begin, int64_t end, float softcap,
                        const Tile& tile, float* out, float* top, float* mass) {
  const Store &a = *keys.first, &b = *keys.second;
  int rank = keys.first_width, rope = keys.second_width;
  int64_t wide = chunked(rank), width_out = padded(rank), pairs = paired(rope) / 2;
  uint32_t* at = (uint32_t*)tile.natural;
  auto take = [&](int64_t n) { return (at += n) - n; };
  uint32_t* turned = take(wide / 4 * LONG_BLOCK);
  uint32_t* values = take(wide / 4 * LONG_BLOCK);
  uint32_t* rotary = take(pairs * LONG_BLOCK);
  float* sums = (float*)take(heads * LANES);
  float* summed = (float*)take(heads * wide);    // [H, wide], channels as `values` has them
  uint32_t* queries = take(heads * wide / 2);    // [wide / 4, H, 2]
  uint32_t* queries_b = take(heads * pairs);     // [pairs, H]
  uint32_t* weights = take(heads * 2 * QUADS);   // [H, 2, QUADS]
  float* query_units = (float*)take(heads);
  float* units = (float*)take(heads);
  int32_t *query_starts = (int32_t*)take(heads), *starts = (int32_t*)take(heads);
  alignas(64) float scores[3 * LONG_BLOCK], scales[LONG_BLOCK];
  memset(summed, 0, heads * wide * sizeof(float));
  memset(sums, 0, heads * LANES * sizeof(float));
  for (int h = 0; h < heads; h++) {
    top[h] = -INFINITY;
    query_units[h] = quad_query(q + h * ldq, heads, rank, queries + 2 * h, query_starts[h]);
  }
  pair_queries(q + padded(rank), ldq, heads, rope, queries_b);
  int parts = 2 * (heads / 3 + heads % 3), part = 0;
  const char *next_codes = nullptr, *next_others = nullptr;  // of the next block
  auto fetch = [&](const char* block, int64_t size) {  // a part of it
    const char *from = block + size * part / parts, *to = block + size * (part + 1) / parts;
    for (; from < to; from += 64) __builtin_prefetch(from);
  };
  auto by_three = [&](auto work) {
    auto step = [&](auto count, int h) {
      fetch(next_codes, (int64_t)LONG_BLOCK * rank);
      fetch(next_others, (int64_t)LONG_BLOCK * 2 * rope);
      part++;
      work(count, h);
    };
    int h = 0;
    for (; h + 3 <= heads; h += 3) step(std::integral_constant<int, 3>{}, h);
    for (; h < heads; h++) step(std::integral_constant<int, 1>{}, h);
  };
  int tokens;
  for (int64_t s = begin; s < end; s += tokens) {
    tokens = block_of<LONG_BLOCK>(s, end);
    int64_t at_a = place(a, keys.row, s), at_b = place(b, keys.row, s), next = s + tokens < end ? s + tokens : s;
    const char *codes = (const char*)a.data + at_a * rank, *others = (const char*)b.data + at_b * 2 * rope;
    next_codes = (const char*)a.data + place(a, keys.row, next) * rank;
    next_others = (const char*)b.data + place(b, keys.row, next) * 2 * rope;
    part = 0;
    arrange_codes((const int8_t*)codes, a.width, tokens, rank, turned, values);
    if (rope) arrange<LONG_BLOCK>((const bf16*)others, b.width, tokens, rope, rotary, nullptr);
    if (tokens < LONG_BLOCK) memset(scales, 0, sizeof scales);
    memcpy(scales, a.scales + at_a, tokens * sizeof(float));
    by_three([&](auto count, int h0) {
      constexpr int N = decltype(count)::value;
      score_codes<N>(queries + 2 * h0, query_starts + h0, query_units + h0, heads, turned, wide / 4, scales, queries_b + h0,
                     rotary, pairs, scores);
      if (softcap != 0)
        for (int i = 0; i < N * LONG_BLOCK; i++) scores[i] = softcap * std::tanh(scores[i] / softcap);
      for (int h = h0; h < h0 + N; h++)
        units[h] = code_weights(scores + (h - h0) * LONG_BLOCK, tokens, scales, top[h], sums + h * LANES, summed + h * wide,
                                wide, weights + h * 2 * QUADS, starts[h]);
    });
    by_three([&](auto count, int h) {
      constexpr int N = decltype(count)::value;
      for (int64_t c = 0; c < wide; c += CHUNK)
        weigh_codes<N>(weights + h * 2 * QUADS, starts + h, units + h, values + c, wide, summed + h * wide + c);
    });
  }
  for (int h = 0; h < heads; h++) {
    mass[h] = sum(load(sums + h * LANES));
    for (int c = 0; c < width_out; c += 4) {
      int chunk = c / CHUNK * CHUNK, l = c % CHUNK / 16, j = c % 16 / 4;
      memcpy(out + h * width_out + c, summed + h * wide + chunk + 16 * j + 4 * l, 4 * sizeof(float));
    }
  }
}

}  // namespace mla
#endif
