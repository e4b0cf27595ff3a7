// Packing, rounding of activations, linear and embed: exact between levels, shapes and thread counts; close to a plain double computation
// from an independent reading of the file's blocks.
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"
#include "tiercel/packed.hpp"

using namespace tiercel;

namespace {

const Format kFormats[] = {Format::F32,  Format::F16,  Format::BF16, Format::Q4_0, Format::Q4_1,  Format::Q5_0, Format::Q5_1,
                           Format::Q8_0, Format::Q4_K, Format::Q5_K, Format::Q6_K, Format::MXFP4, Format::NVFP4};

bool is_float(Format f) { return f == Format::F32 || f == Format::F16 || f == Format::BF16; }
bool is_k_quant(Format f) { return f == Format::Q4_K || f == Format::Q5_K || f == Format::Q6_K; }

uint16_t to_half(float x) { // normal numbers only, truncated
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return static_cast<uint16_t>((u >> 16 & 0x8000) | (((u >> 13) & 0x3ffff) - (112 << 10)));
}

float from_half(uint16_t h) {
  return std::ldexp(static_cast<float>((h & 1023) | 1024), ((h >> 10) & 31) - 25) * (h & 0x8000 ? -1.0f : 1.0f);
}

// Random file bytes of a matrix: any bit pattern is a legal quant; scales are drawn as sensible halves.
struct File {
  Format format;
  int64_t n, k, row_bytes;
  std::vector<uint8_t> bytes;

  File(Format f, int64_t n_, int64_t k_, uint32_t seed) : format(f), n(n_), k(k_), row_bytes(file_row_bytes(f, k_)), bytes(n_ * row_bytes) {
    std::mt19937 rng(seed);
    for (auto& b : bytes) b = static_cast<uint8_t>(rng());
    std::uniform_real_distribution<float> scale(0.001f, 0.02f), weight(-1.0f, 1.0f);
    auto half = [&](uint8_t* at) {
      const uint16_t h = to_half(rng() % 2 ? scale(rng) : -scale(rng));
      std::memcpy(at, &h, 2);
    };
    const int64_t weights = is_float(f) ? 1 : is_k_quant(f) ? 256 : 32, size = row_bytes / (k / weights);
    for (uint8_t* b = bytes.data(); b < bytes.data() + bytes.size(); b += size) {
      const float w = weight(rng);
      if (f == Format::F32) std::memcpy(b, &w, 4);
      if (f == Format::BF16) std::memcpy(b, reinterpret_cast<const uint8_t*>(&w) + 2, 2);
      if (f == Format::F16) half(b);
      if (is_float(f)) continue;
      if (f == Format::MXFP4) {
        *b = static_cast<uint8_t>(120 + rng() % 6);
        continue;
      }
      if (f == Format::NVFP4) {
        const float two[2] = {scale(rng), -scale(rng)};
        std::memcpy(b, two, 8);
        continue;
      }
      half(f == Format::Q6_K ? b + 208 : b);
      if (f == Format::Q4_1 || f == Format::Q5_1 || f == Format::Q4_K || f == Format::Q5_K) half(b + 2);
    }
  }

  // The value of one weight, read straight from its block.
  double at(int64_t row, int64_t col) const {
    const uint8_t* r = bytes.data() + row * row_bytes;
    auto half = [](const uint8_t* p) {
      uint16_t h;
      std::memcpy(&h, p, 2);
      return static_cast<double>(from_half(h));
    };
    if (format == Format::F32) {
      float w;
      std::memcpy(&w, r + 4 * col, 4);
      return w;
    }
    if (format == Format::F16) return half(r + 2 * col);
    if (format == Format::BF16) {
      uint8_t full[4] = {0, 0, r[2 * col], r[2 * col + 1]};
      float w;
      std::memcpy(&w, full, 4);
      return w;
    }
    if (is_k_quant(format)) return at_k(r + col / 256 * (row_bytes / (k / 256)), static_cast<int>(col % 256), half);
    const uint8_t* b = r + col / 32 * (row_bytes / (k / 32));
    const int i = static_cast<int>(col % 32);
    if (format == Format::MXFP4 || format == Format::NVFP4) {
      const uint8_t byte = b[(format == Format::MXFP4 ? 1 : 8) + i % 16];
      const int code = i < 16 ? byte & 15 : byte >> 4, exponent = code >> 1 & 3, fraction = code & 1;
      const double size = exponent == 0 ? 0.5 * fraction : std::ldexp(1.0 + 0.5 * fraction, exponent - 1);
      float s;
      std::memcpy(&s, b + i / 16 * 4, 4);
      const double scale = format == Format::MXFP4 ? std::ldexp(1.0, b[0] - 127) : s;
      return scale * (code & 8 ? -size : size);
    }
    if (format == Format::Q8_0) return half(b) * static_cast<int8_t>(b[2 + i]);
    const bool has_min = format == Format::Q4_1 || format == Format::Q5_1, five = format == Format::Q5_0 || format == Format::Q5_1;
    const uint8_t* p = b + (has_min ? 4 : 2);
    int q = 0;
    if (five) q = (p[i / 8] >> (i % 8) & 1) << 4, p += 4;
    q |= i < 16 ? p[i] & 15 : p[i - 16] >> 4;
    return has_min ? half(b) * q + half(b + 2) : half(b) * (q - (five ? 16 : 8));
  }

