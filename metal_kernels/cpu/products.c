// Linear maps of any number of rows. A weight is read once for all rows; sums are float32 and rounded once.
//
// A sum runs over k in VL lanes, ascending, then over the lanes in a fixed order: it depends on k alone. Up to ROWS
// rows take weights from memory to their sums. More take them from a panel of widened weights, by the same steps.
#include "lanes.h"
#include "threads.h"

enum {
  ROWS = VL == 16 ? 8 : 4,  // rows of x in a tile
  // Weight rows that one row of x, few rows or a tile of rows pass at a time, so that the sums fill the registers.
  COLUMNS_ALONE = 8,
  COLUMNS_FEW = VL == 16 ? 6 : 3,
  COLUMNS = 3,
  PIECE = 48,  // weight rows whose sums are finished together; a multiple of all above and of VL
  PANEL_FLOATS = 1 << 16,
};

// Weights [outputs, depth]; bits: 0 for plain ones of ``type``, else scales and biases are of ``type``.
typedef struct {
  const void *numbers, *scales, *biases;
  int bits, type, group;
  size_t depth, outputs;
} Weights;

typedef struct {
  Weights weights;
  const float *x;  // [rows, padded depth]
  const void *bias, *residual;
  const int32_t *places;  // rows of out and residual; NULL: in order
  void *out;
  int type, bias_type, gated;
  size_t rows, padded;
} Product;

// Weight rows n to n + count - 1, and rows of x.
typedef struct {
  size_t n, count, row, rows;
  float *groups, *sums;  // groups: room for scales and biases
} Block;

INLINE size_t rounded_up(size_t count, size_t step) { return (count + step - 1) / step * step; }

INLINE const uint8_t *weight_row(const Weights *w, size_t n) {
  size_t bits = w->bits ? (size_t)w->bits : 8 * size_of(w->type);
  return (const uint8_t *)w->numbers + n * (w->depth * bits / 8);
}

// Numbers k to k + VL - 1 of a row packed by MLX: a stream of bits, the lowest first. Eight take ``bits`` bytes.
INLINE vu unpacked(int bits, const uint8_t *row, size_t k) {
  const uint8_t *p = row + k / 8 * (size_t)bits;
  if (bits == 8) {
    vb bytes;
    memcpy(&bytes, p, sizeof bytes);
    return (vu)widened_bytes(bytes);
  }
  uint64_t words[2] = {0};
  for (int i = 0; i < VL / 8; i++) memcpy(words + i, p + i * bits, (size_t)bits);
  vu q;
  if (bits <= 4) {
    uint32_t n = (uint32_t)bits;
    q = in_halves((uint32_t)words[0], (uint32_t)words[1]);
#if defined(__AVX512F__)
    q >>= (vu){0, n, 2 * n, 3 * n, 4 * n, 5 * n, 6 * n, 7 * n, 0, n, 2 * n, 3 * n, 4 * n, 5 * n, 6 * n, 7 * n};
#else
    q >>= (vu){0, n, 2 * n, 3 * n, 4 * n, 5 * n, 6 * n, 7 * n};
#endif
  } else {
    typedef uint64_t v8q __attribute__((vector_size(64)));
    typedef uint32_t v8u __attribute__((vector_size(32)));
    uint64_t n = (uint64_t)bits;
    v8u eight[VL / 8];
    for (int i = 0; i < VL / 8; i++) {
      v8q wide = (v8q){0} + words[i];
      wide >>= (v8q){0, n, 2 * n, 3 * n, 4 * n, 5 * n, 6 * n, 7 * n};
      eight[i] = __builtin_convertvector(wide, v8u);
    }
    memcpy(&q, eight, sizeof q);
  }
  return q & ((1u << bits) - 1);
}

INLINE vf dequantised(vu q, vf scale, vf bias) { return fused(__builtin_convertvector((vi)q, vf), scale, bias); }

// Where a vector holds all values that a weight of a group can have, it is a table of them.
INLINE int has_table(int bits) { return bits <= 4 && VL == 16; }

INLINE size_t groups_of(const Weights *w) { return w->bits ? w->depth / (size_t)w->group : 0; }

