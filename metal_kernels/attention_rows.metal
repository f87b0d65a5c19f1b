// A simdgroup takes VECTORS queries (a row and a head each) of one KV head through one split of the positions.
// LANES lanes side by side share a key, SIZE of its numbers each, and KEYS = 32 / LANES keys stand side by side.
// Keys go in tiles of 32: key number i * KEYS + side of a tile belongs to the lanes of `side`, and its score ends
// in the lane that is number i among them.

METAL_FUNC void split_word(uint word, float, thread float* to) { to[0] = as_type<float>(word); }

// Types of two bytes.
template <typename T>
METAL_FUNC void split_word(uint word, T, thread float* to) {
  to[0] = float(as_type<T>(ushort(word & 0xffffu)));
  to[1] = float(as_type<T>(ushort(word >> 16)));
}

template <typename T, int SIZE, typename P>
METAL_FUNC void read_numbers(P from, thread float* to) {
  constexpr int EACH = 4 / sizeof(T), WORDS = SIZE / EACH;
  if (WORDS % 4 == 0) {
#pragma unroll
    for (int i = 0; i < SIZE; i += 4 * EACH) {
      const uint4 words = *(const device uint4*)(from + i);
      split_word(words.x, T(0.0f), to + i);
      split_word(words.y, T(0.0f), to + i + EACH);
      split_word(words.z, T(0.0f), to + i + 2 * EACH);
      split_word(words.w, T(0.0f), to + i + 3 * EACH);
    }
  } else if (WORDS % 2 == 0) {
#pragma unroll
    for (int i = 0; i < SIZE; i += 2 * EACH) {
      const uint2 words = *(const device uint2*)(from + i);
      split_word(words.x, T(0.0f), to + i);
      split_word(words.y, T(0.0f), to + i + EACH);
    }
  } else {
#pragma unroll
    for (int i = 0; i < SIZE; i += EACH) split_word(*(const device uint*)(from + i), T(0.0f), to + i);
  }
}

template <int SIZE>
struct Query {
  float numbers[SIZE];  // scaled
  float sum[SIZE];      // of weighted values, over the keys of this lane's side
  float highest;        // the highest score
  float weight;         // sum of exp(score - highest) over the keys whose scores this lane held
  int row, position;
  int seen;             // see row_seen_at
};

template <int SIZE>
METAL_FUNC float dot(thread const float* a, thread const float* b) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < SIZE; i++) sum = metal::fma(a[i], b[i], sum);
  return sum;
}

// Adds pairs of lanes: those with the bit of `mask` keep the sum of b, the others that of a.
METAL_FUNC float fold(float a, float b, int lane, int mask) {
  bool upper = (lane & mask) != 0;
  return (upper ? b : a) + metal::simd_shuffle_xor(upper ? a : b, ushort(mask));
}

// Finds a key or value at a position: cached, or the row that `seen` names in the lane of its distance from the end
// of what is cached. A position that no row has gets the cached place, which may be read. All lanes must call it.
template <int ROW_STRIDE, typename P>
METAL_FUNC P locate(P cached, P rows, int position, int length, int seen) {
  int row = metal::simd_shuffle(seen, ushort(metal::min(metal::max(position - length, 0), 31)));
  return position < length || row < 0 ? cached : rows + row * ROW_STRIDE;
}

// Whether a query sees a position. All lanes must call it.
template <int SIZE>
METAL_FUNC bool sees(thread const Query<SIZE>& query, int position, int length, int window) {
  int row = metal::simd_shuffle(query.seen, ushort(metal::min(metal::max(position - length, 0), 31)));
  return position < length ? query.position - position < window : row >= 0;
}

// Takes the queries through a tile. `cached` points at this lane's part of the tile's first key of its side, in the
// pool; `keys` and `values` at its part of the sequence's first row. Without IS_MIXED every query sees every key of
// the tile in the pool.
template <typename T, int SIZE, int LANES, int VECTORS, int SLOT_STRIDE, int VALUE_STRIDE, int ROW_STRIDE,
          bool IS_MIXED, bool HAS_PATHS, typename P>
