// What is read of rows of logits: the best entry, the best k, and the log-probability of one; and rows of which some
// entries are forbidden.
#include "lanes.h"
#include "threads.h"

enum {
  BLOCK = 16 * VL,         // entries whose largest is taken in lanes, before any is looked at by itself
  ENTRIES_EACH = 1 << 15,  // fewer are not worth another thread
};

typedef struct {
  const void *logits;
  const int32_t *tokens;
  const uint32_t *bits;
  void *values;
  float *totals, *picked;
  int32_t *ids;
  uint8_t *finite;
  int type;
  size_t count, k;
} Logits;

static size_t rows_each(const Logits *l) { return ENTRIES_EACH / l->count + 1; }

// Entries i to i + VL - 1 of a row. Places beyond its end repeat its first entry.
INLINE vf entries(int type, const void *row, size_t count, size_t i) {
  vf v = load_some(type, at(type, row, i), count - i);
  if (count - i >= VL) return v;
  return choose((vi)(lane_numbers() < (uint32_t)(count - i)), v, spread(number(type, row, 0)));
}

// A row with NaN has no best entry: -1.
INLINE int32_t best(int type, const void *row, size_t count, uint8_t *finite) {
  vi is_nan = {0}, is_infinite = {0};
  float top = -INFINITY;
  size_t place = 0;
  for (size_t from = 0; from < count; from += BLOCK) {
    vf largest = spread(-INFINITY);
    for (size_t i = from, end = least(from + BLOCK, count); i < end; i += VL) {
      vf v = entries(type, row, count, i);
      is_nan |= v != v;
      is_infinite |= magnitude(v) == INFINITY;
      largest = choose(v > largest, v, largest);
    }
    float here = largest_lane(largest);
    if (here > top) {
      top = here;
      place = from;
    }
  }
  *finite = !any(is_nan | is_infinite);
  if (any(is_nan)) return -1;
  while (number(type, row, place) != top) place++;
  return (int32_t)place;
}

// The best k, the best first and the lower index first among equals. What is not finite counts as -inf. Returns
// whether all entries are finite.
INLINE int best_k(int type, const void *row, size_t count, size_t k, float *values, int32_t *ids) {
  vi is_wrong = {0};
  size_t found = 0;
  for (size_t from = 0; from < count; from += BLOCK) {
    size_t end = least(from + BLOCK, count);
    vf largest = spread(-INFINITY);
    for (size_t i = from; i < end; i += VL) {
      vf v = entries(type, row, count, i);
      vi is_finite = magnitude(v) < INFINITY;
      is_wrong |= ~is_finite;
      largest = choose(is_finite & (v > largest), v, largest);
    }
    if (found == k && largest_lane(largest) <= values[k - 1]) continue;
    for (size_t i = from; i < end; i++) {
      float v = number(type, row, i);
      if (!(fabsf(v) < INFINITY)) v = -INFINITY;
      if (found == k && v <= values[k - 1]) continue;
      size_t place = found < k ? found++ : k - 1;
      for (; place > 0 && v > values[place - 1]; place--) {
        values[place] = values[place - 1];
        ids[place] = ids[place - 1];
      }
      values[place] = v;
      ids[place] = (int32_t)i;
    }
  }
  return !any(is_wrong);
}

// The largest entry, and log(sum of exp(entry - largest)). NaN and infinities give what is not finite.
INLINE float spread_of(int type, const void *row, size_t count, float *largest) {
  vf top = spread(-INFINITY), sum = {0};
  for (size_t i = 0; i < count; i += VL) {
    vf v = entries(type, row, count, i);
    top = choose(v > top, v, top);
  }
  *largest = largest_lane(top);
  // Block by block: a long sum of small numbers would lose their low bits.
  for (size_t from = 0; from < count; from += BLOCK) {
    vf part = {0};
    for (size_t i = from, end = least(from + BLOCK, count); i < end; i += VL) {
      vf x = entries(type, row, count, i) - *largest;
      x = choose(x < -87.0f, (vf){0}, exponential(x));
      if (count - i < VL) x = choose((vi)(lane_numbers() < (uint32_t)(count - i)), x, (vf){0});
      part += x;
    }
    sum += part;
  }
  return logf(total(sum));
}

