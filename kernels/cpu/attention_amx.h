// The same attention over INT8 latents by tiles: sixteen tokens at a time with the queries of sixteen heads. Codes are read as they
// lie, for scores; heads are lanes from there on, so nothing is summed across lanes. Queries and weights are two bytes each.
#pragma once
#include "amx.h"
#include "attention_int8.h"
#include "linear.h"

#if defined(MLA_HAS_AMX) && defined(MLA_HAS_VNNI)
#define MLA_HAS_TILES 1

namespace mla {

constexpr int TILE_BLOCK = 128;            // tokens at a time
constexpr int PIECE = 64;                  // tokens that lie together: a page, a row of weights
constexpr int GROUP = LANES;               // heads of a tile
constexpr float LARGEST_QUERY = 32767.0f;  // 256 high + low: a signed and an unsigned byte
constexpr float LARGEST_WEIGHT = 65535.0f; // weights have no sign

inline bool suits_tiles(const Store& a, const Store& b, int rank) { return suits_int8(a, b, rank) && tiles_allowed(); }

inline int64_t tile_floats(int rank, int rope, int heads) {  // of the memory that `attend_tiles` works in
  int64_t wide = chunked(rank), pairs = paired(rope) / 2, groups = (heads + GROUP - 1) / GROUP;
  return PIECE * (wide / 4 + pairs) + TILE_BLOCK * (wide / 4 + GROUP + 1) +
         GROUP * (8 * GROUP + groups * (wide / 2 + pairs + TILE_BLOCK / 2 + wide + 4)) + 16 * LANES;
}

// Of the queries of up to sixteen heads: quads of channels by head, high and low bytes apart, [2][wide / 4, GROUP], and their
// units (NaN for a query that is not finite).
inline void tile_queries(const float* q, int64_t ldq, int heads, int width, uint32_t* to, float* units) {
  int64_t size = chunked(width) / 4 * GROUP;
  memset(to, 0, 2 * size * sizeof(uint32_t));
  memset(units, 0, GROUP * sizeof(float));
  for (int h = 0; h < heads; h++) {
    const float* from = q + h * ldq;
    vf most = {}, check = {};
    auto part = [&](int c) { return load_first(from + c, width - c < LANES ? (width - c < 0 ? 0 : width - c) : LANES); };
    for (int c = 0; c < width; c += LANES) {
      vf x = part(c);
      most = maximum(most, maximum(x, -x));
      check += x * 0.0f;
    }
    float largest_of_all = largest(most), factor = largest_of_all > 0 ? LARGEST_QUERY / largest_of_all : 0.0f;
    units[h] = largest_of_all / LARGEST_QUERY + sum(check);
    for (int c = 0; c < width; c += LANES) {
      vi n = whole(part(c) * factor);
      int8_t bytes[2][LANES];
      store_bytes(bytes[0], n >> 8);
      store_bytes(bytes[1], n);
      for (int i = 0; i < LANES / 4; i++)
        for (int j = 0; j < 2; j++) memcpy(to + j * size + (c / 4 + i) * GROUP + h, bytes[j] + 4 * i, 4);
    }
  }
}

// Of rotary queries: pairs of channels by head, [pairs, GROUP].
inline void tile_rotary(const float* q, int64_t ldq, int heads, int width, uint32_t* to) {
  memset(to, 0, paired(width) / 2 * GROUP * sizeof(uint32_t));
  for (int h = 0; h < heads; h++)
    for (int c = 0; c < width; c += 32) {
      float held[32] = {};
      memcpy(held, q + h * ldq + c, (width - c < 32 ? width - c : 32) * sizeof(float));
      uint32_t both[LANES];
      _mm512_storeu_si512(both, narrowed(load(held), load(held + LANES)));
      for (int i = 0; i < LANES; i++) to[(c / 2 + i) * GROUP + h] = both[i];
    }
}

// What is read next, asked for little by little while something else is computed.
class Ahead {
 public:
  void add(const void* from, int64_t size) { ranges_[count_++] = {(const char*)from, (const char*)from + size}; }
  void some(int lines) {
    for (; lines > 0; lines--) {
      Range& range = ranges_[at_];
      if (range.from >= range.end) {
        if (at_ < count_) at_++;
        return;
      }
      _mm_prefetch(range.from, _MM_HINT_T1);
      range.from += 64;
    }
  }

