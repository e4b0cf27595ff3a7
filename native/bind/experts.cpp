// The router and a mixture's experts as test doors, at a named level and number of threads; and the names of their choices.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <string>
#include <vector>

#include "bind.hpp"
#include "tiercel/packed.hpp"
#include "tiercel/team.hpp"

namespace nb = nanobind;
using namespace nanobind::literals;

namespace tiercel {
namespace {

using Vector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using MatrixOut = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Stores = std::vector<std::shared_ptr<PackedStore>>;

void require(bool holds, const std::string& message) {
  if (!holds) throw nb::value_error(message.c_str());
}

int64_t rows(const nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>& a) { return static_cast<int64_t>(a.shape(0)); }

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
  PackedArena arena;
  uint8_t* base = arena.take(stride * n_threads + 64);
  Team team(n_threads, {});
  auto body = [&](int32_t thread) { kernel(ThreadCtx{thread, n_threads, team.barrier(), base + thread * stride, scratch_bytes}); };
  team.run([](void* arg, int32_t thread) { (*static_cast<decltype(body)*>(arg))(thread); }, &body);
}

void router_door(const std::string& level, int32_t n_threads, const Matrix& x, int32_t top_k, const std::string& scores,
                 const std::optional<Vector>& bias, int32_t n_groups, int32_t n_groups_kept, int32_t group_top, bool renormalises,
                 float scale, MatrixOut y) {
  const KernelTable& table = level_named(level);
  const auto n_experts = static_cast<int32_t>(x.shape(1));
  require(y.shape(0) == x.shape(0) && y.shape(1) == 2 * static_cast<size_t>(top_k), "router: y must be [rows of x, 2 * top_k]");
  require(top_k >= 1 && n_groups >= 1 && n_experts % n_groups == 0 && n_groups_kept >= 1 && n_groups_kept <= n_groups && group_top >= 1 &&
              group_top <= 8 && group_top <= n_experts / n_groups && top_k <= n_experts / n_groups * n_groups_kept,
          "router: top_k and groups do not fit the experts");
  require(!bias || bias->shape(0) == x.shape(1), "router: bias must have one value an expert");
  const RouterArgs a{
      x.data(),      n_experts, rows(x),      n_experts, top_k,    scores_named(scores), bias ? bias->data() : nullptr, n_groups,
      n_groups_kept, group_top, renormalises, scale,     y.data(), 2 * int64_t{top_k}};
  run_on_team(n_threads, 12 * (int64_t{n_experts} + 16), [&](const ThreadCtx& ctx) { table.router(a, ctx); });
}

void experts_door(const std::string& level, int32_t n_threads, const Matrix& x, const Matrix& route, const Stores& gate, const Stores& up,
                  const Stores& down, const std::vector<std::optional<Matrix>>& biases, const std::string& act, float p0, float p1,
                  int64_t rows_at_once, MatrixOut y) {
  const KernelTable& table = level_named(level);
  const size_t n = gate.size();
  require(n > 0 && up.size() == n && down.size() == n && biases.size() == 3, "experts: needs gate, up and down of each, and three biases");
  const auto k = static_cast<int64_t>(x.shape(1)), m = rows(x), f = gate[0]->view().n, width = down[0]->view().n;
  std::vector<PackedMatrix> g, u, d;
  for (size_t e = 0; e < n; ++e) {
    g.push_back(gate[e]->view()), u.push_back(up[e]->view()), d.push_back(down[e]->view());
    require(g[e].k == k && u[e].k == k && g[e].n == f && u[e].n == f && d[e].k == f && d[e].n == width,
            "experts: the matrices of expert " + std::to_string(e) + " do not fit x and each other");
  }
  const auto top_k = static_cast<int32_t>(route.shape(1) / 2);
  require(route.shape(0) == x.shape(0) && y.shape(0) == x.shape(0) && static_cast<int64_t>(y.shape(1)) == width && top_k >= 1,
          "experts: route must be [rows of x, 2 * top_k], y [rows of x, width]");
  for (int64_t r = 0; r < m; ++r)
    for (int32_t j = 0; j < top_k; ++j) {
      const float e = route(r, j);
      require(e >= 0.0f && e < static_cast<float>(n), "experts: a number in route is of no expert");
    }
  const auto bias = [&](size_t i, int64_t columns) -> const float* {
    if (!biases[i]) return nullptr;
    require(biases[i]->shape(0) == n && static_cast<int64_t>(biases[i]->shape(1)) == columns, "experts: a bias is no [experts, columns]");
    return biases[i]->data();
  };
  const auto is_float = [](const PackedMatrix& w) {
    return w.format == Format::F32 || w.format == Format::F16 || w.format == Format::BF16;
  };
  const bool is_int = !is_float(g[0]);
  require(rows_at_once >= 1, "experts: rows_at_once must be 1 or more");
  PackedArena arena;
  const QuantRows q = {is_int ? arena.take(std::max<int64_t>(m, 1) * quant_row_bytes(k)) : nullptr, is_int ? quant_row_bytes(k) : 0, k};
  if (is_int) run_on_team(1, 64, [&](const ThreadCtx& ctx) { table.quantize({x.data(), k, m, &q}, ctx); });
  const auto n_experts = static_cast<int32_t>(n);
  uint8_t* shared = arena.take(experts_shared_bytes(rows_at_once, n_experts, top_k, k, f, width, n_threads));
  const ExpertsArgs a{is_int ? &q : nullptr,
                      is_int ? nullptr : x.data(),
                      k,
                      m,
                      route.data(),
                      2 * int64_t{top_k},
                      n_experts,
                      top_k,
                      g.data(),
                      u.data(),
                      d.data(),
                      bias(0, f),
                      bias(1, f),
                      bias(2, width),
                      !is_float(d[0]),
                      k,
                      f,
                      width,
                      activation_named(act),
                      p0,
                      p1,
                      y.data(),
                      width,
                      shared,
                      rows_at_once};
  const int64_t scratch = std::max({linear_thread_bytes(k, rows_at_once), linear_thread_bytes(f, rows_at_once), f * 4 + 64});
  run_on_team(n_threads, scratch, [&](const ThreadCtx& ctx) { table.experts(a, ctx); });
}

} // namespace

