// Kernels of recurrent layers: short causal convolution, the gated delta rule (scalar gates, and gates of each key channel), and the norm
// that is gated. Each sequence's rows are walked in order with its state, so a token's arithmetic is the same in any chunk.
//
// Orders that are contract (same bits at every level, for every chunk, batch and split over threads):
//   short_conv  bias (or 0), then taps from the oldest on by fma; silu as x / (1 + exp(-x)).
//   delta_rule  q, k: (x * 1 / sqrt(sum_of_squares + eps)), q then times key_dim^-1/2; decay = exp(g). For each value column, over key
//               rows i ascending: kept_i = s_i * decay_i, seen = fma(k_i, kept_i, seen); delta = beta * (v - seen);
//               s_i = fma(k_i, delta, kept_i), y = fma(q_i, s_i, y).
//   gated_norm  norm as in rows.hpp, times w, times act(z).
//   delta_layer what the three do one after the other, a key head with its value heads at a time: what lies between them stays in the
//               thread's scratch, where three ops leave it to other threads' caches.
#include "recurrent.hpp"

#include "table.hpp"

namespace tiercel::TIERCEL_LEVEL {
namespace {

// Tokens whose keys, queries and gates are made at a time, for all blocks of a head.
constexpr int64_t kTileTokens = 16;

// A tile's operands, [kTileTokens][padded key_dim] each: what does not depend on the value column.
struct Tile {
  float *q, *k, *decay, *beta;
  int64_t stride;
};

TIERCEL_INLINE void normalised(const float* x, int64_t n, float eps, float scale, float* y) {
  const F16v factor = set1(1.0f / __builtin_sqrtf(sum_of_squares(x, n) + eps)), by = set1(scale);
  for (int64_t i = 0; i < n; i += 16) store(y + i, mul(mul(load_part(x + i, lanes_left(i, n)), factor), by));
}

struct Head {
  int64_t value_head, key_head;
  float exp_a;
};

TIERCEL_INLINE F16v decay_of(const DeltaRuleArgs& a, const Head& head, F16v gate, F16v bias) {
  const F16v s = add(gate, bias), exp_a = set1(head.exp_a);
  if (a.lower_bound < 0.0f) return exp(mul(set1(a.lower_bound), sigmoid(mul(exp_a, s))));
  return exp(mul(neg(exp_a), softplus(s)));
}

// Token i of the tile: its query and key.
TIERCEL_INLINE void prepare_keys(const DeltaRuleArgs& a, const float* q, const float* k, int64_t i, float scale, const Tile& tile) {
  normalised(q, a.key_dim, a.eps, scale, tile.q + i * tile.stride);
  normalised(k, a.key_dim, a.eps, 1.0f, tile.k + i * tile.stride);
}

// Its decays and its beta, of one value head.
TIERCEL_INLINE void prepare_gates(const DeltaRuleArgs& a, const Head& head, int64_t row, int64_t i, const Tile& tile) {
  float* decay = tile.decay + i * tile.stride;
  if (a.is_per_channel) {
    const float* gate = a.gate + row * a.ld_gate + head.value_head * a.key_dim;
    const float* bias = a.dt_bias + head.value_head * a.key_dim;
    for (int64_t j = 0; j < a.key_dim; j += 16) {
      const int n = lanes_left(j, a.key_dim);
      store(decay + j, decay_of(a, head, load_part(gate + j, n), load_part(bias + j, n)));
    }
  } else {
    const F16v one = decay_of(a, head, set1(a.gate[row * a.ld_gate + head.value_head]), set1(a.dt_bias[head.value_head]));
    for (int64_t j = 0; j < a.key_dim; j += 16) store(decay + j, one);
  }
  tile.beta[i] = first_lane(sigmoid(set1(a.beta[row * a.ld_beta + head.value_head])));
}

// One token of one block: what walk does, while the block behind it, of as many bytes, is fetched to L2.
template <int V>
TIERCEL_INLINE void walk_one(float* state, int64_t key_dim, const Tile& tile, const float* v, int64_t columns, float* y) {
  F16v seen[V], delta[V], out[V];
  for (int j = 0; j < V; ++j) seen[j] = zero();
  const float* next = state + key_dim * V * 16;
  for (int64_t i = 0; i < key_dim; ++i, next += V * 8) {
    const F16v k = set1(tile.k[i]), decay = set1(tile.decay[i]);
    float* s = state + i * V * 16;
    __builtin_prefetch(next, 0, 2);
    for (int j = 0; j < V; ++j) {
      const F16v kept = mul(load(s + 16 * j), decay);
      seen[j] = fma(k, kept, seen[j]);
      store(s + 16 * j, kept);
    }
  }
  const F16v beta = set1(tile.beta[0]);
  for (int j = 0; j < V; ++j) {
    delta[j] = mul(beta, sub(load_part(v + 16 * j, lanes_left(16 * j, columns)), seen[j]));
    out[j] = zero();
  }
  for (int64_t i = 0; i < key_dim; ++i, next += V * 8) {
    const F16v k = set1(tile.k[i]), q = set1(tile.q[i]);
    float* s = state + i * V * 16;
    __builtin_prefetch(next, 0, 2);
    for (int j = 0; j < V; ++j) {
      const F16v now = fma(k, delta[j], load(s + 16 * j));
      out[j] = fma(q, now, out[j]);
      store(s + 16 * j, now);
    }
  }
  for (int j = 0; j < V; ++j) store_part(y + 16 * j, out[j], lanes_left(16 * j, columns));
}

// n tokens of one block of V * 16 columns. One pass over the state finishes a token and begins the next.
template <int V>
TIERCEL_INLINE void walk(float* state, int64_t key_dim, int64_t n, const Tile& tile, const float* v, int64_t ldv, int64_t columns, float* y,
                         int64_t ldy) {
  F16v seen[V], delta[V], out[V];
  for (int j = 0; j < V; ++j) seen[j] = zero();
  for (int64_t i = 0; i < key_dim; ++i) {
    const F16v k = set1(tile.k[i]), decay = set1(tile.decay[i]);
    float* s = state + i * V * 16;
    for (int j = 0; j < V; ++j) {
      const F16v kept = mul(load(s + 16 * j), decay);
      seen[j] = fma(k, kept, seen[j]);
      store(s + 16 * j, kept);
    }
  }
  for (int64_t t = 0; t < n; ++t) {
    const float *k = tile.k + t * tile.stride, *q = tile.q + t * tile.stride;
    const F16v beta = set1(tile.beta[t]);
    for (int j = 0; j < V; ++j) {
      delta[j] = mul(beta, sub(load_part(v + t * ldv + 16 * j, lanes_left(16 * j, columns)), seen[j]));
      seen[j] = out[j] = zero();
    }
    if (t + 1 < n) {
      const float *next_k = k + tile.stride, *next_decay = tile.decay + (t + 1) * tile.stride;
      for (int64_t i = 0; i < key_dim; ++i) {
        const F16v ki = set1(k[i]), qi = set1(q[i]), next_ki = set1(next_k[i]), decay = set1(next_decay[i]);
        float* s = state + i * V * 16;
        for (int j = 0; j < V; ++j) {
          const F16v now = fma(ki, delta[j], load(s + 16 * j));
          out[j] = fma(qi, now, out[j]);
          const F16v kept = mul(now, decay);
          seen[j] = fma(next_ki, kept, seen[j]);
          store(s + 16 * j, kept);
        }
      }
    } else {
      for (int64_t i = 0; i < key_dim; ++i) {
        const F16v ki = set1(k[i]), qi = set1(q[i]);
        float* s = state + i * V * 16;
        for (int j = 0; j < V; ++j) {
          const F16v now = fma(ki, delta[j], load(s + 16 * j));
          out[j] = fma(qi, now, out[j]);
          store(s + 16 * j, now);
        }
      }
    }
    for (int j = 0; j < V; ++j) store_part(y + t * ldy + 16 * j, out[j], lanes_left(16 * j, columns));
  }
}

void walk_block(float* state, int64_t key_dim, int64_t n, const Tile& tile, const float* v, int64_t ldv, int64_t columns, float* y,
                int64_t ldy) {
  const bool is_half = columns <= 16;
  if (n == 1) return is_half ? walk_one<1>(state, key_dim, tile, v, columns, y) : walk_one<2>(state, key_dim, tile, v, columns, y);
  is_half ? walk<1>(state, key_dim, n, tile, v, ldv, columns, y, ldy) : walk<2>(state, key_dim, n, tile, v, ldv, columns, y, ldy);
}

// A sequence's rows of a convolution: x and y at their first row, y at its column of channel `begin`.
struct ConvRows {
  const float* x;
  int64_t n;
  const float* before; // the width - 1 rows of x before them, ld_before apart; nullptr: nothing came before
  int64_t ld_before;
  float* state;       // where the last width - 1 rows go; nullptr: nowhere
  int64_t begin, end; // channels
  float* y;
  int64_t ldy;
};

// V * 16 channels from c on; taps and window stay in registers over all rows.
template <int Width, int V>
TIERCEL_INLINE void convolve(const ShortConvArgs& a, const ConvRows& r, int64_t c) {
  F16v w[Width][V], window[Width][V], bias[V];
  for (int v = 0; v < V; ++v) {
    bias[v] = a.bias != nullptr ? load(a.bias + c + 16 * v) : zero();
    for (int j = 0; j < Width; ++j) w[j][v] = load(a.w + j * a.channels + c + 16 * v);
    for (int j = 0; j + 1 < Width; ++j) window[j][v] = r.before == nullptr ? zero() : load(r.before + j * r.ld_before + c + 16 * v);
  }
  float* y = r.y + c - r.begin;
  for (int64_t t = 0; t < r.n; ++t)
    for (int v = 0; v < V; ++v) {
      window[Width - 1][v] = load(r.x + t * a.ldx + c + 16 * v);
      F16v sum = bias[v];
      for (int j = 0; j < Width; ++j) sum = fma(w[j][v], window[j][v], sum);
      store(y + t * r.ldy + 16 * v, a.has_silu ? silu(sum) : sum);
      for (int j = 0; j + 1 < Width; ++j) window[j][v] = window[j + 1][v];
    }
  if (r.state == nullptr) return;
  for (int v = 0; v < V; ++v)
    for (int j = 0; j + 1 < Width; ++j) store(r.state + j * a.channels + c + 16 * v, window[j][v]);
}

// Any width, any number of channels.
void convolve_any(const ShortConvArgs& a, const ConvRows& r) {
  const int64_t before = a.width - 1;
  // Input i of the rows; below 0 it came in an earlier step, or never.
  const auto input = [&](int64_t i, int64_t c, int lanes) {
    if (i >= 0) return load_part(r.x + i * a.ldx + c, lanes);
    return r.before == nullptr ? zero() : load_part(r.before + (before + i) * r.ld_before + c, lanes);
  };
  for (int64_t t = 0; t < r.n; ++t)
    for (int64_t c = r.begin; c < r.end; c += 16) {
      const int lanes = lanes_left(c, r.end);
      F16v sum = a.bias != nullptr ? load_part(a.bias + c, lanes) : zero();
      for (int64_t j = 0; j < a.width; ++j) sum = fma(load_part(a.w + j * a.channels + c, lanes), input(t - before + j, c, lanes), sum);
      store_part(r.y + t * r.ldy + c - r.begin, a.has_silu ? silu(sum) : sum, lanes);
    }
  if (r.state == nullptr) return;
  // Ascending: what is read lies behind what is written.
  for (int64_t j = 0; j < before; ++j)
    for (int64_t c = r.begin; c < r.end; c += 16) {
      const int lanes = lanes_left(c, r.end);
      store_part(r.state + j * a.channels + c, input(r.n - before + j, c, lanes), lanes);
    }
}

void convolve_rows(const ShortConvArgs& a, const ConvRows& r) {
  // What models have: one pass, where the general form makes two for each row.
  if (a.width != 4 || (r.end - r.begin) % 16 != 0) return convolve_any(a, r);
  int64_t c = r.begin;
  for (; c + 32 <= r.end; c += 32) convolve<4, 2>(a, r, c);
  for (; c < r.end; c += 16) convolve<4, 1>(a, r, c);
}

TIERCEL_INLINE Tile tile_at(float* scratch, int64_t key_dim) {
  const int64_t stride = (key_dim + 15) / 16 * 16, floats = kTileTokens * stride;
  return {scratch, scratch + floats, scratch + 2 * floats, scratch + 3 * floats, stride};
}

// Blocks first_block .. end_block of a head's columns, for the n tokens of the tile; state at the first block, v and y at the head's first
// column.
TIERCEL_INLINE void walk_blocks(const DeltaRuleArgs& a, float* state, int64_t first_block, int64_t end_block, int64_t n, const Tile& tile,
                                const float* v, int64_t ldv, float* y, int64_t ldy) {
  for (int64_t b = first_block; b < end_block; ++b) {
    const int64_t column = b * kBlockColumns, left = a.value_dim - column;
    walk_block(state + a.key_dim * (column - first_block * kBlockColumns), a.key_dim, n, tile, v + column, ldv,
               left < kBlockColumns ? left : kBlockColumns, y + column, ldy);
  }
}

TIERCEL_INLINE int64_t padded_columns(int64_t value_dim) { return (value_dim + 15) / 16 * 16; }

TIERCEL_INLINE Head head_of(const DeltaRuleArgs& a, int64_t h) {
  return {h, h / (a.value_heads / a.key_heads), first_lane(exp(set1(a.a_log[h])))};
}

// What a key head's convolutions read of one row, into L2: little of each of many places, which no stream of the processor's follows.
TIERCEL_INLINE void fetch_convolutions(const DeltaLayerArgs& a, const StepView& view, int64_t unit) {
  const DeltaRuleArgs& r = a.rule;
  const int64_t s = unit / r.key_heads, key_head = unit % r.key_heads, keys = r.key_heads * r.key_dim;
  const int64_t group_columns = r.value_heads / r.key_heads * r.value_dim;
  const float* windows = state_of(a.conv.state, view.seq_slot[s]);
  const float* x = a.conv.x + view.seq_rows[s] * a.conv.ldx;
  const int64_t begins[] = {key_head * r.key_dim, keys + key_head * r.key_dim, 2 * keys + key_head * group_columns};
  for (int i = 0; i < 3; ++i)
    for (int64_t c = begins[i], end = c + (i < 2 ? r.key_dim : group_columns); c < end; c += 16) {
      __builtin_prefetch(x + c, 0, 2);
      for (int64_t j = 0; j + 1 < a.conv.width; ++j) __builtin_prefetch(windows + j * a.conv.channels + c, 0, 2);
      for (int64_t j = 0; j < a.conv.width; ++j) __builtin_prefetch(a.conv.w + j * a.conv.channels + c, 0, 2);
    }
}

TIERCEL_INLINE void norm_head(const GatedNormArgs& a, const float* x, const float* z, float* y) {
  const F16v factor = set1(a.w != nullptr ? norm_factor(x, a.head_dim, a.eps) : 1.0f);
  for (int64_t i = 0; i < a.head_dim; i += 16) {
    const int n = lanes_left(i, a.head_dim);
    F16v v = load_part(x + i, n);
    if (a.w != nullptr) v = mul(mul(v, factor), load_part(a.w + i, n));
    const F16v gate = a.is_gate_per_head ? set1(*z) : load_part(z + i, n);
    store_part(y + i, mul(v, a.is_plain ? gate : a.is_sigmoid ? sigmoid(gate) : silu(gate)), n);
  }
}

TIERCEL_INLINE void norm_head_of_row(const GatedNormArgs& a, int64_t row, int64_t h, const float* x) {
  norm_head(a, x, a.z + row * a.ldz + (a.is_gate_per_head ? h : h * a.head_dim), a.y + row * a.ldy + h * a.head_dim);
}

} // namespace

void short_conv(const ShortConvArgs& a, const StepView& view, const ThreadCtx& ctx) {
  const Range mine = share((a.channels + 15) / 16, ctx);
  const int64_t begin = mine.begin * 16, end = mine.end * 16 < a.channels ? mine.end * 16 : a.channels;
  for (int32_t s = 0; s < view.n_seqs; ++s) {
    const int64_t first = view.seq_rows[s], n = view.seq_rows[s + 1] - first;
    if (n == 0) continue;
    float* window = state_of(a.state, view.seq_slot[s]);
    convolve_rows(a, {a.x + first * a.ldx, n, view.seq_start[s] == 0 ? nullptr : window, a.channels,
                      is_on_trial(view, s) ? nullptr : window, begin, end, a.y + first * a.ldy + begin, a.ldy});
  }
}

void delta_rule(const DeltaRuleArgs& a, const StepView& view, const ThreadCtx& ctx) {
  const int64_t n_blocks = (a.value_dim + kBlockColumns - 1) / kBlockColumns;
  const Tile tile = tile_at(reinterpret_cast<float*>(ctx.scratch), a.key_dim);
  const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(a.key_dim));
  const int64_t keys = a.key_heads * a.key_dim, columns = padded_columns(a.value_dim);
  const Range mine = share(view.n_seqs * a.value_heads * n_blocks, ctx);
  for (int64_t u = mine.begin; u < mine.end;) {
    const int64_t s = u / (a.value_heads * n_blocks), h = u / n_blocks % a.value_heads, first_block = u % n_blocks;
    const int64_t end_block = first_block + mine.end - u < n_blocks ? first_block + mine.end - u : n_blocks;
    u += end_block - first_block;
    const int64_t first = view.seq_rows[s], n = view.seq_rows[s + 1] - first;
    if (n == 0) continue;
    const Head head = head_of(a, h);
    const int64_t from = first_block * kBlockColumns, to = end_block * kBlockColumns < columns ? end_block * kBlockColumns : columns;
    float* state = walked_state(view, s, state_of(a.state, view.seq_slot[s]) + a.key_dim * (h * columns + from), a.key_dim * (to - from),
                                tile.beta + kTileTokens);
    for (int64_t t = 0; t < n; t += kTileTokens) {
      const int64_t n_tile = n - t < kTileTokens ? n - t : kTileTokens;
      for (int64_t i = 0; i < n_tile; ++i) {
        const float* q = a.qkv + (first + t + i) * a.ld_qkv + head.key_head * a.key_dim;
        prepare_keys(a, q, q + keys, i, scale, tile);
        prepare_gates(a, head, first + t + i, i, tile);
      }
      walk_blocks(a, state, first_block, end_block, n_tile, tile, a.qkv + (first + t) * a.ld_qkv + 2 * keys + h * a.value_dim, a.ld_qkv,
                  a.y + (first + t) * a.ldy + h * a.value_dim, a.ldy);
    }
  }
}

