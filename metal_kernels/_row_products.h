// Rows of x times columns of weights: the same sums for every number of rows.
//
// LANES = 8 * SPLITS lanes share a column: 8 lanes in each of SPLITS simdgroups. K goes to them in steps of LANES * 32
// values: each lane takes four blocks of eight. A block is two fours, its values 0, 1, 4, 5 and its values 2, 3, 6, 7:
// quantised weights come out of their words in this order. A lane adds its products one after the other, the lanes of a simdgroup add
// theirs by a butterfly, and the simdgroups in their order.

// Four values of x, as they lie in memory.
template <typename T>
struct Four {
  typedef uint2 type;
};
template <>
struct Four<float> {
  typedef uint4 type;
};

template <typename T>
METAL_FUNC float low_value(uint pair) {
  if constexpr (metal::is_same<T, half>::value) return float(as_type<half2>(pair).x);
  else return as_type<float>(pair << 16);
}
template <typename T>
METAL_FUNC float high_value(uint pair) {
  if constexpr (metal::is_same<T, half>::value) return float(as_type<half2>(pair).y);
  else return as_type<float>(pair & 0xffff0000u);
}
template <typename T>
METAL_FUNC void to_floats(uint2 four, thread float (&values)[4]) {
  values[0] = low_value<T>(four.x);
  values[1] = high_value<T>(four.x);
  values[2] = low_value<T>(four.y);
  values[3] = high_value<T>(four.y);
}
template <typename T>
METAL_FUNC void to_floats(uint4 four, thread float (&values)[4]) {
  values[0] = as_type<float>(four.x);
  values[1] = as_type<float>(four.y);
  values[2] = as_type<float>(four.z);
  values[3] = as_type<float>(four.w);
}

// Reads a block as its two fours.
METAL_FUNC void read_block(const device uint4* block, thread uint2 (&fours)[2]) {
  const uint4 all = block[0];
  fours[0].x = all.x;
  fours[0].y = all.z;
  fours[1].x = all.y;
  fours[1].y = all.w;
}
METAL_FUNC void read_block(const device uint4* block, thread uint4 (&fours)[2]) {
  const uint4 first = block[0], second = block[1];
  fours[0].x = first.x;
  fours[0].y = first.y;
  fours[0].z = second.x;
  fours[0].w = second.y;
  fours[1].x = first.z;
  fours[1].y = first.w;
  fours[1].z = second.z;
  fours[1].w = second.w;
}

// Where a lane's blocks lie: RUN of them side by side, then the next lane's.
template <int LANES, int RUN>
METAL_FUNC int block_at(int step, int lane, int b) {
  return 8 * ((step * 4 + b / RUN * RUN) * LANES + lane * RUN + b % RUN);
}

// One row's values of a lane, in registers.
template <typename T>
struct DirectRow {
  typename Four<T>::type fours[8];
  template <int K, int LANES, int RUN, typename P>
  METAL_FUNC void read(P x, int step, int lane) {
#pragma unroll
    for (int b = 0; b < 4; b++) {
      const int k = block_at<LANES, RUN>(step, lane, b);
      typename Four<T>::type both[2] = {};
      if (K % (LANES * 32) == 0 || k < K) read_block((const device uint4*)(x + k), both);
      fours[2 * b] = both[0];
      fours[2 * b + 1] = both[1];
    }
  }
  METAL_FUNC typename Four<T>::type four(int, int index) const { return fours[index]; }
};

// Rows in threadgroup memory: [step][row][four 0..7 of a lane][lane], so that lanes read side by side. They stay as
// narrow as they came: this memory gives 64 bytes a cycle and core, so reading floats takes longer than widening.
template <typename T, int LANES>
struct StagedRows {
  const threadgroup typename Four<T>::type* at;
  METAL_FUNC typename Four<T>::type four(int row, int index) const { return at[(row * 8 + index) * LANES]; }
};

// Copies STEPS steps of R rows, from ``step`` on, to threadgroup memory.
template <typename T, int R, int K, int LANES, int RUN, int STEPS, int THREADS, typename P>
METAL_FUNC void stage_rows(P x, int step, int thread_index, threadgroup typename Four<T>::type* staged) {
  constexpr int BLOCKS = STEPS * LANES * 4;
  for (int i = thread_index; i < R * BLOCKS; i += THREADS) {
    const int row = i / BLOCKS, block = i % BLOCKS, k = step * LANES * 32 + block * 8;
    if (k < K) {
      typename Four<T>::type fours[2];
      read_block((const device uint4*)(x + row * K + k), fours);
      const int ahead = block / (LANES * 4), lane = block / RUN % LANES;
      const int b = block / (RUN * LANES) * RUN % 4 + block % RUN;
      const int to = ((ahead * R + row) * 8 + 2 * b) * LANES + lane;
      staged[to] = fours[0];
      staged[to + LANES] = fours[1];
    }
  }
}

// Adds the products of one four: C columns of weights, ROWS rows of x.
template <typename T, int ROWS, int C, typename Rows>
METAL_FUNC void add_four(
    const thread float (&weights)[C][4], const thread Rows& rows, int index, thread float (&sums)[ROWS][C]) {
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    float values[4];
    to_floats<T>(rows.four(r, index), values);
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int c = 0; c < C; c++) sums[r][c] = metal::fma(weights[c][i], values[i], sums[r][c]);
  }
}

// More than eight rows are shared by two simdgroups, which read the same weights at the same time: the sums of sixteen
// rows do not fit in registers. With an odd number both take the row in the middle.
METAL_FUNC constexpr int row_groups(int rows) { return rows > 8 ? 2 : 1; }
METAL_FUNC constexpr int rows_each(int rows) { return rows > 8 ? (rows + 1) / 2 : rows; }

