#include "tiercel/suffix_tree.hpp"

#include <algorithm>
#include <cmath>

namespace tiercel {

namespace {

constexpr uint64_t kFree = ~uint64_t{0};

uint64_t key_of(int32_t node, int32_t token) {
  return static_cast<uint64_t>(static_cast<uint32_t>(node)) << 32 | static_cast<uint32_t>(token);
}

size_t hash(uint64_t key) { // the finaliser of SplitMix64
  key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9u;
  key = (key ^ (key >> 27)) * 0x94D049BB133111EBu;
  return static_cast<size_t>(key ^ (key >> 31));
}

} // namespace

SuffixTree::SuffixTree(int32_t max_depth, int64_t max_bytes)
    : max_depth_(max_depth), max_bytes_(max_bytes), nodes_(1), keys_(64, kFree), values_(64, -1) {}

int32_t SuffixTree::begin() {
  texts_.push_back({{}, std::vector<int32_t>(static_cast<size_t>(max_depth_), -1)});
  texts_.back().at[0] = 0;
  return static_cast<int32_t>(texts_.size()) - 1;
}

int64_t SuffixTree::bytes() const {
  const auto n_texts = static_cast<int64_t>(texts_.size());
  return static_cast<int64_t>(nodes_.capacity() * sizeof(Node)) + static_cast<int64_t>(keys_.size()) * 12 + n_tokens_ * 4 +
         n_texts * (int64_t{max_depth_} * 4 + static_cast<int64_t>(sizeof(Text)));
}

int32_t SuffixTree::child(int32_t node, int32_t token) const {
  const uint64_t key = key_of(node, token);
  for (size_t i = hash(key) & (keys_.size() - 1);; i = (i + 1) & (keys_.size() - 1)) {
    if (keys_[i] == key) return values_[i];
    if (keys_[i] == kFree) return -1;
  }
}

void SuffixTree::grow() {
  std::vector<uint64_t> keys(keys_.size() * 2, kFree);
  std::vector<int32_t> values(keys.size(), -1);
  for (size_t old = 0; old < keys_.size(); ++old) {
    if (keys_[old] == kFree) continue;
    size_t i = hash(keys_[old]) & (keys.size() - 1);
    while (keys[i] != kFree) i = (i + 1) & (keys.size() - 1);
    keys[i] = keys_[old], values[i] = values_[old];
  }
  keys_.swap(keys), values_.swap(values);
}

int32_t SuffixTree::add_child(int32_t node, int32_t token, int32_t text, int32_t next) {
  if (nodes_.size() * 4 > keys_.size() * 3) grow();
  const uint64_t key = key_of(node, token);
  size_t i = hash(key) & (keys_.size() - 1);
  while (keys_[i] != kFree) i = (i + 1) & (keys_.size() - 1);
  const auto made = static_cast<int32_t>(nodes_.size());
  keys_[i] = key, values_[i] = made;
  nodes_.push_back({token, 0, 0, -1, text, next});
  count_up(node, made);
  return made;
}

void SuffixTree::count_up(int32_t parent, int32_t node) {
  const int32_t count = ++nodes_[static_cast<size_t>(node)].count;
  ++nodes_[static_cast<size_t>(parent)].n_followed;
  int32_t& best = nodes_[static_cast<size_t>(parent)].best;
  if (best < 0 || count > nodes_[static_cast<size_t>(best)].count) best = node;
}

bool SuffixTree::extend(int32_t text, std::span<const int32_t> tokens) {
  std::vector<int32_t> moved(static_cast<size_t>(max_depth_));
  for (const int32_t token : tokens) {
    if (bytes() > max_bytes_) return false;
    texts_[static_cast<size_t>(text)].tokens.push_back(token);
    ++n_tokens_;
    const auto next = static_cast<int32_t>(texts_[static_cast<size_t>(text)].tokens.size());
    std::fill(moved.begin(), moved.end(), -1);
    moved[0] = 0;
    ++nodes_[0].count;
    for (int32_t d = 0; d < max_depth_; ++d) {
      const int32_t node = texts_[static_cast<size_t>(text)].at[static_cast<size_t>(d)];
      if (node < 0) continue;
      const bool is_deepest = d + 1 == max_depth_;
      const int32_t found = child(node, token);
      if (found < 0) {
        add_child(node, token, text, next);
        continue;
      }
      count_up(node, found);
      Node& here = nodes_[static_cast<size_t>(found)];
      if (is_deepest) {
        here.text = text, here.next = next;
        continue;
      }
      if (here.is_leaf()) {
        // The run that came once before is taken apart: it goes on below, or it stands at the end of its text and goes on from here.
        const int32_t other = here.text, after = here.next;
        here.text = here.next = -1;
        Text& its = texts_[static_cast<size_t>(other)];
        if (after < static_cast<int32_t>(its.tokens.size()))
          add_child(found, its.tokens[static_cast<size_t>(after)], other, after + 1);
        else
          its.at[static_cast<size_t>(d + 1)] = found;
      }
      moved[static_cast<size_t>(d + 1)] = found;
    }
    texts_[static_cast<size_t>(text)].at = moved;
  }
  return true;
}

SuffixTree::Place SuffixTree::find(std::span<const int32_t> run) const {
  int32_t node = 0;
  for (size_t i = 0; i < run.size(); ++i) {
    const Node& here = nodes_[static_cast<size_t>(node)];
    if (here.is_leaf()) { // the rest of the run is looked for in its text
      const auto& text = texts_[static_cast<size_t>(here.text)].tokens;
      const auto n = static_cast<int64_t>(run.size() - i);
      if (static_cast<int64_t>(text.size()) - here.next < n ||
          !std::equal(run.begin() + static_cast<int64_t>(i), run.end(), text.begin() + here.next))
        return {};
      return {node, here.next + static_cast<int32_t>(n)};
    }
    node = child(node, run[i]);
    if (node < 0) return {};
  }
  return {node, nodes_[static_cast<size_t>(node)].next};
}

void SuffixTree::follow(Place place, int32_t n_max, double min_probability, Continuation& out) const {
  double p = 1.0;
  while (static_cast<int32_t>(out.tokens.size()) < n_max) {
    const Node& here = nodes_[static_cast<size_t>(place.node)];
    int32_t token = 0;
    if (here.is_leaf()) {
      const auto& text = texts_[static_cast<size_t>(here.text)].tokens;
      if (place.next >= static_cast<int32_t>(text.size())) return;
      token = text[static_cast<size_t>(place.next++)];
    } else {
      if (here.best < 0) return;
      const Node& then = nodes_[static_cast<size_t>(here.best)];
      p *= static_cast<double>(then.count) / here.n_followed;
      token = then.token;
      place = {here.best, then.next};
    }
    if (p < min_probability) return;
    out.tokens.push_back(token);
    out.probabilities.push_back(p);
    out.score += p;
  }
}

Continuation SuffixTree::propose(std::span<const int32_t> context, int32_t n_max, double factor, double min_probability) const {
  Continuation best;
  const auto longest = static_cast<int32_t>(std::min<size_t>(context.size(), static_cast<size_t>(max_depth_)));
  for (int32_t m = 1; m <= longest; ++m) {
    const Place place = find(context.last(static_cast<size_t>(m)));
    if (place.node < 0) break; // a longer run has not come either
    Continuation found;
    found.n_matched = m;
    const auto limit = static_cast<int32_t>(std::floor(m * factor + 1e-6));
    follow(place, std::min(n_max, limit), min_probability, found);
    if (!found.tokens.empty() && found.score >= best.score) best = std::move(found);
  }
  return best;
}

int64_t SuffixTree::count(std::span<const int32_t> run) const {
  const Place place = find(run);
  return place.node < 0 ? 0 : nodes_[static_cast<size_t>(place.node)].count;
}

} // namespace tiercel
