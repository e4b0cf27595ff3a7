// Kernels of encoders: layer norm, elementwise activations, and attention over a step's own sequences.
//
// Orders that are contract (same bits at every level and for every split over threads):
//   layer_norm  mean = sum / width, then variance = the sum of (x - mean)^2 / width. Both sums: vector j of the row goes into
//               accumulator j % 4, lanes past the end count as zero; then (0 + 1) + (2 + 3) and reduce_add's tree.
//               y = fma((x - mean) * (1 / sqrt(variance + eps)), w, bias).
//   activate    gelu: max(x, 0) - |x| * (1 - erf(|x| / sqrt 2)) / 2, which keeps its digits far below zero. The bracket is Abramowitz
//               and Stegun 7.1.26, of absolute error 1.5e-7.
//   attention   a score is one fma chain over d, of q * scale kept in float; weights e^(score - max) and their sum in 16
//               lanes, ascending, then reduce_add's tree; each output column is one fma chain over the tokens, ascending, times 1 / sum.
// An output row reads its own sequence only, so batch-mates change nothing; a sequence must be in the step whole.
//
// REQUIRES: attention's ctx.scratch holds sequence_attention_thread_bytes.
#include "rows.hpp"
#include "table.hpp"

namespace tiercel::TIERCEL_LEVEL {
namespace {

constexpr int64_t kTileRows = 4;   // rows that share what is loaded of keys and values
constexpr int64_t kBlockRows = 32; // rows of one head that a thread takes at once; its keys are transposed for them

template <class Fn>
TIERCEL_INLINE float sum_of(const float* x, int64_t width, Fn fn) {
  F16v acc[4] = {zero(), zero(), zero(), zero()};
  for (int64_t i = 0, j = 0; i < width; i += 16, j = (j + 1) % 4) {
    const int n = lanes_left(i, width);
    acc[j] = add(acc[j], fn(n == 16 ? load(x + i) : load_n(x + i, n), n));
  }
  return reduce_add(add(add(acc[0], acc[1]), add(acc[2], acc[3])));
}

TIERCEL_INLINE F16v first_lanes(F16v v, int n) {
  if (n == 16) return v;
  float all[16];
  store(all, v);
  return load_n(all, n);
}

// (1 - erf(a / sqrt 2)) / 2 for a >= 0.
TIERCEL_INLINE F16v upper_tail(F16v a) {
  const F16v z = mul(a, set1(0.70710678118654752f)), one = set1(1.0f);
  const F16v t = div(one, fma(z, set1(0.3275911f), one));
  F16v p = fma(set1(1.061405429f), t, set1(-1.453152027f));
  p = fma(p, t, set1(1.421413741f));
  p = fma(p, t, set1(-0.284496736f));
  p = fma(p, t, set1(0.254829592f));
  return mul(mul(mul(p, t), exp(neg(mul(z, z)))), set1(0.5f));
}

TIERCEL_INLINE F16v gelu(F16v x) {
  const F16v a = max(x, neg(x));
  return sub(max(zero(), x), mul(a, upper_tail(a)));
}

TIERCEL_INLINE F16v gelu_tanh(F16v g) {
  const F16v cubic = fma(mul(mul(g, g), set1(0.044715f)), g, g);
  return div(g, add(set1(1.0f), exp(mul(cubic, set1(-1.5957691216057308f))))); // -2 sqrt(2 / pi)
}

template <class Act>
TIERCEL_INLINE void activate_rows(const ActivateArgs& a, const ThreadCtx& ctx, Act act) {
  const Range rows = share(a.m, ctx);
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    float* x = a.x + r * a.ldx;
    for (int64_t i = 0; i < a.width; i += 16) {
      const int n = lanes_left(i, a.width);
      if (n == 16)
        store(x + i, act(load(x + i)));
      else
        store_n(x + i, act(load_n(x + i, n)), n);
    }
  }
}

// One head of one sequence: its first row of qkv, and how many rows there are.
struct Head {
  const float *q, *k, *v;
  float* y;
  int64_t length;
};

// K^T [D][padded length]; what lies past the length is zero.
void transpose_keys(const SequenceAttentionArgs& a, const Head& head, int64_t padded, float* keys) {
  for (int64_t d = 0; d < a.head_dim; ++d) {
    for (int64_t j = 0; j < head.length; ++j) keys[d * padded + j] = head.k[j * a.ld + d];
    for (int64_t j = head.length; j < padded; ++j) keys[d * padded + j] = 0.0f;
  }
}

// Rows [row, row + N) of a head.
template <int N>
void attend_rows(const SequenceAttentionArgs& a, const Head& head, int64_t row, int64_t padded, const float* keys, float* scores) {
  F16v top[N];
  for (int r = 0; r < N; ++r) top[r] = set1(-__builtin_inff());
  for (int64_t j = 0; j < padded; j += 32) {
    F16v acc[N][2];
    for (int r = 0; r < N; ++r) acc[r][0] = acc[r][1] = zero();
    for (int64_t d = 0; d < a.head_dim; ++d) {
      const F16v k0 = load(keys + d * padded + j), k1 = load(keys + d * padded + j + 16);
      for (int r = 0; r < N; ++r) {
        const F16v q = set1(head.q[(row + r) * a.ld + d] * a.scale);
        acc[r][0] = fma(q, k0, acc[r][0]);
        acc[r][1] = fma(q, k1, acc[r][1]);
      }
    }
    for (int r = 0; r < N; ++r) {
      for (int half = 0; half < 2; ++half) {
        const int64_t at = j + 16 * half;
        float* to = scores + r * padded + at;
        store(to, acc[r][half]);
        for (int64_t i = head.length > at ? head.length - at : 0; i < 16; ++i) to[i] = -__builtin_inff();
        top[r] = max(load(to), top[r]);
      }
    }
  }
  F16v inverse[N];
  for (int r = 0; r < N; ++r) {
    const F16v largest = set1(reduce_max(top[r]));
    F16v sum = zero();
    for (int64_t j = 0; j < padded; j += 16) {
      const F16v weight = exp(sub(load(scores + r * padded + j), largest));
      store(scores + r * padded + j, weight);
      sum = add(sum, weight);
    }
    inverse[r] = set1(1.0f / reduce_add(sum));
  }
  for (int64_t d = 0; d < a.head_dim; d += 16) {
    const int n = lanes_left(d, a.head_dim);
    F16v acc[N];
    for (int r = 0; r < N; ++r) acc[r] = zero();
    for (int64_t j = 0; j < head.length; ++j) {
      const float* v = head.v + j * a.ld + d;
      const F16v values = n == 16 ? load(v) : load_n(v, n);
      for (int r = 0; r < N; ++r) acc[r] = fma(set1(scores[r * padded + j]), values, acc[r]);
    }
    for (int r = 0; r < N; ++r) {
      float* y = head.y + (row + r) * a.ldy + d;
      if (n == 16)
        store(y, mul(acc[r], inverse[r]));
      else
        store_n(y, mul(acc[r], inverse[r]), n);
    }
  }
}

} // namespace

