"""Random histories of an engine with a tiny pool: every request ends with the tokens it gets alone, nothing leaks.

`check()` runs after each step; the fake runner reads through page tables and runs steps late, or at random.
"""

from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import count

import numpy as np
import pytest
from engine_kit import Bench, LetterTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercel.kv.page_keys import extend, root_key
from tiercel.protocol.params import SamplingParams
from tiercel.protocol.structured import StructuredOutputsParams
from tiercel.sampling.grammars import Grammars
from tiercel.testing.fake_runner import FakeRunner, early_at_random, expected_tokens, expected_values, make_limits

PREFIXES = [[], list(range(4)), list(range(13)), [*range(8), 60, 61, 62, 63]]


@dataclass(frozen=True)
class Event:
    n_rounds: int  # before it
    prefix: int
    suffix: tuple[int, ...]
    max_tokens: int
    priority: int
    abort_of: int | None  # an earlier request
    has_logprobs: bool
    scores: bool
    is_salted: bool
    is_greedy: bool


events = st.builds(
    Event,
    n_rounds=st.integers(0, 4),
    prefix=st.integers(0, len(PREFIXES) - 1),
    suffix=st.lists(st.integers(64, 66), min_size=1, max_size=8).map(tuple),
    max_tokens=st.integers(1, 14),
    priority=st.integers(-2, 2),
    abort_of=st.none() | st.none() | st.none() | st.integers(0, 30),
    has_logprobs=st.booleans(),
    scores=st.sampled_from([False, False, False, True]),
    is_salted=st.sampled_from([False, False, False, True]),
    is_greedy=st.booleans(),
)


@dataclass(frozen=True)
class Setting:
    n_pages: int
    page_size: int
    n_slots: int
    max_num_seqs: int
    budget: int
    chunk: int
    rows: int
    is_async: bool
    caches: bool
    by_priority: bool
    early: int | None
    has_eos: bool
    compute_ns: int  # of a step, as the runner tells it: with short ones the engine runs ahead
    n_snapshots: int | None  # None: no recurrent state
    spacing_pages: int
    has_kv: bool  # beside a state


states = {
    "n_snapshots": st.sampled_from([None, 0, 1, 2, 3, 4, 6, 30]),
    "spacing_pages": st.sampled_from([1, 2, 3, 50]),
    "has_kv": st.sampled_from([True, True, False]),
}
setups = st.builds(
    Setting,
    n_pages=st.integers(9, 20),
    page_size=st.sampled_from([2, 3, 4]),
    n_slots=st.integers(1, 5),
    max_num_seqs=st.integers(1, 5),
    budget=st.integers(5, 24),
    chunk=st.sampled_from([0, 0, 1, 3]),
    rows=st.sampled_from([5, 6, 64]),
    is_async=st.booleans(),
    caches=st.booleans(),
    by_priority=st.booleans(),
    early=st.none() | st.integers(0, 99),
    has_eos=st.booleans(),
    compute_ns=st.sampled_from([0, 1_000_000, 2_500_000, 4_000_000]),
    **states,
)

# Room for all, so that nothing waits and the engine runs ahead.
roomy_setups = st.builds(
    Setting,
    n_pages=st.integers(40, 60),
    page_size=st.sampled_from([2, 3, 4]),
    n_slots=st.just(5),
    max_num_seqs=st.just(5),
    budget=st.integers(16, 24),
    chunk=st.sampled_from([0, 3]),
    rows=st.just(64),
    is_async=st.just(True),
    caches=st.booleans(),
    by_priority=st.booleans(),
    early=st.none() | st.integers(0, 99),
    has_eos=st.booleans(),
    compute_ns=st.sampled_from([1_000_000, 2_500_000, 4_000_000]),
    **states,
)


def make_bench(setup, *, speculation=None, max_draft_rows=0, n_draft_max=0, **runner_options):
    limits = make_limits(
        n_draft_max=n_draft_max,
        draft_reach_tokens=n_draft_max,
        n_slots=setup.n_slots,
        n_pages=setup.n_pages,
        page_size_tokens=setup.page_size,
        state_bytes=0 if setup.n_snapshots is None else 1000,
        n_snapshots=setup.n_snapshots or 0,
        snapshot_spacing_tokens=setup.spacing_pages * setup.page_size,
        has_kv=setup.has_kv or setup.n_snapshots is None,
        max_logits_rows=setup.rows + max_draft_rows,
        max_step_tokens=32 + max_draft_rows,
    )
    if setup.early is not None:
        runner_options["runs_early"] = early_at_random(setup.early)
    return Bench(
        runner=FakeRunner(limits, compute_ns=setup.compute_ns, **runner_options),
        eos_ids=range(0, 97, 9) if setup.has_eos else (),
        max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=setup.budget,
        long_prefill_token_threshold=setup.chunk,
        async_scheduling=setup.is_async,
        enable_prefix_caching=setup.caches,
        scheduling_policy="priority" if setup.by_priority else "fcfs",
        max_draft_rows=max_draft_rows,
        speculation=speculation,
    )


