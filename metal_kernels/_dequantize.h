// Affine quantised weights: 32 values of BITS bits are BITS words, one stream of bits from the lowest on.
//
// A value is put into the mantissa of a half, which is then BASE + q: two values at once, no conversion from an
// integer, and BASE goes into the bias of the group. Where values fill the top of the mantissa, BASE is 2^BITS; values
// of four bits lie lower, where every other pair needs no shift, and BASE is 64. So a weight is scale * (BASE + q) +
// bias in float32, once for all rows.

// Reads the 32 values of a lane.
template <int BITS, typename P>
METAL_FUNC void read_words(P from, thread uint (&words)[BITS]) {
  if constexpr (BITS % 4 == 0) {
#pragma unroll
    for (int i = 0; i < BITS; i += 4) {
      const uint4 four = *(const device uint4*)(from + i);
      words[i] = four.x;
      words[i + 1] = four.y;
      words[i + 2] = four.z;
      words[i + 3] = four.w;
    }
  } else if constexpr (BITS % 2 == 0) {
#pragma unroll
    for (int i = 0; i < BITS; i += 2) {
      const uint2 two = *(const device uint2*)(from + i);
      words[i] = two.x;
      words[i + 1] = two.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < BITS; i++) words[i] = from[i];
  }
}

// Drops the first 16 values.
template <int BITS>
METAL_FUNC void drop_half(thread uint (&words)[BITS]) {
  constexpr int WORDS = BITS / 2, SHIFT = BITS % 2 * 16;
#pragma unroll
  for (int i = 0; i < BITS; i++) {
    const uint low = i + WORDS < BITS ? words[i + WORDS] >> SHIFT : 0u;
    const uint high = SHIFT > 0 && i + WORDS + 1 < BITS ? words[i + WORDS + 1] << SHIFT : 0u;
    words[i] = low | high;
  }
}

// Two values and what follows them, from bit ``at`` of the stream on.
template <int BITS>
METAL_FUNC uint two_values(const thread uint (&words)[BITS], int at) {
  const int word = at / 32, shift = at % 32;
  uint bits = words[word] >> shift;
  if (shift + 2 * BITS > 32) bits |= words[word + 1] << (32 - shift);
  return bits;
}

// The weights of four ``index`` of the 32 values; base_bias is the group's bias without scale * BASE.
template <int BITS>
METAL_FUNC void dequantize_four(
    const thread uint (&words)[BITS], int index, float scale, float base_bias, thread float (&weights)[4]) {
  constexpr int PLACE = BITS == 4 ? 4 : 10 - BITS, LEFT = PLACE > BITS ? PLACE - BITS : 0;
  constexpr int RIGHT = PLACE < BITS ? BITS - PLACE : 0;
  constexpr uint MASK = (((1u << BITS) - 1u) * 0x00010001u) << PLACE, EXPONENT = uint(25 - PLACE) * 0x04000400u;
  uint pairs;
  if constexpr (BITS == 4) {
    pairs = words[index / 2] >> (index % 2 * 8);
  } else {
    const int at = (index / 2 * 8 + index % 2 * 2) * BITS;
    pairs = (two_values<BITS>(words, at) & 0xffffu) | (two_values<BITS>(words, at + 4 * BITS) << 16);
  }
  const half2 even = as_type<half2>(((pairs << PLACE) & MASK) | EXPONENT);
  const half2 odd = as_type<half2>(((pairs << LEFT >> RIGHT) & MASK) | EXPONENT);
  weights[0] = metal::fma(scale, float(even.x), base_bias);
  weights[1] = metal::fma(scale, float(odd.x), base_bias);
  weights[2] = metal::fma(scale, float(even.y), base_bias);
  weights[3] = metal::fma(scale, float(odd.y), base_bias);
}
template <int BITS>
METAL_FUNC float without_base(float scale, float bias) {
  return metal::fma(scale, -float(1 << (BITS == 4 ? 6 : BITS)), bias);
}

// Adds the products of a lane's 32 values: C columns of weights, ROWS rows of x. Many rows take the two halves in a
// loop: fewer loads are under way at once, which need registers, and the instructions fit their cache.
template <typename T, int BITS, int ROWS, int C, typename Rows>
METAL_FUNC void add_words(
    thread uint (&words)[C][BITS], const thread float (&scale)[C], const thread float (&base_bias)[C],
    const thread Rows& rows, thread float (&sums)[ROWS][C]) {
  constexpr int UNROLL = ROWS > 4 ? 1 : 2;
#pragma unroll(UNROLL)
  for (int first = 0; first < 8; first += 4) {
#pragma unroll
    for (int index = 0; index < 4; index++) {
      float weights[C][4];
#pragma unroll
      for (int c = 0; c < C; c++) dequantize_four<BITS>(words[c], index, scale[c], base_bias[c], weights[c]);
      add_four<T>(weights, rows, first + index, sums);
    }
#pragma unroll
    for (int c = 0; c < C; c++) drop_half<BITS>(words[c]);
  }
}

// Adds the products of R rows with C quantised columns, rows weight_rows[c] of weight, scales and biases.
template <
    typename T, int BITS, int GROUP, int R, int K, int C, int SPLITS, int TEAMS, int STEPS, bool GATED, typename W,
    typename S, typename X>
METAL_FUNC void add_quantized(
    W weight, S scales, S biases, const thread int (&weight_rows)[C], X x,
    const thread Work<R, C, SPLITS, TEAMS, GATED>& work, threadgroup typename Four<T>::type* staged,
    thread float (&sums)[rows_each(R)][C]) {
  constexpr int LANES = 8 * SPLITS, THREADS = SPLITS * row_groups(R) * TEAMS * 32, RUNS = K / 32;
  const int lane = work.lane();
  for (int step = 0; step * LANES < RUNS; step++) {
    const int run = step * LANES + lane;
    const bool there = RUNS % LANES == 0 || run < RUNS;
    // Weights come first: they are on their way while rows are staged.
    uint words[C][BITS];
    float scale[C], base_bias[C];
    if (there) {
#pragma unroll
      for (int c = 0; c < C; c++) read_words<BITS>(weight + weight_rows[c] * (RUNS * BITS) + run * BITS, words[c]);
#pragma unroll
      for (int c = 0; c < C; c++) {
        const int group = weight_rows[c] * (K / GROUP) + run / (GROUP / 32);
        scale[c] = float(scales[group]);
        base_bias[c] = without_base<BITS>(scale[c], float(biases[group]));
      }
    }
    if (R > 1 && step % STEPS == 0) {
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      stage_rows<T, R, K, LANES, 4, STEPS, THREADS>(x, step, work.thread_index, staged);
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    }
    if (there) {
      if constexpr (R == 1) {
        DirectRow<T> row;
        row.template read<K, LANES, 4>(x, step, lane);
        add_words<T, BITS>(words, scale, base_bias, row, sums);
      } else {
        StagedRows<T, LANES> rows;
        rows.at = staged + (step % STEPS * R + work.first_row()) * (8 * LANES) + lane;
        add_words<T, BITS>(words, scale, base_bias, rows, sums);
      }
    }
  }
}
