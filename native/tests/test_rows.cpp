// The row kernels: the same bits at every level and number of threads, and close to plain double versions.
#include <cmath>

#include "check.hpp"
#include "kernel_rig.hpp"

namespace {

using namespace tiercel;
using namespace tiercel::test;

constexpr int64_t kScratch = 1 << 16;

// Calls run(level, n_threads) -> floats for every level and 1 to 3 threads; all must equal the first, which is
// returned.
template <class Fn>
std::vector<float> everywhere(Fn run) {
  const std::vector<float> first = run(*kernel_level(0), 1);
  for (int32_t i = 0; i < n_kernel_levels(); ++i)
    for (int32_t n_threads = 1; n_threads <= 3; ++n_threads) CHECK(same_bits(run(*kernel_level(i), n_threads), first));
  return first;
}

double worst(const std::vector<float>& got, const std::vector<double>& expected) {
  double most = 0.0;
  for (size_t i = 0; i < got.size(); ++i) most = std::fmax(most, std::fabs(got[i] - expected[i]) / (1.0 + std::fabs(expected[i])));
  return most;
}

std::vector<double> plain_norm(const std::vector<float>& x, const std::vector<float>& w, int64_t m, double eps) {
  const int64_t width = static_cast<int64_t>(w.size());
  std::vector<double> y;
  for (int64_t r = 0; r < m; ++r) {
    double sum = 0.0;
    for (int64_t i = 0; i < width; ++i) sum += double{x[r * width + i]} * x[r * width + i];
    for (int64_t i = 0; i < width; ++i) y.push_back(x[r * width + i] / std::sqrt(sum / width + eps) * w[i]);
  }
  return y;
}

NormArgs norm_args(const std::vector<float>& x, const std::vector<float>& w, int64_t m, float* y) {
  NormArgs a{};
  a.x = x.data(), a.w = w.data(), a.y = y;
  a.m = m, a.eps = 1e-5f;
  a.width = a.ldx = a.ldy = a.ld_residual = static_cast<int64_t>(w.size());
  return a;
}

TEST(norm_has_the_same_bits_everywhere_and_is_close) {
  for (const int64_t width : {8, 24, 64, 576, 1000}) {
    for (const int64_t m : {0, 1, 5}) {
      Numbers numbers(static_cast<uint64_t>(width));
      const std::vector<float> x = numbers.floats(m * width, 3.0f), w = numbers.floats(width);
      const std::vector<float> y = everywhere([&](const KernelTable& level, int32_t n_threads) {
        std::vector<float> out(x.size());
        on_team(n_threads, kScratch, [&](const ThreadCtx& ctx) { level.norm(norm_args(x, w, m, out.data()), ctx); });
        return out;
      });
      CHECK(worst(y, plain_norm(x, w, m, 1e-5)) < 1e-6);
    }
  }
}

TEST(norm_of_a_row_does_not_depend_on_the_other_rows) {
  Numbers numbers(3);
  const std::vector<float> x = numbers.floats(4 * 100), w = numbers.floats(100);
  std::vector<float> all(x.size()), one(100);
  const KernelTable& level = *kernel_level(n_kernel_levels() - 1);
  on_team(2, kScratch, [&](const ThreadCtx& ctx) { level.norm(norm_args(x, w, 4, all.data()), ctx); });
  const std::vector<float> third(x.begin() + 200, x.begin() + 300);
  on_team(1, kScratch, [&](const ThreadCtx& ctx) { level.norm(norm_args(third, w, 1, one.data()), ctx); });
  CHECK(std::memcmp(one.data(), all.data() + 200, 400) == 0);
}

TEST(norm_adds_a_residual_that_may_be_its_output) {
  Numbers numbers(4);
  const std::vector<float> x = numbers.floats(3 * 72), w = numbers.floats(72), residual = numbers.floats(3 * 72);
  const std::vector<float> y = everywhere([&](const KernelTable& level, int32_t n_threads) {
    std::vector<float> out = residual;
    NormArgs a = norm_args(x, w, 3, out.data());
    a.residual = out.data();
    on_team(n_threads, kScratch, [&](const ThreadCtx& ctx) { level.norm(a, ctx); });
    return out;
  });
  std::vector<double> expected = plain_norm(x, w, 3, 1e-5);
  for (size_t i = 0; i < expected.size(); ++i) expected[i] += residual[i];
  CHECK(worst(y, expected) < 1e-6);
}

// An int8 result must be what quantize makes of the float result.
template <class Kernel>
void check_int8(int64_t m, int64_t width, Kernel run) {
  const int64_t stride = quant_row_bytes(width);
  for (int32_t i = 0; i < n_kernel_levels(); ++i) {
    const KernelTable& level = *kernel_level(i);
    Poisoned fused(m * stride), apart(m * stride);
    const QuantRows fused_rows{fused.data(), stride, width}, apart_rows{apart.data(), stride, width};
    std::vector<float> y(static_cast<size_t>(m * width));
    on_team(2, kScratch, [&](const ThreadCtx& ctx) { run(level, ctx, y.data(), nullptr); });
    on_team(2, kScratch, [&](const ThreadCtx& ctx) { run(level, ctx, nullptr, &fused_rows); });
    QuantizeArgs q{y.data(), width, m, &apart_rows};
    on_team(2, kScratch, [&](const ThreadCtx& ctx) { level.quantize(q, ctx); });
    CHECK(std::memcmp(fused.data(), apart.data(), static_cast<size_t>(m * stride)) == 0);
  }
}

TEST(norm_to_int8_equals_norm_then_quantize) {
  Numbers numbers(5);
  const std::vector<float> x = numbers.floats(3 * 576), w = numbers.floats(576);
  check_int8(3, 576, [&](const KernelTable& level, const ThreadCtx& ctx, float* y, const QuantRows* yq) {
    NormArgs a = norm_args(x, w, 3, y);
    a.yq = yq;
    level.norm(a, ctx);
  });
}

TEST(gated_to_int8_equals_gated_then_quantize) {
  const std::vector<float> x = Numbers(6).floats(3 * 2 * 96, 4.0f);
  for (const int64_t m : {1, 3}) // one row is cut between groups
    check_int8(m, 96, [&](const KernelTable& level, const ThreadCtx& ctx, float* y, const QuantRows* yq) {
      level.gated(GatedArgs{x.data(), 192, m, 96, Activation::Silu, y, 96, yq}, ctx);
    });
}

TEST(gated_has_the_same_bits_everywhere_and_is_close) {
  for (const Activation act : {Activation::Silu, Activation::GeluTanh}) {
    const int64_t m = 4, f = 40;
    std::vector<float> x = Numbers(7).floats(m * 2 * f, 9.0f);
    x[0] = -200.0f, x[1] = 200.0f, x[2] = 0.0f;
    const std::vector<float> y = everywhere([&](const KernelTable& level, int32_t n_threads) {
      std::vector<float> out(static_cast<size_t>(m * f));
      const GatedArgs a{x.data(), 2 * f, m, f, act, out.data(), f, nullptr};
      on_team(n_threads, kScratch, [&](const ThreadCtx& ctx) { level.gated(a, ctx); });
      return out;
    });
    std::vector<double> expected;
    for (int64_t i = 0; i < m * f; ++i) {
      const double g = x[i / f * 2 * f + i % f], up = x[i / f * 2 * f + f + i % f];
      const double silu = g / (1.0 + std::exp(-g));
      const double gelu = 0.5 * g * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (g + 0.044715 * g * g * g)));
      expected.push_back((act == Activation::Silu ? silu : gelu) * up);
    }
    CHECK(worst(y, expected) < 3e-6);
  }
}

