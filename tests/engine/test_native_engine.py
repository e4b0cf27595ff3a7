"""Design 1.1 through the whole engine on the native core, bitwise: what a request gets depends on the request alone.

Everything here compares two ways of computing the same requests: tokens, log-probabilities, ranks and the likeliest,
of generated and of prompt tokens. The plain way is each request alone in a fresh engine that does one thing at a time.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from engine_kit import Bench
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from tiercel.base.errors import ShapeError
from tiercel.engine.client import EngineClient
from tiercel.engine.config import EngineConfig
from tiercel.engine.core import EngineCore
from tiercel.models.registry import build_model
from tiercel.protocol.params import SamplingParams
from tiercel.quant.formats import Format
from tiercel.runner.capacity import Capacity
from tiercel.runner.native import NativeSettings
from tiercel.testing.fill import tiny_checkpoint
from tiercel.testing.native import float_tensors, one_sequence, sized_runner
from tiercel.testing.runner_kit import PROMPT, Driver, RunnerContract
from tiercel.testing.state_kit import StatefulRunnerContract

FIXTURES = Path(__file__).parent.parent / "model/fixtures"
MODELS = [
    ("mistral_window_8", Format.Q8_0, "float16"),
    ("gemma3_pattern_3_softcap", Format.Q4_0, "float32"),
    ("llama_odd_heads_9_3", Format.F32, "float16"),
    ("llama_odd_heads_9_3", Format.Q8_0, "int8"),
    ("qwen3_moe", Format.Q8_0, "float16"),
    ("qwen3_5", Format.Q8_0, "float16"),
    ("deepseek_v3_experts", Format.Q8_0, "float16"),
    ("qwen3_5_linear_last_tied", Format.F32, "float32"),
    ("qwen3_5_moe", Format.Q4_0, "float16"),
    ("qwen3_next", Format.Q8_0, "float32"),
    ("gpt_oss", Format.Q8_0, "float16"),
    ("ling_clamped", Format.Q8_0, "float16"),
    ("lfm2", Format.Q8_0, "float16"),
]
VOCAB = 128
MAX_LEN = 112


@dataclass(frozen=True)
class Ask:
    """A request: which prompt, and how to go on from it."""

    prompt: tuple
    params: dict = field(default_factory=dict, hash=False)
    seed: int = 7

    @property
    def key(self):
        return (self.prompt, repr(sorted(self.params.items())), self.seed)


class Session(Bench):
    """A core on a native runner, stepped by hand, that keeps everything it is told."""

    def __init__(self, model, *, runner=None, **config):
        n_tokens = config.setdefault("max_num_batched_tokens", 64) + config.get("max_draft_rows", 0)
        super().__init__(runner=model.runner(n_step_tokens=n_tokens, **(runner or {})), **config)
        self.model = model
        self.logprobs, self.prompt_logprobs, self.n_preemptions = {}, {}, 0

    def _keep(self, updates):
        super()._keep(updates)
        for update in updates:
            self.logprobs.setdefault(update.sequence_id, []).extend(update.logprobs or ())
            if update.prompt_logprobs is not None:
                self.prompt_logprobs[update.sequence_id] = list(update.prompt_logprobs)

    def ask(self, name, ask, **more):
        self.add(name, ask.prompt, seed=ask.seed, **(ask.params | more))

    def result(self, name):
        """All that is compared, as plain values: floats are equal when their bits are, as none is NaN or zero."""
        assert self.finals[name].error is None
        entries = [
            [(e.token_id, e.logprob, e.rank, list(e.top_ids), list(e.top_logprobs)) for e in found]
            for found in (self.logprobs[name], self.prompt_logprobs.get(name, ()))
        ]
        return self.tokens[name], self.finals[name].finish_reason, *entries

    def end(self):
        """Check that all is back, and close."""
        self.run()
        self.assert_idle()
        snapshot = self.core.snapshot
        self.core.shutdown()
        return snapshot


class TinyModel:
    """A program, its weights, and the results of requests that were computed the plain way."""

    def __init__(self, name, weight_format, kv_dtype):
        # A head of its own: with a tied one, such a model says one token again and again.
        config = json.loads((FIXTURES / f"{name}.json").read_text())["config"] | {"tie_word_embeddings": False}
        weights = tiny_checkpoint(config)
        planned = {}
        for key, w in weights.items():
            fits = w.ndim == 2 and w.shape[1] % weight_format.group == 0
            planned[key] = SimpleNamespace(shape=w.shape, format=weight_format if fits else Format.F32)
        self.name = name
        self.program = build_model(config).record(planned)
        self.tensors = float_tensors(weights)
        self.kv_dtype = kv_dtype
        self.alone = {}
        self.has_state = bool(self.program.state_layers)

    def __repr__(self):
        return self.name

    def runner(self, *, page_size=16, n_pages=None, n_step_tokens=64, n_threads=1, **sizes):
        n_slots, max_len = sizes.get("n_slots", 4), sizes.get("max_len", MAX_LEN)
        n_snapshots, spacing = sizes.get("n_snapshots", 24), sizes.get("spacing", page_size)
        pages = n_slots * -(-max_len // page_size) if n_pages is None else n_pages
        settings = NativeSettings(n_step_tokens, n_step_tokens, self.kv_dtype, n_threads, max_draft_rows=24)
        capacity = Capacity(page_size, 1, pages, max_len, n_slots, 0, n_snapshots, spacing)
        return sized_runner(self.program, self.tensors, capacity, settings)


@pytest.fixture(scope="module", params=MODELS, ids=lambda m: m[0])
def model(request):
    return TinyModel(*request.param)


def alone(model, ask):
    """The plain way, remembered."""
    if ask.key not in model.alone:
        session = Session(model, async_scheduling=False, enable_prefix_caching=False, max_num_seqs=1)
        session.ask("it", ask)
        session.run()
        model.alone[ask.key] = session.result("it")
        session.end()
    return model.alone[ask.key]


def words(n, seed=0):
    return tuple(np.random.default_rng(seed).integers(1, VOCAB, n).tolist())


SAMPLED = {"temperature": 0.9, "top_p": 0.95, "max_tokens": 12, "logprobs": 2}
GREEDY = {"temperature": 0.0, "max_tokens": 12, "logprobs": 3}
PENALISED = {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.3, "presence_penalty": 0.5, "max_tokens": 10}
BIASED = {"temperature": 1.0, "min_p": 0.02, "logit_bias": {5: 3.0, 9: -100.0}, "min_tokens": 3, "max_tokens": 9}
SCORED = {"temperature": 0.0, "max_tokens": 5, "logprobs": 1, "prompt_logprobs": 2}
LONG = {"temperature": 1.0, "max_tokens": 31}
SHORT = {"temperature": 0.8, "max_tokens": 1, "logprobs": 0}

# Prompts are prefixes of three texts, so that some share pages, some all but one token, and some nothing.
asks = st.builds(
    lambda text, n, params, seed: Ask(words(100, text)[:n], params, seed),
    text=st.sampled_from([0, 0, 0, 1, 2]),
    n=st.sampled_from([33, 48, 63, 32, 31, 17, 16, 15, 2, 1, 80]),
    params=st.sampled_from([LONG, SAMPLED, GREEDY, PENALISED, BIASED, SCORED, SHORT]),
    seed=st.sampled_from([0, 7, -3]),
)
engines = st.fixed_dictionaries(
    {
        "async_scheduling": st.booleans(),
        "enable_prefix_caching": st.sampled_from([True, True, False]),
        "max_num_batched_tokens": st.sampled_from([8, 64]),
        "max_num_seqs": st.sampled_from([4, 3, 2]),
        "long_prefill_token_threshold": st.sampled_from([0, 5]),
    }
)
runners = st.fixed_dictionaries(
    {
        "page_size": st.sampled_from([16, 32]),
        "n_threads": st.sampled_from([1, 2]),
        "pool_tokens": st.sampled_from([128, 160, 512]),
        "n_snapshots": st.sampled_from([1, 2, 4, 24]),
        "spacing": st.sampled_from([32, 64, 128]),
    }
)


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    requests=st.lists(asks, min_size=3, max_size=6),
    gaps=st.lists(st.integers(0, 9), min_size=6, max_size=6),
    engine=engines,
    runner=runners,
)
def test_whatever_the_engine_does_a_request_gets_its_own_bits(model, requests, gaps, engine, runner):
    size = runner["page_size"]
    runner = {k: v for k, v in runner.items() if k != "pool_tokens"} | {"n_pages": runner["pool_tokens"] // size}
    session = Session(model, runner=runner, **engine)
    for i, (ask, gap) in enumerate(zip(requests, gaps, strict=False)):
        session.ask(f"r{i}", ask)
        for _ in range(gap):
            session.step()
    session.run()
    got = [session.result(f"r{i}") for i in range(len(requests))]
    snapshot = session.end()
    event(f"preempted: {snapshot.n_total_preemptions > 0}")
    event(f"hit: {snapshot.n_total_prefix_hits_tokens > 0}")
    assert got == [alone(model, ask) for ask in requests]


@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_hit_gives_the_bits_of_a_miss(model, size, is_async):
    first = Ask(words(80), SAMPLED)
    again = [first, Ask(words(80), GREEDY), Ask(words(80)[:64], SAMPLED), Ask(words(80)[:70] + words(9, 5), PENALISED)]
    session = Session(model, runner={"page_size": size}, async_scheduling=is_async)
    session.ask("first", first)
    session.run()
    for i, ask in enumerate(again):
        session.ask(f"again{i}", ask)
        session.run()
    cached = [session.firsts[f"again{i}"].n_cached_tokens for i in range(len(again))]
    assert session.firsts["first"].n_cached_tokens == 0
    # At least one token of a prompt is always computed, as its logits are needed.
    assert cached == [79 // size * size, 79 // size * size, 63 // size * size, 70 // size * size]
    assert session.result("first") == alone(model, first)
    for i, ask in enumerate(again):
        assert session.result(f"again{i}") == alone(model, ask)
    session.end()


def test_a_hit_on_generated_tokens_gives_the_bits_of_a_miss(model):
    """A second turn: the prompt is an earlier prompt with its answer."""
    first = Ask(words(20), GREEDY | {"max_tokens": 40})
    session = Session(model)
    session.ask("first", first)
    session.run()
    second = Ask(first.prompt + tuple(session.tokens["first"]) + words(5, 8), SAMPLED)
    session.ask("second", second)
    session.run()
    assert session.firsts["second"].n_cached_tokens == 48
    assert session.result("second") == alone(model, second)
    session.end()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("caches", [False, True])
def test_a_preempted_request_gets_the_bits_of_one_that_was_not(model, is_async, caches):
    requests = [Ask(words(20, i), params | {"max_tokens": 40}) for i, params in enumerate([SAMPLED, GREEDY, PENALISED])]
    session = Session(model, runner={"n_pages": 6}, async_scheduling=is_async, enable_prefix_caching=caches)
    for i, ask in enumerate(requests):
        session.ask(f"r{i}", ask)
    session.run()
    for i, ask in enumerate(requests):
        assert session.result(f"r{i}") == alone(model, ask)
    assert any(final.n_preemptions > 0 for final in session.finals.values())
    assert session.end().n_total_preemptions > 0


def test_after_a_preemption_penalties_and_min_tokens_still_count_from_the_prompts_end(model):
    counted = {"temperature": 0.0, "frequency_penalty": 1.0, "presence_penalty": 1.0, "max_tokens": 40}
    counted |= {"stop_token_ids": list(range(0, VOCAB, 3)), "min_tokens": 30}
    requests = [Ask(words(20, i), counted) for i in range(3)]
    session = Session(model, runner={"n_pages": 6})
    for i, ask in enumerate(requests):
        session.ask(f"r{i}", ask)
    session.run()
    assert sum(final.n_preemptions > 0 for final in session.finals.values()) > 0
    for i, ask in enumerate(requests):
        assert session.result(f"r{i}") == alone(model, ask)
        assert len(session.tokens[f"r{i}"]) > 30
    session.end()


def test_a_prompt_that_is_preempted_while_it_is_scored_gets_the_same_scores(model):
    """A prompt read two tokens a step is in its middle when a stream that matters more needs its pages."""
    scored, urgent = Ask(words(64), SCORED), Ask(words(10, 1), GREEDY | {"max_tokens": 60})
    policy = {"scheduling_policy": "priority", "long_prefill_token_threshold": 2}
    session = Session(model, runner={"n_pages": 6}, **policy)
    session.ask("urgent", urgent, priority=0)
    session.ask("scored", scored, priority=5)
    session.run()
    assert session.finals["scored"].n_preemptions > 0
    assert session.result("scored") == alone(model, scored)
    assert session.result("urgent") == alone(model, urgent)
    assert len(session.prompt_logprobs["scored"]) == 63
    session.end()


@pytest.mark.parametrize("n_steps", [0, 1, 2, 4, 7])
def test_an_abort_in_the_middle_leaves_the_others_their_bits(model, n_steps):
    others = [Ask(words(30), SAMPLED), Ask(words(45, 1), GREEDY)]
    session = Session(model, max_num_batched_tokens=16)
    session.ask("r0", others[0])
    session.ask("gone", Ask(words(60, 2), SAMPLED | {"max_tokens": 50}))
    session.ask("r1", others[1])
    for _ in range(n_steps):
        session.step()
    session.core.finish(["gone"])
    session.ask("late", Ask(words(60, 2)[:50], GREEDY))  # may find pages that the aborted one left
    session.run()
    assert session.finals["gone"].finish_reason == "abort"
    for i, ask in enumerate(others):
        assert session.result(f"r{i}") == alone(model, ask)
    assert session.result("late") == alone(model, Ask(words(60, 2)[:50], GREEDY))
    session.end()


def test_a_seed_makes_the_tokens_and_another_makes_others(model):
    """Or the tests above would compare greedy tokens under other names."""
    tokens = [tuple(alone(model, Ask(words(9), SAMPLED, seed))[0]) for seed in (1, 2, 3)]
    assert len(set(tokens)) == 3
    assert len(set(tokens[0])) > 3


def make_client(model, *, n_threads=2, **config):
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "check_each_step": True}
    core = EngineCore(model.runner(n_threads=n_threads), EngineConfig(**(sizes | config)))
    client = EngineClient(core, weights_digest="w", kv_dtype=model.kv_dtype, eos_ids=())
    core.start()
    return client


def compared(output, index=0):
    """What a client sees of an output, in the form of `Session.result`."""
    found = output.outputs[index]
    return found.token_ids, found.logprobs, found.cumulative_logprob, found.finish_reason


def final(client, ask, **more):
    *_, output = client.submit(list(ask.prompt), SamplingParams(**(ask.params | {"seed": ask.seed} | more)))
    return output


def test_many_requests_on_a_thread_get_what_each_gets_alone(model):
    requests = [Ask(words(n, n % 3), params, seed=n) for n in (5, 33, 50, 51, 20, 33) for params in (SAMPLED, GREEDY)]
    client = make_client(model)
    params = [SamplingParams(**(ask.params | {"seed": ask.seed})) for ask in requests]
    for _ in range(2):  # the second time, everything hits
        outputs = dict(client.generate_many([list(ask.prompt) for ask in requests], params))
        for i, ask in enumerate(requests):
            tokens, reason, entries, _ = alone(model, ask)
            found = outputs[i].outputs[0]
            assert (found.token_ids, found.finish_reason) == (tokens, reason)
            assert [(e[t].logprob, e[t].rank) for e, t in zip(found.logprobs, tokens, strict=True)] == [
                (logprob, rank) for _, logprob, rank, *_ in entries
            ]
    client.close()
    client.core._scheduler.check_idle()


def test_n_outputs_are_those_of_n_requests_with_the_seeds_that_follow(model):
    client = make_client(model)
    ask = Ask(words(40), SAMPLED, seed=11)
    together = final(client, ask, n=3)
    for i in range(3):
        assert compared(together, i) == compared(final(client, ask, seed=11 + i))
    assert len({tuple(output.token_ids) for output in together.outputs}) == 3
    client.close()


def test_scores_of_a_prompt_are_those_of_generating_it(model):
    """Reading and writing are one arithmetic: each greedy token's log-probability is found again in the prompt."""
    client = make_client(model)
    ask = Ask(words(12), GREEDY | {"max_tokens": 30, "logprobs": 0})
    written = final(client, ask).outputs[0]
    again = Ask(ask.prompt + tuple(written.token_ids), SCORED | {"prompt_logprobs": 0})
    scores = final(client, again).prompt_logprobs[len(ask.prompt) :]
    assert [score[t].logprob for score, t in zip(scores, written.token_ids, strict=True)] == [
        entry[t].logprob for entry, t in zip(written.logprobs, written.token_ids, strict=True)
    ]
    client.close()


