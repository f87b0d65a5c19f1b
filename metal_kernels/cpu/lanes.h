// VL floats at a time: how numbers of each type become lanes and come back, and what C has no operator for.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#else
#error "a CPU with AVX2, FMA and F16C (x86-64), or an arm64 CPU, is needed"
#endif

#if defined(__AVX512F__)
enum { VL = 16 };
#define INSTRUCTIONS "AVX-512"
#elif defined(__AVX2__)
enum { VL = 8 };
#define INSTRUCTIONS "AVX2"
#else
enum { VL = 8 };
#define INSTRUCTIONS "NEON"
#endif

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

typedef float vf __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint16_t vh __attribute__((vector_size(VL * 2)));
typedef uint8_t vb __attribute__((vector_size(VL)));
typedef float v4 __attribute__((vector_size(16)));
typedef union {
  vf lanes;
  v4 quarter[VL / 4];
} Quarters;

enum Type { BF16, F16, F32 };

INLINE size_t size_of(int type) { return type == F32 ? 4 : 2; }

INLINE const void *at(int type, const void *numbers, size_t index) {
  return (const char *)numbers + index * size_of(type);
}

INLINE vf spread(float x) { return (vf){0} + x; }

// a * b + c with one rounding. Products and sums are never fused anywhere else: -ffp-contract=off.
INLINE vf fused(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  Quarters x = {a}, y = {b}, z = {c};
  for (int i = 0; i < VL / 4; i++)
    z.quarter[i] = (v4)vfmaq_f32((float32x4_t)z.quarter[i], (float32x4_t)x.quarter[i], (float32x4_t)y.quarter[i]);
  return z.lanes;
#endif
}

