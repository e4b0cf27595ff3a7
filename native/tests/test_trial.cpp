// Rows on trial: every recurrent op, over sequences of which some are tried. What counts are the bytes of the states and of the outputs.
#include <cstring>
#include <memory>
#include <random>

#include "check.hpp"
#include "tiercel/program.hpp"

namespace tiercel {
namespace {

constexpr int64_t kSlots = 5, kRows = 40, kKeyHeads = 2, kHeads = 4, kKeyDim = 20, kValueDim = 24, kWidth = 4;
constexpr int64_t kChannels = 2 * kKeyHeads * kKeyDim + kHeads * kValueDim, kValues = kHeads * kValueDim;
constexpr int64_t kGroups = 2, kStateDim = 16, kXbc = kValues + 2 * kGroups * kStateDim;
constexpr int64_t kWindowBytes = (kWidth - 1) * kChannels * 4, kMatrixBytes = kHeads * kKeyDim * 32 * 4;
constexpr int64_t kSsdBytes = kHeads * kStateDim * 32 * 4;
constexpr int64_t kSlotBytes = 2 * (kWindowBytes + kMatrixBytes) + kSsdBytes;

std::vector<float> random_floats(int64_t n, uint32_t seed) {
  std::mt19937 rng(seed);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  std::vector<float> x(static_cast<size_t>(n));
  for (float& v : x) v = uniform(rng);
  return x;
}

// One sequence's rows of a step.
struct Part {
  int32_t slot, start, n;
  int32_t n_right = -1; // of a sequence on trial
};

// All recurrent ops side by side, on inputs that a test writes.
class Rig {
 public:
  Rig(int32_t n_threads, bool is_per_channel, int64_t n_trial_rows)
      : team_(n_threads, {}), program_(kernel_level(n_kernel_levels() - 1), n_threads) {
    const int64_t gates = is_per_channel ? kHeads * kKeyDim : kHeads;
    const auto conv = [&](int64_t state_offset) {
      return op::ShortConv{input(kChannels),  kChannels,   kWidth, random_floats(kWidth * kChannels, 1), random_floats(kChannels, 2), true,
                           output(kChannels), state_offset};
    };
    const auto rule = [&](int64_t state_offset) {
      return op::DeltaRule{
          input(kChannels),        input(gates), input(kHeads),   kKeyHeads,   kHeads, kKeyDim, kValueDim, 0.0f, random_floats(kHeads, 3),
          random_floats(gates, 4), 1e-6f,        output(kValues), state_offset};
    };
    const auto norm = [&] {
      return op::GatedNorm{output(kValues), input(kValues), false,          kHeads, kValueDim, random_floats(kValueDim, 5),
                           1e-6f,           false,          output(kValues)};
    };
    int64_t at = 0;
    program_.add({Rows::Tokens, conv(at)});
    program_.add({Rows::Tokens, rule(at += kWindowBytes)});
    op::DeltaLayer layer{conv(at += kMatrixBytes), rule(at + kWindowBytes), norm()};
    program_.add({Rows::Tokens, std::move(layer)});
    at += kWindowBytes + kMatrixBytes;
    program_.add(
        {Rows::Tokens, op::Ssd{input(kXbc), input(kHeads), kHeads, kValueDim, kGroups, kStateDim, 0.0f, 10.0f, random_floats(kHeads, 6),
                               random_floats(kHeads, 7), random_floats(kHeads, 8), output(kValues), at}});
    program_.seal(end_, KvPool{}, BufferRef{0, 4}, 1, kRows, kRows, kSlots, kRows, kSlotBytes, n_trial_rows);
    // What lies in slots before their sequences begin is not read.
    std::memset(program_.states(), 0x7f, static_cast<size_t>(kSlotBytes * kSlots));
  }

  // Runs the parts; row r of a part has the inputs of its slot's position start + r. Leaves the trial open.
  void replay(const std::vector<Part>& parts) {
    slot_.clear(), start_.clear(), rows_.assign(1, 0), trial_.clear();
    int32_t n_trial = 0;
    bool is_tried = false;
    for (const Part& p : parts) {
      for (const auto& [ref, width] : inputs_)
        for (int32_t i = 0; i < p.n; ++i) {
          const auto x = random_floats(width, static_cast<uint32_t>(ref.offset + 1000 * p.slot + p.start + i));
          std::memcpy(program_.arena() + ref.offset + (rows_.back() + i) * ref.stride_bytes, x.data(), x.size() * 4);
        }
      slot_.push_back(p.slot), start_.push_back(p.start), rows_.push_back(rows_.back() + p.n);
      trial_.push_back(p.n_right >= 0 ? n_trial : -1);
      if (p.n_right >= 0) n_trial += p.n, is_tried = true;
    }
    view_ = {};
    view_.n_tokens = rows_.back(), view_.n_seqs = static_cast<int32_t>(parts.size());
    view_.seq_slot = slot_.data(), view_.seq_start = start_.data(), view_.seq_rows = rows_.data();
    view_.seq_trial = is_tried ? trial_.data() : nullptr;
    team_.run(
        [](void* arg, int32_t thread) {
          auto* rig = static_cast<Rig*>(arg);
          rig->program_.replay(rig->view_, thread, rig->team_);
        },
        this);
  }

