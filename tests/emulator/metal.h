// The part of the Metal Shading Language that the kernels use, as C++20, and the names that MLX's preamble adds.
#pragma once
#include <stdint.h>

#include <limits>
#include <type_traits>

#include "interface.h"

extern "C" {
__attribute__((visibility("default"))) emulator::Runtime* emulator_runtime;
}

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;

// ---- bfloat: converts to float by itself, from floating types only when asked; operations round

struct bfloat {
  uint16_t bits;
  bfloat() = default;
  constexpr explicit bfloat(float value) : bits(rounded(value)) {}
  constexpr explicit bfloat(half value) : bits(rounded(value)) {}
  template <typename I, typename = std::enable_if_t<std::is_integral_v<I>>>
  constexpr bfloat(I value) : bits(rounded(float(value))) {}
  constexpr operator float() const { return __builtin_bit_cast(float, uint32_t(bits) << 16); }

  // To nearest, ties to even.
  static constexpr uint16_t rounded(float value) {
    uint32_t word = __builtin_bit_cast(uint32_t, value);
    if ((word & 0x7fffffffu) > 0x7f800000u) return uint16_t(word >> 16 | 0x40);
    return uint16_t((word + 0x7fffu + (word >> 16 & 1)) >> 16);
  }
};

namespace emulator {
template <typename T> constexpr bool is_small_float = std::is_same_v<T, half> || std::is_same_v<T, bfloat>;
template <typename T> constexpr bool is_float = std::is_same_v<T, float> || is_small_float<T>;
template <typename T> constexpr bool is_scalar = std::is_integral_v<T> || is_float<T>;
}  // namespace emulator

#define EMULATOR_OPERATOR(op) \
  constexpr bfloat operator op(bfloat a, bfloat b) { return bfloat(float(a) op float(b)); } \
  template <typename I> requires std::is_integral_v<I> \
  constexpr bfloat operator op(bfloat a, I b) { return a op bfloat(b); } \
  template <typename I> requires std::is_integral_v<I> \
  constexpr bfloat operator op(I a, bfloat b) { return bfloat(a) op b; } \
  constexpr float operator op(bfloat a, float b) { return float(a) op b; } \
  constexpr float operator op(float a, bfloat b) { return a op float(b); } \
  float operator op(bfloat, half) = delete; \
  float operator op(half, bfloat) = delete; \
  constexpr bfloat& operator op##=(bfloat& a, bfloat b) { return a = a op b; }
EMULATOR_OPERATOR(+)
EMULATOR_OPERATOR(-)
EMULATOR_OPERATOR(*)
EMULATOR_OPERATOR(/)
#undef EMULATOR_OPERATOR
constexpr bfloat operator-(bfloat a) { return bfloat(-float(a)); }

// ---- vectors: loads and stores of 2 to 4 values at once

namespace metal {
template <typename T, int N> struct vec;
template <typename T> struct alignas(2 * sizeof(T)) vec<T, 2> {
  T x, y;
  vec() = default;
  constexpr vec(T x, T y) : x(x), y(y) {}
  constexpr explicit vec(T all) : x(all), y(all) {}
  constexpr T& operator[](int i) { return (&x)[i]; }
  constexpr T operator[](int i) const { return (&x)[i]; }
};
template <typename T> struct alignas(4 * sizeof(T)) vec<T, 3> {
  T x, y, z;
  vec() = default;
  constexpr vec(T x, T y, T z) : x(x), y(y), z(z) {}
  constexpr explicit vec(T all) : x(all), y(all), z(all) {}
  constexpr T& operator[](int i) { return (&x)[i]; }
  constexpr T operator[](int i) const { return (&x)[i]; }
};
template <typename T> struct alignas(4 * sizeof(T)) vec<T, 4> {
  T x, y, z, w;
  vec() = default;
  constexpr vec(T x, T y, T z, T w) : x(x), y(y), z(z), w(w) {}
  constexpr explicit vec(T all) : x(all), y(all), z(all), w(all) {}
  constexpr T& operator[](int i) { return (&x)[i]; }
  constexpr T operator[](int i) const { return (&x)[i]; }
};
}  // namespace metal

