// body
constexpr int WIDTH = GATED ? N / 2 : N, OUTPUTS = TEAMS * 4 * (GATED ? COLUMNS / 2 : COLUMNS);
// Staged rows first, sums afterwards.
constexpr int STAGED = R == 1 ? 0 : R * STEPS * SPLITS * 256 * sizeof(T);
constexpr int SUMS = (R + 1) * SPLITS * TEAMS * COLUMNS * 16, MEMORY = (STAGED > SUMS ? STAGED : SUMS) / 16;
threadgroup uint4 memory[MEMORY];

Work<R, COLUMNS, SPLITS, TEAMS, GATED> work;
work.first = threadgroup_position_in_grid.x * OUTPUTS;
work.thread_index = thread_index_in_threadgroup;
int weight_rows[COLUMNS];
#pragma unroll
for (int c = 0; c < COLUMNS; c++) weight_rows[c] = work.weight_row(c, WIDTH) * K;

float sums[rows_each(R)][COLUMNS] = {};
add_dense<T, R, K, COLUMNS, SPLITS, TEAMS, STEPS, GATED>(
    weight, weight_rows, x, work, (threadgroup typename Four<T>::type*)memory, sums);
metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
work.share(sums, (threadgroup float*)memory);
metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
work.template finish<T, HAS_BIAS, HAS_RESIDUAL>((const threadgroup float*)memory, WIDTH, bias, residual, out);