TEST(elementwise_kernels_have_the_same_bits_everywhere) {
  for (const int64_t m : {1, 3}) {
    for (const int64_t width : {5, 50, 1000}) {
      const std::vector<float> x = Numbers(8).floats(m * width, 50.0f), more = Numbers(9).floats(m * width);
      const std::vector<float> capped = everywhere([&](const KernelTable& level, int32_t n_threads) {
        std::vector<float> out = x;
        on_team(n_threads, kScratch, [&](const ThreadCtx& ctx) { level.softcap(SoftcapArgs{out.data(), width, m, width, 30.0f}, ctx); });
        return out;
      });
      const std::vector<float> sum = everywhere([&](const KernelTable& level, int32_t n_threads) {
        std::vector<float> out = x;
        on_team(n_threads, kScratch,
                [&](const ThreadCtx& ctx) { level.add(AddArgs{out.data(), width, more.data(), width, m, width}, ctx); });
        return out;
      });
      for (size_t i = 0; i < x.size(); ++i) {
        CHECK(std::fabs(capped[i] - 30.0 * std::tanh(x[i] / 30.0)) < 1e-5);
        CHECK(sum[i] == x[i] + more[i]);
      }
    }
  }
}

TEST(select_rows_copies_the_rows_asked_for) {
  const std::vector<float> x = Numbers(10).floats(5 * 7);
  const std::vector<int32_t> rows{4, 0, 4};
  const std::vector<float> y = everywhere([&](const KernelTable& level, int32_t n_threads) {
    std::vector<float> out(3 * 7);
    StepView view{};
    view.n_rows = 3, view.logits_rows = rows.data();
    on_team(n_threads, kScratch,
            [&](const ThreadCtx& ctx) { level.select_rows(SelectRowsArgs{x.data(), 7, 7, out.data(), 7}, view, ctx); });
    return out;
  });
  for (int64_t i = 0; i < 21; ++i) CHECK(y[i] == x[rows[i / 7] * 7 + i % 7]);
}

