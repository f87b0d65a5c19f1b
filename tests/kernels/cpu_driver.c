// Calls every function of the CPU library over random arrays of their exact sizes, and compares a row that was computed
// among others with the same row alone, bit by bit; from two callers, and after a fork. Prints a sum of what each
// operation gave, by type, so that builds for different CPUs can be compared.
//
// driver CASES [--one-caller]
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

void cpu_threads(int);
void cpu_linear(const void *, int, size_t, const void *, const void *, const void *, int, int, int, size_t, size_t,
                const void *, int, const void *, int, void *);
void cpu_gather(const void *, int, size_t, size_t, const int32_t *, const void *, const void *, const void *, int, int,
                int, size_t, size_t, int, void *);
void cpu_rms_norm(const void *, int, const void *, int, size_t, size_t, float, void *);
void cpu_norm_rope(const void *, int, const void *, const void *, int, const int32_t *, const float *, void *, void *,
                   size_t, size_t, size_t, size_t, size_t, size_t, int, int, float, float);
void cpu_attention(const void *, const void *, const void *, int, const void *, size_t, const int32_t *,
                   const int32_t *, const int32_t *, const int32_t *, const void *, int, void *, size_t, size_t, size_t,
                   size_t, size_t, size_t, size_t, size_t, size_t, size_t, int, float, float);
void cpu_argmax(const void *, int, size_t, size_t, int32_t *, uint8_t *);
void cpu_topk(const void *, int, size_t, size_t, size_t, void *, int32_t *, uint8_t *);
void cpu_logprob(const void *, int, const int32_t *, size_t, size_t, float *, float *);
void cpu_mask(const void *, int, const uint32_t *, size_t, size_t, void *);
void cpu_accept(const int32_t *, size_t, const int32_t *, const uint8_t *, size_t, const uint8_t *, size_t,
                const uint8_t *, size_t, const uint8_t *, size_t, const uint8_t *, int32_t *);
void cpu_dynamic_conv(const void *, int, const void *, int, const void *, int, const void *, size_t, size_t, size_t,
                      size_t, size_t, size_t, size_t, void *);
void cpu_causal_conv(const void *, const int32_t *, const int32_t *, const void *, const int32_t *, const int32_t *,
                     int, const void *, const int32_t *, const void *, int, size_t, size_t, size_t, size_t, size_t,
                     size_t, size_t, size_t, void *, void *, void *, void *, int);
void cpu_gated_delta(const void *, const void *, const void *, const void *, int, const void *, int, const int32_t *,
                     const int32_t *, const void *, const void *, const void *, int, const void *, int,
                     const int32_t *, const int32_t *, int, const void *, int, const void *, int, const float *,
                     const int32_t *, size_t, size_t, size_t, size_t, size_t, size_t, size_t, size_t, size_t, void *,
                     float *, int);

enum { BF16, F16, F32, TYPES, MOST_ARRAYS = 64, OPERATIONS = 11 };
static const char *const type_names[] = {"bfloat16", "float16", "float32"};

static _Thread_local uint64_t seed;
static _Thread_local void *arrays[MOST_ARRAYS];
static _Thread_local int array_count;
static _Thread_local const char *operation;
static _Thread_local double *sum;

static size_t below(size_t count) {
  seed ^= seed << 13;
  seed ^= seed >> 7;
  seed ^= seed << 17;
  return (size_t)((seed * 0x2545f4914f6cdd1dull) >> 33) % count;
}

static size_t size_of(int type) { return type == F32 ? 4 : 2; }

static void *shifted(const void *numbers, int type, size_t count) {
  return (char *)(uintptr_t)numbers + count * size_of(type);
}

// Freed with all others after the case.
static void *memory(size_t size) {
  void *found = calloc(size ? size : 1, 1);
  if (!found || array_count == MOST_ARRAYS) abort();
  return arrays[array_count++] = found;
}

static void put(void *numbers, int type, size_t index, float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if (type == F32) memcpy((char *)numbers + index * 4, &bits, 4);
  else {
    // Values have few digits and are in the range of both types.
    uint32_t exponent = (bits >> 23 & 255) - 112;
    uint16_t f16 = (uint16_t)((bits >> 16 & 0x8000) | (bits << 1 ? exponent << 10 | (bits >> 13 & 1023) : 0));
    ((uint16_t *)numbers)[index] = type == BF16 ? (uint16_t)(bits >> 16) : f16;
  }
}

