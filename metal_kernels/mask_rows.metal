// body
// A thread copies EACH entries of a row, or minus infinity where an entry's bit is 0. The bits of 32 entries are a word,
// the first entry's the lowest.
const int row = threadgroup_position_in_grid.y;
#pragma unroll
for (int j = 0; j < EACH; j++) {
  const int e = (int(threadgroup_position_in_grid.x) * EACH + j) * THREADS + int(thread_index_in_threadgroup);
  if (e < COUNT) {
    const int64_t place = int64_t(row) * COUNT + e;
    const bool is_allowed = (bits[int64_t(row) * WORDS + e / 32] >> (e % 32)) & 1u;
    masked[place] = is_allowed ? logits[place] : T(as_type<float>(0xff800000u));
  }
}