TEST(argmax_finds_the_first_largest_or_reports_nan) {
  for (int32_t i = 0; i < n_kernel_levels(); ++i) {
    const auto argmax = kernel_level(i)->argmax;
    for (const int64_t n : {1, 2, 15, 16, 17, 1024, 3000}) {
      std::vector<float> x = Numbers(static_cast<uint64_t>(n)).floats(n);
      for (const int64_t at : {int64_t{0}, n / 2, n - 1}) {
        std::vector<float> y = x;
        y[at] = 2.0f;
        CHECK(argmax(y.data(), n) == at);
        y[n - 1] = 2.0f;
        CHECK(argmax(y.data(), n) == at);
        y[at] = INFINITY;
        CHECK(argmax(y.data(), n) == at);
        y[at] = std::nanf("");
        CHECK(argmax(y.data(), n) == -1);
      }
      std::vector<float> lowest(static_cast<size_t>(n), -INFINITY);
      CHECK(argmax(lowest.data(), n) == 0);
      lowest[n - 1] = -3e38f;
      CHECK(argmax(lowest.data(), n) == n - 1);
    }
  }
}

// Two sequences of 3 and 2 rows; sequence 0 starts at 15, so that it crosses from one page's run into the next.
struct TwoSequences {
  std::vector<int32_t> slot{1, 0}, start{15, 4}, rows{0, 3, 5}, pos{15, 16, 17, 4, 5}, seq{0, 0, 0, 1, 1}, table{3, -1, 2, 0};
  StepView view() const {
    StepView v{};
    v.n_tokens = 5, v.n_seqs = 2;
    v.seq_slot = slot.data(), v.seq_start = start.data(), v.seq_rows = rows.data();
    v.row_pos = pos.data(), v.row_seq = seq.data();
    v.page_table = table.data(), v.page_table_stride = 2;
    return v;
  }
};

TEST(rope_table_is_the_rounded_double_cosine_and_sine) {
  const TwoSequences step;
  const std::vector<float> inv_freq{1.0f, 0.3f, 1e-4f};
  const std::vector<float> y = everywhere([&](const KernelTable& level, int32_t n_threads) {
    std::vector<float> out(5 * 6);
    const RopeTableArgs a{inv_freq.data(), 3, 1.25f, out.data(), 6};
    on_team(n_threads, kScratch, [&](const ThreadCtx& ctx) { level.rope_table(a, step.view(), ctx); });
    return out;
  });
  for (int64_t t = 0; t < 5; ++t)
    for (int64_t j = 0; j < 3; ++j) {
      const float angle = static_cast<float>(step.pos[t]) * inv_freq[j];
      CHECK(y[t * 6 + j] == static_cast<float>(std::cos(double{angle}) * 1.25));
      CHECK(y[t * 6 + 3 + j] == static_cast<float>(std::sin(double{angle}) * 1.25));
    }
}

