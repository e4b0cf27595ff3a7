"""Speculation above a disk tier: only verified tokens enter the prefix cache and the tier, whatever is drafted, and
what an engine stored is what the next one, with or without drafts, would have computed.
"""

import random

import pytest
import test_random_traces as traces
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from speculation_kit import KnowingDrafter
from test_speculation import answers_of, drafting, make_speculation
from tier_bench import TierBench, disk, scripted

from tiercel import LLM, SamplingParams
from tiercel.kv.page_keys import extend, root_key
from tiercel.testing.fake_runner import FakeRunner, early_at_random, make_limits
from tiercel.testing.tiny_model import LATENT_CONFIG, write_tiny_model

FEW = {"deadline": None, "derandomize": True, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


def bench_of(setup, trace, how, *makers):
    limits = make_limits(
        n_slots=setup.n_slots,
        n_pages=setup.n_pages,
        page_size_tokens=setup.page_size,
        max_logits_rows=setup.rows + how["rows"],
        max_step_tokens=32 + how["rows"],
    )
    early = {} if setup.early is None else {"runs_early": early_at_random(setup.early)}
    drafter = KnowingDrafter(answers_of(trace), p_right=how["p_right"], seed=how["seed"])
    return TierBench(
        *makers,
        runner=FakeRunner(limits, compute_ns=setup.compute_ns, **early),
        speculation=make_speculation(drafter, how),
        max_draft_rows=how["rows"],
        eos_ids=range(0, 97, 9) if setup.has_eos else (),
        max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=setup.budget,
        long_prefill_token_threshold=setup.chunk,
        async_scheduling=setup.is_async,
    )


def keys_of(bench, sent):
    """The keys of all full pages of tokens that were given out."""
    size = bench.runner.limits.page_size_tokens
    found = set()
    for name, (prompt, _, _, event) in sent.items():
        root = root_key("w", "f16", size, salt="x" if event.is_salted else None)
        found |= set(extend(root, prompt + bench.tokens.get(name, []), size))
    return found


@settings(max_examples=20, **FEW)
@given(
    traces.setups.filter(lambda setup: setup.n_snapshots is None),
    st.lists(st.lists(traces.events, min_size=1, max_size=6), min_size=2, max_size=3),
    drafting,
)
def test_engines_that_draft_over_one_folder_store_verified_tokens_only(tmp_path_factory, setup, each, how):
    path, keys = tmp_path_factory.mktemp("kv"), set()
    for trace in each:
        bench = bench_of(setup, trace, how, disk(path))
        sent = traces.play(bench, setup, trace)
        bench.assert_idle()
        traces.assert_right(bench, setup, sent)
        traces.assert_what_is_cached_is_what_its_keys_say(bench, sent)
        keys |= keys_of(bench, sent)
        bench.close()
        stored = {bytes.fromhex(file.stem) for file in path.rglob("*.kv")}
        assert stored <= keys, "an object's key is of tokens that nobody was given"


def test_drafts_that_are_refused_are_in_no_tier_although_their_pages_were_written():
    """Or the above could be true of an engine that drafts nothing: half of what is drafted here is wrong."""
    setup = traces.replace(SETUP, n_pages=16)
    trace = [EVENT] * 3
    held = []
    bench = bench_of(setup, trace, HALF_RIGHT, scripted(keeps=held))
    sent = traces.play(bench, setup, trace)
    bench.assert_idle()
    traces.assert_right(bench, setup, sent)
    counts = bench.core.snapshot.speculation
    assert counts.n_draft_tokens - counts.n_accepted_tokens > 10
    assert len(held[0]._held) > 5
    assert set(held[0]._held) <= keys_of(bench, sent)
    bench.close()


HALF_RIGHT = {"p_right": 0.5, "n": 6, "rows": 20, "mode": "always", "seed": 3}
SETUP = traces.Setting(
    n_pages=16, page_size=2, n_slots=3, max_num_seqs=3, budget=24, chunk=0, rows=64, is_async=True, caches=True,
    by_priority=False, early=None, has_eos=False, compute_ns=0, n_snapshots=None, spacing_pages=1, has_kv=True,
)  # fmt: skip
EVENT = traces.Event(
    n_rounds=2, prefix=2, suffix=(64, 65), max_tokens=14, priority=0, abort_of=None, has_logprobs=False, scores=False,
    is_salted=False, is_greedy=False,
)  # fmt: skip


# Through `LLM`, on the native runner.

SMALL = {"threads": 1, "max_num_seqs": 3, "max_num_batched_tokens": 32, "block_size": 16, "max_model_len": 160}
ALWAYS = {"adaptive": False}
CONFIGS = {
    "suffix": ALWAYS | {"method": "suffix", "num_speculative_tokens": 7},
    "ngram": ALWAYS | {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
}
CASES = {
    "greedy": {"temperature": 0.0, "logprobs": 2},
    "sampled": {"temperature": 0.6, "seed": 2, "logprobs": 2, "allowed_token_ids": list(range(97, 103))},
}


@pytest.fixture(autouse=True)
def _home(tmp_path_factory, monkeypatch):
    """Digests of models are remembered there."""
    monkeypatch.setenv("TIERCEL_HOME", str(tmp_path_factory.mktemp("home")))


@pytest.fixture(scope="module", params=["dense", "latent"])
def folder(request, tmp_path_factory):
    config = {"dense": {}, "latent": LATENT_CONFIG}[request.param]
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / request.param, config=config))


