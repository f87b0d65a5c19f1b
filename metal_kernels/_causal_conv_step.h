// A unit is one head's channels: q heads first, then k heads, then v heads. A simdgroup has one unit of one row,
// and its lane l channels l, l + 32, ...
constant constexpr int SIMDGROUPS = 4;
constant constexpr float EPSILON = 1e-6f;

template <int HK_, int DK_, int HV_, int DV_, int W_, int X_ROW_, int X_AT_>
struct ConvShape {
  static constant constexpr int HK = HK_, DK = DK_, HV = HV_, DV = DV_, W = W_, X_ROW = X_ROW_, X_AT = X_AT_;
  static constant constexpr int UNITS = 2 * HK + HV, CHANNELS = 2 * HK * DK + HV * DV;
};

// The inputs of one sequence, oldest first: W - 1 kept ones, the accepted old rows, the new rows.
template <typename Shape, typename T>
struct Inputs {
  const device T* kept;
  const device T* old;
  const device T* rows;
  int old_rows;

  // Input number i, counted from the first new row; i >= 1 - W.
  METAL_FUNC const device T* at(int i) const {
    if (i >= 0) return rows + i * Shape::X_ROW;
    const int from_oldest = i + Shape::W - 1 + old_rows;
    if (from_oldest < Shape::W - 1) return kept + from_oldest * Shape::CHANNELS;
    return old + (from_oldest - (Shape::W - 1)) * Shape::X_ROW;
  }
};

// Convolves D channels, from ``channel`` on, of new row i. NORMALISED: scaled to the length ``scale``.
template <typename Shape, int D, bool NORMALISED, typename T, typename V>
METAL_FUNC void convolve(
    Inputs<Shape, T> inputs, int i, const device V* weight, int channel, float scale, int lane, device T* to) {
  float y[D / 32];
  for (int j = 0; j < D / 32; ++j) y[j] = 0.0f;
  for (int tap = 0; tap < Shape::W; ++tap) {
    const device T* from = inputs.at(i + tap - (Shape::W - 1)) + channel + lane;
    for (int j = 0; j < D / 32; ++j)
      y[j] = metal::fma(float(weight[(channel + lane + 32 * j) * Shape::W + tap]), float(from[32 * j]), y[j]);
  }
  for (int j = 0; j < D / 32; ++j) y[j] = y[j] / (1.0f + metal::precise::exp(-y[j]));
  float factor = scale;
  if (NORMALISED) {
    float squares = 0.0f;
    for (int j = 0; j < D / 32; ++j) squares = metal::fma(y[j], y[j], squares);
    factor = factor * metal::precise::rsqrt(metal::simd_sum(squares) + EPSILON);
  }
  for (int j = 0; j < D / 32; ++j) to[lane + 32 * j] = T(y[j] * factor);
}

// Convolves a unit of new row i, which is row ``row`` of the outputs.
template <typename Shape, typename T, typename V>
METAL_FUNC void convolve_unit(
    Inputs<Shape, T> inputs, int i, int row, int unit, int lane, const device V* weight,
    device T* q, device T* k, device T* v) {
  const int value_head = unit - 2 * Shape::HK;
  if (value_head >= 0) {
    convolve<Shape, Shape::DV, false>(
        inputs, i, weight, 2 * Shape::HK * Shape::DK + value_head * Shape::DV, 1.0f, lane,
        v + (row * Shape::HV + value_head) * Shape::DV);
  } else {
    const bool is_query = unit < Shape::HK;
    const int head = is_query ? unit : unit - Shape::HK;
    const float scale = is_query ? metal::precise::rsqrt(float(Shape::DK)) : 1.0f;
    device T* to = (is_query ? q : k) + (row * Shape::HK + head) * Shape::DK;
    convolve<Shape, Shape::DK, true>(inputs, i, weight, unit * Shape::DK, scale, lane, to);
  }
}

// Writes the unit's channels of the W - 1 inputs before new row ``end``.
template <typename Shape, typename T>
METAL_FUNC void keep_unit(Inputs<Shape, T> inputs, int end, int unit, int lane, device T* to) {
  const int value_head = unit - 2 * Shape::HK;
  const int size = value_head < 0 ? Shape::DK : Shape::DV;
  const int channel = value_head < 0 ? unit * size : 2 * Shape::HK * Shape::DK + value_head * size;
  for (int i = 0; i < Shape::W - 1; ++i) {
    const device T* from = inputs.at(end + i - (Shape::W - 1));
    for (int c = channel + lane; c < channel + size; c += 32) to[i * Shape::CHANNELS + c] = from[c];
  }
}
