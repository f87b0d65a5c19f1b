// One threadgroup a row and head, one thread a number of the head: adds up the splits in their order.
// body
const int row = int(threadgroup_position_in_grid.x) / H, head = int(threadgroup_position_in_grid.x) % H;
const int lane = int(thread_index_in_simdgroup), number = int(thread_position_in_threadgroup.x);
const int window = place[1], paths_stride = sizes[1], splits = sizes[2];
int sequence = 0;
while (starts[sequence + 1] <= row) sequence++;
const int start = starts[sequence], count = starts[sequence + 1] - start, length = lengths[sequence];

const int seen =
    row_seen_at<HAS_PATHS, IS_BLOCK>(paths + start * paths_stride, paths_stride, row - start, count, lane);
const int position = position_of<IS_BLOCK>(length, row - start, seen);
const int oldest = IS_BLOCK ? metal::min(position - window + 1, length) : position - window + 1;
const int first = split_of(metal::max(oldest, 0)), last = split_of(IS_BLOCK ? length + count - 1 : position);

const int index = int(threadgroup_position_in_grid.x) * splits;
float highest = HAS_SINKS ? float(sinks[head]) : lowest_score();
for (int split = first + lane; split <= last; split += 32) highest = metal::max(highest, weights[2 * (index + split)]);
highest = metal::simd_max(highest);

float weight = HAS_SINKS ? metal::precise::exp(float(sinks[head]) - highest) : 0.0f;
float sum = 0.0f;
for (int from = first; from <= last; from += 32) {
  const int split = from + lane, count = metal::min(last + 1 - from, 32);
  const float factor = lane < count ? metal::precise::exp(weights[2 * (index + split)] - highest) : 0.0f;
  const float part = lane < count ? weights[2 * (index + split) + 1] : 0.0f;
  for (int i = 0; i < count; i += 8) {
    // Read together, so that one wait serves eight; a factor after the last split is 0.
    float parts[8];
#pragma unroll
    for (int j = 0; j < 8; j++)
      parts[j] = partials[long(index + from + metal::min(i + j, count - 1)) * D + metal::min(number, D - 1)];
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const float scale = metal::simd_shuffle(factor, ushort(i + j));
      weight = metal::fma(scale, metal::simd_shuffle(part, ushort(i + j)), weight);
      sum = metal::fma(scale, parts[j], sum);
    }
  }
}
if (number < D) out[int(threadgroup_position_in_grid.x) * D + number] = T(weight == 0.0f ? 0.0f : sum / weight);
