// Calls every function of the CPU library, from two threads and after a fork, over arrays of their exact sizes.
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

static size_t size_of(int type) { return type == 2 ? 4 : 2; }

static void *bytes(size_t count, int value) {
  void *memory = malloc(count);
  memset(memory, value, count);
  return memory;
}

// 0x3c3c is about 0.01 in bfloat16, 1.06 in float16; 0x3c3c3c3c is about 0.01 in float32.
static void *numbers(size_t count, int type) { return bytes(count * size_of(type), 0x3c); }

static void products(int type, int bits, size_t rows, int gated) {
  enum { DEPTH = 96, OUTPUTS = 58, GROUP = 32, EXPERTS = 3 };
  size_t depth = bits ? DEPTH : DEPTH + 5, width = gated ? OUTPUTS / 2 : OUTPUTS;
  size_t packed = bits ? OUTPUTS * depth * (size_t)bits / 8 : OUTPUTS * depth * size_of(type);
  size_t groups = OUTPUTS * depth / GROUP;
  void *x = numbers(rows * depth, type), *weight = bytes(EXPERTS * packed, 0x3c);
  void *scales = numbers(EXPERTS * groups, type), *biases = numbers(EXPERTS * groups, type);
  void *bias = numbers(OUTPUTS, type), *residual = numbers(rows * width, type), *out = numbers(rows * width, type);
  cpu_linear(x, type, rows, weight, scales, biases, bits, type, bits ? GROUP : 0, depth, OUTPUTS, bias, type, residual,
             gated, out);
  int32_t *experts = bytes(rows * sizeof *experts, 0);
  for (size_t i = 0; i < rows; i++) experts[i] = (int32_t)(i % EXPERTS);
  cpu_gather(x, type, rows, 1, experts, weight, scales, biases, bits, type, bits ? GROUP : 0, depth, OUTPUTS, gated, out);
  void *all[] = {x, weight, scales, biases, bias, residual, out, experts};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

static void attention(int type, size_t dim, int is_tree, int block, size_t window) {
  enum { ROWS = 5, HEADS = 6, KV = 1, LAYERS = 2, SLOTS = 4, PAGES = 3, LENGTH = 10 };
  size_t side = SLOTS * KV * dim, width = (HEADS + 2 * KV) * dim;
  void *joined = numbers(ROWS * width, type), *weights = numbers(dim, type);
  void *queries = numbers(ROWS * HEADS * dim, type), *kv = numbers(2 * ROWS * KV * dim, type);
  int32_t positions[ROWS] = {10, 11, 12, 13, 14}, pages[PAGES] = {2, 0, 1}, lengths[] = {LENGTH}, starts[] = {0, ROWS};
  int32_t paths[ROWS * ROWS];
  float *frequencies = calloc(dim / 2, sizeof *frequencies);
  for (int r = 0; r < ROWS; r++)
    for (int i = 0; i < ROWS; i++) paths[r * ROWS + i] = i == 0 ? 0 : i == 1 && r ? r : -1;
  cpu_norm_rope(joined, type, weights, weights, type, positions, frequencies, queries, kv, ROWS, HEADS, KV, 1, dim, dim,
                0, 0, 1e-6f, 1.0f);
  void *pool = numbers(PAGES * LAYERS * 2 * side, type), *out = numbers(ROWS * HEADS * dim, type);
  void *sinks = numbers(HEADS, type);
  const char *values = (const char *)kv + ROWS * KV * dim * size_of(type);
  cpu_attention(queries, kv, values, type, pool, 2 * side, pages, lengths, starts, is_tree ? paths : NULL, sinks, type,
                out, ROWS, HEADS, KV, dim, 1, PAGES, SLOTS, LAYERS * 2 * side, side, window, block, 0.1f, 20.0f);
  cpu_rms_norm(out, type, weights, type, ROWS * HEADS, dim, 1e-6f, out);
  void *all[] = {joined, weights, queries, kv, frequencies, pool, out, sinks};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

static void *everything(void *unused) {
  static const int all_bits[] = {0, 2, 3, 4, 5, 6, 8};
  static const size_t rows[] = {1, 2, 3, 7, 16, 33};
  (void)unused;
  for (int type = 0; type < 3; type++) {
    for (size_t b = 0; b < 7; b++)
      for (size_t r = 0; r < 6; r++) products(type, all_bits[b], rows[r], (int)(r % 2));
    attention(type, 64, 0, 0, 0);
    attention(type, 20, 1, 0, 7);
    attention(type, 32, 0, 1, 3);
  }
  return NULL;
}

int main(int count, char **words) {
  cpu_threads(3);
  pthread_t other;
  pthread_create(&other, NULL, everything, NULL);
  everything(NULL);
  pthread_join(other, NULL);
  if (count > 1 && !strcmp(words[1], "--no-fork")) return 0;
  pid_t child = fork();
  if (child == 0) {
    everything(NULL);
    _exit(0);
  }
  int status = 1;
  waitpid(child, &status, 0);
  puts(status ? "the child failed" : "done");
  return status != 0;
}
