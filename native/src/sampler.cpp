// The order of work and every rounding are the reference's; what differs is that most tokens are ruled out by bounds
// before any expensive arithmetic. Each bound is exact, so none changes the token.
#include "tiercel/sampler.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "sampler_math.hpp"
#include "sampler_noise.hpp"

namespace tiercel {

namespace {

using sampler_noise::kBlock;
using sampler_noise::largest_of_block;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr double kFloatMax = std::numeric_limits<float>::max();
constexpr auto kBits = [] {
  std::array<uint32_t, 32> bits{};
  for (int j = 0; j < 32; ++j) bits[static_cast<size_t>(j)] = uint32_t{1} << j;
  return bits;
}();
constexpr uint32_t kDone = 1u << 31;

// Buckets of z: number floor(-z * 64). The last one starts below -31.9, where a token's weight rounds to 0.
constexpr int64_t kBuckets = 2048;
constexpr float kBucketsPerUnit = 64.0f;

// An edited logit as float32. An edit does not forbid a token or make it infinite; a forbidden one stays so.
float settle(float before, double after) { return before == -kInf ? before : static_cast<float>(std::clamp(after, -kFloatMax, kFloatMax)); }

uint64_t sum_of_weights(const float* x, int64_t n, double largest) {
  uint64_t total = 0;
  uint64_t some[kBlock];
  for (int64_t i = 0; i < n; i += kBlock) {
    const int64_t count = std::min(kBlock, n - i);
    sampler_math::weights(x + i, count, largest, some);
    for (int64_t j = 0; j < count; ++j) total += some[j];
  }
  return total;
}

// The smallest float that is not below x.
float float_not_below(double x) {
  const float f = static_cast<float>(x);
  return static_cast<double>(f) < x ? std::nextafter(f, kInf) : f;
}

} // namespace

SamplerScratch::SamplerScratch(int64_t vocab_size, SamplerKernels kernels)
    : kernels_(kernels),
      z_((vocab_size + kBlock - 1) / kBlock * kBlock, -kInf),
      block_max_(z_.size() / kBlock),
      values_(z_.size()),
      ids_(z_.size()),
      counts_(z_.size()),
      buckets_(kBuckets) {}

// One call of sample_row.
class RowSampler {
 public:
  RowSampler(const SamplerParams& params, const SampleRow& row, SamplerScratch& scratch)
      : p_(params), row_(row), s_(scratch), v_(static_cast<int64_t>(row.logits.size())) {}

  int32_t token() {
    const int64_t likeliest = weigh();
    if (likeliest < 0 || p_.temperature == 0.0) return static_cast<int32_t>(likeliest);
    return drawn(likeliest, Stream::Target);
  }

  bool chances(std::span<const int32_t> ids, std::span<double> p) {
    if (weigh() < 0) return false;
    const double total = sum();
    for (size_t i = 0; i < ids.size(); ++i) p[i] = std::exp(double{s_.z_[static_cast<size_t>(ids[i])]}) / total;
    return true;
  }

  int32_t residual(const DraftOdds& odds, double joint) {
    const int64_t likeliest = weigh();
    if (likeliest < 0) return static_cast<int32_t>(likeliest);
    const int64_t left = take_out(odds, sum() / joint);
    return drawn(left < 0 ? likeliest : left, Stream::Residual);
  }

 private:
  int64_t n_blocks() const { return static_cast<int64_t>(s_.block_max_.size()); }
  int64_t n_output() const { return static_cast<int64_t>(row_.tokens.size()) - row_.n_prompt; }
  bool is_token(int32_t id) const { return id >= 0 && id < v_; }

  double sum() const { return double{s_.kernels_.exp_sum(s_.z_.data(), v_, 0.0f)}; }

  int32_t drawn(int64_t from, Stream stream) const {
    const sampler_noise::Key key{stream == Stream::Target ? p_.seed : p_.apart_seed, static_cast<uint32_t>(row_.tokens.size()), stream};
    return static_cast<int32_t>(sampler_noise::draw(s_.z_.data(), s_.block_max_.data(), n_blocks(), from, key));
  }

