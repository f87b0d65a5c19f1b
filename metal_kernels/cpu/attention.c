// Attention over pages and over the rows of the pass. A row takes what it sees in the order of positions, and its
// sums depend on its position alone: not on which keys are cached, where their pages lie, or what other rows there are.
#include "lanes.h"
#include "threads.h"

enum { HEADS = 4 };  // query heads that read a key together

typedef struct {
  const void *queries, *keys, *values, *pool;
  const int32_t *pages, *lengths, *starts, *paths;  // [S, pages_each], [S], [S + 1], [rows, rows] or NULL
  const void *sinks;                                // [heads] or NULL
  void *out;
  int type, sinks_type, block;
  size_t rows, heads, kv_heads, dim, sequences, pages_each, slots;
  size_t layer_start, page_stride, value_stride;  // in numbers
  size_t window;                     // 0 for none
  float scale, softcap;              // softcap 0 for none
} Attention;

// What a row sees: where its keys and values of one head are, by position.
typedef struct {
  const void **keys, **values;
  size_t count;
} Seen;

INLINE size_t rounded_up(size_t count) { return (count + VL - 1) / VL * VL; }

static size_t sequence_of(const Attention *a, size_t row) {
  size_t s = 0;
  while ((size_t)a->starts[s + 1] <= row) s++;
  return s;
}

static void see(const Attention *a, size_t row, size_t kv_head, Seen *seen) {
  size_t s = sequence_of(a, row), start = (size_t)a->starts[s], rows = (size_t)a->starts[s + 1] - start;
  size_t length = (size_t)a->lengths[s], depth = row - start, step = a->kv_heads * a->dim;
  const int32_t *pages = a->pages + s * a->pages_each, *path = a->paths ? a->paths + row * a->rows : NULL;
  if (path)
    for (depth = 0; depth + 1 < rows && path[depth + 1] >= 0;) depth++;
  size_t position = length + depth, from = a->window && position >= a->window ? position - a->window + 1 : 0;
  seen->count = 0;
  for (size_t p = from; p < length; p++) {
    size_t place = (size_t)pages[p / a->slots] * a->page_stride + a->layer_start;
    place += p % a->slots * step + kv_head * a->dim;
    seen->keys[seen->count] = at(a->type, a->pool, place);
    seen->values[seen->count++] = at(a->type, a->pool, place + a->value_stride);
  }
  size_t end = a->block ? rows : depth + 1;
  for (size_t i = a->block || from < length ? 0 : from - length; i < end; i++) {
    size_t place = (start + (path ? (size_t)path[i] : i)) * step + kv_head * a->dim;
    seen->keys[seen->count] = at(a->type, a->keys, place);
    seen->values[seen->count++] = at(a->type, a->values, place);
  }
}

// Scores of ``heads`` queries [heads, rounded_up(dim)] with every key, into scores[head * room + key].
INLINE void score(int type, int heads, const float *queries, const Seen *seen, size_t dim, float *scores, size_t room) {
  size_t padded = rounded_up(dim);
  for (size_t j = 0; j < seen->count; j++) {
    vf sum[HEADS];
    UNROLL for (int h = 0; h < heads; h++) sum[h] = (vf){0};
    for (size_t i = 0; i < dim; i += VL) {
      vf key = load_some(type, at(type, seen->keys[j], i), dim - i);
      UNROLL for (int h = 0; h < heads; h++) sum[h] = fused(load(F32, queries + (size_t)h * padded + i), key, sum[h]);
    }
    UNROLL for (int h = 0; h < heads; h++) scores[(size_t)h * room + j] = total(sum[h]);
  }
}

// Scores become weights, which are not divided by their sum: that is returned.
static float weigh(const Attention *a, float *scores, size_t count, size_t head) {
  if (a->softcap != 0.0f)
    for (size_t j = 0; j < count; j++) scores[j] = a->softcap * tanhf(scores[j] / a->softcap);
  float sink = a->sinks ? number(a->sinks_type, a->sinks, head) : -INFINITY, top = sink;
  for (size_t j = 0; j < count; j++) top = scores[j] > top ? scores[j] : top;
  for (size_t j = count; j % VL; j++) scores[j] = -INFINITY;
  vf sum = {0};
  for (size_t j = 0; j < count; j += VL) {
    vf x = load(F32, scores + j) - top;
    // What is further down is nothing beside the largest, which is 1.
    x = choose(x < -87.0f, (vf){0}, exponential(x));
    store(F32, scores + j, x);
    sum += x;
  }
  return total(sum) + (a->sinks ? expf(sink - top) : 0.0f);
}