def a_talk(rng):
    """A conversation whose beginning recurs, of few letters, so that drafters find something."""
    shared = [97 + i % 4 for i in range(rng.choice([0, 20, 33]))]
    return shared + [97 + rng.randrange(5) for _ in range(rng.randint(3, 20))]


def converse(folder, path, case, n_restarts=2, **options):
    """Let conversations go on over restarts; return all that was answered, the texts, and what was counted."""
    rng = random.Random(4)
    talks = [a_talk(rng) for _ in range(5)]
    answers, counts = [], {"n_pages_landed": 0, "n_accepted_tokens": 0}
    for _ in range(1 + n_restarts):
        tiers = [] if path is None else [tier(path)]
        with LLM(folder, kv_tiers=tiers, **SMALL, **options) as llm:
            params = SamplingParams(max_tokens=18, ignore_eos=True, **CASES[case])
            outputs = llm.generate([{"prompt_token_ids": talk} for talk in talks], params, use_tqdm=False)
            answers.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
            stats = llm.stats()
            counts["n_accepted_tokens"] += stats.get("n_accepted_tokens", 0)
            counts["n_pages_landed"] += stats.get("tier 1:disk", {}).get("n_pages_landed", 0)
            client = llm.client
            root = root_key(client._weights_digest, client._kv_dtype, 16)
        texts = [talk + list(o.outputs[0].token_ids) for talk, o in zip(talks, outputs, strict=True)]
        talks = [[*text, 97 + rng.randrange(5)] for text in texts]
    return answers, {key for text in texts for key in extend(root, text, 16)}, counts


def tier(path):
    patience = {"load_deadline_s": 600.0, "lookup_deadline_s": 600.0}
    return {"type": "disk", "path": str(path), "capacity": "64MiB", "store_sights": 1} | patience


@pytest.mark.parametrize("case", CASES)
def test_what_drafting_engines_answer_and_store_is_what_others_do_bit_for_bit(folder, tmp_path, case):
    """Pools of little more than one sequence, restarts between turns, drafters of both kinds."""
    plain, _, _ = converse(folder, None, case, speculative="off")
    _, _, counts = converse(folder, tmp_path / "plain", case, speculative="off")
    assert counts["n_pages_landed"] > 0
    want = {file.name: file.read_bytes() for file in (tmp_path / "plain").rglob("*.kv")}
    with LLM(folder, speculative="off", **SMALL) as llm:
        pool = {"kv_cache_memory_bytes": 12 * llm._engine.plan.capacity.page_bytes}
    for name, config in CONFIGS.items():
        path = tmp_path / name
        answers, keys, counts = converse(folder, path, case, speculative_config=config, **pool)
        assert answers == plain, name
        assert counts["n_pages_landed"] > 0, name
        assert counts["n_accepted_tokens"] > 10, name
        got = {file.name: file.read_bytes() for file in path.rglob("*.kv")}
        assert {bytes.fromhex(file[:64]) for file in got} <= keys, name
        assert len(got) > 10, name
        assert all(want[file] == data for file, data in got.items() if file in want), name
