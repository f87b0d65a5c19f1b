// A tile of one value head's state [DV, DK] in the registers of a simdgroup. LANES lanes share a value row; lane
// l of them holds keys 4 l to 4 l + 3 of every run of 32. A sum over keys goes over a lane's runs in order, then
// over pairs of lanes: one order, however many rows a pass has.
constant constexpr int LANES = 8;
constant constexpr int VALUES = 2;  // value rows that a lane holds
constant constexpr int SIMDGROUPS = 4;

METAL_FUNC void load4(const device float* from, thread float* to) {
  const float4 four = *(const device float4*)(from);
  to[0] = four.x;
  to[1] = four.y;
  to[2] = four.z;
  to[3] = four.w;
}

// The same for types of two bytes.
template <typename T>
METAL_FUNC void load4(const device T* from, thread float* to) {
  const uint2 pairs = *(const device uint2*)(from);
  to[0] = float(as_type<T>(ushort(pairs.x & 0xffffu)));
  to[1] = float(as_type<T>(ushort(pairs.x >> 16)));
  to[2] = float(as_type<T>(ushort(pairs.y & 0xffffu)));
  to[3] = float(as_type<T>(ushort(pairs.y >> 16)));
}

template <int DK, typename T>
METAL_FUNC void load_keys(const device T* from, thread float* to) {
  for (int run = 0; run < DK / 32; ++run) load4(from + 32 * run, to + 4 * run);
}

template <int DK>
struct StateTile {
  float s[VALUES][DK / LANES];

  METAL_FUNC void load(const device float* from) {
    for (int i = 0; i < VALUES; ++i) load_keys<DK>(from + i * DK, s[i]);
  }

  METAL_FUNC void store(device float* to) {
    for (int i = 0; i < VALUES; ++i) {
      for (int run = 0; run < DK / 32; ++run) {
        float4 four;
        four.x = s[i][4 * run];
        four.y = s[i][4 * run + 1];
        four.z = s[i][4 * run + 2];
        four.w = s[i][4 * run + 3];
        *(device float4*)(to + i * DK + 32 * run) = four;
      }
    }
  }

  // S x for each value row, in all of its lanes.
  METAL_FUNC void times(const thread float* x, thread float* product) const {
    for (int i = 0; i < VALUES; ++i) {
      float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      for (int j = 0; j < DK / LANES; ++j) sums[j % 4] = metal::fma(s[i][j], x[j], sums[j % 4]);
      product[i] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }
    for (int step = 1; step < LANES; step *= 2) {
      for (int i = 0; i < VALUES; ++i) product[i] += metal::simd_shuffle_xor(product[i], ushort(step));
    }
  }

  // S := decay S, then S := S + beta (v - S k) k'.
  METAL_FUNC void step(const thread float* key, const thread float* value, float decay, float beta) {
    for (int i = 0; i < VALUES; ++i) {
      for (int j = 0; j < DK / LANES; ++j) s[i][j] = decay * s[i][j];
    }
    float known[VALUES];
    times(key, known);
    for (int i = 0; i < VALUES; ++i) {
      const float delta = (value[i] - known[i]) * beta;
      for (int j = 0; j < DK / LANES; ++j) s[i][j] = metal::fma(key[j], delta, s[i][j]);
    }
  }
};

// The sizes of one layer. RAW: g and beta hold the projections that the gates are computed from. Their rows are
// G_ROW and BETA_ROW apart and begin at columns G_AT and BETA_AT.
template <int HK_, int HV_, int DK_, int DV_, bool RAW_, int G_ROW_, int G_AT_, int BETA_ROW_, int BETA_AT_>
struct DeltaShape {
  static constant constexpr int HK = HK_, HV = HV_, DK = DK_, DV = DV_;
  static constant constexpr bool RAW = RAW_;
  static constant constexpr int G_ROW = G_ROW_, G_AT = G_AT_, BETA_ROW = BETA_ROW_, BETA_AT = BETA_AT_;
};

// Where a lane works: the first of its keys and of its value rows, its head, its sequence.
struct Place {
  int lane, key, value, head, sequence;
};