// Values of ``heads`` weights [head * room + key], summed and divided, into out[head * dim + i].
INLINE void gather(int type, int heads, const float *weights, size_t room, const float *sums, const Seen *seen,
                   size_t dim, void *out) {
  for (size_t i = 0; i < dim; i += VL) {
    vf sum[HEADS];
    UNROLL for (int h = 0; h < heads; h++) sum[h] = (vf){0};
    for (size_t j = 0; j < seen->count; j++) {
      vf value = load_some(type, at(type, seen->values[j], i), dim - i);
      UNROLL for (int h = 0; h < heads; h++) sum[h] = fused(spread(weights[(size_t)h * room + j]), value, sum[h]);
    }
    UNROLL for (int h = 0; h < heads; h++)
      store_some(type, (void *)at(type, out, (size_t)h * dim + i), sum[h] / sums[h], dim - i);
  }
}

INLINE void attend(int type, int heads, const Attention *a, size_t row, size_t head, const Seen *seen, float *memory,
                   size_t room) {
  size_t dim = a->dim, padded = rounded_up(dim), place = (row * a->heads + head) * dim;
  float *queries = memory, *scores = queries + HEADS * padded, sums[HEADS];
  for (size_t h = 0; h < (size_t)heads; h++)
    for (size_t i = 0; i < dim; i += VL)
      store(F32, queries + h * padded + i,
            load_some(type, at(type, a->queries, place + h * dim + i), dim - i) * a->scale);
  score(type, heads, queries, seen, dim, scores, room);
  for (size_t h = 0; h < (size_t)heads; h++) sums[h] = weigh(a, scores + h * room, seen->count, head + h);
  gather(type, heads, scores, room, sums, seen, dim, (void *)at(type, a->out, place));
}

#define WITH_HEADS(TYPE)                                                    \
  switch (heads) {                                                          \
    case 1: attend(TYPE, 1, a, row, head, &seen, memory, room); break;      \
    case 2: attend(TYPE, 2, a, row, head, &seen, memory, room); break;      \
    case 3: attend(TYPE, 3, a, row, head, &seen, memory, room); break;      \
    default: attend(TYPE, HEADS, a, row, head, &seen, memory, room);        \
  }

static void attention_part(const void *what, size_t first, size_t last, int thread) {
  const Attention *a = what;
  size_t longest = 0, each = a->heads / a->kv_heads;
  for (size_t s = 0; s < a->sequences; s++)
    if ((size_t)a->lengths[s] > longest) longest = (size_t)a->lengths[s];
  size_t room = rounded_up(longest + a->rows), pointers = room * sizeof(void *) / sizeof(float);
  float *memory = scratch(thread, 2 * pointers + HEADS * (rounded_up(a->dim) + room));
  Seen seen = {(const void **)memory, (const void **)(memory + pointers), 0};
  memory += 2 * pointers;
  for (size_t item = first; item < last; item++) {
    size_t row = item / a->kv_heads, kv_head = item % a->kv_heads;
    see(a, row, kv_head, &seen);
    for (size_t done = 0; done < each; done += HEADS) {
      size_t head = kv_head * each + done, heads = each - done;
      switch (a->type) {
        case BF16: WITH_HEADS(BF16) break;
        case F16: WITH_HEADS(F16) break;
        default: WITH_HEADS(F32)
      }
    }
  }
}

EXPORT void cpu_attention(const void *queries, const void *keys, const void *values, int type, const void *pool,
                          size_t layer_start, const int32_t *pages, const int32_t *lengths,
                          const int32_t *starts, const int32_t *paths, const void *sinks, int sinks_type, void *out,
                          size_t rows, size_t heads, size_t kv_heads, size_t dim, size_t sequences,
                          size_t pages_each, size_t slots, size_t page_stride, size_t value_stride, size_t window,
                          int block, float scale, float softcap) {
  begin_call();
  Attention a = {queries, keys, values, pool, pages, lengths, starts, paths, sinks, out, type, sinks_type, block,
                 rows, heads, kv_heads, dim, sequences, pages_each, slots, layer_start, page_stride, value_stride,
                 window, scale, softcap};
  size_t items = rows * kv_heads, chunk = items / (4 * (size_t)thread_count());
  run_parts(attention_part, &a, items, chunk ? chunk : 1);
  end_call();
}
