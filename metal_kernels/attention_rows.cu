// The tensor core twin of attention_rows.metal: rows in bfloat16 or float16.
//
// A warp takes 16 queries (a row and a head each) of one KV head through one split of the positions, the warps of a
// block the same keys. Keys go in tiles of TILE by absolute position, and a position has one place in its tile, so
// a query's sums have one order whatever else there is. Weights are multiplied as two numbers of T whose sum has
// twice the digits.

// Four 8 x 8 matrices; lane l names row l % 8 of matrix l / 8, 16 bytes.
__device__ __forceinline__ void load_matrices(unsigned (&to)[4], const uint4* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(unsigned(__cvta_generic_to_shared(row))));
}
__device__ __forceinline__ void load_transposed(unsigned (&to)[4], const uint4* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(unsigned(__cvta_generic_to_shared(row))));
}

// Two numbers of T as one word, and what T leaves of them.
template <typename T>
__device__ __forceinline__ unsigned pair_of(float& a, float& b) {
  const T low = T(a), high = T(b);
  a -= float(low), b -= float(high);
  return unsigned(reinterpret_cast<const unsigned short&>(low)) |
         unsigned(reinterpret_cast<const unsigned short&>(high)) << 16;
}

// Puts 0 where a word's numbers are not finite, and says whether there were such.
template <typename T>
__device__ __forceinline__ bool clean(unsigned& word) {
  constexpr unsigned EXPONENT = is_half<T>::value ? 0x7C00u : 0x7F80u;
  const bool low = (word & EXPONENT) == EXPONENT, high = (word >> 16 & EXPONENT) == EXPONENT;
  if (low) word &= 0xFFFF0000u;
  if (high) word &= 0x0000FFFFu;
  return low || high;
}

// The queries of a lane: those of its quad, and 8 further on.
template <int D>
struct Queries {
  unsigned numbers[D / 16][4];
  float sum[D / 8][4];  // of weighted values
  float highest[2];     // the highest score
  float weight[2];      // sum of exp(score - highest) over the keys of this lane
  int row[2], position[2];
  bool is_spoiled[2];   // whether it sees a value that is not finite
};

// What a block holds: keys, then values, in slots of STRIDE pieces so that the lanes of a warp meet no bank twice.
template <int D, int TILE>
struct Held {
  static constexpr int STRIDE = D / 8 + 1;
  uint4 pieces[2][2 * TILE * STRIDE];
  unsigned spoiled[2];  // bits of slots whose values were not finite
};

// body
constexpr int GROUP = H / KV, TILE = D > 128 ? 16 : 32, PIECES = D / 8, STRIDE = Held<D, TILE>::STRIDE;
__shared__ Held<D, TILE> held;
const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5, quad = lane >> 2, part = lane & 3;
const int head = blockIdx.x % KV, split = gridDim.y - 1 - blockIdx.y, splits = gridDim.y, sequence = blockIdx.z;
const int layer = place[0], window = place[1], pages_stride = sizes[0], paths_stride = sizes[1];
const int start = starts[sequence], count = starts[sequence + 1] - start, length = lengths[sequence];
const int* tree = paths + start * paths_stride;

const int begin = max(split_begin(split), max(length - window, 0) / 32 * 32);
const int end = min(split_begin(split + 1), length + count);
if (begin >= end) return;
// Tiles from `whole` to `tail` are cached and seen by every row.
const int tail = min(max(length / TILE * TILE, begin), end), left = length + count - window;
const int whole = min(max(begin, left > 0 ? (left + TILE - 1) / TILE * TILE : 0), tail);

const int first = (blockIdx.x / KV * warps + warp) * 16, numbers = count * GROUP;
const bool has_queries = first < numbers;
Queries<D> query;
#pragma unroll
for (int half = 0; half < 2; half++) {
  // A warp that has too few queries computes its last one again.
  const int number = min(first + half * 8 + quad, numbers - 1), row = number / GROUP;
  const T* from = queries + size_t((start + row) * H + head * GROUP + number % GROUP) * D + part * 2;
#pragma unroll
  for (int step = 0; step < D / 16; step++) {
    query.numbers[step][half] = *reinterpret_cast<const unsigned*>(from + step * 16);
    query.numbers[step][half + 2] = *reinterpret_cast<const unsigned*>(from + step * 16 + 8);
  }
  int depth = row;
  if (HAS_PATHS) {
    depth = -1;
    while (depth + 1 < count && tree[row * paths_stride + depth + 1] >= 0) depth++;
  }
  query.row[half] = row, query.position[half] = length + depth;
  query.highest[half] = lowest_score(), query.weight[half] = 0.0f, query.is_spoiled[half] = false;
}
#pragma unroll
for (int i = 0; i < D / 8; i++)
#pragma unroll
  for (int c = 0; c < 4; c++) query.sum[i][c] = 0.0f;

