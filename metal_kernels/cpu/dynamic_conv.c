// The grouped dynamic causal convolution of a DFlash 2 block. A channel of a row sums over the taps in order.
#include "lanes.h"
#include "threads.h"

enum { ROWS_EACH = 2 };  // fewer are not worth another thread

// x, residual and out [rows, width] in blocks of ``block`` rows; base [sides, taps, width]; dynamic
// [rows, sides, taps, groups].
typedef struct {
  const void *x, *base, *dynamic, *residual;
  void *out;
  int type, base_type, dynamic_type;
  size_t block, width, taps, groups, sides, side;
} Convolution;

// Channels c to c + here - 1 of a row, which lie in one group.
INLINE void convolve(const Convolution *d, size_t row, size_t group, size_t c, size_t here) {
  size_t reached = row % d->block + 1, taps = d->taps < reached ? d->taps : reached;
  vf sum = {0};
  for (size_t t = 0; t < taps; t++) {
    size_t own = ((row * d->sides + d->side) * d->taps + t) * d->groups + group;
    vf share = load_some(d->base_type, at(d->base_type, d->base, (d->side * d->taps + t) * d->width + c), here);
    share += number(d->dynamic_type, d->dynamic, own);
    sum = fused(share, load_some(d->type, at(d->type, d->x, (row - t) * d->width + c), here), sum);
  }
  if (d->residual) sum += load_some(d->type, at(d->type, d->residual, row * d->width + c), here);
  store_some(d->type, (void *)at(d->type, d->out, row * d->width + c), sum, here);
}

static void convolution_part(const void *what, size_t first, size_t last, int thread) {
  const Convolution *d = what;
  size_t size = d->width / d->groups;
  (void)thread;
  for (size_t row = first; row < last; row++)
    for (size_t group = 0; group < d->groups; group++)
      for (size_t i = 0; i < size; i += VL) convolve(d, row, group, group * size + i, least(VL, size - i));
}

EXPORT void cpu_dynamic_conv(const void *x, int type, const void *base, int base_type, const void *dynamic,
                             int dynamic_type, const void *residual, size_t rows, size_t block, size_t width,
                             size_t taps, size_t groups, size_t sides, size_t side, void *out) {
  begin_call();
  Convolution d = {x, base, dynamic, residual, out, type, base_type, dynamic_type,
                   block, width, taps, groups, sides, side};
  run_parts(convolution_part, &d, rows, ROWS_EACH);
  end_call();
}