// Scales and biases [count, groups] of weight rows from n on, as float32. Returns the biases; scales lie in ``out``.
static const float *widen_groups(const Weights *w, size_t n, size_t count, float *out) {
  size_t first = n * groups_of(w), all = count * groups_of(w);
  float *biases = out + rounded_up(all, VL);
  for (size_t i = 0; i < all; i += VL) {
    store(F32, out + i, load_some(w->type, at(w->type, w->scales, first + i), all - i));
    store(F32, biases + i, load_some(w->type, at(w->type, w->biases, first + i), all - i));
  }
  return biases;
}

// Sums of up to ``tile`` rows of x with up to ``columns`` weight rows from n on, into sums[row * PIECE + column].
// The last of both are taken again where there are fewer.
INLINE void direct(int bits, int type, size_t tile, size_t columns, const Product *p, const Block *b) {
  const Weights *w = &p->weights;
  const uint8_t *weights[COLUMNS_ALONE];
  const float *x[ROWS];
  vf sum[ROWS][COLUMNS_ALONE];
  UNROLL for (size_t j = 0; j < columns; j++) weights[j] = weight_row(w, b->n + least(j, b->count - 1));
  UNROLL for (size_t r = 0; r < tile; r++) x[r] = p->x + (b->row + least(r, b->rows - 1)) * p->padded;
  UNROLL for (size_t r = 0; r < tile; r++) UNROLL for (size_t j = 0; j < columns; j++) sum[r][j] = (vf){0};
  if (bits == 0) {
    for (size_t k = 0; k < w->depth; k += VL) {
      size_t here = w->depth - k;
      UNROLL for (size_t j = 0; j < columns; j++) {
        vf weight = load_some(type, at(type, weights[j], k), here);
        UNROLL for (size_t r = 0; r < tile; r++) sum[r][j] = fused(weight, load(F32, x[r] + k), sum[r][j]);
      }
    }
  } else {
    size_t groups = groups_of(w);
    const float *biases = widen_groups(w, b->n, b->count, b->groups);
    for (size_t g = 0, k = 0; g < groups; g++) {
      vf scale[COLUMNS_ALONE], bias[COLUMNS_ALONE], table[COLUMNS_ALONE];
      UNROLL for (size_t j = 0; j < columns; j++) {
        size_t place = least(j, b->count - 1) * groups + g;
        scale[j] = spread(b->groups[place]);
        bias[j] = spread(biases[place]);
        if (has_table(bits)) table[j] = dequantised(lane_numbers(), scale[j], bias[j]);
      }
      for (size_t end = k + (size_t)w->group; k < end; k += VL) {
        UNROLL for (size_t j = 0; j < columns; j++) {
          vu q = unpacked(bits, weights[j], k);
          vf weight = has_table(bits) ? looked_up(table[j], q) : dequantised(q, scale[j], bias[j]);
          UNROLL for (size_t r = 0; r < tile; r++) sum[r][j] = fused(weight, load(F32, x[r] + k), sum[r][j]);
        }
      }
    }
  }
  UNROLL for (size_t r = 0; r < tile; r++)
    if (r < b->rows)
      UNROLL for (size_t j = 0; j < columns; j++) b->sums[r * PIECE + j] = total(sum[r][j]);
}

// Weight row n as float32.
INLINE void widen(int bits, int type, const Weights *w, size_t n, float *room, float *out) {
  const uint8_t *row = weight_row(w, n);
  if (bits == 0) {
    for (size_t k = 0; k < w->depth; k += VL) store(F32, out + k, load_some(type, at(type, row, k), w->depth - k));
    return;
  }
  const float *biases = widen_groups(w, n, 1, room);
  for (size_t g = 0, k = 0; g < groups_of(w); g++) {
    vf scale = spread(room[g]), bias = spread(biases[g]);
    for (size_t end = k + (size_t)w->group; k < end; k += VL)
      store(F32, out + k, dequantised(unpacked(bits, row, k), scale, bias));
  }
}

