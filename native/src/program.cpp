#include "tiercel/program.hpp"

#include <algorithm>
#include <chrono>

namespace tiercel {

namespace {

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// From this many tokens on arithmetic is the limit, and fetching weights early gains nothing.
constexpr int32_t kFewTokens = 8;
// What a thread fetches at most while it waits: a part of its L2.
constexpr int64_t kMaxAheadBytes = 128 << 10;

int64_t align64(int64_t n) { return (n + 63) / 64 * 64; }

// This thread's rows of m, each of width floats.
void copy_rows(const float* x, int64_t ldx, int64_t width, int64_t m, float* y, int64_t ldy, const ThreadCtx& ctx) {
  const int64_t end = m * (ctx.thread + 1) / ctx.n_threads;
  for (int64_t r = m * ctx.thread / ctx.n_threads; r < end; ++r) std::copy_n(x + r * ldx, width, y + r * ldy);
}

template <class... Fs>
struct Overload : Fs... {
  using Fs::operator()...;
};
template <class... Fs>
Overload(Fs...) -> Overload<Fs...>;

} // namespace

Program::Program(const KernelTable* kernels, int32_t n_threads) : kernels_(kernels), n_threads_(n_threads) {}

void Program::add(Op op) { ops_.push_back(std::move(op)); }

void Program::seal(int64_t arena_bytes, KvPool kv, BufferRef logits, int64_t vocab, int64_t max_tokens, int64_t max_rows, int64_t max_seqs,
                   int64_t max_len, int64_t state_slot_bytes, int64_t max_trial_rows) {
  arena_ = std::make_unique<Region>(arena_bytes);
  kv_ = std::move(kv);
  logits_ = logits;
  vocab_ = vocab;
  int64_t thread_bytes = 4096, shared_bytes = 0, experts_bytes = 0, layer_bytes = 0;
  const auto trial_bytes = [&](int64_t key_dim, int64_t value_dim, int64_t heads) {
    return max_trial_rows > 0 ? trial_thread_bytes(key_dim, value_dim, heads) : 0;
  };
  for (auto& op : ops_) {
    std::visit(Overload{
                   [&](op::Linear& o) {
                     for (size_t i = 0; i < o.parts.size(); ++i) {
                       o.parts[i].w = &o.weights[i];
                       o.parts[i].bias = o.biases[i].empty() ? nullptr : o.biases[i].data();
                     }
                     const int64_t m = op.rows == Rows::Tokens ? max_tokens : max_rows;
                     thread_bytes = std::max(thread_bytes, linear_thread_bytes(o.k, m));
                     if (o.is_quantized) private_row_bytes_ = std::max(private_row_bytes_, quant_row_bytes(o.k));
                   },
                   [&](op::Attention& o) {
                     thread_bytes = std::max(thread_bytes, attention_thread_bytes(o.n_heads, o.n_kv_heads, o.head_dim));
                     shared_bytes = std::max(shared_bytes, attention_shared_bytes(o.n_heads, o.head_dim, max_seqs, max_len, n_threads_));
                   },
                   [&](op::SequenceAttention& o) {
                     thread_bytes = std::max(thread_bytes, sequence_attention_thread_bytes(o.head_dim, max_tokens));
                   },
                   [&](op::Norm& o) { thread_bytes = std::max(thread_bytes, o.width * 4 + 64); },
                   [&](op::Gated& o) { thread_bytes = std::max(thread_bytes, o.f * 4 + 64); },
                   [&](op::Router& o) { thread_bytes = std::max(thread_bytes, int64_t{12} * (o.n_experts + 16)); },
                   [&](op::Experts& o) {
                     const int64_t m = op.rows == Rows::Tokens ? max_tokens : max_rows;
                     const int64_t k = o.gate[0].k, f = o.gate[0].n, width = o.down[0].n;
                     const auto n_experts = static_cast<int32_t>(o.gate.size());
                     o.rows_at_once = experts_rows_at_once(m, o.top_k, k, f, width);
                     thread_bytes = std::max({thread_bytes, linear_thread_bytes(k, m), linear_thread_bytes(f, m), f * 4 + 64});
                     experts_bytes =
                         std::max(experts_bytes, experts_shared_bytes(o.rows_at_once, n_experts, o.top_k, k, f, width, n_threads_));
                   },
                   [&](op::LatentKv& o) { thread_bytes = std::max(thread_bytes, int64_t{o.rope} * 4 + 64); },
                   [&](op::Given& o) { given_width_ = o.width; },
                   [&](op::DeltaRule& o) {
                     thread_bytes = std::max(thread_bytes, delta_rule_thread_bytes(o.key_dim) + trial_bytes(o.key_dim, o.value_dim, 1));
                   },
                   [&](op::DeltaLayer& o) {
                     const op::DeltaRule& r = o.rule;
                     const int64_t group = r.value_heads / r.key_heads;
                     thread_bytes = std::max(thread_bytes, delta_layer_thread_bytes(r.key_dim, r.value_dim, group) +
                                                               trial_bytes(r.key_dim, r.value_dim, group));
                     layer_bytes = std::max(layer_bytes, max_tokens * (o.conv.channels + r.value_heads * r.value_dim) * 4);
                   },
                   [&](op::Ssd& o) { thread_bytes = std::max(thread_bytes, ssd_thread_bytes() + trial_bytes(o.state_dim, 32, 1)); },
                   [&](auto&) {},
               },
               op.body);
  }
  thread_scratch_bytes_ = align64(thread_bytes); // private_row_bytes_ is a multiple of 64 by itself
  // A page apart, so that two threads never share a line or a prefetch pair.
  scratch_ = std::make_unique<Region>((thread_scratch_bytes_ + private_row_bytes_ + 4096) * n_threads_);
  attention_scratch_ = std::make_unique<Region>(shared_bytes);
  experts_scratch_ = std::make_unique<Region>(experts_bytes);
  layer_scratch_ = std::make_unique<Region>(layer_bytes);
  state_slot_bytes_ = state_slot_bytes;
  state_ = std::make_unique<Region>(state_slot_bytes * max_seqs);
  op_ns_.assign(ops_.size(), 0);
  plan(max_tokens, max_rows);
  plan_trials(max_trial_rows);
}

namespace {

// The int8 rows that an op writes, and the floats that it makes them from.
struct Rounding {
  const BufferRef* x = nullptr;
  const BufferRef* y = nullptr;
};

Rounding rounding_of(const OpBody& body) {
  if (const auto* o = std::get_if<op::Norm>(&body)) return o->is_quantized && !o->residual ? Rounding{&o->x, &o->y} : Rounding{};
  if (const auto* o = std::get_if<op::Quantize>(&body)) return {&o->x, &o->y};
  return {};
}

// Where an op writes int8 rows, or -1.
int64_t rounds_to(const OpBody& body) {
  if (const auto* o = std::get_if<op::Gated>(&body)) return o->is_quantized ? o->y.offset : -1;
  if (const auto* o = std::get_if<op::Norm>(&body)) return o->is_quantized ? o->y.offset : -1;
  if (const auto* o = std::get_if<op::Quantize>(&body)) return o->y.offset;
  return -1;
}

} // namespace

bool Program::can_be_private(size_t i, int64_t max_tokens, int64_t max_rows) const {
  const Rounding mine = rounding_of(ops_[i].body);
  if (!mine.y || i + 1 == ops_.size() || ops_[i].rows != ops_[i + 1].rows) return false;
  const auto reads_mine = [&](const Op& op) {
    if (const auto* o = std::get_if<op::Experts>(&op.body)) return o->is_quantized && o->x.offset == mine.y->offset;
    const auto* o = std::get_if<op::Linear>(&op.body);
    return o && o->is_quantized && o->x.offset == mine.y->offset;
  };
  if (!std::holds_alternative<op::Linear>(ops_[i + 1].body) || !reads_mine(ops_[i + 1])) return false;
  for (size_t j = i + 2; j < ops_.size() && rounds_to(ops_[j].body) != mine.y->offset; ++j)
    if (reads_mine(ops_[j])) return false;
  // Without a barrier between them, one thread may write the linear's result while another still reads mine.x.
  const BufferRef& to = std::get<op::Linear>(ops_[i + 1].body).y;
  const int64_t n_rows = ops_[i].rows == Rows::Tokens ? max_tokens : max_rows;
  return mine.x->offset + mine.x->stride_bytes * n_rows <= to.offset || to.offset + to.stride_bytes * n_rows <= mine.x->offset;
}

void Program::plan(int64_t max_tokens, int64_t max_rows) {
  schedule_.assign(ops_.size(), {});
  std::vector<WeightRun> ahead;
  for (size_t i = ops_.size(); i-- > 0;) {
    schedule_[i].is_private = n_threads_ > 1 && can_be_private(i, max_tokens, max_rows);
    schedule_[i].ahead = ahead;
    const auto* o = std::get_if<op::Linear>(&ops_[i].body);
    if (!o) continue;
    const QuantRows q = quant_rows(o->x, o->k, nullptr);
    ahead.clear();
    for (int32_t t = 0; t < n_threads_; ++t) {
      WeightRun run = kernels_->linear_start(
          {o->parts.data(), static_cast<int32_t>(o->parts.size()), 1, o->is_quantized ? &q : nullptr, nullptr, 0, nullptr, 0, nullptr, 0},
          {t, n_threads_, nullptr, nullptr, 0});
      ahead.push_back({run.data, std::min(run.n_bytes, kMaxAheadBytes)});
    }
  }
}

void Program::replay(const StepView& step, int32_t thread, Team& team) {
  Barrier* barrier = team.barrier();
  uint8_t* scratch = thread_scratch(thread);
  ThreadCtx ctx{thread, n_threads_, barrier, scratch, thread_scratch_bytes_};
  const ThreadCtx alone{0, 1, nullptr, scratch, thread_scratch_bytes_};
  const bool is_small = step.n_tokens <= kFewTokens;
  OpClock clock(*this, thread);
  uint8_t* private_row = nullptr;
  for (size_t i = 0; i < ops_.size(); ++i) {
    const Op& op = ops_[i];
    const Schedule& schedule = schedule_[i];
    if (schedule.is_private && (op.rows == Rows::Tokens ? step.n_tokens : step.n_rows) == 1) {
      private_row = scratch + thread_scratch_bytes_;
      run_op(op, step, alone, private_row);
    } else {
      const WeightRun ahead = is_small && !schedule.ahead.empty() ? schedule.ahead[static_cast<size_t>(thread)] : WeightRun{nullptr, 0};
      ctx.ahead = ahead.data;
      team.look_ahead(thread, ahead);
      if (step.seq_trial && trial_of_[i] >= 0) keep_inputs(trials_[static_cast<size_t>(trial_of_[i])], step, ctx);
      run_op(op, step, ctx, private_row);
      barrier->wait(barrier, thread);
      private_row = nullptr;
    }
    clock.lap(i);
  }
}

Program::OpClock::OpClock(Program& program, int32_t thread) : program_(program.is_timed_ && thread == 0 ? &program : nullptr) {
  if (program_) start_ = now_ns();
}

void Program::OpClock::lap(size_t op) {
  if (!program_) return;
  const int64_t end = now_ns();
  program_->op_ns_[op] += end - start_;
  start_ = end;
}

void Program::run_op(const Op& op, const StepView& step, const ThreadCtx& ctx, uint8_t* private_row) {
  const int64_t m = op.rows == Rows::Tokens ? step.n_tokens : step.n_rows;
  if (m == 0) return;
  const auto cols = [](const BufferRef& b) { return b.stride_bytes / 4; };
  std::visit(
      Overload{
          [&](const op::RopeTable& o) {
            kernels_->rope_table({o.inv_freq.data(), static_cast<int64_t>(o.inv_freq.size()), o.magnitude, floats(o.out), cols(o.out)},
                                 step, ctx);
          },
          [&](const op::Embed& o) {
            const int32_t* zero_at = o.skips_first ? step.row_pos : nullptr;
            kernels_->embed(
                {&o.w, step.row_token, m, floats(o.y), cols(o.y), o.scale, 0, zero_at, o.masked.empty() ? nullptr : o.masked.data()}, ctx);
          },
          [&](const op::Norm& o) {
            const QuantRows q = quant_rows(o.y, o.width, private_row);
            kernels_->norm(
                {floats(o.x), cols(o.x), m, o.width, o.w.data(), o.eps, o.residual ? floats(*o.residual) : nullptr,
                 o.residual ? cols(*o.residual) : 0, o.is_quantized ? nullptr : floats(o.y), cols(o.y), o.is_quantized ? &q : nullptr},
                ctx);
          },
          [&](const op::Quantize& o) {
            const QuantRows q = quant_rows(o.y, o.width, private_row);
            kernels_->quantize({floats(o.x), cols(o.x), m, &q}, ctx);
          },
          [&](const op::Linear& o) {
            const QuantRows q = quant_rows(o.x, o.k, private_row);
            kernels_->linear({o.parts.data(), static_cast<int32_t>(o.parts.size()), m, o.is_quantized ? &q : nullptr,
                              o.is_quantized ? nullptr : floats(o.x), cols(o.x), floats(o.y), cols(o.y),
                              o.residual ? floats(*o.residual) : nullptr, o.residual ? cols(*o.residual) : 0},
                             ctx);
          },
          [&](const op::RopeKv& o) {
            kernels_->rope_kv({floats(o.qkv), cols(o.qkv), o.n_heads, o.n_kv_heads, o.head_dim,
                               o.q_norm.empty() ? nullptr : o.q_norm.data(), o.k_norm.empty() ? nullptr : o.k_norm.data(), o.eps,
                               o.cos_sin ? floats(*o.cos_sin) : nullptr, o.cos_sin ? cols(*o.cos_sin) : 0, o.d2, kv_.layer(o.layer)},
                              step, ctx);
          },
          [&](const op::Attention& o) {
            StepView rows = step;
            if (op.rows == Rows::Logits)
              rows.n_tokens = step.n_rows, rows.seq_start = step.logits_seq_start, rows.seq_rows = step.logits_seq_rows;
            kernels_->attention({floats(o.q), cols(o.q), floats(o.y), cols(o.y), o.n_heads, o.n_kv_heads, o.head_dim, o.scale, o.window,
                                 o.softcap, kv_.layer(o.layer), attention_scratch_->data(), attention_scratch_->bytes(),
                                 o.sinks.empty() ? nullptr : o.sinks.data(), o.latent_values, o.sees_block},
                                rows, ctx);
          },
          [&](const op::Gated& o) {
            const QuantRows q = quant_rows(o.y, o.f, nullptr);
            kernels_->gated({floats(o.x), cols(o.x), m, o.f, o.act, o.is_quantized ? nullptr : floats(o.y), cols(o.y),
                             o.is_quantized ? &q : nullptr, o.p0, o.p1},
                            ctx);
          },
          [&](const op::SelectRows& o) { kernels_->select_rows({floats(o.x), cols(o.x), o.width, floats(o.y), cols(o.y)}, step, ctx); },
          [&](const op::Softcap& o) { kernels_->softcap({floats(o.x), cols(o.x), m, o.width, o.cap}, ctx); },
          [&](const op::EmbedRows& o) {
            kernels_->embed({&o.w, o.is_position ? step.row_pos : step.row_segment, m, floats(o.y), cols(o.y), 1.0f, o.first}, ctx);
          },
          [&](const op::LayerNorm& o) {
            kernels_->layer_norm({floats(o.x), cols(o.x), m, o.width, o.w.data(), o.bias.data(), o.eps, floats(o.y), cols(o.y)}, ctx);
          },
          [&](const op::Activate& o) { kernels_->activate({floats(o.x), cols(o.x), m, o.width, o.act}, ctx); },
          [&](const op::SequenceAttention& o) {
            kernels_->sequence_attention({floats(o.qkv), cols(o.qkv), floats(o.y), cols(o.y), o.n_heads, o.n_kv_heads, o.head_dim, o.scale},
                                         step, ctx);
          },
          [&](const op::Add& o) { kernels_->add({floats(o.x), cols(o.x), floats(o.y), cols(o.y), m, o.width}, ctx); },
          [&](const op::Router& o) {
            kernels_->router({floats(o.x), cols(o.x), m, o.n_experts, o.top_k, o.scores, o.bias.empty() ? nullptr : o.bias.data(),
                              o.n_groups, o.n_groups_kept, o.group_top, o.renormalises, o.scale, floats(o.y), cols(o.y)},
                             ctx);
          },
          [&](const op::Experts& o) {
            const int64_t k = o.gate[0].k, f = o.gate[0].n, width = o.down[0].n;
            const QuantRows q = quant_rows(o.x, k, nullptr);
            const auto data = [](const std::vector<float>& v) { return v.empty() ? nullptr : v.data(); };
            kernels_->experts({o.is_quantized ? &q : nullptr,
                               o.is_quantized ? nullptr : floats(o.x),
                               cols(o.x),
                               m,
                               floats(o.route),
                               cols(o.route),
                               static_cast<int32_t>(o.gate.size()),
                               o.top_k,
                               o.gate.data(),
                               o.up.data(),
                               o.down.data(),
                               data(o.gate_bias),
                               data(o.up_bias),
                               data(o.down_bias),
                               o.is_hidden_quantized,
                               k,
                               f,
                               width,
                               o.act,
                               o.p0,
                               o.p1,
                               floats(o.y),
                               cols(o.y),
                               experts_scratch_->data(),
                               o.rows_at_once},
                              ctx);
          },
          [&](const op::LatentKv& o) {
            kernels_->latent_kv(
                {floats(o.latents), cols(o.latents), o.rank, o.rope, o.norm.data(), o.eps, o.cos_sin ? floats(*o.cos_sin) : nullptr,
                 o.cos_sin ? cols(*o.cos_sin) : 0, o.is_interleaved, kv_.layer(o.layer)},
                step, ctx);
          },
          [&](const op::LatentQuery& o) {
            const int64_t x_head = o.k + o.rope, y_head = o.rank + o.rope;
            kernels_->head_linear({floats(o.q), cols(o.q), x_head, o.w.data(), floats(o.y), cols(o.y), y_head, m, o.n_heads, o.k, o.rank},
                                  ctx);
            kernels_->head_rotate({floats(o.q), cols(o.q), x_head, o.k, floats(o.y), cols(o.y), y_head, o.rank, m, o.n_heads, o.rope,
                                   o.cos_sin ? floats(*o.cos_sin) : nullptr, o.cos_sin ? cols(*o.cos_sin) : 0,
                                   op.rows == Rows::Logits ? step.logits_rows : nullptr, o.is_interleaved},
                                  ctx);
          },
          [&](const op::HeadLinear& o) {
            kernels_->head_linear({floats(o.x), cols(o.x), o.k, o.w.data(), floats(o.y), cols(o.y), o.n, m, o.n_heads, o.k, o.n}, ctx);
          },
          [&](const op::SigmoidGate& o) {
            kernels_->sigmoid_gate({floats(o.x), cols(o.x), floats(o.gate), cols(o.gate), floats(o.y), cols(o.y), m, o.width, o.gate_width},
                                   ctx);
          },
          [&](const op::ShortConv& o) { kernels_->short_conv(conv_args(o, floats(o.y), cols(o.y)), step, ctx); },
          [&](const op::DeltaRule& o) {
            kernels_->delta_rule(rule_args(o, floats(o.qkv), cols(o.qkv), floats(o.y), cols(o.y)), step, ctx);
          },
          [&](const op::GatedNorm& o) { kernels_->gated_norm(norm_args(o, floats(o.x), cols(o.x), m), ctx); },
          [&](const op::DeltaLayer& o) { run_delta_layer(o, step, ctx); },
          [&](const op::ResidualMix& o) {
            const float* sources[kMaxResiduals];
            int64_t strides[kMaxResiduals];
            for (size_t j = 0; j < o.sources.size(); ++j) sources[j] = floats(o.sources[j]), strides[j] = cols(o.sources[j]);
            kernels_->residual_mix(
                {sources, strides, static_cast<int32_t>(o.sources.size()), m, o.width, o.w.data(), o.eps, floats(o.y), cols(o.y)}, ctx);
          },
          [&](const op::Given& o) { copy_rows(step.given, o.width, o.width, m, floats(o.y), cols(o.y), ctx); },
          [&](const op::Join& o) {
            copy_rows(floats(o.x), cols(o.x), o.x_width, m, floats(o.y), cols(o.y), ctx);
            copy_rows(floats(o.z), cols(o.z), o.z_width, m, floats(o.y) + o.x_width, cols(o.y), ctx);
          },
          [&](const op::Ssd& o) { kernels_->ssd(ssd_args(o, floats(o.y), cols(o.y)), step, ctx); },
          [&](const op::GateNorm& o) {
            kernels_->gate_norm(
                {floats(o.x), cols(o.x), m, floats(o.z), cols(o.z), o.groups, o.group_dim, o.w.data(), o.eps, floats(o.y), cols(o.y)}, ctx);
          },
          [&](const op::BlockConv& o) {
            kernels_->block_conv(
                {floats(o.x), cols(o.x), o.width, floats(o.delta), cols(o.delta), o.taps, o.group, o.base.data(), floats(o.y), cols(o.y)},
                step, ctx);
          },
          [&](const op::Scale& o) { kernels_->scale({floats(o.x), cols(o.x), m, o.width, o.factor}, ctx); },
      },
      op.body);
}

ShortConvArgs Program::conv_args(const op::ShortConv& o, float* y, int64_t ldy) const {
  return {floats(o.x), o.x.stride_bytes / 4,    o.channels, o.width, o.w.data(), o.bias.empty() ? nullptr : o.bias.data(), o.has_silu, y,
          ldy,         state_at(o.state_offset)};
}

DeltaRuleArgs Program::rule_args(const op::DeltaRule& o, const float* qkv, int64_t ld_qkv, float* y, int64_t ldy) const {
  const bool is_per_channel = static_cast<int64_t>(o.dt_bias.size()) != o.value_heads;
  return {qkv,
          ld_qkv,
          floats(o.gate),
          o.gate.stride_bytes / 4,
          floats(o.beta),
          o.beta.stride_bytes / 4,
          y,
          ldy,
          o.key_heads,
          o.value_heads,
          o.key_dim,
          o.value_dim,
          is_per_channel,
          o.lower_bound,
          o.a_log.data(),
          o.dt_bias.data(),
          o.eps,
          state_at(o.state_offset)};
}

SsdArgs Program::ssd_args(const op::Ssd& o, float* y, int64_t ldy) const {
  return {floats(o.xbc),
          o.xbc.stride_bytes / 4,
          floats(o.dt),
          o.dt.stride_bytes / 4,
          y,
          ldy,
          o.heads,
          o.head_dim,
          o.groups,
          o.state_dim,
          o.dt_min,
          o.dt_max,
          o.a_log.data(),
          o.dt_bias.data(),
          o.d.data(),
          state_at(o.state_offset)};
}

GatedNormArgs Program::norm_args(const op::GatedNorm& o, const float* x, int64_t ldx, int64_t m) const {
  return {x,
          ldx,
          m,
          floats(o.z),
          o.z.stride_bytes / 4,
          o.is_gate_per_head,
          o.heads,
          o.head_dim,
          o.w.empty() ? nullptr : o.w.data(),
          o.eps,
          o.is_sigmoid,
          floats(o.y),
          o.y.stride_bytes / 4,
          o.is_plain};
}

// On trial a tile of tokens finds its window in the rows before it, of which there are sixteen.
bool Program::is_whole(const op::DeltaLayer& o, int64_t n_heads) const {
  return n_heads >= n_threads_ && (max_trial_rows_ == 0 || o.conv.width <= 17);
}

void Program::run_delta_layer(const op::DeltaLayer& o, const StepView& step, const ThreadCtx& ctx) {
  const int64_t width = o.rule.value_heads * o.rule.value_dim, m = step.n_tokens;
  if (is_whole(o, step.n_seqs * o.rule.key_heads)) {
    kernels_->delta_layer({conv_args(o.conv, nullptr, 0), rule_args(o.rule, nullptr, 0, nullptr, 0), norm_args(o.norm, nullptr, 0, m)},
                          step, ctx);
    return;
  }
  // Fewer heads than threads: the parts one after the other cut finer. The bits are the same.
  float* qkv = reinterpret_cast<float*>(layer_scratch_->data());
  float* y = qkv + m * o.conv.channels;
  kernels_->short_conv(conv_args(o.conv, qkv, o.conv.channels), step, ctx);
  ctx.barrier->wait(ctx.barrier, ctx.thread);
  kernels_->delta_rule(rule_args(o.rule, qkv, o.conv.channels, y, width), step, ctx);
  ctx.barrier->wait(ctx.barrier, ctx.thread);
  kernels_->gated_norm(norm_args(o.norm, y, width, m), ctx);
}

void Program::set_timing(bool on) {
  is_timed_ = on;
  std::fill(op_ns_.begin(), op_ns_.end(), 0);
}

std::vector<int64_t> Program::take_op_ns() {
  std::vector<int64_t> out(op_ns_.size());
  out.swap(op_ns_);
  return out;
}

} // namespace tiercel