 private:
  struct Range {
    const char *from, *end;
  };
  Range ranges_[2 * TILE_BLOCK / PIECE + 1] = {};
  int count_ = 0, at_ = 0;
};

// Four tokens by channel, of PIECE tokens: to [PIECE / 4, wide], where channel 16 l + 4 j + i of a chunk is at 16 j + 4 l + i.
inline void quad_values(const int8_t* rows, int64_t stride, int width, uint32_t* to, Ahead& ahead) {
  int64_t wide = chunked(width);
  for (int t = 0; t < PIECE; t += 4)
    for (int c = 0; c < wide; c += CHUNK) {
      const int8_t* from = rows + t * stride + c;
      __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + stride);
      __m512i e = _mm512_loadu_si512(from + 2 * stride), f = _mm512_loadu_si512(from + 3 * stride);
      __m512i ab = _mm512_unpacklo_epi8(a, b), ba = _mm512_unpackhi_epi8(a, b);
      __m512i ef = _mm512_unpacklo_epi8(e, f), fe = _mm512_unpackhi_epi8(e, f);
      uint32_t* at = to + t / 4 * wide + c;
      ahead.some(2);
      _mm512_storeu_si512(at, _mm512_unpacklo_epi16(ab, ef));
      _mm512_storeu_si512(at + 16, _mm512_unpackhi_epi16(ab, ef));
      _mm512_storeu_si512(at + 32, _mm512_unpacklo_epi16(ba, fe));
      _mm512_storeu_si512(at + 48, _mm512_unpackhi_epi16(ba, fe));
    }
}

// scores [PIECE, GROUP] of a piece: codes [PIECE, stride] with queries of `units`, times the tokens' scales, and rotary keys.
// C tiles 0 to 3, tokens 4 and 5, queries 6 and 7.
inline void score_tiles(const int8_t* codes, int64_t stride, int64_t wide, const uint32_t* queries, const float* units,
                        const float* scales, const bf16* keys, int64_t stride_b, int64_t pairs, const uint32_t* rotary,
                        Ahead& ahead, int32_t* sums, float* scores) {
  const uint32_t* low = queries + wide / 4 * GROUP;
  vf unit = load(units);
  for (int t0 = 0; t0 < PIECE; t0 += 2 * GROUP) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const int8_t* rows = codes + t0 * stride;
    for (int64_t c = 0; c < wide; c += CHUNK) {
      _tile_loadd(4, rows + c, stride);
      _tile_loadd(5, rows + GROUP * stride + c, stride);
      _tile_loadd(6, queries + c / 4 * GROUP, 64);
      _tile_loadd(7, low + c / 4 * GROUP, 64);
      _tile_dpbssd(0, 4, 6);
      _tile_dpbsud(1, 4, 7);
      _tile_dpbssd(2, 5, 6);
      _tile_dpbsud(3, 5, 7);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + GROUP * GROUP, 64);
    _tile_stored(2, sums + 2 * GROUP * GROUP, 64);
    _tile_stored(3, sums + 3 * GROUP * GROUP, 64);
    float* to = scores + t0 * GROUP;
    if (pairs) {
      _tile_zero(0);
      _tile_zero(2);
      const bf16* others = keys + t0 * stride_b;
      for (int64_t c = 0; c < pairs; c += LANES) {
        _tile_loadd(4, others + 2 * c, stride_b * 2);
        _tile_loadd(5, others + GROUP * stride_b + 2 * c, stride_b * 2);
        _tile_loadd(6, rotary + c * GROUP, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
      }
      _tile_stored(0, to, 64);
      _tile_stored(2, to + GROUP * GROUP, 64);
    } else {
      memset(to, 0, 2 * GROUP * GROUP * sizeof(float));
    }
    for (int half = 0; half < 2; half++)
      for (int t = 0; t < GROUP; t++) {
        ahead.some(2);
        const int32_t* held = sums + (half * 2 * GROUP + t) * GROUP;
        vi high, lower;
        memcpy(&high, held, sizeof high);
        memcpy(&lower, held + GROUP * GROUP, sizeof lower);
        int at = half * GROUP + t;
        vf x = (floats(high) * 256.0f + floats(lower)) * (unit * scales[t0 + at]);
        store(to + at * GROUP, load(to + at * GROUP) + x);
      }
  }
}

