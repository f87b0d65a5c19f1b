// body
typedef ConvShape<HK, DK, HV, DV, W, X_ROW, X_AT> Shape;
const int unit = threadgroup_position_in_grid.x * SIMDGROUPS + simdgroup_index_in_threadgroup;
const int i = threadgroup_position_in_grid.y, s = threadgroup_position_in_grid.z;
const int lane = thread_index_in_simdgroup;
if (unit >= Shape::UNITS) return;
Inputs<Shape, T> inputs;
inputs.kept = state + slots[s] * (W - 1) * Shape::CHANNELS;
inputs.old = old_x + old_first[s] * X_ROW + X_AT;
inputs.old_rows = old_count[s];
inputs.rows = x + first[s] * X_ROW + X_AT;
if (i == 0)
  keep_unit<Shape>(inputs, AFTER ? count[s] : 0, unit, lane, new_state + s * (W - 1) * Shape::CHANNELS);
if (i < count[s]) convolve_unit<Shape>(inputs, i, first[s] + i, unit, lane, weight, q, k, v);
