// Gated DeltaNet: the state of a value head is stepped row by row. A row of the state, one for each value, is stepped
// by itself, so its bits depend on the rows that it has seen and on nothing else.
#include "lanes.h"
#include "threads.h"

enum {
  TILE = 32,   // values of a head that are computed together; both head sizes are multiples of it
  VALUES = 4,  // rows of the state whose sums are on their way at a time
};

// k [R, key_heads, key_size], v [R, value_heads, value_size], and where each of S sequences has its rows. Gates, or the
// projections that they are made from, lie in rows of some width from some column on.
typedef struct {
  const void *k, *v, *g, *beta;
  const int32_t *first, *count;
  int g_type, beta_type;
} Rows;

typedef struct {
  Rows old, new;  // k is NULL where there are none
  const void *q, *a_log, *dt_bias;  // without a_log, g and beta are the gates
  const float *state;               // [P, value_heads, value_size, key_size]
  const int32_t *slots;
  void *out;
  float *new_state;  // [S, ...] or NULL
  int type, a_type, dt_type, after;  // after: new_state follows the new rows
  size_t sequences, key_heads, key_size, value_heads, value_size, g_width, g_column, beta_width, beta_column;
} Delta;

// What the rows of a sequence bring to a tile of a head, as float32.
typedef struct {
  float *keys, *queries, *values, *decays, *rates, *out;  // [count, key_size] twice, [count, TILE], [count] twice
} Tile;

static float softplus(float x) { return (x > 0.0f ? x : 0.0f) + log1pf(expf(-fabsf(x))); }

static void widen(int type, const void *from, size_t start, size_t count, float *out) {
  for (size_t i = 0; i < count; i += VL) store(F32, out + i, load(type, at(type, from, start + i)));
}

static void take(const Delta *d, const Rows *rows, size_t s, size_t head, size_t value, Tile *t) {
  size_t key_head = head / (d->value_heads / d->key_heads);
  for (size_t i = 0; i < (size_t)rows->count[s]; i++) {
    size_t row = (size_t)rows->first[s] + i, key = (row * d->key_heads + key_head) * d->key_size;
    widen(d->type, rows->k, key, d->key_size, t->keys + i * d->key_size);
    if (rows == &d->new) widen(d->type, d->q, key, d->key_size, t->queries + i * d->key_size);
    widen(d->type, rows->v, (row * d->value_heads + head) * d->value_size + value, TILE, t->values + i * TILE);
    float g = number(rows->g_type, rows->g, row * d->g_width + d->g_column + head);
    float beta = number(rows->beta_type, rows->beta, row * d->beta_width + d->beta_column + head);
    if (d->a_log) {
      float shifted = g + number(d->dt_type, d->dt_bias, head);
      g = expf(-expf(number(d->a_type, d->a_log, head)) * softplus(shifted));
      beta = 1.0f / (1.0f + expf(-beta));
    }
    t->decays[i] = g;
    t->rates[i] = beta;
  }
}

// Step VALUES rows of the state by row i: S = g S, then S = S + beta (v - S k) k'. READ also gives S q.
INLINE void step(int read, float *state, size_t size, const Tile *t, size_t i, size_t value) {
  const float *key = t->keys + i * size, *query = t->queries + i * size;
  vf decay = spread(t->decays[i]), sum[VALUES], change[VALUES];
  UNROLL for (int j = 0; j < VALUES; j++) sum[j] = (vf){0};
  for (size_t k = 0; k < size; k += VL) {
    vf lanes = load(F32, key + k);
    UNROLL for (int j = 0; j < VALUES; j++)
      sum[j] = fused(decay * load(F32, state + (size_t)j * size + k), lanes, sum[j]);
  }
  UNROLL for (int j = 0; j < VALUES; j++) {
    change[j] = spread((t->values[i * TILE + value + (size_t)j] - total(sum[j])) * t->rates[i]);
    sum[j] = (vf){0};
  }
  for (size_t k = 0; k < size; k += VL) {
    vf lanes = load(F32, key + k);
    UNROLL for (int j = 0; j < VALUES; j++) {
      float *place = state + (size_t)j * size + k;
      vf stepped = fused(lanes, change[j], decay * load(F32, place));
      store(F32, place, stepped);
      if (read) sum[j] = fused(stepped, load(F32, query + k), sum[j]);
    }
  }
  if (read)
    UNROLL for (int j = 0; j < VALUES; j++) t->out[i * TILE + value + (size_t)j] = total(sum[j]);
}