  // Takes q out of what tokens weigh, e^z, `total` being the weight of q whole. Gives the likeliest of what is left; -1, and nothing is
  // changed: all is gone.
  int64_t take_out(const DraftOdds& odds, double total) {
    float *z = s_.z_.data(), *before = s_.values_.data();
    for (size_t i = 0; i < odds.ids.size(); ++i) {
      float& own = z[odds.ids[i]];
      before[i] = own;
      const double left = std::exp(double{own}) - odds.q[i] * total;
      own = left > 0.0 ? static_cast<float>(sampler_math::log(left)) : -kInf;
    }
    for (const int32_t id : odds.ids) s_.block_max_[static_cast<size_t>(id / kBlock)] = largest_of_block(z + id / kBlock * kBlock);
    for (;;) {
      const auto block = std::max_element(s_.block_max_.begin(), s_.block_max_.end()) - s_.block_max_.begin();
      float& largest = s_.block_max_[static_cast<size_t>(block)];
      if (largest == -kInf) break;
      const float* in_block = z + block * kBlock;
      const int64_t found = std::max_element(in_block, in_block + kBlock) - z;
      if (z[found] > -kInf) return found;
      largest = -kInf; // it was a bound: cut_bucket leaves such behind
    }
    for (size_t i = 0; i < odds.ids.size(); ++i) z[odds.ids[i]] = before[i];
    for (const int32_t id : odds.ids) s_.block_max_[static_cast<size_t>(id / kBlock)] = largest_of_block(z + id / kBlock * kBlock);
    return -1;
  }

  // Edits and tempers the row: z is there, its largest 0, unless the temperature is 0. Gives the likeliest token, or why there is none.
  int64_t weigh() {
    const float* x = row_.logits.data();
    int64_t likeliest = s_.kernels_.argmax(x, v_);
    if (likeliest < 0 || x[likeliest] == kInf) return kBadLogits;
    const bool forbids_stops = n_output() < p_.min_tokens && !p_.stop_ids.empty();
    const bool is_edited = edits() || forbids_stops;
    if (is_edited) {
      x = s_.z_.data();
      edit(forbids_stops);
      likeliest = s_.kernels_.argmax(x, v_);
      if (x[likeliest] == -kInf && forbids_stops) {
        edit(false);
        likeliest = s_.kernels_.argmax(x, v_);
      }
    } else if (!is_masked_in(likeliest)) {
      likeliest = likeliest_masked_in();
    }
    if (likeliest < 0 || x[likeliest] == -kInf) return kNothingAllowed;
    if (p_.temperature == 0.0) return likeliest;
    if (is_edited || row_.mask.empty()) {
      temper(x, x[likeliest]);
    } else {
      temper_masked(x[likeliest]);
    }
    if (p_.min_p > 0.0) drop_below(float_not_below(sampler_math::log(p_.min_p)));
    if (p_.top_k > 0 && p_.top_k < v_) drop_below(kth_largest(p_.top_k));
    if (p_.top_p < 1.0) keep_nucleus();
    return likeliest;
  }

  bool edits() const {
    return p_.has_allowed_ids || !p_.bias.empty() || !p_.bad_ends.empty() || p_.repetition_penalty != 1.0 || counts_matter();
  }
  bool counts_matter() const { return p_.frequency_penalty != 0.0 || p_.presence_penalty != 0.0; }

