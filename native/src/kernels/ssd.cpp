// Mamba2's recurrence (SSD: a state with one decay a head), and the norm of groups that its outputs go through.
//
// Orders that are contract (same bits at every level, for every chunk, batch and split over threads):
//   ssd        dt = clamp(softplus(dt + dt_bias)), decay = exp(dt * -exp(a_log)). For each column p of a head, over state rows i
//              ascending: s_i = fma(b_i, dt * x_p, s_i * decay), sum = fma(c_i, s_i, sum); y_p = fma(d, x_p, sum).
//   gate_norm  x * z / (1 + exp(-z)), then the norm of rows.hpp over each group, times w.
//
// Row i of a state knows nothing of row j, so several tokens walk a row while it is in registers. That is the whole of prefill's
// speed: the order above is that of one token after the other.
#include "recurrent.hpp"
#include "table.hpp"

namespace tiercel::TIERCEL_LEVEL {
namespace {

// Tokens whose steps are made at a time: one vector of them.
constexpr int64_t kTileTokens = 16;
// Tokens that walk a row of the state together: what registers hold.
#if defined(__AVX512F__)
constexpr int kTokensTogether = 4;
#else
constexpr int kTokensTogether = 2;
#endif

// A tile of one block of a head: each token's input times its step, the sums of its output, and what the state decays by.
struct Tile {
  float decay[kTileTokens], step[kTileTokens];
  float input[kTileTokens][kBlockColumns], sum[kTileTokens][kBlockColumns];
};

// T tokens of V vectors of columns. b, c: the first token's row of state_dim, the others' ld apart.
template <int V, int T>
TIERCEL_INLINE void walk(float* state, int64_t state_dim, const float* b, const float* c, int64_t ld, const float* decay,
                         const float (*input)[kBlockColumns], float (*sum)[kBlockColumns]) {
  F16v acc[T][V];
  for (int t = 0; t < T; ++t)
    for (int j = 0; j < V; ++j) acc[t][j] = zero();
  for (int64_t i = 0; i < state_dim; ++i) {
    float* row = state + i * V * 16;
    F16v s[V];
    for (int j = 0; j < V; ++j) s[j] = load(row + 16 * j);
    for (int t = 0; t < T; ++t) {
      const F16v bi = set1(b[t * ld + i]), ci = set1(c[t * ld + i]), kept = set1(decay[t]);
      for (int j = 0; j < V; ++j) {
        s[j] = fma(bi, load(input[t] + 16 * j), mul(s[j], kept));
        acc[t][j] = fma(ci, s[j], acc[t][j]);
      }
    }
    for (int j = 0; j < V; ++j) store(row + 16 * j, s[j]);
  }
  for (int t = 0; t < T; ++t)
    for (int j = 0; j < V; ++j) store(sum[t] + 16 * j, acc[t][j]);
}

template <int T>
void walk_block(float* state, int64_t n_vectors, int64_t state_dim, const float* b, const float* c, int64_t ld, int64_t t, Tile& tile) {
  if (n_vectors == 1)
    walk<1, T>(state, state_dim, b, c, ld, tile.decay + t, tile.input + t, tile.sum + t);
  else
    walk<2, T>(state, state_dim, b, c, ld, tile.decay + t, tile.input + t, tile.sum + t);
}

// The steps and decays of n tokens of a head, one token a lane.
void make_steps(const SsdArgs& a, int64_t head, int64_t first, int64_t n, Tile& tile) {
  float dt[kTileTokens] = {};
  for (int64_t t = 0; t < n; ++t) dt[t] = a.dt[(first + t) * a.ld_dt + head];
  const F16v raw = softplus(add(load(dt), set1(a.dt_bias[head])));
  const F16v step = min(set1(a.dt_max), max(set1(a.dt_min), raw)); // operand order keeps NaN
  store(tile.step, step);
  store(tile.decay, exp(mul(step, neg(exp(set1(a.a_log[head]))))));
}

} // namespace

void ssd(const SsdArgs& a, const StepView& view, const ThreadCtx& ctx) {
  const int64_t n_blocks = (a.head_dim + kBlockColumns - 1) / kBlockColumns;
  const int64_t head_floats = a.state_dim * ((a.head_dim + 15) / 16 * 16);
  Tile& tile = *reinterpret_cast<Tile*>(ctx.scratch);
  const Range mine = share(view.n_seqs * a.heads * n_blocks, ctx);
  for (int64_t u = mine.begin; u < mine.end; ++u) {
    const int64_t s = u / (a.heads * n_blocks), h = u / n_blocks % a.heads, column = u % n_blocks * kBlockColumns;
    const int64_t first = view.seq_rows[s], n = view.seq_rows[s + 1] - first;
    if (n == 0) continue;
    const int64_t columns = a.head_dim - column < kBlockColumns ? a.head_dim - column : kBlockColumns, n_vectors = (columns + 15) / 16;
    float* state = walked_state(view, s, state_of(a.state, view.seq_slot[s]) + h * head_floats + a.state_dim * column,
                                a.state_dim * 16 * n_vectors, reinterpret_cast<float*>(&tile + 1));
    const float* b = a.xbc + a.heads * a.head_dim + h / (a.heads / a.groups) * a.state_dim;
    const float* c = b + a.groups * a.state_dim;
    const int64_t at = h * a.head_dim + column;
    const F16v d = set1(a.d[h]);
    for (int64_t t0 = 0; t0 < n; t0 += kTileTokens) {
      const int64_t row = first + t0, n_tile = n - t0 < kTileTokens ? n - t0 : kTileTokens;
      make_steps(a, h, row, n_tile, tile);
      for (int64_t t = 0; t < n_tile; ++t)
        for (int64_t j = 0; j < columns; j += 16) {
          const F16v x = load_part(a.xbc + (row + t) * a.ld_xbc + at + j, lanes_left(j, columns));
          store(tile.input[t] + j, mul(set1(tile.step[t]), x));
        }
      int64_t t = 0;
      for (; t + kTokensTogether <= n_tile; t += kTokensTogether)
        walk_block<kTokensTogether>(state, n_vectors, a.state_dim, b + (row + t) * a.ld_xbc, c + (row + t) * a.ld_xbc, a.ld_xbc, t, tile);
      for (; t < n_tile; ++t)
        walk_block<1>(state, n_vectors, a.state_dim, b + (row + t) * a.ld_xbc, c + (row + t) * a.ld_xbc, a.ld_xbc, t, tile);
      for (t = 0; t < n_tile; ++t)
        for (int64_t j = 0; j < columns; j += 16) {
          const int lanes = lanes_left(j, columns);
          const F16v x = load_part(a.xbc + (row + t) * a.ld_xbc + at + j, lanes);
          store_part(a.y + (row + t) * a.ldy + at + j, fma(d, x, load(tile.sum[t] + j)), lanes);
        }
    }
  }
}

void gate_norm(const GateNormArgs& a, const ThreadCtx& ctx) {
  const Range mine = share(a.m * a.groups, ctx);
  for (int64_t u = mine.begin; u < mine.end; ++u) {
    const int64_t row = u / a.groups, column = u % a.groups * a.group_dim;
    const float *x = a.x + row * a.ldx + column, *z = a.z + row * a.ldz + column;
    float* y = a.y + row * a.ldy + column;
    for (int64_t i = 0; i < a.group_dim; i += 16) {
      const int n = lanes_left(i, a.group_dim);
      store_part(y + i, mul(load_part(x + i, n), silu(load_part(z + i, n))), n);
    }
    norm_row(y, a.group_dim, a.w + column, a.eps, nullptr, y);
  }
}

} // namespace tiercel::TIERCEL_LEVEL