#define EMULATOR_VECTORS(T, name) \
  typedef metal::vec<T, 2> name##2; \
  typedef metal::vec<T, 3> name##3; \
  typedef metal::vec<T, 4> name##4;
EMULATOR_VECTORS(float, float)
EMULATOR_VECTORS(half, half)
EMULATOR_VECTORS(bfloat, bfloat)
EMULATOR_VECTORS(int8_t, char)
EMULATOR_VECTORS(uchar, uchar)
EMULATOR_VECTORS(short, short)
EMULATOR_VECTORS(ushort, ushort)
EMULATOR_VECTORS(int, int)
EMULATOR_VECTORS(uint, uint)
#undef EMULATOR_VECTORS

template <typename To, typename From>
inline To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  To to;
  __builtin_memcpy((void*)&to, (const void*)&from, sizeof(To));
  return to;
}

namespace emulator {
template <typename T> struct is_vector { static constexpr bool value = false; };
template <typename T, int N> struct is_vector<metal::vec<T, N>> { static constexpr bool value = true; };
inline const Thread& current_thread() { return emulator_runtime->lane->thread; }
inline uint3 attribute(Triple value) { return uint3(value.x, value.y, value.z); }
inline uint attribute(unsigned value) { return value; }
}  // namespace emulator

// ---- mathematics: half and bfloat are computed in float and rounded

