// The short convolution before the gated delta rule. A channel of a row sums over its taps in order, so its bits depend
// on the inputs under the taps alone, wherever they lie: in the kept state, among old rows or among the new ones.
#include "lanes.h"
#include "threads.h"

enum { LARGEST_HEAD = 256 };
static const float EPSILON = 1e-6f;

// Rows of width ``width``, channels from column ``column`` on; the rows of each of S sequences.
typedef struct {
  const void *x;
  const int32_t *first, *count;
} Rows;

// A unit is the channels of a head: query heads first, then key heads, then value heads.
typedef struct {
  Rows old, new;  // old.x or new.x is NULL where there are none
  const void *state, *weight;
  const int32_t *slots;
  void *q, *k, *v, *new_state;  // new_state may be NULL
  int type, weight_type, after;  // after: new_state follows the new rows
  size_t width, column, taps, sequences, key_heads, key_size, value_heads, value_size;
} Conv;

// Where a unit's channels are, and where its results go.
typedef struct {
  size_t channel, size, head, heads;
  void *out;
  int is_normed;
  float scale;
} Unit;

static Unit unit_of(const Conv *c, size_t unit) {
  size_t keys = c->key_heads, size = c->key_size;
  if (unit < keys) return (Unit){unit * size, size, unit, keys, c->q, 1, 1.0f / sqrtf((float)size)};
  if (unit < 2 * keys) return (Unit){unit * size, size, unit - keys, keys, c->k, 1, 1.0f};
  size_t head = unit - 2 * keys;
  return (Unit){2 * keys * size + head * c->value_size, c->value_size, head, c->value_heads, c->v, 0, 1.0f};
}

static size_t channels_of(const Conv *c) {
  return 2 * c->key_heads * c->key_size + c->value_heads * c->value_size;
}

static size_t old_count(const Conv *c, size_t s) { return c->old.x ? (size_t)c->old.count[s] : 0; }

// Input number i of a sequence, the oldest first: taps - 1 kept ones, the accepted old rows, the new rows.
static const void *input(const Conv *c, size_t s, size_t i, size_t channel) {
  size_t kept = c->taps - 1, olds = old_count(c, s);
  if (i < kept) return at(c->type, c->state, ((size_t)c->slots[s] * kept + i) * channels_of(c) + channel);
  const Rows *rows = i < kept + olds ? &c->old : &c->new;
  size_t row = (size_t)rows->first[s] + i - kept - (i < kept + olds ? 0 : olds);
  return at(c->type, rows->x, row * c->width + c->column + channel);
}

// Taps [taps, size] of a unit as float32, so that channels lie side by side.
static void turn_taps(const Conv *c, const Unit *u, float *weights) {
  for (size_t i = 0; i < u->size; i++)
    for (size_t t = 0; t < c->taps; t++)
      weights[t * u->size + i] = number(c->weight_type, c->weight, (u->channel + i) * c->taps + t);
}

// Row i of the new ones of a sequence.
static void convolve(const Conv *c, const Unit *u, const float *weights, size_t s, size_t i) {
  vf y[LARGEST_HEAD / VL];
  size_t vectors = u->size / VL;
  for (size_t j = 0; j < vectors; j++) y[j] = (vf){0};
  for (size_t t = 0; t < c->taps; t++) {
    const void *from = input(c, s, old_count(c, s) + i + t, u->channel);
    for (size_t j = 0; j < vectors; j++)
      y[j] = fused(load(F32, weights + t * u->size + j * VL), load(c->type, at(c->type, from, j * VL)), y[j]);
  }
  vf squares = {0};
  for (size_t j = 0; j < vectors; j++) {
    y[j] = silu(y[j]);
    squares = fused(y[j], y[j], squares);
  }
  float scale = u->is_normed ? u->scale / sqrtf(total(squares) + EPSILON) : u->scale;
  size_t row = (size_t)c->new.first[s] + i;
  for (size_t j = 0; j < vectors; j++)
    store(c->type, (void *)at(c->type, u->out, (row * u->heads + u->head) * u->size + j * VL), y[j] * scale);
}

static void conv_part(const void *what, size_t first, size_t last, int thread) {
  const Conv *c = what;
  size_t kept = c->taps - 1;
  float *weights = scratch(thread, c->taps * LARGEST_HEAD);
  for (size_t n = first; n < last; n++) {
    Unit u = unit_of(c, n);
    if (c->new.x) turn_taps(c, &u, weights);
    for (size_t s = 0; s < c->sequences; s++) {
      size_t end = old_count(c, s) + (c->after ? (size_t)c->new.count[s] : 0);
      for (size_t i = 0; c->new_state && i < kept; i++)
        memcpy((void *)at(c->type, c->new_state, (s * kept + i) * channels_of(c) + u.channel),
               input(c, s, end + i, u.channel), u.size * size_of(c->type));
      for (size_t i = 0; c->new.x && i < (size_t)c->new.count[s]; i++) convolve(c, &u, weights, s, i);
    }
  }
}

EXPORT void cpu_causal_conv(const void *x, const int32_t *first, const int32_t *count, const void *old_x,
                            const int32_t *old_first, const int32_t *old_counts, int type, const void *state,
                            const int32_t *slots, const void *weight, int weight_type, size_t width, size_t column,
                            size_t taps, size_t sequences, size_t key_heads, size_t key_size, size_t value_heads,
                            size_t value_size, void *q, void *k, void *v, void *new_state, int after) {
  begin_call();
  Conv c = {
      .old = {old_x, old_first, old_counts}, .new = {x, first, count}, .state = state, .weight = weight,
      .slots = slots, .q = q, .k = k, .v = v, .new_state = new_state, .type = type, .weight_type = weight_type, .after = after,
      .width = width, .column = column, .taps = taps, .sequences = sequences, .key_heads = key_heads,
      .key_size = key_size, .value_heads = value_heads, .value_size = value_size,
  };
  size_t units = 2 * key_heads + value_heads, chunk = units / (4 * (size_t)thread_count());
  run_parts(conv_part, &c, units, chunk ? chunk : 1);
  end_call();
}