  void edit(bool forbids_stops) {
    float* x = s_.z_.data();
    if (p_.has_allowed_ids) {
      std::fill_n(x, v_, -kInf);
      for (int32_t id : p_.allowed_ids) {
        if (is_token(id) && is_masked_in(id)) x[id] = row_.logits[id];
      }
    } else if (!row_.mask.empty()) {
      copy_masked(x, 0, v_);
    } else {
      std::copy_n(row_.logits.data(), v_, x);
    }
    for (const auto& [id, value] : p_.bias) {
      if (is_token(id)) x[id] = settle(x[id], static_cast<double>(x[id]) + value);
    }
    if (forbids_stops) {
      for (int32_t id : p_.stop_ids) {
        if (is_token(id)) x[id] = -kInf;
      }
    }
    forbid_bad_words(x);
    if (p_.repetition_penalty != 1.0 || counts_matter()) penalise(x);
  }

  bool is_masked_in(int64_t id) const { return row_.mask.empty() || (row_.mask[id / 32] >> (id % 32) & 1) != 0; }

  // The mask's bits for the ids from `begin`, a multiple of 32; none for ids behind the last.
  uint32_t word_at(int64_t begin) const { return row_.mask[begin / 32] & (v_ - begin >= 32 ? ~0u : (1u << (v_ - begin)) - 1); }

  // The first of the largest logits whose bits are set; -1: there is none above -inf.
  int64_t likeliest_masked_in() const {
    constexpr int kFew = 4; // bits to look at one by one
    const float* x = row_.logits.data();
    float largest = -kInf;
    int64_t found = -1;
    for (int64_t begin = 0; begin < v_; begin += 32) {
      uint32_t word = word_at(begin);
      if (word == 0) continue;
      if (v_ - begin >= 32 && std::popcount(word) > kFew && !(largest_masked_in(x + begin, word) > largest)) continue;
      for (; word != 0; word &= word - 1) {
        const int64_t id = begin + std::countr_zero(word);
        if (x[id] > largest) largest = x[found = id];
      }
    }
    return found;
  }

  static float largest_masked_in(const float* x, uint32_t word) {
    float some[32];
    mask_lanes(x, word, some);
    for (int width = 16; width > 0; width /= 2) {
      for (int j = 0; j < width; ++j) some[j] = some[j] > some[j + width] ? some[j] : some[j + width];
    }
    return some[0];
  }

  // 32 floats of x, -inf where `word` has no bit. As bits and through copies, so that the compiler takes all lanes at once: seven
  // times as fast as a choice of floats.
  static void mask_lanes(const float* x, uint32_t word, float* to) {
    constexpr auto kForbidden = std::bit_cast<uint32_t>(-kInf);
    uint32_t some[32];
    std::memcpy(some, x, sizeof some);
    for (int j = 0; j < 32; ++j) {
      const uint32_t keep = (word & kBits[static_cast<size_t>(j)]) == 0 ? 0u : ~0u;
      some[j] = (some[j] & keep) | (kForbidden & ~keep);
    }
    std::memcpy(to, some, sizeof some);
  }

  // x[from, to) becomes the logits, -inf where the mask has no bit. Most words of a grammar's mask have none, and some have all.
  void copy_masked(float* x, int64_t from, int64_t to) {
    for (int64_t begin = from; begin < to; begin += 32) {
      const int64_t n = std::min<int64_t>(32, to - begin);
      const uint32_t word = row_.mask[begin / 32];
      if (word == ~0u) {
        std::copy_n(row_.logits.data() + begin, n, x + begin);
        continue;
      }
      if (word == 0 || n < 32) {
        std::fill_n(x + begin, n, -kInf);
        for (int64_t i = 0; word != 0 && i < n; ++i) x[begin + i] = (word >> i & 1) != 0 ? row_.logits[begin + i] : -kInf;
        continue;
      }
      mask_lanes(row_.logits.data() + begin, word, x + begin);
    }
  }

  void forbid_bad_words(float* x) {
    int32_t begin = 0;
    for (int32_t end : p_.bad_ends) {
      const int32_t* word = p_.bad_tokens.data() + begin;
      const int32_t last = end - begin - 1;
      begin = end;
      if (last > n_output() || !is_token(word[last])) continue;
      if (std::equal(word, word + last, row_.tokens.data() + row_.tokens.size() - last)) x[word[last]] = -kInf;
    }
  }

