// What the kernels of recurrent layers share: where a slot's state lies, and the functions of their gates. Kernel sources only.
#pragma once

#include "rows.hpp"

namespace tiercel::TIERCEL_LEVEL {
namespace {

// Columns whose state lies together, [rows of the state][columns], as short as the last needs: half of L1 at 128 rows, so that it stays
// there for both passes of a token, and for several tokens. 64 columns leave no room for the keys and gates: a single token of the delta
// rule read its state 1.2 to 1.7 times slower.
constexpr int64_t kBlockColumns = 32;

TIERCEL_INLINE F16v load_part(const float* p, int n) { return n == 16 ? load(p) : load_n(p, n); }
TIERCEL_INLINE void store_part(float* p, F16v v, int n) {
  if (n == 16)
    store(p, v);
  else
    store_n(p, v, n);
}
TIERCEL_INLINE F16v silu(F16v x) { return div(x, add(set1(1.0f), exp(neg(x)))); }

// log(1 + e^x): max(x, 0) + log1p(e^-|x|), and log1p(u) = 2 artanh(u / (2 + u)), whose argument is at most 1/3.
TIERCEL_INLINE F16v softplus(F16v x) {
  const F16v u = exp(neg(abs(x)));
  const F16v s = div(u, add(u, set1(2.0f))), z = mul(s, s);
  F16v p = set1(1.0f / 15);
  p = fma(p, z, set1(1.0f / 13));
  p = fma(p, z, set1(1.0f / 11));
  p = fma(p, z, set1(1.0f / 9));
  p = fma(p, z, set1(1.0f / 7));
  p = fma(p, z, set1(1.0f / 5));
  p = fma(p, z, set1(1.0f / 3));
  p = fma(p, z, set1(1.0f));
  return add(max(zero(), x), mul(add(s, s), p)); // operand order keeps NaN
}

TIERCEL_INLINE float first_lane(F16v v) {
  float t[16];
  store(t, v);
  return t[0];
}

TIERCEL_INLINE float* state_of(const StateMemory& memory, int32_t slot) {
  return reinterpret_cast<float*>(memory.base + slot * memory.slot_stride_bytes);
}

TIERCEL_INLINE bool is_on_trial(const StepView& view, int64_t s) { return view.seq_trial != nullptr && view.seq_trial[s] >= 0; }

// Where a sequence's rows walk n floats of its state: in place, or on trial in a copy. Zeros when nothing came before them.
TIERCEL_INLINE float* walked_state(const StepView& view, int64_t s, float* state, int64_t n, float* copy) {
  float* walked = is_on_trial(view, s) ? copy : state;
  const auto bytes = static_cast<size_t>(n) * sizeof(float);
  if (view.seq_start[s] == 0)
    std::memset(walked, 0, bytes);
  else if (walked != state)
    std::memcpy(walked, state, bytes);
  return walked;
}

} // namespace
} // namespace tiercel::TIERCEL_LEVEL
