"""A draft model beside the target, both fake: no token changes, right drafts are accepted, and nothing is lost."""

import random

import pytest
import test_random_traces as traces
from draft_model_kit import OtherRunner, make_drafter
from engine_kit import Bench
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from speculation_kit import adaptive, always

from tiercel.engine.speculation import Speculation
from tiercel.protocol.params import SamplingParams
from tiercel.spec.settings import SpeculationSettings
from tiercel.spec.vocabulary_map import VocabularyMap
from tiercel.testing.fake_runner import FakeRunner, expected_tokens, make_limits

GREEDY = SamplingParams(temperature=0.0)
PROMPT = [3, 1, 4, 1, 5]
WANT = expected_tokens(PROMPT, 40, GREEDY)

models = st.fixed_dictionaries(
    {
        "kind": st.sampled_from([FakeRunner, OtherRunner]),
        "n_pages": st.sampled_from([16, 24, 64]),
        "n_slots": st.sampled_from([2, 4]),
        "max_step_tokens": st.sampled_from([4, 9, 64]),
        "page_size_tokens": st.sampled_from([4, 8]),
    }
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    traces.setups,
    st.lists(traces.events, min_size=1, max_size=12),
    models,
    st.integers(1, 6),
    st.sampled_from(["always", "ahead", "adaptive"]),
)
def test_every_request_gets_the_tokens_it_gets_without_a_draft_model(setup, trace, model, n, mode):
    """Mixed batches, preemption, prefix hits, chunks, aborts, stops inside of what was drafted, log-probabilities;
    a draft model that has room for few sequences, and reads prompts in pieces."""
    drafter = make_drafter(**model)
    speculation = adaptive(drafter, n) if mode == "adaptive" else always(drafter, n, is_ahead=mode == "ahead")
    bench = traces.make_bench(setup, speculation=speculation, max_draft_rows=12)
    sent = traces.play(bench, setup, trace)
    bench.assert_idle()
    traces.assert_right(bench, setup, sent)
    traces.assert_what_is_cached_is_what_its_keys_say(bench, sent)
    assert not speculation._followed
    assert drafter.n_pages_free == drafter.runner.limits.n_pages
    assert speculation.counts.n_failures == 0


def bench_of(speculation, *, rows=20, compute_ns=0, **limits):
    limits = make_limits(max_logits_rows=64 + rows, max_step_tokens=64 + rows, **limits)
    return Bench(runner=FakeRunner(limits, compute_ns=compute_ns), speculation=speculation, max_draft_rows=rows)


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0}])
def test_a_model_that_drafts_for_itself_is_always_right(params):
    """Sampled too: it draws with the same noise."""
    speculation = always(make_drafter(), n=5)
    bench = bench_of(speculation)
    for i, name in enumerate("abc"):
        bench.add(name, [*PROMPT, i], max_tokens=25, seed=i, **params)
    bench.run()
    counts = speculation.counts
    assert counts.n_accepted_tokens == counts.n_draft_tokens > 40
    assert bench.runner.n_steps_run < 15
    for i, name in enumerate("abc"):
        assert bench.tokens[name] == expected_tokens([*PROMPT, i], 25, SamplingParams(**params), seed=i)


def test_what_was_computed_of_right_drafts_is_not_computed_again():
    drafter = make_drafter()
    seen = []
    submit = drafter.runner.submit
    drafter.runner.submit = lambda plan: (seen.append(plan.seq_tokens.tolist()), submit(plan))
    bench = bench_of(always(drafter, n=4))
    bench.add("a", PROMPT, max_tokens=30, temperature=0.0)
    bench.run()
    assert bench.tokens["a"] == WANT[:30]
    firsts = [counts[0] for counts in seen[::4]]
    assert firsts[0] == len(PROMPT) + 1
    assert set(firsts[1:-1]) == {2}  # the last draft, and the token behind it