static float get(const void *numbers, int type, size_t index) {
  uint32_t bits;
  float value;
  if (type == F32) return ((const float *)numbers)[index];
  uint16_t half = ((const uint16_t *)numbers)[index];
  if (type == F16) {
    int exponent = half >> 10 & 31;
    float size = ldexpf((float)(half & 1023) + (exponent ? 1024.0f : 0.0f), (exponent ? exponent : 1) - 25);
    return half & 0x8000 ? -size : size;
  }
  bits = (uint32_t)half << 16;
  memcpy(&value, &bits, 4);
  return value;
}

// Numbers of seven digits between -2 and 2, times a power of two.
static void *numbers(size_t count, int type, int power) {
  void *found = memory(count * size_of(type));
  for (size_t i = 0; i < count; i++) put(found, type, i, ldexpf((float)below(255) - 127.0f, power - 6));
  return found;
}

static int32_t *ints(size_t count, size_t end) {
  int32_t *found = memory(count * sizeof *found);
  for (size_t i = 0; i < count; i++) found[i] = (int32_t)below(end);
  return found;
}

static void expect(const void *found, const void *alone, size_t size, size_t row) {
  if (!memcmp(found, alone, size)) return;
  printf("%s: row %zu of a pass differs from the row alone\n", operation, row);
  fflush(stdout);
  _exit(1);
}

static void add(const void *found, int type, size_t count) {
  for (size_t i = 0; i < count; i++) *sum += fabs((double)get(found, type, i));
}

typedef struct {
  void *weight, *scales, *biases;
  int bits, group;
  size_t depth, outputs;
} Weights;

static Weights weights(int type, size_t experts, size_t outputs) {
  static const int all_bits[] = {0, 2, 3, 4, 5, 6, 8};
  Weights w = {.bits = all_bits[below(7)], .outputs = outputs};
  if (!w.bits) {
    w.depth = 1 + below(150);
    w.weight = numbers(experts * outputs * w.depth, type, -4);
    return w;
  }
  w.group = below(2) ? 32 : 64;
  w.depth = (size_t)w.group * (1 + below(3));
  size_t size = experts * outputs * w.depth * (size_t)w.bits / 8;
  uint8_t *packed = w.weight = memory(size);
  for (size_t i = 0; i < size; i++) packed[i] = (uint8_t)below(256);
  w.scales = numbers(experts * outputs * w.depth / (size_t)w.group, type, -8);
  w.biases = numbers(experts * outputs * w.depth / (size_t)w.group, type, -4);
  return w;
}

static void linear(int type) {
  int gated = (int)below(2);
  size_t rows = 1 + below(below(4) ? 16 : 40), width = 1 + below(30), r = below(rows);
  int scales_type = (int)below(TYPES);
  Weights w = weights(type, 1, width * (1 + (size_t)gated));
  if (w.bits) {
    w.scales = numbers(w.outputs * w.depth / (size_t)w.group, scales_type, -8);
    w.biases = numbers(w.outputs * w.depth / (size_t)w.group, scales_type, -4);
  } else scales_type = type;
  void *x = numbers(rows * w.depth, type, -2), *bias = below(2) ? numbers(w.outputs, type, 0) : NULL;
  void *residual = below(2) ? numbers(rows * width, type, 0) : NULL, *out = memory(rows * width * size_of(type));
  void *alone = memory(width * size_of(type));
  cpu_linear(x, type, rows, w.weight, w.scales, w.biases, w.bits, scales_type, w.group, w.depth, w.outputs, bias, type,
             residual, gated, out);
  cpu_linear(shifted(x, type, r * w.depth), type, 1, w.weight, w.scales, w.biases, w.bits, scales_type, w.group,
             w.depth, w.outputs, bias, type, residual ? shifted(residual, type, r * width) : NULL, gated, alone);
  expect(shifted(out, type, r * width), alone, width * size_of(type), r);
  add(out, type, rows * width);
}

