// body
typedef DeltaShape<HK, HV, DK, DV, RAW, G_ROW, G_AT, BETA_ROW, BETA_AT> Shape;
const Place at = place_of(threadgroup_position_in_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
const int s = at.sequence;
StateTile<DK> tile;
tile.load(state + state_offset<Shape>(at, slots[s]));
device T* nothing = nullptr;
step_rows<Shape, false>(
    tile, at, old_first[s], old_count[s], old_k, old_k, old_v, old_g, old_beta, a_log, dt_bias, nothing);
if (!AFTER) tile.store(new_state + state_offset<Shape>(at, s));
step_rows<Shape, true>(tile, at, first[s], count[s], q, k, v, g, beta, a_log, dt_bias, out);
if (AFTER) tile.store(new_state + state_offset<Shape>(at, s));
