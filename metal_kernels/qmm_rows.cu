// The tensor core twin of qmm_rows.metal for 4 and 8 bits: x in bfloat16 or float16.
//
// A block makes 16 * TILES output columns; its warps share K group by group. Packed values become exact integers
// around zero, so products are exact; each group is scaled once in float32. Every row count runs the same tile.

// Unpacks one word into pairs of T: pairs[j] = values at k = pair_first(j) and pair_first(j) + distance.
template <typename T, int BITS>
struct Unpack;

template <>
struct Unpack<__nv_bfloat16, 4> {
  static constexpr float ZERO = 8.0f;
  static __device__ __forceinline__ void word(unsigned w, unsigned* pairs) {
    const __nv_bfloat162 offset = __float2bfloat162_rn(136.0f);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      unsigned bits = ((w >> (4 * j)) & 0x000F000Fu) | 0x43004300u;
      __nv_bfloat162 value = __hsub2(reinterpret_cast<__nv_bfloat162&>(bits), offset);
      pairs[j] = reinterpret_cast<unsigned&>(value);
    }
  }
};

template <>
struct Unpack<__half, 4> {
  static constexpr float ZERO = 8.0f;
  static __device__ __forceinline__ void word(unsigned w, unsigned* pairs) {
    const __half2 offset = __float2half2_rn(1032.0f);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      unsigned bits = ((w >> (4 * j)) & 0x000F000Fu) | 0x64006400u;
      __half2 value = __hsub2(reinterpret_cast<__half2&>(bits), offset);
      pairs[j] = reinterpret_cast<unsigned&>(value);
    }
  }
};

template <>
struct Unpack<__nv_bfloat16, 8> {
  static constexpr float ZERO = 128.0f;
  static __device__ __forceinline__ void word(unsigned w, unsigned* pairs) {
    // 8 significant bits hold 16 * high - 128 and low exactly, and their sum too.
    const __nv_bfloat162 high_offset = __float2bfloat162_rn(2176.0f), low_offset = __float2bfloat162_rn(128.0f);
#pragma unroll
    for (int j = 0; j < 2; j++) {
      unsigned low_bits = ((w >> (8 * j)) & 0x000F000Fu) | 0x43004300u;
      unsigned high_bits = ((w >> (8 * j + 4)) & 0x000F000Fu) | 0x45004500u;
      __nv_bfloat162 low = __hsub2(reinterpret_cast<__nv_bfloat162&>(low_bits), low_offset);
      __nv_bfloat162 high = __hsub2(reinterpret_cast<__nv_bfloat162&>(high_bits), high_offset);
      __nv_bfloat162 value = __hadd2(high, low);
      pairs[j] = reinterpret_cast<unsigned&>(value);
    }
  }
};

template <>
struct Unpack<__half, 8> {
  static constexpr float ZERO = 128.0f;
  static __device__ __forceinline__ void word(unsigned w, unsigned* pairs) {
    const __half2 offset = __float2half2_rn(1152.0f);
#pragma unroll
    for (int j = 0; j < 2; j++) {
      unsigned bits = ((w >> (8 * j)) & 0x00FF00FFu) | 0x64006400u;
      __half2 value = __hsub2(reinterpret_cast<__half2&>(bits), offset);
      pairs[j] = reinterpret_cast<unsigned&>(value);
    }
  }
};

// Brings x values k0 .. k7 (four words of two) into the pairs that Unpack makes of the same k.
template <int BITS>
__device__ __forceinline__ void pair_up(uint4 x, unsigned* pairs) {
  if constexpr (BITS == 4) {
    pairs[0] = __byte_perm(x.x, x.z, 0x5410);
    pairs[1] = __byte_perm(x.x, x.z, 0x7632);
    pairs[2] = __byte_perm(x.y, x.w, 0x5410);
    pairs[3] = __byte_perm(x.y, x.w, 0x7632);
  } else {
    pairs[0] = __byte_perm(x.x, x.y, 0x5410);
    pairs[1] = __byte_perm(x.x, x.y, 0x7632);
    pairs[2] = __byte_perm(x.z, x.w, 0x5410);
    pairs[3] = __byte_perm(x.z, x.w, 0x7632);
  }
}

// Words that one lane reads of one group of one weight row: a quarter of the group.
template <int COUNT>
__device__ __forceinline__ void load_words(const unsigned* from, unsigned* words) {
  if constexpr (COUNT % 4 == 0) {
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
      uint4 v = __ldcs(reinterpret_cast<const uint4*>(from + i));
      words[i] = v.x, words[i + 1] = v.y, words[i + 2] = v.z, words[i + 3] = v.w;
    }
  } else if constexpr (COUNT == 2) {
    uint2 v = __ldcs(reinterpret_cast<const uint2*>(from));
    words[0] = v.x, words[1] = v.y;
  } else {
    words[0] = __ldcs(from);
  }
}