static void gather(int type) {
  enum { EXPERTS = 4, EACH = 2 };
  int gated = (int)below(2);
  size_t rows = 1 + below(16), width = 1 + below(30), r = below(rows), size = EACH * width * size_of(type);
  Weights w = weights(type, EXPERTS, width * (1 + (size_t)gated));
  void *x = numbers(rows * w.depth, type, -2), *out = memory(rows * size), *alone = memory(size);
  int32_t *experts = ints(rows * EACH, EXPERTS);
  cpu_gather(x, type, rows * EACH, EACH, experts, w.weight, w.scales, w.biases, w.bits, type, w.group, w.depth,
             w.outputs, gated, out);
  cpu_gather(shifted(x, type, r * w.depth), type, EACH, EACH, experts + r * EACH, w.weight, w.scales, w.biases, w.bits,
             type, w.group, w.depth, w.outputs, gated, alone);
  expect((char *)out + r * size, alone, size, r);
  add(out, type, rows * EACH * width);
}

static void rms_norm(int type) {
  size_t rows = 1 + below(40), width = 1 + below(200), r = below(rows), size = width * size_of(type);
  void *x = numbers(rows * width, type, 0), *weight = numbers(width, type, 0), *out = memory(rows * size);
  void *alone = memory(size);
  cpu_rms_norm(x, type, weight, type, rows, width, 1e-6f, out);
  cpu_rms_norm(shifted(x, type, r * width), type, weight, type, 1, width, 1e-6f, alone);
  expect((char *)out + r * size, alone, size, r);
  add(out, type, rows * width);
}

static void norm_rope(int type) {
  int gated = (int)below(2), traditional = (int)below(2);
  size_t rows = 1 + below(16), r = below(rows), heads = 1 + below(4), kv = 1 + below(2), dim = 2 + 2 * below(40);
  size_t width = (heads * (1 + (size_t)gated) + 2 * kv) * dim, rotated = 2 + 2 * below(dim / 2);
  size_t size = size_of(type), query = heads * dim * size, side = kv * dim * size;
  void *x = numbers(rows * width, type, 0), *of_query = below(2) ? numbers(dim, type, 0) : NULL;
  void *of_key = of_query ? numbers(dim, type, 0) : NULL;
  float *frequencies = numbers(rotated / 2, F32, 0);
  int32_t *positions = ints(rows, 1000);
  char *queries = memory(rows * query), *keys = memory(2 * rows * side);
  char *query_alone = memory(query), *key_alone = memory(2 * side);
  cpu_norm_rope(x, type, of_query, of_key, type, positions, frequencies, queries, keys, rows, heads, kv, 1, dim,
                rotated, traditional, gated, 1e-6f, 1.0f);
  cpu_norm_rope(shifted(x, type, r * width), type, of_query, of_key, type, positions + r, frequencies, query_alone,
                key_alone, 1, heads, kv, 1, dim, rotated, traditional, gated, 1e-6f, 1.0f);
  expect(queries + r * query, query_alone, query, r);
  expect(keys + r * side, key_alone, side, r);
  expect(keys + (rows + r) * side, key_alone + side, side, r);
  add(queries, type, rows * heads * dim);
  add(keys, type, 2 * rows * kv * dim);
}

