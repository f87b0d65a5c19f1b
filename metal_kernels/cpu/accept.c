// What a round accepts, and all that the host reads of it.
#include "lanes.h"

static int32_t all(const uint8_t *flags, size_t count) {
  int32_t found = 1;
  for (size_t i = 0; i < count; i++) found &= flags[i] != 0;
  return found;
}

// drafts [count], choices [count + 1]; flags of ``size`` entries, 0 where one is missing; rows [count + 1] or NULL.
// outcome: the drafts, how many are accepted, the choice after them, each flag, and the flag of the accepted rows.
EXPORT void cpu_accept(const int32_t *drafts, size_t count, const int32_t *choices, const uint8_t *flags0, size_t size0,
                       const uint8_t *flags1, size_t size1, const uint8_t *flags2, size_t size2, const uint8_t *flags3,
                       size_t size3, const uint8_t *rows, int32_t *outcome) {
  const uint8_t *flags[] = {flags0, flags1, flags2, flags3};
  size_t sizes[] = {size0, size1, size2, size3}, accepted = 0;
  while (accepted < count && drafts[accepted] == choices[accepted]) accepted++;
  for (size_t i = 0; i < count; i++) *outcome++ = drafts[i];
  *outcome++ = (int32_t)accepted;
  *outcome++ = choices[accepted];
  for (int i = 0; i < 4 && sizes[i]; i++) *outcome++ = all(flags[i], sizes[i]);
  if (rows) *outcome = all(rows, accepted + 1);
}
