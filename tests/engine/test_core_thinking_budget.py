"""Bounded reasoning in the engine: the rule holds for every token, whatever else runs, is preempted or was cached."""

import random

import pytest
from engine_kit import make_client, make_limits
from test_constraints import Letters

from tiercel.base.errors import RequestError
from tiercel.protocol.params import SamplingParams
from tiercel.protocol.structured import StructuredOutputsParams
from tiercel.testing.fake_runner import FakeRunner, early_at_random
from tiercel.text.thinking import ThinkingMarks
from tiercel.text.thinking_budget import ReasoningConfig, ReasoningMarkers, ThinkingBudget

END = "I see.~"
TEXTS = (("<",), ("~",))


def client_of(*, end=END, **options):
    client = make_client(tokenizer=Letters(options.pop("eos_ids", ())), **options)
    client._reasoning_config = ReasoningConfig(reasoning_end_str=end)
    client.set_reasoning(TEXTS)
    return client


@pytest.fixture
def client():
    client = client_of()
    yield client
    client.close()
    client.core._scheduler.check_idle()


def ask(client, prompt, budget, *, thinking=None, max_tokens=30, seed=3, **params):
    params = SamplingParams(thinking_token_budget=budget, max_tokens=max_tokens, seed=seed, **params)
    return client.submit(prompt, params, thinking=thinking)


def only(handle):
    (one,) = list(handle)[-1].outputs
    return one


def assert_obeys(prompt, token_ids, budget):
    """Follow the count through an output: what had to come came."""
    letters = Letters(())
    markers, prompt_ids = ReasoningMarkers(*TEXTS, END), letters.encode(prompt)
    count = ThinkingBudget.start(markers, budget, prompt_ids, encode=letters.encode, token_bytes=letters.token_bytes)
    n_forced = 0
    for token in token_ids:
        if count.forced_id is not None:
            n_forced += 1
            assert token == count.forced_id
        count.push(token)
    return n_forced


@pytest.mark.parametrize("is_async", [True, False])
def test_GHSA_fpch_3xrf_7q96_random_requests_in_a_tiny_pool_think_as_long_as_they_may_and_as_when_alone(is_async):
    draw = random.Random(5)
    asks = []
    for seed in range(24):
        prompt = "p" * draw.choice((1, 6, 9)) + draw.choice(("<", "<ab", "<a~", "", "<I s")) + "x" * draw.randrange(3)
        asks.append((prompt or "p", draw.choice((0, 1, 3, 9, None)), seed))
    alone = client_of(limits=make_limits(n_pages=64))
    wanted = [only(ask(alone, *one[:2], seed=one[2])).token_ids for one in asks]
    alone.close()
    runner = FakeRunner(make_limits(n_slots=4, n_pages=24), runs_early=early_at_random(3))
    client = client_of(runner=runner, async_scheduling=is_async)
    handles = [ask(client, *one[:2], seed=one[2]) for one in asks]
    got = [only(handle).token_ids for handle in handles]
    n_preempted = client.core.snapshot.n_total_preemptions
    n_hits = client.core.snapshot.n_total_prefix_hits_tokens
    client.close()
    client.core._scheduler.check_idle()
    assert got == wanted
    assert n_preempted > 0
    assert n_hits > 0
    n_forced = sum(
        assert_obeys(prompt, token_ids, budget)
        for (prompt, budget, _), token_ids in zip(asks, got, strict=True)
        if budget is not None
    )
    assert n_forced > 40


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_the_end_comes_when_the_budget_is_used_up(client, budget):
    text = only(ask(client, "hi<", budget)).text
    thought, _, _ = text.partition("~")
    assert thought.endswith("I see.")
    assert len(thought) - len("I see.") == budget


def test_the_prompts_own_reasoning_counts(client):
    assert only(ask(client, "hi<abc", 3)).text.startswith(END)
    assert only(ask(client, "hi<abcI s", 3)).text.startswith("ee.~")
    assert not only(ask(client, "hi<abc~", 3)).text.startswith(END)


def test_a_chat_whose_prompt_opens_nothing_is_not_ended_by_what_its_user_wrote(client):
    marks = ThinkingMarks(("<",), ("~",))
    assert not only(ask(client, "what is < for", 0, thinking=marks)).text.startswith("I")
    assert only(ask(client, "what is < for", 0)).text.startswith("I")


def test_without_a_mark_or_a_limit_nothing_is_forced(client):
    plain = only(ask(client, "hi", None)).text
    assert only(ask(client, "hi", -1)).text == plain
    assert only(ask(client, "hi", 10**9)).text == plain


def test_all_outputs_of_a_request_count_by_themselves(client):
    params = SamplingParams(n=3, thinking_token_budget=4, max_tokens=12, seed=1)
    outputs = list(client.submit("hi<", params))[-1].outputs
    assert len({one.text[:4] for one in outputs}) == 3
    assert all(one.text[4:].startswith(END) or "~" in one.text[:4] for one in outputs)


def test_a_form_begins_behind_the_forced_end(client):
    marks = ThinkingMarks(("<",), ("~",), is_open=True)
    form = StructuredOutputsParams(choice=["yes", "no"])
    for budget in (0, 2):
        one = only(ask(client, "hi<", budget, thinking=marks, structured_outputs=form))
        thought, _, answer = one.text.partition("~")
        assert thought.endswith("I see.")
        assert answer in ("yes", "no")
        assert one.finish_reason == "stop"


def test_a_form_that_is_kept_to_from_the_start_is_not_broken_by_the_end(client):
    form = StructuredOutputsParams(regex="[a-c]{6}")
    one = only(ask(client, "hi<", 0, structured_outputs=form))
    assert (len(one.text), set(one.text) <= set("abc"), one.finish_reason) == (6, True, "stop")


def test_the_end_may_be_a_stop_token_and_may_be_cut_by_length(client):
    one = only(ask(client, "hi<", 0, stop_token_ids=[ord("~") - 32]))
    assert (one.text, one.stop_reason) == ("I see.", ord("~") - 32)
    one = only(ask(client, "hi<", 1, max_tokens=3))
    assert (one.text[1:], one.finish_reason) == ("I ", "length")
    assert only(ask(client, "hi<", 0, stop=["see"])).text == "I "


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"allowed_token_ids": [1, 2]}, "allowed_token_ids"),
        ({"bad_words": ["see"]}, "bad_words"),
        ({"min_tokens": 3, "stop_token_ids": [ord("~") - 32]}, "min_tokens"),
    ],
)
def test_what_would_forbid_the_end_is_refused(client, params, param):
    with pytest.raises(RequestError) as caught:
        ask(client, "hi<", 0, **params)
    assert caught.value.param == param
    assert only(ask(client, "hi<", None, **params)).token_ids


def test_a_model_without_marks_bounds_nothing_and_says_so():
    client = make_client()
    with pytest.raises(RequestError, match="thinking_token_budget"):
        ask(client, "hi", 0)
    assert only(ask(client, "hi", -1)).text
    client.close()


def test_log_probabilities_of_forced_tokens_are_the_models(client):
    one = only(ask(client, "hi<", 0, logprobs=1))
    forced = [next(iter(entries.values())) for entries in one.logprobs[: len(END)]]
    assert all(entry.logprob < 0 for entry in forced)
    assert any(entry.rank > 1 for entry in forced)
