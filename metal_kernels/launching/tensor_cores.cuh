// Tensor core products of NVIDIA GPUs: 16 weight rows by 16 k times 16 k by 8 rows of x, float32 accumulation.
// A column of the result depends on its own column of x alone, so a row of x gets the same bits beside any others.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <typename T>
struct is_half { static constexpr bool value = false; };
template <>
struct is_half<__half> { static constexpr bool value = true; };

template <typename T>
__device__ __forceinline__ void multiply_tile(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  if constexpr (is_half<T>::value) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// The sum over warps in their order, then what is fused into a product, for a block of COLUMNS output columns.
// sums: [WARPS][COLUMNS][ROWS] in shared memory; column c of the block is output column first + c, or with GATED
// the first half are gates and the second half what they gate.
template <typename T, int WARPS, int COLUMNS, int ROWS, bool HAS_BIAS, bool HAS_RESIDUAL, bool GATED>
__device__ __forceinline__ void finish_columns(
    const float* sums, int first, int rows, int width, const T* bias, const T* residual, T* out) {
  constexpr int OUT = GATED ? COLUMNS / 2 : COLUMNS;
  auto total = [&](int column, int row) {
    float sum = sums[column * ROWS + row];
#pragma unroll
    for (int w = 1; w < WARPS; w++) sum += sums[(w * COLUMNS + column) * ROWS + row];
    return sum;
  };
  for (int i = threadIdx.x; i < OUT * rows; i += WARPS * 32) {
    int column = i % OUT, row = i / OUT, n = first + column;
    if (n >= width) continue;
    float value = total(column, row);
    if (HAS_BIAS) value += float(bias[n]);
    if (GATED) {
      float up = total(column + OUT, row);
      if (HAS_BIAS) up += float(bias[width + n]);
      value = value / (1.0f + expf(-value)) * up;
    }
    if (HAS_RESIDUAL) value += float(residual[row * width + n]);
    out[row * width + n] = T(value);
  }
}

// Starts to copy 16 bytes to shared memory, or zeros when ``there`` is false; the warp goes on meanwhile.
__device__ __forceinline__ void copy_async(uint4* to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(unsigned(__cvta_generic_to_shared(to))),
               "l"(from), "r"(there ? 16 : 0));
}
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;"); }
// Waits until at most PENDING of the groups of copies that this thread ended are under way.
template <int PENDING>
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING)); }

// Where piece p of 16 bytes of a row lies: spread so that the lanes of a warp meet no bank twice.
template <int PIECES>
__device__ __forceinline__ int place(int row, int piece) {
  int spread = PIECES == 4 ? (row & 2) | ((row >> 2) & 1) : (row & 1) << 2;
  return row * PIECES + (piece ^ spread);
}

// A warp's own ring of chunks: COLUMNS rows of PIECES * 16 bytes each, STAGES deep, cut out of ROW_BYTES long rows.
template <int COLUMNS, int PIECES, int STAGES, int ROW_BYTES>
struct Ring {
  static constexpr int COPIES = COLUMNS * PIECES / 32;
  static constexpr bool WHOLE = ROW_BYTES % (PIECES * 16) == 0;
  uint4* stages;
  const char* from[COPIES];  // this lane's pieces of chunk 0
  int lane;

  template <typename RowOf>
  __device__ __forceinline__ Ring(uint4* stages, const void* weight, RowOf row_of)
      : stages(stages), lane(threadIdx.x & 31) {
#pragma unroll
    for (int i = 0; i < COPIES; i++)
      from[i] = static_cast<const char*>(weight) + size_t(row_of((i * 32 + lane) / PIECES)) * ROW_BYTES;
  }
  __device__ __forceinline__ void fetch(int chunk, int stage, bool there) {
    if (there) {
      int piece = lane % PIECES, at = (chunk * PIECES + piece) * 16;
      bool inside = WHOLE || at < ROW_BYTES;
#pragma unroll
      for (int i = 0; i < COPIES; i++)
        copy_async(stages + stage * COLUMNS * PIECES + place<PIECES>((i * 32 + lane) / PIECES, piece),
                   from[i] + (inside ? at : 0), inside);
    }
    end_copies();
  }
  // The 16 byte piece of a row of a stage.
  __device__ __forceinline__ const uint4* piece(int stage, int row, int piece) const {
    return stages + stage * COLUMNS * PIECES + place<PIECES>(row, piece);
  }
};
