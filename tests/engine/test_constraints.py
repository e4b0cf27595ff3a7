"""Structured output in the engine: masks that follow the tokens, whatever else runs, and how a form ends."""

import json

import pytest
from engine_kit import LetterTokenizer, make_client, make_limits

from tiercel.base.errors import RequestError, RequestFailed
from tiercel.protocol.params import SamplingParams
from tiercel.protocol.structured import StructuredOutputsParams
from tiercel.sampling.grammar_limits import GrammarLimits
from tiercel.testing.fake_runner import FakeRunner, early_at_random
from tiercel.text.thinking import ThinkingMarks

EOS = 95
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9999}, "b": {"type": "string", "maxLength": 6}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


class Letters(LetterTokenizer):
    special_tokens = {}  # noqa: RUF012  a fake's

    def id_of(self, text):
        return ord(text) - 32 if len(text) == 1 else None


@pytest.fixture
def client(request):
    options = getattr(request, "param", {})
    eos_ids = options.pop("eos_ids", (EOS,))
    client = make_client(tokenizer=Letters(eos_ids), **options)
    yield client
    client.close()
    client.core._scheduler.check_idle()


def ask(client, form, *, thinking=None, max_tokens=50, prompt="hi", **params):
    form = StructuredOutputsParams(**form)
    params = SamplingParams(max_tokens=max_tokens, structured_outputs=form, **({"seed": 5} | params))
    return client.submit(prompt, params, thinking=thinking)


def end(handle):
    return list(handle)[-1].outputs


def only(handle):
    (one,) = end(handle)
    return one


@pytest.mark.parametrize("is_async", [True, False])
def test_many_forms_at_once_are_each_kept_to(is_async):
    runner = FakeRunner(make_limits(n_slots=4, n_pages=128), runs_early=early_at_random(3))
    client = make_client(tokenizer=Letters((EOS,)), runner=runner, async_scheduling=is_async)
    forms = [{"json": SCHEMA}, {"regex": "[a-c]{3,9}x"}, {"choice": ["one", "other"]}, {"json_object": True}]
    handles = [ask(client, forms[i % 4], n=2, seed=i, prompt="p" * (1 + 3 * i)) for i in range(12)]
    for i, handle in enumerate(handles):
        for one in end(handle):
            if i % 4 == 0 and one.finish_reason == "stop":
                assert set(json.loads(one.text)) == {"a", "b"}
            elif i % 4 == 1:
                assert set(one.text[:-1]) <= set("abc")
                assert one.text.endswith("x")
            elif i % 4 == 2:
                assert one.text in ("one", "other")
            assert one.finish_reason in ("stop", "length")
    client.close()
    client.core._scheduler.check_idle()


def test_masks_do_not_depend_on_who_else_runs_nor_on_preemption():
    texts = []
    for n_pages, n_others in ((64, 0), (64, 3), (14, 3)):
        client = make_client(tokenizer=Letters((EOS,)), limits=make_limits(n_pages=n_pages))
        others = [client.submit("q" * 9, SamplingParams(max_tokens=40, seed=i)) for i in range(n_others)]
        texts.append(only(ask(client, {"regex": "[a-z]{30}"}, prompt="hello")).text)
        for other in others:
            other.close()
        n_preempted = client.core.snapshot.n_total_preemptions
        client.close()
    assert n_preempted > 0
    assert len(set(texts)) == 1
    assert len(texts[0]) == 30


def test_a_complete_form_ends_at_once_and_keeps_its_last_token(client):
    one = only(ask(client, {"choice": ["yes"]}, min_tokens=20, ignore_eos=True))
    assert (one.text, one.finish_reason, one.stop_reason, len(one.token_ids)) == ("yes", "stop", None, 3)


@pytest.mark.parametrize("client", [{"eos_ids": ()}], indirect=True)
def test_a_model_without_end_of_sequence_ends_with_its_form(client):
    one = only(ask(client, {"choice": ["yes", "no"]}))
    assert one.text in ("yes", "no")
    assert one.finish_reason == "stop"


def test_too_few_tokens_end_a_form_by_length(client):
    one = only(ask(client, {"regex": "[a-z]{30}"}, max_tokens=5))
    assert (one.finish_reason, len(one.text)) == ("length", 5)


def test_end_of_sequence_waits_for_the_form_and_for_min_tokens(client):
    for seed in range(8):
        one = only(ask(client, {"regex": "[ab]{2,40}"}, seed=seed, min_tokens=6))
        assert one.finish_reason == "stop"
        assert len(one.text) >= 6
        assert one.token_ids[-1] == EOS or len(one.text) == 40


def test_ignored_end_of_sequence_never_comes_before_the_form_can_only_end(client):
    one = only(ask(client, {"regex": "[ab]{2,40}"}, ignore_eos=True))
    assert len(one.text) == 40
    assert EOS not in one.token_ids


def test_stop_tokens_come_only_where_the_form_may_end(client):
    stop = ord("b") - 32
    for seed in range(8):
        one = only(ask(client, {"regex": "[ab]{3}c{1,20}"}, seed=seed, stop_token_ids=[stop]))
        assert one.text.startswith("aaac")
        assert one.stop_reason in (stop, None)


def test_constraints_that_leave_nothing_fail_and_say_so(client):
    with pytest.raises(RequestFailed, match="constraints leave no token"):
        end(ask(client, {"regex": "[0-9]{3}"}, allowed_token_ids=[ord("x") - 32]))
    assert only(ask(client, {"choice": ["yes"]})).text == "yes"