// For every kind of weights: BITS and, of plain ones, TYPE become constants.
#define WITH_KIND(w, CALL)                                      \
  switch ((w)->bits ? (w)->bits : -(w)->type) {                 \
    case -BF16: CALL(0, BF16); return;                          \
    case -F16: CALL(0, F16); return;                            \
    case -F32: CALL(0, F32); return;                            \
    case 2: CALL(2, 0); return;                                 \
    case 3: CALL(3, 0); return;                                 \
    case 4: CALL(4, 0); return;                                 \
    case 5: CALL(5, 0); return;                                 \
    case 6: CALL(6, 0); return;                                 \
    default: CALL(8, 0); return;                                \
  }

static void direct_1(const Product *p, const Block *b) {
#define DIRECT_1(BITS, TYPE) direct(BITS, TYPE, 1, COLUMNS_ALONE, p, b)
  WITH_KIND(&p->weights, DIRECT_1)
}

static void direct_2(const Product *p, const Block *b) {
#define DIRECT_2(BITS, TYPE) direct(BITS, TYPE, 2, COLUMNS_FEW, p, b)
  WITH_KIND(&p->weights, DIRECT_2)
}

static void direct_4(const Product *p, const Block *b) {
#define DIRECT_4(BITS, TYPE) direct(BITS, TYPE, 4, COLUMNS_FEW, p, b)
  WITH_KIND(&p->weights, DIRECT_4)
}

static void direct_rows(const Product *p, const Block *b) {
#define DIRECT_ROWS(BITS, TYPE) direct(BITS, TYPE, ROWS, COLUMNS, p, b)
  WITH_KIND(&p->weights, DIRECT_ROWS)
}

static void widen_row(const Weights *w, size_t n, float *room, float *out) {
#define WIDEN(BITS, TYPE) widen(BITS, TYPE, w, n, room, out)
  WITH_KIND(w, WIDEN)
}

// Sums of ``rows`` rows with COLUMNS rows of a panel, into sums[row * PIECE + column].
INLINE void tile(int rows, const float *x, const float *panel, size_t padded, float *sums) {
  vf sum[ROWS][COLUMNS];
  UNROLL for (int r = 0; r < rows; r++) UNROLL for (int j = 0; j < COLUMNS; j++) sum[r][j] = (vf){0};
  for (size_t k = 0; k < padded; k += VL) {
    vf weights[COLUMNS];
    UNROLL for (size_t j = 0; j < COLUMNS; j++) weights[j] = load(F32, panel + j * padded + k);
    UNROLL for (int r = 0; r < rows; r++) {
      vf v = load(F32, x + (size_t)r * padded + k);
      UNROLL for (int j = 0; j < COLUMNS; j++) sum[r][j] = fused(weights[j], v, sum[r][j]);
    }
  }
  UNROLL for (int r = 0; r < rows; r++) UNROLL for (int j = 0; j < COLUMNS; j++) sums[r * PIECE + j] = total(sum[r][j]);
}

static void tile_of(size_t rows, const float *x, const float *panel, size_t padded, float *sums) {
  switch (rows) {
    case 1: tile(1, x, panel, padded, sums); return;
    case 2: tile(2, x, panel, padded, sums); return;
    case 3: tile(3, x, panel, padded, sums); return;
#if defined(__AVX512F__)
    case 4: tile(4, x, panel, padded, sums); return;
    case 5: tile(5, x, panel, padded, sums); return;
    case 6: tile(6, x, panel, padded, sums); return;
    case 7: tile(7, x, panel, padded, sums); return;
#endif
    default: tile(ROWS, x, panel, padded, sums);
  }
}

static size_t panel_rows(size_t padded) {
  size_t fitting = PANEL_FLOATS / padded / COLUMNS * COLUMNS;
  return fitting < COLUMNS ? COLUMNS : fitting < PIECE ? fitting : PIECE;
}