static void attention(int type) {
  enum { LAYERS = 2, SLOTS = 4 };
  size_t rows = 1 + below(16), r = below(rows), kv = 1 + below(2), heads = kv * (1 + below(5)), dim = 1 + below(70);
  size_t length = below(40), pages_each = (length + rows + SLOTS - 1) / SLOTS, side = SLOTS * kv * dim, step = kv * dim;
  size_t size = heads * dim * size_of(type), window = below(2) ? 1 + below(20) : 0;
  float softcap = below(2) ? 20.0f : 0.0f;
  void *queries = numbers(rows * heads * dim, type, 0), *keys = numbers(rows * step, type, 0);
  void *values = numbers(rows * step, type, 0), *sinks = below(2) ? numbers(heads, type, 0) : NULL;
  void *pool = numbers(pages_each * LAYERS * 2 * side, type, 0);
  char *out = memory(rows * size), *alone = memory(size), *tree = memory(rows * size);
  int32_t *pages = memory(pages_each * sizeof *pages), *paths = memory(rows * rows * sizeof *paths);
  int32_t starts[] = {0, (int32_t)rows}, one[] = {0, 1}, lengths[] = {(int32_t)length};
  int32_t longer[] = {(int32_t)(length + r)};
  for (size_t p = 0; p < pages_each; p++) pages[p] = (int32_t)(pages_each - 1 - p);
  for (size_t i = 0; i < rows; i++)
    for (size_t j = 0; j < rows; j++) paths[i * rows + j] = j <= i ? (int32_t)j : -1;
  for (size_t i = 0; i < rows; i++) {
    size_t p = length + i, place = (size_t)pages[p / SLOTS] * LAYERS * 2 * side + 2 * side + p % SLOTS * step;
    memcpy(shifted(pool, type, place), shifted(keys, type, i * step), step * size_of(type));
    memcpy(shifted(pool, type, place + side), shifted(values, type, i * step), step * size_of(type));
  }
#define ATTEND(FROM, LENGTHS, STARTS, PATHS, BLOCK, COUNT, OUT)                                                     \
  cpu_attention(shifted(queries, type, (FROM) * heads * dim), shifted(keys, type, (FROM) * step),                   \
                shifted(values, type, (FROM) * step), type, pool, 2 * side, pages, LENGTHS, STARTS, PATHS, sinks,   \
                type, OUT, COUNT, heads, kv, dim, 1, pages_each, SLOTS, LAYERS * 2 * side, side, window, BLOCK,     \
                0.1f, softcap)
  ATTEND(0, lengths, starts, NULL, 0, rows, out);
  ATTEND(r, longer, one, NULL, 0, 1, alone);
  ATTEND(0, lengths, starts, paths, 0, rows, tree);
  expect(out + r * size, alone, size, r);
  expect(out, tree, rows * size, rows);  // a tree without branches
  add(out, type, rows * heads * dim);
  ATTEND(0, lengths, starts, NULL, 1, rows, tree);  // a block: rows see later ones
}

static void logits(int type) {
  size_t rows = 1 + below(9), count = 1 + below(700), r = below(rows), k = 1 + below(count < 16 ? count : 16);
  void *x = numbers(rows * count, type, 2), *row = shifted(x, type, r * count);
  if (!below(8)) memset(shifted(x, type, below(rows * count)), 0xff, size_of(type));  // NaN
  int32_t *tokens = ints(rows, count), *choices = ints(rows, 1), *ids = ints(rows * k, 1), *alone_ids = ints(k, 1);
  uint8_t *finite = memory(rows), alone_finite;
  int32_t choice;
  cpu_argmax(x, type, rows, count, choices, finite);
  cpu_argmax(row, type, 1, count, &choice, &alone_finite);
  expect(choices + r, &choice, sizeof choice, r);
  expect(finite + r, &alone_finite, 1, r);
  void *values = memory(rows * k * size_of(type)), *alone = memory(k * size_of(type));
  cpu_topk(x, type, rows, count, k, values, ids, &alone_finite);
  cpu_topk(row, type, 1, count, k, alone, alone_ids, &alone_finite);
  expect(ids + r * k, alone_ids, k * sizeof *ids, r);
  expect(shifted(values, type, r * k), alone, k * size_of(type), r);
  if (alone_finite) expect(ids + r * k, &choice, sizeof choice, r);  // the best of the best
  float *totals = memory(rows * 4), *picked = memory(rows * 4), alone_total, alone_picked;
  cpu_logprob(x, type, tokens, rows, count, totals, picked);
  cpu_logprob(row, type, tokens + r, 1, count, &alone_total, &alone_picked);
  expect(totals + r, &alone_total, 4, r);
  expect(picked + r, &alone_picked, 4, r);
  if (finite[r]) *sum += choice + alone_ids[k - 1] + fabs((double)alone_total) + fabs((double)alone_picked);
}

