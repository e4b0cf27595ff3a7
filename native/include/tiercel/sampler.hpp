// One row of logits to one token, by the definition in src/tiercel/sampling/reference.py: the same token, bit for bit.
//
// Stateless: what a row's token depends on is in the call (logits, parameters, the sequence's tokens), so it does not
// change with the row's neighbours, with preemption or with the thread that computes it. A row is one thread's work; a
// scratch belongs to one thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tiercel/verify.hpp"

namespace tiercel {

// In place of a token: the request must end with an error.
inline constexpr int32_t kBadLogits = -1;      // a NaN or +inf among the logits
inline constexpr int32_t kNothingAllowed = -2; // the request's constraints leave no token

// What a sequence asks of its tokens. A value: copied and moved freely. Ids outside the vocabulary are ignored.
struct SamplerParams {
  struct Bias {
    int32_t id;
    double value;
  };

  double temperature = 0.0; // 0: greedy
  double top_p = 1.0;       // 1: off
  int64_t top_k = 0;        // 0: off
  double min_p = 0.0;       // 0: off
  double presence_penalty = 0.0;
  double frequency_penalty = 0.0;
  double repetition_penalty = 1.0;
  uint64_t seed = 0;
  uint64_t apart_seed = 0; // of all noise that verification by rejection has beside the target's own
  int64_t min_tokens = 0;  // stop_ids are forbidden until so many were generated
  std::vector<int32_t> stop_ids;
  std::vector<Bias> bias; // ids are distinct
  bool has_allowed_ids = false;
  std::vector<int32_t> allowed_ids;
  std::vector<int32_t> bad_tokens; // the bad words' ids, one word after the other
  std::vector<int32_t> bad_ends;   // where each word ends in bad_tokens; no word is empty
  std::vector<int32_t> told_ids;   // whose log-probabilities are told, in this order, in place of the likeliest; empty: those
};

struct SampleRow {
  std::span<const float> logits;   // [V]
  std::span<const int32_t> tokens; // the sequence so far; the token to choose gets position tokens.size()
  int64_t n_prompt;                // how many of them are the prompt's
  // [mask_words(V)]: token i may be chosen if bit i % 32 of word i / 32 is set. Empty: all may.
  std::span<const uint32_t> mask = {};
};

// Words of a mask over a vocabulary.
constexpr int64_t mask_words(int64_t vocab_size) { return (vocab_size + 31) / 32; }

// Where log-probabilities go: the likeliest n_top by the logits as given, best first, ties by id, or those of a
// sequence's told_ids. Past V, and past told_ids: id -1 and NaN.
struct TopOut {
  int32_t n_top;
  int32_t* ids;    // [n_top]
  float* logprobs; // [n_top]
};

// logprob and rank (1 + number of strictly greater logits) are those of the logits as given; NaN and 0 without a token,
// or when not asked for.
struct SampleOut {
  int32_t token;
  float logprob;
  int32_t rank;
};

// What sampling has of the kernels: KernelTable's functions of these names.
struct SamplerKernels {
  int64_t (*argmax)(const float* x, int64_t n); // first index of the largest, -1 if there is a NaN
  float (*exp_sum)(const float* x, int64_t n, float largest);
};

// Memory of one thread's sampling, allocated once for a vocabulary: nothing below allocates.
class SamplerScratch {
 public:
  // REQUIRES: 1 <= vocab_size < 2^19 (sums of token weights are 63-bit integers).
  SamplerScratch(int64_t vocab_size, SamplerKernels kernels);

 private:
  friend class RowSampler;
  friend class RowScorer;
  SamplerKernels kernels_;
  std::vector<float> z_;         // the row at work, padded with -inf to whole blocks
  std::vector<float> block_max_; // the largest of each block of z_
  std::vector<float> values_;    // candidates of a selection
  std::vector<int32_t> ids_;
  std::vector<uint32_t> counts_;  // all zero between calls
  std::vector<uint64_t> buckets_; // weight by range of z
};

// Chooses a token. top null: log-probabilities are not computed.
// REQUIRES: row.logits.size() is the scratch's vocab_size; 0 <= n_prompt <= tokens.size() < 2^31; the mask is empty or whole.
SampleOut sample_row(const SamplerParams& params, const SampleRow& row, SamplerScratch& scratch, const TopOut* top);

// The chances that sample_row would choose some ids with, to float32's precision. Returns false where it would choose none.
// REQUIRES: sample_row's; the temperature is not 0; the ids are in the vocabulary; p is as long as they.
bool chances_of(const SamplerParams& params, const SampleRow& row, SamplerScratch& scratch, std::span<const int32_t> ids,
                std::span<double> p);

// Chooses the token in place of a rejected draft: in proportion to max(joint * p - q, 0), p being what sample_row chooses by; from p itself
// where rounding leaves nothing of that. REQUIRES: chances_of's; 0 < joint <= 1.
SampleOut sample_residual(const SamplerParams& params, const SampleRow& row, SamplerScratch& scratch, const DraftOdds& odds, double joint,
                          const TopOut* top);

// Log-probability and rank of a given token. A token outside the vocabulary is answered with kNothingAllowed. told:
// SamplerParams::told_ids.
SampleOut score_row(std::span<const float> logits, int32_t token, SamplerScratch& scratch, const TopOut& top,
                    std::span<const int32_t> told = {});

} // namespace tiercel
