// Which experts a row goes to, and with what weights.
//
// Contract, for every row, at every level and any number of threads:
//
//   s = softmax(logits): exp(l - max) / sum, the sum of vector j of 16 in one accumulator, j ascending, then reduce_add's tree; or
//   s = sigmoid(logits)
//   c = s + bias                     decides what is chosen
//   groups: a group's score is the sum of its group_top largest c, largest first; the n_groups_kept best groups stay
//   the top_k largest c of them are chosen; of equal ones the lower number, in groups as in experts
//   weight = s; with renormalises, s / (sum of the chosen s, by ascending number, + 1e-20); then times scale
//
// A row with a NaN among its scores gets the experts 0 .. top_k - 1 with weights NaN: all that follows of this row is NaN, no other row
// is, and no number is out of range.
#include <limits>

#include "rows.hpp"
#include "table.hpp"

namespace tiercel::TIERCEL_LEVEL {
namespace {

// A row's scores in the thread's scratch, which holds router_thread_bytes: s and c [n_experts padded to 16], then groups [n_groups].
struct Work {
  float* s;
  float* c;
  float* group;
};

constexpr float kOut = -std::numeric_limits<float>::infinity();

void scores_of(const RouterArgs& a, const float* logits, float* s) {
  const int64_t n = a.n_experts;
  if (a.scores == Scores::Sigmoid) {
    for (int64_t i = 0; i < n; i += 16) store_n(s + i, sigmoid(load_n(logits + i, lanes_left(i, n))), lanes_left(i, n));
    return;
  }
  float top = kOut;
  for (int64_t i = 0; i < n; ++i) top = logits[i] > top ? logits[i] : top;
  F16v sum = zero();
  for (int64_t i = 0; i < n; i += 16) {
    const int left = lanes_left(i, n);
    store_n(s + i, exp(sub(load_n(logits + i, left), set1(top))), left);
    sum = add(sum, load_n(s + i, left)); // lanes past the end count as zero
  }
  const F16v total = set1(reduce_add(sum));
  for (int64_t i = 0; i < n; i += 16) store_n(s + i, div(load_n(s + i, lanes_left(i, n)), total), lanes_left(i, n));
}

// First index of the largest of x[0..n), all above kOut or kOut itself.
int64_t best_of(const float* x, int64_t n) {
  F16v top = set1(kOut);
  for (int64_t i = 0; i + 16 <= n; i += 16) top = max(load(x + i), top);
  float best = n >= 16 ? reduce_max(top) : kOut;
  for (int64_t i = n / 16 * 16; i < n; ++i) best = x[i] > best ? x[i] : best;
  for (int64_t i = 0; i < n; ++i)
    if (x[i] == best) return i;
  return 0;
}

// Takes all but the best groups out of c.
void keep_groups(const RouterArgs& a, const Work& w) {
  const int64_t size = a.n_experts / a.n_groups;
  for (int64_t g = 0; g < a.n_groups; ++g) {
    float* members = w.c + g * size;
    float best[8];
    int64_t at[8];
    float score = 0.0f;
    for (int32_t i = 0; i < a.group_top; ++i) {
      at[i] = best_of(members, size);
      best[i] = members[at[i]];
      score = i == 0 ? best[i] : score + best[i];
      members[at[i]] = kOut;
    }
    for (int32_t i = 0; i < a.group_top; ++i) members[at[i]] = best[i];
    w.group[g] = score;
  }
  for (int32_t i = 0; i < a.n_groups_kept; ++i) w.group[best_of(w.group, a.n_groups)] = kOut;
  for (int64_t g = 0; g < a.n_groups; ++g)
    if (w.group[g] != kOut)
      for (int64_t i = 0; i < size; ++i) w.c[g * size + i] = kOut;
}

void route_row(const RouterArgs& a, const float* logits, const Work& w, float* route) {
  const int32_t k = a.top_k;
  scores_of(a, logits, w.s);
  bool is_nan = false;
  for (int64_t i = 0; i < a.n_experts; ++i) {
    w.c[i] = a.bias ? w.s[i] + a.bias[i] : w.s[i];
    is_nan |= w.s[i] != w.s[i];
  }
  if (is_nan) {
    for (int32_t j = 0; j < k; ++j) route[j] = static_cast<float>(j), route[k + j] = std::numeric_limits<float>::quiet_NaN();
    return;
  }
  if (a.n_groups > 1) keep_groups(a, w);
  for (int32_t j = 0; j < k; ++j) {
    const int64_t e = best_of(w.c, a.n_experts);
    w.c[e] = kOut;
    int32_t at = j; // insertion: numbers ascend
    for (; at > 0 && route[at - 1] > static_cast<float>(e); --at) route[at] = route[at - 1];
    route[at] = static_cast<float>(e);
  }
  float sum = 0.0f;
  for (int32_t j = 0; j < k; ++j) {
    route[k + j] = w.s[static_cast<int64_t>(route[j])];
    sum += route[k + j];
  }
  for (int32_t j = 0; j < k; ++j) route[k + j] = (a.renormalises ? route[k + j] / (sum + 1e-20f) : route[k + j]) * a.scale;
}

} // namespace

void router(const RouterArgs& a, const ThreadCtx& ctx) {
  const Range rows = share(a.m, ctx);
  float* scratch = reinterpret_cast<float*>(ctx.scratch);
  const int64_t padded = (a.n_experts + 15) / 16 * 16;
  const Work work = {scratch, scratch + padded, scratch + 2 * padded};
  for (int64_t r = rows.begin; r < rows.end; ++r) route_row(a, a.logits + r * a.ldx, work, a.route + r * a.ldy);
}

} // namespace tiercel::TIERCEL_LEVEL
