#include "tiercel/trial.hpp"

#include <algorithm>

#include "tiercel/program.hpp"

namespace tiercel {

namespace {

int64_t pad16(int64_t n) { return (n + 15) / 16 * 16; }

TrialInputs inputs_of(size_t op, std::initializer_list<std::pair<BufferRef, int64_t>> buffers, int64_t output_floats) {
  TrialInputs t{op, {}};
  for (const auto& [from, width] : buffers) {
    t.parts.push_back({from.offset, from.stride_bytes, width, t.row_floats});
    t.row_floats += pad16(width);
  }
  t.output_floats = pad16(output_floats);
  return t;
}

TrialInputs inputs_of(size_t i, const op::DeltaRule& o, const BufferRef& x, int64_t x_width, int64_t output_floats) {
  return inputs_of(i, {{x, x_width}, {o.gate, static_cast<int64_t>(o.dt_bias.size())}, {o.beta, o.value_heads}}, output_floats);
}

} // namespace

void Program::plan_trials(int64_t max_trial_rows) {
  max_trial_rows_ = max_trial_rows;
  trial_of_.assign(ops_.size(), -1);
  if (max_trial_rows == 0) return;
  for (size_t i = 0; i < ops_.size(); ++i) {
    const OpBody& body = ops_[i].body;
    if (const auto* c = std::get_if<op::ShortConv>(&body)) trials_.push_back(inputs_of(i, {{c->x, c->channels}}, c->channels));
    if (const auto* r = std::get_if<op::DeltaRule>(&body)) {
      const int64_t values = r->value_heads * r->value_dim;
      trials_.push_back(inputs_of(i, *r, r->qkv, 2 * r->key_heads * r->key_dim + values, values));
    }
    if (const auto* l = std::get_if<op::DeltaLayer>(&body)) trials_.push_back(inputs_of(i, l->rule, l->conv.x, l->conv.channels, 0));
    if (const auto* s = std::get_if<op::Ssd>(&body)) {
      const int64_t values = s->heads * s->head_dim;
      trials_.push_back(inputs_of(i, {{s->xbc, values + 2 * s->groups * s->state_dim}, {s->dt, s->heads}}, values));
    }
    if (!trials_.empty() && trials_.back().op == i) trial_of_[i] = static_cast<int32_t>(trials_.size()) - 1;
  }
  int64_t end = 0, widest = 0;
  for (TrialInputs& t : trials_) {
    t.offset = end;
    end += max_trial_rows * t.row_floats;
    widest = std::max(widest, t.output_floats);
  }
  trial_inputs_ = std::make_unique<Region>(end * static_cast<int64_t>(sizeof(float)));
  trial_outputs_ = std::make_unique<Region>(max_trial_rows * widest * static_cast<int64_t>(sizeof(float)));
}

void Program::keep_inputs(const TrialInputs& t, const StepView& step, const ThreadCtx& ctx) {
  for (int32_t s = 0; s < step.n_seqs; ++s) {
    if (step.seq_trial[s] < 0) continue;
    const int32_t first = step.seq_rows[s], n = step.seq_rows[s + 1] - first;
    for (int32_t i = ctx.thread; i < n; i += ctx.n_threads)
      for (const TrialInputs::Part& part : t.parts) {
        const auto* from = reinterpret_cast<const float*>(arena_->data() + part.from_offset + (first + i) * part.from_stride_bytes);
        std::copy_n(from, part.width, trial_row(t, step.seq_trial[s] + i) + part.column);
      }
  }
}

void Program::advance_op(const TrialInputs& t, const StepView& one, int64_t row, const ThreadCtx& ctx) {
  const float* x = trial_row(t, row);
  float* y = reinterpret_cast<float*>(trial_outputs_->data()) + row * t.output_floats;
  const auto part = [&](size_t i) { return x + t.parts[i].column; };
  const auto conv = [&](const op::ShortConv& o, float* to, int64_t ld) {
    ShortConvArgs a = conv_args(o, to, ld);
    a.x = x, a.ldx = t.row_floats;
    return a;
  };
  const auto rule = [&](const op::DeltaRule& o, const float* qkv, int64_t ld_qkv, float* to, int64_t ld) {
    DeltaRuleArgs a = rule_args(o, qkv, ld_qkv, to, ld);
    a.gate = part(1), a.beta = part(2), a.ld_gate = a.ld_beta = t.row_floats;
    return a;
  };
  const OpBody& body = ops_[t.op].body;
  if (const auto* o = std::get_if<op::ShortConv>(&body)) kernels_->short_conv(conv(*o, y, t.output_floats), one, ctx);
  if (const auto* o = std::get_if<op::DeltaRule>(&body)) kernels_->delta_rule(rule(*o, x, t.row_floats, y, t.output_floats), one, ctx);
  if (const auto* o = std::get_if<op::Ssd>(&body)) {
    SsdArgs a = ssd_args(*o, y, t.output_floats);
    a.xbc = x, a.dt = part(1), a.ld_xbc = a.ld_dt = t.row_floats;
    kernels_->ssd(a, one, ctx);
  }
  const auto* o = std::get_if<op::DeltaLayer>(&body);
  if (o == nullptr) return;
  if (is_whole(*o, o->rule.key_heads)) {
    GatedNormArgs none{};
    kernels_->delta_layer({conv(o->conv, nullptr, 0), rule(o->rule, nullptr, 0, nullptr, 0), none}, one, ctx);
    return;
  }
  const int64_t values = o->rule.value_heads * o->rule.value_dim;
  float* qkv = reinterpret_cast<float*>(layer_scratch_->data()) + row * o->conv.channels;
  float* made = reinterpret_cast<float*>(layer_scratch_->data()) + max_trial_rows_ * o->conv.channels + row * values;
  kernels_->short_conv(conv(o->conv, qkv, o->conv.channels), one, ctx);
  ctx.barrier->wait(ctx.barrier, ctx.thread);
  kernels_->delta_rule(rule(o->rule, qkv, o->conv.channels, made, values), one, ctx);
}

void Program::advance(const StepView& step, const TrialRows& rows, int32_t thread, Team& team) {
  Barrier* barrier = team.barrier();
  const ThreadCtx ctx{thread, n_threads_, barrier, thread_scratch(thread), thread_scratch_bytes_};
  OpClock clock(*this, thread);
  for (const TrialInputs& t : trials_) {
    for (int32_t s = 0; s < step.n_seqs; ++s) {
      if (step.seq_trial[s] < 0 || rows.count[s] == 0) continue;
      const int32_t start = step.seq_start[s] + rows.first[s], seq_rows[] = {0, rows.count[s]};
      StepView one{};
      one.n_tokens = rows.count[s], one.n_seqs = 1;
      one.seq_slot = step.seq_slot + s, one.seq_start = &start, one.seq_rows = seq_rows;
      advance_op(t, one, step.seq_trial[s] + rows.first[s], ctx);
    }
    barrier->wait(barrier, thread); // the next op writes where this one did
    clock.lap(t.op);
  }
}

} // namespace tiercel