void gated_norm(const GatedNormArgs& a, const ThreadCtx& ctx) {
  const Range mine = share(a.m * a.heads, ctx);
  for (int64_t u = mine.begin; u < mine.end; ++u) {
    const int64_t row = u / a.heads, h = u % a.heads;
    norm_head_of_row(a, row, h, a.x + row * a.ldx + h * a.head_dim);
  }
}

void delta_layer(const DeltaLayerArgs& a, const StepView& view, const ThreadCtx& ctx) {
  const DeltaRuleArgs& r = a.rule;
  const int64_t group = r.value_heads / r.key_heads, d = r.key_dim, e = r.value_dim, keys = r.key_heads * d;
  const int64_t n_blocks = (e + kBlockColumns - 1) / kBlockColumns, head_floats = d * padded_columns(e);
  const Tile tile = tile_at(reinterpret_cast<float*>(ctx.scratch), d);
  // A tile's convolved rows, [query | key | values of the group], and one head's outputs.
  const int64_t ld = 2 * d + group * e;
  float* qkv = tile.beta + kTileTokens;
  float* outputs = qkv + kTileTokens * ld;
  const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(d));
  const Range mine = share(view.n_seqs * r.key_heads, ctx);
  for (int64_t u = mine.begin; u < mine.end; ++u) {
    const int64_t s = u / r.key_heads, key_head = u % r.key_heads;
    const int64_t first = view.seq_rows[s], n = view.seq_rows[s + 1] - first;
    if (n == 0) continue;
    float* window = state_of(a.conv.state, view.seq_slot[s]);
    const float* x = a.conv.x + first * a.conv.ldx;
    const bool is_tried = is_on_trial(view, s);
    if (n == 1 && u + 1 < mine.end) fetch_convolutions(a, view, u + 1);
    float* states = walked_state(view, s, state_of(r.state, view.seq_slot[s]) + key_head * group * head_floats, group * head_floats,
                                 outputs + kTileTokens * e);
    for (int64_t t = 0; t < n; t += kTileTokens) {
      const int64_t n_tile = n - t < kTileTokens ? n - t : kTileTokens;
      // On trial the window stays as it was: a further tile's begins with rows of this step.
      const bool is_first = t == 0, is_behind = is_tried && !is_first;
      const float* before = is_behind ? x + (t - a.conv.width + 1) * a.conv.ldx : view.seq_start[s] == 0 && is_first ? nullptr : window;
      const auto convolved = [&](int64_t begin, int64_t count, float* y) {
        convolve_rows(a.conv, {x + t * a.conv.ldx, n_tile, before, is_behind ? a.conv.ldx : a.conv.channels, is_tried ? nullptr : window,
                               begin, begin + count, y, ld});
      };
      convolved(key_head * d, d, qkv);
      convolved(keys + key_head * d, d, qkv + d);
      convolved(2 * keys + key_head * group * e, group * e, qkv + 2 * d);
      for (int64_t i = 0; i < n_tile; ++i) prepare_keys(r, qkv + i * ld, qkv + i * ld + d, i, scale, tile);
      for (int64_t g = 0; g < group; ++g) {
        const Head head = head_of(r, key_head * group + g);
        for (int64_t i = 0; i < n_tile; ++i) prepare_gates(r, head, first + t + i, i, tile);
        walk_blocks(r, states + g * head_floats, 0, n_blocks, n_tile, tile, qkv + 2 * d + g * e, ld, outputs, e);
        if (a.norm.y == nullptr) continue;
        for (int64_t i = 0; i < n_tile; ++i) norm_head_of_row(a.norm, first + t + i, head.value_head, outputs + i * e);
      }
    }
  }
}

} // namespace tiercel::TIERCEL_LEVEL
