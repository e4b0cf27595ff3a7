// How much scratch attention wants. The kernels cut shared scratch into equal parts, one a thread
// (kernels/attention_plan.hpp).
#include "kernels/attention_layout.hpp"
#include "tiercel/kernels.hpp"

namespace tiercel {

int64_t kv_run_bytes(KvType type, int32_t head_dim) { return run_bytes(type, head_dim); }

int64_t latent_run_bytes(KvType type, int32_t width) { return latent_bytes(type, width); }

int64_t attention_thread_bytes(int32_t n_heads, int32_t n_kv_heads, int32_t head_dim) {
  return thread_floats(n_heads / n_kv_heads, head_dim) * static_cast<int64_t>(sizeof(float));
}

// A thread's part holds the unmerged splits of one query, plus the running results of one block. n_heads stands for the
// heads of one group, which is not known here: more room lets a few queries of one sequence (drafted tokens) be shared
// by all threads too. max_seqs does not matter: at most one sequence a thread is left unmerged.
int64_t attention_shared_bytes(int32_t n_heads, int32_t head_dim, int64_t max_seqs, int64_t max_len, int32_t n_threads) {
  (void)max_seqs;
  const int64_t n_splits = (max_len + kSplitTokens - 1) / kSplitTokens;
  const int64_t part = n_splits * record_floats(n_heads, head_dim) + record_floats(block_rows(n_heads), head_dim);
  return n_threads * pad16(part) * static_cast<int64_t>(sizeof(float));
}

// Sixteen tokens' queries, keys and decays, and their betas: see kernels/recurrent.cpp.
int64_t delta_rule_thread_bytes(int64_t key_dim) { return 16 * (3 * ((key_dim + 15) / 16 * 16) + 1) * 4; }

int64_t delta_layer_thread_bytes(int64_t key_dim, int64_t value_dim, int64_t group) {
  return delta_rule_thread_bytes(key_dim) + 16 * (2 * key_dim + (group + 1) * value_dim) * 4;
}

int64_t trial_thread_bytes(int64_t key_dim, int64_t value_dim, int64_t heads) {
  return heads * key_dim * ((value_dim + 15) / 16 * 16) * static_cast<int64_t>(sizeof(float));
}

// Sixteen tokens' steps and decays, and of each the 32 columns of its input and its output: see kernels/ssd.cpp.
int64_t ssd_thread_bytes() { return 16 * (2 + 2 * 32) * 4; }

// Keys of one head, transposed, and the scores of a tile of four rows; both for a whole number of vectors of tokens.
int64_t sequence_attention_thread_bytes(int32_t head_dim, int64_t max_tokens) {
  const int64_t n = (max_tokens + 31) / 32 * 32;
  return (n * head_dim + 4 * n) * static_cast<int64_t>(sizeof(float));
}

} // namespace tiercel
