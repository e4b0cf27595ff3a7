"""Reasoning before the answer, in every cut of the stream."""

import pytest
from parser_kit import events_of, parsed, parser_of, read

from tiercel.text.parsers.registry import ParserChoice

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>a</think>b", "a", "b"),
        ("<think>\na\n\nb\n</think>\n\nc\n", "a\n\nb", "c\n"),
        ("\n<think>a</think>b", "a", "b"),
        ("<think></think>b", "", "b"),
        ("<think>\n\n</think>\n\nb", "", "b"),
        ("<think>a < b </thin k></think></think>\n</think>b", "a < b </thin k>", "b"),
        ("<think>a", "a", ""),
        ("<think>a</th", "a</th", ""),
        ("<th", "", "<th"),
        ("plain <think>x</think>", "", "plain <think>x</think>"),
        ("  plain", "", "  plain"),
        ("b is </think> here", "", "b is </think> here"),
        ("</think>b", "", "b"),
        ("<think>a</think>b </think> c", "a", "b </think> c"),
        ("<think>a<think>b</think>c", "a<think>b", "c"),
    ],
)
def test_only_what_stands_first_is_reasoning(text, reasoning, content):
    said = parsed(text, reasoning="think")
    assert (said.reasoning, said.content) == (reasoning, content)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("a</think>b", "a", "b"),
        ("<think>a</think>b", "a", "b"),
        ("a", "a", ""),
        ("</think>b", "", "b"),
        ("\n a\n</think>\n\nb", "a", "b"),
    ],
)
def test_the_prompt_may_have_opened_the_reasoning(text, reasoning, content):
    said = parsed(text, reasoning="think", is_thinking=True)
    assert (said.reasoning, said.content) == (reasoning, content)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mistral", "[THINK]a[/THINK]b"),
        ("seed_oss", "<seed:think>a</seed:think>b"),
        ("minimax_m3", "<mm:think>a</mm:think>b"),
        ("granite", "Here is my thought process:\na\n\nHere is my response:\nb"),
        ("openai_gptoss", "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b"),
        ("kimi_k3", "<|open|>think<|sep|>a<|close|>think<|sep|><|open|>response<|sep|>b<|close|>response<|sep|>"),
    ],
)
def test_marks_of_each_family_are_taken_out(name, text):
    said = parsed(text, reasoning=name)
    assert (said.reasoning, said.content) == ("a", "b")


def test_reasoning_content_and_call_in_one_piece_are_told_apart():
    said = parsed(f"<think>a</think>b{CALL}", calls="hermes", reasoning="qwen3")
    assert (said.reasoning, said.content, said.calls) == ("a", "b", [("f", "{}")])


def test_a_call_inside_of_reasoning_ends_it():
    said = parsed(f"<think>I call it.\n{CALL}", calls="hermes", reasoning="qwen3")
    assert (said.reasoning, said.content, said.calls) == ("I call it.", "", [("f", "{}")])


def test_without_tools_a_call_inside_of_reasoning_stays_there():
    assert parsed(f"<think>x{CALL}</think>y", reasoning="qwen3").reasoning == f"x{CALL}"


@pytest.mark.parametrize(
    ("prompt", "name", "is_enabled", "expected"),
    [
        ("assistant\n<think>\n", "think", None, True),
        ("assistant\n<think>\n\n</think>\n\n", "qwen3", None, False),
        ("assistant\n", "think", None, False),
        ("assistant\n", "deepseek_r1", None, True),
        ("assistant\n", "qwen3", False, False),
        ("assistant\n", "qwen3", True, True),
        ("user: I like <think> tags\nassistant\n", "think", None, False),
        ("a</think>b<|im_end|>assistant\n", "qwen3", None, True),
        ("<|open|>think<|sep|>", "kimi_k3", None, True),
        ("<|start|>assistant", "openai_gptoss", None, False),
    ],
)
def test_where_a_text_begins_follows_from_the_end_of_the_prompt(prompt, name, is_enabled, expected):
    assert ParserChoice(reasoning=name).thinks_first(prompt, is_enabled=is_enabled) is expected


def test_special_tokens_that_no_parser_reads_are_hidden_and_those_that_one_does_do_not_leak():
    special = ["<|im_end|>", "<think>", "</think>", "<|tool_call_begin|>"]
    text = "<think>a<|im_end|>b</think>c <|im_end|>d <think>e<|im_en"
    said = parsed(text, reasoning="think", special=special)
    assert (said.reasoning, said.content) == ("ab", "c d e<|im_en")


def test_special_tokens_are_shown_when_asked():
    choice = ParserChoice(reasoning="think", special=frozenset({"<|im_end|>", "</think>"}))

    def make():
        from tiercel.text.parsers.interface import ToolSchemas

        return choice.make(ToolSchemas(), has_calls=False, is_thinking=False, shows_special=True)

    assert read(events_of(["<think>a</think>b<|im_end|>"], make)).content == "b<|im_end|>"


def test_content_is_given_as_soon_as_it_is_sure():
    parser = parser_of(calls="hermes", reasoning="think")
    given = [parser.feed(piece) for piece in ("<think>a", "b", "</think>", "Hel", "lo <", "b>")]
    assert ["".join(event.text for event in events) for events in given] == ["a", "b", "", "Hel", "lo", " <b>"]