def play(bench, setup, trace, start_form=lambda i: None):
    """Run a trace; return the requests that were sent. `start_form` gives the constraint of the i-th."""
    sent = {}
    for i, event in enumerate(trace):
        for _ in range(event.n_rounds):
            bench.step()
        prompt = PREFIXES[event.prefix] + list(event.suffix)
        room = bench.runner.limits.pool_tokens + 1 - len(prompt)
        if room >= 1:
            options = {"logprobs": 1} if event.has_logprobs else {}
            options |= {"prompt_logprobs": 1} if event.scores else {}
            options |= {"temperature": 0.0} if event.is_greedy else {}
            bench.add(
                f"s{i}",
                prompt,
                max_tokens=min(event.max_tokens, room),
                priority=event.priority,
                salt="x" if event.is_salted else None,
                seed=i % 3,
                constraint=start_form(i),
                **options,
            )
            sent[f"s{i}"] = (prompt, min(event.max_tokens, room), i % 3, event)
        if event.abort_of is not None:
            bench.core.finish([f"s{event.abort_of}"])
    bench.run()
    return sent


def assert_right(bench, setup, sent):
    assert set(bench.finals) == set(sent)
    for name, (prompt, n, seed, event) in sent.items():
        final = bench.finals[name]
        got = bench.tokens[name]
        params = SamplingParams(temperature=0.0 if event.is_greedy else 1.0)
        want = expected_tokens(prompt, n, params, seed=seed)
        if setup.has_eos:
            ends = [k for k, token in enumerate(want) if token % 9 == 0]
            want = want[: ends[0] + 1] if ends else want
        assert final.error is None or "the step that computed it failed" in str(final.error)
        if final.error is not None or final.finish_reason == "abort":
            assert got == want[: len(got)]
        else:
            assert got == want, name
            assert final.finish_reason == ("stop" if setup.has_eos and want[-1] % 9 == 0 else "length")
        if event.scores and got:
            scored = bench.firsts[name].prompt_logprobs
            assert [entry.token_id for entry in scored] == prompt[1:]


def assert_what_is_cached_is_what_its_keys_say(bench, sent):
    """No key names a page that anything else was written to, stale rows included."""
    pool, size = bench.scheduler.pool, bench.runner.limits.page_size_tokens
    content, after = {}, {}
    for name, (prompt, _, _, event) in sent.items():
        tokens = prompt + bench.tokens.get(name, [])
        root = root_key("w", "f16", size, salt="x" if event.is_salted else None)
        values = expected_values(tokens)
        for i, key in enumerate(extend(root, tokens, size)):
            content[key] = values[i * size : (i + 1) * size]
            after[key] = blake2b(np.array(values[: (i + 1) * size], np.uint64).tobytes(), digest_size=8).digest()
    for page in range(pool.n_pages if bench.runner.limits.has_kv else 0):
        key = pool.key_of(page)
        if key is not None:
            assert bench.runner.values[page].tolist() == content[key]
    states = bench.scheduler.states
    for key, snapshot in states.store._kept.items() if states is not None else ():
        assert bench.runner.saved_state(snapshot.place_idx).history.digest() == after[key]


@settings(max_examples=250, deadline=None, derandomize=True)
@given(setups, st.lists(events, min_size=1, max_size=14))
def test_every_request_ends_with_the_tokens_it_gets_alone(setup, trace):
    bench = make_bench(setup)
    sent = play(bench, setup, trace)
    bench.assert_idle()
    assert_right(bench, setup, sent)
    assert_what_is_cached_is_what_its_keys_say(bench, sent)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(setups, st.lists(events, min_size=1, max_size=10), st.sets(st.integers(0, 25), min_size=1, max_size=4))