// body
constexpr int COLUMNS = 16 * TILES, ROW_TILES = (R + 7) / 8, GROUPS = K / GROUP;
constexpr int RUN = GROUP / 4, WORDS = RUN * BITS / 32, STEPS = GROUP / 16;
constexpr int WIDTH = GATED ? N / 2 : N, OUT = GATED ? COLUMNS / 2 : COLUMNS;
const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane >> 2, part = lane & 3;
const int first = blockIdx.x * OUT;
const unsigned one = std::is_same<T, __half>::value ? 0x3C003C00u : 0x3F803F80u;
const unsigned ones[4] = {one, one, one, one};

// The two weight rows of each tile that this lane feeds; beyond the last one they repeat it and are not written.
int row_of[TILES][2];
#pragma unroll
for (int m = 0; m < TILES; m++)
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int column = m * 16 + half * 8 + quad;
    bool is_up = GATED && column >= OUT;
    int n = min(first + (is_up ? column - OUT : column), WIDTH - 1);
    row_of[m][half] = is_up ? WIDTH + n : n;
  }

float acc[TILES][ROW_TILES][4] = {};
for (int start = warp; start < GROUPS; start += WARPS * UNROLL) {
  unsigned words[UNROLL][TILES][2][WORDS];
  T scale[UNROLL][TILES][2], bias_of[UNROLL][TILES][2];
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    int group = min(start + u * WARPS, GROUPS - 1);
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        size_t row = row_of[m][half];
        load_words<WORDS>(weight + row * (K * BITS / 32) + (group * GROUP + part * RUN) * BITS / 32, words[u][m][half]);
        scale[u][m][half] = scales[row * GROUPS + group];
        bias_of[u][m][half] = biases[row * GROUPS + group];
      }
  }
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    int group = start + u * WARPS;
    if (group >= GROUPS) break;
    float sum[TILES][ROW_TILES][4] = {}, sum_x[ROW_TILES][4] = {};
#pragma unroll
    for (int run = 0; run < RUN / 8; run++) {
      unsigned b[ROW_TILES][4];
#pragma unroll
      for (int r = 0; r < ROW_TILES; r++) {
        uint4 values = make_uint4(0, 0, 0, 0);
        if (r * 8 + quad < R)
          values = __ldg(reinterpret_cast<const uint4*>(x + (r * 8 + quad) * K + group * GROUP + part * RUN + run * 8));
        pair_up<BITS>(values, b[r]);
        multiply_tile<T>(sum_x[r], ones, b[r][0], b[r][1]);
        multiply_tile<T>(sum_x[r], ones, b[r][2], b[r][3]);
      }
#pragma unroll
      for (int m = 0; m < TILES; m++) {
        unsigned pairs[2][4];
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
          for (int w = 0; w < BITS / 4; w++)
            Unpack<T, BITS>::word(words[u][m][half][run * BITS / 4 + w], pairs[half] + w * 2);
#pragma unroll
        for (int step = 0; step < 2; step++) {
          unsigned a[4] = {pairs[0][2 * step], pairs[1][2 * step], pairs[0][2 * step + 1], pairs[1][2 * step + 1]};
#pragma unroll
          for (int r = 0; r < ROW_TILES; r++) multiply_tile<T>(sum[m][r], a, b[r][2 * step], b[r][2 * step + 1]);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float s = float(scale[u][m][half]);
        float shift = fmaf(s, Unpack<T, BITS>::ZERO, float(bias_of[u][m][half]));
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
          for (int c = 0; c < 2; c++) {
            float& total = acc[m][r][half * 2 + c];
            total = fmaf(s, sum[m][r][half * 2 + c], total);
            total = fmaf(shift, sum_x[r][half * 2 + c], total);
          }
      }
  }
}

__shared__ float sums[WARPS * COLUMNS * ROW_TILES * 8];
#pragma unroll
for (int m = 0; m < TILES; m++)
#pragma unroll
  for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
    for (int c = 0; c < 4; c++) {
      int column = m * 16 + (c >> 1) * 8 + quad, row = r * 8 + part * 2 + (c & 1);
      sums[(warp * COLUMNS + column) * (ROW_TILES * 8) + row] = acc[m][r][c];
    }
__syncthreads();
finish_columns<T, WARPS, COLUMNS, ROW_TILES * 8, HAS_BIAS, HAS_RESIDUAL, GATED>(
    sums, first, R, WIDTH, bias, residual, out);