def test_log_probabilities_are_those_of_the_model(client):
    one = only(ask(client, {"regex": "[a-c]{5}"}, logprobs=2))
    assert len(one.logprobs) == 5
    assert any(token_id not in list(entries)[1:] for token_id, entries in zip(one.token_ids, one.logprobs, strict=True))


def test_stop_strings_still_end_a_text(client):
    one = only(ask(client, {"regex": "[a-c]{40}"}, stop=["a", "b"]))
    assert one.finish_reason == "stop"
    assert one.stop_reason in ("a", "b")


def test_a_form_begins_behind_the_reasoning(client):
    marks = ThinkingMarks(("<",), ("~",), is_open=True)
    n_ended = 0
    for seed in range(12):
        one = only(ask(client, {"choice": ["yes", "no"]}, thinking=marks, max_tokens=55, seed=seed, temperature=1.0))
        _, closing, answer = one.text.partition("~")
        if closing:
            n_ended += 1
            assert answer in ("yes", "no") or one.finish_reason == "length"
        assert EOS not in one.token_ids  # nothing ends a text that has no answer yet
    assert n_ended > 0


def test_reasoning_that_the_model_may_open_is_let_through(client):
    marks = ThinkingMarks(("<",), ("~",))
    found = {only(ask(client, {"choice": ["y"]}, thinking=marks, seed=i, max_tokens=4)).text[0] for i in range(30)}
    assert found == {"y", "<"}


def test_a_mistake_in_a_form_fails_its_request_alone(client):
    good = ask(client, {"regex": "[a-z]{20}"})
    bad = ask(client, {"regex": "[a-z]{30}"}, seed=9)
    bad_handle = next(h for h, _ in client._owners.values() if h is bad)
    assert bad_handle is bad
    sequence = client.core._sequences.get(bad._sequence_ids[0])
    if sequence is not None:
        sequence.constraint._matcher = None
        with pytest.raises(RequestFailed, match="could not be followed"):
            end(bad)
    assert only(good).text.isalpha()


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        ({"json": {"properties": {"a": {"not": {}}}}}, "properties/a: not"),
        ({"json": {"type": "string", "format": "color"}}, "color"),
        ({"json": {"type": "words"}}, "words"),
        ({"json": {"$ref": "http://example.com/x"}}, r"\$ref"),
        ({"json": {"type": "string", "pattern": "(?=a)b"}}, "look-around"),
        ({"json": {"enum": list(range(5001))}}, "5000"),
        ({"json": {"x-guidance": {"lenient": True}}}, "x-guidance"),
        ({"json": False}, "false"),
        ({"regex": "(" * 500}, "regex"),
        ({"regex": "a{2000}"}, "1000"),
        ({"regex": "a" * 9000}, "8192"),
        ({"regex": r"(a)\1"}, "backreferences"),
        ({"choice": ["x"] * 5001}, "5000"),
        ({"grammar": "start: nowhere"}, "nowhere"),
        ({"structural_tag": {"structures": [], "triggers": []}}, "trigger"),
        ({"structural_tag": {"format": {"type": "odd"}}}, "odd"),
    ],
)
def test_what_cannot_be_kept_to_is_refused_by_name(client, form, said):
    with pytest.raises(RequestError, match=said) as caught:
        ask(client, form)
    assert caught.value.param.startswith("structured_outputs")
    client.grammars.check()


def test_a_schema_that_is_nested_too_deeply_is_refused(client):
    schema = {}
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(RequestError, match="nested"):
        ask(client, {"json": schema})
    for _ in range(40):
        schema = {"type": "array", "items": schema if schema.get("type") else {"type": "integer"}}
    with pytest.raises(RequestError, match="more than 32 deep"):
        ask(client, {"json": schema})


def test_a_regex_of_stars_in_stars_is_bounded(client):
    assert only(ask(client, {"regex": "([abc]*)*d"}, max_tokens=30)).finish_reason in ("stop", "length")


def test_a_grammar_that_takes_too_long_is_refused_and_the_next_one_compiles(client):
    client.grammars.close()
    from tiercel.sampling.grammars import Grammars

    slow = Grammars(client.tokenizer, 97, (EOS,), GrammarLimits(regex_cpu_s=1, worker_bytes=1 << 20))
    client._reader._grammars, before = (lambda: slow), client._reader._grammars
    with pytest.raises(RequestError, match="more than 1 s of a processor or 1 MiB"):
        ask(client, {"regex": "[a-z]+"})
    client._reader._grammars = before
    client.grammars._compiler._is_closed = False
    assert only(ask(client, {"regex": "[a-z]{4}"})).text.isalpha()


def test_compiled_grammars_are_kept_within_bytes():
    from tiercel.sampling.grammars import Grammars

    grammars = Grammars(Letters((EOS,)), 97, (EOS,), GrammarLimits(cache_bytes=100_000))
    first = grammars.compile(StructuredOutputsParams(regex="a{1}"))
    assert grammars.compile(StructuredOutputsParams(regex="a{1}")) is first
    for i in range(2, 20):
        grammars.compile(StructuredOutputsParams(regex=f"a{{{i}}}"))
        grammars.check()
    assert grammars.compile(StructuredOutputsParams(regex="a{1}")) is not first
    grammars.close()
