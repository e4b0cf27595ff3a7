// Programs, the page pool's memory, and the step runner.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <tuple>

#include "bind.hpp"
#include "recording.hpp"
#include "tiercel/step_runner.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace tiercel {
namespace {

using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Words = nb::ndarray<const uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Bools = nb::ndarray<const bool, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Drafts = std::tuple<Ints, Ints, Ints>; // see StepRequest: draft_from, n_drafts, draft_tokens
using Saves = std::pair<Ints, Ints>;         // see StepRequest: save_to, save_at
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using FloatRows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Stores = std::vector<std::shared_ptr<PackedStore>>; // one an expert
// Of a delta layer: x, channels, width, w, bias, has_silu; gate, beta, heads, lower_bound, a_log, dt_bias, eps; z, is_gate_per_head, w,
// eps, is_sigmoid.
using ConvPart = std::tuple<Buffer, int64_t, int64_t, Floats, std::optional<Floats>, bool>;
using RulePart = std::tuple<Buffer, Buffer, std::tuple<int64_t, int64_t, int64_t, int64_t>, float, Floats, Floats, float>;
using NormPart = std::tuple<Buffer, bool, std::optional<Floats>, float, bool>;

std::span<const int32_t> span_of(const Ints& a) { return {a.data(), a.size()}; }
std::vector<float> copy_of(const std::optional<Floats>& a) {
  return a ? std::vector<float>(a->data(), a->data() + a->size()) : std::vector<float>{};
}
void check_head_weights(const Floats& w, int64_t n_heads, int64_t k, int64_t n) {
  if (static_cast<int64_t>(w.size()) != n_heads * k * ((n + 15) / 16 * 16))
    throw nb::value_error("per-head weights: needs [heads, k, n to a multiple of 16]");
}

const KernelTable* level_named(const std::string& name) {
  for (int32_t i = 0; i < n_kernel_levels(); ++i)
    if (name == kernel_level(i)->level) return kernel_level(i);
  throw nb::value_error(("level: got '" + name + "'; this processor and build have no such level; see kernel_levels()").c_str());
}

// The page pool's memory and layout.
struct KvMemory {
  explicit KvMemory(KvPool layout) : region(layout.page_stride_bytes * layout.n_pages), pool(std::move(layout)) {}
  Region region;
  KvPool pool;
};

std::shared_ptr<KvMemory> make_kv(int32_t n_pages, int32_t page_tokens, const std::string& type,
                                  const std::vector<std::pair<int32_t, int32_t>>& layers, const std::vector<int32_t>& latent_layers) {
  for (const auto& [n_kv_heads, head_dim] : layers)
    if (n_kv_heads < 1 || head_dim < 8 || head_dim % 8 != 0) throw nb::value_error("make_kv: head_dim needs to be a multiple of 8");
  KvPool pool;
  pool.n_pages = n_pages;
  pool.page_tokens = page_tokens;
  pool.type = kv_type_named(type);
  for (int32_t i : latent_layers) {
    if (i < 0 || static_cast<size_t>(i) >= layers.size() || layers[static_cast<size_t>(i)].first != 1)
      throw nb::value_error("make_kv: a latent layer needs to be one of the layers, of one head");
    if (pool.type == KvType::I8) throw nb::value_error("make_kv: latent rows are kept as float16 or float32");
  }
  for (size_t i = 0; i < layers.size(); ++i) {
    const auto& [n_kv_heads, head_dim] = layers[i];
    const bool is_latent = std::find(latent_layers.begin(), latent_layers.end(), static_cast<int32_t>(i)) != latent_layers.end();
    const int64_t head = page_tokens / 16 * (is_latent ? latent_run_bytes(pool.type, head_dim) : kv_run_bytes(pool.type, head_dim));
    pool.layer_offset.push_back(pool.page_stride_bytes);
    pool.head_stride_bytes.push_back(head);
    pool.page_stride_bytes += head * n_kv_heads;
  }
  return std::make_shared<KvMemory>(std::move(pool));
}

template <class T>
nb::ndarray<nb::numpy, T> owned(std::vector<T>&& data, std::initializer_list<size_t> shape) {
  auto* heap = new std::vector<T>(std::move(data));
  nb::capsule owner(heap, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::ndarray<nb::numpy, T>(heap->data(), shape, owner);
}

// The same as a memoryview, for what every step returns: numpy need not be there to read it.
template <class T>
nb::ndarray<nb::memview, T> viewed(std::vector<T>&& data, std::initializer_list<size_t> shape) {
  auto* heap = new std::vector<T>(std::move(data));
  nb::capsule owner(heap, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::ndarray<nb::memview, T>(heap->data(), shape, owner);
}
template <class T>
nb::ndarray<nb::memview, T> viewed(std::vector<T>&& data) {
  const size_t n = data.size();
  return viewed(std::move(data), {n});
}

struct BoundRunner {
  std::shared_ptr<KvMemory> kv;
  std::vector<std::shared_ptr<PackedStore>> weights;
  std::unique_ptr<StepRunner> runner; // last: destroyed first, while what it reads is alive
  const pid_t process_id = getpid();

  BoundRunner(std::shared_ptr<KvMemory> pages, std::vector<std::shared_ptr<PackedStore>> packed, std::unique_ptr<StepRunner> steps)
      : kv(std::move(pages)), weights(std::move(packed)), runner(std::move(steps)) {}
  ~BoundRunner() { close(); }
  BoundRunner(const BoundRunner&) = delete;
  BoundRunner& operator=(const BoundRunner&) = delete;

  // Frees everything. In a forked process the runner is left alone: its threads are not there to be joined.
  void close() {
    if (getpid() != process_id) static_cast<void>(runner.release());
    runner.reset();
    weights.clear();
    kv.reset();
  }
  StepRunner& live() {
    if (!runner) throw nb::value_error("StepRunner: it is closed");
    return *runner;
  }
  int32_t check_slot(int64_t slot) {
    if (slot < 0 || slot >= live().limits().n_slots) throw nb::value_error("slot: out of range");
    return static_cast<int32_t>(slot);
  }
  int32_t check_snapshot(int64_t snapshot) {
    if (snapshot < 0 || snapshot >= live().limits().n_snapshots) throw nb::value_error("snapshot: out of range");
    return static_cast<int32_t>(snapshot);
  }
};

nb::tuple outcome_tuple(StepOutcome&& o, int64_t width) {
  const size_t n = o.row_token.size(), n_top = static_cast<size_t>(std::max(o.n_top, 0));
  const bool has_logprobs = o.n_top >= 0;
  nb::object logprob = nb::none(), rank = nb::none(), ids = nb::none(), tops = nb::none();
  if (has_logprobs) {
    logprob = nb::cast(owned(std::move(o.row_logprob), {n}));
    rank = nb::cast(owned(std::move(o.row_rank), {n}));
    ids = nb::cast(owned(std::move(o.top_ids), {n, n_top}));
    tops = nb::cast(owned(std::move(o.top_logprobs), {n, n_top}));
  }
  nb::object rows = nb::none();
  if (width > 0) rows = nb::cast(owned(std::move(o.rows), {n, static_cast<size_t>(width)}));
  nb::object drafted = nb::none();
  if (!o.seq_drafted.empty()) drafted = nb::cast(viewed(std::move(o.seq_drafted)));
  nb::object drafts = nb::none(), confidence = nb::none();
  if (o.n_draft > 0) {
    const auto n_draft = static_cast<size_t>(o.n_draft), n_seqs = o.seq_drafts.size() / n_draft;
    drafts = nb::cast(viewed(std::move(o.seq_drafts), {n_seqs, n_draft}));
    confidence = nb::cast(viewed(std::move(o.seq_confidence), {n_seqs, n_draft}));
  }
  return nb::make_tuple(o.step_id, viewed(std::move(o.row_seq)), viewed(std::move(o.row_pos)), viewed(std::move(o.row_token)), logprob,
                        rank, ids, tops, o.compute_ns, rows, drafted, drafts, confidence, o.draft_ns);
}

Unary unary_named(const std::string& name) {
  constexpr std::pair<const char*, Unary> known[] = {
      {"gelu", Unary::Gelu}, {"gelu_tanh", Unary::GeluTanh}, {"relu", Unary::Relu}, {"silu", Unary::Silu}, {"tanh", Unary::Tanh}};
  for (const auto& [text, act] : known)
    if (name == text) return act;
  throw nb::value_error(("activate: got '" + name + "'; gelu, gelu_tanh, relu, silu or tanh is needed").c_str());
}

void bind_recording(nb::module_& m) {
  nb::class_<Recording>(m, "Program", "A program under construction; buffers are (offset, stride) in bytes of one arena.")
      .def(
          "__init__",
          [](Recording* self, const std::string& level, int32_t n_threads) {
            if (n_threads < 1) throw nb::value_error("n_threads: needs 1 or more");
            new (self) Recording{std::make_unique<Program>(level_named(level), n_threads), {}};
          },
          "level"_a, "n_threads"_a)
      .def(
          "rope_table",
          [](Recording& r, const Floats& inv_freq, float magnitude, Buffer out) {
            r.add(false, op::RopeTable{{inv_freq.data(), inv_freq.data() + inv_freq.size()}, magnitude, place_of(out)});
          },
          "inv_freq"_a, "magnitude"_a, "out"_a)
      .def(
          "embed",
          [](Recording& r, const std::shared_ptr<PackedStore>& w, float scale, Buffer y, bool skips_first,
             const std::optional<Floats>& masked) {
            if (masked && static_cast<int64_t>(masked->size()) != w->view().k)
              throw nb::value_error("embed: masked needs one number a column");
            r.add(false, op::Embed{r.keep(w), scale, place_of(y), skips_first, copy_of(masked)});
          },
          "w"_a, "scale"_a, "y"_a, "skips_first"_a = false, "masked"_a.none() = nb::none())
      .def(
          "norm",
          [](Recording& r, bool logits_rows, Buffer x, int64_t width, const Floats& w, float eps, std::optional<Buffer> residual, Buffer y,
             bool quantized) {
            r.add(logits_rows,
                  op::Norm{place_of(x), width, {w.data(), w.data() + w.size()}, eps, place_of(residual), place_of(y), quantized});
          },
          "logits_rows"_a, "x"_a, "width"_a, "w"_a, "eps"_a, "residual"_a.none(), "y"_a, "quantized"_a)
      .def(
          "quantize",
          [](Recording& r, bool logits_rows, Buffer x, int64_t width, Buffer y) {
            r.add(logits_rows, op::Quantize{place_of(x), width, place_of(y)});
          },
          "logits_rows"_a, "x"_a, "width"_a, "y"_a)
      .def(
          "linear",
          [](Recording& r, bool logits_rows, Buffer x, bool quantized, int64_t k,
             const std::vector<std::tuple<std::shared_ptr<PackedStore>, std::optional<Floats>, int64_t>>& parts, Buffer y,
             std::optional<Buffer> residual) {
            op::Linear o{place_of(x), quantized, k, {}, {}, {}, place_of(y), place_of(residual)};
            for (const auto& [w, bias, col] : parts) {
              if (w->view().k != k) throw nb::value_error("linear: a part's input width differs from the op's");
              o.weights.push_back(r.keep(w));
              o.biases.push_back(copy_of(bias));
              o.parts.push_back({nullptr, nullptr, col});
            }
            r.add(logits_rows, std::move(o));
          },
          "logits_rows"_a, "x"_a, "quantized"_a, "k"_a, "parts"_a, "y"_a, "residual"_a.none())
      .def(
          "rope_kv",
          [](Recording& r, Buffer qkv, int32_t n_heads, int32_t n_kv_heads, int32_t head_dim, const std::optional<Floats>& q_norm,
             const std::optional<Floats>& k_norm, float eps, std::optional<Buffer> cos_sin, int32_t d2, int32_t layer) {
            r.add(false, op::RopeKv{place_of(qkv), n_heads, n_kv_heads, head_dim, copy_of(q_norm), copy_of(k_norm), eps, place_of(cos_sin),
                                    d2, layer});
          },
          "qkv"_a, "n_heads"_a, "n_kv_heads"_a, "head_dim"_a, "q_norm"_a.none(), "k_norm"_a.none(), "eps"_a, "cos_sin"_a.none(), "d2"_a,
          "layer"_a)
      .def(
          "attention",
          [](Recording& r, bool logits_rows, Buffer q, Buffer y, int32_t n_heads, int32_t n_kv_heads, int32_t head_dim, float scale,
             int32_t window, float softcap, int32_t layer, const std::optional<Floats>& sinks, int32_t latent_values, bool sees_block) {
            if (sinks && sinks->size() != static_cast<size_t>(n_heads)) throw nb::value_error("attention: needs a sink for each head");
            r.add(logits_rows, op::Attention{place_of(q), place_of(y), n_heads, n_kv_heads, head_dim, scale, window, softcap, layer,
                                             copy_of(sinks), latent_values, sees_block});
          },
          "logits_rows"_a, "q"_a, "y"_a, "n_heads"_a, "n_kv_heads"_a, "head_dim"_a, "scale"_a, "window"_a, "softcap"_a, "layer"_a,
          "sinks"_a.none() = nb::none(), "latent_values"_a = 0, "sees_block"_a = false)
      .def(
          "latent_kv",
          [](Recording& r, Buffer latents, int32_t rank, int32_t rope, const Floats& norm, float eps, std::optional<Buffer> cos_sin,
             bool interleaved, int32_t layer) {
            if (norm.size() != static_cast<size_t>(rank)) throw nb::value_error("latent_kv: the norm is not as wide as the rank");
            r.add(false, op::LatentKv{place_of(latents), rank, rope, copy_of(norm), eps, place_of(cos_sin), interleaved, layer});
          },
          "latents"_a, "rank"_a, "rope"_a, "norm"_a, "eps"_a, "cos_sin"_a.none(), "interleaved"_a, "layer"_a)
      .def(
          "latent_query",
          [](Recording& r, bool logits_rows, Buffer q, const Floats& w, int32_t n_heads, int32_t k, int32_t rank, int32_t rope,
             std::optional<Buffer> cos_sin, bool interleaved, Buffer y) {
            check_head_weights(w, n_heads, k, rank);
            r.add(logits_rows,
                  op::LatentQuery{place_of(q), copy_of(w), n_heads, k, rank, rope, place_of(cos_sin), interleaved, place_of(y)});
          },
          "logits_rows"_a, "q"_a, "w"_a, "n_heads"_a, "k"_a, "rank"_a, "rope"_a, "cos_sin"_a.none(), "interleaved"_a, "y"_a)
      .def(
          "head_linear",
          [](Recording& r, bool logits_rows, Buffer x, const Floats& w, int32_t n_heads, int32_t k, int32_t n, Buffer y) {
            check_head_weights(w, n_heads, k, n);
            r.add(logits_rows, op::HeadLinear{place_of(x), copy_of(w), n_heads, k, n, place_of(y)});
          },
          "logits_rows"_a, "x"_a, "w"_a, "n_heads"_a, "k"_a, "n"_a, "y"_a)
      .def(
          "sigmoid_gate",
          [](Recording& r, bool logits_rows, Buffer x, Buffer gate, int64_t width, int64_t gate_width, Buffer y) {
            if (gate_width < 1 || width % gate_width != 0) throw nb::value_error("sigmoid_gate: the gate's width must divide x's");
            r.add(logits_rows, op::SigmoidGate{place_of(x), place_of(gate), width, gate_width, place_of(y)});
          },
          "logits_rows"_a, "x"_a, "gate"_a, "width"_a, "gate_width"_a, "y"_a)
      .def(
          "gated",
          [](Recording& r, bool logits_rows, Buffer x, int64_t f, const std::string& act, Buffer y, bool quantized, float p0, float p1) {
            r.add(logits_rows, op::Gated{place_of(x), f, activation_named(act), place_of(y), quantized, p0, p1});
          },
          "logits_rows"_a, "x"_a, "f"_a, "act"_a, "y"_a, "quantized"_a, "p0"_a = 0.0f, "p1"_a = 0.0f)
      .def(
          "select_rows",
          [](Recording& r, Buffer x, int64_t width, Buffer y) { r.add(true, op::SelectRows{place_of(x), width, place_of(y)}); }, "x"_a,
          "width"_a, "y"_a)
      .def(
          "softcap",
          [](Recording& r, bool logits_rows, Buffer x, int64_t width, float cap) {
            r.add(logits_rows, op::Softcap{place_of(x), width, cap});
          },
          "logits_rows"_a, "x"_a, "width"_a, "cap"_a)
      .def(
          "add",
          [](Recording& r, bool logits_rows, Buffer x, Buffer y, int64_t width) {
            r.add(logits_rows, op::Add{place_of(x), place_of(y), width});
          },
          "logits_rows"_a, "x"_a, "y"_a, "width"_a)
      .def(
          "router",
          [](Recording& r, bool logits_rows, Buffer x, Buffer y, int32_t n_experts, int32_t top_k, const std::string& scores,
             const std::optional<Floats>& bias, int32_t n_groups, int32_t n_groups_kept, int32_t group_top, bool renormalises,
             float scale) {
            r.add(logits_rows, op::Router{place_of(x), place_of(y), n_experts, top_k, scores_named(scores), copy_of(bias), n_groups,
                                          n_groups_kept, group_top, renormalises, scale});
          },
          "logits_rows"_a, "x"_a, "y"_a, "n_experts"_a, "top_k"_a, "scores"_a, "bias"_a.none(), "n_groups"_a, "n_groups_kept"_a,
          "group_top"_a, "renormalises"_a, "scale"_a)
      .def(
          "experts",
          [](Recording& r, bool logits_rows, Buffer x, bool quantized, Buffer route, int32_t top_k, const Stores& gate, const Stores& up,
             const Stores& down, const std::vector<std::optional<Floats>>& biases, bool hidden_quantized, const std::string& act, float p0,
             float p1, Buffer y) {
            if (gate.empty() || gate.size() != up.size() || gate.size() != down.size() || biases.size() != 3)
              throw nb::value_error("experts: needs as many of gate, up and down, and three biases or None");
            op::Experts o{place_of(x),
                          quantized,
                          place_of(route),
                          top_k,
                          {},
                          {},
                          {},
                          copy_of(biases[0]),
                          copy_of(biases[1]),
                          copy_of(biases[2]),
                          hidden_quantized,
                          activation_named(act),
                          p0,
                          p1,
                          place_of(y),
                          0};
            for (size_t e = 0; e < gate.size(); ++e) {
              o.gate.push_back(r.keep(gate[e]));
              o.up.push_back(r.keep(up[e]));
              o.down.push_back(r.keep(down[e]));
            }
            r.add(logits_rows, std::move(o));
          },
          "logits_rows"_a, "x"_a, "quantized"_a, "route"_a, "top_k"_a, "gate"_a, "up"_a, "down"_a, "biases"_a, "hidden_quantized"_a,
          "act"_a, "p0"_a, "p1"_a, "y"_a)
      .def(
          "short_conv",
          [](Recording& r, Buffer x, int64_t channels, int64_t width, const Floats& w, const std::optional<Floats>& bias, bool has_silu,
             Buffer y, int64_t state_offset) {
            if (width < 1 || static_cast<int64_t>(w.size()) != channels * width)
              throw nb::value_error("short_conv: w needs channels * width numbers");
            if (bias && static_cast<int64_t>(bias->size()) != channels)
              throw nb::value_error("short_conv: bias needs one number a channel");
            r.add(false, op::ShortConv{place_of(x), channels, width, copy_of(w), copy_of(bias), has_silu, place_of(y), state_offset});
          },
          "x"_a, "channels"_a, "width"_a, "w"_a, "bias"_a.none(), "has_silu"_a, "y"_a, "state_offset"_a)
      .def(
          "delta_rule",
          [](Recording& r, Buffer qkv, Buffer gate, Buffer beta, std::tuple<int64_t, int64_t, int64_t, int64_t> heads, float lower_bound,
             const Floats& a_log, const Floats& dt_bias, float eps, Buffer y, int64_t state_offset) {
            const auto [n_key, n_value, key_dim, value_dim] = heads;
            const auto n_bias = static_cast<int64_t>(dt_bias.size());
            if (n_key < 1 || n_value < 1 || n_value % n_key != 0 || key_dim < 1 || value_dim < 1)
              throw nb::value_error("delta_rule: value heads need to be a multiple of the key heads, and all sizes 1 or more");
            if (static_cast<int64_t>(a_log.size()) != n_value || (n_bias != n_value && n_bias != n_value * key_dim))
              throw nb::value_error("delta_rule: a_log needs one number a head, dt_bias one a head or a key channel");
            r.add(false, op::DeltaRule{place_of(qkv), place_of(gate), place_of(beta), n_key, n_value, key_dim, value_dim, lower_bound,
                                       copy_of(a_log), copy_of(dt_bias), eps, place_of(y), state_offset});
          },
          "qkv"_a, "gate"_a, "beta"_a, "heads"_a, "lower_bound"_a, "a_log"_a, "dt_bias"_a, "eps"_a, "y"_a, "state_offset"_a)
      .def(
          "gated_norm",
          [](Recording& r, bool logits_rows, Buffer x, Buffer z, bool is_gate_per_head, int64_t heads, int64_t head_dim,
             const std::optional<Floats>& w, float eps, bool is_sigmoid, Buffer y, bool is_plain) {
            if (w && static_cast<int64_t>(w->size()) != head_dim)
              throw nb::value_error("gated_norm: w needs one number a column of a head");
            r.add(logits_rows, op::GatedNorm{place_of(x), place_of(z), is_gate_per_head, heads, head_dim, copy_of(w), eps, is_sigmoid,
                                             place_of(y), is_plain});
          },
          "logits_rows"_a, "x"_a, "z"_a, "is_gate_per_head"_a, "heads"_a, "head_dim"_a, "w"_a.none(), "eps"_a, "is_sigmoid"_a, "y"_a,
          "is_plain"_a = false)
      .def(
          "ssd",
          [](Recording& r, Buffer xbc, Buffer dt, std::tuple<int64_t, int64_t, int64_t, int64_t> sizes, std::pair<float, float> limits,
             const Floats& a_log, const Floats& dt_bias, const Floats& d, Buffer y, int64_t state_offset) {
            const auto [heads, head_dim, groups, state_dim] = sizes;
            if (heads < 1 || head_dim < 1 || groups < 1 || heads % groups != 0 || state_dim < 1)
              throw nb::value_error("ssd: heads need to be a multiple of the groups, and all sizes 1 or more");
            for (const Floats* v : {&a_log, &dt_bias, &d})
              if (static_cast<int64_t>(v->size()) != heads) throw nb::value_error("ssd: a_log, dt_bias and d need one number a head");
            r.add(false, op::Ssd{place_of(xbc), place_of(dt), heads, head_dim, groups, state_dim, limits.first, limits.second,
                                 copy_of(a_log), copy_of(dt_bias), copy_of(d), place_of(y), state_offset});
          },
          "xbc"_a, "dt"_a, "sizes"_a, "limits"_a, "a_log"_a, "dt_bias"_a, "d"_a, "y"_a, "state_offset"_a)
      .def(
          "gate_norm",
          [](Recording& r, bool logits_rows, Buffer x, Buffer z, int64_t groups, int64_t group_dim, const Floats& w, float eps, Buffer y) {
            if (groups < 1 || group_dim < 1 || static_cast<int64_t>(w.size()) != groups * group_dim)
              throw nb::value_error("gate_norm: w needs one number a column");
            r.add(logits_rows, op::GateNorm{place_of(x), place_of(z), groups, group_dim, copy_of(w), eps, place_of(y)});
          },
          "logits_rows"_a, "x"_a, "z"_a, "groups"_a, "group_dim"_a, "w"_a, "eps"_a, "y"_a)
      .def(
          "delta_layer",
          [](Recording& r, const ConvPart& conv, const RulePart& rule, const NormPart& norm, Buffer y, std::pair<int64_t, int64_t> at) {
            const auto& [x, channels, width, w, conv_bias, has_silu] = conv;
            const auto& [gate, beta, heads, lower_bound, a_log, dt_bias, eps] = rule;
            const auto& [z, is_gate_per_head, norm_w, norm_eps, is_sigmoid] = norm;
            const auto [n_key, n_value, key_dim, value_dim] = heads;
            const auto n_bias = static_cast<int64_t>(dt_bias.size());
            if (n_key < 1 || n_value < 1 || n_value % n_key != 0 || key_dim < 1 || value_dim < 1)
              throw nb::value_error("delta_layer: value heads need to be a multiple of the key heads, and all sizes 1 or more");
            if (channels != 2 * n_key * key_dim + n_value * value_dim || width < 1 || static_cast<int64_t>(w.size()) != channels * width)
              throw nb::value_error("delta_layer: w needs channels * width numbers, channels those of all queries, keys and values");
            if (conv_bias && static_cast<int64_t>(conv_bias->size()) != channels)
              throw nb::value_error("delta_layer: the convolution's bias needs one number a channel");
            if (static_cast<int64_t>(a_log.size()) != n_value || (n_bias != n_value && n_bias != n_value * key_dim))
              throw nb::value_error("delta_layer: a_log needs one number a head, dt_bias one a head or a key channel");
            if (norm_w && static_cast<int64_t>(norm_w->size()) != value_dim)
              throw nb::value_error("delta_layer: the norm's w needs one number a column of a head");
            const BufferRef none{0, 0};
            r.add(false, op::DeltaLayer{{place_of(x), channels, width, copy_of(w), copy_of(conv_bias), has_silu, none, at.first},
                                        {none, place_of(gate), place_of(beta), n_key, n_value, key_dim, value_dim, lower_bound,
                                         copy_of(a_log), copy_of(dt_bias), eps, none, at.second},
                                        {none, place_of(z), is_gate_per_head, n_value, value_dim, copy_of(norm_w), norm_eps, is_sigmoid,
                                         place_of(y)}});
          },
          "conv"_a, "rule"_a, "norm"_a, "y"_a, "state_offsets"_a)
      .def(
          "embed_rows",
          [](Recording& r, const std::shared_ptr<PackedStore>& w, bool is_position, int32_t first, Buffer y) {
            r.add(false, op::EmbedRows{r.keep(w), is_position, first, place_of(y)});
          },
          "w"_a, "is_position"_a, "first"_a, "y"_a)
      .def(
          "layer_norm",
          [](Recording& r, bool logits_rows, Buffer x, int64_t width, const Floats& w, const Floats& bias, float eps, Buffer y) {
            r.add(logits_rows, op::LayerNorm{place_of(x), width, copy_of(w), copy_of(bias), eps, place_of(y)});
          },
          "logits_rows"_a, "x"_a, "width"_a, "w"_a, "bias"_a, "eps"_a, "y"_a)
      .def(
          "activate",
          [](Recording& r, bool logits_rows, Buffer x, int64_t width, const std::string& act) {
            r.add(logits_rows, op::Activate{place_of(x), width, unary_named(act)});
          },
          "logits_rows"_a, "x"_a, "width"_a, "act"_a)
      .def(
          "sequence_attention",
          [](Recording& r, Buffer qkv, Buffer y, int32_t n_heads, int32_t n_kv_heads, int32_t head_dim, float scale) {
            r.add(false, op::SequenceAttention{place_of(qkv), place_of(y), n_heads, n_kv_heads, head_dim, scale});
          },
          "qkv"_a, "y"_a, "n_heads"_a, "n_kv_heads"_a, "head_dim"_a, "scale"_a)
      .def(
          "residual_mix",
          [](Recording& r, bool logits_rows, const std::vector<Buffer>& sources, int64_t width, const Floats& w, float eps, Buffer y) {
            if (sources.empty() || sources.size() > static_cast<size_t>(kMaxResiduals) || w.size() != static_cast<size_t>(width))
              throw nb::value_error("residual_mix: needs one source at least, not too many, and a number of w for each column");
            op::ResidualMix o{{}, width, copy_of(w), eps, place_of(y)};
            for (const Buffer& source : sources) o.sources.push_back(place_of(source));
            r.add(logits_rows, std::move(o));
          },
          "logits_rows"_a, "sources"_a, "width"_a, "w"_a, "eps"_a, "y"_a)
      .def(
          "given", [](Recording& r, int64_t width, Buffer y) { r.add(false, op::Given{width, place_of(y)}); }, "width"_a, "y"_a)
      .def(
          "join",
          [](Recording& r, bool logits_rows, Buffer x, int64_t x_width, Buffer z, int64_t z_width, Buffer y) {
            r.add(logits_rows, op::Join{place_of(x), x_width, place_of(z), z_width, place_of(y)});
          },
          "logits_rows"_a, "x"_a, "x_width"_a, "z"_a, "z_width"_a, "y"_a)
      .def(
          "block_conv",
          [](Recording& r, Buffer x, int64_t width, Buffer delta, int32_t taps, int32_t group, const Floats& base, Buffer y) {
            if (taps < 1 || group < 1 || width % group != 0 || static_cast<int64_t>(base.size()) != taps * width)
              throw nb::value_error("block_conv: base needs taps * width numbers, width a multiple of group");
            r.add(false, op::BlockConv{place_of(x), width, place_of(delta), taps, group, copy_of(base), place_of(y)});
          },
          "x"_a, "width"_a, "delta"_a, "taps"_a, "group"_a, "base"_a, "y"_a)
      .def(
          "scale",
          [](Recording& r, bool logits_rows, Buffer x, int64_t width, float factor) {
            r.add(logits_rows, op::Scale{place_of(x), width, factor});
          },
          "logits_rows"_a, "x"_a, "width"_a, "factor"_a);
}

void bind_runner(nb::module_& m) {
  nb::class_<KvMemory>(m, "KvMemory", "The page pool's memory; layers are (n_kv_heads, head_dim).")
      .def_prop_ro("page_bytes", [](const KvMemory& k) { return k.pool.page_stride_bytes; })
      .def_prop_ro("n_pages", [](const KvMemory& k) { return k.pool.n_pages; })
      .def(
          "page",
          [](const std::shared_ptr<KvMemory>& k, int64_t page) {
            if (page < 0 || page >= k->pool.n_pages) throw nb::value_error("page: out of range");
            auto* keep = new std::shared_ptr<KvMemory>(k);
            nb::capsule owner(keep, [](void* p) noexcept { delete static_cast<std::shared_ptr<KvMemory>*>(p); });
            return nb::ndarray<nb::numpy, uint8_t>(k->region.data() + page * k->pool.page_stride_bytes,
                                                   {static_cast<size_t>(k->pool.page_stride_bytes)}, owner);
          },
          "page"_a, "uint8 view of one page, all layers and heads.")
      // Without numpy, which takes a quarter of a second to import.
      .def(
          "read",
          [](const KvMemory& k, int64_t page, const nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& data) {
            if (page < 0 || page >= k.pool.n_pages) throw nb::value_error("page: out of range");
            if (static_cast<int64_t>(data.size()) != k.pool.page_stride_bytes) throw nb::value_error("data: not a page's bytes");
            std::memcpy(data.data(), k.region.data() + page * k.pool.page_stride_bytes, data.size());
          },
          "page"_a, "data"_a.noconvert(), "Copy one page into memory that is there.")
      .def(
          "write",
          [](const KvMemory& k, int64_t page, const nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& data) {
            if (page < 0 || page >= k.pool.n_pages) throw nb::value_error("page: out of range");
            if (static_cast<int64_t>(data.size()) != k.pool.page_stride_bytes) throw nb::value_error("data: not a page's bytes");
            std::memcpy(k.region.data() + page * k.pool.page_stride_bytes, data.data(), data.size());
          },
          "page"_a, "data"_a, "Fill one page.");
  m.def("quant_row_bytes", &quant_row_bytes, "k"_a, "Bytes of one row of k activations rounded to int8; 64-byte multiples.");
  m.def("make_kv", &make_kv, "n_pages"_a, "page_tokens"_a, "kv_dtype"_a, "layers"_a, "latent_layers"_a = std::vector<int32_t>{});

  nb::class_<BoundRunner>(m, "StepRunner", "Slots, and the thread that replays steps in order; see step_runner.hpp for the thread rule.")
      .def(
          "__init__",
          [](BoundRunner* self, Recording& recording, std::shared_ptr<KvMemory> kv, int64_t arena_bytes, Buffer logits, int64_t vocab,
             int64_t n_slots, int64_t max_len, int64_t max_tokens, int64_t max_rows, std::vector<int32_t> cpus, int64_t n_token_ids,
             bool is_pooling, int64_t state_slot_bytes, int64_t n_snapshots, int64_t max_trial_rows, DraftRecording* drafting,
             const std::string& verification) {
            if (!recording.program) throw nb::value_error("StepRunner: this program is already in use");
            if (!cpus.empty() && static_cast<int32_t>(cpus.size()) != recording.program->n_threads())
              throw nb::value_error("cpus: needs one processor for each thread, or none");
            if (n_slots < 1 || max_len < 1 || max_tokens < 1 || max_rows < 1 || state_slot_bytes < 0)
              throw nb::value_error("StepRunner: a limit is below 1");
            if (drafting && (is_pooling || (state_slot_bytes && max_trial_rows == 0)))
              throw nb::value_error("StepRunner: drafts for a model that takes none");
            if (n_snapshots < 0 || (n_snapshots > 0 && state_slot_bytes == 0)) throw nb::value_error("StepRunner: no state to keep");
            if (max_trial_rows < 0 || max_trial_rows > max_tokens) throw nb::value_error("max_trial_rows: more than a step has");
            KvPool pool = kv->pool;
            pool.base = kv->region.data();
            const int64_t pages_per_slot = (max_len + pool.page_tokens - 1) / pool.page_tokens;
            recording.program->seal(arena_bytes, pool, place_of(logits), vocab, max_tokens, max_rows, n_slots, max_len, state_slot_bytes,
                                    max_trial_rows);
            if (drafting && drafting->setup.kind == DraftKind::Chain &&
                drafting->max_tokens < max_tokens + n_slots * (static_cast<int64_t>(drafting->modules.size()) - 1))
              throw nb::value_error("StepRunner: the drafter takes fewer rows than a step has");
            auto runner =
                std::make_unique<StepRunner>(std::move(recording.program),
                                             StepLimits{n_slots, max_len, max_tokens, max_rows, pages_per_slot, n_token_ids, is_pooling,
                                                        n_snapshots, verification_named(verification)},
                                             std::move(cpus), drafting ? drafting->make(pool, n_slots, max_len, n_token_ids) : nullptr);
            if (drafting)
              for (const auto& m : drafting->modules)
                recording.weights.insert(recording.weights.end(), m.recording.weights.begin(), m.recording.weights.end());
            new (self) BoundRunner(std::move(kv), std::move(recording.weights), std::move(runner));
          },
          "program"_a, "kv"_a, "arena_bytes"_a, "logits"_a, "vocab"_a, "n_slots"_a, "max_len"_a, "max_tokens"_a, "max_rows"_a, "cpus"_a,
          "n_token_ids"_a, "is_pooling"_a = false, "state_slot_bytes"_a = 0, "n_snapshots"_a = 0, "max_trial_rows"_a = 0,
          "drafting"_a.none() = nb::none(), "verification"_a = "matching")
      .def(
          "admit",
          [](BoundRunner& b, int64_t slot, const Ints& tokens, int64_t n_prompt, const SamplerParams& params,
             std::optional<int64_t> n_first) {
            const int32_t s = b.check_slot(slot);
            if (static_cast<int64_t>(tokens.size()) > b.live().limits().max_len) throw nb::value_error("tokens: more than a slot holds");
            const int64_t vocab = b.live().limits().n_token_ids;
            for (size_t i = 0; i < tokens.size(); ++i)
              if (tokens.data()[i] < 0 || tokens.data()[i] >= vocab) throw nb::value_error("tokens: an id is outside the vocabulary");
            b.live().admit(s, span_of(tokens), n_prompt, params, n_first.value_or(INT64_MAX));
          },
          "slot"_a, "tokens"_a, "n_prompt"_a, "params"_a, "n_first"_a = nb::none())
      .def(
          "set_pages",
          [](BoundRunner& b, int64_t slot, int64_t first, const Ints& pages) {
            const int32_t s = b.check_slot(slot);
            if (first < 0 || first + static_cast<int64_t>(pages.size()) > b.live().limits().pages_per_slot)
              throw nb::value_error("pages: more than a slot's table holds");
            for (size_t i = 0; i < pages.size(); ++i)
              if (pages.data()[i] < 0 || pages.data()[i] >= b.kv->pool.n_pages) throw nb::value_error("pages: an id is out of range");
            b.live().set_pages(s, first, span_of(pages));
          },
          "slot"_a, "first"_a, "pages"_a)
      .def(
          "save_state",
          [](BoundRunner& b, int64_t slot, int64_t snapshot) { b.live().save_state(b.check_slot(slot), b.check_snapshot(snapshot)); },
          "slot"_a, "snapshot"_a, "Copies the slot's recurrent state, as the steps submitted so far leave it, to a place.")
      .def(
          "load_state",
          [](BoundRunner& b, int64_t slot, int64_t snapshot) { b.live().load_state(b.check_slot(slot), b.check_snapshot(snapshot)); },
          "slot"_a, "snapshot"_a, "Copies a place to the slot's recurrent state, after the steps submitted so far and before later ones.")
      .def(
          "read_snapshot",
          [](BoundRunner& b, int64_t snapshot) {
            const auto bytes = b.live().snapshot(b.check_snapshot(snapshot), false);
            return nb::bytes(bytes.data(), bytes.size());
          },
          "snapshot"_a, "A copy of a place's bytes, once what was saved there so far is there.")
      .def(
          "write_snapshot",
          [](BoundRunner& b, int64_t snapshot, const nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& data) {
            const auto bytes = b.live().snapshot(b.check_snapshot(snapshot), true);
            if (data.size() != bytes.size()) throw nb::value_error("write_snapshot: needs the bytes of one state");
            std::memcpy(bytes.data(), data.data(), bytes.size());
          },
          "snapshot"_a, "data"_a, "Fills a place, once all copies that name it are made.")
      .def(
          "submit",
          [](BoundRunner& b, int64_t step_id, const Ints& slot, const Ints& start, const Ints& tokens, const Bools& samples,
             const Bools& scores, int32_t n_top, const std::optional<Bools>& masked, const std::optional<FloatRows>& given,
             const std::optional<Drafts>& drafts, const std::optional<Saves>& saves, int32_t n_draft) {
            const size_t n = slot.size();
            if (start.size() != n || tokens.size() != n || samples.size() != n || scores.size() != n || (masked && masked->size() != n))
              throw nb::value_error("submit: the sequences' arrays differ in length");
            const auto bytes = [n](const Bools& a) { return std::span(reinterpret_cast<const uint8_t*>(a.data()), n); };
            StepRequest request{step_id, span_of(slot), span_of(start), span_of(tokens), bytes(samples), bytes(scores), n_top};
            if (masked) request.seq_masked = bytes(*masked);
            if (given) request.given = std::span(given->data(), given->size());
            if (drafts) {
              const auto& [from, counts, ids] = *drafts;
              if (from.size() != n || counts.size() != n) throw nb::value_error("submit: the sequences' arrays differ in length");
              for (const int32_t id : span_of(ids))
                if (id < 0 || id >= b.live().limits().n_token_ids) throw nb::value_error("drafts: an id is outside the vocabulary");
              request.draft_from = span_of(from), request.n_drafts = span_of(counts), request.draft_tokens = span_of(ids);
            }
            if (saves) {
              const auto& [to, at] = *saves;
              if (to.size() != n || at.size() != n || !drafts) throw nb::value_error("saves: one a sequence of a step with drafts");
              request.save_to = span_of(to), request.save_at = span_of(at);
            }
            request.n_draft = n_draft;
            if (const char* why = b.live().submit(request)) throw nb::value_error(why);
          },
          "step_id"_a, "slot"_a, "start"_a, "tokens"_a, "samples"_a, "scores"_a, "n_top"_a, "masked"_a = nb::none(), "given"_a = nb::none(),
          "drafts"_a = nb::none(), "saves"_a = nb::none(), "n_draft"_a = 0)
      .def(
          "set_draft_policy",
          [](BoundRunner& b, std::vector<double> step_seconds, std::vector<double> chances) {
            Drafting* drafting = b.live().drafting();
            if (!drafting) throw nb::value_error("set_draft_policy: nothing is drafted");
            drafting->set_policy({std::move(step_seconds), std::move(chances)});
          },
          "step_seconds"_a, "chances"_a, "What steps submitted from now on know of steps' times and of drafts' chances.")
      .def(
          "n_bad_drafts", [](BoundRunner& b) { return b.live().drafting() ? b.live().drafting()->n_bad() : 0; },
          "Sequences' drafts that ended early, as a token or a confidence was none.")
      .def(
          "set_masks",
          [](BoundRunner& b, int64_t step_id, const Words& masks) {
            if (const char* why = b.live().set_masks(step_id, {masks.data(), masks.size()})) throw nb::value_error(why);
          },
          "step_id"_a, "masks"_a, "uint32 [masked sequences, words]; a step with masked sequences samples only when it has them.")
      .def(
          "wait",
          [](BoundRunner& b, int64_t n) {
            StepRunner& runner = b.live();
            if (n < 1 || n > runner.n_submitted()) throw nb::value_error("wait: fewer steps are submitted");
            nb::gil_scoped_release release;
            return runner.wait(n);
          },
          "n"_a)
      .def("hurry", [](BoundRunner& b) { b.live().hurry(); })
      .def("collect",
           [](BoundRunner& b) {
             StepRunner& runner = b.live();
             if (runner.n_submitted() == 0) throw nb::value_error("collect: no step is submitted");
             if (!runner.has_ended(1)) { // else the lock is kept: who gives it up may wait long to get it back
               nb::gil_scoped_release release;
               runner.wait(1);
             }
             return outcome_tuple(runner.collect(), runner.limits().is_pooling ? runner.program().vocab() : 0);
           })
      .def(
          "tokens",
          [](BoundRunner& b, int64_t slot, int64_t n) {
            const auto row = b.live().tokens_of(b.check_slot(slot));
            if (n < 0 || n > static_cast<int64_t>(row.size())) throw nb::value_error("n: out of range");
            return owned(std::vector<int32_t>(row.begin(), row.begin() + n), {static_cast<size_t>(n)});
          },
          "slot"_a, "n"_a, "A copy of the slot's first n tokens. No step that names the slot may be running.")
      .def(
          "last_logits",
          [](BoundRunner& b, int64_t n_rows) {
            if (b.live().n_submitted() != 0) throw nb::value_error("last_logits: a step is still running");
            if (n_rows < 0 || n_rows > b.live().limits().max_rows) throw nb::value_error("n_rows: more than a step has");
            std::vector<float> all;
            for (int64_t r = 0; r < n_rows; ++r) {
              const auto row = b.live().last_logits(r);
              all.insert(all.end(), row.begin(), row.end());
            }
            const auto vocab = static_cast<size_t>(b.live().program().vocab());
            return owned(std::move(all), {static_cast<size_t>(n_rows), vocab});
          },
          "n_rows"_a, "Copies of the last step's logits rows, as the sampler left them.")
      .def(
          "last_rows",
          [](BoundRunner& b, Buffer at, int64_t width, int64_t n_rows) {
            Program& program = b.live().program();
            if (b.live().n_submitted() != 0) throw nb::value_error("last_rows: a step is still running");
            const auto [offset, stride] = at;
            const bool fits = offset >= 0 && n_rows >= 0 && width >= 1 && stride >= 4 * width;
            if (!fits || offset + stride * n_rows > program.arena_bytes()) throw nb::value_error("last_rows: outside the arena");
            std::vector<float> all(static_cast<size_t>(n_rows * width));
            for (int64_t r = 0; r < n_rows; ++r)
              std::memcpy(all.data() + r * width, program.arena() + offset + r * stride, static_cast<size_t>(width) * 4);
            return owned(std::move(all), {static_cast<size_t>(n_rows), static_cast<size_t>(width)});
          },
          "at"_a, "width"_a, "n_rows"_a, "Copies of a buffer's first rows, as the last step left them.")
      .def(
          "set_timing", [](BoundRunner& b, bool on) { b.live().program().set_timing(on); }, "on"_a)
      .def("take_op_ns", [](BoundRunner& b) { return b.live().program().take_op_ns(); })
      .def("close", [](BoundRunner& b) {
        nb::gil_scoped_release release;
        b.close();
      });
}

} // namespace

KvType kv_type_named(const std::string& name) {
  if (name == "float16") return KvType::F16;
  if (name == "float32") return KvType::F32;
  if (name == "int8") return KvType::I8;
  throw nb::value_error(("kv_dtype: got '" + name + "'; float16, float32 or int8 is needed").c_str());
}

void bind_program(nb::module_& m) {
#ifdef NDEBUG
  // A process that is forked, or killed inside a step, ends with objects held: a list of them tells a user nothing.
  nb::set_leak_warnings(false);
#endif
  bind_recording(m);
  bind_runner(m);
}

} // namespace tiercel
