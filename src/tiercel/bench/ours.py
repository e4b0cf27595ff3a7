"""Our engine as a contestant: `LLM` in this process, prompts as token ids, greedy, to the asked length."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from tiercel.bench import machine
from tiercel.bench.contest import Competitor, Request, Run
from tiercel.bench.rows import OURS


class LocalEngine(Competitor, Protocol):
    """What a benchmark needs of ours beyond competing."""

    model_name: str
    model_path: Path
    vocab_size: int
    n_threads: int
    level: str
    kv_token_bytes: int
    weight_bytes: int

    def encode(self, text: str) -> list[int]:
        """Return a text's token ids, as a prompt has them."""
        ...

    def time_kernels(self) -> None:
        """From now on, let each run tell the time of the kernels in it. Costs two looks at the clock for each op."""
        ...

    def close(self) -> None:
        """End the engine."""
        ...


class OurEngine:
    """A `LLM` that competes. Owns it; `close` ends it."""

    name = OURS

    def __init__(self, llm: Any) -> None:
        from tiercel.ops.lowered import LinearGroup, weights_of
        from tiercel.runner.native import chosen_level

        plan = llm.engine.plan
        self._llm = llm
        self._runner = llm.engine.runner
        self._is_timed = False
        self.level = chosen_level()
        self.kv_token_bytes: int = plan.capacity.page_bytes // plan.capacity.page_size_tokens
        # What a step reads of them all; an embedding gives a row of itself.
        self.weight_bytes: int = sum(
            weight.nbytes for op in self._runner.program.ops if isinstance(op, LinearGroup) for weight in weights_of(op)
        )
        self.model_name: str = plan.resolved.display_name
        self.model_path: Path = plan.resolved.path
        self.vocab_size: int = plan.info.vocab_size
        self.n_threads: int = plan.n_threads
        self.versions: Mapping[str, str] = machine.versions(("numpy", "tokenizers"))
        self.config: Mapping[str, Any] = {
            **dataclasses.asdict(plan.options),
            "model": self.model_name,
            "weights_digest": plan.checkpoint.digest(),
            "kv_cache_dtype": plan.kv_dtype,
            "threads": plan.n_threads,
            "isa": self.level,
            "capacity": msgspec.structs.asdict(plan.capacity),
        }

    def encode(self, text: str) -> list[int]:
        """See `LocalEngine.encode`."""
        return list(self._llm.get_tokenizer().encode(text))

    def ask(self, text: str) -> list[int]:
        """Return a question's token ids, as the model expects to be asked."""
        if not self._llm.has_chat_template:
            return self.encode(text)
        messages = [{"role": "user", "content": text}]
        return list(self._llm.engine.conversations.prompt(messages)["prompt_token_ids"])

    def generate(self, requests: Sequence[Request]) -> Run:
        """See `Competitor.generate`."""
        from tiercel.protocol.params import SamplingParams
        from tiercel.protocol.structured import StructuredOutputsParams

        prompts = [{"prompt_token_ids": list(one.token_ids)} for one in requests]
        # No detokenizer: peers are asked for token ids too.
        params = [
            SamplingParams(
                temperature=0.0,
                max_tokens=one.max_tokens,
                ignore_eos=not one.may_end,
                detokenize=False,
                structured_outputs=None if one.schema is None else StructuredOutputsParams(json=one.schema),
            )
            for one in requests
        ]
        if self._is_timed:
            self._runner.take_op_ns()  # those of the run before
        start_s = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        elapsed_s = time.perf_counter() - start_s
        # Its last output is there, so no step is under way and the kernels' times may be read.
        kernel_s = sum(ns for _, ns in self._runner.take_op_ns()) / 1e9 if self._is_timed else None
        firsts = [_first_token_s(one.metrics) for one in outputs]
        known = [first for first in firsts if first is not None]
        return Run(
            tuple(tuple(one.outputs[0].token_ids) for one in outputs),
            elapsed_s,
            tuple(known) if len(known) == len(firsts) else None,
            kernel_s,
            _decode_s([one.metrics for one in outputs]),
        )

    def time_kernels(self) -> None:
        """See `LocalEngine.time_kernels`."""
        self._runner.set_timing(on=True)
        self._is_timed = True

    def close(self) -> None:
        """See `LocalEngine.close`."""
        self._llm.close()


def _first_token_s(metrics: Any) -> float | None:
    return None if metrics is None or metrics.first_token_s is None else metrics.first_token_s - metrics.arrival_s


def _decode_s(metrics: Sequence[Any]) -> tuple[float, ...] | None:
    known = [one for one in metrics if one is not None and one.last_token_s is not None]
    found = tuple(one.last_token_s - one.first_token_s for one in known)
    return found if len(found) == len(metrics) and all(one > 0.0 for one in found) else None


def open_engine(model: str | None, options: Mapping[str, Any]) -> LocalEngine:
    """Load `model`, with the options of `with_defaults`."""
    from tiercel.llm.llm import LLM

    return OurEngine(LLM(model, **with_defaults(options)))


def with_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine's options as a benchmark means them.

    Unless they say otherwise, repeated prompts are computed, and every token takes a step of its own, as peers' do.
    """
    defaults: dict[str, Any] = {"enable_prefix_caching": False}
    if not options.get("speculative_config"):
        defaults["speculative"] = "off"
    return {**defaults, **options}


def option_words(options: Mapping[str, Any]) -> list[str]:
    """Return the engine's options as flags of a command line."""
    words = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", str(value)]
    return words