namespace metal {
namespace precise {
#define EMULATOR_FUNCTION1(name, formula) \
  inline float name(float x) { return formula; } \
  template <typename T> requires emulator::is_small_float<T> \
  inline T name(T x) { return T(name(float(x))); }
#define EMULATOR_FUNCTION2(name, formula) \
  inline float name(float x, float y) { return formula; } \
  template <typename T> requires emulator::is_small_float<T> \
  inline T name(T x, T y) { return T(name(float(x), float(y))); }
EMULATOR_FUNCTION1(exp, __builtin_expf(x))
EMULATOR_FUNCTION1(exp2, __builtin_exp2f(x))
EMULATOR_FUNCTION1(log, __builtin_logf(x))
EMULATOR_FUNCTION1(log2, __builtin_log2f(x))
EMULATOR_FUNCTION1(log10, __builtin_log10f(x))
EMULATOR_FUNCTION1(sin, __builtin_sinf(x))
EMULATOR_FUNCTION1(cos, __builtin_cosf(x))
EMULATOR_FUNCTION1(tan, __builtin_tanf(x))
EMULATOR_FUNCTION1(sinh, __builtin_sinhf(x))
EMULATOR_FUNCTION1(cosh, __builtin_coshf(x))
EMULATOR_FUNCTION1(tanh, __builtin_tanhf(x))
EMULATOR_FUNCTION1(sqrt, __builtin_sqrtf(x))
EMULATOR_FUNCTION1(rsqrt, float(1.0 / __builtin_sqrt(double(x))))
EMULATOR_FUNCTION1(floor, __builtin_floorf(x))
EMULATOR_FUNCTION1(ceil, __builtin_ceilf(x))
EMULATOR_FUNCTION1(round, __builtin_roundf(x))
EMULATOR_FUNCTION1(rint, __builtin_rintf(x))
EMULATOR_FUNCTION1(trunc, __builtin_truncf(x))
EMULATOR_FUNCTION1(fabs, __builtin_fabsf(x))
EMULATOR_FUNCTION2(pow, __builtin_powf(x, y))
EMULATOR_FUNCTION2(fmod, __builtin_fmodf(x, y))
EMULATOR_FUNCTION2(fmax, __builtin_fmaxf(x, y))
EMULATOR_FUNCTION2(fmin, __builtin_fminf(x, y))
EMULATOR_FUNCTION2(copysign, __builtin_copysignf(x, y))
#undef EMULATOR_FUNCTION1
#undef EMULATOR_FUNCTION2
inline float fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
template <typename T> requires emulator::is_small_float<T>
inline T fma(T x, T y, T z) { return T(fma(float(x), float(y), float(z))); }
}  // namespace precise
namespace fast {
using namespace precise;
}
using namespace precise;

template <typename T> requires emulator::is_scalar<T>
inline T max(T a, T b) {
  if constexpr (emulator::is_float<T>) return fmax(a, b);
  else return a < b ? b : a;
}
template <typename T> requires emulator::is_scalar<T>
inline T min(T a, T b) {
  if constexpr (emulator::is_float<T>) return fmin(a, b);
  else return b < a ? b : a;
}
template <typename T> requires emulator::is_scalar<T>
inline T clamp(T x, T low, T high) { return min(max(x, low), high); }
template <typename T> requires emulator::is_scalar<T>
inline T abs(T x) {
  if constexpr (emulator::is_float<T>) return fabs(x);
  else return x < 0 ? T(-x) : x;
}
template <typename T> requires emulator::is_float<T>
inline bool isnan(T x) { return __builtin_isnan(float(x)); }
template <typename T> requires emulator::is_float<T>
inline bool isinf(T x) { return __builtin_isinf(float(x)); }
template <typename T> requires emulator::is_float<T>
inline bool isfinite(T x) { return __builtin_isfinite(float(x)); }
template <typename T> requires emulator::is_scalar<T>
inline T select(T no, T yes, bool which) { return which ? yes : no; }

template <typename T> requires std::is_integral_v<T>
inline T popcount(T x) { return T(__builtin_popcountll((std::make_unsigned_t<T>)x)); }
template <typename T> requires std::is_integral_v<T>
inline T clz(T x) {
  return x ? T(__builtin_clzll((std::make_unsigned_t<T>)x) - (64 - 8 * int(sizeof(T)))) : T(8 * sizeof(T));
}
template <typename T> requires std::is_integral_v<T>
inline T ctz(T x) { return x ? T(__builtin_ctzll((std::make_unsigned_t<T>)x)) : T(8 * sizeof(T)); }

using std::conditional;
using std::conditional_t;
using std::enable_if;
using std::enable_if_t;
using std::is_same;
using std::is_same_v;

template <typename T> struct numeric_limits : std::numeric_limits<T> {};
template <> struct numeric_limits<half> {
  static constexpr half max() { return half(65504.0f); }
  static constexpr half lowest() { return half(-65504.0f); }
  static constexpr half infinity() { return half(__builtin_inff()); }
};
template <> struct numeric_limits<bfloat> {
  static constexpr bfloat max() { return bfloat(3.38953139e38f); }
  static constexpr bfloat lowest() { return bfloat(-3.38953139e38f); }
  static constexpr bfloat infinity() { return bfloat(__builtin_inff()); }
};
}  // namespace metal

// ---- simdgroups and barriers

