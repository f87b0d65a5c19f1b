// body
// One simdgroup for each block: COUNT steps over CANDIDATES <= 32 candidates. Lane b has candidate b. Of the ranks of
// a step those count that belong to the candidate picked before; the first step has the same ones for all.
const int lane = thread_index_in_threadgroup;
const int block = threadgroup_position_in_grid.x;
int picked = 0;
for (int step = 0; step < COUNT; step++) {
  const int place = block * COUNT + step;
  const float rank = lane < CANDIDATES ? ranks[(place * CANDIDATES + picked) * CANDIDATES + lane] : -INFINITY;
  const float largest = metal::simd_max(rank);
  // Of equal ones the first; NaN equals nothing, but a pick has to be a candidate.
  const int first = metal::simd_min(lane < CANDIDATES && rank == largest ? lane : 32);
  picked = metal::min(first, CANDIDATES - 1);
  if (lane == 0) picks[place] = picked;
}