def test_closing_in_the_middle_answers_everybody(model):
    client = make_client(model)
    params = SamplingParams(temperature=0.0, max_tokens=100)
    handles = [client.submit(list(words(10, i)), params) for i in range(9)]
    next(handles[0])
    client.close()
    for handle in handles[1:]:
        *_, output = handle
        assert output.finished
        assert output.outputs[0].finish_reason in ("abort", "length")
    client.core._scheduler.check_idle()
    assert not client.core._thread.is_alive()


class TestTheNativeRunnerKeepsTheContract(RunnerContract):
    """On one of the models, with two threads."""

    @pytest.fixture(autouse=True)
    def take_model(self, model):
        self.model = model

    def test_a_hit_gives_the_tokens_of_a_miss(self):
        if not self.model.has_state:
            return super().test_a_hit_gives_the_tokens_of_a_miss()
        runner = self.make_runner()
        runner.admit(0, list(range(1, 20)), 19, SamplingParams(temperature=0.0), 0, ())
        runner.set_pages(0, 0, [0, 1])
        for start in (16, 5):  # behind pages that somebody filled, and behind tokens that were never computed
            with pytest.raises(ShapeError, match=f"slot 0 starts at {start}; its recurrent state stands at 0"):
                runner.submit(one_sequence(0, 0, start, 3))
        runner.submit(one_sequence(0, 0, 0, 3))
        runner.collect()
        runner.close()

    def test_pages_carried_to_another_runner_give_the_tokens_of_computing_them(self):
        if not self.model.has_state:  # the state behind a page is not in it
            super().test_pages_carried_to_another_runner_give_the_tokens_of_computing_them()

    def make_runner(self):
        return self.model.runner(n_slots=3, max_len=64, n_step_tokens=24, n_threads=2)