static void mask(int type) {
  size_t rows = 1 + below(9), count = 1 + below(700), words = (count + 31) / 32, r = below(rows);
  void *x = numbers(rows * count, type, 2), *masked = memory(rows * count * size_of(type));
  void *alone = memory(count * size_of(type)), *low = memory(4);
  uint32_t *bits = memory(rows * words * sizeof *bits), infinite = type == F16 ? 0xfc00 : 0xff80;
  if (type == F32) infinite <<= 16;
  memcpy(low, &infinite, 4);
  for (size_t i = 0; i < rows * words; i++) bits[i] = below(3) ? (uint32_t)below(1u << 31) * 2 + 1 : ~0u;
  cpu_mask(x, type, bits, rows, count, masked);
  cpu_mask(shifted(x, type, r * count), type, bits + r * words, 1, count, alone);
  expect(shifted(masked, type, r * count), alone, count * size_of(type), r);
  for (size_t i = 0; i < count; i++) {
    int is_allowed = bits[r * words + i / 32] >> i % 32 & 1;
    expect(shifted(alone, type, i), is_allowed ? shifted(x, type, r * count + i) : low, size_of(type), r);
    *sum += is_allowed;
  }
}

static void accept(int type) {
  size_t k = below(16), sizes[4] = {below(3), 0, 0, 0}, agreed = 0;
  (void)type;
  for (int i = 1; i < 4; i++) sizes[i] = sizes[i - 1] ? below(3) : 0;
  int32_t *drafts = ints(k, 2), *choices = ints(k + 1, 2), *outcome = memory((k + 7) * sizeof *outcome);
  uint8_t *flags[4], *rows = memory(k + 1);
  for (int i = 0; i < 4; i++) {
    flags[i] = memory(sizes[i]);
    memset(flags[i], 1, sizes[i]);
  }
  memset(rows, 1, k + 1);
  cpu_accept(drafts, k, choices, flags[0], sizes[0], flags[1], sizes[1], flags[2], sizes[2], flags[3], sizes[3], rows,
             outcome);
  while (agreed < k && drafts[agreed] == choices[agreed]) agreed++;
  int32_t expected[] = {(int32_t)agreed, choices[agreed]};
  expect(outcome, drafts, k * sizeof *drafts, 0);
  expect(outcome + k, expected, sizeof expected, 0);
  *sum += (double)agreed;
}

static void dynamic_conv(int type) {
  size_t block = 1 + below(16), blocks = 1 + below(2), groups = 1 + below(4), width = groups * (1 + below(20));
  size_t taps = 1 + below(4), sides = 1 + below(2), side = below(sides), rows = blocks * block, r = below(block);
  size_t first = below(blocks) * block, size = width * size_of(type), own = sides * taps * groups;
  void *x = numbers(rows * width, type, 0), *base = numbers(sides * taps * width, type, 0);
  void *dynamic = numbers(rows * own, type, 0), *residual = below(2) ? numbers(rows * width, type, 0) : NULL;
  char *out = memory(rows * size), *alone = memory((r + 1) * size);
  cpu_dynamic_conv(x, type, base, type, dynamic, type, residual, rows, block, width, taps, groups, sides, side, out);
  // A shorter block that ends with the row.
  cpu_dynamic_conv(shifted(x, type, first * width), type, base, type, shifted(dynamic, type, first * own), type,
                   residual ? shifted(residual, type, first * width) : NULL, r + 1, r + 1, width, taps, groups, sides,
                   side, alone);
  expect(out + (first + r) * size, alone + r * size, size, r);
  add(out, type, rows * width);
}

// Rows of two sequences, and a row of one of them.
typedef struct {
  int32_t first[2], count[2], slots[2];
  size_t rows, s, r;
  int32_t row[1], one[1], zero[1], old_first[1], old_count[1], slot[1];
} Sequences;

static Sequences sequences(void) {
  Sequences q = {.slots = {1, 0}, .one = {1}};
  q.count[0] = 1 + (int32_t)below(9);
  q.count[1] = 1 + (int32_t)below(9);
  q.first[1] = q.count[0];
  q.rows = (size_t)(q.count[0] + q.count[1]);
  q.s = below(2);
  q.r = below((size_t)q.count[q.s]);
  q.row[0] = q.old_first[0] = q.first[q.s];
  q.row[0] += (int32_t)q.r;
  q.old_count[0] = (int32_t)q.r;
  q.slot[0] = q.slots[q.s];
  return q;
}

