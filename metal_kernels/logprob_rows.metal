// body
// First launch: a threadgroup reduces one slice of a row to (largest, sum of exp(entry - largest)). Second launch: one
// simdgroup a row joins its slices. The slices depend on COUNT alone, so the order of the sum does too.
constexpr int SIMDGROUPS = THREADS / 32;
threadgroup float largest[SIMDGROUPS];
threadgroup float sums[SIMDGROUPS];
const float minus_infinity = as_type<float>(0xff800000u);
const int row = threadgroup_position_in_grid.y, lane = thread_index_in_simdgroup;

if (FIRST) {
  const int slice = threadgroup_position_in_grid.x, group = simdgroup_index_in_threadgroup;
  float v[EACH];
  float peak = minus_infinity;
  #pragma unroll
  for (int j = 0; j < EACH; j++) {
    const int e = (slice * EACH + j) * THREADS + thread_index_in_threadgroup;
    v[j] = e < COUNT ? float(logits[int64_t(row) * COUNT + e]) : minus_infinity;
    peak = metal::max(peak, v[j]);
  }
  peak = metal::simd_max(peak);
  if (lane == 0) largest[group] = peak;
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  for (int g = 0; g < SIMDGROUPS; g++) peak = metal::max(peak, largest[g]);
  float sum = 0.0f;
  #pragma unroll
  for (int j = 0; j < EACH; j++) sum += v[j] == minus_infinity ? 0.0f : metal::precise::exp(v[j] - peak);
  sum = metal::simd_sum(sum);
  if (lane == 0) sums[group] = sum;
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  if (thread_index_in_threadgroup == 0) {
    for (int g = 1; g < SIMDGROUPS; g++) sum += sums[g];
    const int64_t place = (int64_t(row) * threadgroups_per_grid.x + slice) * 2;
    results[place] = peak;
    results[place + 1] = sum;
  }
} else {
  const int64_t start = int64_t(row) * SLICES * 2;
  float peak = minus_infinity;
  for (int s = lane; s < SLICES; s += 32) peak = metal::max(peak, partials[start + 2 * s]);
  peak = metal::simd_max(peak);
  float sum = 0.0f;
  for (int s = lane; s < SLICES; s += 32) {
    const float share = metal::precise::exp(partials[start + 2 * s] - peak);
    sum = metal::fma(partials[start + 2 * s + 1], share, sum);
  }
  sum = metal::simd_sum(sum);
  if (lane == 0) {
    const float above = metal::precise::log(sum);
    const int token = tokens[row];
    const bool known = token >= 0 && token < COUNT;
    results[row] = peak + above;
    results[threadgroups_per_grid.y + row] =
        known ? float(logits[int64_t(row) * COUNT + token]) - peak - above : as_type<float>(0x7fc00000u);
  }
}
