"""Speculation changes no token, whatever is drafted and whatever else happens: random histories on a fake runner."""

import test_random_traces as traces
from hypothesis import given, settings
from hypothesis import strategies as st
from speculation_kit import KnowingDrafter, adaptive, always

from tiercel.protocol.params import SamplingParams
from tiercel.testing.fake_runner import expected_tokens


def answers_of(trace):
    """What each prompt may be answered, greedy or sampled."""
    found = {}
    for event in trace:
        prompt = tuple(traces.PREFIXES[event.prefix] + list(event.suffix))
        if prompt not in found:
            each = [(SamplingParams(temperature=1.0), seed) for seed in range(3)]
            each.append((SamplingParams(temperature=0.0), 0))
            found[prompt] = [expected_tokens(prompt, 45, params, seed=seed) for params, seed in each]
    return found


drafting = st.fixed_dictionaries(
    {
        "p_right": st.sampled_from([0.0, 0.5, 0.9, 1.0]),
        "n": st.integers(1, 6),
        "rows": st.sampled_from([1, 3, 8, 20]),
        "mode": st.sampled_from(["always", "ahead", "adaptive"]),
        "seed": st.integers(0, 9),
    }
)


def make_speculation(drafter, how):
    if how["mode"] == "adaptive":
        return adaptive(drafter, how["n"])
    return always(drafter, how["n"], is_ahead=how["mode"] == "ahead")


def play(setup, trace, how, **runner_options):
    drafter = KnowingDrafter(answers_of(trace), p_right=how["p_right"], seed=how["seed"])
    speculation = make_speculation(drafter, how)
    bench = traces.make_bench(setup, speculation=speculation, max_draft_rows=how["rows"], **runner_options)
    sent = traces.play(bench, setup, trace)
    bench.assert_idle()
    speculation.check()
    assert not speculation._followed
    assert drafter.n_begun == drafter.n_ended
    return bench, sent, speculation


@settings(max_examples=250, deadline=None, derandomize=True)
@given(traces.setups, st.lists(traces.events, min_size=1, max_size=14), drafting)
def test_every_request_gets_the_tokens_it_gets_without_drafts(setup, trace, how):
    """Mixed batches, preemption, prefix hits, chunks, aborts, stops inside what was drafted, log-probabilities."""
    bench, sent, speculation = play(setup, trace, how)
    traces.assert_right(bench, setup, sent)
    traces.assert_what_is_cached_is_what_its_keys_say(bench, sent)
    counts = speculation.counts
    assert counts.n_accepted_tokens == sum(counts.n_accepted_by_position) <= counts.n_draft_tokens
    assert counts.n_failures == 0


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    traces.setups,
    st.lists(traces.events, min_size=1, max_size=10),
    st.sets(st.integers(0, 25), min_size=1, max_size=4),
    drafting,
)
def test_failing_steps_harm_only_their_own_sequences(setup, trace, fail_steps, how):
    bench, sent, _ = play(setup, trace, how, fail_steps=fail_steps, is_strict=False)
    traces.assert_right(bench, setup, sent)
    traces.assert_what_is_cached_is_what_its_keys_say(bench, sent)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(traces.roomy_setups, st.lists(traces.events, min_size=1, max_size=4), st.integers(0, 9), st.booleans())
def test_right_drafts_are_accepted_and_make_fewer_steps(setup, trace, seed, is_ahead):
    """Or all of the above could be true of an engine that never drafts."""
    how = {"p_right": 1.0, "n": 5, "rows": 20, "mode": "ahead" if is_ahead else "always", "seed": seed}
    trace = [traces.replace(event, max_tokens=30, abort_of=None, is_greedy=True, n_rounds=0) for event in trace]
    bench, sent, speculation = play(setup, trace, how)
    traces.assert_right(bench, setup, sent)
    if not setup.has_eos and setup.n_snapshots is None:
        assert speculation.counts.n_accepted_tokens > 0
        assert bench.runner.n_steps_run < 30
