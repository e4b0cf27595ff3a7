// Gumbel noise keyed by seed, position and token id: src/tiercel/sampling/philox.py in C++. Baseline code only.
#pragma once

#include <cstdint>

#include "tiercel/verify.hpp"

namespace tiercel::sampler_noise {

inline constexpr int64_t kBlock = 64;       // token ids whose noise is made together
inline constexpr float kGumbelMax = 22.88f; // no word gives more

// Noise of one stream is independent of another's; `lane` tells draws apart that have all else in common.
struct Key {
  uint64_t seed;
  uint32_t position;
  Stream stream = Stream::Target;
  uint32_t lane = 0;
};

// The random words of token ids block * 64 .. block * 64 + 64.
void block_words(Key key, int64_t block, uint32_t* words);

// The word of one token id.
uint32_t word_of(Key key, int64_t id);

// Noise of one word.
double gumbel(uint32_t word);

// The same word as a number in (0, 1).
inline double uniform(uint32_t word) { return (static_cast<double>(word) + 0.5) * 0x1p-32; }

// Index of the largest z[i] + noise, lowest index on ties. Blocks that cannot win are skipped, which never changes the
// answer. z [n_blocks * 64], all <= 0 or -inf; block_max [n_blocks] the largest of each; likeliest: an index where z is
// 0.
int64_t draw(const float* z, const float* block_max, int64_t n_blocks, int64_t likeliest, Key key);

// The largest of x [64], none of them NaN.
float largest_of_block(const float* x);

} // namespace tiercel::sampler_noise
