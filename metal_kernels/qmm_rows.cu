// The tensor core twin of qmm_rows.metal for 4 and 8 bits: x in bfloat16 or float16.
//
// A block makes 16 * TILES output columns; its warps take chunks of K in turns, each through its own ring in shared
// memory. Packed values become exact integers around zero, so products are exact; each group is scaled once in
// float32. Every row count runs the same tiles.

// (word & mask) | bits in one instruction, which the compiler does not find for two constants.
__device__ __forceinline__ unsigned mask_or(unsigned word, unsigned mask, unsigned bits) {
  unsigned result;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(result) : "r"(word), "r"(mask), "r"(bits));
  return result;
}

// Unpacks one word into pairs of T, in the order of pair_up, as q - ZERO.
template <typename T, int BITS>
struct Unpack;

template <>
struct Unpack<__nv_bfloat16, 4> {
  static constexpr float ZERO = -128.0f;
  static __device__ __forceinline__ void word(unsigned w, unsigned* pairs) {
    // 128 + q; the 128 leaves with the sum of x.
#pragma unroll
    for (int j = 0; j < 4; j++) pairs[j] = mask_or(w >> (4 * j), 0x000F000Fu, 0x43004300u);
  }
};

template <>
struct Unpack<__half, 4> {
  static constexpr float ZERO = 8.0f;
  static __device__ __forceinline__ void word(unsigned w, unsigned* pairs) {
    const __half2 offset = __float2half2_rn(1032.0f);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      unsigned bits = mask_or(w >> (4 * j), 0x000F000Fu, 0x64006400u);
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
      unsigned low_bits = mask_or(w >> (8 * j), 0x000F000Fu, 0x43004300u);
      unsigned high_bits = mask_or(w >> (8 * j + 4), 0x000F000Fu, 0x45004500u);
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
      unsigned bits = mask_or(w >> (8 * j), 0x00FF00FFu, 0x64006400u);
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

// Reads COUNT words, at most a piece, from shared memory.
template <int COUNT>
__device__ __forceinline__ void read_words(const unsigned* from, unsigned* words) {
  if constexpr (COUNT == 4) {
    uint4 v = *reinterpret_cast<const uint4*>(from);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  } else if constexpr (COUNT == 2) {
    uint2 v = *reinterpret_cast<const uint2*>(from);
    words[0] = v.x, words[1] = v.y;
  } else {
    words[0] = *from;
  }
}

// COUNT neighbouring values, read at once where they are aligned.
template <typename T, int COUNT>
struct alignas(COUNT * sizeof(T)) Several {
  T values[COUNT];
  template <bool ALIGNED>
  __device__ __forceinline__ void read(const T* from, int there) {
    if constexpr (ALIGNED) {
      *this = *reinterpret_cast<const Several*>(from);
    } else {
#pragma unroll
      for (int i = 0; i < COUNT; i++) values[i] = from[min(i, there - 1)];
    }
  }
};

// body
constexpr int COLUMNS = 16 * TILES;
const int rows = x_shape[0];
constexpr int GROUP_BYTES = GROUP * BITS / 8, CHUNK_BYTES = GROUP_BYTES > 64 ? GROUP_BYTES : 64;
constexpr int PIECES = CHUNK_BYTES / 16, CHUNK_GROUPS = CHUNK_BYTES / GROUP_BYTES;
constexpr int RUN = GROUP / 4, WORDS = RUN * BITS / 32, READ = WORDS < 4 ? WORDS : 4;
constexpr int GROUPS = K / GROUP, CHUNKS = (GROUPS + CHUNK_GROUPS - 1) / CHUNK_GROUPS;
constexpr int WIDTH = GATED ? N / 2 : N, OUT = GATED ? COLUMNS / 2 : COLUMNS;
const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane >> 2, part = lane & 3;
const int first = blockIdx.x * OUT;
const unsigned one = is_half<T>::value ? 0x3C003C00u : 0x3F803F80u;
const unsigned ones[4] = {one, one, one, one};

// The weight row of a column of the block; beyond the last one it is repeated, and not written.
auto row_of = [&](int column) {
  bool is_up = GATED && column >= OUT;
  int n = first + (is_up ? column - OUT : column);
  if (WIDTH % OUT) n = min(n, WIDTH - 1);
  return is_up ? WIDTH + n : n;
};
__shared__ uint4 memory[WARPS * STAGES * COLUMNS * PIECES];
static_assert(sizeof(memory) >= WARPS * COLUMNS * ROW_TILES * 8 * sizeof(float), "the sums reuse the rings");
Ring<COLUMNS, PIECES, STAGES, K * BITS / 8> ring(memory + warp * STAGES * COLUMNS * PIECES, weight, row_of);

const T* scale_row[TILES][2];
#pragma unroll
for (int m = 0; m < TILES; m++)
#pragma unroll
  for (int half = 0; half < 2; half++) scale_row[m][half] = scales + size_t(row_of(m * 16 + half * 8 + quad)) * GROUPS;
const ptrdiff_t to_biases = biases - scales;

// What a chunk needs besides its weights is read one chunk ahead.
constexpr bool WHOLE = GROUPS % CHUNK_GROUPS == 0;
uint4 next_x[CHUNK_GROUPS][RUN / 8][ROW_TILES];
Several<T, CHUNK_GROUPS> next_scale[TILES][2], next_bias[TILES][2];
const T* x_row = x + quad * K + part * RUN;
auto read_ahead = [&](int chunk) {
#pragma unroll
  for (int g = 0; g < CHUNK_GROUPS; g++) {
    int group = WHOLE ? chunk * CHUNK_GROUPS + g : min(chunk * CHUNK_GROUPS + g, GROUPS - 1);
#pragma unroll
    for (int run = 0; run < RUN / 8; run++)
#pragma unroll
      for (int r = 0; r < ROW_TILES; r++) {
        next_x[g][run][r] = make_uint4(0, 0, 0, 0);
        if (r * 8 + quad < rows)
          next_x[g][run][r] = __ldg(reinterpret_cast<const uint4*>(x_row + r * 8 * K + group * GROUP + run * 8));
      }
  }
#pragma unroll
  for (int m = 0; m < TILES; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const T* from = scale_row[m][half] + chunk * CHUNK_GROUPS;
      next_scale[m][half].template read<WHOLE>(from, GROUPS - chunk * CHUNK_GROUPS);
      next_bias[m][half].template read<WHOLE>(from + to_biases, GROUPS - chunk * CHUNK_GROUPS);
    }
};

float acc[TILES][ROW_TILES][4] = {};
#pragma unroll
for (int s = 0; s < STAGES - 1; s++) ring.fetch(warp + s * WARPS, s, warp + s * WARPS < CHUNKS);
if (warp < CHUNKS) read_ahead(warp);
int stage = 0;
for (int chunk = warp; chunk < CHUNKS; chunk += WARPS) {
  wait_copies<STAGES - 2>();
  __syncwarp();
  int ahead = chunk + (STAGES - 1) * WARPS;
  ring.fetch(ahead, (stage + STAGES - 1) % STAGES, ahead < CHUNKS);
  unsigned b[CHUNK_GROUPS][RUN / 8][ROW_TILES][4];
  float scale[CHUNK_GROUPS][TILES][2], shift[CHUNK_GROUPS][TILES][2];
#pragma unroll
  for (int g = 0; g < CHUNK_GROUPS; g++) {
#pragma unroll
    for (int run = 0; run < RUN / 8; run++)
#pragma unroll
      for (int r = 0; r < ROW_TILES; r++) pair_up<BITS>(next_x[g][run][r], b[g][run][r]);
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        scale[g][m][half] = float(next_scale[m][half].values[g]);
        shift[g][m][half] = fmaf(scale[g][m][half], Unpack<T, BITS>::ZERO, float(next_bias[m][half].values[g]));
      }
  }
  if (chunk + WARPS < CHUNKS) read_ahead(chunk + WARPS);
#pragma unroll
  for (int g = 0; g < CHUNK_GROUPS; g++) {
    if (!WHOLE && chunk * CHUNK_GROUPS + g >= GROUPS) break;
    float sum[TILES][ROW_TILES][4] = {}, sum_x[ROW_TILES][4] = {};
    unsigned words[TILES][2][WORDS];
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int w = 0; w < WORDS; w += READ) {
          int at = g * GROUP_BYTES + (part * WORDS + w) * 4, row = m * 16 + half * 8 + quad;
          read_words<READ>(reinterpret_cast<const unsigned*>(ring.piece(stage, row, at / 16)) + at % 16 / 4,
                           words[m][half] + w);
        }
#pragma unroll
    for (int run = 0; run < RUN / 8; run++) {
#pragma unroll
      for (int r = 0; r < ROW_TILES; r++) {
        multiply_tile<T>(sum_x[r], ones, b[g][run][r][0], b[g][run][r][1]);
        multiply_tile<T>(sum_x[r], ones, b[g][run][r][2], b[g][run][r][3]);
      }
#pragma unroll
      for (int m = 0; m < TILES; m++) {
        unsigned pairs[2][4];
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
          for (int w = 0; w < BITS / 4; w++)
            Unpack<T, BITS>::word(words[m][half][run * BITS / 4 + w], pairs[half] + w * 2);
#pragma unroll
        for (int step = 0; step < 2; step++) {
          unsigned a[4] = {pairs[0][2 * step], pairs[1][2 * step], pairs[0][2 * step + 1], pairs[1][2 * step + 1]};
#pragma unroll
          for (int r = 0; r < ROW_TILES; r++)
            multiply_tile<T>(sum[m][r], a, b[g][run][r][2 * step], b[g][run][r][2 * step + 1]);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
      for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
          acc[m][r][c] = fmaf(scale[g][m][c >> 1], sum[m][r][c], acc[m][r][c]);
          acc[m][r][c] = fmaf(shift[g][m][c >> 1], sum_x[r][c], acc[m][r][c]);
        }
  }
  stage = (stage + 1) % STAGES;
}

wait_copies<0>();
__syncthreads();
float* sums = reinterpret_cast<float*>(memory);
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
    sums, first, rows, WIDTH, bias, residual, out);
