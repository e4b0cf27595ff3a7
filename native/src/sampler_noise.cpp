#include "sampler_noise.hpp"

#include <bit>

#include "sampler_math.hpp"

namespace tiercel::sampler_noise {
namespace {

constexpr int kLanes = 16;
constexpr float kLn2 = 0.693147181f;
// Bounds are in float32 (errors below 1e-4 for scores that can win); exact scores decide.
constexpr float kSlack = 1e-3f;

// One of Philox's two multiplications for all lanes. Unrolled, it would no longer be seen as a vector operation.
inline void multiply(const uint32_t* x, uint32_t by, uint32_t* high, uint32_t* low) {
#pragma GCC unroll 1
  for (int j = 0; j < kLanes; ++j) {
    const uint64_t product = static_cast<uint64_t>(x[j]) * by;
    high[j] = static_cast<uint32_t>(product >> 32);
    low[j] = static_cast<uint32_t>(product);
  }
}

// Not below z + gumbel(word). A float's bits, read as an integer, are a chord under log2, and word / 2 is not more than
// half of word + 0.5.
inline float bound(float z, uint32_t word) {
  const int32_t bits = std::bit_cast<int32_t>(static_cast<float>(static_cast<int32_t>(word >> 1)));
  return z + kLn2 * (158.0f - static_cast<float>(bits) * 0x1p-23f);
}

} // namespace

void block_words(Key key, int64_t block, uint32_t* words) {
  uint32_t c0[kLanes], c1[kLanes], c2[kLanes], c3[kLanes];
  uint32_t high0[kLanes], low0[kLanes], high1[kLanes], low1[kLanes];
  for (int j = 0; j < kLanes; ++j) {
    c0[j] = static_cast<uint32_t>(block * kLanes + j);
    c1[j] = key.position;
    c2[j] = static_cast<uint32_t>(key.stream);
    c3[j] = key.lane;
  }
  uint32_t k0 = static_cast<uint32_t>(key.seed), k1 = static_cast<uint32_t>(key.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    multiply(c0, 0xD2511F53u, high0, low0);
    multiply(c2, 0xCD9E8D57u, high1, low1);
#pragma GCC unroll 1
    for (int j = 0; j < kLanes; ++j) {
      c0[j] = high1[j] ^ c1[j] ^ k0;
      c1[j] = low1[j];
      c2[j] = high0[j] ^ c3[j] ^ k1;
      c3[j] = low0[j];
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  for (int j = 0; j < kLanes; ++j) {
    words[j] = c0[j];
    words[kLanes + j] = c1[j];
    words[2 * kLanes + j] = c2[j];
    words[3 * kLanes + j] = c3[j];
  }
}

uint32_t word_of(Key key, int64_t id) {
  uint32_t c[4] = {static_cast<uint32_t>(id / kBlock * kLanes + id % kLanes), key.position, static_cast<uint32_t>(key.stream), key.lane};
  uint32_t k0 = static_cast<uint32_t>(key.seed), k1 = static_cast<uint32_t>(key.seed >> 32);
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    const uint64_t p0 = uint64_t{c[0]} * 0xD2511F53u, p1 = uint64_t{c[2]} * 0xCD9E8D57u;
    const uint32_t next[4] = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(p1),
                              static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(p0)};
    for (int i = 0; i < 4; ++i) c[i] = next[i];
  }
  return c[id / kLanes % 4];
}

double gumbel(uint32_t word) { return -sampler_math::log(-sampler_math::log(1.0 - uniform(word))); }

int64_t draw(const float* z, const float* block_max, int64_t n_blocks, int64_t likeliest, Key key) {
  uint32_t words[kBlock];
  block_words(key, likeliest / kBlock, words);
  int64_t best_id = likeliest;
  double best = static_cast<double>(z[likeliest]) + gumbel(words[likeliest % kBlock]);
  float threshold = static_cast<float>(best) - kSlack;
  for (int64_t block = 0; block < n_blocks; ++block) {
    if (block_max[block] + kGumbelMax < threshold) continue;
    block_words(key, block, words);
    const float* zb = z + block * kBlock;
    int32_t n_hits = 0;
    for (int64_t i = 0; i < kBlock; ++i) n_hits += bound(zb[i], words[i]) >= threshold;
    if (n_hits == 0) continue;
    for (int64_t i = 0; i < kBlock; ++i) {
      if (!(bound(zb[i], words[i]) >= threshold)) continue;
      const double score = static_cast<double>(zb[i]) + gumbel(words[i]);
      const int64_t id = block * kBlock + i;
      if (score > best || (score == best && id < best_id)) {
        best = score;
        best_id = id;
        threshold = static_cast<float>(best) - kSlack;
      }
    }
  }
  return best_id;
}

float largest_of_block(const float* x) {
  float m[kLanes];
  for (int j = 0; j < kLanes; ++j) m[j] = x[j];
  for (int i = 1; i < kBlock / kLanes; ++i) {
    for (int j = 0; j < kLanes; ++j) m[j] = m[j] > x[i * kLanes + j] ? m[j] : x[i * kLanes + j];
  }
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int j = 0; j < width; ++j) m[j] = m[j] > m[j + width] ? m[j] : m[j + width];
  }
  return m[0];
}

} // namespace tiercel::sampler_noise