  template <class Half>
  double at_k(const uint8_t* b, int i, Half half) const {
    const int s = i / 32, l = i % 32;
    if (format == Format::Q6_K) {
      const int n128 = i / 128, part = i % 128 / 32;
      const int low = b[n128 * 64 + (part & 1) * 32 + l] >> (part / 2 * 4) & 15, high = b[128 + n128 * 32 + l] >> (2 * part) & 3;
      return half(b + 208) * static_cast<int8_t>(b[192 + i / 16]) * ((low | high << 4) - 32);
    }
    const uint8_t* c = b + 4;
    const int scale = s < 4 ? c[s] & 63 : (c[s + 4] & 15) | (c[s - 4] >> 6) << 4;
    const int minimum = s < 4 ? c[s + 4] & 63 : (c[s + 4] >> 4) | (c[s] >> 6) << 4;
    int q = b[(format == Format::Q5_K ? 48 : 16) + i / 64 * 32 + l] >> (s % 2 * 4) & 15;
    if (format == Format::Q5_K) q |= (b[16 + l] >> s & 1) << 4;
    return half(b) * scale * q - half(b + 2) * minimum;
  }
};

struct Rows {
  int64_t stride;
  std::vector<uint8_t> memory;
  QuantRows view;
  Rows(int64_t m, int64_t k) : stride(quant_row_bytes(k)), memory(static_cast<size_t>(m * stride + 64)) {
    view = {memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64, stride, k};
  }
};

template <class Fn>
void team(int32_t n_threads, int64_t scratch_bytes, Fn fn) {
  std::vector<std::thread> threads;
  for (int32_t t = 0; t < n_threads; ++t)
    threads.emplace_back([=] {
      uint8_t* scratch = static_cast<uint8_t*>(std::aligned_alloc(64, static_cast<size_t>((scratch_bytes + 63) / 64 * 64)));
      fn(ThreadCtx{t, n_threads, nullptr, scratch, scratch_bytes});
      std::free(scratch);
    });
  for (auto& t : threads) t.join();
}

std::vector<float> random_floats(int64_t n, uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(static_cast<size_t>(n));
  for (auto& v : x) v = normal(rng);
  return x;
}

PackedStore pack(const File& f, bool expand = false) {
  PackedStore w(f.format, f.n, f.k, expand);
  w.pack(f.bytes.data(), f.row_bytes, nullptr, 2);
  return w;
}

struct Product {
  std::vector<const PackedStore*> w;
  std::vector<const float*> bias;
  const std::vector<float>* x;
  int64_t m, k;
  const std::vector<float>* residual = nullptr;

