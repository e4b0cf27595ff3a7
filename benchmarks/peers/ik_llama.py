"""ik_llama.cpp on a .gguf file, with run-time repacking: a fork of llama.cpp whose strength is CPUs.

The package's own door makes a batch for each token; here its C calls are used, as for `llama_cpp` with several
requests: all of them decoded together, prompts in pieces of `N_BATCH` tokens.
"""
# ruff: noqa: D101, D102 (loop.py says what each part is)

import time

PACKAGES = ("ik-llama-cpp-python", "numpy")
N_BATCH = 512


class Engine:
    def __init__(self, model, n_threads, max_len_tokens, max_num_seqs):
        from ik_llama_cpp import _ctypes_api as lib

        self.lib = lib
        lib.llama_backend_init()
        params = lib.llama_model_default_params()
        params.n_gpu_layers = 0
        # Tensors that are repacked cannot stay in the map.
        params.use_mmap, params.repack_tensors = False, True
        self.model = lib.llama_model_load_from_file(str(model).encode(), params)
        if not self.model:
            raise RuntimeError("the model was not loaded")
        self.n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        params = lib.llama_context_default_params()
        params.n_ctx = -(-(max_len_tokens + 1) // 256) * 256 * max(max_num_seqs, 1)
        params.n_batch = params.n_ubatch = max(N_BATCH, max_num_seqs)
        params.n_seq_max = max(max_num_seqs, 1)
        params.n_threads = params.n_threads_batch = n_threads
        params.flash_attn = True
        self.context = lib.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError("no context of that size")
        self.batch = lib.llama_batch_init(params.n_batch, 0, 1)
        self.config = {
            "n_ctx": params.n_ctx,
            "n_threads": n_threads,
            "n_batch": params.n_batch,
            "n_seq_max": params.n_seq_max,
            "repack_tensors": True,
            "flash_attn": True,
        }

    def first_text(self, prompt):
        import ctypes

        text = prompt.encode()
        ids = (self.lib.llama_token * (len(text) + 8))()
        n = self.lib.llama_tokenize(self.model, text, len(text), ids, len(ids), True, False)
        piece = ctypes.create_string_buffer(256)
        token = self.generate([(list(ids[:n]), 1)])[0][0][0]
        return piece.raw[: self.lib.llama_token_to_piece(self.model, token, piece, 256, 0, False)].decode()

    def generate(self, requests):
        import numpy as np

        done, first_s, start_s = [[] for _ in requests], [None] * len(requests), time.perf_counter()
        self.lib.llama_kv_cache_clear(self.context)
        batch = self.batch
        at = [0] * len(requests)  # tokens of each request that are computed
        while any(len(done[i]) < n for i, (_, n) in enumerate(requests)):
            batch.n_tokens = 0
            rows = {}
            for i, (prompt, n) in enumerate(requests):
                if at[i] >= len(prompt) and len(done[i]) < n:
                    rows[i] = self.put(done[i][-1], at[i], i, True)
                    at[i] += 1
            for i, (prompt, _) in enumerate(requests):
                while at[i] < len(prompt) and i not in rows and batch.n_tokens < N_BATCH:
                    is_last = at[i] == len(prompt) - 1
                    row = self.put(prompt[at[i]], at[i], i, is_last)
                    at[i] += 1
                    if is_last:
                        rows[i] = row
            if self.lib.llama_decode(self.context, batch) != 0:
                raise RuntimeError("llama_decode failed")
            for i, row in rows.items():
                logits = np.ctypeslib.as_array(self.lib.llama_get_logits_ith(self.context, row), shape=(self.n_vocab,))
                done[i].append(int(np.argmax(logits)))
                first_s[i] = first_s[i] or time.perf_counter() - start_s
        return done, first_s

    def put(self, token, position, sequence, wants_logits):
        batch, row = self.batch, self.batch.n_tokens
        batch.token[row], batch.pos[row], batch.n_seq_id[row] = token, position, 1
        batch.seq_id[row][0], batch.logits[row] = sequence, wants_logits
        batch.n_tokens = row + 1
        return row