METAL_FUNC Place place_of(uint3 group, uint simdgroup, uint lane) {
  Place at;
  at.lane = int(lane);
  at.key = 4 * int(lane % LANES);
  at.value = int((group.x * SIMDGROUPS + simdgroup) * (32 / LANES) + lane / LANES) * VALUES;
  at.head = int(group.y);
  at.sequence = int(group.z);
  return at;
}

template <typename Shape>
METAL_FUNC long state_offset(Place at, int slot) {
  return ((long(slot) * Shape::HV + at.head) * Shape::DV + at.value) * Shape::DK + at.key;
}

struct Gates {
  float decay, beta;
};

METAL_FUNC float softplus(float x) {
  const float small = metal::precise::exp(-metal::fabs(x));
  const float large = metal::max(x, 0.0f);
  // log(1 + small) alone would lose the low bits of small.
  const float sum = 1.0f + small;
  return sum == 1.0f ? large + small : metal::fma(metal::precise::log(sum), small / (sum - 1.0f), large);
}

METAL_FUNC Gates gates_of(float a, float b, float a_log, float dt_bias) {
  Gates gates;
  gates.decay = metal::precise::exp(-metal::precise::exp(a_log) * softplus(a + dt_bias));
  gates.beta = 1.0f / (1.0f + metal::precise::exp(-b));
  return gates;
}

// What a lane needs of one row.
template <int DK>
struct DeltaRow {
  float key[DK / LANES], query[DK / LANES], value[VALUES];

  template <bool READ, typename T>
  METAL_FUNC void load(const device T* k, const device T* v, const device T* q) {
    load_keys<DK>(k, key);
    if (READ) load_keys<DK>(q, query);
    for (int i = 0; i < VALUES; ++i) value[i] = float(v[i]);
  }
};

// Steps a tile through the rows begin to begin + rows - 1, at most 32; READ also writes S q of each.
template <typename Shape, bool READ, typename T, typename G, typename B, typename A, typename D>
METAL_FUNC void step_some(
    thread StateTile<Shape::DK>& tile, Place at, int begin, int rows, const device T* q, const device T* k,
    const device T* v, G g, B beta, A a_log, D dt_bias, device T* out) {
  // Lane i computes the gates of row i.
  Gates gates;
  gates.decay = 1.0f;
  gates.beta = 0.0f;
  if (at.lane < rows) {
    gates.decay = float(g[(begin + at.lane) * Shape::G_ROW + Shape::G_AT + at.head]);
    gates.beta = float(beta[(begin + at.lane) * Shape::BETA_ROW + Shape::BETA_AT + at.head]);
    if (Shape::RAW) gates = gates_of(gates.decay, gates.beta, float(a_log[at.head]), float(dt_bias[at.head]));
  }
  const int key_row = Shape::HK * Shape::DK, value_row = Shape::HV * Shape::DV;
  const int keys = begin * key_row + at.head / (Shape::HV / Shape::HK) * Shape::DK + at.key;
  const int values = begin * value_row + at.head * Shape::DV + at.value;
  DeltaRow<Shape::DK> next;
  next.template load<READ>(k + keys, v + values, q + keys);
  for (int row = 0; row < rows; ++row) {
    // The next row is on its way while this one is at work.
    const DeltaRow<Shape::DK> now = next;
    const int ahead = metal::min(row + 1, rows - 1);
    const int key_ahead = keys + ahead * key_row;
    next.template load<READ>(k + key_ahead, v + values + ahead * value_row, q + key_ahead);
    const float decay = metal::simd_shuffle(gates.decay, ushort(row));
    const float update = metal::simd_shuffle(gates.beta, ushort(row));
    tile.step(now.key, now.value, decay, update);
    if (READ) {
      float product[VALUES];
      tile.times(now.query, product);
      for (int i = 0; i < VALUES && at.key == 0; ++i) out[values + row * value_row + i] = T(product[i]);
    }
  }
}

// The same for any number of rows.
template <typename Shape, bool READ, typename T, typename G, typename B, typename A, typename D>
METAL_FUNC void step_rows(
    thread StateTile<Shape::DK>& tile, Place at, int begin, int rows, const device T* q, const device T* k,
    const device T* v, G g, B beta, A a_log, D dt_bias, device T* out) {
  for (int done = 0; done < rows; done += 32)
    step_some<Shape, READ>(
        tile, at, begin + done, metal::min(rows - done, 32), q, k, v, g, beta, a_log, dt_bias, out);
}