// Sums of all rows with ``count`` <= PIECE weight rows from n on, into sums[row * PIECE + column].
static void sums_of(const Product *p, size_t n, size_t count, float *groups, float *panel, float *sums) {
  if (p->rows <= ROWS) {
    size_t columns = p->rows == 1 ? COLUMNS_ALONE : p->rows <= 4 ? COLUMNS_FEW : COLUMNS;
    for (size_t j = 0; j < count; j += columns) {
      Block b = {n + j, least(columns, count - j), 0, p->rows, groups, sums + j};
      if (p->rows == 1) direct_1(p, &b);
      else if (p->rows == 2) direct_2(p, &b);
      else if (p->rows <= 4) direct_4(p, &b);
      else direct_rows(p, &b);
    }
    return;
  }
  size_t width = panel_rows(p->padded);
  for (size_t j = 0; j < count; j += width) {
    size_t here = rounded_up(least(width, count - j), COLUMNS);
    for (size_t i = 0; i < here; i++)
      widen_row(&p->weights, n + least(j + i, count - 1), groups, panel + i * p->padded);
    for (size_t r = 0; r < p->rows; r += ROWS)
      for (size_t i = 0; i < here; i += COLUMNS)
        tile_of(least(ROWS, p->rows - r), p->x + r * p->padded, panel + i * p->padded, p->padded,
                sums + r * PIECE + j + i);
  }
}

// Add the bias, gate, add the residual, and round.
static void finish(const Product *p, size_t n, size_t count, const float *sums, const float *ups) {
  size_t width = p->gated ? p->weights.outputs / 2 : p->weights.outputs;
  for (size_t r = 0; r < p->rows; r++)
    for (size_t j = 0; j < count; j += VL) {
      size_t here = count - j, place = (p->places ? (size_t)p->places[r] : r) * width + n + j;
      vf v = load(F32, sums + r * PIECE + j);
      if (p->bias) v += load_some(p->bias_type, at(p->bias_type, p->bias, n + j), here);
      if (p->gated) {
        vf up = load(F32, ups + r * PIECE + j);
        if (p->bias) up += load_some(p->bias_type, at(p->bias_type, p->bias, width + n + j), here);
        v = silu(v) * up;
      }
      if (p->residual) v += load_some(p->type, at(p->type, p->residual, place), here);
      store_some(p->type, (void *)at(p->type, p->out, place), v, here);
    }
}

static void product_part(const void *what, size_t first, size_t last, int thread) {
  const Product *p = what;
  size_t width = p->weights.outputs / 2, room = p->rows * PIECE;
  size_t panel_floats = p->rows > ROWS ? panel_rows(p->padded) * p->padded : 0;
  size_t group_floats = 2 * rounded_up(COLUMNS_ALONE * groups_of(&p->weights), VL);
  float *groups = scratch(thread, group_floats + panel_floats + 2 * room), *panel = groups + group_floats;
  float *sums = panel + panel_floats, *ups = sums + room;
  for (size_t n = first; n < last; n += PIECE) {
    size_t count = least(PIECE, last - n);
    sums_of(p, n, count, groups, panel, sums);
    if (p->gated) sums_of(p, width + n, count, groups, panel, ups);
    finish(p, n, count, sums, ups);
  }
}

// Pieces of outputs small enough that all threads get several.
static size_t chunk_of(size_t outputs) {
  size_t share = rounded_up(outputs / (4 * (size_t)thread_count()) + 1, COLUMNS_ALONE);
  return share < PIECE ? share : share / PIECE * PIECE;
}

static size_t outputs_of(const Product *p) { return p->gated ? p->weights.outputs / 2 : p->weights.outputs; }

// Row r of [rows, depth] as float32, padded with zeros to whole lanes.
static void widen_x(int type, const void *x, size_t r, size_t depth, float *out) {
  for (size_t k = 0; k < depth; k += VL)
    store(F32, out + k, load_some(type, at(type, x, r * depth + k), depth - k));
}

EXPORT void cpu_linear(const void *x, int type, size_t rows, const void *weight, const void *scales,
                       const void *biases, int bits, int weight_type, int group, size_t depth, size_t outputs,
                       const void *bias, int bias_type, const void *residual, int gated, void *out) {
  begin_call();
  Product p = {
      .weights = {weight, scales, biases, bits, weight_type, group, depth, outputs},
      .bias = bias, .residual = residual, .out = out,
      .type = type, .bias_type = bias_type, .gated = gated, .rows = rows, .padded = rounded_up(depth, VL),
  };
  float *wide = shared_scratch(rows * p.padded);
  for (size_t r = 0; r < rows; r++) widen_x(type, x, r, depth, wide + r * p.padded);
  p.x = wide;
  run_parts(product_part, &p, outputs_of(&p), chunk_of(outputs_of(&p)));
  end_call();
}

