// A recorded program: a flat list of ops over buffers of one arena, replayed by a team without allocation.
//
// Built once (add_* in order), then only read. A buffer has a fixed offset and a row stride; the number of rows comes with each step.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "tiercel/kernels.hpp"
#include "tiercel/team.hpp"
#include "tiercel/trial.hpp"

namespace tiercel {

// Which count of the step an op's rows are.
enum class Rows : uint8_t { Tokens, Logits };

// Memory from the system: zeroed, lazily touched, 2 MiB pages where the system grants them.
class Region {
 public:
  explicit Region(int64_t bytes);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  uint8_t* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  uint8_t* data_ = nullptr;
  int64_t bytes_ = 0;
};

struct BufferRef {
  int64_t offset;       // in the arena
  int64_t stride_bytes; // of one row
};

namespace op {
struct RopeTable {
  std::vector<float> inv_freq;
  float magnitude;
  BufferRef out;
};
struct Embed {
  PackedMatrix w;
  float scale;
  BufferRef y;
  bool skips_first = false;  // the row at position 0 is zeros
  std::vector<float> masked; // the row of id -1; empty: there is no such id
};
struct EmbedRows { // a row of w for each token's position or segment, counted from row `first`
  PackedMatrix w;
  bool is_position;
  int32_t first;
  BufferRef y;
};
struct Norm {
  BufferRef x;
  int64_t width;
  std::vector<float> w;
  float eps;
  std::optional<BufferRef> residual;
  BufferRef y;
  bool is_quantized; // y holds QuantRows
};
struct Quantize {
  BufferRef x;
  int64_t width;
  BufferRef y;
};
struct Linear {
  BufferRef x;
  bool is_quantized; // x holds QuantRows
  int64_t k;
  std::vector<PackedMatrix> weights;
  std::vector<std::vector<float>> biases; // empty: none
  std::vector<LinearPart> parts;          // point into the two above
  BufferRef y;
  std::optional<BufferRef> residual;
};
struct RopeKv {
  BufferRef qkv;
  int32_t n_heads, n_kv_heads, head_dim;
  std::vector<float> q_norm, k_norm; // empty: none
  float eps;
  std::optional<BufferRef> cos_sin;
  int32_t d2;
  int32_t layer;
};
struct Attention { // of all rows, or of those that need logits, whose queries q then holds
  BufferRef q;
  BufferRef y;
  int32_t n_heads, n_kv_heads, head_dim;
  float scale;
  int32_t window;
  float softcap;
  int32_t layer;
  std::vector<float> sinks;  // [H], or empty: none
  int32_t latent_values = 0; // of latent rows, the columns that are values
  bool sees_block = false;   // see AttentionArgs
};
struct Gated {
  BufferRef x;
  int64_t f;
  Activation act;
  BufferRef y;
  bool is_quantized;
  float p0 = 0.0f, p1 = 0.0f; // of act
};
struct SelectRows {
  BufferRef x;
  int64_t width; // of y; x may be wider
  BufferRef y;
};
struct Softcap {
  BufferRef x;
  int64_t width;
  float cap;
};
struct Add {
  BufferRef x, y;
  int64_t width;
};
struct Router {
  BufferRef x;
  BufferRef y;
  int32_t n_experts, top_k;
  Scores scores;
  std::vector<float> bias; // empty: none
  int32_t n_groups, n_groups_kept, group_top;
  bool renormalises;
  float scale;
};
struct Experts {
  BufferRef x;
  bool is_quantized; // x holds QuantRows
  BufferRef route;
  int32_t top_k;
  std::vector<PackedMatrix> gate, up, down;         // one an expert
  std::vector<float> gate_bias, up_bias, down_bias; // of all experts, one behind the other; empty: none
  bool is_hidden_quantized;
  Activation act;
  float p0, p1;
  BufferRef y;
  int64_t rows_at_once; // set by seal
};
struct LatentKv {
  BufferRef latents;
  int32_t rank, rope;
  std::vector<float> norm;
  float eps;
  std::optional<BufferRef> cos_sin;
  bool is_interleaved;
  int32_t layer;
};
struct LatentQuery { // y, a head: [query's first k columns @ w | the other `rope`, rotated]
  BufferRef q;
  std::vector<float> w; // [heads, k, rank to 16]
  int32_t n_heads, k, rank, rope;
  std::optional<BufferRef> cos_sin; // of all rows of the step
  bool is_interleaved;
  BufferRef y;
};
struct HeadLinear {
  BufferRef x;
  std::vector<float> w; // [heads, k, n to 16]
  int32_t n_heads, k, n;
  BufferRef y;
};
struct SigmoidGate {
  BufferRef x, gate;
  int64_t width, gate_width;
  BufferRef y;
};
struct ShortConv {
  BufferRef x;
  int64_t channels, width;
  std::vector<float> w;    // [width, channels]
  std::vector<float> bias; // empty: none
  bool has_silu;
  BufferRef y;
  int64_t state_offset; // in a slot's state
};
struct DeltaRule {
  BufferRef qkv, gate, beta;
  int64_t key_heads, value_heads, key_dim, value_dim;
  float lower_bound;
  std::vector<float> a_log, dt_bias;
  float eps;
  BufferRef y;
  int64_t state_offset;
};
struct GatedNorm {
  BufferRef x, z;
  bool is_gate_per_head;
  int64_t heads, head_dim;
  std::vector<float> w; // empty: none
  float eps;
  bool is_sigmoid;
  BufferRef y;
  bool is_plain = false;
};
struct Ssd {
  BufferRef xbc, dt;
  int64_t heads, head_dim, groups, state_dim;
  float dt_min, dt_max;
  std::vector<float> a_log, dt_bias, d;
  BufferRef y;
  int64_t state_offset;
};
struct GateNorm {
  BufferRef x, z;
  int64_t groups, group_dim;
  std::vector<float> w;
  float eps;
  BufferRef y;
};
struct DeltaLayer { // conv.y, rule.qkv, rule.y and norm.x are no buffers
  ShortConv conv;
  DeltaRule rule;
  GatedNorm norm;
};
struct LayerNorm {
  BufferRef x;
  int64_t width;
  std::vector<float> w, bias;
  float eps;
  BufferRef y;
};
struct Activate {
  BufferRef x;
  int64_t width;
  Unary act;
};
struct SequenceAttention {
  BufferRef qkv, y;
  int32_t n_heads, n_kv_heads, head_dim;
  float scale;
};
struct ResidualMix {
  std::vector<BufferRef> sources; // at most kMaxResiduals
  int64_t width;
  std::vector<float> w;
  float eps;
  BufferRef y;
};
struct Given { // rows that the step brings along
  int64_t width;
  BufferRef y;
};
struct Join { // rows of x, and behind them those of z
  BufferRef x;
  int64_t x_width;
  BufferRef z;
  int64_t z_width;
  BufferRef y;
};
struct BlockConv {
  BufferRef x;
  int64_t width;
  BufferRef delta;
  int32_t taps, group;
  std::vector<float> base; // [taps, width]
  BufferRef y;
};
struct Scale {
  BufferRef x;
  int64_t width;
  float factor;
};
} // namespace op

using OpBody =
    std::variant<op::RopeTable, op::Embed, op::Norm, op::Quantize, op::Linear, op::RopeKv, op::Attention, op::Gated, op::SelectRows,
                 op::Softcap, op::Add, op::Router, op::Experts, op::LatentKv, op::LatentQuery, op::HeadLinear, op::SigmoidGate,
                 op::ShortConv, op::DeltaRule, op::GatedNorm, op::EmbedRows, op::LayerNorm, op::Activate, op::SequenceAttention,
                 op::ResidualMix, op::Given, op::Join, op::Ssd, op::GateNorm, op::DeltaLayer, op::BlockConv, op::Scale>;

struct Op {
  Rows rows;
  OpBody body;
};

// The page pool's memory. Page-major: one page of all layers and heads is one contiguous run, so a tier moves it with one copy.
struct KvPool {
  uint8_t* base = nullptr;
  int32_t n_pages = 0;
  int32_t page_tokens = 16;
  KvType type = KvType::F16;
  int64_t page_stride_bytes = 0;
  std::vector<int64_t> layer_offset;      // [layers]
  std::vector<int64_t> head_stride_bytes; // [layers]