// What scores [tokens, GROUP] weigh, in two bytes: to [2][GROUP, TILE_BLOCK], with a unit for each head. The heads' largest scores
// and sums [GROUP] go on; what they have summed, out [heads, wide], shrinks where a score is larger than all before.
inline void weigh_tiles(float* scores, int tokens, const float* scales, int heads, float softcap, float* top, float* sums,
                        float* out, int64_t wide, Ahead& ahead, uint8_t* to, float* units) {
  if (softcap != 0)
    for (int t = 0; t < tokens; t++)
      store(scores + t * GROUP, softcap * tanh_of(load(scores + t * GROUP) / softcap));
  vf before = load(top), most = before;
  for (int t = 0; t < tokens; t++) most = maximum(load(scores + t * GROUP), most);  // NaN is passed over: the sums keep it
  vi above = most > before;
  vf mass = load(sums);
  if (_mm512_test_epi32_mask((__m512i)above, (__m512i)above)) {
    vf shrink = above ? exponential(before - most) : all(1.0f);
    mass *= shrink;
    for (int h = 0; h < heads; h++)
      if (shrink[h] != 1.0f)
        for (int64_t c = 0; c < wide; c += LANES) store(out + h * wide + c, load(out + h * wide + c) * shrink[h]);
    store(top, most);
  }
  vf from = most > all(-INFINITY) ? most : vf{};  // -inf: no score is any larger
  vf largest_weight = {};
  for (int t = 0; t < tokens; t++) {
    vf p = exponential(load(scores + t * GROUP) - from);
    mass += p;
    p *= scales[t];
    largest_weight = maximum(p, largest_weight);
    ahead.some(2);
    store(scores + t * GROUP, p);
  }
  store(sums, mass);
  vf factor = largest_weight > vf{} ? LARGEST_WEIGHT / largest_weight : vf{};
  store(units, largest_weight * (1.0f / LARGEST_WEIGHT));
  int pieces = (tokens + PIECE - 1) / PIECE;
  if (tokens < pieces * PIECE) memset(scores + tokens * GROUP, 0, (pieces * PIECE - tokens) * GROUP * sizeof(float));
  __m512i even = _mm512_set1_epi32(0x00ff00ff);
  for (int piece = 0; piece < pieces; piece++) {
    vf high[LANES], low[LANES];
#pragma GCC unroll 4
    for (int quad = 0; quad < LANES; quad++) {
      const float* x = scores + (piece * PIECE + 4 * quad) * GROUP;
      vi a = whole(load(x) * factor), b = whole(load(x + GROUP) * factor);
      a |= whole(load(x + 2 * GROUP) * factor) << 16;
      b |= whole(load(x + 3 * GROUP) * factor) << 16;
      __m512i first = (__m512i)a, second = (__m512i)b;
      low[quad] = (vf)_mm512_or_si512(_mm512_and_si512(first, even), _mm512_slli_epi32(_mm512_and_si512(second, even), 8));
      high[quad] = (vf)_mm512_or_si512(_mm512_and_si512(_mm512_srli_epi32(first, 8), even), _mm512_andnot_si512(even, second));
    }
    transpose(high);
    transpose(low);
    uint8_t* at = to + piece * PIECE;
    for (int h = 0; h < heads; h++) {
      memcpy(at + h * TILE_BLOCK, &high[h], PIECE);
      memcpy(at + (GROUP + h) * TILE_BLOCK, &low[h], PIECE);
    }
  }
}

