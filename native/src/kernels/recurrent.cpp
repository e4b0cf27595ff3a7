// Kernels of recurrent layers: short causal convolution, the gated delta rule (scalar gates, and gates of each key channel), and the norm
// that is gated. Each sequence's rows are walked in order with its state, so a token's arithmetic is the same in any chunk.
//
// Orders that are contract (same bits at every level, for every chunk, batch and split over threads):
//   short_conv  bias (or 0), then taps from the oldest on by fma; silu as x / (1 + exp(-x)).
//   delta_rule  q, k: (x * 1 / sqrt(sum_of_squares + eps)), q then times key_dim^-1/2; decay = exp(g). For each value column, over key
//               rows i ascending: kept_i = s_i * decay_i, seen = fma(k_i, kept_i, seen); delta = beta * (v - seen);
//               s_i = fma(k_i, delta, kept_i), y = fma(q_i, s_i, y).
//   gated_norm  norm as in rows.hpp, times w, times act(z).
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

TIERCEL_INLINE void prepare(const DeltaRuleArgs& a, const Head& head, int64_t row, int64_t i, float scale, const Tile& tile) {
  const float* q = a.qkv + row * a.ld_qkv + head.key_head * a.key_dim;
  normalised(q, a.key_dim, a.eps, scale, tile.q + i * tile.stride);
  normalised(q + a.key_heads * a.key_dim, a.key_dim, a.eps, 1.0f, tile.k + i * tile.stride);
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

} // namespace

void short_conv(const ShortConvArgs& a, const StepView& view, const ThreadCtx& ctx) {
  const Range mine = share((a.channels + 15) / 16, ctx);
  const int64_t begin = mine.begin * 16, end = mine.end * 16 < a.channels ? mine.end * 16 : a.channels;
  const int64_t before = a.width - 1;
  for (int32_t s = 0; s < view.n_seqs; ++s) {
    const int64_t first = view.seq_rows[s], n = view.seq_rows[s + 1] - first;
    if (n == 0) continue;
    float* state = state_of(a.state, view.seq_slot[s]);
    const bool is_new = view.seq_start[s] == 0;
    // Input r of the sequence's rows in this step; below 0 it came in an earlier step, or never.
    const auto input = [&](int64_t r, int64_t c, int lanes) {
      if (r >= 0) return load_part(a.x + (first + r) * a.ldx + c, lanes);
      return is_new ? zero() : load_part(state + (before + r) * a.channels + c, lanes);
    };
    for (int64_t t = 0; t < n; ++t) {
      float* y = a.y + (first + t) * a.ldy;
      for (int64_t c = begin; c < end; c += 16) {
        const int lanes = lanes_left(c, end);
        F16v sum = a.bias != nullptr ? load_part(a.bias + c, lanes) : zero();
        for (int64_t j = 0; j < a.width; ++j) sum = fma(load_part(a.w + j * a.channels + c, lanes), input(t - before + j, c, lanes), sum);
        store_part(y + c, a.has_silu ? silu(sum) : sum, lanes);
      }
    }
    // Ascending: what is read lies behind what is written.
    for (int64_t j = 0; j < before; ++j)
      for (int64_t c = begin; c < end; c += 16) {
        const int lanes = lanes_left(c, end);
        store_part(state + j * a.channels + c, input(n - before + j, c, lanes), lanes);
      }
  }
}

void delta_rule(const DeltaRuleArgs& a, const StepView& view, const ThreadCtx& ctx) {
  const int64_t n_blocks = (a.value_dim + kBlockColumns - 1) / kBlockColumns;
  const int64_t head_floats = a.key_dim * ((a.value_dim + 15) / 16 * 16);
  const int64_t stride = (a.key_dim + 15) / 16 * 16;
  float* scratch = reinterpret_cast<float*>(ctx.scratch);
  const Tile tile{scratch, scratch + kTileTokens * stride, scratch + 2 * kTileTokens * stride, scratch + 3 * kTileTokens * stride, stride};
  const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(a.key_dim));
  const float* values = a.qkv + 2 * a.key_heads * a.key_dim;
  const Range mine = share(view.n_seqs * a.value_heads * n_blocks, ctx);
  for (int64_t u = mine.begin; u < mine.end;) {
    const int64_t s = u / (a.value_heads * n_blocks), h = u / n_blocks % a.value_heads, first_block = u % n_blocks;
    const int64_t end_block = first_block + mine.end - u < n_blocks ? first_block + mine.end - u : n_blocks;
    u += end_block - first_block;
    const int64_t first = view.seq_rows[s], n = view.seq_rows[s + 1] - first;
    if (n == 0) continue;
    const Head head{h, h / (a.value_heads / a.key_heads), first_lane(exp(set1(a.a_log[h])))};
    float* state = state_of(a.state, view.seq_slot[s]) + h * head_floats;
    const auto block_end = [&](int64_t b) { return (b + 1) * kBlockColumns < a.value_dim ? (b + 1) * kBlockColumns : a.value_dim; };
    if (view.seq_start[s] == 0) {
      const int64_t from = first_block * kBlockColumns, to = (block_end(end_block - 1) + 15) / 16 * 16;
      std::memset(state + a.key_dim * from, 0, static_cast<size_t>(a.key_dim * (to - from)) * sizeof(float));
    }
    for (int64_t t = 0; t < n; t += kTileTokens) {
      const int64_t n_tile = n - t < kTileTokens ? n - t : kTileTokens;
      for (int64_t i = 0; i < n_tile; ++i) prepare(a, head, first + t + i, i, scale, tile);
      for (int64_t b = first_block; b < end_block; ++b) {
        const int64_t column = b * kBlockColumns, at = h * a.value_dim + column;
        walk_block(state + a.key_dim * column, a.key_dim, n_tile, tile, values + (first + t) * a.ld_qkv + at, a.ld_qkv,
                   block_end(b) - column, a.y + (first + t) * a.ldy + at, a.ldy);
      }
    }
  }
}

void gated_norm(const GatedNormArgs& a, const ThreadCtx& ctx) {
  const Range mine = share(a.m * a.heads, ctx);
  for (int64_t u = mine.begin; u < mine.end; ++u) {
    const int64_t row = u / a.heads, h = u % a.heads;
    const float *x = a.x + row * a.ldx + h * a.head_dim, *z = a.z + row * a.ldz + (a.is_gate_per_head ? h : h * a.head_dim);
    float* y = a.y + row * a.ldy + h * a.head_dim;
    const F16v factor = set1(a.w != nullptr ? norm_factor(x, a.head_dim, a.eps) : 1.0f);
    for (int64_t i = 0; i < a.head_dim; i += 16) {
      const int n = lanes_left(i, a.head_dim);
      F16v v = load_part(x + i, n);
      if (a.w != nullptr) v = mul(mul(v, factor), load_part(a.w + i, n));
      const F16v gate = a.is_gate_per_head ? set1(*z) : load_part(z + i, n);
      store_part(y + i, mul(v, a.is_plain ? gate : a.is_sigmoid ? sigmoid(gate) : silu(gate)), n);
    }
  }
}

} // namespace tiercel::TIERCEL_LEVEL
