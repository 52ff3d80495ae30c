// Entries of a cache as they are written: rounded, or codes with a scale, by the rules of LatentQuantizer.
#pragma once
#include <cmath>

#include "layout.h"
#include "simd.h"

namespace mla {

constexpr float AMAX_FLOOR = 1e-20f;

// Stores x [width] at one place; false if it is to be quantised and holds NaN or infinity.
inline bool write_entry(const Store& s, int64_t row, int64_t position, int64_t offset, const float* x, int width) {
  int64_t token = place(s, row, position), at = token * s.width + offset;
  if (s.type == F32) {
    memcpy((float*)s.data + at, x, width * sizeof(float));
    return true;
  }
  if (s.type == BF16) {
    bf16* out = (bf16*)s.data + at;
    for (int i = 0; i < width; i++) out[i] = narrow(x[i]);
    return true;
  }
  float amax = 0, finite = 0;
  for (int i = 0; i < width; i++) {
    float size = std::fabs(x[i]);
    amax = size > amax ? size : amax;
    finite += x[i] * 0.0f;  // NaN from NaN and from infinity
  }
  if (finite != 0.0f) return false;
  float limit = s.type == INT8 ? 127.0f : 448.0f;
  float range = amax < s.clip ? amax : s.clip;
  float scale = (range > AMAX_FLOOR ? range : AMAX_FLOOR) / limit;
  s.scales[token] = scale;
  for (int i = 0; i < width; i++) {
    float value = x[i] / scale;
    value = value > limit ? limit : value < -limit ? -limit : value;
    if (s.type == INT8)
      ((int8_t*)s.data)[at + i] = (int8_t)__builtin_nearbyintf(value);
    else
      ((fp8*)s.data)[at + i] = to_fp8(value);
  }
  return true;
}

// Turns pairs of x [2n] by the angles of a token; out may be x.
inline void rotate(const float* x, float* out, int width, bool interleaved, const float* cos, const float* sin,
                   const int32_t* frequencies, float factor) {
  int n = width / 2;
  for (int j = 0; j < n; j++) {
    int column = frequencies ? frequencies[j] : j;
    int real = interleaved ? 2 * j : j, imag = interleaved ? 2 * j + 1 : j + n;
    float a = x[real] * factor, b = x[imag] * factor, c = cos[column], s = sin[column];
    out[real] = a * c - b * s;
    out[imag] = b * c + a * s;
  }
}

}  // namespace mla
