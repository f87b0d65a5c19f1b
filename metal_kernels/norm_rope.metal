// body
// A simdgroup makes one head. A row has H heads, then LAYERS times KV key heads and KV value heads: heads and keys are
// normed and rotated, values only copied. SPLIT: first all rows of the H heads are written, then the keys, then the
// values (LAYERS is 1 there); otherwise heads stay in their order. GATED: D entries follow each of the H heads
// and are skipped. settings: eps and the factor on rotated entries.
constexpr int SLOTS = H + LAYERS * 2 * KV;
constexpr int PAIRS = ROTATED / 2, REST = D - ROTATED;
constexpr int EACH_PAIR = (PAIRS + 31) / 32, EACH_REST = (REST + 31) / 32;
const int lane = thread_index_in_simdgroup;
const int slot = threadgroup_position_in_grid.x * SIMDGROUPS + simdgroup_index_in_threadgroup;
const int64_t row = threadgroup_position_in_grid.y, rows = threadgroups_per_grid.y;
const bool is_head = slot < H;
const int layer = is_head ? 0 : (slot - H) / (2 * KV);
const int side = is_head ? 0 : (slot - H) / KV % 2;

if (slot < SLOTS) {
  const int skipped = GATED ? metal::min(slot, H) : 0;
  const int64_t from = (row * (GATED ? SLOTS + H : SLOTS) + slot + skipped) * D;
  int64_t to = (row * SLOTS + slot) * D;
  if (SPLIT) to = (is_head ? row * H + slot : rows * H + (side * rows + row) * KV + (slot - H) % KV) * D;
  if (side == 1) {
    for (int i = lane; i < D; i += 32) out[to + i] = x[from + i];
  } else {
    float a[EACH_PAIR], b[EACH_PAIR], rest[EACH_REST + 1];
    float sum = 0.0f;
    #pragma unroll
    for (int j = 0; j < EACH_PAIR; j++) {
      const int p = j * 32 + lane;
      a[j] = p < PAIRS ? float(x[from + (TRADITIONAL ? 2 * p : p)]) : 0.0f;
      b[j] = p < PAIRS ? float(x[from + (TRADITIONAL ? 2 * p + 1 : p + PAIRS)]) : 0.0f;
      sum = metal::fma(a[j], a[j], sum);
      sum = metal::fma(b[j], b[j], sum);
    }
    #pragma unroll
    for (int j = 0; j < EACH_REST; j++) {
      const int i = j * 32 + lane;
      rest[j] = i < REST ? float(x[from + ROTATED + i]) : 0.0f;
      sum = metal::fma(rest[j], rest[j], sum);
    }
    const float scale = NORM ? metal::precise::rsqrt(metal::simd_sum(sum) / D + settings[0]) : 1.0f;
    const int weights = layer * D;
    #pragma unroll
    for (int j = 0; j < EACH_PAIR; j++) {
      const int p = j * 32 + lane;
      if (p < PAIRS) {
        const int first = TRADITIONAL ? 2 * p : p, second = TRADITIONAL ? 2 * p + 1 : p + PAIRS;
        if (NORM) {
          a[j] *= scale * (is_head ? float(weight[first]) : float(key_weights[weights + first]));
          b[j] *= scale * (is_head ? float(weight[second]) : float(key_weights[weights + second]));
        }
        const float angle = float(positions[row]) * frequencies[p];
        const float c = metal::precise::cos(angle), s = metal::precise::sin(angle);
        out[to + first] = T(settings[1] * metal::fma(a[j], c, -(b[j] * s)));
        out[to + second] = T(settings[1] * metal::fma(b[j], c, a[j] * s));
      }
    }
    #pragma unroll
    for (int j = 0; j < EACH_REST; j++) {
      const int i = ROTATED + j * 32 + lane;
      if (i < D) {
        if (NORM) rest[j] *= scale * (is_head ? float(weight[i]) : float(key_weights[weights + i]));
        out[to + i] = T(rest[j]);
      }
    }
  }
}
