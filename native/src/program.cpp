#include "tiercel/program.hpp"

#include <algorithm>
#include <chrono>

namespace tiercel {

namespace {

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int64_t align64(int64_t n) { return (n + 63) / 64 * 64; }

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
                   int64_t max_len) {
  arena_ = std::make_unique<Region>(arena_bytes);
  kv_ = std::move(kv);
  logits_ = logits;
  vocab_ = vocab;
  int64_t thread_bytes = 4096, shared_bytes = 0;
  for (auto& op : ops_) {
    std::visit(Overload{
                   [&](op::Linear& o) {
                     for (size_t i = 0; i < o.parts.size(); ++i) {
                       o.parts[i].w = &o.weights[i];
                       o.parts[i].bias = o.biases[i].empty() ? nullptr : o.biases[i].data();
                     }
                     const int64_t m = op.rows == Rows::Tokens ? max_tokens : max_rows;
                     thread_bytes = std::max(thread_bytes, linear_thread_bytes(o.k, m));
                   },
                   [&](op::Attention& o) {
                     thread_bytes = std::max(thread_bytes, attention_thread_bytes(o.n_heads, o.n_kv_heads, o.head_dim));
                     shared_bytes = std::max(shared_bytes, attention_shared_bytes(o.n_heads, o.head_dim, max_seqs, max_len, n_threads_));
                   },
                   [&](op::Norm& o) { thread_bytes = std::max(thread_bytes, o.width * 4 + 64); },
                   [&](op::Gated& o) { thread_bytes = std::max(thread_bytes, o.f * 4 + 64); },
                   [&](auto&) {},
               },
               op.body);
  }
  thread_scratch_bytes_ = align64(thread_bytes);
  // A page apart, so that two threads never share a line or a prefetch pair.
  scratch_ = std::make_unique<Region>((thread_scratch_bytes_ + 4096) * n_threads_);
  attention_scratch_ = std::make_unique<Region>(shared_bytes);
  op_ns_.assign(ops_.size(), 0);
}

void Program::replay(const StepView& step, int32_t thread, Barrier* barrier) {
  const ThreadCtx ctx{thread, n_threads_, barrier, scratch_->data() + thread * (thread_scratch_bytes_ + 4096), thread_scratch_bytes_};
  const bool is_timing = is_timed_ && thread == 0;
  int64_t start = is_timing ? now_ns() : 0;
  for (size_t i = 0; i < ops_.size(); ++i) {
    run_op(ops_[i], step, ctx);
    barrier->wait(barrier, thread);
    if (is_timing) {
      const int64_t end = now_ns();
      op_ns_[i] += end - start;
      start = end;
    }
  }
}

void Program::run_op(const Op& op, const StepView& step, const ThreadCtx& ctx) {
  const int64_t m = op.rows == Rows::Tokens ? step.n_tokens : step.n_rows;
  if (m == 0) return;
  const auto cols = [](const BufferRef& b) { return b.stride_bytes / 4; };
  std::visit(
      Overload{
          [&](const op::RopeTable& o) {
            kernels_->rope_table({o.inv_freq.data(), static_cast<int64_t>(o.inv_freq.size()), o.magnitude, floats(o.out), cols(o.out)},
                                 step, ctx);
          },
          [&](const op::Embed& o) { kernels_->embed({&o.w, step.row_token, m, floats(o.y), cols(o.y), o.scale}, ctx); },
          [&](const op::Norm& o) {
            const QuantRows q = quant_rows(o.y, o.width);
            kernels_->norm(
                {floats(o.x), cols(o.x), m, o.width, o.w.data(), o.eps, o.residual ? floats(*o.residual) : nullptr,
                 o.residual ? cols(*o.residual) : 0, o.is_quantized ? nullptr : floats(o.y), cols(o.y), o.is_quantized ? &q : nullptr},
                ctx);
          },
          [&](const op::Quantize& o) {
            const QuantRows q = quant_rows(o.y, o.width);
            kernels_->quantize({floats(o.x), cols(o.x), m, &q}, ctx);
          },
          [&](const op::Linear& o) {
            const QuantRows q = quant_rows(o.x, o.k);
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
            kernels_->attention({floats(o.q), cols(o.q), floats(o.y), cols(o.y), o.n_heads, o.n_kv_heads, o.head_dim, o.scale, o.window,
                                 o.softcap, kv_.layer(o.layer), attention_scratch_->data(), attention_scratch_->bytes()},
                                step, ctx);
          },
          [&](const op::Gated& o) {
            const QuantRows q = quant_rows(o.y, o.f);
            kernels_->gated(
                {floats(o.x), cols(o.x), m, o.f, o.act, o.is_quantized ? nullptr : floats(o.y), cols(o.y), o.is_quantized ? &q : nullptr},
                ctx);
          },
          [&](const op::SelectRows& o) { kernels_->select_rows({floats(o.x), cols(o.x), o.width, floats(o.y), cols(o.y)}, step, ctx); },
          [&](const op::Softcap& o) { kernels_->softcap({floats(o.x), cols(o.x), m, o.width, o.cap}, ctx); },
          [&](const op::Add& o) { kernels_->add({floats(o.x), cols(o.x), floats(o.y), cols(o.y), m, o.width}, ctx); },
      },
      op.body);
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
