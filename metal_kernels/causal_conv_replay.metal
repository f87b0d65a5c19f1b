// body
typedef ConvShape<HK, DK, HV, DV, W, X_ROW, X_AT> Shape;
const int unit = threadgroup_position_in_grid.x * SIMDGROUPS + simdgroup_index_in_threadgroup;
const int s = threadgroup_position_in_grid.z;
if (unit >= Shape::UNITS) return;
Inputs<Shape, T> inputs;
inputs.kept = state + slots[s] * (W - 1) * Shape::CHANNELS;
inputs.old = x + first[s] * X_ROW + X_AT;
inputs.old_rows = count[s];
inputs.rows = x;
keep_unit<Shape>(inputs, 0, unit, thread_index_in_simdgroup, new_state + s * (W - 1) * Shape::CHANNELS);