def test_a_step_that_fails_costs_its_sequences_their_drafts_and_nothing_else(caplog):
    drafter = make_drafter(fail_steps=[1], is_strict=False)
    speculation = always(drafter, n=4)
    bench = bench_of(speculation)
    bench.add("a", PROMPT, max_tokens=12, temperature=0.0)
    bench.add("b", [9, *PROMPT], max_tokens=12, temperature=0.0)
    bench.run()
    bench.add("c", PROMPT, max_tokens=12, temperature=0.0)
    bench.run()
    bench.assert_idle()
    assert bench.tokens == {"a": WANT[:12], "b": expected_tokens([9, *PROMPT], 12, GREEDY), "c": WANT[:12]}
    assert speculation.counts.n_failures == 2
    assert speculation.counts.n_accepted_tokens > 0  # of the last
    assert "drafter failed on a" in caplog.text
    assert drafter.n_pages_free == drafter.runner.limits.n_pages


def test_a_draft_model_whose_logits_hold_a_nan_is_left_alone_by_that_sequence_only():
    drafter = make_drafter(nan_token_id=50)
    speculation = always(drafter, n=3)
    bench = bench_of(speculation)
    bench.add("bad", [*PROMPT, 50], max_tokens=12, temperature=0.0)
    bench.add("good", PROMPT, max_tokens=5, temperature=0.0)
    bench.run()
    assert bench.tokens["bad"] == expected_tokens([*PROMPT, 50], 12, GREEDY)
    assert bench.tokens["good"] == WANT[:5]
    assert speculation.counts.n_failures == 1
    assert speculation.counts.n_accepted_tokens > 0
    assert drafter.n_pages_free == drafter.runner.limits.n_pages


@pytest.mark.parametrize("call", ["admit", "set_pages", "submit", "collect"])
def test_a_bug_in_the_draft_models_runner_harms_no_request(call):
    drafter = make_drafter()

    def throw(*args, **named):
        raise ZeroDivisionError("a bug")

    setattr(drafter.runner, call, throw)
    speculation = always(drafter, n=3)
    bench = Bench(
        runner=FakeRunner(make_limits(max_logits_rows=84, max_step_tokens=84)),
        speculation=speculation,
        max_draft_rows=20,
        check_each_step=False,
    )
    bench.add("a", PROMPT, max_tokens=9, temperature=0.0)
    bench.run()
    assert bench.tokens["a"] == WANT[:9]
    assert bench.finals["a"].error is None
    assert speculation.counts.n_failures == 1


def test_a_long_prompt_is_read_in_pieces_while_others_draft():
    drafter = make_drafter(max_step_tokens=8)
    speculation = always(drafter, n=3)
    bench = bench_of(speculation)
    bench.add("short", PROMPT, max_tokens=30, temperature=0.0)
    for _ in range(3):
        bench.step()
    accepted = speculation.counts.n_accepted_tokens
    long = list(range(40))
    bench.add("long", long, max_tokens=20, temperature=0.0)
    most = []
    submit = drafter.runner.submit
    drafter.runner.submit = lambda plan: (most.append(plan.n_tokens), submit(plan))
    bench.run()
    assert max(most) <= 8
    assert bench.tokens["long"] == expected_tokens(long, 20, GREEDY)
    assert speculation.counts.n_accepted_tokens > accepted + 15


def test_pages_go_to_who_drafts_and_the_one_that_waited_longest_is_read_again():
    """Two fit at a time, and four run."""
    drafter = make_drafter(n_pages=10)
    speculation = always(drafter, n=2)
    bench = bench_of(speculation, n_pages=200)
    for i in range(4):
        bench.add(str(i), [*PROMPT, i], max_tokens=12, temperature=0.0)
    bench.run()
    bench.assert_idle()
    for i in range(4):
        assert bench.tokens[str(i)] == expected_tokens([*PROMPT, i], 12, GREEDY)
    assert speculation.counts.n_accepted_tokens > 0
    assert drafter.n_pages_free == 10


def shuffled(seed):
    """A draft model's vocabulary: the target's in another order, but for ten tokens."""
    target = [bytes([33 + i]) for i in range(97)]
    draft = target[:87] + [b"~~%d" % i for i in range(10)]
    random.Random(seed).shuffle(draft)
    return VocabularyMap(target, draft), draft