METAL_FUNC void attend_tile(
    thread Query<SIZE>* queries, P cached, P keys, P values, int tile, int length, int count, int window,
    float softcap, int lane) {
  constexpr int KEYS = 32 / LANES;
  const int first = tile + lane / LANES;
  float weights[VECTORS];
  float numbers[SIZE];
  const int every_row = lane < count ? lane : -1;

  // Sums over lanes that wait for their other half, by the bit in which the lanes of the halves differ.
  float parts[VECTORS][6];
#pragma unroll
  for (int i = 0; i < LANES; i++) {
#pragma unroll
    for (int m = 0; m < VECTORS; m++) {
      // Only the rows of a tree find different keys at one position.
      if (m == 0 || (IS_MIXED && HAS_PATHS && queries[m].row != queries[m - 1].row)) {
        P from = cached + i * KEYS * SLOT_STRIDE;
        const int seen = HAS_PATHS ? queries[m].seen : every_row;
        if (IS_MIXED) from = locate<ROW_STRIDE>(from, keys, first + i * KEYS, length, seen);
        read_numbers<T, SIZE>(from, numbers);
      }
      float part = dot<SIZE>(queries[m].numbers, numbers);
      int bit = 0;
#pragma unroll
      for (; (i >> bit & 1) != 0; bit++) part = fold(parts[m][bit], part, lane, 1 << bit);
      parts[m][bit] = part;
    }
  }

#pragma unroll
  for (int m = 0; m < VECTORS; m++) {
    float score = parts[m][LANES == 8 ? 3 : LANES == 16 ? 4 : 5];
    const bool is_seen = !IS_MIXED || sees(queries[m], first + lane % LANES * KEYS, length, window);
    // Adding 0 keeps the product out of the fused multiply-add that a compiler may make of the subtraction below.
    if (softcap > 0.0f) score = metal::fma(softcap, metal::precise::tanh(score / softcap), 0.0f);
    const float before = queries[m].highest;
    const float highest = metal::max(before, metal::simd_max(is_seen ? score : lowest_score()));
    // Exactly 1 and 0 where the tile brings nothing: the query keeps its bits.
    const float factor = before == highest ? 1.0f : metal::precise::exp(before - highest);
    weights[m] = is_seen ? metal::precise::exp(score - highest) : 0.0f;
    queries[m].highest = highest;
    queries[m].weight = metal::fma(queries[m].weight, factor, weights[m]);
#pragma unroll
    for (int e = 0; e < SIZE; e++) queries[m].sum[e] *= factor;
  }

#pragma unroll
  for (int i = 0; i < LANES; i++) {
#pragma unroll
    for (int m = 0; m < VECTORS; m++) {
      if (m == 0 || (IS_MIXED && HAS_PATHS && queries[m].row != queries[m - 1].row)) {
        P from = cached + VALUE_STRIDE + i * KEYS * SLOT_STRIDE;
        const int seen = HAS_PATHS ? queries[m].seen : every_row;
        if (IS_MIXED) from = locate<ROW_STRIDE>(from, values, first + i * KEYS, length, seen);
        read_numbers<T, SIZE>(from, numbers);
      }
      const float weight = metal::simd_shuffle(weights[m], ushort(lane / LANES * LANES + i));
      // An unseen value may be anything, and 0 times infinity is not 0.
      if (!IS_MIXED || sees(queries[m], first + i * KEYS, length, window)) {
#pragma unroll
        for (int e = 0; e < SIZE; e++) queries[m].sum[e] = metal::fma(weight, numbers[e], queries[m].sum[e]);
      }
    }
  }
}

