// Sixteen lanes at a time, in the vector types of GCC and Clang, so that one text serves every CPU they compile for.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace mla {

constexpr int LANES = 16;
typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef float vf8 __attribute__((vector_size(32)));
typedef float vf4 __attribute__((vector_size(16)));

struct bf16 {
  uint16_t bits;
};
struct fp8 {  // E4M3 without infinities
  uint8_t bits;
};

inline vf load(const float* p) {
  vf v;
  memcpy(&v, p, sizeof v);
  return v;
}

// Whole numbers widened to 32 bits. (GCC takes __builtin_convertvector apart, number by number.)
#if defined(__AVX512F__)
inline vu widened(const uint16_t* p) { return (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)); }
inline vu widened(const uint8_t* p) { return (vu)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
inline vi widened(const int8_t* p) { return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }
inline vf floats(vi v) { return (vf)_mm512_cvtepi32_ps((__m512i)v); }
#elif defined(__AVX2__)
template <class V>
inline V halves(__m256i a, __m256i b) {
  V v;
  memcpy(&v, &a, sizeof a);
  memcpy((char*)&v + sizeof a, &b, sizeof b);
  return v;
}
inline __m128i sixteen(const void* p) { return _mm_loadu_si128((const __m128i*)p); }
inline __m128i eight(const void* p) { return _mm_loadl_epi64((const __m128i*)p); }
inline vu widened(const uint16_t* p) {
  return halves<vu>(_mm256_cvtepu16_epi32(sixteen(p)), _mm256_cvtepu16_epi32(sixteen(p + 8)));
}
inline vu widened(const uint8_t* p) {
  return halves<vu>(_mm256_cvtepu8_epi32(eight(p)), _mm256_cvtepu8_epi32(eight(p + 8)));
}
inline vi widened(const int8_t* p) {
  return halves<vi>(_mm256_cvtepi8_epi32(eight(p)), _mm256_cvtepi8_epi32(eight(p + 8)));
}
inline vf floats(vi v) { return __builtin_convertvector(v, vf); }
#else
template <class V, class T>
inline V each_widened(const T* p) {
  V v;
  for (int i = 0; i < LANES; i++) v[i] = p[i];
  return v;
}
inline vu widened(const uint16_t* p) { return each_widened<vu>(p); }
inline vu widened(const uint8_t* p) { return each_widened<vu>(p); }
inline vi widened(const int8_t* p) { return each_widened<vi>(p); }
inline vf floats(vi v) { return __builtin_convertvector(v, vf); }
#endif

inline vf load(const bf16* p) { return (vf)(widened((const uint16_t*)p) << 16); }
inline vf load(const int8_t* p) { return floats(widened(p)); }
inline vf load(const fp8* p) {
  vu u = widened((const uint8_t*)p);
  // Exponent and mantissa where float32 has them; 2^120 makes up for the other bias, exactly.
  return (vf)(((u & 0x80) << 24) | ((u & 0x7f) << 20)) * 0x1p120f;
}
inline void store(float* p, vf v) { memcpy(p, &v, sizeof v); }

// The first n < 16 numbers, zeros behind: nothing past them is read.
template <class T>
inline vf load_first(const T* p, int n) {
  T held[LANES] = {};
  memcpy(held, p, n * sizeof(T));
  return load(held);
}
inline void store_first(float* p, vf v, int n) { memcpy(p, &v, n * sizeof(float)); }

inline float sum(vf v) {
  vf8 h[2];
  memcpy(h, &v, sizeof h);
  vf8 a = h[0] + h[1];
  vf4 q[2];
  memcpy(q, &a, sizeof q);
  vf4 b = q[0] + q[1];
  return (b[0] + b[2]) + (b[1] + b[3]);
}
#if defined(__AVX512F__)
inline vf maximum(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
#else
inline vf maximum(vf a, vf b) { return a > b ? a : b; }
#endif
inline float largest(vf v) {
  vf8 h[2];
  memcpy(h, &v, sizeof h);
  vf8 a = h[0] > h[1] ? h[0] : h[1];
  vf4 q[2];
  memcpy(q, &a, sizeof q);
  vf4 b = q[0] > q[1] ? q[0] : q[1];
  float x = b[0] > b[1] ? b[0] : b[1], y = b[2] > b[3] ? b[2] : b[3];
  return x > y ? x : y;
}
inline vf all(float x) { return vf{} + x; }

// To the nearest whole number, half to even, for |v| < 2^22.
inline vf round_even(vf v) {
  vf magic = all(12582912.0f);
  return (v + magic) - magic;
}

// e^x to about two units in the last place; 0 below -87 or so. NaN stays one.
inline vf exponential(vf x) {
#if defined(__AVX512F__)
  vf held = maximum(all(-104.0f), x);
  vf n = (vf)_mm512_roundscale_ps((__m512)(held * 1.44269504f), 8);
#else
  vf low = all(-87.0f);
  vf held = maximum(x, low);
  vf n = round_even(held * 1.44269504f);
#endif
  vf f = held - n * 0.693359375f;
  f = f + n * 2.12194440e-4f;
  vf p = all(1.9875691500e-4f);
  p = p * f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = p * f * f + f + 1.0f;
#if defined(__AVX512F__)
  return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  vi exponent = (__builtin_convertvector(n, vi) + 127) << 23;
  vf found = p * (vf)exponent;
  found = x < low ? vf{} : found;
  return x == x ? found : x;
#endif
}

inline bf16 narrow(float x) {  // round half to even; NaN stays one
  uint32_t u;
  memcpy(&u, &x, 4);
  if ((u & 0x7fffffff) > 0x7f800000) return {(uint16_t)((u >> 16) | 0x40)};
  return {(uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16)};
}
inline fp8 to_fp8(float x) {  // |x| <= 448, round half to even
  uint32_t u;
  memcpy(&u, &x, 4);
  uint8_t sign = (u >> 24) & 0x80;
  u &= 0x7fffffff;
  float size;
  memcpy(&size, &u, 4);
  if (size < 0x1p-6f) return {(uint8_t)(sign | (uint8_t)__builtin_nearbyintf(size * 512.0f))};
  u += 0x7ffff + ((u >> 20) & 1);
  return {(uint8_t)(sign | (uint8_t)((u >> 20) - (120 << 3)))};
}

#if defined(__AVX512F__)
// Rows become columns, 16 x 16, with shuffles that need no index.
inline void transpose(vf* rows) {
  __m512* r = (__m512*)rows;
  __m512 a[16], b[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
    a[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {  // column 2 j or 2 j + 1 of each four, of four rows
      b[i + 2 * j] = (__m512)_mm512_unpacklo_pd((__m512d)a[i + j], (__m512d)a[i + j + 2]);
      b[i + 2 * j + 1] = (__m512)_mm512_unpackhi_pd((__m512d)a[i + j], (__m512d)a[i + j + 2]);
    }
#pragma GCC unroll 4
  for (int k = 0; k < 4; k++) {  // columns k, k + 4, k + 8, k + 12
    __m512 low = _mm512_shuffle_f32x4(b[k], b[k + 4], 0x88), high = _mm512_shuffle_f32x4(b[k], b[k + 4], 0xdd);
    __m512 low2 = _mm512_shuffle_f32x4(b[k + 8], b[k + 12], 0x88), high2 = _mm512_shuffle_f32x4(b[k + 8], b[k + 12], 0xdd);
    r[k] = _mm512_shuffle_f32x4(low, low2, 0x88);
    r[k + 4] = _mm512_shuffle_f32x4(high, high2, 0x88);
    r[k + 8] = _mm512_shuffle_f32x4(low, low2, 0xdd);
    r[k + 12] = _mm512_shuffle_f32x4(high, high2, 0xdd);
  }
}
#else
#define MLA_LANES_4(f, s, b) f(b, s), f(b + 1, s), f(b + 2, s), f(b + 3, s)
#define MLA_LANES(f, s) MLA_LANES_4(f, s, 0), MLA_LANES_4(f, s, 4), MLA_LANES_4(f, s, 8), MLA_LANES_4(f, s, 12)
#define MLA_UPPER(j, s) (((j) & (s)) ? 16 + (j) - (s) : (j))
#define MLA_LOWER(j, s) (((j) & (s)) ? 16 + (j) : (j) + (s))
template <int S>
inline void exchange(vf* r) {
  for (int i = 0; i < LANES; i++)
    if (!(i & S)) {
      vf a = r[i], b = r[i + S];
      r[i] = __builtin_shufflevector(a, b, MLA_LANES(MLA_UPPER, S));
      r[i + S] = __builtin_shufflevector(a, b, MLA_LANES(MLA_LOWER, S));
    }
}
inline void transpose(vf* r) {
  exchange<8>(r);
  exchange<4>(r);
  exchange<2>(r);
  exchange<1>(r);
}
#endif

}  // namespace mla
