// Products with a matrix in bfloat16 by tiles: sixteen of its rows, as they lie, with up to sixteen rows of x. Each number of x is
// the sum of three in bfloat16 (24 bits), so results are those of float32. A sum does not depend on how many rows there are.
#pragma once
#include "amx.h"
#include "attention_bf16.h"
#include "linear.h"

namespace mla {

// Rows x [M, k] of a phase, as one of `threads` reads them; in tiles from when they are first wanted so.
class Input {
 public:
  Input(const float* x, int64_t ldx, int rows, int k, int threads, uint32_t* room)
      : x(x), ldx(ldx), rows(rows), threads(threads), k_(k), room_(room) {}
  const float* x;
  int64_t ldx;
  int rows, threads;

  static int64_t floats(int rows, int64_t k) { return 3 * paired(k) / 2 * rows; }

#if defined(MLA_HAS_AMX) && defined(MLA_HAS_BF16)
  static constexpr int TOGETHER_ = 16;  // rows of a tile
  // [groups][k / 32][3][16, rows of the group]
  const uint32_t* tiles() {
    if (ready_) return room_;
    uint32_t* to = room_;
    for (int first = 0; first < rows; first += TOGETHER_) {
      int here = rows - first < TOGETHER_ ? rows - first : TOGETHER_;
      for (int m = 0; m < here; m++) put_row(x + (first + m) * ldx, here, to + m);
      to += 3 * k_ / 2 * here;
    }
    ready_ = true;
    return room_;
  }

 private:
  void put_row(const float* row, int here, uint32_t* to) const {
    for (int c = 0; c < k_; c += 32) {
      vf low = load(row + c), high = load(row + c + LANES);
      for (int j = 0; j < 3; j++, to += 16 * here) {
        alignas(64) uint32_t both[LANES];
        _mm512_store_si512(both, narrowed(low, high));
        for (int i = 0; i < LANES; i++) to[i * here] = both[i];
        low -= load((const bf16*)both);
        high -= load((const bf16*)both + LANES);
      }
    }
  }
#else
 private:
#endif
  int k_;
  uint32_t* room_;
  bool ready_ = false;
};

#if defined(MLA_HAS_AMX) && defined(MLA_HAS_BF16)
inline vi row_places() {
  vi lanes;
  for (int i = 0; i < LANES; i++) lanes[i] = i;
  return lanes;
}

constexpr int AHEAD = 6 * 32;  // columns

// Thirty-two outputs of w [32, k] of all rows: sums 0 to 3 (outputs by parts of x), weights 4 and 5, inputs 6 and 7.
template <class Put>
inline void multiply_tiles(const bf16* w, int k, Input& in, Put put) {
  const uint32_t* x = in.tiles();
  alignas(64) float sums[4][16 * LANES];
  for (int first = 0; first < in.rows; first += 16) {
    int here = in.rows - first < 16 ? in.rows - first : 16, line = 4 * here;
    TileShapes shapes(16, 16);
    for (int i : {0, 1, 2, 3, 6, 7}) shapes.bytes[i] = (uint16_t)line;
    set_tiles(shapes);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int c = 0; c < k; c += 32, x += 3 * 16 * here) {
      if (first == 0) {
        // Some way ahead, at the end of what this thread is likely to take next.
        int64_t next = c + AHEAD < k ? c + AHEAD : 32 * in.threads * (int64_t)k + c + AHEAD - k;
        for (int row = 0; row < 32; row++) __builtin_prefetch(w + row * (int64_t)k + next);
      }
      _tile_loadd(4, w + c, 2 * k);
      _tile_loadd(5, w + 16 * (int64_t)k + c, 2 * k);
      _tile_loadd(6, x, line);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(2, 5, 6);
      _tile_loadd(7, x + 16 * here, line);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
      _tile_loadd(6, x + 32 * here, line);
      _tile_dpbf16ps(1, 4, 6);
      _tile_dpbf16ps(3, 5, 6);
    }
    _tile_stored(0, sums[0], line);
    _tile_stored(1, sums[1], line);
    _tile_stored(2, sums[2], line);
    _tile_stored(3, sums[3], line);
    // Column by column: [16, here] each.
    vi places = row_places() * here;
    for (int half = 0; half < 2; half++) {
      float* both = sums[2 * half];
      for (int i = 0; i < here * LANES; i += LANES) store(both + i, load(both + i) + load(sums[2 * half + 1] + i));
      for (int m = 0; m < here; m++) {
        float column[LANES];
        store(column, (vf)_mm512_i32gather_ps((__m512i)places, both + m, 4));
        for (int n = 0; n < LANES; n++) put(first + m, 16 * half + n, column[n]);
      }
    }
  }
  _tile_release();
}
#endif

// put(m, n, value) for outputs n in [begin, end) of all rows.
template <class Put>
inline void apply(const Linear& l, int begin, int end, Input& in, Put put) {
#if defined(MLA_HAS_AMX) && defined(MLA_HAS_BF16)
  if (l.type == BF16 && l.k % 32 == 0 && tiles_allowed()) {
    for (; begin + 32 <= end; begin += 32)
      multiply_tiles((const bf16*)l.w + (int64_t)begin * l.k, l.k, in, [&](int m, int n, float value) {
        n += begin;
        put(m, n, (l.scale ? value * l.scale[n] : value) + (l.bias ? l.bias[n] : 0.0f));
      });
  }
#endif
  if (begin < end) apply(l, begin, end, in.x, in.ldx, in.rows, put);
}

}  // namespace mla
