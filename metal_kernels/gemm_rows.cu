// The tensor core twin of gemm_rows.metal: x and weight in bfloat16 or float16, K a multiple of 32.
//
// A block makes 16 * TILES output columns; its warps share K in chunks of 32. Every row count runs the same tile.
// body
constexpr int COLUMNS = 16 * TILES, ROW_TILES = (R + 7) / 8, CHUNKS = K / 32;
constexpr int WIDTH = GATED ? N / 2 : N, OUT = GATED ? COLUMNS / 2 : COLUMNS;
const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane >> 2, part = lane & 3;
const int first = blockIdx.x * OUT;

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
for (int start = warp; start < CHUNKS; start += WARPS * UNROLL) {
  uint4 words[UNROLL][TILES][2];
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    int chunk = min(start + u * WARPS, CHUNKS - 1);
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        words[u][m][half] = __ldcs(
            reinterpret_cast<const uint4*>(weight + size_t(row_of[m][half]) * K + chunk * 32 + part * 8));
  }
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    int chunk = start + u * WARPS;
    if (chunk >= CHUNKS) break;
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
      uint4 b = make_uint4(0, 0, 0, 0);
      if (r * 8 + quad < R) b = __ldg(reinterpret_cast<const uint4*>(x + (r * 8 + quad) * K + chunk * 32 + part * 8));
#pragma unroll
      for (int m = 0; m < TILES; m++) {
        const uint4 low = words[u][m][0], high = words[u][m][1];
        const unsigned even[4] = {low.x, high.x, low.y, high.y}, odd[4] = {low.z, high.z, low.w, high.w};
        multiply_tile<T>(acc[m][r], even, b.x, b.y);
        multiply_tile<T>(acc[m][r], odd, b.z, b.w);
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
