// The tensor core twin of gemm_rows.metal: x and weight in bfloat16 or float16, K a multiple of 8.
//
// A block makes 16 * TILES output columns; its warps take chunks of 64 k in turns, each through its own ring in
// shared memory. Every row count runs the same tiles.
// body
constexpr int COLUMNS = 16 * TILES, PIECES = 8, CHUNKS = (K + 63) / 64;
const int rows = x_shape[0];
constexpr int WIDTH = GATED ? N / 2 : N, OUT = GATED ? COLUMNS / 2 : COLUMNS;
const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, quad = lane >> 2, part = lane & 3;
const int first = blockIdx.x * OUT;

// The weight row of a column of the block; beyond the last one it is repeated, and not written.
auto row_of = [&](int column) {
  bool is_up = GATED && column >= OUT;
  int n = first + (is_up ? column - OUT : column);
  if (WIDTH % OUT) n = min(n, WIDTH - 1);
  return is_up ? WIDTH + n : n;
};
__shared__ uint4 memory[WARPS * STAGES * COLUMNS * PIECES];
static_assert(sizeof(memory) >= WARPS * COLUMNS * ROW_TILES * 8 * sizeof(float), "the sums reuse the rings");
Ring<COLUMNS, PIECES, STAGES, K * 2> ring(memory + warp * STAGES * COLUMNS * PIECES, weight, row_of);

// x is read one chunk ahead.
uint4 next_x[2][ROW_TILES];
const T* x_row = x + quad * K + part * 8;
auto read_ahead = [&](int chunk) {
#pragma unroll
  for (int side = 0; side < 2; side++)
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
      int k = chunk * 64 + side * 32;
      next_x[side][r] = make_uint4(0, 0, 0, 0);
      if (r * 8 + quad < rows && (K % 64 == 0 || k + part * 8 < K))
        next_x[side][r] = __ldg(reinterpret_cast<const uint4*>(x_row + r * 8 * K + k));
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
  uint4 b[2][ROW_TILES];
#pragma unroll
  for (int side = 0; side < 2; side++)
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) b[side][r] = next_x[side][r];
  if (chunk + WARPS < CHUNKS) read_ahead(chunk + WARPS);
#pragma unroll
  for (int side = 0; side < 2; side++)
#pragma unroll
    for (int m = 0; m < TILES; m++) {
      const uint4 low = *ring.piece(stage, m * 16 + quad, side * 4 + part);
      const uint4 high = *ring.piece(stage, m * 16 + 8 + quad, side * 4 + part);
      const unsigned even[4] = {low.x, high.x, low.y, high.y}, odd[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
      for (int r = 0; r < ROW_TILES; r++) {
        multiply_tile<T>(acc[m][r], even, b[side][r].x, b[side][r].y);
        multiply_tile<T>(acc[m][r], odd, b[side][r].z, b[side][r].w);
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