  KvLayer layer(int32_t i) const {
    const auto l = static_cast<size_t>(i);
    return {base + layer_offset[l], page_stride_bytes, head_stride_bytes[l], page_tokens, type};
  }
};

class Program {
 public:
  Program(const KernelTable* kernels, int32_t n_threads);

  void add(Op op);
  // Fixes sizes and allocates: no add after it. logits: where the last linear left [R, vocab] floats.
  void seal(int64_t arena_bytes, KvPool kv, BufferRef logits, int64_t vocab, int64_t max_tokens, int64_t max_rows, int64_t max_seqs,
            int64_t max_len, int64_t state_slot_bytes = 0, int64_t max_trial_rows = 0);

  // Runs all ops of one step; called by every thread of the team with the same step.
  void replay(const StepView& step, int32_t thread, Team& team);
  // Takes the states of the sequences on trial over those of their rows that are right. REQUIRES: replay has ended, of the same step.
  void advance(const StepView& step, const TrialRows& rows, int32_t thread, Team& team);
  // Rows on trial that a step may have; 0: none.
  int64_t max_trial_rows() const { return max_trial_rows_; }

  float* logits_row(int64_t r) const { return reinterpret_cast<float*>(arena_->data() + logits_.offset + r * logits_.stride_bytes); }
  uint8_t* arena() const { return arena_->data(); }
  int64_t arena_bytes() const { return arena_->bytes(); }
  int64_t vocab() const { return vocab_; }
  int32_t n_threads() const { return n_threads_; }
  // Columns of the rows that a step must bring along; 0: none.
  int64_t given_width() const { return given_width_; }
  int32_t page_tokens() const { return kv_.page_tokens; }
  size_t n_ops() const { return ops_.size(); }
  // [slots][state_slot_bytes()]: what recurrent layers keep of each slot's sequence.
  uint8_t* states() const { return state_->data(); }
  int64_t state_slot_bytes() const { return state_slot_bytes_; }
  const KernelTable* kernels() const { return kernels_; }

