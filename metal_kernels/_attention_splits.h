// Positions are cut into splits: 32 of 64 positions, 32 of 128, 32 of 256, then all of 512. Where a split begins
// depends on nothing but its number, so a row is reduced in the same pieces however much is cached.
METAL_FUNC int split_begin(int split) {
  int level = metal::min(split / 32, 3);
  return 64 * (32 * ((1 << level) - 1) + (split - 32 * level) * (1 << level));
}

METAL_FUNC int split_of(int position) {
  int unit = position / 64;
  int level = unit < 32 ? 0 : unit < 96 ? 1 : unit < 224 ? 2 : 3;
  return 32 * level + (unit - 32 * ((1 << level) - 1)) / (1 << level);
}

METAL_FUNC float lowest_score() { return -3.40282347e38f; }

// Lane d of a simdgroup gets the row, counted from the sequence's first, that its row `row` sees d positions
// after the end of what is cached, or -1. `paths` is indexed from the sequence's first row on.
template <bool HAS_PATHS, bool IS_BLOCK, typename P>
METAL_FUNC int row_seen_at(P paths, int stride, int row, int count, int lane) {
  if (lane >= count) return -1;
  if (HAS_PATHS) return paths[row * stride + lane];
  return IS_BLOCK || lane <= row ? lane : -1;
}

// The position of a row, from what `row_seen_at` gave to the lanes.
template <bool IS_BLOCK>
METAL_FUNC int position_of(int length, int row, int seen) {
  return length + (IS_BLOCK ? row : metal::simd_sum(seen >= 0 ? 1 : 0) - 1);
}
