"""A form beside a mark that opens reasoning and is no token of its own."""

import pytest
from grammar_kit import Forms

from tiercel.text.thinking import ThinkingMarks

MARKS = ThinkingMarks(("<think>",), ("</think>",))


@pytest.fixture(scope="module")
def forms():
    made = Forms()
    yield made
    made.close()


def texts(forms, constraint):
    return {forms.tokenizer.token_text(i) for i in forms.allowed(constraint)}


def test_tokens_that_spell_an_opening_mark_come_beside_the_form(forms):
    one = forms.start({"choice": ["yes"]}, thinking=MARKS)
    assert texts(forms, one) == {"<", "y"}
    forms.say(one, "<th")
    assert texts(forms, one) == {"i", "in"}  # "ing" is no part of the mark
    forms.say(one, "ink>")
    assert len(forms.allowed(one)) == forms.vocab_size - 1  # all but an end
    forms.say(one, "hm</think>")
    assert texts(forms, one) == {"y"}
    forms.say(one, "yes")
    assert one.is_complete


def test_an_answer_may_begin_as_the_mark_does(forms):
    one = forms.start({"regex": "<[a-z]+>x"}, thinking=MARKS)
    forms.say(one, "<thing>x")
    assert one.is_complete


def test_a_whole_mark_is_reasoning_though_the_form_allows_it(forms):
    one = forms.start({"regex": "<[a-z]+>x"}, thinking=MARKS)
    forms.say(one, "<think>x<b></think><b>x")
    assert one.is_complete


def test_an_answer_that_is_the_marks_beginning_may_end(forms):
    one = forms.start({"choice": ["<"]}, thinking=MARKS)
    assert not one.may_end
    forms.say(one, "<")
    assert one.may_end
    assert not one.is_complete  # it may go on as a mark
    assert texts(forms, one) >= {"t", "<|im_end|>"}
    one.accept(forms.eos_id)
    assert one.is_complete


def test_what_only_the_mark_allows_goes_on_as_the_mark(forms):
    one = forms.start({"choice": ["<y"]}, thinking=MARKS)
    forms.say(one, "<")
    assert texts(forms, one) >= {"t", "y"}
    forms.say(one, "t")
    assert texts(forms, one) == {"h"}
    assert not one.may_end
    forms.say(one, "h")
    forms.say(one, "ink>z</think><y")
    assert one.is_complete


def test_stop_tokens_may_end_an_answer_that_is_the_marks_beginning(forms):
    (stop,) = forms.tokenizer.encode("!", add_special_tokens=False)
    one = forms.start({"choice": ["<"]}, thinking=MARKS, stop_ids=[stop])
    assert "!" not in texts(forms, one)
    forms.say(one, "<")
    one.accept(stop)
    assert one.is_complete
