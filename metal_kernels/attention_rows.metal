#include <metal_simdgroup_matrix>
// A simdgroup takes 8 queries (a row and a head each) of one KV head through one split of the positions, by products
// of 8 x 8 matrices. Keys go in tiles of 32 by absolute position, 8 at a time, and a position has one place in its
// tile, so a query's sums have one order whatever else there is.
//
// A lane holds two neighbouring columns of one row of a matrix. Where numbers of a head are summed up, or are columns
// of a result, they are counted so that a lane reads EACH or 2 * EACH successive ones at once.

// The row and the first column of a lane.
METAL_FUNC int row_of(int lane) { return (lane / 4 & 4) + lane / 2 % 4; }
METAL_FUNC int column_of(int lane) { return (lane / 4 & 2) * 2 + lane % 2 * 2; }
// A lane of a row.
METAL_FUNC ushort lane_of(int row) { return ushort((row & 4) * 4 + (row & 3) * 2); }

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

// The query of a lane's row.
template <typename T, int D>
struct Query {
  T numbers[D / 4];                      // those that this lane multiplies
  metal::simdgroup_float8x8 sum[D / 8];  // of weighted values, of all queries
  float highest;                         // the highest score
  float weight;                          // sum of exp(score - highest) over the keys of this lane
  int row, position;
  bool is_spoiled;                       // whether it sees a value that is not finite
};

// The rows of a sequence in a pass, and what is cached before them.
template <typename P>
struct Sequence {
  P paths;  // from the sequence's first row on
  int stride, count, length, window;
};

// The row that row `row` sees `distance` positions after the end of what is cached, or -1.
template <bool HAS_PATHS, bool IS_BLOCK, typename P>
METAL_FUNC int seen_at(thread const Sequence<P>& sequence, int row, int distance) {
  if (distance >= sequence.count) return -1;
  if (HAS_PATHS) return sequence.paths[row * sequence.stride + distance];
  return IS_BLOCK || distance <= row ? distance : -1;
}

template <bool HAS_PATHS, bool IS_BLOCK, typename P>
METAL_FUNC int position_of_row(thread const Sequence<P>& sequence, int row) {
  if (!HAS_PATHS) return sequence.length + row;
  int depth = 0;
  while (seen_at<HAS_PATHS, IS_BLOCK>(sequence, row, depth + 1) >= 0) depth++;
  return sequence.length + depth;
}

template <bool HAS_PATHS, bool IS_BLOCK, typename P>
METAL_FUNC bool sees(thread const Sequence<P>& sequence, int row, int row_at, int position) {
  if (position < sequence.length) return row_at - position < sequence.window;
  return seen_at<HAS_PATHS, IS_BLOCK>(sequence, row, position - sequence.length) >= 0 &&
         (IS_BLOCK || row_at - position < sequence.window);
}

// Finds a key or value that row `row` sees at a position: cached, or a row of the pass. Where there is none, the
// cached place is returned, which may be read.
template <bool HAS_PATHS, int ROW_STRIDE, typename P, typename Q>
METAL_FUNC P locate(P cached, P rows, thread const Sequence<Q>& sequence, int row, int position) {
  // Without paths all rows find the same ones, seen or not.
  const int distance = position - sequence.length;
  const int seen = distance < 0 ? -1 : seen_at<HAS_PATHS, true>(sequence, row, distance);
  return seen < 0 ? cached : rows + seen * ROW_STRIDE;
}

// Takes the queries through a tile. `cached` points at the tile's first key in the pool, `keys` and `values` at the
// sequence's first row, of this KV head. Without IS_MIXED every query sees every key of the tile in the pool.
template <typename T, int D, int EACH, int GROUP, int SLOT_STRIDE, int VALUE_STRIDE, int ROW_STRIDE, bool IS_MIXED,
          bool HAS_PATHS, bool IS_BLOCK, typename P, typename Q>
