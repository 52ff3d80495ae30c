// Attention of one new token a sequence over a cache that is read once, whatever the number of heads: heads are query rows.
// Sixteen tokens at a time are widened and turned, so that a score is a lane and nothing is summed across lanes.
#pragma once
#include <cmath>

#include "layout.h"
#include "simd.h"

namespace mla {

constexpr int TOKENS = LANES;

inline int64_t padded(int64_t n) { return (n + LANES - 1) / LANES * LANES; }
inline int64_t paired(int64_t n) { return (n + 31) / 32 * 32; }  // channels of a row of a block

// What one task of attention works with.
struct Tile {
  float* natural;  // [TOKENS, padded(width)] values as they lie
  float* turned;   // [padded(kd), TOKENS]
  float* weights;  // [H, TOKENS]
  float* mass;     // [H, TOKENS]
  float* queries;  // [ldq, H]
};

template <class T>
inline void widen(const T* from, int64_t stride, int tokens, int width, float* to) {
  int64_t wide = padded(width);
  for (int t = 0; t < tokens; t++) {
    int c = 0;
    for (; c + LANES <= width; c += LANES) store(to + t * wide + c, load(from + t * stride + c));
    if (c < width) store(to + t * wide + c, load_first(from + t * stride + c, width - c));
    const char* next = (const char*)(from + (t + TOKENS) * stride);
    for (size_t at = 0; at < width * sizeof(T); at += 64) __builtin_prefetch(next + at);
  }
  if (tokens < TOKENS) memset(to + tokens * wide, 0, (TOKENS - tokens) * wide * sizeof(float));
}

inline void widen(const Store& s, int64_t first, int64_t offset, int64_t stride, int tokens, int width, float* to) {
  int64_t at = first * stride + offset;
  switch (s.type) {
    case F32:
      return widen((const float*)s.data + at, stride, tokens, width, to);
    case BF16:
      return widen((const bf16*)s.data + at, stride, tokens, width, to);
    case INT8:
      return widen((const int8_t*)s.data + at, stride, tokens, width, to);
    case FP8:
      return widen((const fp8*)s.data + at, stride, tokens, width, to);
  }
}

inline void turn(const float* natural, int width, float* turned) {
  int64_t wide = padded(width);
  for (int64_t c = 0; c < wide; c += LANES) {
    vf block[LANES];
    for (int t = 0; t < TOKENS; t++) block[t] = load(natural + t * wide + c);
    transpose(block);
    for (int i = 0; i < LANES; i++) store(turned + (c + i) * TOKENS, block[i]);
  }
}

// acc[h] += q[c, h] * key[c] over channels.
template <int N>
inline void score(const float* q, int64_t heads, const float* turned, int width, vf* acc) {
  for (int c = 0; c < width; c++) {
    vf key = load(turned + c * TOKENS);
    for (int h = 0; h < N; h++) acc[h] += q[c * heads + h] * key;
  }
}

// out[h] += sum over tokens of weight[h, t] * value[t].
template <int N, int V>
inline void weigh_block(const float* weights, const float* values, int64_t wide, int tokens, float* out, int64_t ldo) {
  vf acc[N][V];
  for (int h = 0; h < N; h++)
    for (int v = 0; v < V; v++) acc[h][v] = load(out + h * ldo + v * LANES);
  for (int t = 0; t < tokens; t++) {
    vf value[V];
    for (int v = 0; v < V; v++) value[v] = load(values + t * wide + v * LANES);
    for (int h = 0; h < N; h++)
      for (int v = 0; v < V; v++) acc[h][v] += weights[h * TOKENS + t] * value[v];
  }
  for (int h = 0; h < N; h++)
    for (int v = 0; v < V; v++) store(out + h * ldo + v * LANES, acc[h][v]);
}

template <int N>
inline void weigh(const float* weights, const float* values, int64_t wide, int tokens, float* out, int64_t ldo) {
  int64_t c = 0;
  for (; c + 4 * LANES <= wide; c += 4 * LANES) weigh_block<N, 4>(weights, values + c, wide, tokens, out + c, ldo);
  for (; c < wide; c += LANES) weigh_block<N, 1>(weights, values + c, wide, tokens, out + c, ldo);
}

struct Keys {  // what the heads of one task attend to
  const Store* first;
  const Store* second;
  int64_t row;     // sequence
  int64_t offset;  // of the group's numbers in a token's
  int first_width, second_width;  // latent and rotary key; key and value
  bool latent;
};

// Tokens of the block that begins at s: blocks of SIZE stand where they would in a sequence read from its start.
template <int SIZE>
inline int block_of(int64_t s, int64_t end) {
  int64_t next = (s / SIZE + 1) * SIZE;
  return (int)((next < end ? next : end) - s);
}

// What the scores x of sixteen tokens weigh for a head, by its largest so far; what it has summed shrinks where that grows.
// sums [TOKENS] and out [width]; only the tokens of `seen` count.
inline vf weights_of(vf x, vi seen, float& top, float* sums, float* out, int64_t width) {
  x = seen ? x : all(-INFINITY);
  float most = largest(x);
  if (most > top) {
    float shrink = std::exp(top - most);
    top = most;
    store(sums, load(sums) * shrink);
    for (int64_t c = 0; c < width; c += LANES) store(out + c, load(out + c) * shrink);
  }
  vf p = exponential(x - (top > -INFINITY ? top : 0.0f));  // -inf: no score is any larger
  store(sums, load(sums) + p);
  return p;
}

// work(N, first) for all heads, in blocks of what the registers hold.
template <class Work>
inline void in_blocks(int heads, Work work) {
  int h = 0;
  for (; h + 9 <= heads; h += 9) work(std::integral_constant<int, 9>{}, h);
  for (; h + 4 <= heads; h += 4) work(std::integral_constant<int, 4>{}, h);
  for (; h + 3 <= heads; h += 3) work(std::integral_constant<int, 3>{}, h);
  for (; h < heads; h++) work(std::integral_constant<int, 1>{}, h);
}

// Unnormalised output out [H, padded(v)] of tokens [begin, end), its largest scores `top` [H] and its sums `mass` [H].
// q [H, ldq] holds scaled queries: for a latent [padded(r) | padded(rope)], else [padded(d)]. What pads them is never read.
inline void attend(const Keys& keys, const float* q, int64_t ldq, int heads, int64_t begin, int64_t end, float softcap,
                   const Tile& tile, float* out, float* top, float* mass) {
  const Store &a = *keys.first, &b = *keys.second;
  int64_t wide_a = padded(keys.first_width), wide_b = padded(keys.second_width);
  int64_t wide_out = keys.latent ? wide_a : wide_b;
  float* second = tile.natural + TOKENS * wide_a;
  memset(out, 0, heads * wide_out * sizeof(float));
  for (int h = 0; h < heads; h++) {
    top[h] = -INFINITY;
    store(tile.mass + h * TOKENS, vf{});
    for (int64_t c = 0; c < ldq; c++) tile.queries[c * heads + h] = q[h * ldq + c];
  }
  vf places;
  for (int i = 0; i < LANES; i++) places[i] = (float)i;
  int tokens;
  for (int64_t s = begin; s < end; s += tokens) {
    tokens = block_of<TOKENS>(s, end);
    int64_t at = place(a, keys.row, s), at_b = place(b, keys.row, s);
    widen(a, at, keys.offset, a.width, tokens, keys.first_width, tile.natural);
    widen(b, at_b, keys.offset, b.width, tokens, keys.second_width, second);
    turn(tile.natural, keys.first_width, tile.turned);
    if (keys.latent) turn(second, keys.second_width, tile.turned + wide_a * TOKENS);
    vf scales_a = all(1.0f), scales_b = all(1.0f);
    if (a.scales) scales_a = load_first(a.scales + at, tokens);
    if (b.scales) scales_b = load_first(b.scales + at_b, tokens);
    auto some = [&](auto count, int h0) {
      constexpr int N = decltype(count)::value;
      vf acc[N] = {};
      const float* mine = tile.queries + h0;
      score<N>(mine, heads, tile.turned, keys.first_width, acc);
      if (a.scales)
        for (int h = 0; h < N; h++) acc[h] *= scales_a;
      if (keys.latent) {
        if (b.scales) {
          vf more[N] = {};
          score<N>(mine + wide_a * heads, heads, tile.turned + wide_a * TOKENS, keys.second_width, more);
          for (int h = 0; h < N; h++) acc[h] += more[h] * scales_b;
        } else {
          score<N>(mine + wide_a * heads, heads, tile.turned + wide_a * TOKENS, keys.second_width, acc);
        }
      }
      for (int h = 0; h < N; h++) {
        vf x = acc[h];
        if (softcap != 0)
          for (int i = 0; i < LANES; i++) x[i] = softcap * std::tanh(x[i] / softcap);
        vf p = weights_of(x, places < (float)tokens, top[h0 + h], tile.mass + (h0 + h) * TOKENS,
                          out + (h0 + h) * wide_out, wide_out);
        store(tile.weights + (h0 + h) * TOKENS, keys.latent ? (a.scales ? p * scales_a : p) : p);
      }
    };
    in_blocks(heads, some);
    const float* values = keys.latent ? tile.natural : second;
    int h = 0;
    for (; h + 3 <= heads; h += 3)
      weigh<3>(tile.weights + h * TOKENS, values, wide_out, tokens, out + h * wide_out, wide_out);
    for (; h < heads; h++) weigh<1>(tile.weights + h * TOKENS, values, wide_out, tokens, out + h * wide_out, wide_out);
  }
  for (int h = 0; h < heads; h++) mass[h] = sum(load(tile.mass + h * TOKENS));
}

}  // namespace mla
