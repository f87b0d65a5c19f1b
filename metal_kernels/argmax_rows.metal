// The larger value comes first, and the lower index among equals.
METAL_FUNC bool before(float a, int i, float b, int j) { return a > b || (a == b && i < j); }

METAL_FUNC uint magnitude(float x) { return as_type<uint>(x) & 0x7fffffffu; }

// body
// A threadgroup finds the best entry of one slice of a row: of logits in the first launch, of what the slices found
// in the second. COUNT entries a row, EACH a thread. The id -1 means a slice that holds NaN.
constexpr uint INFINITE = 0x7f800000u;
constexpr int SIMDGROUPS = THREADS / 32;
threadgroup float group_values[SIMDGROUPS];
threadgroup int group_ids[SIMDGROUPS];
threadgroup int group_finite[SIMDGROUPS];

const int thread_index = thread_index_in_threadgroup, group = simdgroup_index_in_threadgroup;
const int row = threadgroup_position_in_grid.y, slice = threadgroup_position_in_grid.x;
const int64_t start = int64_t(row) * COUNT;

float value = as_type<float>(0xff800000u);
int id = 0x7fffffff;
bool is_nan = false, all_finite = true;
#pragma unroll
for (int j = 0; j < EACH; j++) {
  const int e = (slice * EACH + j) * THREADS + thread_index;
  if (e < COUNT) {
    const float v = float(values[start + e]);
    const int i = FIRST ? e : ids[start + e];
    is_nan = is_nan || (FIRST ? magnitude(v) > INFINITE : i < 0);
    all_finite = all_finite && (FIRST ? magnitude(v) < INFINITE : flags[start + e]);
    if (before(v, i, value, id)) {
      value = v;
      id = i;
    }
  }
}
for (ushort mask = 1; mask < 32; mask *= 2) {
  const float v = metal::simd_shuffle_xor(value, mask);
  const int i = metal::simd_shuffle_xor(id, mask);
  if (before(v, i, value, id)) {
    value = v;
    id = i;
  }
}
is_nan = metal::simd_any(is_nan);
all_finite = metal::simd_all(all_finite);
if (thread_index_in_simdgroup == 0) {
  group_values[group] = value;
  group_ids[group] = is_nan ? -1 : id;
  group_finite[group] = all_finite;
}
metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
if (thread_index == 0) {
  for (int g = 1; g < SIMDGROUPS; g++) {
    is_nan = is_nan || group_ids[g] < 0;
    all_finite = all_finite && group_finite[g];
    if (before(group_values[g], group_ids[g], value, id)) {
      value = group_values[g];
      id = group_ids[g];
    }
  }
  const int64_t place = int64_t(row) * threadgroups_per_grid.x + slice;
  best[place] = value;
  choices[place] = is_nan ? -1 : id;
  finite[place] = all_finite;
}