// out [heads, wide] += weights of `pieces` times values [pieces * PIECE / 4, wide]. C tiles 0 to 3, weights 4 and 5, values 6 and 7.
inline void value_tiles(const uint8_t* weights, const float* units, int heads, const uint32_t* values, int pieces, int64_t wide,
                        int32_t* sums, float* out) {
  for (int64_t c = 0; c < wide; c += 2 * LANES) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int piece = 0; piece < pieces; piece++) {
      const uint32_t* from = values + piece * (PIECE / 4) * wide + c;
      _tile_loadd(4, weights + piece * PIECE, TILE_BLOCK);
      _tile_loadd(5, weights + GROUP * TILE_BLOCK + piece * PIECE, TILE_BLOCK);
      _tile_loadd(6, from, wide * 4);
      _tile_loadd(7, from + LANES, wide * 4);
      _tile_dpbusd(0, 4, 6);
      _tile_dpbusd(1, 5, 6);
      _tile_dpbusd(2, 4, 7);
      _tile_dpbusd(3, 5, 7);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + GROUP * GROUP, 64);
    _tile_stored(2, sums + 2 * GROUP * GROUP, 64);
    _tile_stored(3, sums + 3 * GROUP * GROUP, 64);
    for (int half = 0; half < 2; half++)
      for (int h = 0; h < heads; h++) {
        vi high, low;
        memcpy(&high, sums + (half * 2 * GROUP + h) * GROUP, sizeof high);
        memcpy(&low, sums + (half * 2 * GROUP + GROUP + h) * GROUP, sizeof low);
        float* to = out + h * wide + c + half * LANES;
        store(to, load(to) + (floats(high) * 256.0f + floats(low)) * units[h]);
      }
  }
}

