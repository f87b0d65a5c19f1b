// Tensor core products of NVIDIA GPUs: 16 weight rows by 16 k times 16 k by 8 rows of x, float32 accumulation.
// A column of the result depends on its own column of x alone, so a row of x gets the same bits beside any others.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <type_traits>

template <typename T>
__device__ __forceinline__ void multiply_tile(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  if constexpr (std::is_same<T, __half>::value) {
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

// The sum over warps in their order, then what is fused behind a product, for a block of COLUMNS output columns.
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
