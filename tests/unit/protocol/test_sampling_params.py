import math

import msgspec
import numpy as np
import pytest

from tiercel.base.errors import RequestError, UnknownOption
from tiercel.protocol.params import RequestOutputKind, SamplingParams

NAN, INF = math.nan, math.inf

REFUSED = [
    *[("n", v) for v in (0, -1, 16385, 1.0, True, "2", None)],
    *[("temperature", v) for v in (-0.1, 2.1, NAN, INF, True, "1", None)],
    *[("top_p", v) for v in (0, 0.0, -0.1, 1.1, NAN, None, True)],
    *[("top_k", v) for v in (-2, 1.5, True, None, 2**63)],
    *[("min_p", v) for v in (-0.1, 1.1, NAN)],
    *[("presence_penalty", v) for v in (-2.1, 2.1, NAN, False)],
    *[("frequency_penalty", v) for v in (-2.1, 2.1, NAN, INF)],
    *[("repetition_penalty", v) for v in (0, -1, NAN, INF, -INF)],
    *[("seed", v) for v in (2**63, -(2**63) - 1, 1.0, True)],
    *[("thinking_token_budget", v) for v in (-2, 2**63, 1.0, True, False, "1")],
    *[("repetition_detection", v) for v in (1, {"max_pattern_size": 2})],
    *[("stop", v) for v in ("", [""], ["a", ""], [1], 5, ["x" * 1025], ["x"] * 17, b"a")],
    *[("stop_token_ids", v) for v in ([-1], [1.5], [True], "12", 3, [2**31])],
    *[("max_tokens", v) for v in (0, -1, 1.0, True)],
    *[("min_tokens", v) for v in (-1, 17, None, 1.0)],
    *[("logprobs", v) for v in (-2, True, 1.0)],
    *[("prompt_logprobs", v) for v in (-2, True, "1")],
    *[
        ("logit_bias", v)
        for v in ({-1: 1}, {"a": 1}, {"-1": 1}, {1: NAN}, {1: 100.5}, {1: True}, {1: 1, "1": 2}, [1], {1.0: 1})
    ],
    ("logit_bias", dict.fromkeys(range(1025), 1.0)),
    *[("allowed_token_ids", v) for v in ([], [-1], "a", {1: 2}, [None])],
    *[("bad_words", v) for v in ("word", [""], [1], ["x"] * 129)],
    *[("ignore_eos", v) for v in (1, None, "true")],
    *[("detokenize", v) for v in (0, None)],
    ("skip_reading_prefix_cache", 1),
    ("output_kind", 1),
]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=lambda v: repr(v)[:30])
def test_a_value_out_of_range_is_refused_by_its_name(name, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert str(caught.value).startswith(f"{name}: got ")
    assert "; needs " in str(caught.value)


TAKEN = [
    ("n", 16384, 16384),
    ("n", np.int64(3), 3),
    ("temperature", 2, 2.0),
    ("temperature", np.float32(0.5), 0.5),
    ("top_p", 1, 1.0),
    ("top_k", -1, 0),
    ("top_k", 2**40, 2**40),
    ("min_p", 1, 1.0),
    ("presence_penalty", -2, -2.0),
    ("repetition_penalty", 1e-300, 1e-300),
    ("seed", -1, None),
    ("thinking_token_budget", -1, None),
    ("thinking_token_budget", 0, 0),
    ("seed", -(2**63), -(2**63)),
    ("seed", 0, 0),
    ("stop", None, ()),
    ("stop", "ab", ("ab",)),
    ("stop", ["a", "b"], ("a", "b")),
    ("stop_token_ids", None, ()),
    ("stop_token_ids", [5, 3, 5], (5, 3)),
    ("stop_token_ids", np.array([1, 2]), (1, 2)),
    ("max_tokens", None, None),
    ("min_tokens", 16, 16),
    ("logprobs", -1, -1),
    ("logprobs", 0, 0),
    ("logit_bias", {"12": 1, 3: -100}, {12: 1.0, 3: -100.0}),
    ("logit_bias", None, None),
    ("allowed_token_ids", [4, 4, 2], (4, 2)),
    ("bad_words", None, ()),
    ("bad_words", ["a b"], ("a b",)),
]


@pytest.mark.parametrize(("name", "given", "kept"), TAKEN, ids=lambda v: repr(v)[:30])
def test_a_value_in_range_is_kept_in_its_one_spelling(name, given, kept):
    got = getattr(SamplingParams(**{name: given}), name)
    assert got == kept
    assert type(got) is type(kept)


def test_defaults_are_those_of_vllm():
    p = SamplingParams()
    assert (p.n, p.temperature, p.top_p, p.top_k, p.min_p, p.max_tokens, p.min_tokens) == (1, 1.0, 1.0, 0, 0.0, 16, 0)
    assert (p.presence_penalty, p.frequency_penalty, p.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (p.seed, p.logprobs, p.prompt_logprobs, p.logit_bias, p.allowed_token_ids) == (None,) * 5
    assert (p.detokenize, p.skip_special_tokens, p.spaces_between_special_tokens) == (True, True, True)
    assert (p.ignore_eos, p.include_stop_str_in_output) == (False, False)
    assert p.output_kind is RequestOutputKind.CUMULATIVE


def test_a_temperature_under_the_threshold_is_greedy_and_resets_the_filters():
    p = SamplingParams(temperature=0.9e-5, top_p=0.5, top_k=3, min_p=0.2)
    assert p.is_greedy
    assert (p.temperature, p.top_p, p.top_k, p.min_p) == (0.0, 1.0, 0, 0.0)
    assert not SamplingParams(temperature=0.01).is_greedy


def test_a_tiny_temperature_is_raised_with_a_warning_that_names_the_callers_line():
    with pytest.warns(UserWarning, match="raised to 0.01") as caught:
        p = SamplingParams(temperature=1e-5)
    assert p.temperature == 0.01
    assert caught[0].filename == __file__


def test_several_greedy_outputs_are_refused():
    with pytest.raises(RequestError, match="n: got 2") as caught:
        SamplingParams(n=2, temperature=0)
    assert caught.value.param == "n"


def test_stop_strings_without_detokenising_are_refused():
    with pytest.raises(RequestError, match="detokenize"):
        SamplingParams(stop="a", detokenize=False)
    assert SamplingParams(stop_token_ids=[1], detokenize=False).stop_strings == ()


def test_min_tokens_may_not_exceed_max_tokens_but_may_without_one():
    with pytest.raises(RequestError, match="min_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)
    assert SamplingParams(min_tokens=5, max_tokens=None).min_tokens == 5


def test_prompt_logprobs_read_no_prefix_cache_unless_told_otherwise():
    assert SamplingParams(prompt_logprobs=0).skip_reading_prefix_cache is True
    assert SamplingParams().skip_reading_prefix_cache is False
    assert SamplingParams(skip_reading_prefix_cache=True).skip_reading_prefix_cache is True


@pytest.mark.parametrize(
    ("keyword", "hint"),
    [
        ("temprature", "did you mean temperature"),
        ("stop_words", "did you mean stop"),
        ("guided_json", "StructuredOutputsParams"),
        ("best_of", "cumulative_logprob"),
        ("max_new_tokens", "max_tokens"),
        ("zzzzzz", "known are n, temperature"),
    ],
)
def test_an_unknown_keyword_is_refused_with_a_hint(keyword, hint):
    with pytest.raises(UnknownOption, match=hint) as caught:
        SamplingParams(**{keyword: 1})
    assert keyword in str(caught.value)
    assert isinstance(caught.value, TypeError)


def test_positional_values_are_refused():
    with pytest.raises(TypeError):
        SamplingParams(1)


def test_nothing_of_a_value_can_be_changed():
    stop = ["a"]
    p = SamplingParams(stop=stop)
    stop.append("b")
    assert p.stop_strings == ("a",)
    with pytest.raises(AttributeError):
        p.n = 2


def test_clone_and_replace_keep_the_rules():
    p = SamplingParams(temperature=0.5, stop=["a"], logit_bias={1: 2}, seed=4)
    assert p.clone() == p
    assert msgspec.structs.replace(p, bad_words_token_ids=[[1, 2], [3]]).bad_words_token_ids == ((1, 2), (3,))
    with pytest.raises(RequestError, match="top_p"):
        msgspec.structs.replace(p, top_p=2.0)


@pytest.mark.parametrize(
    "sequences", [[[]], [[1]] * 129, [[1] * 1025], [[-1]]], ids=["empty", "many", "long", "negative"]
)
def test_bad_words_that_become_too_many_tokens_are_refused(sequences):
    with pytest.raises(RequestError) as caught:
        SamplingParams(bad_words_token_ids=sequences)
    assert caught.value.param == "bad_words"


def test_a_huge_value_does_not_make_a_huge_message():
    with pytest.raises(RequestError) as caught:
        SamplingParams(stop=["x" * 100_000])
    assert len(str(caught.value)) < 300