// Entries whose bit is 0 become minus infinity.
static void forbid(int type, void *row, size_t count, const uint32_t *bits) {
  uint32_t *wide = row, infinite = 0xff800000u;
  uint16_t *narrow = row, half_infinite = type == BF16 ? 0xff80 : 0xfc00;
  for (size_t from = 0; from < count; from += 32) {
    uint32_t word = bits[from / 32];
    size_t entries_here = least(count - from, 32);
    if (word == 0xffffffffu) continue;
    if (type == F32)
      for (size_t i = 0; i < entries_here; i++) wide[from + i] = word >> i & 1 ? wide[from + i] : infinite;
    else
      for (size_t i = 0; i < entries_here; i++) narrow[from + i] = word >> i & 1 ? narrow[from + i] : half_infinite;
  }
}

static void mask_part(const void *what, size_t first, size_t last, int thread) {
  const Logits *l = what;
  (void)thread;
  for (size_t r = first; r < last; r++) {
    void *row = (void *)at(l->type, l->values, r * l->count);
    memcpy(row, at(l->type, l->logits, r * l->count), l->count * size_of(l->type));
    forbid(l->type, row, l->count, l->bits + r * ((l->count + 31) / 32));
  }
}

static void argmax_part(const void *what, size_t first, size_t last, int thread) {
  const Logits *l = what;
  (void)thread;
  for (size_t r = first; r < last; r++) {
    const void *row = at(l->type, l->logits, r * l->count);
    switch (l->type) {
      case BF16: l->ids[r] = best(BF16, row, l->count, l->finite + r); break;
      case F16: l->ids[r] = best(F16, row, l->count, l->finite + r); break;
      default: l->ids[r] = best(F32, row, l->count, l->finite + r);
    }
  }
}

static void topk_part(const void *what, size_t first, size_t last, int thread) {
  const Logits *l = what;
  float *values = scratch(thread, l->k);
  for (size_t r = first; r < last; r++) {
    const void *row = at(l->type, l->logits, r * l->count);
    int32_t *ids = l->ids + r * l->k;
    int finite;
    switch (l->type) {
      case BF16: finite = best_k(BF16, row, l->count, l->k, values, ids); break;
      case F16: finite = best_k(F16, row, l->count, l->k, values, ids); break;
      default: finite = best_k(F32, row, l->count, l->k, values, ids);
    }
    for (size_t i = 0; i < l->k; i++)
      memcpy((void *)at(l->type, l->values, r * l->k + i), at(l->type, row, (size_t)ids[i]), size_of(l->type));
    // One flag for all rows, which several threads may lower.
    if (!finite) __atomic_store_n(l->finite, 0, __ATOMIC_RELAXED);
  }
}

static void logprob_part(const void *what, size_t first, size_t last, int thread) {
  const Logits *l = what;
  (void)thread;
  for (size_t r = first; r < last; r++) {
    const void *row = at(l->type, l->logits, r * l->count);
    float largest, above;
    switch (l->type) {
      case BF16: above = spread_of(BF16, row, l->count, &largest); break;
      case F16: above = spread_of(F16, row, l->count, &largest); break;
      default: above = spread_of(F32, row, l->count, &largest);
    }
    int32_t token = l->tokens[r];
    int is_known = token >= 0 && (size_t)token < l->count;
    l->totals[r] = largest + above;
    l->picked[r] = is_known ? number(l->type, row, (size_t)token) - largest - above : NAN;
  }
}

EXPORT void cpu_argmax(const void *logits, int type, size_t rows, size_t count, int32_t *choices, uint8_t *finite) {
  begin_call();
  Logits l = {.logits = logits, .type = type, .count = count, .ids = choices, .finite = finite};
  run_parts(argmax_part, &l, rows, rows_each(&l));
  end_call();
}

// finite: one flag for all rows.
EXPORT void cpu_topk(const void *logits, int type, size_t rows, size_t count, size_t k, void *values, int32_t *ids,
                     uint8_t *finite) {
  begin_call();
  Logits l = {.logits = logits, .type = type, .count = count, .k = k, .values = values, .ids = ids, .finite = finite};
  *finite = 1;
  run_parts(topk_part, &l, rows, rows_each(&l));
  end_call();
}

EXPORT void cpu_logprob(const void *logits, int type, const int32_t *tokens, size_t rows, size_t count, float *totals,
                        float *picked) {
  begin_call();
  Logits l = {.logits = logits, .type = type, .count = count, .tokens = tokens, .totals = totals, .picked = picked};
  run_parts(logprob_part, &l, rows, rows_each(&l));
  end_call();
}

EXPORT void cpu_mask(const void *logits, int type, const uint32_t *bits, size_t rows, size_t count, void *masked) {
  begin_call();
  Logits l = {.logits = logits, .type = type, .count = count, .bits = bits, .values = masked};
  run_parts(mask_part, &l, rows, rows_each(&l));
  end_call();
}