namespace emulator {
#ifdef __clang__
#define EMULATOR_COLUMN __builtin_COLUMN()
#else
#define EMULATOR_COLUMN 0
#endif
constexpr Site here(const char* operation, const char* file = __builtin_FILE(), unsigned line = __builtin_LINE(),
                    unsigned column = EMULATOR_COLUMN) {
  return {operation, file, line, column};
}

inline int lane_index() { return current_thread().thread_index_in_simdgroup; }

// Hands a value to the simdgroup and waits for the others; `received` reads theirs until the next operation.
template <typename T>
inline void exchange(T value, Site site) {
  static_assert(!std::is_same_v<T, bool> && (is_vector<T>::value || (is_scalar<T> && sizeof(T) <= 4)),
                "Metal's simdgroup operations take scalars of up to 32 bits and vectors of them");
  static_assert(sizeof(T) <= largest_value);
  Lane* lane = emulator_runtime->lane;
  lane->turn ^= 1;
  __builtin_memcpy(lane->value[lane->turn], (const void*)&value, sizeof(T));
  emulator_runtime->wait(State::at_simdgroup_operation, site);
}
template <typename T>
inline T received(int index) {
  Lane* lane = emulator_runtime->lane;
  T value;
  __builtin_memcpy((void*)&value, (lane + index - lane_index())->value[lane->turn], sizeof(T));
  return value;
}

template <typename T>
inline T shuffle(T value, int from, Site site) {
  if (from < 0 || from >= lanes_per_simdgroup) emulator_runtime->fail("there is no such lane", site);
  exchange(value, site);
  return received<T>(from);
}

// Lane i and lane i ^ 1 first, then i ^ 2, 4, 8, 16: every lane of that butterfly gets the same bits.
template <typename T, typename F>
inline T reduce(T value, F combine, Site site) {
  exchange(value, site);
  T all[lanes_per_simdgroup];
  for (int i = 0; i < lanes_per_simdgroup; i++) all[i] = received<T>(i);
  for (int count = lanes_per_simdgroup / 2; count > 0; count /= 2)
    for (int i = 0; i < count; i++) all[i] = combine(all[2 * i], all[2 * i + 1]);
  return all[0];
}
}  // namespace emulator

namespace metal {
#define EMULATOR_SITE(name) emulator::Site site = emulator::here(name)
#define EMULATOR_REDUCTION(name, formula) \
  template <typename T> \
  inline T name(T value, EMULATOR_SITE(#name)) { \
    return emulator::reduce(value, [](T a, T b) { return T(formula); }, site); \
  }
EMULATOR_REDUCTION(simd_sum, a + b)
EMULATOR_REDUCTION(simd_product, a * b)
EMULATOR_REDUCTION(simd_max, metal::max(a, b))
EMULATOR_REDUCTION(simd_min, metal::min(a, b))
EMULATOR_REDUCTION(simd_and, a & b)
EMULATOR_REDUCTION(simd_or, a | b)
EMULATOR_REDUCTION(simd_xor, a ^ b)
#undef EMULATOR_REDUCTION
inline bool simd_any(bool value, EMULATOR_SITE("simd_any")) { return simd_max(int(value), site) != 0; }
inline bool simd_all(bool value, EMULATOR_SITE("simd_all")) { return simd_min(int(value), site) != 0; }

template <typename T>
inline T simd_prefix_exclusive_sum(T value, EMULATOR_SITE("simd_prefix_exclusive_sum")) {
  emulator::exchange(value, site);
  T sum = T(0);
  for (int i = 0; i < emulator::lane_index(); i++) sum = T(sum + emulator::received<T>(i));
  return sum;
}
template <typename T>
inline T simd_prefix_inclusive_sum(T value, EMULATOR_SITE("simd_prefix_inclusive_sum")) {
  return T(simd_prefix_exclusive_sum(value, site) + value);
}

template <typename T>
inline T simd_shuffle(T value, ushort lane, EMULATOR_SITE("simd_shuffle")) {
  return emulator::shuffle(value, lane, site);
}
template <typename T>
inline T simd_broadcast(T value, ushort lane, EMULATOR_SITE("simd_broadcast")) {
  return emulator::shuffle(value, lane, site);
}
template <typename T>
inline T simd_broadcast_first(T value, EMULATOR_SITE("simd_broadcast_first")) {
  return emulator::shuffle(value, 0, site);
}
template <typename T>
inline T simd_shuffle_xor(T value, ushort mask, EMULATOR_SITE("simd_shuffle_xor")) {
  return emulator::shuffle(value, emulator::lane_index() ^ mask, site);
}
// Lanes that would read beyond the simdgroup keep their own value.
template <typename T>
inline T simd_shuffle_down(T value, ushort delta, EMULATOR_SITE("simd_shuffle_down")) {
  int from = emulator::lane_index() + delta;
  return emulator::shuffle(value, from < 32 ? from : emulator::lane_index(), site);
}
template <typename T>
inline T simd_shuffle_up(T value, ushort delta, EMULATOR_SITE("simd_shuffle_up")) {
  int from = emulator::lane_index() - delta;
  return emulator::shuffle(value, from >= 0 ? from : emulator::lane_index(), site);
}

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
inline mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
inline void threadgroup_barrier(mem_flags, EMULATOR_SITE("threadgroup_barrier")) {
  emulator_runtime->wait(emulator::State::at_threadgroup_barrier, site);
}
inline void simdgroup_barrier(mem_flags, EMULATOR_SITE("simdgroup_barrier")) {
  emulator_runtime->wait(emulator::State::at_simdgroup_operation, site);
}
}  // namespace metal

// ---- 8 x 8 matrices: lane l holds two neighbouring columns of one row

namespace metal {
template <typename T, int Rows, int Columns>
struct simdgroup_matrix {
  static_assert(Rows == 8 && Columns == 8 && emulator::is_float<T>, "8 x 8 numbers of a floating type");
  vec<T, 2>& thread_elements() { return elements; }
  const vec<T, 2>& thread_elements() const { return elements; }

