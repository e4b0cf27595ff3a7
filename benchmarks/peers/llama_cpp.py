"""llama-cpp-python on a .gguf file.

One request alone goes through `Llama.generate`, the package's own door; several through its batch calls, with all of
them decoded together, prompts in pieces of `N_BATCH` tokens, which is how llama.cpp's own server batches.
"""
# ruff: noqa: D101, D102 (loop.py says what each part is)

import time

PACKAGES = ("llama-cpp-python", "numpy")
N_BATCH = 512


class Engine:
    def __init__(self, model, n_threads, max_len_tokens, max_num_seqs):
        import llama_cpp

        self.lib = llama_cpp
        n_ctx = -(-(max_len_tokens + 1) // 256) * 256
        self.llm = llama_cpp.Llama(
            model, n_ctx=n_ctx, n_threads=n_threads, n_threads_batch=n_threads, n_batch=N_BATCH, verbose=False
        )
        self.n_ctx, self.n_threads, self.max_num_seqs = n_ctx, n_threads, max_num_seqs
        self.many = None
        self.config = {
            "n_ctx": n_ctx,
            "n_threads": n_threads,
            "n_batch": N_BATCH,
            "n_seq_max": max_num_seqs,
            "system_info": llama_cpp.llama_print_system_info().decode(),
        }

    def first_text(self, prompt):
        return self.llm.create_completion(prompt, max_tokens=1, temperature=0.0)["choices"][0]["text"]

    def generate(self, requests):
        if len(requests) == 1:
            return self.generate_one(*requests[0])
        return self.generate_many(requests)

    def generate_one(self, token_ids, max_tokens):
        start_s = time.perf_counter()
        # Without it, the beginning it shares with the prompt before would not be computed again.
        self.llm.reset()
        found, first_s = [], None
        for token in self.llm.generate(token_ids, temp=0.0, repeat_penalty=1.0):
            if first_s is None:
                first_s = time.perf_counter() - start_s
            found.append(token)
            if len(found) == max_tokens:
                break
        return [found], [first_s]

    def generate_many(self, requests):
        import numpy as np

        done, first_s, start_s = [[] for _ in requests], [None] * len(requests), time.perf_counter()
        context = self.open_many()
        n_vocab = self.llm.n_vocab()
        batch = self.lib.llama_batch_init(max(N_BATCH, self.max_num_seqs), 0, 1)
        at = [0] * len(requests)  # tokens of each request that are computed
        try:
            while any(len(done[i]) < n for i, (_, n) in enumerate(requests)):
                batch.n_tokens = 0
                rows = {}
                for i, (prompt, n) in enumerate(requests):
                    if at[i] >= len(prompt) and len(done[i]) < n:
                        rows[i] = self.put(batch, done[i][-1], at[i], i, True)
                        at[i] += 1
                for i, (prompt, _) in enumerate(requests):
                    while at[i] < len(prompt) and i not in rows and batch.n_tokens < N_BATCH:
                        is_last = at[i] == len(prompt) - 1
                        row = self.put(batch, prompt[at[i]], at[i], i, is_last)
                        at[i] += 1
                        if is_last:
                            rows[i] = row
                if self.lib.llama_decode(context, batch) != 0:
                    raise RuntimeError("llama_decode failed")
                for i, row in rows.items():
                    logits = np.ctypeslib.as_array(self.lib.llama_get_logits_ith(context, row), shape=(n_vocab,))
                    done[i].append(int(np.argmax(logits)))
                    first_s[i] = first_s[i] or time.perf_counter() - start_s
        finally:
            self.lib.llama_batch_free(batch)
        return done, first_s

    def put(self, batch, token, position, sequence, wants_logits):
        row = batch.n_tokens
        batch.token[row], batch.pos[row], batch.n_seq_id[row] = token, position, 1
        batch.seq_id[row][0], batch.logits[row] = sequence, wants_logits
        batch.n_tokens = row + 1
        return row

    def open_many(self):
        """Return a context for all requests at once, empty."""
        if self.many is None:
            params = self.lib.llama_context_default_params()
            params.n_ctx = self.n_ctx * self.max_num_seqs
            params.n_batch = params.n_ubatch = max(N_BATCH, self.max_num_seqs)
            params.n_seq_max = self.max_num_seqs
            params.n_threads = params.n_threads_batch = self.n_threads
            make = getattr(self.lib, "llama_init_from_model", None) or self.lib.llama_new_context_with_model
            self.many = make(self.llm.model, params)
            if not self.many:
                raise RuntimeError("no context of that size")
        if hasattr(self.lib, "llama_memory_clear"):
            self.lib.llama_memory_clear(self.lib.llama_get_memory(self.many), True)
        else:
            self.lib.llama_kv_self_clear(self.many)
        return self.many
