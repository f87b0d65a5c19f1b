// body
// One row times one expert: the sums of qmm_rows for one row.
constexpr int WIDTH = GATED ? N / 2 : N, OUTPUTS = TEAMS * 4 * (GATED ? COLUMNS / 2 : COLUMNS);
threadgroup uint4 memory[SPLITS * TEAMS * COLUMNS];

const int pair = threadgroup_position_in_grid.y;
const int64_t expert = experts[pair];
Work<1, COLUMNS, SPLITS, TEAMS, GATED> work;
work.first = threadgroup_position_in_grid.x * OUTPUTS;
work.thread_index = thread_index_in_threadgroup;
int weight_rows[COLUMNS];
#pragma unroll
for (int c = 0; c < COLUMNS; c++) weight_rows[c] = work.weight_row(c, WIDTH);

float sums[1][COLUMNS] = {};
add_quantized<T, BITS, GROUP, 1, K, COLUMNS, SPLITS, TEAMS, STEPS, GATED>(
    weight + expert * (N * (K / 32 * BITS)), scales + expert * (N * (K / GROUP)), biases + expert * (N * (K / GROUP)),
    weight_rows, x + pair / PAIRS_OF_ROW * K, work, (threadgroup typename Four<T>::type*)memory, sums);
work.share(sums, (threadgroup float*)memory);
metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
work.template finish<T, false, false>((const threadgroup float*)memory, WIDTH, x, x, out + pair * WIDTH);
