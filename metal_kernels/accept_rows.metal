// body
// One simdgroup. K drafts, K + 1 choices; SIZE0 .. SIZE3 entries of the flags, 0 where a flag is not there, FLAGS of
// which are; with HAS_ROWS a flag of each row, of which those of the anchor and of accepted drafts count.
const int lane = thread_index_in_threadgroup;
int accepted = K;
for (int i = lane; i < K; i += 32) {
  outcome[i] = drafts[i];
  if (drafts[i] != choices[i]) accepted = metal::min(accepted, i);
}
const int count = metal::simd_min(accepted);
if (lane == 0) {
  outcome[K] = count;
  outcome[K + 1] = choices[count];
}
bool finite0 = true, finite1 = true, finite2 = true, finite3 = true;
for (int i = lane; i < SIZE0; i += 32) finite0 = finite0 && flags0[i];
for (int i = lane; i < SIZE1; i += 32) finite1 = finite1 && flags1[i];
for (int i = lane; i < SIZE2; i += 32) finite2 = finite2 && flags2[i];
for (int i = lane; i < SIZE3; i += 32) finite3 = finite3 && flags3[i];
finite0 = metal::simd_all(finite0);
finite1 = metal::simd_all(finite1);
finite2 = metal::simd_all(finite2);
finite3 = metal::simd_all(finite3);
if (lane == 0) {
  if (SIZE0 > 0) outcome[K + 2] = finite0;
  if (SIZE1 > 0) outcome[K + 3] = finite1;
  if (SIZE2 > 0) outcome[K + 4] = finite2;
  if (SIZE3 > 0) outcome[K + 5] = finite3;
}
if (HAS_ROWS) {
  bool finite = true;
  for (int i = lane; i <= count; i += 32) finite = finite && rows[i];
  finite = metal::simd_all(finite);
  if (lane == 0) outcome[K + 2 + FLAGS] = finite;
}