HYBRIDS = [
    ("qwen3_5", Format.Q8_0, 2),
    ("qwen3_next", Format.Q8_0, 2),
    ("kimi_linear", Format.F32, 1),
    ("kimi_linear_delta_last", Format.Q8_0, 2),
    ("ling_clamped", Format.F32, 2),
    ("mamba2", Format.Q8_0, 2),
    ("lfm2", Format.Q8_0, 2),
]


@pytest.fixture(scope="module", params=HYBRIDS, ids=lambda m: m[0])
def hybrid(request):
    name, weight_format, n_threads = request.param
    return TinyModel(name, weight_format, "float16"), n_threads


class TestTheNativeRunnerKeepsStates(StatefulRunnerContract):
    """On a model that has them."""

    @pytest.fixture(autouse=True)
    def take_model(self, hybrid):
        self.model, self.n_threads = hybrid

    def make_runner(self):
        return self.model.runner(n_slots=3, max_len=64, n_step_tokens=24, n_threads=self.n_threads, n_snapshots=2)

    def test_a_slot_that_is_admitted_again_stands_nowhere(self):
        """Though its last owner stood just where the new one would like to begin."""
        runner = self.make_runner()
        driver = Driver(runner)
        driver.admit(0, PROMPT, 16)
        driver.step((0, 0, len(PROMPT)))
        driver.admit(0, PROMPT * 2, 32)
        with pytest.raises(ShapeError, match="slot 0 starts at 11; its recurrent state stands at 0"):
            driver.step((0, len(PROMPT), 3))
        runner.close()