  // Nanoseconds spent in each op, summed over steps since the last call, when timing is on. Read between steps only.
  void set_timing(bool on);
  std::vector<int64_t> take_op_ns();

 private:
  // What is fixed about an op once the program is whole.
  struct Schedule {
    // With one row, every thread computes this op alone, into a row of its own, where the next op reads it: that is cheaper than a
    // barrier. It rounds to int8, and nothing but the next op, a linear, reads the result.
    bool is_private = false;
    std::vector<WeightRun> ahead; // for each thread, what the next linear reads first when few rows come; empty if none follows
  };

  // Adds to each op's time what passes from lap to lap, on thread 0 when timing is on.
  class OpClock {
   public:
    OpClock(Program& program, int32_t thread);
    void lap(size_t op);

   private:
    Program* program_; // nullptr: nothing is measured
    int64_t start_ = 0;
  };

  void plan(int64_t max_tokens, int64_t max_rows);
  void plan_trials(int64_t max_trial_rows);
  void keep_inputs(const TrialInputs& t, const StepView& step, const ThreadCtx& ctx);
  void advance_op(const TrialInputs& t, const StepView& one, int64_t row, const ThreadCtx& ctx);
  float* trial_row(const TrialInputs& t, int64_t row) const {
    return reinterpret_cast<float*>(trial_inputs_->data()) + t.offset + row * t.row_floats;
  }
  uint8_t* thread_scratch(int32_t thread) const { return scratch_->data() + thread * (thread_scratch_bytes_ + private_row_bytes_ + 4096); }
  bool can_be_private(size_t i, int64_t max_tokens, int64_t max_rows) const;
  // private_row: where a Q8 row lies instead of in its buffer, or nullptr.
  void run_op(const Op& op, const StepView& step, const ThreadCtx& ctx, uint8_t* private_row);
  QuantRows quant_rows(const BufferRef& b, int64_t k, uint8_t* private_row) const {
    return {private_row ? private_row : arena_->data() + b.offset, b.stride_bytes, k};
  }
  void run_delta_layer(const op::DeltaLayer& o, const StepView& step, const ThreadCtx& ctx);
  // Whether a delta layer's `n_heads` are enough for all threads, so that it runs as one.
  bool is_whole(const op::DeltaLayer& o, int64_t n_heads) const;
  ShortConvArgs conv_args(const op::ShortConv& o, float* y, int64_t ldy) const;
  DeltaRuleArgs rule_args(const op::DeltaRule& o, const float* qkv, int64_t ld_qkv, float* y, int64_t ldy) const;
  SsdArgs ssd_args(const op::Ssd& o, float* y, int64_t ldy) const;
  GatedNormArgs norm_args(const op::GatedNorm& o, const float* x, int64_t ldx, int64_t m) const;
  StateMemory state_at(int64_t offset) const { return {state_->data() + offset, state_slot_bytes_}; }
  float* floats(const BufferRef& b) const { return reinterpret_cast<float*>(arena_->data() + b.offset); }

  const KernelTable* kernels_;
  int32_t n_threads_;
  std::vector<Op> ops_;
  std::vector<Schedule> schedule_; // of each op
  std::unique_ptr<Region> arena_;
  std::unique_ptr<Region> scratch_;
  int64_t thread_scratch_bytes_ = 0, private_row_bytes_ = 0; // each thread has both, then a page
  std::unique_ptr<Region> attention_scratch_;
  std::unique_ptr<Region> experts_scratch_;
  std::unique_ptr<Region> layer_scratch_; // of delta layers; only touched when threads outnumber their heads
  std::unique_ptr<Region> state_;         // [slots][state_slot_bytes_]
  int64_t state_slot_bytes_ = 0;
  std::vector<TrialInputs> trials_; // of each recurrent op
  std::vector<int32_t> trial_of_;   // by op; -1: it has no state
  std::unique_ptr<Region> trial_inputs_, trial_outputs_;
  int64_t max_trial_rows_ = 0;
  KvPool kv_;
  BufferRef logits_{0, 0};
  int64_t vocab_ = 0, given_width_ = 0;
  bool is_timed_ = false;
  std::vector<int64_t> op_ns_;
};

} // namespace tiercel