  std::vector<float> run(const KernelTable& level, int32_t n_threads) const {
    std::vector<LinearPart> parts;
    int64_t n = 0;
    for (size_t i = 0; i < w.size(); ++i) {
      parts.push_back({&w[i]->view(), bias[i], n});
      n += w[i]->view().n;
    }
    std::vector<float> y(static_cast<size_t>(m * n), -7.0f);
    Rows xq(m, k);
    const bool quantised = !is_float(w[0]->view().format);
    if (quantised) level.quantize({x->data(), k, m, &xq.view}, {0, 1, nullptr, nullptr, 0});
    if (residual) y = *residual; // in place
    const LinearArgs args = {parts.data(),
                             static_cast<int32_t>(parts.size()),
                             m,
                             quantised ? &xq.view : nullptr,
                             x->data(),
                             k,
                             y.data(),
                             n,
                             residual ? y.data() : nullptr,
                             n};
    team(n_threads, linear_thread_bytes(k, m), [&](const ThreadCtx& ctx) { level.linear(args, ctx); });
    return y;
  }
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && !std::memcmp(a.data(), b.data(), a.size() * 4);
}

// What linear's contract says of one output, in double, over activations as the level rounds them.
double expected(const File& f, int64_t row, const float* x, bool quantised) {
  double sum = 0;
  for (int64_t g = 0; g < f.k; g += 32) {
    const int64_t end = g + 32 < f.k ? g + 32 : f.k;
    float amax = 0;
    for (int64_t i = g; i < end; ++i) amax = std::fmax(amax, std::fabs(x[i]));
    const float scale = amax / 127.0f, inverse = 127.0f / amax;
    for (int64_t i = g; i < end; ++i) sum += (quantised ? static_cast<double>(std::rint(x[i] * inverse)) * scale : x[i]) * f.at(row, i);
  }
  return sum;
}

} // namespace

TEST(every_format_level_shape_and_thread_count_gives_the_same_linear_bits) {
  for (Format format : kFormats)
    for (int64_t n : {17, 48, 100})
      for (int64_t k : {is_k_quant(format) ? 512 : is_float(format) ? 77 : 96}) {
        const File file(format, n, k, 1);
        const PackedStore w = pack(file);
        const int64_t m_max = 64;
        const auto x = random_floats(m_max * k, 2);
        const auto all = Product{{&w}, {nullptr}, &x, m_max, k}.run(*kernel_level(0), 1);
        for (int64_t m = 0; m < m_max; m += 9)
          for (int64_t i = 0; i < n; ++i) {
            const double want = expected(file, i, x.data() + m * k, !is_float(format));
            CHECK(std::fabs(all[m * n + i] - want) <= 1e-4 * std::sqrt(static_cast<double>(k)) * (1 + std::fabs(want)));
          }
        for (int64_t m : {1, 2, 3, 5, 8, 9, 16, 17, 24, 33, 50, 64})
          for (int32_t level = 0; level < n_kernel_levels(); ++level)
            for (int32_t n_threads : {1, 2, 3}) {
              const auto y = Product{{&w}, {nullptr}, &x, m, k}.run(*kernel_level(level), n_threads);
              CHECK(!std::memcmp(y.data(), all.data(), static_cast<size_t>(m * n) * 4));
            }
      }
}

TEST(many_threads_and_few_tiles_give_the_same_bits) {
  const File file(Format::Q4_1, 40, 64, 3);
  const PackedStore w = pack(file);
  const auto x = random_floats(200 * 64, 4);
  const Product product = {{&w}, {nullptr}, &x, 200, 64};
  const auto want = product.run(*kernel_level(0), 1);
  for (int32_t level = 0; level < n_kernel_levels(); ++level)
    for (int32_t n_threads : {5, 8, 13}) CHECK(same_bits(product.run(*kernel_level(level), n_threads), want));
}

TEST(parts_of_different_formats_share_an_input_with_bias_and_residual_in_place) {
  const int64_t k = 512, m_max = 40;
  const File a(Format::Q5_0, 33, k, 5), b(Format::Q8_0, 16, k, 6), c(Format::Q6_K, 7, k, 7);
  const PackedStore wa = pack(a), wb = pack(b), wc = pack(c);
  const auto x = random_floats(m_max * k, 8), bias_a = random_floats(33, 9), bias_c = random_floats(7, 10),
             residual = random_floats(m_max * 56, 11);
  for (int64_t m : {1, 6, 40}) {
    const std::vector<float> r(residual.begin(), residual.begin() + m * 56);
    Product alone[] = {{{&wa}, {nullptr}, &x, m, k}, {{&wb}, {nullptr}, &x, m, k}, {{&wc}, {nullptr}, &x, m, k}};
    std::vector<float> want(static_cast<size_t>(m * 56));
    int64_t at = 0;
    for (int p = 0; p < 3; ++p) {
      const int64_t n = alone[p].w[0]->view().n;
      const auto y = alone[p].run(*kernel_level(0), 1);
      for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < n; ++j) {
          float v = y[i * n + j];
          if (p == 0) v = v + bias_a[j];
          if (p == 2) v = v + bias_c[j];
          want[i * 56 + at + j] = v + r[i * 56 + at + j];
        }
      at += n;
    }
    for (int32_t level = 0; level < n_kernel_levels(); ++level)
      for (int32_t n_threads : {1, 2, 3})
        CHECK(same_bits(
            Product{{&wa, &wb, &wc}, {bias_a.data(), nullptr, bias_c.data()}, &x, m, k, &r}.run(*kernel_level(level), n_threads), want));
  }
}