  void advance(std::vector<int32_t> first, std::vector<int32_t> count) {
    first_ = std::move(first), count_ = std::move(count);
    team_.run(
        [](void* arg, int32_t thread) {
          auto* rig = static_cast<Rig*>(arg);
          rig->program_.advance(rig->view_, {rig->first_.data(), rig->count_.data()}, thread, rig->team_);
        },
        this);
  }

  std::vector<uint8_t> state(int32_t slot) const {
    const uint8_t* begin = program_.states() + slot * kSlotBytes;
    return {begin, begin + kSlotBytes};
  }

  // What a row of the step gave, all ops' outputs one behind the other, but those that are no buffers.
  std::vector<float> row(int32_t r) const {
    std::vector<float> all;
    for (size_t i = 0; i < outputs_.size(); ++i) {
      if (i == 2 || i == 3 || i == 4) continue; // between the parts of the delta layer
      const auto& [ref, width] = outputs_[i];
      const auto* y = reinterpret_cast<const float*>(program_.arena() + ref.offset + r * ref.stride_bytes);
      all.insert(all.end(), y, y + width);
    }
    return all;
  }

 private:
  BufferRef place(int64_t width) {
    const BufferRef ref{end_, (width * 4 + 63) / 64 * 64};
    end_ += ref.stride_bytes * kRows;
    return ref;
  }
  BufferRef input(int64_t width) { return inputs_.emplace_back(place(width), width).first; }
  BufferRef output(int64_t width) { return outputs_.emplace_back(place(width), width).first; }

  Team team_;
  Program program_;
  int64_t end_ = 0;
  std::vector<std::pair<BufferRef, int64_t>> inputs_, outputs_;
  std::vector<int32_t> slot_, start_, rows_, trial_, first_, count_;
  StepView view_{};
};

const std::vector<Part> kBefore = {{0, 0, 5}, {1, 0, 3}, {2, 0, 4}};
// Tried beside a plain one: more rows than a tile has, few, all wrong but the first, and from the very beginning.
const std::vector<Part> kTried = {{1, 3, 1}, {0, 5, 19, 18}, {2, 4, 3, 1}, {4, 0, 4, 3}};

} // namespace

TEST(states_go_over_the_right_rows_only_and_get_the_bytes_of_a_step_without_the_others) {
  for (const bool is_per_channel : {false, true})
    for (const int32_t n_threads : {1, 2, 3, 5}) {
      Rig plain(n_threads, is_per_channel, 0), tried(n_threads, is_per_channel, 30);
      plain.replay(kBefore), tried.replay(kBefore);
      for (int32_t slot = 0; slot < 3; ++slot) CHECK(plain.state(slot) == tried.state(slot));
      std::vector<Part> right = kTried;
      for (Part& p : right)
        if (p.n_right >= 0) p.n = p.n_right, p.n_right = -1;
      const auto before = tried.state(0), unused = tried.state(4);
      plain.replay(right), tried.replay(kTried);
      CHECK(tried.state(0) == before && tried.state(4) == unused);
      CHECK(tried.state(1) == plain.state(1));
      for (const auto& [r, same] : {std::pair{0, 0}, {1, 1}, {17, 17}, {18, 18}, {20, 19}, {23, 20}, {25, 22}})
        CHECK(tried.row(r) == plain.row(same));
      tried.advance({0, 0, 0, 0}, {1, 18, 1, 3});
      for (int32_t slot = 0; slot < kSlots; ++slot) CHECK(tried.state(slot) == plain.state(slot));
    }
}

TEST(states_may_go_over_the_right_rows_in_two_parts) {
  for (const int32_t n_threads : {1, 2, 5}) {
    Rig whole(n_threads, false, 30), halves(n_threads, false, 30);
    whole.replay(kBefore), halves.replay(kBefore);
    whole.replay(kTried), halves.replay(kTried);
    whole.advance({0, 0, 0, 0}, {1, 18, 2, 3});
    halves.advance({0, 0, 0, 0}, {1, 7, 2, 1});
    CHECK(whole.state(2) == halves.state(2) && whole.state(0) != halves.state(0));
    halves.advance({1, 7, 2, 1}, {0, 11, 0, 2});
    for (int32_t slot = 0; slot < kSlots; ++slot) CHECK(whole.state(slot) == halves.state(slot));
  }
}

TEST(the_next_step_begins_at_the_last_right_row) {
  Rig plain(2, true, 0), tried(2, true, 30);
  plain.replay(kBefore), tried.replay(kBefore);
  tried.replay({{0, 5, 6, 2}});
  tried.advance({0}, {2});
  tried.replay({{0, 7, 3, 3}});
  tried.advance({0}, {3});
  tried.replay({{0, 10, 1}});
  plain.replay({{0, 5, 6}});
  CHECK(plain.state(0) == tried.state(0));
}

} // namespace tiercel