auto cached_at = [&](int position) {
  const int page = pages[sequence * pages_stride + position / SLOTS];
  return pool + size_t(page) * PAGE_STRIDE + layer * LAYER_STRIDE + position % SLOTS * SLOT_STRIDE + head * D;
};
// The row of the pass that a row sees `distance` positions after the end of what is cached, or -1.
auto seen_at = [&](int row, int distance) {
  if (distance >= count) return -1;
  if (HAS_PATHS) return int(tree[row * paths_stride + distance]);
  return IS_BLOCK || distance <= row ? distance : -1;
};
auto sees = [&](int half, int position) {
  if (position < length) return query.position[half] - position < window;
  return seen_at(query.row[half], position - length) >= 0 && (IS_BLOCK || query.position[half] - position < window);
};

// Takes the warp's queries through a tile. Its keys are in slots from `slots` on in the order of positions; with
// IS_MIXED what is cached of it is, and after that all rows of the pass.
auto attend = [&](auto mixed, int tile, int slots) {
  constexpr bool IS_MIXED = decltype(mixed)::value;
  const int cached = min(max(length - tile, 0), TILE);
  // A position that the row does not see gets slot 0, whose weight will be 0.
  auto slot_of = [&](int row, int key) {
    if (!IS_MIXED) return slots + key;
    if (key < cached) return key;
    const int seen = HAS_PATHS ? seen_at(row, tile + key - length) : tile + key - length;
    return seen < 0 || seen >= count ? 0 : cached + seen;
  };
  // Only the rows of a tree find different keys at one position.
  const int first_row = first / GROUP, last_row = min(first + 15, numbers - 1) / GROUP;
  const int kinds = IS_MIXED && HAS_PATHS ? last_row - first_row + 1 : 1;
  float score[TILE / 8][4];
  for (int kind = 0; kind < kinds; kind++) {
    float products[TILE / 8][4] = {};
#pragma unroll
    for (int keys = 0; keys < TILE; keys += 16) {
      const int slot = slot_of(first_row + kind, keys + (lane >> 4) * 8 + (lane & 7));
      const uint4* from = held.pieces[0] + slot * STRIDE + (lane >> 3 & 1);
#pragma unroll
      for (int step = 0; step < D / 16; step++) {
        unsigned b[4];
        load_matrices(b, from + step * 2);
        multiply_tile<T>(products[keys / 8], query.numbers[step], b[0], b[1]);
        multiply_tile<T>(products[keys / 8 + 1], query.numbers[step], b[2], b[3]);
      }
    }
#pragma unroll
    for (int i = 0; i < TILE / 8; i++)
#pragma unroll
      for (int c = 0; c < 4; c++)
        if (kinds == 1 || query.row[c >> 1] == first_row + kind) score[i][c] = products[i][c];
  }

#pragma unroll
  for (int half = 0; half < 2; half++) {
    float highest = query.highest[half];
    unsigned seen = 0;
#pragma unroll
    for (int i = 0; i < TILE / 4; i++) {
      const int key = i / 2 * 8 + part * 2 + i % 2;
      // Rounded here, so that no compiler makes one operation of this and of the subtraction below.
      float& value = score[i / 2][half * 2 + i % 2];
      value = __fmul_rn(value, settings[0]);
      if (settings[1] > 0.0f) value = __fmul_rn(settings[1], tanhf(value / settings[1]));
      if (IS_MIXED && !sees(half, tile + key)) continue;
      seen |= 1u << i;
      highest = fmaxf(highest, value);
      if (IS_MIXED) {
        const int slot = slot_of(query.row[half], key);
        if (held.spoiled[slot >> 5] >> (slot & 31) & 1) query.is_spoiled[half] = true;
      }
    }
    highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
    highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
    // Exactly 1 and 0 where the tile brings nothing: the query keeps its bits.
    const float factor = query.highest[half] == highest ? 1.0f : expf(query.highest[half] - highest);
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < TILE / 4; i++) {
      float& value = score[i / 2][half * 2 + i % 2];
      value = seen >> i & 1 ? expf(value - highest) : 0.0f;
      total = __fadd_rn(total, value);
    }
    query.highest[half] = highest;
    query.weight[half] = fmaf(query.weight[half], factor, total);
#pragma unroll
    for (int i = 0; i < D / 8; i++) {
      query.sum[i][half * 2] = __fmul_rn(query.sum[i][half * 2], factor);
      query.sum[i][half * 2 + 1] = __fmul_rn(query.sum[i][half * 2 + 1], factor);
    }
  }

  for (int kind = 0; kind < kinds; kind++) {
#pragma unroll
    for (int keys = 0; keys < TILE; keys += 16) {
      unsigned high[4], low[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const bool is_own = kinds == 1 || query.row[i & 1] == first_row + kind;
        float a = is_own ? score[keys / 8 + (i >> 1)][(i & 1) * 2] : 0.0f;
        float b = is_own ? score[keys / 8 + (i >> 1)][(i & 1) * 2 + 1] : 0.0f;
        high[i] = pair_of<T>(a, b);
        low[i] = pair_of<T>(a, b);
      }
      const int slot = slot_of(first_row + kind, keys + (lane >> 3 & 1) * 8 + (lane & 7));
      const uint4* from = held.pieces[1] + slot * STRIDE + (lane >> 4);
#pragma unroll
      for (int step = 0; step < D / 16; step++) {
        unsigned b[4];
        load_transposed(b, from + step * 2);
        multiply_tile<T>(query.sum[step * 2], high, b[0], b[1]);
        multiply_tile<T>(query.sum[step * 2], low, b[0], b[1]);
        multiply_tile<T>(query.sum[step * 2 + 1], high, b[2], b[3]);
        multiply_tile<T>(query.sum[step * 2 + 1], low, b[2], b[3]);
      }
    }
  }
};