TEST(expanded_and_embedded_rows_are_the_files_values_bit_for_bit) {
  for (Format format : kFormats) {
    const int64_t n = 21, k = is_k_quant(format) ? 256 : is_float(format) ? 45 : 96;
    const File file(format, n, k, 12);
    const PackedStore w = pack(file), wide = pack(file, true);
    CHECK(wide.view().format == Format::F32);
    const std::vector<int32_t> ids = {20, 0, 16, 7, 7};
    for (int32_t level = 0; level < n_kernel_levels(); ++level)
      for (const PackedStore* store : {&w, &wide})
        for (float scale : {1.0f, 3.3f}) {
          std::vector<float> y(ids.size() * k);
          const EmbedArgs args = {&store->view(), ids.data(), static_cast<int64_t>(ids.size()), y.data(), k, scale};
          team(3, 0, [&](const ThreadCtx& ctx) { kernel_level(level)->embed(args, ctx); });
          int64_t n_wrong = 0;
          for (size_t i = 0; i < ids.size(); ++i)
            for (int64_t j = 0; j < k; ++j) {
              float want = static_cast<float>(file.at(ids[i], j)); // one rounding, as GGUF's own
              if (scale != 1.0f) want = want * scale;
              n_wrong += std::memcmp(&y[i * k + j], &want, 4) && !(want == 0 && y[i * k + j] == 0);
            }
          CHECK(n_wrong == 0);
        }
  }
}

TEST(row_order_picks_the_files_rows) {
  const File file(Format::Q8_0, 20, 32, 13);
  std::vector<int32_t> order(20);
  for (int32_t i = 0; i < 20; ++i) order[i] = (i * 7) % 20;
  PackedStore w(Format::Q8_0, 20, 32, false);
  w.pack(file.bytes.data(), file.row_bytes, order.data(), 1);
  std::vector<int32_t> ids = {0, 1, 2, 19};
  std::vector<float> y(4 * 32);
  kernel_level(0)->embed({&w.view(), ids.data(), 4, y.data(), 32, 1.0f}, {0, 1, nullptr, nullptr, 0});
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 32; ++j) CHECK(y[i * 32 + j] == static_cast<float>(file.at(order[ids[i]], j)));
}

TEST(a_team_packs_the_same_bytes_with_any_number_of_threads_and_may_be_dropped) {
  const File a(Format::Q4_1, 4000, 576, 21), b(Format::Q8_0, 33, 64, 22), c(Format::F16, 48, 77, 23);
  std::vector<int32_t> order(33);
  for (int32_t i = 0; i < 33; ++i) order[i] = 32 - i;
  PackedStore want_b(b.format, b.n, b.k, false);
  want_b.pack(b.bytes.data(), b.row_bytes, order.data(), 1);
  const PackedStore want_a = pack(a), want_c = pack(c);
  const auto same = [](const PackedStore& x, const PackedStore& y) {
    return x.n_bytes() == y.n_bytes() && !std::memcmp(x.view().data, y.view().data, static_cast<size_t>(x.n_bytes()));
  };
  for (int32_t n_threads : {0, 1, 2, 5})
    for (bool is_joined : {true, false}) {
      const auto arena = std::make_shared<PackedArena>();
      std::vector<PackingJob> jobs;
      for (const File* f : {&a, &b, &c})
        jobs.push_back({std::make_shared<PackedStore>(f->format, f->n, f->k, false, arena), f->bytes.data(), f->row_bytes, f->n, {}});
      jobs[1].row_order = order;
      PackingTeam team(std::move(jobs), n_threads, false);
      if (!is_joined) continue;
      team.join();
      team.join();
      CHECK(same(*team.jobs()[0].store, want_a));
      CHECK(same(*team.jobs()[1].store, want_b));
      CHECK(same(*team.jobs()[2].store, want_c));
    }
}

