// RMSNorm of rows and of heads, and rotary positions. Everything is computed in float32 and rounded once.
#include "lanes.h"
#include "threads.h"

enum { ROWS_EACH = 8 };  // fewer are not worth another thread

static float inverse_rms(int type, const void *x, size_t count, float eps) {
  vf squares = {0};
  for (size_t i = 0; i < count; i += VL) {
    vf v = load_some(type, at(type, x, i), count - i);
    squares = fused(v, v, squares);
  }
  return 1.0f / sqrtf(total(squares) / (float)count + eps);
}

typedef struct {
  const void *x, *weight;
  void *out;
  int type, weight_type;
  size_t width;
  float eps;
} Norm;

static void norm_part(const void *what, size_t first, size_t last, int thread) {
  const Norm *n = what;
  (void)thread;
  for (size_t r = first; r < last; r++) {
    const void *x = at(n->type, n->x, r * n->width);
    vf scale = spread(inverse_rms(n->type, x, n->width, n->eps));
    for (size_t i = 0; i < n->width; i += VL) {
      size_t here = n->width - i;
      vf v = load_some(n->type, at(n->type, x, i), here) * scale;
      v *= load_some(n->weight_type, at(n->weight_type, n->weight, i), here);
      store_some(n->type, (void *)at(n->type, n->out, r * n->width + i), v, here);
    }
  }
}

EXPORT void cpu_rms_norm(const void *x, int type, const void *weight, int weight_type, size_t rows, size_t width,
                         float eps, void *out) {
  begin_call();
  Norm n = {x, weight, out, type, weight_type, width, eps};
  run_parts(norm_part, &n, rows, ROWS_EACH);
  end_call();
}

// Rows of heads [rows, heads + layers * 2 * kv_heads] of dim numbers, each of the first ``heads`` followed by its
// gate where ``gated``. queries [rows, heads, dim]; key_values [2, rows, kv_heads, dim] where there are queries,
// else [rows, layers, 2, kv_heads, dim].
typedef struct {
  const void *x, *query_weight, *key_weights;
  const int32_t *positions;
  const float *frequencies;
  void *queries, *key_values;
  int type, weight_type, traditional, gated;
  size_t rows, heads, kv_heads, layers, dim, rotated;
  float eps, scale;
} Heads;

// Norm a head, if there is a weight, and rotate it; y is scratch, turns are cosines and sines.
static void turn(const Heads *h, const void *x, const void *weight, void *out, float *y, const float *turns) {
  size_t dim = h->dim, half = h->rotated / 2;
  vf scale = spread(weight ? inverse_rms(h->type, x, dim, h->eps) : 1.0f);
  for (size_t i = 0; i < dim; i += VL) {
    vf v = load_some(h->type, at(h->type, x, i), dim - i);
    if (weight) v = v * scale * load_some(h->weight_type, at(h->weight_type, weight, i), dim - i);
    store(F32, y + i, v);
  }
  const float *cosines = turns, *sines = turns + half;
  size_t step = h->traditional ? 2 : 1, apart = h->traditional ? 1 : half;
  for (size_t i = 0; i < half; i++) {
    float a = y[i * step], b = y[i * step + apart];
    y[i * step] = (a * cosines[i] - b * sines[i]) * h->scale;
    y[i * step + apart] = (b * cosines[i] + a * sines[i]) * h->scale;
  }
  for (size_t i = 0; i < dim; i += VL)
    store_some(h->type, (void *)at(h->type, out, i), load(F32, y + i), dim - i);
}

static void heads_part(const void *what, size_t first, size_t last, int thread) {
  const Heads *h = what;
  size_t dim = h->dim, half = h->rotated / 2, side = h->kv_heads * dim, query_step = (1 + (size_t)h->gated) * dim;
  size_t width = h->heads * query_step + h->layers * 2 * side;
  float *y = scratch(thread, dim + VL + 2 * half), *turns = y + (dim + VL - 1) / VL * VL;
  for (size_t r = first; r < last; r++) {
    for (size_t i = 0; i < half; i++) {
      float angle = (float)h->positions[r] * h->frequencies[i];
      turns[i] = cosf(angle);
      turns[half + i] = sinf(angle);
    }
    for (size_t i = 0; i < h->heads; i++)
      turn(h, at(h->type, h->x, r * width + i * query_step), h->query_weight,
           (void *)at(h->type, h->queries, (r * h->heads + i) * dim), y, turns);
    for (size_t layer = 0; layer < h->layers; layer++) {
      size_t from = r * width + h->heads * query_step + layer * 2 * side;
      size_t key = h->heads ? r * side : (r * h->layers + layer) * 2 * side;
      size_t value = key + (h->heads ? h->rows * side : side);
      const void *weight = h->key_weights ? at(h->weight_type, h->key_weights, layer * dim) : NULL;
      for (size_t i = 0; i < side; i += dim)
        turn(h, at(h->type, h->x, from + i), weight, (void *)at(h->type, h->key_values, key + i), y, turns);
      memcpy((void *)at(h->type, h->key_values, value), at(h->type, h->x, from + side), side * size_of(h->type));
    }
  }
}

EXPORT void cpu_norm_rope(const void *x, int type, const void *query_weight, const void *key_weights,
                          int weight_type, const int32_t *positions, const float *frequencies, void *queries,
                          void *key_values, size_t rows, size_t heads, size_t kv_heads, size_t layers, size_t dim,
                          size_t rotated, int traditional, int gated, float eps, float scale) {
  begin_call();
  Heads h = {x, query_weight, key_weights, positions, frequencies, queries, key_values, type, weight_type,
             traditional, gated, rows, heads, kv_heads, layers, dim, rotated, eps, scale};
  run_parts(heads_part, &h, rows, ROWS_EACH);
  end_call();
}