// body
constexpr int GROUP = H / KV, SIZE = D / LANES;
const int lane = int(thread_index_in_simdgroup), side = lane / LANES, part = lane % LANES;
const int head = int(threadgroup_position_in_grid.x) % KV;
const int splits = int(threadgroups_per_grid.y), split = splits - 1 - int(threadgroup_position_in_grid.y);
const int sequence = int(threadgroup_position_in_grid.z);
const int layer = place[0], window = place[1], pages_stride = sizes[0], paths_stride = sizes[1];
const int start = starts[sequence], count = starts[sequence + 1] - start, length = lengths[sequence];

const int begin = metal::max(split_begin(split), metal::max(length - window, 0) / 32 * 32);
const int end = metal::min(split_begin(split + 1), length + count);
if (begin >= end) return;

const int group = int(threadgroup_position_in_grid.x) / KV * SIMDGROUPS + int(simdgroup_index_in_threadgroup);
const int first = group * VECTORS;
Query<SIZE> query[VECTORS];
#pragma unroll
for (int m = 0; m < VECTORS; m++) {
  // A simdgroup that has too few queries computes its last one again.
  const int number = metal::min(first + m, count * GROUP - 1);
  const int row = number / GROUP;
  auto from = queries + ((start + row) * H + head * GROUP + number % GROUP) * D + part * SIZE;
  read_numbers<T, SIZE>(from, query[m].numbers);
#pragma unroll
  for (int e = 0; e < SIZE; e++) {
    query[m].numbers[e] *= settings[0];
    query[m].sum[e] = 0.0f;
  }
  query[m].highest = lowest_score();
  query[m].weight = 0.0f;
  query[m].row = row;
  const int seen = row_seen_at<HAS_PATHS, IS_BLOCK>(paths + start * paths_stride, paths_stride, row, count, lane);
  query[m].position = position_of<IS_BLOCK>(length, row, seen);
  query[m].seen = IS_BLOCK || query[m].position - (length + lane) < window ? seen : -1;
}

const int offset = head * D + part * SIZE;
auto new_keys = keys + start * KV * D + offset;
auto new_values = values + start * KV * D + offset;
for (int tile = begin; tile < end; tile += 32) {
  // Together, so that what one simdgroup reads is in the cache for the others.
  metal::threadgroup_barrier(metal::mem_flags::mem_none);
  if (first >= count * GROUP) continue;
  const int page = tile < length ? pages[sequence * pages_stride + tile / SLOTS] : 0;
  auto cached = pool + long(page) * PAGE_STRIDE + layer * LAYER_STRIDE + (tile % SLOTS + side) * SLOT_STRIDE + offset;
  if (tile + 32 <= length && length + count - 1 - tile < window) {
    attend_tile<T, SIZE, LANES, VECTORS, SLOT_STRIDE, VALUE_STRIDE, KV * D, false, HAS_PATHS>(
        query, cached, new_keys, new_values, tile, length, count, window, settings[1], lane);
  } else {
    attend_tile<T, SIZE, LANES, VECTORS, SLOT_STRIDE, VALUE_STRIDE, KV * D, true, HAS_PATHS>(
        query, cached, new_keys, new_values, tile, length, count, window, settings[1], lane);
  }
}

#pragma unroll
for (int m = 0; m < VECTORS; m++) {
  const int number = first + m;
  if (number >= count * GROUP) break;
  const int index = ((start + number / GROUP) * H + head * GROUP + number % GROUP) * splits + split;
  const float weight = metal::simd_sum(query[m].weight);
  if (lane == 0) {
    weights[2 * index] = query[m].highest;
    weights[2 * index + 1] = weight;
  }
#pragma unroll
  for (int i = 0; i < SIZE; i += 2) {
    float2 pair;
    pair.x = query[m].sum[i];
    pair.y = query[m].sum[i + 1];
    for (int mask = LANES; mask < 32; mask *= 2) {
      pair.x += metal::simd_shuffle_xor(pair.x, ushort(mask));
      pair.y += metal::simd_shuffle_xor(pair.y, ushort(mask));
    }
    if (side == 0) *(device float2*)(partials + long(index) * D + part * SIZE + i) = pair;
  }
}