TEST(rounded_rows_are_equal_at_all_levels) {
  const int64_t m = 7, k = 1120; // 35 groups: two chunks of 16 and 3 more
  auto x = random_floats(m * k, 14);
  for (int64_t i = 0; i < 32; ++i) x[i] = 0.0f;
  for (int64_t i = 32; i < 64; ++i) x[i] = 1e-42f;                       // denormal: counts as nothing
  for (int64_t i = 64; i < 96; ++i) x[i] = static_cast<float>(i) + 0.5f; // ties, once scaled
  x[95] = 127.0f;
  x[100] = std::numeric_limits<float>::infinity();
  x[130] = std::numeric_limits<float>::quiet_NaN();
  x[170] = -3e38f;
  for (int64_t i = 512; i < k; ++i) x[i] = x[i] * static_cast<float>(i);
  x[k + 600] = 1e30f;
  x[3 * k] = x[3 * k + 1088] = std::numeric_limits<float>::infinity();
  Rows want(m, k);
  std::memset(want.view.data, 0, static_cast<size_t>(m * want.stride));
  kernel_level(0)->quantize({x.data(), k, m, &want.view}, {0, 1, nullptr, nullptr, 0});
  for (int32_t level = 1; level < n_kernel_levels(); ++level) {
    Rows got(m, k);
    std::memset(got.view.data, 0, static_cast<size_t>(m * got.stride));
    team(3, 0, [&](const ThreadCtx& ctx) { kernel_level(level)->quantize({x.data(), k, m, &got.view}, ctx); });
    CHECK(!std::memcmp(want.view.data, got.view.data, static_cast<size_t>(m * want.stride)));
  }
}

TEST(a_nan_or_infinite_activation_makes_its_row_nan_and_no_other) {
  for (Format format : {Format::Q4_1, Format::Q8_0, Format::Q6_K, Format::F32}) {
    const int64_t k = 256, n = 20, m = 3;
    const PackedStore w = pack(File(format, n, k, 15));
    auto x = random_floats(m * k, 16);
    x[k + 40] = std::numeric_limits<float>::quiet_NaN();
    if (format != Format::F32) x[2 * k + 255] = -std::numeric_limits<float>::infinity();
    for (int32_t level = 0; level < n_kernel_levels(); ++level) {
      const auto y = Product{{&w}, {nullptr}, &x, m, k}.run(*kernel_level(level), 1);
      for (int64_t i = 0; i < n; ++i) {
        CHECK(std::isfinite(y[i]));
        CHECK(std::isnan(y[n + i]));
        CHECK(std::isnan(y[2 * n + i]) == (format != Format::F32));
      }
    }
  }
}

TEST(extreme_weights_and_activations_do_not_saturate) {
  for (Format format : {Format::Q4_0, Format::Q5_0, Format::Q8_0, Format::Q6_K}) {
    File file(format, 16, 256, 17);
    for (size_t i = 0; i < file.bytes.size(); ++i) file.bytes[i] = format == Format::Q8_0 ? 0x80 : i / 64 % 2 ? 0xff : 0;
    const int64_t size = file.row_bytes / (format == Format::Q6_K ? 1 : 8);
    for (size_t b = 0; b < file.bytes.size(); b += size) {
      const uint16_t one = 0x3c00;
      std::memcpy(&file.bytes[b + (format == Format::Q6_K ? 208 : 0)], &one, 2);
    }
    const PackedStore w = pack(file);
    std::vector<float> x(2 * 256, 127.0f);
    for (int64_t i = 256; i < 512; ++i) x[i] = i % 3 ? -127.0f : 127.0f;
    for (int32_t level = 0; level < n_kernel_levels(); ++level) {
      const auto y = Product{{&w}, {nullptr}, &x, 2, 256}.run(*kernel_level(level), 1);
      for (int64_t m = 0; m < 2; ++m)
        for (int64_t i = 0; i < 16; ++i) {
          double want = 0;
          for (int64_t j = 0; j < 256; ++j) want += file.at(i, j) * x[m * 256 + j];
          CHECK(y[m * 16 + i] == want); // whole numbers below 2^24
        }
    }
  }
}

TEST(packed_bytes_refuses_what_a_format_cannot_hold) {
  CHECK(packed_bytes(Format::Q4_K, 16, 640) == 0);
  CHECK(packed_bytes(Format::Q8_0, 16, 40) == 0);
  CHECK(packed_bytes(Format::Q4_1, 0, 32) == 0);
  CHECK(packed_bytes(Format::F32, 17, 5) == 2 * 320);
  CHECK(packed_bytes(Format::Q4_1, 16, 576) == 18 * 320);
  CHECK(quant_row_bytes(2048) % 64 == 0);
}
