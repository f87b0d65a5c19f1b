// body
// A thread makes one channel of one row. WIDTH channels in GROUPS groups; SIDE of SIDES kernels is applied.
const int c = threadgroup_position_in_grid.x * THREADS + thread_index_in_threadgroup;
const int i = threadgroup_position_in_grid.y;
const int64_t row = int64_t(threadgroup_position_in_grid.z) * threadgroups_per_grid.y + i;
if (c < WIDTH) {
  float sum = 0.0f;
  for (int t = 0; t < TAPS && t <= i; t++) {
    const float fixed = float(base[(SIDE * TAPS + t) * WIDTH + c]);
    const float own = float(dynamic[((row * SIDES + SIDE) * TAPS + t) * GROUPS + c / (WIDTH / GROUPS)]);
    sum = metal::fma(fixed + own, float(x[(row - t) * WIDTH + c]), sum);
  }
  if (RESIDUAL) sum += float(residual[row * WIDTH + c]);
  out[row * WIDTH + c] = T(sum);
}