// As `attend`, which see.
inline void attend_tiles(const Keys& keys, const float* q, int64_t ldq, int heads, int64_t begin, int64_t end, float softcap,
                         const Tile& tile, float* out, float* top, float* mass) {
  const Store &a = *keys.first, &b = *keys.second;
  int rank = keys.first_width, rope = keys.second_width, groups = (heads + GROUP - 1) / GROUP;
  int64_t wide = chunked(rank), width_out = padded(rank), pairs = paired(rope) / 2;
  uint32_t* at = (uint32_t*)(((uintptr_t)tile.natural + 63) / 64 * 64);
  auto take = [&](int64_t n) { return (at += (n + 15) / 16 * 16) - (n + 15) / 16 * 16; };
  uint32_t* values = take(TILE_BLOCK / 4 * wide);
  float* scores = (float*)take(TILE_BLOCK * GROUP);
  int32_t* sums = (int32_t*)take(4 * GROUP * GROUP);
  uint8_t* weights = (uint8_t*)take(groups * 2 * GROUP * TILE_BLOCK / 4);  // [groups][2][GROUP, TILE_BLOCK]
  uint32_t* queries = take(groups * 2 * wide / 4 * GROUP);
  uint32_t* rotary = take(groups * pairs * GROUP);
  float* query_units = (float*)take(groups * GROUP);
  float* units = (float*)take(groups * GROUP);
  float* tops = (float*)take(groups * GROUP);
  float* masses = (float*)take(groups * GROUP);
  float* summed = (float*)take(heads * wide);  // channels as `values` has them
  int8_t* whole_codes = (int8_t*)take(PIECE * wide / 4);  // where rows do not suit tiles
  bf16* whole_keys = (bf16*)take(PIECE * pairs);
  float* scales = (float*)take(TILE_BLOCK);
  auto here = [&](int g) { return heads - g * GROUP < GROUP ? heads - g * GROUP : GROUP; };
  memset(summed, 0, heads * wide * sizeof(float));
  memset(masses, 0, groups * GROUP * sizeof(float));
  for (int g = 0; g < groups; g++) {
    const float* from = q + (int64_t)g * GROUP * ldq;
    tile_queries(from, ldq, here(g), rank, queries + g * 2 * wide / 4 * GROUP, query_units + g * GROUP);
    tile_rotary(from + padded(rank), ldq, here(g), rope, rotary + g * pairs * GROUP);
    for (int i = 0; i < GROUP; i++) tops[g * GROUP + i] = -INFINITY;
  }
  TileShapes for_scores(16, 16), for_values(heads < GROUP ? heads : GROUP, 16);
  int tokens;
  for (int64_t s = begin; s < end; s += tokens) {
    tokens = s % PIECE ? block_of<PIECE>(s, end) : block_of<TILE_BLOCK>(s, end);  // pieces end where pages do
    set_tiles(for_scores);
    int pieces = (tokens + PIECE - 1) / PIECE;
    Ahead ahead;
    for (int64_t next = s + tokens; next < end && next < s + tokens + TILE_BLOCK; next += PIECE) {
      int64_t some = end - next < PIECE ? end - next : PIECE;
      ahead.add((const int8_t*)a.data + place(a, keys.row, next) * rank, some * rank);
      ahead.add((const bf16*)b.data + place(b, keys.row, next) * rope, some * rope * 2);
    }
    memset(scales, 0, TILE_BLOCK * sizeof(float));
    for (int g = 0; g < groups; g++) {
      for (int piece = 0; piece < pieces; piece++) {
        int64_t from = s + piece * PIECE, at_a = place(a, keys.row, from), at_b = place(b, keys.row, from);
        int some = tokens - piece * PIECE < PIECE ? tokens - piece * PIECE : PIECE;
        const int8_t* codes = (const int8_t*)a.data + at_a * rank;
        const bf16* others = (const bf16*)b.data + at_b * rope;
        int64_t stride = rank, stride_b = rope;
        if (some < PIECE || rank != wide) {
          memset(whole_codes, 0, PIECE * wide);
          for (int t = 0; t < some; t++) memcpy(whole_codes + t * wide, codes + (int64_t)t * rank, rank);
          codes = whole_codes;
          stride = wide;
        }
        if (pairs && (some < PIECE || rope != 2 * pairs)) {
          memset(whole_keys, 0, PIECE * 2 * pairs * sizeof(bf16));
          for (int t = 0; t < some; t++)
            memcpy(whole_keys + t * 2 * pairs, others + (int64_t)t * rope, rope * sizeof(bf16));
          others = whole_keys;
          stride_b = 2 * pairs;
        }
        if (g == 0) {
          memcpy(scales + piece * PIECE, a.scales + at_a, some * sizeof(float));
          quad_values(codes, stride, rank, values + piece * (PIECE / 4) * wide, ahead);
        }
        score_tiles(codes, stride, wide, queries + g * 2 * wide / 4 * GROUP, query_units + g * GROUP,
                    scales + piece * PIECE, others, stride_b, pairs, rotary + g * pairs * GROUP, ahead, sums,
                    scores + piece * PIECE * GROUP);
      }
      weigh_tiles(scores, tokens, scales, here(g), softcap, tops + g * GROUP, masses + g * GROUP, summed + g * GROUP * wide,
                  wide, ahead, weights + g * 2 * GROUP * TILE_BLOCK, units + g * GROUP);
    }
    set_tiles(for_values);
    for (int g = 0; g < groups; g++)
      value_tiles(weights + g * 2 * GROUP * TILE_BLOCK, units + g * GROUP, here(g), values, pieces, wide, sums,
                  summed + g * GROUP * wide);
  }
  _tile_release();
  for (int h = 0; h < heads; h++) {
    top[h] = tops[h];
    mass[h] = masses[h];
    for (int c = 0; c < width_out; c += 4) {
      int chunk = c / CHUNK * CHUNK, l = c % CHUNK / 16, j = c % 16 / 4;
      memcpy(out + h * width_out + c, summed + h * wide + chunk + 16 * j + 4 * l, 4 * sizeof(float));
    }
  }
}

}  // namespace mla
#endif
