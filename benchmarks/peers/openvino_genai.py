"""OpenVINO GenAI's continuous batching, on a folder it exported (int8 is its best format on a CPU)."""
# ruff: noqa: D101, D102 (loop.py says what each part is)

PACKAGES = ("openvino-genai", "openvino", "numpy")


class Engine:
    def __init__(self, model, n_threads, max_len_tokens, max_num_seqs):
        import numpy
        import openvino
        import openvino_genai

        self.genai, self.openvino, self.numpy = openvino_genai, openvino, numpy
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = max(max_num_seqs, 1)
        scheduler.enable_prefix_caching = False
        scheduler.cache_size = 1
        self.pipe = openvino_genai.ContinuousBatchingPipeline(
            model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": n_threads}
        )
        self.config = {"n_threads": n_threads, "max_num_seqs": scheduler.max_num_seqs, "cache_size_gib": 1}

    def first_text(self, prompt):
        tokenizer = self.pipe.get_tokenizer()
        ids = tokenizer.encode(prompt).input_ids.data[0].tolist()
        return tokenizer.decode(self.generate([(ids, 1)])[0][0])

    def generate(self, requests):
        configs = []
        for _, n in requests:
            config = self.genai.GenerationConfig()
            config.max_new_tokens = config.min_new_tokens = n
            config.ignore_eos = True
            config.do_sample = False
            configs.append(config)
        prompts = [self.openvino.Tensor(self.numpy.array([ids], dtype=self.numpy.int64)) for ids, _ in requests]
        results = self.pipe.generate(prompts, configs)
        return [list(one.m_generation_ids[0]) for one in results], None
