// Attention of many tokens of a prompt over explicit keys and values, a block of queries at a time over blocks of keys, so that
// scores never leave the first cache (FlashAttention, arXiv 2205.14135). Products of bfloat16 inputs are those of the
// processor's bfloat16 instructions where it has them: inputs are exact in it, weights are rounded to it, sums are float32.
#pragma once
#include <cmath>

#include "amx.h"
#include "attention_bf16.h"

namespace mla {

constexpr int KEYS = 4 * LANES;  // of a block: four vectors of scores a query
constexpr int QUERIES = 48;      // of a block

struct Prompt {
  const void* q;       // [B, T, H, own]
  const void* q_rope;  // [B, T, H, shared]
  const void* k;       // [B, S, G, own]
  const void* k_rope;  // [B, S, shared], of all heads
  const void* v;       // [B, S, G, v_dim]
  void* out;           // [B, T, H, v_dim]
  const int64_t* positions;               // [B] of each row's first query: it sees keys up to its own position
  int64_t q_row, q_token, q_head;         // strides, in numbers
  int64_t q_rope_row, q_rope_token, q_rope_head;
  int64_t k_row, k_token, k_head;
  int64_t k_rope_row, k_rope_token;
  int64_t v_row, v_token, v_head;
  int32_t batch, tokens, keys, heads, kv_heads, own, shared, v_dim;
  int32_t window, type, threads;          // window 0: none; type of all numbers: F32 or BF16
  float scale, softcap;                   // softcap 0: none
  int32_t pad;
};

// How numbers are multiplied: a unit is what a lane holds of an input, PER numbers.
struct Singles {
  typedef float unit;
  static constexpr int TOGETHER = 6;  // queries whose sums stay in registers
  static constexpr int PER = 1;
  static vf spread(const unit* p) { return all(*p); }
  static vf read(const unit* p) { return load(p); }
  static vf add(vf acc, vf a, vf b) { return acc + a * b; }
  static void write(unit* to, vf low, vf high) {
    store(to, low);
    store(to + LANES, high);
  }
  static vf exponential_of(vf x) { return exponential(x); }
  template <class T>
  static void row(const T* from, int width, unit* to) {
    int c = 0;
    for (; c + LANES <= width; c += LANES) store(to + c, load(from + c));
    if (c < width) store(to + c, load_first(from + c, width - c));
  }
  // Of up to KEYS tokens: turned [channels, KEYS] or natural [KEYS, channels], zeros behind them.
  template <class T>
  static void arrange_keys(const T* from, int64_t stride, int tokens, int width, unit* turned, unit* natural) {
    int64_t wide = paired(width);
    for (int t0 = 0; t0 < KEYS; t0 += LANES)
      for (int c = 0; c < wide; c += LANES) {
        vf block[LANES];
        for (int t = 0; t < LANES; t++) {
          int some = t0 + t < tokens ? (width - c < LANES ? width - c : LANES) : 0;
          const T* at = from + (t0 + t) * stride + c;
          block[t] = some == LANES ? load(at) : some > 0 ? load_first(at, some) : vf{};
          if (natural) store(natural + (t0 + t) * wide + c, block[t]);
        }
        if (!turned) continue;
        transpose(block);
        for (int i = 0; i < LANES; i++) store(turned + (c + i) * KEYS + t0, block[i]);
      }
  }
};

#ifdef MLA_HAS_BF16
struct Pairs {
  typedef uint32_t unit;
  static constexpr int TOGETHER = 6;
  static constexpr int PER = 2;
  static __m512i spread(const unit* p) { return _mm512_set1_epi32((int)*p); }
  static __m512i read(const unit* p) { return _mm512_loadu_si512(p); }
  static vf add(vf acc, __m512i a, __m512i b) { return add_products(acc, a, b); }
  static void write(unit* to, vf low, vf high) { _mm512_storeu_si512(to, narrowed(low, high)); }
  // e^x to 2^-13, finer than weights are kept: 2^f by a polynomial of third degree.
  static vf exponential_of(vf x) {
    vf scaled = maximum(all(-150.0f), x * 1.44269504f);
    vf n = (vf)_mm512_roundscale_ps((__m512)scaled, 8);
    vf f = scaled - n;
    vf p = f * 0.05550410866f + 0.2402265070f;
    p = p * f + 0.6931471806f;
    p = p * f + 1.0f;
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
  }
  static void row(const bf16* from, int width, unit* to) { memcpy(to, from, width * sizeof(bf16)); }
  static void arrange_keys(const bf16* from, int64_t stride, int tokens, int width, unit* turned, unit* natural) {
    arrange<KEYS>(from, stride, tokens, width, turned, natural);
  }
};

#ifdef MLA_HAS_AMX
struct Tiles : Pairs {  // the same numbers, sixteen queries at a time
  static constexpr int TOGETHER = 16;
};
#endif
#endif

// Whoever computes with an `Op` has one of these.
template <class Op>
struct Shapes {};
#if defined(MLA_HAS_BF16) && defined(MLA_HAS_AMX)
template <>
struct Shapes<Tiles> {
  Shapes() { set_tiles(TileShapes(16, 16)); }
  ~Shapes() { _tile_release(); }
};
#endif

// A head's (or the shared) keys and values, block by block.
template <class Op>
struct Arranged {
  typename Op::unit* turned;   // [blocks, channels / PER, KEYS]
  typename Op::unit* values;   // [blocks, KEYS / PER, v]
};

// scores [N, KEYS] = q k^T of a block, over own channels and shared ones. (In a function of its own: its sums need all registers.)
template <class Op, int N>
__attribute__((noinline)) void block_scores(const typename Op::unit* q, int64_t ldq, const typename Op::unit* k, int own,
                                            const typename Op::unit* rope, int shared, float* scores) {
  vf acc[N][4] = {};
  for (int part = 0; part < 2; part++) {
    int count = part ? shared : own;
    const typename Op::unit *keys = part ? rope : k, *query = part ? q + own : q;
    for (int c = 0; c < count; c++) {
      auto k0 = Op::read(keys + c * KEYS), k1 = Op::read(keys + c * KEYS + LANES);
      auto k2 = Op::read(keys + c * KEYS + 2 * LANES), k3 = Op::read(keys + c * KEYS + 3 * LANES);
#pragma GCC unroll 6
      for (int i = 0; i < N; i++) {
        auto one = Op::spread(query + i * ldq + c);
        acc[i][0] = Op::add(acc[i][0], one, k0);
        acc[i][1] = Op::add(acc[i][1], one, k1);
        acc[i][2] = Op::add(acc[i][2], one, k2);
        acc[i][3] = Op::add(acc[i][3], one, k3);
      }
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < N; i++)
    for (int j = 0; j < 4; j++) store(scores + i * KEYS + j * LANES, acc[i][j]);
}

// out [N, V vectors] += weights times a block's values.
template <class Op, int N, int V>
__attribute__((noinline)) void block_values(const typename Op::unit* weights, const typename Op::unit* values, int64_t wide,
                                            float* out) {
  vf acc[N][V];
#pragma GCC unroll 6
  for (int i = 0; i < N; i++)
    for (int j = 0; j < V; j++) acc[i][j] = load(out + i * wide + j * LANES);
  for (int t = 0; t < KEYS / Op::PER; t++) {
    decltype(Op::read(values)) v[V];
    for (int j = 0; j < V; j++) v[j] = Op::read(values + t * wide + j * LANES);
#pragma GCC unroll 6
    for (int i = 0; i < N; i++) {
      auto one = Op::spread(weights + i * (KEYS / Op::PER) + t);
      for (int j = 0; j < V; j++) acc[i][j] = Op::add(acc[i][j], one, v[j]);
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < N; i++)
    for (int j = 0; j < V; j++) store(out + i * wide + j * LANES, acc[i][j]);
}

#if defined(MLA_HAS_BF16) && defined(MLA_HAS_AMX)
// Scores are tiles 0 to 3, queries 4, keys 5 to 7.
template <>
inline void block_scores<Tiles, 16>(const uint32_t* q, int64_t ldq, const uint32_t* k, int own, const uint32_t* rope, int shared,
                                    float* scores) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int part = 0; part < 2; part++) {
    int count = part ? shared : own;
    const uint32_t *keys = part ? rope : k, *query = part ? q + own : q;
    for (int c = 0; c < count; c += LANES, keys += LANES * KEYS) {
      _tile_loadd(4, query + c, ldq * 4);
      _tile_loadd(5, keys, KEYS * 4);
      _tile_loadd(6, keys + LANES, KEYS * 4);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(7, keys + 2 * LANES, KEYS * 4);
      _tile_dpbf16ps(1, 4, 6);
      _tile_loadd(5, keys + 3 * LANES, KEYS * 4);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, scores, KEYS * 4);
  _tile_stored(1, scores + LANES, KEYS * 4);
  _tile_stored(2, scores + 2 * LANES, KEYS * 4);
  _tile_stored(3, scores + 3 * LANES, KEYS * 4);
}

// Two vectors of channels: outputs are tiles 0 and 1, weights 4, values 5 and 6.
template <>
inline void block_values<Tiles, 16, 2>(const uint32_t* weights, const uint32_t* values, int64_t wide, float* out) {
  _tile_loadd(0, out, wide * 4);
  _tile_loadd(1, out + LANES, wide * 4);
  for (int t = 0; t < KEYS / 2; t += LANES, values += LANES * wide) {
    _tile_loadd(4, weights + t, KEYS / 2 * 4);
    _tile_loadd(5, values, wide * 4);
    _tile_loadd(6, values + LANES, wide * 4);
    _tile_dpbf16ps(0, 4, 5);
    _tile_dpbf16ps(1, 4, 6);
  }
  _tile_stored(0, out, wide * 4);
  _tile_stored(1, out + LANES, wide * 4);
}
template <>
inline void block_values<Tiles, 16, 4>(const uint32_t* weights, const uint32_t* values, int64_t wide, float* out) {
  block_values<Tiles, 16, 2>(weights, values, wide, out);
  block_values<Tiles, 16, 2>(weights, values + 2 * LANES, wide, out + 2 * LANES);
}
#endif

// What a thread works with: a block of queries.
template <class Op>
struct Tray {
  typename Op::unit* q;        // [QUERIES, own + shared channels / PER]
  typename Op::unit* weights;  // [TOGETHER, KEYS / PER]
  float* scores;               // [TOGETHER, KEYS]
  float* out;                  // [QUERIES, v]
  float top[QUERIES];
  float* mass;                 // [QUERIES, LANES]
};

// A query's scores of a block of keys, of which it sees those from `low` on and before `high`, become weights; what there is of
// its output shrinks where a score is larger than all before.
template <class Op>
inline void weigh_scores(float* scores, int low, int high, float scale, float softcap, float& top, float* mass, float* out,
                         int64_t wide, typename Op::unit* weights) {
  static const int32_t lanes[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  vf x[4];
  for (int j = 0; j < 4; j++) x[j] = load(scores + j * LANES) * scale;
  if (softcap != 0)
    for (int j = 0; j < 4; j++) x[j] = softcap - (2 * softcap) / (exponential(x[j] * (2 / softcap)) + 1.0f);
  if (low > 0 || high < KEYS) {
    vi lane;
    memcpy(&lane, lanes, sizeof lane);
    for (int j = 0; j < 4; j++) {
      vi at = lane + j * LANES;
      x[j] = (at >= low) & (at < high) ? x[j] : all(-INFINITY);
    }
  }
  vf most = maximum(maximum(x[0], x[1]), maximum(x[2], x[3]));
  vi above = most > all(top);
  bool any = false;
#if defined(__AVX512F__)
  any = _mm512_test_epi32_mask((__m512i)above, (__m512i)above) != 0;
#else
  for (int i = 0; i < LANES; i++) any |= above[i] != 0;
#endif
  if (any) {
    float now = largest(most), shrink = std::exp(top - now);
    top = now;
    store(mass, load(mass) * shrink);
    for (int64_t c = 0; c < wide; c += LANES) store(out + c, load(out + c) * shrink);
  }
  float from = top > -INFINITY ? top : 0.0f;  // -inf: no score is any larger
  for (int j = 0; j < 4; j++) x[j] = Op::exponential_of(x[j] - from);
  store(mass, load(mass) + ((x[0] + x[1]) + (x[2] + x[3])));
  Op::write(weights, x[0], x[1]);
  Op::write(weights + 2 * LANES / Op::PER, x[2], x[3]);
}

inline void put_row(const float* from, int width, float share, float* to) {
  for (int c = 0; c < width; c++) to[c] = from[c] * share;
}
inline void put_row(const float* from, int width, float share, bf16* to) {
  for (int c = 0; c < width; c++) to[c] = narrow(from[c] * share);
}

// A block of a head's queries over all keys that they see.
template <class Op, class T>
void attend_block(const Prompt& p, int row, int head, int first, Arranged<Op> own, const typename Op::unit* rope,
                  Tray<Op>& tray) {
  Shapes<Op> shapes;
  int tokens = p.tokens - first < QUERIES ? p.tokens - first : QUERIES;
  int units = (int)paired(p.own) / Op::PER, shared = (int)paired(p.shared) / Op::PER;
  int64_t ldq = units + shared, wide = paired(p.v_dim);
  memset(tray.q, 0, QUERIES * ldq * sizeof(typename Op::unit));
  memset(tray.out, 0, QUERIES * wide * sizeof(float));
  memset(tray.mass, 0, QUERIES * LANES * sizeof(float));
  for (int t = 0; t < tokens; t++) {
    int64_t at = first + t;
    Op::row((const T*)p.q + row * p.q_row + at * p.q_token + head * p.q_head, p.own, tray.q + t * ldq);
    Op::row((const T*)p.q_rope + row * p.q_rope_row + at * p.q_rope_token + head * p.q_rope_head, p.shared,
            tray.q + t * ldq + units);
  }
  for (float& top : tray.top) top = -INFINITY;
  int64_t from = p.positions[row] + first;  // the first query's position
  int64_t end = from + tokens < p.keys ? from + tokens : p.keys;
  int64_t begin = p.window && from + 1 > p.window ? from + 1 - p.window : 0;
  for (int64_t s = begin / KEYS * KEYS; s < end; s += KEYS) {
    const auto *k = own.turned + s * units, *v = own.values + s / Op::PER * wide, *r = rope + s * shared;
    for (int t0 = 0; t0 < tokens; t0 += Op::TOGETHER) {
      if (s > from + t0 + Op::TOGETHER - 1) continue;  // all of it is later
      block_scores<Op, Op::TOGETHER>(tray.q + t0 * ldq, ldq, k, units, r, shared, tray.scores);
      for (int i = 0; i < Op::TOGETHER; i++) {
        int t = t0 + i;
        int64_t at = from + t, low = p.window ? at + 1 - p.window - s : 0, high = at + 1 - s;
        if (s + high > p.keys) high = p.keys - s;
        weigh_scores<Op>(tray.scores + i * KEYS, low > KEYS ? KEYS : (int)low, high > KEYS ? KEYS : (int)high, p.scale,
                         p.softcap, tray.top[t], tray.mass + t * LANES, tray.out + t * wide, wide,
                         tray.weights + i * (KEYS / Op::PER));
      }
      int64_t c = 0;
      for (; c + 4 * LANES <= wide; c += 4 * LANES)
        block_values<Op, Op::TOGETHER, 4>(tray.weights, v + c, wide, tray.out + t0 * wide + c);
      for (; c < wide; c += 2 * LANES)
        block_values<Op, Op::TOGETHER, 2>(tray.weights, v + c, wide, tray.out + t0 * wide + c);
    }
  }
  for (int t = 0; t < tokens; t++) {
    T* out = (T*)p.out + (((int64_t)row * p.tokens + first + t) * p.heads + head) * p.v_dim;
    put_row(tray.out + t * wide, p.v_dim, 1.0f / sum(load(tray.mass + t * LANES)), out);
  }
}

}  // namespace mla