// The sum of all lanes, always in the same order.
INLINE float total(vf x) {
  Quarters q = {x};
  v4 sum = q.quarter[0] + q.quarter[1];
  if (VL == 16) sum += q.quarter[VL / 4 - 2] + q.quarter[VL / 4 - 1];
  return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

INLINE vf choose(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }

INLINE int any(vi mask) {
  uint64_t words[VL / 2], found = 0;
  memcpy(words, &mask, sizeof words);
  for (int i = 0; i < VL / 2; i++) found |= words[i];
  return found != 0;
}

// NaN in a lane counts for nothing.
INLINE float largest_lane(vf x) {
  float top = -INFINITY;
  for (int i = 0; i < VL; i++) top = x[i] > top ? x[i] : top;
  return top;
}

INLINE vf magnitude(vf x) { return (vf)((vi)x & 0x7fffffff); }

INLINE vf load(int type, const void *p) {
  if (type == F32) {
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
  }
  vh half;
  memcpy(&half, p, sizeof half);
  if (type == BF16) return (vf)(__builtin_convertvector(half, vu) << 16);
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps((__m256i)half);
#elif defined(__AVX2__)
  return (vf)_mm256_cvtph_ps((__m128i)half);
#else
  Quarters x;
  for (int i = 0; i < VL / 4; i++) {
    float16x4_t part;
    memcpy(&part, (const char *)p + i * 8, 8);
    x.quarter[i] = (v4)vcvt_f32_f16(part);
  }
  return x.lanes;
#endif
}

// GCC converts bytes lane by lane.
INLINE vi widened_bytes(vb x) {
#if defined(__AVX512F__)
  return (vi)_mm512_cvtepu8_epi32((__m128i)x);
#elif defined(__AVX2__)
  return (vi)_mm256_cvtepu8_epi32(_mm_set_epi64x(0, (int64_t)x));
#else
  return __builtin_convertvector(x, vi);
#endif
}

// The first in lanes 0 to 7, the second in the lanes after them, if there are any.
INLINE vu in_halves(uint32_t first, uint32_t second) {
#if defined(__AVX512F__)
  return (vu)_mm512_mask_set1_epi32(_mm512_set1_epi32((int)first), 0xff00, (int)second);
#else
  (void)second;
  return (vu){first, first, first, first, first, first, first, first};
#endif
}

// 0, 1, 2, ... and the lanes of a table that the low bits of an index name.
INLINE vu lane_numbers(void) {
#if defined(__AVX512F__)
  return (vu){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#else
  return (vu){0, 1, 2, 3, 4, 5, 6, 7};
#endif
}

INLINE vf looked_up(vf table, vu index) {
#if defined(__AVX512F__)
  return (vf)_mm512_permutexvar_ps((__m512i)index, (__m512)table);
#else
  for (int i = 0; i < VL; i++) index[i] = (uint32_t)((vi)table)[index[i] % VL];
  return (vf)index;
#endif
}

// Rounds to nearest, ties to even.
INLINE void store(int type, void *p, vf x) {
  if (type == F32) {
    memcpy(p, &x, sizeof x);
    return;
  }
  vh half;
  if (type == BF16) {
    vu bits = (vu)x, rounded = bits + 0x7fff + ((bits >> 16) & 1), is_nan = (vu)(x != x);
    half = __builtin_convertvector(((is_nan & (bits | 0x400000)) | (~is_nan & rounded)) >> 16, vh);
  } else {
#if defined(__AVX512F__)
    half = (vh)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
    half = (vh)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    Quarters wide = {x};
    for (int i = 0; i < VL / 4; i++) {
      float16x4_t part = vcvt_f16_f32((float32x4_t)wide.quarter[i]);
      memcpy((char *)p + i * 8, &part, 8);
    }
    return;
#endif
  }
  memcpy(p, &half, sizeof half);
}

// The first ``count`` lanes only, if they are fewer than all; the others are 0.
INLINE vf load_some(int type, const void *p, size_t count) {
  if (count >= VL) return load(type, p);
  char room[VL * 4] = {0};
  memcpy(room, p, count * size_of(type));
  return load(type, room);
}

INLINE void store_some(int type, void *p, vf x, size_t count) {
  if (count >= VL) {
    store(type, p, x);
    return;
  }
  char room[VL * 4];
  store(type, room, x);
  memcpy(p, room, count * size_of(type));
}

INLINE float number(int type, const void *numbers, size_t index) {
  union {
    uint32_t bits;
    float value;
  } wide;
  if (type == F32) return ((const float *)numbers)[index];
  uint16_t half = ((const uint16_t *)numbers)[index];
  if (type == BF16) {
    wide.bits = (uint32_t)half << 16;
    return wide.value;
  }
#if defined(__aarch64__)
  __fp16 narrow;
  memcpy(&narrow, &half, 2);
  return narrow;
#else
  return _cvtsh_ss(half);
#endif
}

// e^x, as if x were between -87 and 88: by powers of two and a polynomial, to 2 units in the last place.
INLINE vf exponential(vf x) {
  x = choose(x < -87.0f, spread(-87.0f), x);
  x = choose(x > 88.0f, spread(88.0f), x);
  // Adding 1.5 * 2^23 rounds to a whole number, which the low bits of the sum are.
  vf shifted = fused(x, spread(1.44269504f), spread(12582912.0f)), n = shifted - 12582912.0f;
  vf f = fused(n, spread(-0.693145752f), x);
  f = fused(n, spread(-1.42860677e-6f), f);
  vf p = fused(f, spread(1.38888889e-3f), spread(8.33333377e-3f));
  p = fused(p, f, spread(4.16666679e-2f));
  p = fused(p, f, spread(1.66666672e-1f));
  p = fused(p, f, spread(0.5f));
  p = fused(p, f, spread(1.0f));
  p = fused(p, f, spread(1.0f));
  vu exponent = ((vu)shifted - 0x4b400000u + 127u) << 23;
  return p * (vf)exponent;
}

// x / (1 + e^-x).
INLINE vf silu(vf x) { return x / (1.0f + exponential(-x)); }

INLINE size_t least(size_t a, size_t b) { return a < b ? a : b; }