  // Each token of the history once, whatever its count: the first visit edits it and marks it done.
  void penalise(float* x) {
    uint32_t* counts = s_.counts_.data();
    const auto output = row_.tokens.subspan(row_.n_prompt);
    for (int32_t id : output) counts[is_token(id) ? id : 0] += is_token(id);
    for (int32_t id : row_.tokens) {
      if (!is_token(id) || (counts[id] & kDone)) continue;
      if (p_.repetition_penalty != 1.0) {
        const double wide = x[id];
        x[id] = settle(x[id], wide > 0 ? wide / p_.repetition_penalty : wide * p_.repetition_penalty);
      }
      if (counts[id] != 0) {
        const double wide = x[id];
        x[id] = settle(x[id], (wide - counts[id] * p_.frequency_penalty) - p_.presence_penalty);
      }
      counts[id] |= kDone;
    }
    for (int32_t id : row_.tokens) {
      if (is_token(id)) counts[id] = 0;
    }
  }

  // z = (x - largest) / temperature; x may be z itself.
  void temper(const float* x, float largest) {
    const float t = static_cast<float>(p_.temperature);
    float* z = s_.z_.data();
    for (int64_t i = 0; i < v_; ++i) z[i] = (x[i] - largest) / t;
    for (int64_t b = 0; b < n_blocks(); ++b) s_.block_max_[b] = largest_of_block(z + b * kBlock);
  }

  // `temper` of the masked logits. A block without a bit costs no arithmetic.
  void temper_masked(float largest) {
    const float t = static_cast<float>(p_.temperature);
    for (int64_t b = 0; b < n_blocks(); ++b) {
      const int64_t begin = b * kBlock, end = std::min(begin + kBlock, v_);
      float* z = s_.z_.data();
      uint32_t bits = 0;
      for (int64_t i = begin; i < end; i += 32) bits |= word_at(i);
      if (bits == 0) {
        std::fill(z + begin, z + end, -kInf);
        s_.block_max_[b] = -kInf;
        continue;
      }
      copy_masked(z, begin, end);
      for (int64_t i = begin; i < end; ++i) z[i] = (z[i] - largest) / t;
      s_.block_max_[b] = largest_of_block(z + begin);
    }
  }

  void drop_below(float threshold) {
    for (int64_t b = 0; b < n_blocks(); ++b) {
      float* z = s_.z_.data() + b * kBlock;
      if (s_.block_max_[b] == -kInf) continue;
      for (int64_t i = 0; i < kBlock; ++i) z[i] = z[i] >= threshold ? z[i] : -kInf;
      if (s_.block_max_[b] < threshold) s_.block_max_[b] = -kInf;
    }
  }

  // The k-th largest block maximum is not above the k-th largest z, so for few k a short list holds the answer.
  float kth_largest(int64_t k) {
    float* values = s_.values_.data();
    const auto kth = [&](int64_t n) {
      std::nth_element(values, values + (k - 1), values + n, std::greater<float>());
      return values[k - 1];
    };
    float floor = -kInf;
    if (k <= n_blocks() / 2) {
      std::copy(s_.block_max_.begin(), s_.block_max_.end(), values);
      floor = kth(n_blocks());
    }
    int64_t n = 0;
    for (int64_t b = 0; b < n_blocks(); ++b) {
      if (s_.block_max_[b] == -kInf || s_.block_max_[b] < floor) continue;
      const float* z = s_.z_.data() + b * kBlock;
      for (int64_t i = 0; i < kBlock; ++i) {
        values[n] = z[i];
        n += z[i] >= floor && z[i] > -kInf;
      }
    }
    return n < k ? -kInf : kth(n);
  }

