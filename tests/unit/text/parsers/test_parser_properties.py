"""What holds for every parser and every text: cuts change nothing, nothing raises, time is linear, no text is lost."""

import random
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parser_kit import SCHEMAS, events_of, parser_of, read
from test_parser_formats import CASES

from tiercel.base.errors import ConfigError
from tiercel.text.parsers.registry import CALL_FORMATS, REASONING_FORMATS, ParserChoice, choose

NAMES = sorted(CALL_FORMATS)
# One name for each parser: others are its aliases.
PARSERS = sorted({id(form): name for name, form in CALL_FORMATS.items()}.values())
PIECES = sorted(
    {
        *(piece for form in CALL_FORMATS.values() for piece in form.texts if piece),
        *("<think>", "</think>", "[THINK]", "[/THINK]", " to=functions.f", 'call tool="f"', 'argument key="i"'),
        *('{"name": "f", "arguments": ', '{"name": "g"', '"parameters": {"i": 1}', "{", "}", "[", "]", '"', "'", "\\"),
        *(",", ";", ":", "\n", " ", "(", ")", "=", "f", "g", "f(i=1)", "'''", "```json", "```", "functions.f:0"),
        *("<function=", "f>"),
        *('<invoke name="f">', '<parameter name="i">', "<parameter=i>", "1", "null", "true", "é😀"),
        *(
            '<｜DSML｜invoke name="f">',
            '<｜DSML｜parameter name="i" string="false">',
            "analysis",
            "final",
            "\t",
            "\x00",
        ),
    }
)
TEXTS = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=3)), max_size=25)
QUICK = settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def cut_at_random(text, seed):
    draw = random.Random(seed)
    pieces, at = [], 0
    while at < len(text):
        n = draw.choice((1, 1, 2, 3, 5, 11))
        pieces.append(text[at : at + n])
        at += n
    return pieces


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize("reasoning", [None, "think", "own"])
@QUICK
@given(words=TEXTS, seed=st.integers(0, 9), is_thinking=st.booleans())
def test_no_text_raises_and_no_cut_changes_what_is_read(name, reasoning, words, seed, is_thinking):
    kind = {"openai": "openai_gptoss", "kimi_k3": "kimi_k3"}.get(name, "mistral") if reasoning == "own" else reasoning
    text = "".join(words)

    def make():
        return parser_of(name, kind, is_thinking=is_thinking, special=("<think>", "<|end|>", "[TOOL_CALLS]"))

    whole = events_of([text], make)
    read(whole)
    assert events_of(cut_at_random(text, seed), make) == whole
    assert events_of(list(text), make) == whole


@pytest.mark.parametrize(("name", "text"), CASES)
@QUICK
@given(seed=st.integers(0, 10_000))
def test_damaged_calls_are_read_the_same_in_every_cut(name, text, seed):
    draw = random.Random(seed)
    letters = list(text)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(letters))
        letters[at : at + draw.randint(0, 3)] = draw.choice(["", "<", '"', "\\", "}", "\n", draw.choice(PIECES)])
    damaged = "".join(letters) or "x"
    whole = events_of([damaged], lambda: parser_of(name))
    read(whole)
    assert events_of(cut_at_random(damaged, seed), lambda: parser_of(name)) == whole
    assert events_of(list(damaged), lambda: parser_of(name)) == whole


# Texts that a search which begins again, or a pattern that backtracks, takes quadratic time for.
SLOW = ["<", "<tool", "<tool_call>", "{", '{"name": "', "[", " ", "\n", "f(", "[f(a=", "f(a='", "\\", "<function=f>"]
SLOW += ["<parameter=s>", "<tool_call>f<arg_key>s</arg_key><arg_value>", "[TOOL_CALLS]", "[TOOL_CALLS]f[ARGS]{", "to="]
SLOW += ["<|channel|>", "<|open|>", "<|open|>a<|sep|>", "<think>", "</think>", '{"a":', ",", "<|channel|>a<|message|>"]