def test_failing_steps_harm_only_their_own_sequences(setup, trace, fail_steps):
    bench = make_bench(setup, fail_steps=fail_steps, is_strict=False)
    sent = play(bench, setup, trace)
    bench.assert_idle()
    assert_right(bench, setup, sent)
    assert_what_is_cached_is_what_its_keys_say(bench, sent)
    failed = {name for name, final in bench.finals.items() if final.error is not None}
    assert len(failed) <= len(fail_steps) * min(setup.max_num_seqs, setup.n_slots)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(setups, st.lists(events, min_size=1, max_size=10))
def test_a_nan_harms_only_its_own_sequence(setup, trace):
    bench = make_bench(setup, nan_token_id=65)
    sent = play(bench, setup, trace)
    bench.assert_idle()
    for name, (prompt, n, seed, event) in sent.items():
        final = bench.finals[name]
        if 65 in prompt:
            assert final.error is not None or final.finish_reason == "abort"
        elif final.error is None and final.finish_reason != "abort":
            params = SamplingParams(temperature=0.0 if event.is_greedy else 1.0)
            want = expected_tokens(prompt, n, params, seed=seed)
            assert bench.tokens[name] == want[: len(bench.tokens[name])]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(roomy_setups, st.lists(events, min_size=1, max_size=5), st.sets(st.integers(0, 60), max_size=2))
def test_running_ahead_changes_no_token_and_loses_nothing(setup, trace, fail_steps):
    bench = make_bench(setup, fail_steps=fail_steps, is_strict=not fail_steps)
    sent = play(bench, setup, [replace(event, max_tokens=3 * event.max_tokens) for event in trace])
    bench.assert_idle()
    assert_right(bench, setup, sent)
    assert_what_is_cached_is_what_its_keys_say(bench, sent)


def preempt_before(bench, plans):
    """Preempt somebody before the plans of the given numbers, as nothing else does where there are no pages."""
    plan, numbers = bench.scheduler.plan, count()

    def preempt_and_plan(now_s, **options):
        running = list(bench.scheduler.running)
        number = next(numbers)
        if number in plans and running:
            bench.scheduler._preempt(running[number % len(running)])
        return plan(now_s, **options)

    bench.scheduler.plan = preempt_and_plan


@settings(max_examples=150, deadline=None, derandomize=True)
@given(setups, st.lists(events, min_size=1, max_size=12), st.sets(st.integers(0, 40), max_size=6))
def test_without_pages_every_request_ends_with_the_tokens_it_gets_alone(setup, trace, preempted):
    """A model that keeps no keys and values: slots are all that there is to have, whatever the length."""
    setup = replace(setup, n_pages=0)
    bench = make_bench(setup)
    preempt_before(bench, preempted)
    sent = play(bench, setup, trace)
    assert set(sent) == {f"s{i}" for i in range(len(trace))}
    bench.assert_idle()
    assert_right(bench, setup, sent)
    assert bench.core.snapshot.kv_usage_frac == 0.0


FORMS = [{"regex": "[a-c]+x?"}, {"choice": ["one", "other"]}, {"regex": "[ -~]{2,5}"}, None]


class Letters(LetterTokenizer):
    special_tokens = {}  # noqa: RUF012  a fake's


@pytest.fixture(scope="module")
def compiled():
    grammars = Grammars(Letters(), 97, (94,))
    yield [form and grammars.compile(StructuredOutputsParams(**form)) for form in FORMS]
    grammars.check()
    grammars.close()


@settings(max_examples=80, deadline=None, derandomize=True)
@given(setups, st.lists(events, min_size=1, max_size=12))
def test_every_form_ends_with_the_tokens_it_gets_alone(compiled, setup, trace):
    """Whoever else runs, is preempted or aborted; with a form that ends early, late or not at all."""

    def start_form(i):
        form = compiled[i % len(FORMS)]
        return form and form.start()

    bench = make_bench(setup)
    sent = play(bench, setup, trace, start_form)
    bench.assert_idle()
    assert set(bench.finals) == set(sent)
    for name, (prompt, n, seed, event) in sent.items():
        alone = Bench(eos_ids=bench.eos_ids)
        temperature = 0.0 if event.is_greedy else 1.0
        alone.add(name, prompt, max_tokens=n, seed=seed, temperature=temperature, constraint=start_form(int(name[1:])))
        alone.run()
        got, want, final = bench.tokens.get(name, []), alone.tokens.get(name, []), bench.finals[name]
        if final.finish_reason == "abort":
            assert got == want[: len(got)]
            continue
        assert got == want, name
        assert final.finish_reason == alone.finals[name].finish_reason
        assert str(final.error) == str(alone.finals[name].error)