static void causal_conv(int type) {
  Sequences s = sequences();
  size_t key_heads = 1 + below(2), key = 32 * (1 + below(2)), value_heads = key_heads * (1 + below(2));
  size_t value = 32 * (1 + below(2)), taps = 2 + below(4), channels = 2 * key_heads * key + value_heads * value;
  size_t column = below(4), width = channels + column + below(3), keys = key_heads * key, values = value_heads * value;
  size_t kept = (taps - 1) * channels * size_of(type), row = (size_t)s.row[0];
  int weight_type = (int)below(TYPES);
  void *x = numbers(s.rows * width, type, 0), *state = numbers(2 * (taps - 1) * channels, type, 0);
  void *weight = numbers(channels * taps, weight_type, -1);
  void *q = memory(s.rows * keys * size_of(type)), *k = memory(s.rows * keys * size_of(type));
  void *v = memory(s.rows * values * size_of(type)), *q1 = memory(keys * size_of(type));
  void *k1 = memory(keys * size_of(type)), *v1 = memory(values * size_of(type)), *advanced = memory(kept);
  void *replayed = memory(kept);
  cpu_causal_conv(x, s.first, s.count, NULL, NULL, NULL, type, state, s.slots, weight, weight_type, width, column, taps,
                  2, key_heads, key, value_heads, value, q, k, v, NULL, 0);
  cpu_causal_conv(shifted(x, type, row * width), s.zero, s.one, x, s.old_first, s.old_count, type, state, s.slot,
                  weight, weight_type, width, column, taps, 1, key_heads, key, value_heads, value, q1, k1, v1,
                  advanced, 0);
  cpu_causal_conv(NULL, NULL, NULL, x, s.old_first, s.old_count, type, state, s.slot, NULL, 0, width, column, taps, 1,
                  key_heads, key, value_heads, value, NULL, NULL, NULL, replayed, 0);
  expect(advanced, replayed, kept, row);
  cpu_causal_conv(shifted(x, type, row * width), s.zero, s.one, x, s.old_first, s.old_count, type, state, s.slot,
                  weight, weight_type, width, column, taps, 1, key_heads, key, value_heads, value, q1, k1, v1,
                  advanced, 1);
  s.old_count[0]++;
  cpu_causal_conv(NULL, NULL, NULL, x, s.old_first, s.old_count, type, state, s.slot, NULL, 0, width, column, taps, 1,
                  key_heads, key, value_heads, value, NULL, NULL, NULL, replayed, 0);
  expect(shifted(q, type, row * keys), q1, keys * size_of(type), row);
  expect(shifted(k, type, row * keys), k1, keys * size_of(type), row);
  expect(shifted(v, type, row * values), v1, values * size_of(type), row);
  expect(advanced, replayed, kept, row);
  add(q, type, s.rows * keys);
  add(v, type, s.rows * values);
}

