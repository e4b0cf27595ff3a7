// What the kernels of every instruction-set level are asked to do: argument structs and the table of entry points.
//
// Plain data only. This header is included by code compiled for different instruction sets, so it holds no inline function:
// the linker keeps one copy of such a function, and the AVX-512 copy would crash an older processor.
//
// Every kernel is SPMD: all threads of the team call it with the same arguments and their own ThreadCtx; each does its fixed share.
// A kernel's result for one output row depends on that row's inputs only: never on T, on the other rows, on the number of
// threads or on the level. Reduction orders are part of each kernel's contract (see the .cpp files).
#pragma once

#include <cstddef>
#include <cstdint>

namespace tiercel {

// Weight formats, in the order of quant/formats.py.
enum class Format : uint8_t { F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, MXFP4, NVFP4 };

enum class KvType : uint8_t { F16, F32, I8 };

// Situ, SwigluClamp and SiluClamp have parameters: see ops/activations.py, which names and defines them.
enum class Activation : uint8_t { Silu, GeluTanh, Situ, SwigluClamp, SiluClamp };

// One matrix W [N, K] in tile layout: tiles of 16 consecutive output rows, each tile contiguous (see kernels/pack.cpp).
struct PackedMatrix {
  Format format;
  int64_t n;           // output rows
  int64_t k;           // input columns; a multiple of 32 for the quantised formats
  const uint8_t* data; // 64-byte aligned, ceil(n / 16) tiles of tile_bytes
  int64_t tile_bytes;
};

// Rows of activations rounded to int8 by groups of 32 columns. One row is stride_bytes long and 64-byte aligned; what it holds
// is private to kernels/quantize.cpp and kernels/linear_*.cpp. k is a multiple of 32.
struct QuantRows {
  uint8_t* data;
  int64_t stride_bytes;
  int64_t k;
};

// A team's barrier, seen from a kernel: every thread calls wait once.
struct Barrier {
  void (*wait)(Barrier* self, int32_t thread);
};

struct ThreadCtx {
  int32_t thread;
  int32_t n_threads;
  Barrier* barrier;
  uint8_t* scratch; // private to the thread, 64-byte aligned
  int64_t scratch_bytes;
  const uint8_t* ahead = nullptr; // the thread's first weights of the next linear, worth fetching early, or nullptr
};

// Consecutive bytes of packed weights.
struct WeightRun {
  const uint8_t* data;
  int64_t n_bytes;
};

// The tokens of one step. Row t belongs to sequence row_seq[t] and sits at position row_pos[t] of it.
struct StepView {
  int32_t n_tokens;                // T
  int32_t n_seqs;                  // S
  int32_t n_rows;                  // R: rows that need logits
  const int32_t* seq_slot;         // [S]
  const int32_t* seq_start;        // [S] position of the sequence's first row in this step
  const int32_t* seq_rows;         // [S + 1] first row of each sequence
  const int32_t* row_token;        // [T] ids; -1: the masked row of an Embed that has one
  const int32_t* row_pos;          // [T]
  const int32_t* row_seq;          // [T]
  const int32_t* logits_rows;      // [R] of each sequence the last ones, so that they stand at consecutive positions
  const int32_t* logits_seq_start; // [S] as seq_start and seq_rows, of the rows that need logits
  const int32_t* logits_seq_rows;  // [S + 1]
  const int32_t* page_table;       // [slots, page_table_stride] page ids; entries past a sequence's last page are never read
  int64_t page_table_stride;
  const int32_t* row_segment = nullptr; // [T] 0, or 1 from where a pair's second text begins
  const float* given = nullptr;         // [T, width] rows that the step brings along, one behind the other
  // [S], or nullptr: none is. A sequence whose rows are on trial (not -1) leaves its recurrent state as it was: what they were made of is
  // kept from this row of `Trial` on, and `Program::advance` takes the state over those that turn out right.
  const int32_t* seq_trial = nullptr;
};

// One layer's share of the page pool. Page p of head h starts at base + p * page_stride_bytes + h * head_stride_bytes.
// A page holds page_tokens tokens (a multiple of 16) as page_tokens / 16 runs of kv_run_bytes. One run:
//   F16, F32  K^T [D][16], then V [16][D]
//   I8        K^T in pairs of columns, int8 [D / 2][16][2]; V in pairs of tokens, int8 [8][D][2]; then scales of the tokens'
//             keys, f16 [ceil(D / 64)][16], one for each 64 columns, and f16 [16] of their values: a number is its byte times its
//             scale. A token whose key or value is not finite has NaN for all its scales.
// A layer of latent rows has one head, and a run of latent_run_bytes: [16][D], F16 or F32.
struct KvLayer {
  uint8_t* base;
  int64_t page_stride_bytes;
  int64_t head_stride_bytes;
  int32_t page_tokens;
  KvType type;
};

// One product of a group: y[:, y_col : y_col + n] = x @ W^T (+ bias).
struct LinearPart {
  const PackedMatrix* w;
  const float* bias; // [n] or nullptr
  int64_t y_col;
};

// y[m, :] = parts applied to x[m, :] (+ residual[m, :]). Either xq (quantised weights) or x (float weights) is set, as the parts'
// formats need; all parts of a call agree. residual may be y itself.
struct LinearArgs {
  const LinearPart* parts;
  int32_t n_parts;
  int64_t m;
  const QuantRows* xq;
  const float* x;
  int64_t ldx;
  float* y;
  int64_t ldy;
  const float* residual; // or nullptr
  int64_t ld_residual;
};

struct EmbedArgs {
  const PackedMatrix* w; // [V, E]
  const int32_t* ids;    // [m], each in 0..V
  int64_t m;
  float* y; // [m, E]
  int64_t ldy;
  float scale;
  int32_t first = 0;                // added to each id
  const int32_t* zero_at = nullptr; // [m]: a row whose number is 0 is zeros
  const float* masked = nullptr;    // [E]: times scale, the row of id -1
};

// y = x / sqrt(mean(x^2) + eps) * w over each row of width columns. Results go to y (f32) or,
// when yq is set, are rounded to int8 there. With residual set, y = residual + norm(x).
struct NormArgs {
  const float* x;
  int64_t ldx;
  int64_t m;
  int64_t width;
  const float* w; // [width]
  float eps;
  const float* residual;
  int64_t ld_residual;
  float* y;
  int64_t ldy;
  const QuantRows* yq;
};

struct QuantizeArgs {
  const float* x;
  int64_t ldx;
  int64_t m;
  const QuantRows* yq;
};

// y = act(gate) * up with gate = x[:, 0:f] and up = x[:, f:2f]; to y (f32) or rounded to yq.
struct GatedArgs {
  const float* x;
  int64_t ldx;
  int64_t m;
  int64_t f;
  Activation act;
  float* y;
  int64_t ldy;
  const QuantRows* yq;
  float p0 = 0.0f, p1 = 0.0f; // the activation's parameters, in the order of ops/activations.py
};

// cos_sin[t] = [cos(angle_0..D2-1) | sin(angle_0..D2-1)] * magnitude; angle_j = float(row_pos[t]) * inv_freq[j] rounded to f32.
struct RopeTableArgs {
  const float* inv_freq; // [d2]
  int64_t d2;
  float magnitude;
  float* cos_sin; // [T, 2 * d2]
  int64_t ld;
};

// For each row of qkv [T, (H + 2K) * D]: optional RMS norms of each q and k head, half-split rotation of the first 2 * d2 columns of each
// head, q left in place, k and v written to the sequence's page slot.
struct RopeKvArgs {
  float* qkv;
  int64_t ld;
  int32_t n_heads;     // H
  int32_t n_kv_heads;  // K
  int32_t head_dim;    // D
  const float* q_norm; // [D] or nullptr
  const float* k_norm; // [D] or nullptr
  float eps;
  const float* cos_sin; // [T, 2 * d2] or nullptr (no rotation)
  int64_t ld_cos_sin;
  int32_t d2;
  KvLayer kv;
};

// Causal attention of every row over its own sequence's pages, this step's rows included.
struct AttentionArgs {
  const float* q; // [T, H * D], row stride ldq
  int64_t ldq;
  float* y; // [T, H * D]
  int64_t ldy;
  int32_t n_heads;
  int32_t n_kv_heads;
  int32_t head_dim;
  float scale;
  int32_t window; // 0: all; W: key s is visible to query t when t - W < s <= t
  float softcap;  // 0: none; c: c * tanh(score / c) after scaling
  KvLayer kv;
  uint8_t* shared_scratch; // one for the team, sized by attention_shared_bytes
  int64_t shared_scratch_bytes;
  const float* sinks = nullptr; // [H] or nullptr: logits that take weight in a row's softmax and give no value
  // n > 0: pages hold latent rows, which are keys, and whose first n columns are the values; n_kv_heads is 1, y [T, H * n].
  int32_t latent_values = 0;
  bool sees_block = false; // every row of a sequence in the step sees, and begins its window, where the last one does
};

// For each row of latents [T, rank + rope]: RMS norm of the first rank columns, rotation of the others, both in place; then the row
// goes to the sequence's page slot.
struct LatentKvArgs {
  float* latents;
  int64_t ld;
  int32_t rank, rope;
  const float* norm; // [rank]
  float eps;
  const float* cos_sin; // [T, rope] or nullptr (no rotation)
  int64_t ld_cos_sin;
  bool is_interleaved; // column pairs (2 j, 2 j + 1) rotate, and are written as halves; else (j, j + rope / 2)
  KvLayer kv;
};

// y[:, h * y_head + y_col ..] = x[:, h * x_head + x_col ..] of n columns, rotated as LatentKvArgs says.
struct HeadRotateArgs {
  const float* x;
  int64_t ldx, x_head, x_col;
  float* y;
  int64_t ldy, y_head, y_col;
  int64_t m;
  int32_t n_heads, n;
  const float* cos_sin; // [T, n] or nullptr
  int64_t ld_cos_sin;
  const int32_t* table_rows; // [m] row of cos_sin of each row, or nullptr: the same
  bool is_interleaved;
};

// y[:, h * y_head .. + n] = x[:, h * x_head .. + k] @ w[h], in float32.
struct HeadLinearArgs {
  const float* x;
  int64_t ldx, x_head;
  const float* w; // [n_heads, k, n to a multiple of 16]
  float* y;
  int64_t ldy, y_head;
  int64_t m;
  int32_t n_heads, k, n;
};

// y = x * sigmoid(gate), each column of gate for width / gate_width columns of x.
struct SigmoidGateArgs {
  const float* x;
  int64_t ldx;
  const float* gate;
  int64_t ld_gate;
  float* y;
  int64_t ldy;
  int64_t m, width, gate_width;
};

struct SelectRowsArgs {
  const float* x;
  int64_t ldx;
  int64_t width;
  float* y;
  int64_t ldy;
};

// x = cap * tanh(x / cap), in place.
struct SoftcapArgs {
  float* x;
  int64_t ldx;
  int64_t m;
  int64_t width;
  float cap;
};

// x[m, :width] += y[m, :width]
struct AddArgs {
  float* x;
  int64_t ldx;
  const float* y;
  int64_t ldy;
  int64_t m;
  int64_t width;
};

enum class Scores : uint8_t { Softmax, Sigmoid };

// route[m] = [top_k expert numbers, ascending, as floats | their weights], chosen by logits[m, :n_experts]; see router.cpp.
struct RouterArgs {
  const float* logits;
  int64_t ldx;
  int64_t m;
  int32_t n_experts;
  int32_t top_k;
  Scores scores;
  const float* bias; // [n_experts], added for the choice only, or nullptr
  int32_t n_groups;
  int32_t n_groups_kept;
  int32_t group_top; // how many of a group's best make its score
  bool renormalises;
  float scale;
  float* route; // [m, 2 * top_k]
  int64_t ldy;
};

// y[m, :] = sum over the top_k experts e of route[m], ascending, of weight * (down_e(act(gate_e x, up_e x))); see experts.cpp.
struct ExpertsArgs {
  const QuantRows* xq; // set when gate and up are quantised, else x
  const float* x;
  int64_t ldx;
  int64_t m;
  const float* route; // [m, 2 * top_k]; numbers in 0..n_experts
  int64_t ld_route;
  int32_t n_experts;
  int32_t top_k;
  const PackedMatrix* gate; // [n_experts], each [f, k]
  const PackedMatrix* up;
  const PackedMatrix* down; // [n_experts], each [width, f]
  const float* gate_bias;   // [n_experts, f] or nullptr
  const float* up_bias;     // likewise
  const float* down_bias;   // [n_experts, width] or nullptr
  bool is_hidden_quantized; // what act gives is rounded to int8, as down is quantised
  int64_t k, f, width;
  Activation act;
  float p0, p1;
  float* y;
  int64_t ldy;
  uint8_t* shared_scratch; // one for the team, 64-byte aligned, of experts_shared_bytes
  int64_t rows_at_once;    // as given to experts_shared_bytes
};

// What a layer keeps of each sequence beside keys and values: slot s's begins at base + s * slot_stride_bytes, a multiple of 64.
// A sequence whose rows start at position 0 has none yet: whatever lies there is not read.
struct StateMemory {
  uint8_t* base;
  int64_t slot_stride_bytes;
};

// y[t, c] = act(bias[c] + sum_j w[j, c] * x[t - width + 1 + j, c]) over each sequence, zeros before its first token. The state is the
// last width - 1 rows of x, float [width - 1, channels].
struct ShortConvArgs {
  const float* x;
  int64_t ldx;
  int64_t channels;
  int64_t width;
  const float* w;    // [width, channels], the oldest tap first
  const float* bias; // [channels] or nullptr
  bool has_silu;     // else no activation
  float* y;          // not x
  int64_t ldy;
  StateMemory state;
};

// The gated delta rule over each sequence's rows; see kernels/recurrent.cpp. The state of a value head is float
// [ceil(value_dim / 32)][key_dim][columns of the block, a multiple of 16]; heads follow each other.
struct DeltaRuleArgs {
  const float* qkv; // [T, 2 * key_heads * key_dim + value_heads * value_dim]
  int64_t ld_qkv;
  const float* gate; // [T, value_heads], or [T, value_heads * key_dim] when per channel
  int64_t ld_gate;
  const float* beta; // [T, value_heads]
  int64_t ld_beta;
  float* y; // [T, value_heads * value_dim]
  int64_t ldy;
  int64_t key_heads; // each serves value_heads / key_heads consecutive value heads
  int64_t value_heads;
  int64_t key_dim;
  int64_t value_dim;
  bool is_per_channel;
  float lower_bound;    // below 0: log decay = it * sigmoid(e^a_log * (gate + dt_bias)); 0: -e^a_log * softplus(gate + dt_bias)
  const float* a_log;   // [value_heads]
  const float* dt_bias; // as gate
  float eps;            // in the roots of q's and k's norms
  StateMemory state;
};
int64_t delta_rule_thread_bytes(int64_t key_dim);

// y = norm of each head of x times w times act(z); without w, x * act(z).
struct GatedNormArgs {
  const float* x; // [m, heads * head_dim]
  int64_t ldx;
  int64_t m;
  const float* z; // as x, or [m, heads]: one gate for all columns of a head
  int64_t ldz;
  bool is_gate_per_head;
  int64_t heads;
  int64_t head_dim;
  const float* w; // [head_dim] or nullptr
  float eps;
  bool is_sigmoid; // else silu
  float* y;
  int64_t ldy;
  bool is_plain = false; // act(z) is z, whatever is_sigmoid says
};

// Mamba2's recurrence over each sequence's rows; see kernels/ssd.cpp. The state of a head is float
// [ceil(head_dim / 32)][state_dim][columns of the block, a multiple of 16]; heads follow each other.
struct SsdArgs {
  const float* xbc; // [T, heads * head_dim + 2 * groups * state_dim]: x, b, c
  int64_t ld_xbc;
  const float* dt; // [T, heads]
  int64_t ld_dt;
  float* y; // [T, heads * head_dim]
  int64_t ldy;
  int64_t heads;
  int64_t head_dim;
  int64_t groups; // each one's b and c serve heads / groups consecutive heads
  int64_t state_dim;
  float dt_min, dt_max;
  const float *a_log, *dt_bias, *d; // [heads]
  StateMemory state;
};
int64_t ssd_thread_bytes();

// y = norm of each of `groups` equal parts of x * silu(z), times w.
struct GateNormArgs {
  const float* x; // [m, groups * group_dim]
  int64_t ldx;
  int64_t m;
  const float* z; // as x
  int64_t ldz;
  int64_t groups;
  int64_t group_dim;
  const float* w; // [groups * group_dim]
  float eps;
  float* y; // not z
  int64_t ldy;
};

// A convolution, the delta rule of its result, and the gated norm of that: norm.y = what the three give one after the other, with
// conv.channels = 2 * key_heads * key_dim + value_heads * value_dim and norm.heads = rule.value_heads. Between them is no buffer: conv.y,
// rule.qkv, rule.y and norm.x are not read. With norm.y nullptr only the state goes on.
struct DeltaLayerArgs {
  ShortConvArgs conv;
  DeltaRuleArgs rule;
  GatedNormArgs norm;
};
int64_t delta_layer_thread_bytes(int64_t key_dim, int64_t value_dim, int64_t group); // group: value heads of a key head

// What a thread needs behind that (or behind delta_rule_thread_bytes or ssd_thread_bytes) for rows on trial: a copy of `heads` matrices.
int64_t trial_thread_bytes(int64_t key_dim, int64_t value_dim, int64_t heads);

// y = (x - mean) / sqrt(variance + eps) * w + bias over each row of width columns. y may be x.
struct LayerNormArgs {
  const float* x;
  int64_t ldx;
  int64_t m;
  int64_t width;
  const float* w;    // [width]
  const float* bias; // [width]
  float eps;
  float* y;
  int64_t ldy;
};

enum class Unary : uint8_t { Gelu, GeluTanh, Relu, Silu, Tanh };

// x = act(x), in place.
struct ActivateArgs {
  float* x;
  int64_t ldx;
  int64_t m;
  int64_t width;
  Unary act;
};

// Attention of every row to all rows of its own sequence in this step, later ones too; nothing is kept.
struct SequenceAttentionArgs {
  const float* qkv; // [T, (H + 2K) * D]: q, k, v
  int64_t ld;
  float* y; // [T, H * D]
  int64_t ldy;
  int32_t n_heads;
  int32_t n_kv_heads;
  int32_t head_dim;
  float scale;
};

// Kinds of work that measure the machine: fused multiply-adds and int8 dot products in registers, reading in order.
enum class Probe : uint8_t { Fma, Dot, Read };

// The most rows of a residual bank that are mixed.
constexpr int32_t kMaxResiduals = 64;

// y = of n rows their sum, weighed by the softmax of (w . row) / sqrt(mean(row^2) + eps).
struct ResidualMixArgs {
  const float* const* sources; // [n], each [m, width]
  const int64_t* strides;      // [n] floats from a source's row to its next
  int32_t n;                   // 1 .. kMaxResiduals
  int64_t m;
  int64_t width;
  const float* w; // [width]
  float eps;
  float* y; // no source
  int64_t ldy;
};

// y[i, c] = sum over taps t <= i of (base[t, c] + delta[i, t, c / group]) * x[i - t, c]; i counts from the sequence's first row in the
// step.
struct BlockConvArgs {
  const float* x; // [T, width]
  int64_t ldx;
  int64_t width;      // a multiple of group
  const float* delta; // [T, taps * (width / group)]
  int64_t ld_delta;
  int32_t taps;
  int32_t group;
  const float* base; // [taps, width]
  float* y;          // neither x nor delta
  int64_t ldy;
};

// x = factor * x, in place.
struct ScaleArgs {
  float* x;
  int64_t ldx;
  int64_t m;
  int64_t width;
  float factor;
};

struct KernelTable {
  const char* level; // "scalar", "avx2", "avx512"
  void (*linear)(const LinearArgs&, const ThreadCtx&);
  // The weights that linear, called so, reads first on this thread; no bytes if it reads none. Of args, y and residual may be null.
  WeightRun (*linear_start)(const LinearArgs&, const ThreadCtx&);
  void (*embed)(const EmbedArgs&, const ThreadCtx&);
  void (*quantize)(const QuantizeArgs&, const ThreadCtx&);
  void (*norm)(const NormArgs&, const ThreadCtx&);
  void (*gated)(const GatedArgs&, const ThreadCtx&);
  void (*rope_table)(const RopeTableArgs&, const StepView&, const ThreadCtx&);
  void (*rope_kv)(const RopeKvArgs&, const StepView&, const ThreadCtx&);
  void (*attention)(const AttentionArgs&, const StepView&, const ThreadCtx&);
  void (*select_rows)(const SelectRowsArgs&, const StepView&, const ThreadCtx&);
  void (*softcap)(const SoftcapArgs&, const ThreadCtx&);
  void (*add)(const AddArgs&, const ThreadCtx&);
  // First index of the largest of x[0..n); a NaN anywhere gives -1.
  int64_t (*argmax)(const float* x, int64_t n);
  // Does n rounds of 12 vector operations (16 floats, or 64 products of bytes), or reads n bytes; the result depends on all of it.
  // data: 64-byte aligned, 1 KiB at least.
  float (*probe)(Probe kind, const uint8_t* data, int64_t n);
  void (*router)(const RouterArgs&, const ThreadCtx&);
  void (*experts)(const ExpertsArgs&, const ThreadCtx&);
  void (*latent_kv)(const LatentKvArgs&, const StepView&, const ThreadCtx&);
  void (*head_rotate)(const HeadRotateArgs&, const ThreadCtx&);
  void (*head_linear)(const HeadLinearArgs&, const ThreadCtx&);
  void (*sigmoid_gate)(const SigmoidGateArgs&, const ThreadCtx&);
  void (*short_conv)(const ShortConvArgs&, const StepView&, const ThreadCtx&);
  void (*delta_rule)(const DeltaRuleArgs&, const StepView&, const ThreadCtx&);
  void (*gated_norm)(const GatedNormArgs&, const ThreadCtx&);
  void (*delta_layer)(const DeltaLayerArgs&, const StepView&, const ThreadCtx&);
  void (*layer_norm)(const LayerNormArgs&, const ThreadCtx&);
  void (*activate)(const ActivateArgs&, const ThreadCtx&);
  void (*sequence_attention)(const SequenceAttentionArgs&, const StepView&, const ThreadCtx&);
  void (*residual_mix)(const ResidualMixArgs&, const ThreadCtx&);
  void (*ssd)(const SsdArgs&, const StepView&, const ThreadCtx&);
  void (*gate_norm)(const GateNormArgs&, const ThreadCtx&);
  void (*block_conv)(const BlockConvArgs&, const StepView&, const ThreadCtx&);
  void (*scale)(const ScaleArgs&, const ThreadCtx&);
  // y[i] = rows[i, :k] . x for n rows, one behind the other.
  void (*row_products)(const float* rows, int64_t n, int64_t k, const float* x, float* y);
  // The sum of e^(x[i] - largest), n numbers up to `largest`.
  float (*exp_sum)(const float* x, int64_t n, float largest);
};

// The tables that this build holds and this processor can run, weakest first. Never empty. Thread-safe.
int32_t n_kernel_levels();
const KernelTable* kernel_level(int32_t i);

// Bytes of one QuantRows row of k columns (a multiple of 64).
int64_t quant_row_bytes(int64_t k);

// Bytes that pack_matrix writes for W [n, k]; 0 when the format cannot hold k columns.
int64_t packed_bytes(Format format, int64_t n, int64_t k);

// Repacks file rows [n, row_bytes] (GGUF block layout; rows taken in the order of row_order if not null) to tiles at out (64-byte
// aligned). expand_to_f32: dequantise every format to F32 tiles instead. Rows tile_begin*16 .. tile_end*16 only, so threads can share a
// matrix. Returns whether all scales, and all elements of a float format, are numbers: neither NaN nor infinite.
bool pack_matrix(Format format, bool expand_to_f32, const uint8_t* rows, int64_t row_bytes, const int32_t* row_order, int64_t n, int64_t k,
                 uint8_t* out, int64_t tile_begin, int64_t tile_end);

// Bytes of one head's run of 16 tokens (see KvLayer).
int64_t kv_run_bytes(KvType type, int32_t head_dim);
int64_t latent_run_bytes(KvType type, int32_t width);

// Scratch that attention wants: of each thread, and once for the team, for at most max_tokens rows and max_len positions.
int64_t attention_thread_bytes(int32_t n_heads, int32_t n_kv_heads, int32_t head_dim);
int64_t attention_shared_bytes(int32_t n_heads, int32_t head_dim, int64_t max_seqs, int64_t max_len, int32_t n_threads);
int64_t sequence_attention_thread_bytes(int32_t head_dim, int64_t max_tokens);
int64_t linear_thread_bytes(int64_t max_k, int64_t max_m);

// Rows that experts takes at once of a step of max_m, so that its scratch stays small; and that scratch, once for the team.
int64_t experts_rows_at_once(int64_t max_m, int32_t top_k, int64_t k, int64_t f, int64_t width);
int64_t experts_shared_bytes(int64_t rows_at_once, int32_t n_experts, int32_t top_k, int64_t k, int64_t f, int64_t width,
                             int32_t n_threads);

} // namespace tiercel