// Products of rows with the weights of the experts that they chose. Pairs of a row and an expert are sorted by expert,
// so that a weight is read once for all rows that chose its expert.
typedef struct {
  Product product;  // x [pairs, padded depth] by expert
  const int32_t *experts;
  const int32_t *places, *starts;  // the pairs by expert; where in these each expert that was chosen begins
  size_t chunks, chunk;            // pieces of the outputs of an expert
} Gather;

static size_t experts_up_to(const int32_t *experts, size_t pairs) {
  int32_t most = 0;
  for (size_t i = 0; i < pairs; i++) most = experts[i] > most ? experts[i] : most;
  return (size_t)most + 1;
}

// Writes places [pairs] and starts [chosen + 1]; returns how many experts are chosen. ends: room for ``count`` numbers.
static size_t sort_by_expert(const int32_t *experts, size_t pairs, size_t count, int32_t *ends, int32_t *places,
                             int32_t *starts) {
  size_t chosen = 0;
  memset(ends, 0, count * sizeof *ends);
  for (size_t i = 0; i < pairs; i++) ends[experts[i]]++;
  for (size_t e = 0, end = 0; e < count; e++) {
    if (ends[e]) starts[chosen++] = (int32_t)end;
    end += (size_t)ends[e];
    ends[e] = (int32_t)end;
  }
  starts[chosen] = (int32_t)pairs;
  for (size_t i = pairs; i-- > 0;) places[--ends[experts[i]]] = (int32_t)i;
  return chosen;
}

static void gather_part(const void *what, size_t first, size_t last, int thread) {
  const Gather *g = what;
  for (size_t item = first; item < last; item++) {
    size_t group = item / g->chunks, n = item % g->chunks * g->chunk, start = (size_t)g->starts[group];
    size_t groups = groups_of(&g->product.weights);
    size_t skipped = (size_t)g->experts[g->places[start]] * g->product.weights.outputs;
    Product p = g->product;
    p.weights.numbers = weight_row(&p.weights, skipped);
    if (groups) {
      p.weights.scales = at(p.weights.type, p.weights.scales, skipped * groups);
      p.weights.biases = at(p.weights.type, p.weights.biases, skipped * groups);
    }
    p.x += start * p.padded;
    p.places = g->places + start;
    p.rows = (size_t)g->starts[group + 1] - start;
    product_part(&p, n, least(n + g->chunk, outputs_of(&p)), thread);
  }
}

EXPORT void cpu_gather(const void *x, int type, size_t pairs, size_t rows_each, const int32_t *experts,
                       const void *weight, const void *scales, const void *biases, int bits, int weight_type,
                       int group, size_t depth, size_t outputs, int gated, void *out) {
  begin_call();
  size_t padded = rounded_up(depth, VL), count = experts_up_to(experts, pairs);
  float *wide = shared_scratch(pairs * padded + 2 * pairs + 1 + count);
  int32_t *places = (int32_t *)(wide + pairs * padded), *starts = places + pairs, *ends = starts + pairs + 1;
  size_t chosen = sort_by_expert(experts, pairs, count, ends, places, starts);
  for (size_t i = 0; i < pairs; i++)
    widen_x(type, x, (size_t)places[i] / rows_each, depth, wide + i * padded);
  Gather g = {
      .product = {
          .weights = {weight, scales, biases, bits, weight_type, group, depth, outputs},
          .x = wide, .out = out, .type = type, .gated = gated, .padded = padded,
      },
      .experts = experts, .places = places, .starts = starts,
  };
  g.chunk = chunk_of(outputs_of(&g.product));
  g.chunks = rounded_up(outputs_of(&g.product), g.chunk) / g.chunk;
  run_parts(gather_part, &g, chosen * g.chunks, 1);
  end_call();
}
