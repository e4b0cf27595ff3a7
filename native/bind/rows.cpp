// Test doors: each row and attention kernel at a named level and number of threads, on numpy arrays.
//
// The engine never comes this way (it replays programs); these exist so that the Python definitions in
// `tiercel.ops.reference` can be held against every level. Arrays that are written to are last among the arrays and
// noconvert().
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bind.hpp"
#include "nanobind/stl/optional.h"
#include "nanobind/stl/pair.h"
#include "nanobind/stl/string.h"
#include "tiercel/kernels.hpp"
#include "tiercel/team.hpp"

namespace nb = nanobind;
using namespace nanobind::literals;

namespace tiercel {
namespace {

template <class T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Matrix = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using MatrixOut = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Pool = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void require(bool holds, const std::string& message) {
  if (!holds) throw nb::value_error(message.c_str());
}

template <class Array>
int64_t rows(const Array& a) {
  return static_cast<int64_t>(a.shape(0));
}
template <class Array>
int64_t columns(const Array& a) {
  return static_cast<int64_t>(a.shape(1));
}

template <class A, class B>
void require_same_shape(const char* where, const A& a, const B& b) {
  require(rows(a) == rows(b) && columns(a) == columns(b), std::string(where) + ": got arrays of " + std::to_string(rows(a)) + " x " +
                                                              std::to_string(columns(a)) + " and " + std::to_string(rows(b)) + " x " +
                                                              std::to_string(columns(b)) + "; equal shapes are needed");
}

const KernelTable& level_named(const std::string& name) {
  for (int32_t i = 0; i < n_kernel_levels(); ++i)
    if (name == kernel_level(i)->level) return *kernel_level(i);
  throw nb::value_error(("level: got '" + name + "'; this processor and build have no such level; see kernel_levels()").c_str());
}

// Runs kernel(ctx) on n_threads new threads.
template <class Kernel>
void run_on_team(int32_t n_threads, int64_t scratch_bytes, Kernel kernel) {
  require(n_threads >= 1 && n_threads <= 64, "n_threads: got " + std::to_string(n_threads) + "; 1 to 64 are needed");
  const int64_t stride = (scratch_bytes + 63) / 64 * 64;
  std::vector<uint8_t> scratch(static_cast<size_t>(stride * n_threads + 64));
  uint8_t* base = scratch.data() + (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64) % 64;
  Team team(n_threads, {});
  auto body = [&](int32_t thread) { kernel(ThreadCtx{thread, n_threads, team.barrier(), base + thread * stride, scratch_bytes}); };
  team.run([](void* arg, int32_t thread) { (*static_cast<decltype(body)*>(arg))(thread); }, &body);
}

// A step's rows, as the caller's arrays describe them, and what follows from those.
struct StepRows {
  StepView view = {};
  std::vector<int32_t> row_pos, row_seq;

  StepRows(const Vector<int32_t>& seq_start, const Vector<int32_t>& seq_rows, int64_t n_tokens) {
    const int64_t n_seqs = rows(seq_start);
    require(
        rows(seq_rows) == n_seqs + 1 && seq_rows.data()[0] == 0 && seq_rows.data()[n_seqs] == n_tokens,
        "step: seq_rows must hold the first row of each of the " + std::to_string(n_seqs) + " sequences, then " + std::to_string(n_tokens));
    for (int64_t s = 0; s < n_seqs; ++s) {
      require(seq_rows.data()[s] <= seq_rows.data()[s + 1] && seq_start.data()[s] >= 0,
              "step: seq_rows must ascend and seq_start be 0 or more");
      for (int32_t i = 0; i < seq_rows.data()[s + 1] - seq_rows.data()[s]; ++i) {
        row_pos.push_back(seq_start.data()[s] + i);
        row_seq.push_back(static_cast<int32_t>(s));
      }
    }
    view.n_tokens = static_cast<int32_t>(n_tokens);
    view.n_seqs = static_cast<int32_t>(n_seqs);
    view.seq_start = seq_start.data();
    view.seq_rows = seq_rows.data();
    view.row_pos = row_pos.data();
    view.row_seq = row_seq.data();
  }
};

// Where a step's keys and values live: pages in a pool, as [page, kv head, run, K^T then V].
struct Pages {
  KvLayer layer;