  // top_p without a sort of the vocabulary: weights by bucket of z, then a sort of the one bucket in which the target
  // is reached.
  void keep_nucleus() {
    const uint64_t total = fill_buckets();
    // Rounding of so large an integer may ask for more than there is; then all are kept.
    const uint64_t needed = std::max<uint64_t>(1, static_cast<uint64_t>(p_.top_p * static_cast<double>(total)));
    if (total < needed) return;
    uint64_t before = 0;
    int64_t bucket = 0;
    while (before + s_.buckets_[bucket] < needed) before += s_.buckets_[bucket++];
    const float low = -static_cast<float>(bucket + 1) / kBucketsPerUnit;
    drop_below(std::nextafter(low, kInf));
    cut_bucket(-static_cast<float>(bucket) / kBucketsPerUnit, before, needed);
  }

  uint64_t fill_buckets() {
    std::fill(s_.buckets_.begin(), s_.buckets_.end(), 0);
    uint64_t total = 0;
    uint64_t weights[kBlock];
    int32_t numbers[kBlock];
    for (int64_t b = 0; b < n_blocks(); ++b) {
      const float* z = s_.z_.data() + b * kBlock;
      if (s_.block_max_[b] < -32.0f) continue;
      sampler_math::weights(z, kBlock, 0.0, weights);
      for (int64_t i = 0; i < kBlock; ++i) {
        const float scaled = -z[i] * kBucketsPerUnit;
        numbers[i] = static_cast<int32_t>(scaled < kBuckets - 1 ? scaled : static_cast<float>(kBuckets - 1));
      }
      for (int64_t i = 0; i < kBlock; ++i) {
        s_.buckets_[numbers[i]] += weights[i];
        total += weights[i];
      }
    }
    return total;
  }

  // Of the tokens in the lowest bucket left, whose z is at most `high`, drops those after the one that reaches
  // `needed`.
  void cut_bucket(float high, uint64_t before, uint64_t needed) {
    float* z = s_.z_.data();
    int32_t* ids = s_.ids_.data();
    int64_t n = 0;
    for (int64_t b = 0; b < n_blocks(); ++b) {
      if (s_.block_max_[b] == -kInf) continue;
      for (int64_t i = b * kBlock; i < (b + 1) * kBlock; ++i) {
        ids[n] = static_cast<int32_t>(i);
        n += z[i] <= high && z[i] > -kInf;
      }
    }
    std::sort(ids, ids + n, [z](int32_t a, int32_t b) { return z[a] > z[b] || (z[a] == z[b] && a < b); });
    int64_t kept = 0;
    while (before < needed) before += sampler_math::weight(z[ids[kept++]]);
    // block_max_ may now be too large, which only costs the draw time.
    for (; kept < n; ++kept) z[ids[kept]] = -kInf;
  }

  const SamplerParams& p_;
  const SampleRow& row_;
  SamplerScratch& s_;
  const int64_t v_;
};

// Log-probabilities of one row.
class RowScorer {
 public:
  RowScorer(std::span<const float> logits, SamplerScratch& scratch)
      : x_(logits.data()), v_(static_cast<int64_t>(logits.size())), s_(scratch) {}

  SampleOut score(int32_t token, const TopOut& top, std::span<const int32_t> told = {}) {
    const int64_t likeliest = s_.kernels_.argmax(x_, v_);
    if (likeliest < 0 || x_[likeliest] == kInf) return nothing(kBadLogits, top);
    if (x_[likeliest] == -kInf || token < 0 || token >= v_) return nothing(kNothingAllowed, top);
    largest_ = x_[likeliest];
    log_total_ = sampler_math::log_of_weight(sum_of_weights(x_, v_, largest_));
    if (told.empty())
      list_likeliest(top);
    else
      list_told(top, told);
    int32_t rank = 1;
    for (int64_t i = 0; i < v_; ++i) rank += x_[i] > x_[token];
    return {token, logprob(token), rank};
  }

  static SampleOut nothing(int32_t token, const TopOut& top) {
    std::fill_n(top.ids, top.n_top, -1);
    std::fill_n(top.logprobs, top.n_top, kNan);
    return {token, kNan, 0};
  }