METAL_FUNC void attend_tile(
    thread Query<T, D>& query, thread const Sequence<Q>& sequence, P cached, P keys, P values, int tile, int first,
    float scale, float softcap, int lane) {
  constexpr int BLOCK = 8 * EACH;
  const int row = row_of(lane), column = column_of(lane);
  // Only the rows of a tree find different keys at one position.
  const int first_row = first / GROUP;
  const int kinds =
      IS_MIXED && HAS_PATHS ? metal::min(first + 7, sequence.count * GROUP - 1) / GROUP - first_row + 1 : 1;
  float scores[4][2];
  metal::simdgroup_float8x8 left, right;
  for (int kind = 0; kind < kinds; kind++) {
    const bool is_own = kinds == 1 || query.row == first_row + kind;
#pragma unroll
    for (int part = 0; part < 4; part++) {
      P from[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int key = part * 8 + column + i;
        from[i] = cached + key * SLOT_STRIDE;
        if (IS_MIXED)
          from[i] = locate<HAS_PATHS, ROW_STRIDE>(from[i], keys, sequence, first_row + kind, tile + key);
      }
      metal::simdgroup_float8x8 product;
      product.thread_elements()[0] = 0.0f;
      product.thread_elements()[1] = 0.0f;
#pragma unroll
      for (int b = 0; b < D / BLOCK; b++) {
        float numbers[2][EACH];
#pragma unroll
        for (int i = 0; i < 2; i++) read_numbers<T, EACH>(from[i] + b * BLOCK + row * EACH, numbers[i]);
#pragma unroll
        for (int e = 0; e < EACH; e++) {
#pragma unroll
          for (int i = 0; i < 2; i++) {
            left.thread_elements()[i] = float(query.numbers[(b * 2 + i) * EACH + e]);
            right.thread_elements()[i] = numbers[i][e];
          }
          metal::simdgroup_multiply_accumulate(product, left, right, product);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; i++)
        if (is_own) scores[part][i] = product.thread_elements()[i];
    }
  }

  float highest = query.highest;
  uint seen = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    thread float& score = scores[i / 2][i % 2];
    // Adding 0 keeps the product out of the fused multiply-add that a compiler may make of the subtraction below.
    score = metal::fma(score, scale, 0.0f);
    if (softcap > 0.0f) score = metal::fma(softcap, metal::precise::tanh(score / softcap), 0.0f);
    const int position = tile + i / 2 * 8 + column + i % 2;
    if (IS_MIXED && !sees<HAS_PATHS, IS_BLOCK>(sequence, query.row, query.position, position)) continue;
    seen |= 1u << i;
    highest = metal::max(highest, score);
  }
  highest = metal::max(highest, metal::simd_shuffle_xor(highest, ushort(1)));
  highest = metal::max(highest, metal::simd_shuffle_xor(highest, ushort(8)));
  // Exactly 1 and 0 where the tile brings nothing: the query keeps its bits.
  const float factor = query.highest == highest ? 1.0f : metal::precise::exp(query.highest - highest);
  float weight = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    thread float& score = scores[i / 2][i % 2];
    score = (seen >> i & 1) != 0 ? metal::precise::exp(score - highest) : 0.0f;
    weight += score;
  }
  query.highest = highest;
  query.weight = metal::fma(query.weight, factor, weight);
#pragma unroll
  for (int i = 0; i < D / 8; i++) {
    query.sum[i].thread_elements()[0] *= factor;
    query.sum[i].thread_elements()[1] *= factor;
  }

  for (int kind = 0; kind < kinds; kind++) {
    const bool is_own = kinds == 1 || query.row == first_row + kind;
#pragma unroll
    for (int part = 0; part < 4; part++) {
      P from = cached + VALUE_STRIDE + (part * 8 + row) * SLOT_STRIDE;
      if (IS_MIXED)
        from = locate<HAS_PATHS, ROW_STRIDE>(from, values, sequence, first_row + kind, tile + part * 8 + row);
#pragma unroll
      for (int i = 0; i < 2; i++) left.thread_elements()[i] = is_own ? scores[part][i] : 0.0f;
      int spoiled = 0;
#pragma unroll
      for (int b = 0; b < D / BLOCK; b++) {
        float numbers[2 * EACH];
        read_numbers<T, 2 * EACH>(from + b * BLOCK + column * EACH, numbers);
#pragma unroll
        for (int e = 0; e < EACH; e++) {
#pragma unroll
          for (int i = 0; i < 2; i++) {
            // An unseen value may be anything, and 0 times infinity is not 0.
            const bool is_finite = !IS_MIXED || metal::isfinite(numbers[2 * e + i]);
            if (!is_finite) spoiled = 1;
            right.thread_elements()[i] = is_finite ? numbers[2 * e + i] : 0.0f;
          }
          metal::simdgroup_multiply_accumulate(query.sum[b * EACH + e], left, right, query.sum[b * EACH + e]);
        }
      }
      if (IS_MIXED) {
        spoiled |= metal::simd_shuffle_xor(spoiled, ushort(1));
        spoiled |= metal::simd_shuffle_xor(spoiled, ushort(8));
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const bool is_seen = is_own && (seen >> (2 * part + i) & 1) != 0;
          if (metal::simd_shuffle(spoiled, lane_of(column + i)) != 0 && is_seen) query.is_spoiled = true;
        }
      }
    }
  }
}