class Translating(FakeRunner):
    """A draft model with other ids, which knows what the target will answer; tokens that it lacks it gets wrong."""

    vocabulary = None
    answers = ()

    def _run_sequence(self, plan, s, start, n):
        rows = super()._run_sequence(plan, s, start, n)
        row = self._row(int(plan.seq_slot[s]))
        for i, (place, position, _, value) in enumerate(rows):
            whole = [*PROMPT, *self.answers]
            lengths = [len(self.vocabulary.to_draft(whole[:k])) for k in range(len(whole))]
            k = lengths.index(position + 1) if position + 1 in lengths else 0
            own = self.vocabulary.to_draft(whole[k : k + 1])
            rows[i] = (place, position, own[0] if own else 0, value)
            row.tokens[position + 1] = rows[i][2]
        return rows


@pytest.mark.parametrize("seed", range(3))
def test_a_draft_model_of_another_vocabulary_drafts_what_both_have(seed):
    vocabulary, _ = shuffled(seed)
    runner = Translating(make_limits())
    runner.vocabulary, runner.answers = vocabulary, WANT
    drafter = make_drafter(runner=runner, vocabulary=vocabulary)
    speculation = always(drafter, n=4)
    bench = bench_of(speculation)
    bench.add("a", PROMPT, max_tokens=30, temperature=0.0)
    bench.run()
    assert bench.tokens["a"] == WANT[:30]
    assert speculation.counts.n_failures == 0
    assert speculation.counts.n_accepted_tokens > 15


class Timed(FakeRunner):
    """A step takes `step_s`; a clock is shared."""

    step_s = 2e-3
    clock: list

    def _run(self, plan):
        result = super()._run(plan)
        self.clock[0] += self.step_s
        return replace(result, compute_ns=int(1e9 * self.step_s))


def play_timed(draft_s, kind=FakeRunner, n_tokens=400):
    clock = [0.0]
    limits = {"max_len_tokens": 1024, "n_pages": 400}
    target = Timed(make_limits(max_logits_rows=96, max_step_tokens=96, **limits))
    draft = type("TimedDraft", (Timed, kind), {})(make_limits(**limits))
    target.clock = draft.clock = clock
    draft.step_s = draft_s
    speculation = Speculation(
        make_drafter(runner=draft), SpeculationSettings(n_tokens_max=6), vocab_size=97, clock=lambda: clock[0]
    )
    bench = Bench(runner=target, speculation=speculation, max_draft_rows=24)
    bench.add("a", PROMPT, max_tokens=n_tokens, temperature=0.0)
    bench.run()
    assert bench.tokens["a"] == expected_tokens(PROMPT, n_tokens, GREEDY)
    return speculation, target, clock[0]


def test_a_draft_model_that_pays_is_used_and_its_time_is_told():
    speculation, target, took_s = play_timed(2e-4)
    assert target.n_steps_run < 100
    assert took_s < 0.5 * 400 * 2e-3
    counts = speculation.counts
    assert counts.drafter_s == pytest.approx(took_s - target.n_steps_run * 2e-3)
    assert 0.0 < counts.verify_s <= target.n_steps_run * 2e-3
    assert counts.n_verify_steps > 50
    assert counts.n_chosen_rows >= 0


@pytest.mark.parametrize(("draft_s", "kind"), [(2e-3, OtherRunner), (2e-2, FakeRunner), (1.0, FakeRunner)])
def test_a_draft_model_that_is_slow_is_given_up(draft_s, kind):
    """Or one that stalls for a second each time: after the first tries it is left alone, for longer each time."""
    speculation, target, _ = play_timed(draft_s, kind)
    assert speculation.counts.n_drafts < 60
    assert target.n_steps_run > 250
    assert speculation.counts.n_failures == 0


def test_a_guess_ends_where_one_more_pass_costs_more_than_it_brings():
    """A model that is wrong a third of the time, at a fifth of a step a pass."""
    speculation, _, _ = play_timed(4e-4, OtherRunner)
    counts = speculation.counts
    assert counts.n_draft_tokens < 4.5 * counts.n_drafts  # of 6 that may be