// The work of a threadgroup of THREADS = SPLITS * row_groups(R) * TEAMS simdgroups: TEAMS * C * 4 columns, C of them to
// a lane. With GATED the first half of the columns are gates, and the second half what they gate.
template <int R, int C, int SPLITS, int TEAMS, bool GATED>
struct Work {
  int first, thread_index;  // first: the threadgroup's first output

  METAL_FUNC int split() const { return thread_index / 32 % SPLITS; }
  METAL_FUNC int row_group() const { return thread_index / (32 * SPLITS) % row_groups(R); }
  METAL_FUNC int first_row() const { return row_group() * (R - rows_each(R)); }
  METAL_FUNC int lane() const { return split() * 8 + thread_index % 8; }
  METAL_FUNC int output(int c) const {
    constexpr int EACH = GATED ? C / 2 : C;
    return (thread_index / (32 * SPLITS * row_groups(R)) * EACH + c % EACH) * 4 + thread_index % 32 / 8;
  }
  // The weight row of a column; beyond the last one it is repeated, and not written.
  METAL_FUNC int weight_row(int c, int width) const {
    constexpr int EACH = GATED ? C / 2 : C;
    return metal::min(first + output(c), width - 1) + c / EACH * width;
  }
  // Adds what the lanes of a simdgroup hold, and leaves it in all[split][row group][row][column].
  METAL_FUNC void share(const thread float (&sums)[rows_each(R)][C], threadgroup float* all) const {
    constexpr int EACH = GATED ? C / 2 : C, ROWS = rows_each(R);
    const int first_slot = (split() * row_groups(R) + row_group()) * ROWS;
#pragma unroll
    for (int r = 0; r < ROWS; r++)
#pragma unroll
      for (int c = 0; c < C; c++) {
        float sum = sums[r][c];
        sum += metal::simd_shuffle_xor(sum, ushort(1));
        sum += metal::simd_shuffle_xor(sum, ushort(2));
        sum += metal::simd_shuffle_xor(sum, ushort(4));
        const int column = c / EACH * (TEAMS * EACH * 4) + output(c);
        if (thread_index % 8 == 0) all[(first_slot + r) * (TEAMS * C * 4) + column] = sum;
      }
  }
  METAL_FUNC float total(const threadgroup float* all, int row, int column) const {
    constexpr int SLOTS = row_groups(R) * rows_each(R), COLUMNS = TEAMS * C * 4;
    const int slot = row < rows_each(R) ? row : row + SLOTS - R;
    float sum = all[slot * COLUMNS + column];
    for (int s = 1; s < SPLITS; s++) sum += all[(s * SLOTS + slot) * COLUMNS + column];
    return sum;
  }
  // Writes the outputs: adds the bias, gates, adds the residual, and rounds once.
  template <typename T, bool HAS_BIAS, bool HAS_RESIDUAL, typename Bias, typename Residual, typename Out>
  METAL_FUNC void finish(const threadgroup float* all, int width, Bias bias, Residual residual, Out out) const {
    constexpr int OUTPUTS = TEAMS * 4 * (GATED ? C / 2 : C), THREADS = SPLITS * row_groups(R) * TEAMS * 32;
    for (int i = thread_index; i < R * OUTPUTS; i += THREADS) {
      const int row = i / OUTPUTS, column = i % OUTPUTS, n = first + column;
      if (n >= width) continue;
      float value = total(all, row, column);
      if (HAS_BIAS) value += float(bias[n]);
      if (GATED) {
        float gated = total(all, row, OUTPUTS + column);
        if (HAS_BIAS) gated += float(bias[width + n]);
        value = value / (1.0f + metal::precise::exp(-value)) * gated;
      }
      if (HAS_RESIDUAL) value += float(residual[row * width + n]);
      out[row * width + n] = T(value);
    }
  }
};

// Adds the products of R rows with C columns of weights of x's type, weight + weight_rows[c] each.
template <typename T, int R, int K, int C, int SPLITS, int TEAMS, int STEPS, bool GATED, typename W, typename X>
METAL_FUNC void add_dense(
    W weight, const thread int (&weight_rows)[C], X x, const thread Work<R, C, SPLITS, TEAMS, GATED>& work,
    threadgroup typename Four<T>::type* staged, thread float (&sums)[rows_each(R)][C]) {
  constexpr int LANES = 8 * SPLITS, THREADS = SPLITS * row_groups(R) * TEAMS * 32, UNROLL = R > 4 ? 1 : R > 1 ? 2 : 4;
  const int lane = work.lane();
  for (int step = 0; step * LANES * 32 < K; step++) {
    if (R > 1 && step % STEPS == 0) {
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      stage_rows<T, R, K, LANES, 1, STEPS, THREADS>(x, step, work.thread_index, staged);
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    }
    StagedRows<T, LANES> rows;
    rows.at = staged + (step % STEPS * R + work.first_row()) * (8 * LANES) + lane;
    DirectRow<T> row;
    if (R == 1) row.template read<K, LANES, 1>(x, step, lane);
#pragma unroll(UNROLL)
    for (int b = 0; b < 4; b++) {
      const int k = block_at<LANES, 1>(step, lane, b);
      if (K % (LANES * 32) == 0 || k < K) {
        typename Four<T>::type fours[C][2];
#pragma unroll
        for (int c = 0; c < C; c++) read_block((const device uint4*)(weight + weight_rows[c] + k), fours[c]);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          float weights[C][4];
#pragma unroll
          for (int c = 0; c < C; c++) to_floats<T>(fours[c][i], weights[c]);
          if constexpr (R == 1) add_four<T>(weights, row, 2 * b + i, sums);
          else add_four<T>(weights, rows, 2 * b + i, sums);
        }
      }
    }
  }
}