void layer_norm(const LayerNormArgs& a, const ThreadCtx& ctx) {
  const Range rows = share(a.m, ctx);
  const auto width = static_cast<float>(a.width);
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    const float* x = a.x + r * a.ldx;
    float* y = a.y + r * a.ldy;
    const F16v mean = set1(sum_of(x, a.width, [](F16v v, int) { return v; }) / width);
    const float squares = sum_of(x, a.width, [&](F16v v, int n) {
      const F16v d = first_lanes(sub(v, mean), n);
      return mul(d, d);
    });
    const F16v factor = set1(1.0f / __builtin_sqrtf(squares / width + a.eps));
    for (int64_t i = 0; i < a.width; i += 16) {
      const int n = lanes_left(i, a.width);
      const auto part = [n](const float* p) { return n == 16 ? load(p) : load_n(p, n); };
      const F16v v = fma(mul(sub(part(x + i), mean), factor), part(a.w + i), part(a.bias + i));
      if (n == 16)
        store(y + i, v);
      else
        store_n(y + i, v, n);
    }
  }
}

void activate(const ActivateArgs& a, const ThreadCtx& ctx) {
  switch (a.act) {
    case Unary::Gelu: return activate_rows(a, ctx, [](F16v x) { return gelu(x); });
    case Unary::GeluTanh: return activate_rows(a, ctx, [](F16v x) { return gelu_tanh(x); });
    case Unary::Relu: return activate_rows(a, ctx, [](F16v x) { return max(zero(), x); });
    case Unary::Silu: return activate_rows(a, ctx, [](F16v x) { return div(x, add(set1(1.0f), exp(neg(x)))); });
    case Unary::Tanh: return activate_rows(a, ctx, [](F16v x) { return tanh(x); });
  }
}

void sequence_attention(const SequenceAttentionArgs& a, const StepView& view, const ThreadCtx& ctx) {
  const int64_t D = a.head_dim, group = a.n_heads / a.n_kv_heads;
  float* keys = reinterpret_cast<float*>(ctx.scratch);
  // Blocks of rows, all heads of a sequence one after another, are dealt round.
  int64_t turn = 0;
  for (int32_t s = 0; s < view.n_seqs; ++s) {
    const int64_t first = view.seq_rows[s], length = view.seq_rows[s + 1] - first, padded = (length + 31) / 32 * 32;
    float* scores = keys + padded * D;
    for (int32_t h = 0; h < a.n_heads; ++h) {
      const float* row = a.qkv + first * a.ld;
      const Head head{row + h * D, row + (a.n_heads + h / group) * D, row + (a.n_heads + a.n_kv_heads + h / group) * D,
                      a.y + first * a.ldy + h * D, length};
      bool has_keys = false;
      for (int64_t begin = 0; begin < length; begin += kBlockRows, ++turn) {
        if (turn % ctx.n_threads != ctx.thread) continue;
        if (!has_keys) transpose_keys(a, head, padded, keys);
        has_keys = true;
        const int64_t end = begin + kBlockRows < length ? begin + kBlockRows : length;
        int64_t r = begin;
        for (; r + kTileRows <= end; r += kTileRows) attend_rows<kTileRows>(a, head, r, padded, keys, scores);
        for (; r < end; ++r) attend_rows<1>(a, head, r, padded, keys, scores);
      }
    }
  }
}

} // namespace tiercel::TIERCEL_LEVEL