  Pages(const Pool& pool, const Matrix<int32_t>& page_table, const Vector<int32_t>& seq_slot, StepRows& step, int64_t n_kv_heads,
        int64_t head_dim, int32_t page_tokens, const std::string& kv_dtype) {
    require(n_kv_heads >= 1 && head_dim >= 8 && head_dim % 8 == 0, "pages: head_dim must be a multiple of 8, n_kv_heads 1 or more");
    require(page_tokens >= 16 && page_tokens % 16 == 0, "pages: page_tokens must be a multiple of 16");
    const KvType type = kv_type_named(kv_dtype);
    const int64_t head_bytes = page_tokens / 16 * kv_run_bytes(type, static_cast<int32_t>(head_dim));
    layer = {pool.data(), n_kv_heads * head_bytes, head_bytes, page_tokens, type};
    const int64_t n_pages = rows(pool) / layer.page_stride_bytes;
    StepView& view = step.view;
    require(rows(seq_slot) == view.n_seqs, "pages: seq_slot must hold one slot a sequence");
    for (int32_t s = 0; s < view.n_seqs; ++s) {
      const int64_t slot = seq_slot.data()[s], length = view.seq_start[s] + view.seq_rows[s + 1] - view.seq_rows[s];
      const int64_t n_needed = (length + page_tokens - 1) / page_tokens;
      require(slot >= 0 && slot < rows(page_table) && n_needed <= columns(page_table),
              "pages: page_table has no room for sequence " + std::to_string(s) + " of " + std::to_string(length) + " tokens");
      for (int64_t i = 0; i < n_needed; ++i) {
        const int32_t page = page_table(slot, i);
        require(page >= 0 && page < n_pages, "pages: got page " + std::to_string(page) + "; the pool has " + std::to_string(n_pages));
      }
    }
    view.seq_slot = seq_slot.data();
    view.page_table = page_table.data();
    view.page_table_stride = columns(page_table);
  }
};

void norm_door(const std::string& level, int32_t n_threads, const Matrix<float>& x, const Vector<float>& w, float eps, bool add_to_y,
               MatrixOut y) {
  const KernelTable& table = level_named(level);
  require_same_shape("norm", x, y);
  require(rows(w) == columns(x), "norm: w must have one weight a column of x");
  NormArgs a = {};
  a.x = x.data(), a.w = w.data(), a.y = y.data();
  a.m = rows(x), a.width = a.ldx = a.ldy = a.ld_residual = columns(x);
  a.eps = eps;
  a.residual = add_to_y ? y.data() : nullptr;
  run_on_team(n_threads, 64, [&](const ThreadCtx& ctx) { table.norm(a, ctx); });
}

void gated_door(const std::string& level, int32_t n_threads, const Matrix<float>& x, const std::string& act, MatrixOut y, float p0,
                float p1) {
  const KernelTable& table = level_named(level);
  require(columns(x) == 2 * columns(y) && rows(x) == rows(y), "gated: x must be as long as y and twice as wide");
  const GatedArgs a{x.data(), columns(x), rows(x), columns(y), activation_named(act), y.data(), columns(y), nullptr, p0, p1};
  run_on_team(n_threads, 64, [&](const ThreadCtx& ctx) { table.gated(a, ctx); });
}

void rope_table_door(const std::string& level, int32_t n_threads, const Vector<int32_t>& seq_start, const Vector<int32_t>& seq_rows,
                     const Vector<float>& inv_freq, float magnitude, MatrixOut y) {
  const KernelTable& table = level_named(level);
  require(columns(y) == 2 * rows(inv_freq), "rope_table: y must be twice as wide as inv_freq");
  const StepRows step(seq_start, seq_rows, rows(y));
  const RopeTableArgs a{inv_freq.data(), rows(inv_freq), magnitude, y.data(), columns(y)};
  run_on_team(n_threads, 64, [&](const ThreadCtx& ctx) { table.rope_table(a, step.view, ctx); });
}

void rope_kv_door(const std::string& level, int32_t n_threads, const Vector<int32_t>& seq_slot, const Vector<int32_t>& seq_start,
                  const Vector<int32_t>& seq_rows, const Matrix<int32_t>& page_table, const Matrix<float>& cos_sin,
                  const Matrix<float>& norms, float eps, int32_t n_heads, int32_t n_kv_heads, int32_t page_tokens,
                  const std::string& kv_dtype, MatrixOut qkv, Pool pool) {
  const KernelTable& table = level_named(level);
  const int64_t n_all = int64_t{n_heads} + 2 * n_kv_heads;
  require(n_heads >= 1 && n_kv_heads >= 1 && columns(qkv) % n_all == 0, "rope_kv: qkv must hold n_heads + 2 * n_kv_heads heads");
  const int64_t head_dim = columns(qkv) / n_all;
  require(columns(cos_sin) % 2 == 0 && columns(cos_sin) <= head_dim && (columns(cos_sin) == 0 || rows(cos_sin) == rows(qkv)),
          "rope_kv: cos_sin must hold 2 * d2 <= head_dim columns, a row for each of qkv");
  require(rows(norms) == 0 || (rows(norms) == 2 && columns(norms) == head_dim), "rope_kv: norms must hold no rows, or q's and k's");
  StepRows step(seq_start, seq_rows, rows(qkv));
  const Pages pages(pool, page_table, seq_slot, step, n_kv_heads, head_dim, page_tokens, kv_dtype);
  const float* q_norm = rows(norms) > 0 ? norms.data() : nullptr;
  const float* k_norm = q_norm != nullptr ? q_norm + head_dim : nullptr;
  const int32_t d2 = static_cast<int32_t>(columns(cos_sin) / 2);
  const RopeKvArgs a{qkv.data(),
                     columns(qkv),
                     n_heads,
                     n_kv_heads,
                     static_cast<int32_t>(head_dim),
                     q_norm,
                     k_norm,
                     eps,
                     d2 > 0 ? cos_sin.data() : nullptr,
                     columns(cos_sin),
                     d2,
                     pages.layer};
  run_on_team(n_threads, 64, [&](const ThreadCtx& ctx) { table.rope_kv(a, step.view, ctx); });
}

void attention_door(const std::string& level, int32_t n_threads, const Vector<int32_t>& seq_slot, const Vector<int32_t>& seq_start,
                    const Vector<int32_t>& seq_rows, const Matrix<int32_t>& page_table, const Matrix<float>& q, int32_t n_heads,
                    int32_t n_kv_heads, int32_t page_tokens, const std::string& kv_dtype, float scale, int32_t window, float softcap,
                    const Vector<float>& sinks, Pool pool, MatrixOut y) {
  const KernelTable& table = level_named(level);
  require_same_shape("attention", q, y);
  require(n_heads >= 1 && n_kv_heads >= 1 && n_heads % n_kv_heads == 0 && columns(q) % n_heads == 0,
          "attention: q must hold n_heads heads, and n_heads be a multiple of n_kv_heads");
  require(window >= 0 && softcap >= 0.0f, "attention: window and softcap must be 0 or more");
  require(rows(sinks) == 0 || rows(sinks) == n_heads, "attention: needs a sink for each head, or none");
  const int32_t head_dim = static_cast<int32_t>(columns(q) / n_heads);
  StepRows step(seq_start, seq_rows, rows(q));
  const Pages pages(pool, page_table, seq_slot, step, n_kv_heads, head_dim, page_tokens, kv_dtype);
  const int64_t shared_bytes = attention_shared_bytes(n_heads, head_dim, step.view.n_seqs, columns(page_table) * page_tokens, n_threads);
  std::vector<uint8_t> shared(static_cast<size_t>(shared_bytes));
  const AttentionArgs a{q.data(), columns(q), y.data(), columns(y),  n_heads,       n_kv_heads,   head_dim,
                        scale,    window,     softcap,  pages.layer, shared.data(), shared_bytes, rows(sinks) ? sinks.data() : nullptr};
  run_on_team(n_threads, attention_thread_bytes(n_heads, n_kv_heads, head_dim),
              [&](const ThreadCtx& ctx) { table.attention(a, step.view, ctx); });
}

void select_rows_door(const std::string& level, int32_t n_threads, const Matrix<float>& x, const Vector<int32_t>& logits_rows,
                      MatrixOut y) {
  const KernelTable& table = level_named(level);
  require(columns(x) == columns(y) && rows(logits_rows) == rows(y), "select_rows: y must be as wide as x, a row for each asked for");
  for (int64_t r = 0; r < rows(y); ++r) require(logits_rows(r) >= 0 && logits_rows(r) < rows(x), "select_rows: a row is outside x");
  StepView view = {};
  view.n_rows = static_cast<int32_t>(rows(y));
  view.logits_rows = logits_rows.data();
  const SelectRowsArgs a{x.data(), columns(x), columns(x), y.data(), columns(y)};
  run_on_team(n_threads, 64, [&](const ThreadCtx& ctx) { table.select_rows(a, view, ctx); });
}

void softcap_door(const std::string& level, int32_t n_threads, float cap, MatrixOut x) {
  const KernelTable& table = level_named(level);
  require(cap > 0.0f, "softcap: cap must be positive");
  const SoftcapArgs a{x.data(), columns(x), rows(x), columns(x), cap};
  run_on_team(n_threads, 64, [&](const ThreadCtx& ctx) { table.softcap(a, ctx); });
}

void add_door(const std::string& level, int32_t n_threads, const Matrix<float>& y, MatrixOut x) {
  const KernelTable& table = level_named(level);
  require_same_shape("add", x, y);
  const AddArgs a{x.data(), columns(x), y.data(), columns(y), rows(x), columns(x)};
  run_on_team(n_threads, 64, [&](const ThreadCtx& ctx) { table.add(a, ctx); });
}

int64_t argmax_door(const std::string& level, const Vector<float>& x) { return level_named(level).argmax(x.data(), rows(x)); }

// Slots' state as the caller's bytes: [slots, floats of one].
StateMemory state_of(MatrixOut& state, const Vector<int32_t>& seq_slot, StepRows& step, int64_t n_floats, const char* where) {
  require(columns(state) == n_floats, std::string(where) + ": a slot's state needs " + std::to_string(n_floats) + " numbers");
  require(rows(seq_slot) == step.view.n_seqs, std::string(where) + ": seq_slot must hold one slot a sequence");
  for (int64_t s = 0; s < rows(seq_slot); ++s)
    require(seq_slot.data()[s] >= 0 && seq_slot.data()[s] < rows(state), std::string(where) + ": a slot is out of range");
  step.view.seq_slot = seq_slot.data();
  return {reinterpret_cast<uint8_t*>(state.data()), n_floats * static_cast<int64_t>(sizeof(float))};
}

void short_conv_door(const std::string& level, int32_t n_threads, const Vector<int32_t>& seq_slot, const Vector<int32_t>& seq_start,
                     const Vector<int32_t>& seq_rows, const Matrix<float>& x, const Matrix<float>& w,
                     const std::optional<Vector<float>>& bias, bool has_silu, MatrixOut y, MatrixOut state) {
  const KernelTable& table = level_named(level);
  require_same_shape("short_conv", x, y);
  require(columns(w) == columns(x) && rows(w) >= 1, "short_conv: w must be [width, columns of x]");
  StepRows step(seq_start, seq_rows, rows(x));
  const StateMemory memory = state_of(state, seq_slot, step, (rows(w) - 1) * columns(x), "short_conv");
  const ShortConvArgs a{x.data(), columns(x), columns(x), rows(w), w.data(), bias ? bias->data() : nullptr,
                        has_silu, y.data(),   columns(y), memory};
  run_on_team(n_threads, 64, [&](const ThreadCtx& ctx) { table.short_conv(a, step.view, ctx); });
}

void delta_rule_door(const std::string& level, int32_t n_threads, const Vector<int32_t>& seq_slot, const Vector<int32_t>& seq_start,
                     const Vector<int32_t>& seq_rows, const Matrix<float>& qkv, const Matrix<float>& gate, const Matrix<float>& beta,
                     const Vector<float>& a_log, const Vector<float>& dt_bias, int64_t key_heads, int64_t key_dim, float lower_bound,
                     float eps, MatrixOut y, MatrixOut state) {
  const KernelTable& table = level_named(level);
  const int64_t heads = rows(a_log);
  require(heads >= 1 && key_heads >= 1 && heads % key_heads == 0 && columns(y) % heads == 0, "delta_rule: heads do not fit");
  const int64_t value_dim = columns(y) / heads;
  require(columns(qkv) == 2 * key_heads * key_dim + heads * value_dim && rows(dt_bias) == columns(gate) && columns(beta) == heads &&
              (columns(gate) == heads || columns(gate) == heads * key_dim),
          "delta_rule: qkv [T, 2 K D + H E], gate and dt_bias H or H D, beta H are needed");
  require(rows(qkv) == rows(y) && rows(gate) == rows(y) && rows(beta) == rows(y), "delta_rule: rows differ");
  StepRows step(seq_start, seq_rows, rows(qkv));
  const StateMemory memory = state_of(state, seq_slot, step, heads * key_dim * ((value_dim + 15) / 16 * 16), "delta_rule");
  const DeltaRuleArgs a{qkv.data(),   columns(qkv),   gate.data(), columns(gate), beta.data(), columns(beta),          y.data(),
                        columns(y),   key_heads,      heads,       key_dim,       value_dim,   columns(gate) != heads, lower_bound,
                        a_log.data(), dt_bias.data(), eps,         memory};
  run_on_team(n_threads, delta_rule_thread_bytes(key_dim), [&](const ThreadCtx& ctx) { table.delta_rule(a, step.view, ctx); });
}

void gated_norm_door(const std::string& level, int32_t n_threads, const Matrix<float>& x, const Matrix<float>& z, int64_t heads,
                     const std::optional<Vector<float>>& w, float eps, bool is_sigmoid, MatrixOut y, bool is_plain) {
  const KernelTable& table = level_named(level);
  require_same_shape("gated_norm", x, y);
  const bool is_per_head = columns(z) == heads;
  require(rows(x) == rows(z) && (is_per_head || columns(x) == columns(z)), "gated_norm: z needs to be like x, or one column a head");
  require(heads >= 1 && columns(x) % heads == 0 && (!w || rows(*w) * heads == columns(x)), "gated_norm: heads or w do not fit x");
  const GatedNormArgs a{
      x.data(), columns(x), rows(x),  z.data(),   columns(z), is_per_head, heads, columns(x) / heads, w ? w->data() : nullptr,
      eps,      is_sigmoid, y.data(), columns(y), is_plain};
  run_on_team(n_threads, 64, [&](const ThreadCtx& ctx) { table.gated_norm(a, ctx); });
}

void ssd_door(const std::string& level, int32_t n_threads, const Vector<int32_t>& seq_slot, const Vector<int32_t>& seq_start,
              const Vector<int32_t>& seq_rows, const Matrix<float>& xbc, const Matrix<float>& dt, const Vector<float>& a_log,
              const Vector<float>& dt_bias, const Vector<float>& d, int64_t groups, std::pair<float, float> limits, MatrixOut y,
              MatrixOut state) {
  const KernelTable& table = level_named(level);
  const int64_t heads = rows(a_log);
  require(heads >= 1 && groups >= 1 && heads % groups == 0 && columns(y) % heads == 0, "ssd: heads do not fit");
  const int64_t bc = columns(xbc) - columns(y), state_dim = bc / (2 * groups);
  require(bc > 0 && bc % (2 * groups) == 0 && columns(dt) == heads && rows(dt_bias) == heads && rows(d) == heads,
          "ssd: xbc [T, H P + 2 G N], and dt, dt_bias and d of H are needed");
  require(rows(xbc) == rows(y) && rows(dt) == rows(y), "ssd: rows differ");
  StepRows step(seq_start, seq_rows, rows(xbc));
  const int64_t head_dim = columns(y) / heads;
  const StateMemory memory = state_of(state, seq_slot, step, heads * state_dim * ((head_dim + 15) / 16 * 16), "ssd");
  const SsdArgs a{xbc.data(), columns(xbc), dt.data(),    columns(dt),   y.data(),     columns(y),     heads,    head_dim,
                  groups,     state_dim,    limits.first, limits.second, a_log.data(), dt_bias.data(), d.data(), memory};
  run_on_team(n_threads, ssd_thread_bytes(), [&](const ThreadCtx& ctx) { table.ssd(a, step.view, ctx); });
}

void gate_norm_door(const std::string& level, int32_t n_threads, const Matrix<float>& x, const Matrix<float>& z, int64_t groups,
                    const Vector<float>& w, float eps, MatrixOut y) {
  const KernelTable& table = level_named(level);
  require_same_shape("gate_norm", x, y);
  require_same_shape("gate_norm", x, z);
  require(groups >= 1 && columns(x) % groups == 0 && rows(w) == columns(x), "gate_norm: groups or w do not fit x");
  const GateNormArgs a{x.data(), columns(x), rows(x),  z.data(),  columns(z), groups, columns(x) / groups,
                       w.data(), eps,        y.data(), columns(y)};
  run_on_team(n_threads, 64, [&](const ThreadCtx& ctx) { table.gate_norm(a, ctx); });
}

} // namespace

void bind_rows(nb::module_& m) {
  m.def("norm", &norm_door, "level"_a, "n_threads"_a, "x"_a, "w"_a, nb::kw_only(), "eps"_a, "add_to_y"_a = false, "y"_a.noconvert(),
        "y = RMS norm of x times w, plus the old y with add_to_y.");
  m.def("gated", &gated_door, "level"_a, "n_threads"_a, "x"_a, nb::kw_only(), "act"_a, "y"_a.noconvert(), "p0"_a = 0.0f, "p1"_a = 0.0f,
        "y = act(left half of x) * right half of x.");
  m.def("rope_table", &rope_table_door, "level"_a, "n_threads"_a, "seq_start"_a, "seq_rows"_a, "inv_freq"_a, nb::kw_only(), "magnitude"_a,
        "y"_a.noconvert(), "y[t] = cosines, then sines, of row t's position times inv_freq.");
  m.def("rope_kv", &rope_kv_door, "level"_a, "n_threads"_a, "seq_slot"_a, "seq_start"_a, "seq_rows"_a, "page_table"_a, "cos_sin"_a,
        "norms"_a, nb::kw_only(), "eps"_a, "n_heads"_a, "n_kv_heads"_a, "page_tokens"_a, "kv_dtype"_a, "qkv"_a.noconvert(),
        "pool"_a.noconvert(), "Norms and rotates q and k in place and writes k and v to the sequences' pages.");
  m.def("attention", &attention_door, "level"_a, "n_threads"_a, "seq_slot"_a, "seq_start"_a, "seq_rows"_a, "page_table"_a, "q"_a,
        nb::kw_only(), "n_heads"_a, "n_kv_heads"_a, "page_tokens"_a, "kv_dtype"_a, "scale"_a, "window"_a = 0, "softcap"_a = 0.0f, "sinks"_a,
        "pool"_a.noconvert(), "y"_a.noconvert(), "y = causal attention of q over the sequences' pages.");
  m.def("select_rows", &select_rows_door, "level"_a, "n_threads"_a, "x"_a, "logits_rows"_a, nb::kw_only(), "y"_a.noconvert(),
        "y[r] = x[logits_rows[r]].");
  m.def("softcap", &softcap_door, "level"_a, "n_threads"_a, nb::kw_only(), "cap"_a, "x"_a.noconvert(), "x = cap * tanh(x / cap).");
  m.def("add", &add_door, "level"_a, "n_threads"_a, "y"_a, nb::kw_only(), "x"_a.noconvert(), "x += y.");
  m.def("argmax", &argmax_door, "level"_a, "x"_a, "First index of the largest of x; -1 with a NaN or without elements.");
  m.def("short_conv", &short_conv_door, "level"_a, "n_threads"_a, "seq_slot"_a, "seq_start"_a, "seq_rows"_a, "x"_a, "w"_a, nb::kw_only(),
        "bias"_a.none() = nb::none(), "has_silu"_a, "y"_a.noconvert(), "state"_a.noconvert());
  m.def("delta_rule", &delta_rule_door, "level"_a, "n_threads"_a, "seq_slot"_a, "seq_start"_a, "seq_rows"_a, "qkv"_a, "gate"_a, "beta"_a,
        "a_log"_a, "dt_bias"_a, nb::kw_only(), "key_heads"_a, "key_dim"_a, "lower_bound"_a, "eps"_a, "y"_a.noconvert(),
        "state"_a.noconvert());
  m.def("gated_norm", &gated_norm_door, "level"_a, "n_threads"_a, "x"_a, "z"_a, nb::kw_only(), "heads"_a, "w"_a.none(), "eps"_a,
        "is_sigmoid"_a, "y"_a.noconvert(), "is_plain"_a = false);
  m.def("ssd", &ssd_door, "level"_a, "n_threads"_a, "seq_slot"_a, "seq_start"_a, "seq_rows"_a, "xbc"_a, "dt"_a, "a_log"_a, "dt_bias"_a,
        "d"_a, nb::kw_only(), "groups"_a, "limits"_a, "y"_a.noconvert(), "state"_a.noconvert());
  m.def("gate_norm", &gate_norm_door, "level"_a, "n_threads"_a, "x"_a, "z"_a, nb::kw_only(), "groups"_a, "w"_a, "eps"_a, "y"_a.noconvert());
}

} // namespace tiercel
