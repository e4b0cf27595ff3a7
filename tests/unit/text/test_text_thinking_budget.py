"""The count of bounded reasoning, against the rule written down in full for each token."""

import random

import pytest

from tiercel.base.errors import ConfigError, RequestError
from tiercel.text.thinking_budget import ReasoningConfig, ReasoningMarkers, ThinkingBudget

# Marks of several tokens, of which parts stand elsewhere too.
SPELT = ReasoningMarkers(("<t>",), ("</t>",), "so </</t>")
# As special tokens: 1 and 2; the others are letters.
TEXTS = {1: b"<think>", 2: b"</think>"}


def letter(token_id):
    return TEXTS.get(token_id, bytes([token_id]))


def spelt(text):
    return list(text.encode())


def whole(text):
    ids = []
    while text:
        found = next((i for i, mark in TEXTS.items() if text.startswith(mark.decode())), None)
        ids.append(ord(text[0]) if found is None else found)
        text = text[1 if found is None else len(TEXTS[found]) :]
    return ids


def begin(markers, n_max, prompt, *, encode=spelt):
    return ThinkingBudget.start(markers, n_max, prompt, encode=encode, token_bytes=letter)


def find_last(ids, mark):
    return max((i for i in range(len(ids) - len(mark) + 1) if ids[i : i + len(mark)] == mark), default=-1)


def rule(ids, n_max, start, end, forced):
    """Give the token that the rule forces behind `ids`, looked up from nothing."""
    last_start, last_end = find_last(ids, start), find_last(ids, end)
    if last_start < 0 or last_end >= last_start:
        return None
    thought = ids[last_start + len(start) :]
    if len(thought) < n_max:
        return None
    m = max(m for m in range(len(forced)) if m <= len(thought) and thought[len(thought) - m :] == forced[:m])
    return forced[m]


@pytest.mark.parametrize("n_max", [0, 1, 2, 5])
def test_every_token_of_random_texts_is_forced_as_the_rule_says(n_max):
    draw = random.Random(n_max)
    start, end, forced = spelt("<t>"), spelt("</t>"), spelt(SPELT.forced_end)
    n_forced = 0
    for _ in range(300):
        ids = [draw.choice(b"<t>/so ab") for _ in range(draw.randrange(12))]
        if draw.random() < 0.6:
            ids[draw.randrange(len(ids) + 1) : 0] = start
        budget = begin(SPELT, n_max, ids)
        for _ in range(40):
            wanted = rule(ids, n_max, start, end, forced)
            assert budget.forced_id == wanted, bytes(ids)
            obeys = wanted is not None and draw.random() < 0.9
            n_forced += obeys
            choice = wanted if obeys else draw.choice((*b"<t>/so ab", None))
            for token in spelt(draw.choice(("<t>", "</t>", "so "))) if choice is None else [choice]:
                ids.append(token)
                budget.push(token)
                budget.check()
    assert n_forced > 300


def test_special_tokens_are_marks_as_well_as_spelt_ones():
    markers = ReasoningMarkers(("<think>",), ("</think>",), "time is up</think>")
    for prompt in ([1], spelt("<think>")):
        budget = begin(markers, 2, prompt, encode=whole)
        said = []
        for token in b"abcdefghijklm":
            said.append(token if budget.forced_id is None else budget.forced_id)
            budget.push(said[-1])
        assert said == [*b"ab", *b"time is up", 2]
        assert budget.forced_id is None
        assert not budget.is_thinking


def test_a_natural_end_at_exactly_the_budget_is_left_alone():
    budget = begin(ReasoningMarkers(("<think>",), ("</think>",), "</think>"), 2, [1], encode=whole)
    for token in (97, 98):
        assert budget.forced_id is None
        budget.push(token)
    assert budget.forced_id == 2
    budget.push(2)
    assert budget.forced_id is None


def test_each_reasoning_counts_afresh():
    budget = begin(ReasoningMarkers(("<think>",), ("</think>",), "</think>"), 1, [1, 97, 2, 98], encode=whole)
    assert not budget.is_thinking
    for token, forced in ((99, None), (1, None), (97, 2), (2, None), (98, None), (1, None), (97, 2)):
        budget.push(token)
        assert budget.forced_id == forced


def test_reasoning_of_the_prompt_counts_and_what_it_began_of_the_end_goes_on():
    markers = ReasoningMarkers(("<think>",), ("</think>",), "so</think>")
    assert begin(markers, 4, [1, *b"abc"], encode=whole).forced_id is None
    assert begin(markers, 3, [1, *b"abc"], encode=whole).forced_id == ord("s")
    assert begin(markers, 3, [1, *b"abcs"], encode=whole).forced_id == ord("o")
    assert begin(markers, 0, [1], encode=whole).forced_id == ord("s")
    assert begin(markers, 0, [97], encode=whole).forced_id is None


def test_a_mark_begun_by_the_prompt_is_ended_by_the_output():
    budget = begin(SPELT, 0, spelt("a<t"))
    assert budget.forced_id is None
    budget.push(ord(">"))
    assert budget.forced_id == ord("s")


def test_a_copy_goes_on_by_itself():
    budget = begin(SPELT, 3, spelt("<t>a"))
    other = budget.copy()
    for token in b"bc":
        budget.push(token)
    assert (budget.forced_id, other.forced_id, other.n_tokens) == (ord("s"), None, 1)


def test_a_tokenizer_that_cannot_write_the_end_is_told():
    with pytest.raises(RequestError, match="cannot write"):
        begin(SPELT, 1, [], encode=lambda text: [ord("?")])


@pytest.mark.parametrize(
    ("given", "begins", "ends", "want"),
    [
        (None, ("<t>",), ("</t>", "<call>"), ReasoningMarkers(("<t>",), ("</t>", "<call>"), "</t>")),
        ({"reasoning_end_str": "so</t>"}, ("<t>",), ("</t>",), ReasoningMarkers(("<t>",), ("</t>",), "so</t>")),
        ({"reasoning_start_str": "<a>"}, ("<t>",), ("</t>",), ReasoningMarkers(("<a>",), ("</t>",), "</t>")),
        ({"reasoning_start_str": "<a>", "reasoning_end_str": "b"}, (), (), ReasoningMarkers(("<a>",), ("b",), "b")),
        ({"reasoning_end_str": "b"}, (), (), None),
        (None, (), (), None),
    ],
)
def test_the_servers_words_go_before_the_models(given, begins, ends, want):
    config = ReasoningConfig.from_options(given or {})
    assert config.markers(begins, ends) == want


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"start": "a"}, "unknown"),
        ({"reasoning_end_str": ""}, "1 to"),
        ({"reasoning_end_str": 1}, "1 to"),
        ({"reasoning_end_str": "so"}, "ends with </t>"),
        ({"reasoning_start_str": "/t"}, "holds the other"),
    ],
)
def test_wrong_words_of_a_server_are_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        ReasoningConfig.from_options(given).markers(("<t>",), ("</t>",))