def seconds(name, text, n):
    """Measure a parse in pieces of `n` letters."""
    start = time.process_time()
    events_of([text[i : i + n] for i in range(0, len(text), n)], lambda: parser_of(name, "think"))
    return time.process_time() - start


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize(("n", "size"), [(1, 200), (1 << 30, 2_000)], ids=["letters", "whole"])
def test_time_grows_with_the_text_and_not_with_its_square(name, n, size):
    for piece in SLOW:
        # Eight times the text: linear is 8 times the time, quadratic 64; small times are noise.
        few, many = ((piece * size)[: size * k] for k in (1, 8))
        bound_s = max(30 * seconds(name, few, n), 0.1)
        assert min(seconds(name, many, n) for _ in range(2)) < bound_s, piece


@pytest.mark.parametrize(
    ("template", "tokens", "calls", "reasoning"),
    [
        (None, (), "hermes", None),
        ("{{ messages }}", (), "hermes", None),
        ("{{ tools }} in a way nobody knows", (), None, None),
        ("{{ tools }}<tool_call>{}</tool_call>", (), "hermes", None),
        ("{{ tools }}<tool_call>{}</tool_call><think>", (), "hermes", "think"),
        ("{{ tools }}<tool_call><function=x><parameter=y>", (), "qwen3_coder", None),
        ("{{ tools }}<tool_call><arg_key><think>", (), "glm45", "think"),
        ("{{ tools }}", ("<|python_tag|>",), "llama3_json", None),
        ("{{ tools }}[TOOL_CALLS]", ("[THINK]",), "mistral", "mistral"),
        ("{{ tools }}<｜tool▁calls▁begin｜>```json", (), "deepseek_v3", None),
        ("{{ tools }}<｜tool▁calls▁begin｜><think>", (), "deepseek_v31", "think"),
        ("{{ tools }}<｜DSML｜function_calls>", ("<think>",), "deepseek_v4", "think"),
        ("{{ tools }}", ("<|tool_calls_section_begin|>",), "kimi_k2", None),
        (None, ("<|open|>", "<|close|>", "<|sep|>"), "kimi_k3", "kimi_k3"),
        ("<|start|><|channel|>{{ tools }}", (), "openai", "openai_gptoss"),
        ("{{ tools }}<|tool_call|>", (), "granite", None),
        ("{{ tools }}<|tool_call_start|>", (), "lfm2", None),
        ("{{ tools }}<seed:tool_call><function=", ("<seed:think>",), "seed_oss", "seed_oss"),
        ("{{ tools }}<minimax:tool_call>", ("<think>",), "minimax_m2", "think"),
    ],
)
def test_parsers_are_found_in_template_and_vocabulary(template, tokens, calls, reasoning):
    found = choose(template, tokens.__contains__)
    assert (found.calls, found.reasoning) == (calls, reasoning)


def test_names_override_what_is_found():
    found = choose("{{ tools }}<tool_call><think>", lambda token: False, calls="mistral", reasoning="none")
    assert (found.calls, found.reasoning, found.has_short_ids) == ("mistral", None, True)
    assert choose("<tool_call>", lambda token: False, calls="none").calls is None


@pytest.mark.parametrize("option", ["calls", "reasoning"])
def test_an_unknown_name_is_refused_with_the_known_ones(option):
    with pytest.raises(ConfigError, match="hermes" if option == "calls" else "qwen3"):
        choose(None, lambda token: False, **{option: "nothing"})


def test_special_tokens_are_needed_only_where_marks_are_such():
    assert not ParserChoice("hermes", "think", frozenset({"<|im_end|>"})).needs_special_tokens
    assert ParserChoice("hermes", "think", frozenset({"<tool_call>"})).needs_special_tokens
    assert ParserChoice("deepseek_v4", None, frozenset({"｜DSML｜"})).needs_special_tokens
    assert ParserChoice(None, "think", frozenset({"</think>"})).needs_special_tokens


def test_every_name_makes_a_parser():
    for calls in [None, *CALL_FORMATS]:
        for reasoning in [None, *REASONING_FORMATS]:
            for has_calls in (True, False):
                choice = ParserChoice(calls, reasoning)
                parser = choice.make(SCHEMAS, has_calls=has_calls, is_thinking=False)
                assert "".join(e.text for e in [*parser.feed("plain"), *parser.finish()]) == "plain"