// body
constexpr int GROUP = H / KV, EACH = D % 64 == 0 ? 8 : D % 32 == 0 ? 4 : 2, BLOCK = 8 * EACH;
const int lane = int(thread_index_in_simdgroup), column = column_of(lane);
const int head = int(threadgroup_position_in_grid.x) % KV;
// The longest splits come last and are begun first.
const int splits = int(threadgroups_per_grid.y), split = splits - 1 - int(threadgroup_position_in_grid.y);
const int number = int(threadgroup_position_in_grid.z);
const int layer = place[0], window = place[1], pages_stride = sizes[0], paths_stride = sizes[1];
const int start = starts[number], count = starts[number + 1] - start, length = lengths[number];

const int begin = metal::max(split_begin(split), metal::max(length - window, 0) / 32 * 32);
const int end = metal::min(split_begin(split + 1), length + count);
if (begin >= end) return;

auto tree = paths + start * paths_stride;
const Sequence<decltype(tree)> sequence = {tree, paths_stride, count, length, window};
const int group = int(threadgroup_position_in_grid.x) / KV * SIMDGROUPS + int(simdgroup_index_in_threadgroup);
const int first = group * 8;
// A simdgroup that has too few queries computes its last one again.
const int own = metal::min(first + row_of(lane), count * GROUP - 1);
Query<T, D> query;
query.row = own / GROUP;
query.position = position_of_row<HAS_PATHS, IS_BLOCK>(sequence, query.row);
query.highest = lowest_score();
query.weight = 0.0f;
query.is_spoiled = false;
auto from = queries + ((start + query.row) * H + head * GROUP + own % GROUP) * D;
#pragma unroll
for (int i = 0; i < D / 4; i++) query.numbers[i] = from[i / (2 * EACH) * BLOCK + column * EACH + i % (2 * EACH)];
#pragma unroll
for (int i = 0; i < D / 8; i++) {
  query.sum[i].thread_elements()[0] = 0.0f;
  query.sum[i].thread_elements()[1] = 0.0f;
}

auto new_keys = keys + (start * KV + head) * D;
auto new_values = values + (start * KV + head) * D;
for (int tile = begin; tile < end; tile += 32) {
  // Together, so that what one simdgroup reads is in the cache for the others.
  metal::threadgroup_barrier(metal::mem_flags::mem_none);
  if (first >= count * GROUP) continue;
  const int page = tile < length ? pages[number * pages_stride + tile / SLOTS] : 0;
  auto cached = pool + long(page) * PAGE_STRIDE + layer * LAYER_STRIDE + tile % SLOTS * SLOT_STRIDE + head * D;
  if (tile + 32 <= length && length + count - 1 - tile < window) {
    attend_tile<T, D, EACH, GROUP, SLOT_STRIDE, VALUE_STRIDE, KV * D, false, HAS_PATHS, IS_BLOCK>(
        query, sequence, cached, new_keys, new_values, tile, first, settings[0], settings[1], lane);
  } else {
    attend_tile<T, D, EACH, GROUP, SLOT_STRIDE, VALUE_STRIDE, KV * D, true, HAS_PATHS, IS_BLOCK>(
        query, sequence, cached, new_keys, new_values, tile, first, settings[0], settings[1], lane);
  }
}

float weight = query.weight;
weight += metal::simd_shuffle_xor(weight, ushort(1));
weight += metal::simd_shuffle_xor(weight, ushort(8));
int spoiled = query.is_spoiled ? 1 : 0;
spoiled |= metal::simd_shuffle_xor(spoiled, ushort(1));
spoiled |= metal::simd_shuffle_xor(spoiled, ushort(8));
if (first + row_of(lane) >= count * GROUP) return;
const int index = ((start + query.row) * H + head * GROUP + own % GROUP) * splits + split;
if (column == 0) {
  weights[2 * index] = query.highest;
  weights[2 * index + 1] = weight;
}
#pragma unroll
for (int i = 0; i < D / 8; i++) {
  float2 pair;
  pair.x = spoiled != 0 ? as_type<float>(0x7fc00000u) : query.sum[i].thread_elements()[0];
  pair.y = spoiled != 0 ? as_type<float>(0x7fc00000u) : query.sum[i].thread_elements()[1];
  *(device float2*)(partials + long(index) * D + i / EACH * BLOCK + column * EACH + i % EACH * 2) = pair;
}