 private:
  vec<T, 2> elements;
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

// Sums as Apple's GPUs were measured to (M1, M3): one fused multiply-add after another, k ascending. Accumulators of
// other types round in ways of their own.
template <typename A, typename B>
inline void simdgroup_multiply_accumulate(simdgroup_float8x8& to, const simdgroup_matrix<A, 8, 8>& a,
                                          const simdgroup_matrix<B, 8, 8>& b, const simdgroup_float8x8& c,
                                          EMULATOR_SITE("simdgroup_multiply_accumulate")) {
  emulator::exchange(vec<float, 4>{float(a.thread_elements()[0]), float(a.thread_elements()[1]),
                                   float(b.thread_elements()[0]), float(b.thread_elements()[1])},
                     site);
  const int lane = emulator::lane_index(), row = (lane / 4 & 4) + lane / 2 % 4, column = (lane / 4 & 2) + lane % 2;
  auto holder = [](int row, int pair) { return ((row & 4) | (pair & 2)) * 4 + (row & 3) * 2 + (pair & 1); };
  vec<float, 2> sum = c.thread_elements();
  for (int k = 0; k < 8; k++) {
    const float left = emulator::received<vec<float, 4>>(holder(row, k / 2))[k % 2];
    const auto right = emulator::received<vec<float, 4>>(holder(k, column));
    for (int i = 0; i < 2; i++) sum[i] = __builtin_fmaf(left, right[2 + i], sum[i]);
  }
  to.thread_elements() = sum;
}
}  // namespace metal

namespace emulator {
template <typename A>
inline A& threadgroup_array(const char* name, unsigned line = __builtin_LINE()) {
  return *(A*)emulator_runtime->threadgroup_array(name, sizeof(A), line);
}
}  // namespace emulator

// ---- what clang's checks of undefined behaviour call: each gets a record that begins with the place

namespace emulator {
struct Place {
  const char* file;
  unsigned line, column;
};
}  // namespace emulator
#define EMULATOR_CHECK(name, what) \
  extern "C" void __ubsan_handle_##name##_abort(const emulator::Place* at) { \
    emulator_runtime->fail(what, {"undefined behaviour", at->file, at->line, at->column}); \
  }
EMULATOR_CHECK(type_mismatch_v1, "a misaligned address")
EMULATOR_CHECK(out_of_bounds, "an index beyond its array")
EMULATOR_CHECK(shift_out_of_bounds, "a shift by more bits than there are")
EMULATOR_CHECK(divrem_overflow, "a division by zero")
#undef EMULATOR_CHECK

// ---- MLX's preamble

typedef half float16_t;
typedef bfloat bfloat16_t;
using namespace metal;

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define MAXFLOAT __FLT_MAX__
#define M_PI_F 3.14159265358979323846f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.69314718055994530942f
#define METAL_FUNC inline
#define kernel
#define device
#define constant
#define thread
#define threadgroup