Activation activation_named(const std::string& name) {
  if (name == "silu") return Activation::Silu;
  if (name == "gelu_tanh") return Activation::GeluTanh;
  if (name == "situ") return Activation::Situ;
  if (name == "swiglu_clamp") return Activation::SwigluClamp;
  if (name == "silu_clamp") return Activation::SiluClamp;
  throw nb::value_error(("act: got '" + name + "'; silu, gelu_tanh, situ, swiglu_clamp or silu_clamp is needed").c_str());
}

Scores scores_named(const std::string& name) {
  if (name == "softmax") return Scores::Softmax;
  if (name == "sigmoid") return Scores::Sigmoid;
  throw nb::value_error(("scores: got '" + name + "'; softmax or sigmoid is needed").c_str());
}

void bind_experts(nb::module_& m) {
  m.def("router", &router_door, "level"_a, "n_threads"_a, "x"_a, nb::kw_only(), "top_k"_a, "scores"_a, "bias"_a.none() = nb::none(),
        "n_groups"_a = 1, "n_groups_kept"_a = 1, "group_top"_a = 1, "renormalises"_a = true, "scale"_a = 1.0f, "y"_a.noconvert(),
        "y[r] = the experts that x[r] chooses, ascending, then their weights.");
  m.def("experts", &experts_door, "level"_a, "n_threads"_a, "x"_a, "route"_a, "gate"_a, "up"_a, "down"_a, nb::kw_only(), "biases"_a,
        "act"_a, "p0"_a = 0.0f, "p1"_a = 0.0f, "rows_at_once"_a = 64, "y"_a.noconvert(),
        "y[r] = the weighted sum of what the experts of route[r] make of x[r].");
}

} // namespace tiercel
