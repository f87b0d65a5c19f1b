// The larger value comes first, and the lower index among equals: one strict order of all entries of a row.
METAL_FUNC bool before(float a, int i, float b, int j) { return a > b || (a == b && i < j); }

METAL_FUNC bool is_finite(float x) { return (as_type<uint>(x) & 0x7f800000u) < 0x7f800000u; }

// body
// A threadgroup finds the K best entries of one slice of a row: of logits in the first launch, of what the slices
// found in the second. COUNT entries a row, EACH a thread. A simdgroup takes the K-th best of its lanes' best entries
// as a threshold: at most K lanes hold entries that reach it, and only those entries are ranked.
constexpr int SIMDGROUPS = THREADS / 32;
constexpr int ROOM = K * EACH;
threadgroup float candidate_values[SIMDGROUPS * ROOM];
threadgroup int candidate_ids[SIMDGROUPS * ROOM];
threadgroup float group_values[SIMDGROUPS * K];
threadgroup int group_ids[SIMDGROUPS * K];
threadgroup int group_finite[SIMDGROUPS];

const int thread_index = thread_index_in_threadgroup, group = simdgroup_index_in_threadgroup;
const int lane = thread_index_in_simdgroup;
const int row = threadgroup_position_in_grid.y, slice = threadgroup_position_in_grid.x;
const int slices = threadgroups_per_grid.x, rows = threadgroups_per_grid.y;
const int64_t start = int64_t(row) * COUNT;
const float minus_infinity = as_type<float>(0xff800000u);

// Entries that are not finite, and the places after the last entry, count as -inf. The latter come last by their id.
float v[EACH];
int at[EACH];
bool all_finite = true;
float best = minus_infinity;
int best_at = 0x7fffffff;
#pragma unroll
for (int j = 0; j < EACH; j++) {
  const int e = (slice * EACH + j) * THREADS + thread_index;
  v[j] = minus_infinity;
  at[j] = FIRST ? e : 0x40000000 + e;
  if (e < COUNT) {
    const float entry = float(values[start + e]);
    if (!FIRST) at[j] = ids[start + e];
    if (is_finite(entry)) v[j] = entry;
    all_finite = all_finite && is_finite(entry);
  }
  if (before(v[j], at[j], best, best_at)) {
    best = v[j];
    best_at = at[j];
  }
}
if (!FIRST) {
  // One threadgroup reports for all rows.
  all_finite = true;
  if (row == 0)
    for (int f = thread_index; f < rows * (COUNT / K); f += THREADS) all_finite = all_finite && flags[f];
}
all_finite = metal::simd_all(all_finite);
if (lane == 0) group_finite[group] = all_finite;

int rank = 0;
for (ushort other = 0; other < 32; other++) {
  const float other_best = metal::simd_shuffle(best, other);
  const int other_at = metal::simd_shuffle(best_at, other);
  rank += before(other_best, other_at, best, best_at);
}
const ushort last = metal::simd_sum(rank == K - 1 ? lane : 0);
const float least = metal::simd_shuffle(best, last);
const int least_at = metal::simd_shuffle(best_at, last);

int mine = 0;
#pragma unroll
for (int j = 0; j < EACH; j++) mine += !before(least, least_at, v[j], at[j]);
int end = mine;
for (ushort delta = 1; delta < 32; delta *= 2) {
  const int left = metal::simd_shuffle_up(end, delta);
  if (lane >= delta) end += left;
}
const int total = metal::simd_shuffle(end, 31);
int place = group * ROOM + end - mine;
#pragma unroll
for (int j = 0; j < EACH; j++) {
  if (!before(least, least_at, v[j], at[j])) {
    candidate_values[place] = v[j];
    candidate_ids[place] = at[j];
    place++;
  }
}
metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);

for (int c = group * ROOM + lane; c < group * ROOM + total; c += 32) {
  const float value = candidate_values[c];
  const int id = candidate_ids[c];
  int better = 0;
  for (int o = group * ROOM; o < group * ROOM + total; o++)
    better += before(candidate_values[o], candidate_ids[o], value, id);
  if (better < K) {
    group_values[group * K + better] = value;
    group_ids[group * K + better] = id;
  }
}
metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);

if (thread_index < SIMDGROUPS * K) {
  const float value = group_values[thread_index];
  const int id = group_ids[thread_index];
  int better = 0;
  for (int o = 0; o < SIMDGROUPS * K; o++) better += before(group_values[o], group_ids[o], value, id);
  if (better < K) {
    const int64_t to = (int64_t(row) * slices + slice) * K + better;
    top_values[to] = T(value);
    top_ids[to] = id;
  }
}
if (thread_index == 0 && (FIRST || row == 0)) {
  for (int g = 1; g < SIMDGROUPS; g++) all_finite = all_finite && group_finite[g];
  finite[FIRST ? row * slices + slice : 0] = all_finite;
}