TEST(rope_kv_norms_rotates_and_writes_pages) {
  const TwoSequences step;
  const int32_t H = 4, K = 2, D = 24, d2 = 10;
  const int64_t width = (H + 2 * K) * D, head = 2 * 16 * D, page = K * head;
  const std::vector<float> qkv = Numbers(11).floats(5 * width), cos_sin = Numbers(12).floats(5 * 2 * d2);
  const std::vector<float> q_norm = Numbers(13).floats(D), k_norm = Numbers(14).floats(D);
  std::vector<float> rows;
  const std::vector<float> pool = everywhere([&](const KernelTable& level, int32_t n_threads) {
    rows = qkv;
    std::vector<float> pages(static_cast<size_t>(4 * page), 9.0f);
    const RopeKvArgs a{rows.data(),
                       width,
                       H,
                       K,
                       D,
                       q_norm.data(),
                       k_norm.data(),
                       1e-6f,
                       cos_sin.data(),
                       2 * d2,
                       d2,
                       {reinterpret_cast<uint8_t*>(pages.data()), page * 4, head * 4, 16, KvType::F32}};
    on_team(n_threads, kScratch, [&](const ThreadCtx& ctx) { level.rope_kv(a, step.view(), ctx); });
    pages.insert(pages.end(), rows.begin(), rows.end()); // q is compared too
    return pages;
  });
  for (int64_t t = 0; t < 5; ++t)
    for (int32_t h = 0; h < H + K; ++h) {
      std::vector<float> x(qkv.begin() + t * width + h * D, qkv.begin() + t * width + (h + 1) * D);
      std::vector<double> y = plain_norm(x, h < H ? q_norm : k_norm, 1, 1e-6);
      for (int32_t j = 0; j < d2; ++j) {
        const double a = y[j], b = y[d2 + j], c = cos_sin[t * 2 * d2 + j], s = cos_sin[t * 2 * d2 + d2 + j];
        y[j] = a * c - b * s, y[d2 + j] = b * c + a * s;
      }
      const int64_t id = step.table[step.slot[step.seq[t]] * 2 + step.pos[t] / 16], lane = step.pos[t] % 16;
      for (int32_t d = 0; d < D; ++d) {
        const float got = h < H ? rows[t * width + h * D + d] : pool[id * page + (h - H) * head + d * 16 + lane];
        CHECK(std::fabs(got - y[d]) < 2e-6);
        if (h >= H) CHECK(pool[id * page + (h - H) * head + 16 * D + lane * D + d] == qkv[t * width + (h + K) * D + d]);
      }
    }
  int64_t n_untouched = 0;
  for (int64_t i = 0; i < 4 * page; ++i) n_untouched += pool[i] == 9.0f;
  CHECK(n_untouched == 4 * page - 5 * K * 2 * D);
}

TEST(rope_kv_rounds_to_half_the_same_everywhere) {
  const TwoSequences step;
  const int32_t H = 2, K = 1, D = 24;
  const int64_t width = (H + 2 * K) * D, head = 2 * 16 * D;
  std::vector<float> qkv = Numbers(15).floats(5 * width, 100.0f);
  qkv[H * D] = 1e-7f, qkv[H * D + 1] = 70000.0f, qkv[H * D + 2] = 3e-6f, qkv[H * D + 3] = -65520.0f, qkv[(H + 1) * D + 5] = 6.1e-5f;
  everywhere([&](const KernelTable& level, int32_t n_threads) {
    std::vector<float> rows = qkv, pages(static_cast<size_t>(2 * head), 0.0f);
    const RopeKvArgs a{rows.data(), width, H,       K, D, nullptr,
                       nullptr,     0.0f,  nullptr, 0, 0, {reinterpret_cast<uint8_t*>(pages.data()), head * 2, head * 2, 16, KvType::F16}};
    on_team(n_threads, kScratch, [&](const ThreadCtx& ctx) { level.rope_kv(a, step.view(), ctx); });
    const _Float16* run = reinterpret_cast<const _Float16*>(pages.data()) + step.table[2] * head; // slot 1, page 0
    for (int32_t d = 0; d < D; ++d)
      CHECK(static_cast<float>(run[d * 16 + 15]) == static_cast<float>(static_cast<_Float16>(qkv[H * D + d])));
    return pages;
  });
}

} // namespace
