// body
// A threadgroup norms one row of WIDTH entries. All of it is reduced in an order that depends on WIDTH alone.
constexpr int EACH = (WIDTH + THREADS - 1) / THREADS;
threadgroup float sums[THREADS / 32];
const int64_t row = int64_t(threadgroup_position_in_grid.y) * WIDTH;
const int64_t rows = int64_t(threadgroups_per_grid.y) * WIDTH;

float v[EACH];
float sum = 0.0f;
#pragma unroll
for (int j = 0; j < EACH; j++) {
  const int c = j * THREADS + thread_index_in_threadgroup;
  v[j] = 0.0f;
  if (c < WIDTH) {
    v[j] = float(x[row + c]);
    if (RESIDUAL) {
      const T added = T(v[j] + float(residual[row + c]));
      out[rows + row + c] = added;
      v[j] = float(added);
    }
  }
  sum = metal::fma(v[j], v[j], sum);
}
sum = metal::simd_sum(sum);
if (thread_index_in_simdgroup == 0) sums[simdgroup_index_in_threadgroup] = sum;
metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
sum = 0.0f;
for (int g = 0; g < THREADS / 32; g++) sum += sums[g];
const float scale = metal::precise::rsqrt(sum / WIDTH + eps[0]);
#pragma unroll
for (int j = 0; j < EACH; j++) {
  const int c = j * THREADS + thread_index_in_threadgroup;
  if (c < WIDTH) out[row + c] = T(v[j] * scale * float(weight[c]));
}
