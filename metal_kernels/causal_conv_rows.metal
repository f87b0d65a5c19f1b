// body
typedef ConvShape<HK, DK, HV, DV, W, X_ROW, X_AT> Shape;
const int unit = threadgroup_position_in_grid.x * SIMDGROUPS + simdgroup_index_in_threadgroup;
const int i = threadgroup_position_in_grid.y, s = threadgroup_position_in_grid.z;
if (unit >= Shape::UNITS || i >= count[s]) return;
Inputs<Shape, T> inputs;
inputs.kept = state + slots[s] * (W - 1) * Shape::CHANNELS;
inputs.old = x;
inputs.old_rows = 0;
inputs.rows = x + first[s] * X_ROW + X_AT;
convolve_unit<Shape>(inputs, i, first[s] + i, unit, thread_index_in_simdgroup, weight, q, k, v);
