// What the Metal bodies use, in CUDA: a simdgroup is a warp.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned int uint32_t;
typedef __half half;
typedef __nv_bfloat16 bfloat;

#define METAL_FUNC __device__ __forceinline__

namespace metal {
enum class mem_flags { mem_none, mem_device, mem_threadgroup };

METAL_FUNC void threadgroup_barrier(mem_flags) { __syncthreads(); }
METAL_FUNC void simdgroup_barrier(mem_flags) { __syncwarp(); }

template <typename T>
METAL_FUNC T simd_shuffle(T value, ushort lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}
template <typename T>
METAL_FUNC T simd_broadcast(T value, ushort lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}
template <typename T>
METAL_FUNC T simd_shuffle_xor(T value, ushort mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}
template <typename T>
METAL_FUNC T simd_shuffle_down(T value, ushort delta) {
  return __shfl_down_sync(0xffffffffu, value, delta);
}
template <typename T>
METAL_FUNC T simd_shuffle_up(T value, ushort delta) {
  return __shfl_up_sync(0xffffffffu, value, delta);
}
// A butterfly: every lane gets the same bits, in one fixed order.
template <typename T>
METAL_FUNC T simd_sum(T value) {
  for (int mask = 1; mask < 32; mask *= 2) value = value + __shfl_xor_sync(0xffffffffu, value, mask);
  return value;
}
template <typename T>
METAL_FUNC T simd_max(T value) {
  for (int mask = 1; mask < 32; mask *= 2) {
    T other = __shfl_xor_sync(0xffffffffu, value, mask);
    value = value < other ? other : value;
  }
  return value;
}
template <typename T>
METAL_FUNC T simd_min(T value) {
  for (int mask = 1; mask < 32; mask *= 2) {
    T other = __shfl_xor_sync(0xffffffffu, value, mask);
    value = other < value ? other : value;
  }
  return value;
}
METAL_FUNC bool simd_any(bool value) { return __any_sync(0xffffffffu, value); }
METAL_FUNC bool simd_all(bool value) { return __all_sync(0xffffffffu, value); }

// Lane l holds two neighbouring columns of one row, as on Apple's GPUs, and sums go in their order. One copy of it:
// compilers take minutes to unroll it into loops.
struct simdgroup_float8x8 {
  float elements[2];
  METAL_FUNC float* thread_elements() { return elements; }
};
__device__ __noinline__ void simdgroup_multiply_accumulate(
    simdgroup_float8x8& to, simdgroup_float8x8 a, simdgroup_float8x8 b, simdgroup_float8x8 c) {
  const int lane = threadIdx.x & 31, row = (lane >> 2 & 4) + (lane >> 1 & 3), column = (lane >> 2 & 2) + (lane & 1);
  for (int k = 0; k < 8; k++) {
    const int of_a = ((row & 4) | (k >> 1 & 2)) * 4 + (row & 3) * 2 + (k >> 1 & 1);
    const int of_b = ((k & 4) | (column & 2)) * 4 + (k & 3) * 2 + (column & 1);
    const float even = __shfl_sync(0xffffffffu, a.elements[0], of_a);
    const float odd = __shfl_sync(0xffffffffu, a.elements[1], of_a);
    for (int i = 0; i < 2; i++)
      c.elements[i] = fmaf(k & 1 ? odd : even, __shfl_sync(0xffffffffu, b.elements[i], of_b), c.elements[i]);
  }
  to = c;
}

template <typename T>
METAL_FUNC T max(T a, T b) { return a < b ? b : a; }
template <typename T>
METAL_FUNC T min(T a, T b) { return b < a ? b : a; }
METAL_FUNC float fma(float a, float b, float c) { return fmaf(a, b, c); }
METAL_FUNC float exp(float x) { return expf(x); }
METAL_FUNC float log(float x) { return logf(x); }
METAL_FUNC float tanh(float x) { return tanhf(x); }
METAL_FUNC float cos(float x) { return cosf(x); }
METAL_FUNC float sin(float x) { return sinf(x); }
METAL_FUNC float sqrt(float x) { return sqrtf(x); }
METAL_FUNC float rsqrt(float x) { return rsqrtf(x); }
METAL_FUNC float fabs(float x) { return fabsf(x); }
METAL_FUNC bool isfinite(float x) { return ::isfinite(x); }
METAL_FUNC bool isnan(float x) { return ::isnan(x); }
namespace precise {
METAL_FUNC float exp(float x) { return expf(x); }
METAL_FUNC float log(float x) { return logf(x); }
METAL_FUNC float tanh(float x) { return tanhf(x); }
METAL_FUNC float cos(float x) { return cosf(x); }
METAL_FUNC float sin(float x) { return sinf(x); }
METAL_FUNC float sqrt(float x) { return sqrtf(x); }
METAL_FUNC float rsqrt(float x) { return rsqrtf(x); }
}  // namespace precise

template <typename To, typename From>
METAL_FUNC To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}
template <typename A, typename B>
struct is_same { static constexpr bool value = false; };
template <typename A>
struct is_same<A, A> { static constexpr bool value = true; };
}  // namespace metal
// A keyword of Metal, without a namespace.
using metal::as_type;