static void step_all(int read, float *state, size_t size, const Tile *t, size_t count) {
  for (size_t value = 0; value < TILE; value += VALUES)
    for (size_t i = 0; i < count; i++) {
      if (read) step(1, state + value * size, size, t, i, value);
      else step(0, state + value * size, size, t, i, value);
    }
}

static size_t longest(const Delta *d) {
  int32_t most = 0;
  for (size_t s = 0; s < d->sequences; s++) {
    if (d->old.k && d->old.count[s] > most) most = d->old.count[s];
    if (d->new.k && d->new.count[s] > most) most = d->new.count[s];
  }
  return (size_t)most;
}

static void delta_part(const void *what, size_t first, size_t last, int thread) {
  const Delta *d = what;
  size_t most = longest(d), size = d->key_size, tiles = d->value_size / TILE, all = TILE * size;
  float *state = scratch(thread, all + most * (2 * size + 2 * TILE + 2));
  Tile t = {.keys = state + all};
  t.queries = t.keys + most * size;
  t.values = t.queries + most * size;
  t.out = t.values + most * TILE;
  t.decays = t.out + most * TILE;
  t.rates = t.decays + most;
  for (size_t item = first; item < last; item++) {
    size_t s = item / (d->value_heads * tiles), head = item / tiles % d->value_heads, value = item % tiles * TILE;
    size_t heads = d->value_heads, slot = (size_t)d->slots[s];
    memcpy(state, d->state + ((slot * heads + head) * d->value_size + value) * size, all * sizeof *state);
    if (d->old.k) {
      take(d, &d->old, s, head, value, &t);
      step_all(0, state, size, &t, (size_t)d->old.count[s]);
    }
    float *kept = d->new_state + ((s * heads + head) * d->value_size + value) * size;
    if (d->new_state && !d->after) memcpy(kept, state, all * sizeof *state);
    if (!d->new.k) continue;
    take(d, &d->new, s, head, value, &t);
    step_all(1, state, size, &t, (size_t)d->new.count[s]);
    if (d->new_state && d->after) memcpy(kept, state, all * sizeof *state);
    for (size_t i = 0; i < (size_t)d->new.count[s]; i++) {
      size_t place = (((size_t)d->new.first[s] + i) * heads + head) * d->value_size + value;
      for (size_t j = 0; j < TILE; j += VL)
        store(d->type, (void *)at(d->type, d->out, place + j), load(F32, t.out + i * TILE + j));
    }
  }
}

EXPORT void cpu_gated_delta(const void *q, const void *k, const void *v, const void *g, int g_type, const void *beta,
                            int beta_type, const int32_t *first, const int32_t *count, const void *old_k,
                            const void *old_v, const void *old_g, int old_g_type, const void *old_beta,
                            int old_beta_type, const int32_t *old_first, const int32_t *old_count, int type,
                            const void *a_log, int a_type, const void *dt_bias, int dt_type, const float *state,
                            const int32_t *slots, size_t sequences, size_t key_heads, size_t key_size,
                            size_t value_heads, size_t value_size, size_t g_width, size_t g_column, size_t beta_width,
                            size_t beta_column, void *out, float *new_state, int after) {
  begin_call();
  Delta d = {
      .old = {old_k, old_v, old_g, old_beta, old_first, old_count, old_g_type, old_beta_type},
      .new = {k, v, g, beta, first, count, g_type, beta_type},
      .q = q, .a_log = a_log, .dt_bias = dt_bias, .state = state, .slots = slots, .out = out, .new_state = new_state,
      .type = type, .a_type = a_type, .dt_type = dt_type, .after = after, .sequences = sequences, .key_heads = key_heads,
      .key_size = key_size, .value_heads = value_heads, .value_size = value_size, .g_width = g_width,
      .g_column = g_column, .beta_width = beta_width, .beta_column = beta_column,
  };
  size_t items = sequences * value_heads * (value_size / TILE), chunk = items / (4 * (size_t)thread_count());
  run_parts(delta_part, &d, items, chunk ? chunk : 1);
  end_call();
}