 private:
  float logprob(int64_t id) const { return static_cast<float>((static_cast<double>(x_[id]) - largest_) - log_total_); }

  void list_told(const TopOut& top, std::span<const int32_t> told) {
    for (int32_t i = 0; i < top.n_top; ++i) {
      const bool is_there = static_cast<size_t>(i) < told.size() && told[static_cast<size_t>(i)] >= 0 && told[static_cast<size_t>(i)] < v_;
      top.ids[i] = is_there ? told[static_cast<size_t>(i)] : -1;
      top.logprobs[i] = is_there ? logprob(top.ids[i]) : kNan;
    }
  }

  void list_likeliest(const TopOut& top) {
    const int32_t n = static_cast<int32_t>(std::min<int64_t>(top.n_top, v_));
    if (n == 0) return;
    constexpr int32_t kFew = 64;
    if (n <= kFew) {
      insert_likeliest(top.ids, n);
    } else {
      int32_t* ids = s_.ids_.data();
      for (int64_t i = 0; i < v_; ++i) ids[i] = static_cast<int32_t>(i);
      std::partial_sort(ids, ids + n, ids + v_, [this](int32_t a, int32_t b) { return x_[a] > x_[b] || (x_[a] == x_[b] && a < b); });
      std::copy_n(ids, n, top.ids);
    }
    for (int32_t i = 0; i < n; ++i) top.logprobs[i] = logprob(top.ids[i]);
    for (int32_t i = n; i < top.n_top; ++i) {
      top.ids[i] = -1;
      top.logprobs[i] = kNan;
    }
  }

  // Insertion into a sorted list: a later id only enters when strictly greater, so ties stay in order of id.
  void insert_likeliest(int32_t* ids, int32_t n) {
    int32_t held = 0;
    for (int64_t i = 0; i < v_; ++i) {
      if (held == n) {
        // Whole blocks below the list's last entry are passed over.
        while (i % kBlock == 0 && i + kBlock <= v_ && !(largest_of_block(x_ + i) > x_[ids[n - 1]])) i += kBlock;
        if (i >= v_ || !(x_[i] > x_[ids[n - 1]])) continue;
      }
      int32_t at = held < n ? held++ : n - 1;
      for (; at > 0 && x_[i] > x_[ids[at - 1]]; --at) ids[at] = ids[at - 1];
      ids[at] = static_cast<int32_t>(i);
    }
  }

  const float* x_;
  const int64_t v_;
  SamplerScratch& s_;
  double largest_ = 0.0;
  double log_total_ = 0.0;
};

namespace {

SampleOut told_of(int32_t token, const SamplerParams& params, const SampleRow& row, SamplerScratch& scratch, const TopOut* top) {
  if (top == nullptr) return {token, kNan, 0};
  if (token < 0) return RowScorer::nothing(token, *top);
  return RowScorer(row.logits, scratch).score(token, *top, params.told_ids);
}

} // namespace

SampleOut sample_row(const SamplerParams& params, const SampleRow& row, SamplerScratch& scratch, const TopOut* top) {
  return told_of(RowSampler(params, row, scratch).token(), params, row, scratch, top);
}

bool chances_of(const SamplerParams& params, const SampleRow& row, SamplerScratch& scratch, std::span<const int32_t> ids,
                std::span<double> p) {
  return RowSampler(params, row, scratch).chances(ids, p);
}

SampleOut sample_residual(const SamplerParams& params, const SampleRow& row, SamplerScratch& scratch, const DraftOdds& odds, double joint,
                          const TopOut* top) {
  return told_of(RowSampler(params, row, scratch).residual(odds, joint), params, row, scratch, top);
}

SampleOut score_row(std::span<const float> logits, int32_t token, SamplerScratch& scratch, const TopOut& top,
                    std::span<const int32_t> told) {
  return RowScorer(logits, scratch).score(token, top, told);
}

} // namespace tiercel