static void gated_delta(int type) {
  Sequences s = sequences();
  size_t key_heads = 1 + below(2), key = 32 * (1 + below(2)), heads = key_heads * (1 + below(2));
  size_t value = 32 * (1 + below(2)), keys = key_heads * key, values = heads * value, each = heads * value * key;
  size_t g_column = below(4), g_width = g_column + heads, beta_column = below(4), beta_width = beta_column + heads;
  size_t row = (size_t)s.row[0];
  int g_type = (int)below(TYPES), beta_type = (int)below(TYPES);
  void *q = numbers(s.rows * keys, type, -4), *k = numbers(s.rows * keys, type, -4);
  void *v = numbers(s.rows * values, type, 0), *g = numbers(s.rows * g_width, g_type, 0);
  void *beta = numbers(s.rows * beta_width, beta_type, 0), *a_log = numbers(heads, F32, 0);
  void *dt_bias = numbers(heads, type, 0);
  float *state = numbers(2 * each, F32, -2), *advanced = memory(each * 4), *replayed = memory(each * 4);
  void *out = memory(s.rows * values * size_of(type)), *alone = memory(values * size_of(type));
  cpu_gated_delta(q, k, v, g, g_type, beta, beta_type, s.first, s.count, NULL, NULL, NULL, 0, NULL, 0, NULL, NULL, type,
                  a_log, F32, dt_bias, type, state, s.slots, 2, key_heads, key, heads, value, g_width, g_column,
                  beta_width, beta_column, out, NULL, 0);
  cpu_gated_delta(shifted(q, type, row * keys), shifted(k, type, row * keys), shifted(v, type, row * values),
                  shifted(g, g_type, row * g_width), g_type, shifted(beta, beta_type, row * beta_width), beta_type,
                  s.zero, s.one, k, v, g, g_type, beta, beta_type, s.old_first, s.old_count, type, a_log, F32, dt_bias,
                  type, state, s.slot, 1, key_heads, key, heads, value, g_width, g_column, beta_width, beta_column,
                  alone, advanced, 0);
  cpu_gated_delta(NULL, NULL, NULL, NULL, 0, NULL, 0, NULL, NULL, k, v, g, g_type, beta, beta_type, s.old_first,
                  s.old_count, type, a_log, F32, dt_bias, type, state, s.slot, 1, key_heads, key, heads, value,
                  g_width, g_column, beta_width, beta_column, NULL, replayed, 0);
  expect(advanced, replayed, each * 4, row);
  cpu_gated_delta(shifted(q, type, row * keys), shifted(k, type, row * keys), shifted(v, type, row * values),
                  shifted(g, g_type, row * g_width), g_type, shifted(beta, beta_type, row * beta_width), beta_type,
                  s.zero, s.one, k, v, g, g_type, beta, beta_type, s.old_first, s.old_count, type, a_log, F32, dt_bias,
                  type, state, s.slot, 1, key_heads, key, heads, value, g_width, g_column, beta_width, beta_column,
                  alone, advanced, 1);
  s.old_count[0]++;
  cpu_gated_delta(NULL, NULL, NULL, NULL, 0, NULL, 0, NULL, NULL, k, v, g, g_type, beta, beta_type, s.old_first,
                  s.old_count, type, a_log, F32, dt_bias, type, state, s.slot, 1, key_heads, key, heads, value,
                  g_width, g_column, beta_width, beta_column, NULL, replayed, 0);
  expect(shifted(out, type, row * values), alone, values * size_of(type), row);
  expect(advanced, replayed, each * 4, row);
  add(out, type, s.rows * values);
  add(replayed, F32, each);
}

static const struct {
  const char *name;
  void (*run)(int type);
} operations[OPERATIONS] = {
    {"linear", linear},           {"gather", gather},
    {"rms_norm", rms_norm},       {"norm_rope", norm_rope},
    {"attention", attention},     {"logits", logits},
    {"mask", mask},               {"accept", accept},
    {"dynamic_conv", dynamic_conv}, {"causal_conv", causal_conv},
    {"gated_delta", gated_delta},
};

typedef struct {
  size_t cases;
  double sums[OPERATIONS][TYPES];
} Run;

// The case with a number is the same in every run and on every machine.
static void *all_cases(void *what) {
  Run *run = what;
  for (size_t i = 0; i < run->cases; i++) {
    size_t which = i % (OPERATIONS), type = i / (OPERATIONS) % TYPES;
    seed = (i + 1) * 0x9e3779b97f4a7c15ull;
    below(1);
    operation = operations[which].name;
    sum = &run->sums[which][type];
    if (i % 64 == 0) cpu_threads(1 + (int)(i / 64 % 3));
    operations[which].run((int)type);
    while (array_count) free(arrays[--array_count]);
  }
  return NULL;
}

int main(int count, char **words) {
  static Run mine, others, childs;
  mine.cases = others.cases = childs.cases = count > 1 ? (size_t)atol(words[1]) : 3000;
  int is_one_caller = count > 2 && !strcmp(words[2], "--one-caller");
  pthread_t other;
  if (!is_one_caller) pthread_create(&other, NULL, all_cases, &others);
  all_cases(&mine);
  if (!is_one_caller) pthread_join(other, NULL);
  for (size_t o = 0; o < OPERATIONS; o++)
    for (size_t t = 0; t < TYPES; t++) printf("%s %s %.17g\n", operations[o].name, type_names[t], mine.sums[o][t]);
  fflush(stdout);
  if (is_one_caller) return 0;
  if (memcmp(mine.sums, others.sums, sizeof mine.sums)) return puts("two callers differ"), 1;
  pid_t child = fork();
  if (child == 0) {
    all_cases(&childs);
    _exit(memcmp(mine.sums, childs.sums, sizeof mine.sums) != 0);
  }
  int status = 1;
  waitpid(child, &status, 0);
  return status ? puts("the child failed"), 1 : 0;
}