// Some rows do not see all of these tiles, and what they do not see may be anything; 0 times infinity is not 0.
auto attend_mixed = [&](int from, int to) {
  for (int tile = from; tile < to; tile += TILE) {
    const int cached = min(max(length - tile, 0), TILE), slots = cached + (tile + TILE > length ? count : 0);
    __syncthreads();
    if (threadIdx.x < 2) held.spoiled[threadIdx.x] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < slots * PIECES; i += blockDim.x) {
      const int slot = i / PIECES, piece = i % PIECES;
      const T *key, *value;
      if (slot < cached) {
        key = cached_at(tile + slot) + piece * 8, value = key + VALUE_STRIDE;
      } else {
        const size_t at = size_t((start + slot - cached) * KV + head) * D + piece * 8;
        key = keys + at, value = values + at;
      }
      held.pieces[0][slot * STRIDE + piece] = *reinterpret_cast<const uint4*>(key);
      uint4 words = *reinterpret_cast<const uint4*>(value);
      const bool x = clean<T>(words.x), y = clean<T>(words.y), z = clean<T>(words.z), w = clean<T>(words.w);
      if (x || y || z || w) atomicOr(held.spoiled + (slot >> 5), 1u << (slot & 31));
      held.pieces[1][slot * STRIDE + piece] = words;
    }
    __syncthreads();
    if (has_queries) attend(metal::is_same<int, int>(), tile, 0);
  }
};

attend_mixed(begin, whole);
__syncthreads();
auto fetch = [&](int tile) {
  if (tile < tail) {
    const T* from = cached_at(tile);
    const int slots = tile / TILE % 2 * TILE;
    for (int i = threadIdx.x; i < TILE * PIECES; i += blockDim.x) {
      const int slot = i / PIECES, piece = i % PIECES;
      const T* key = from + slot * SLOT_STRIDE + piece * 8;
      copy_async(held.pieces[0] + (slots + slot) * STRIDE + piece, key, true);
      copy_async(held.pieces[1] + (slots + slot) * STRIDE + piece, key + VALUE_STRIDE, true);
    }
  }
  end_copies();
};
fetch(whole);
for (int tile = whole; tile < tail; tile += TILE) {
  fetch(tile + TILE);
  wait_copies<1>();
  __syncthreads();
  if (has_queries) attend(metal::is_same<int, float>(), tile, tile / TILE % 2 * TILE);
  __syncthreads();
}
wait_copies<0>();
attend_mixed(tail, end);

#pragma unroll
for (int half = 0; half < 2; half++) {
  float weight = query.weight[half];
  weight += __shfl_xor_sync(0xffffffffu, weight, 1);
  weight += __shfl_xor_sync(0xffffffffu, weight, 2);
  int spoiled = query.is_spoiled[half];
  spoiled |= __shfl_xor_sync(0xffffffffu, spoiled, 1);
  spoiled |= __shfl_xor_sync(0xffffffffu, spoiled, 2);
  const int number = first + half * 8 + quad;
  if (number >= numbers) continue;
  const int index = ((start + number / GROUP) * H + head * GROUP + number % GROUP) * splits + split;
  if (part == 0) weights[2 * index] = query.highest[half], weights[2 * index + 1] = weight;
#pragma unroll
  for (int i = 0; i < D / 8; i++) {
    float2 pair = make_float2(query.sum[i][half * 2], query.sum[i][half * 2 + 1]);
    if (spoiled) pair = make_float2(nanf(""), nanf(""));
    *reinterpret_cast<float2*>(partials + size_t(index) * D + i * 8 + part * 2) = pair;
  }
}
