"""transformers on torch's CPU backend, from a folder of safetensors; several requests as one padded group."""
# ruff: noqa: D101, D102 (loop.py says what each part is)

import time

PACKAGES = ("transformers", "torch")


class Engine:
    def __init__(self, model, n_threads, max_len_tokens, max_num_seqs):
        import torch
        import transformers

        torch.set_num_threads(n_threads)
        self.torch = torch
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype="auto", local_files_only=True
        ).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(model, local_files_only=True)
        self.config = {"n_threads": n_threads, "dtype": str(self.model.dtype)}

    def first_text(self, prompt):
        ids = self.tokenizer(prompt)["input_ids"]
        return self.tokenizer.decode(self.generate([(ids, 1)])[0][0])

    def generate(self, requests):
        start_s = time.perf_counter()
        done = [None] * len(requests)
        first_s = [None] * len(requests)
        # Requests of one shape go together: padding would change what is computed.
        shapes = {}
        for i, (ids, n) in enumerate(requests):
            shapes.setdefault((len(ids), n), []).append(i)
        with self.torch.inference_mode():
            for (_, n), group in shapes.items():
                ids = self.torch.tensor([requests[i][0] for i in group])
                past, found = None, []
                for _ in range(n):
                    out = self.model(ids, past_key_values=past, use_cache=True, logits_to_keep=1)
                    past, ids = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
                    found.append(ids[:, 0].tolist())
                    if len(found) == 1:
                        for i in group:
                            first_s[i] = time.perf_counter() - start_s
                for column, i in enumerate(group):
                    done[i] = [row[column] for row in found]
        return done, first_s
