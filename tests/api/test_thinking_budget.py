"""`thinking_token_budget` through the server: every route, whole and streamed at 1, 2, 3 and all tokens a step."""

import pytest
from kit import Rig, byte_tokenizer
from responding import RESPONSES
from scripted import CHAT, HI, LIMITS, MARKS, STEPS, TEMPLATE, GatedScript, Script, Scripted, Streamed, assert_same

THOUGHT = "Let me think about it for a while"
ANSWER = "Hi there."
PHRASE = "time is up</think>"


class Thinking:
    """Thinks until something ends it, and then answers: where its end stands, its text goes on behind."""

    thought, answer, end = THOUGHT, ANSWER, "</think>"

    def _next(self, output, mask):
        text = self.tokenizer.decode(output, skip_special_tokens=False)
        _, closing, behind = text.rpartition(self.end)
        said, before = (self.answer, behind) if closing else (self.thought + self.end, text)
        rest = self.tokenizer.encode(said[len(before) :], add_special_tokens=False)
        token = rest[0] if rest else 256
        return token if mask is None or mask[token] else int(mask.argmax())


class ThinkingScript(Thinking, Script):
    pass


class GatedThinkingScript(Thinking, GatedScript):
    pass


class Model(Scripted):
    def _rig(self, kind):
        kind = {Script: ThinkingScript, GatedScript: GatedThinkingScript}[kind]
        kind.tokenizer = self._tokenizer
        return super()._rig(kind)


def model(*, special=MARKS, **options):
    return Model("", special=special, **options)


OPENS = {"chat_template_kwargs": {"opens": True}}  # the prompt ends with "<think>\n": its line end is the first token


@pytest.mark.parametrize("special", [MARKS, ()], ids=["tokens", "letters"])
@pytest.mark.parametrize("phrase", [None, PHRASE], ids=["mark", "phrase"])
@pytest.mark.parametrize("budget", [0, 1, 2, 7, 1000, -1, None])
def test_reasoning_ends_when_its_budget_is_used_up_in_any_steps(monkeypatch, special, phrase, budget):
    config = None if phrase is None else {"reasoning_end_str": phrase}
    one = model(special=special, reasoning_config=config)
    ask = OPENS | {"thinking_token_budget": budget}
    whole = one.whole(**ask)
    (choice,) = whole["choices"]
    is_bounded = budget is not None and 0 <= budget <= len(THOUGHT)
    wanted = THOUGHT[: max(budget - 1, 0)] + (phrase or "").removesuffix("</think>") if is_bounded else THOUGHT
    assert (choice["message"].get("reasoning") or "") == wanted
    assert choice["message"]["content"] == ANSWER
    assert choice["finish_reason"] == "stop"
    n_marks = 1 if special else len("</think>")
    assert whole["usage"]["completion_tokens"] == len(wanted) + n_marks + len(ANSWER) + 1
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(wanted)
    for n_tokens in STEPS:
        streamed = Streamed(one.stream(monkeypatch, n_tokens, **ask))
        assert_same(streamed, whole)


def test_a_begun_message_has_thought_already():
    one = model()
    messages = [*HI, {"role": "assistant", "content": "<think>Let me"}]
    ask = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    assert one.whole(**ask, thinking_token_budget=8)["choices"][0]["message"]["reasoning"] == "Le"
    message = one.whole(**ask, thinking_token_budget=3)["choices"][0]["message"]
    assert message.get("reasoning") is None
    assert message["content"] == ANSWER


def test_a_users_mark_bounds_nothing():
    messages = [{"role": "user", "content": "What is <think>?"}]
    one = Scripted("A tag.", special=MARKS)
    answer = one.whole(messages=messages, thinking_token_budget=0)
    assert answer["choices"][0]["message"]["content"] == "A tag."


def test_the_models_own_mark_begins_the_count():
    one = Scripted("<think>abcdef</think>Hi", special=MARKS)
    message = one.whole(thinking_token_budget=2)["choices"][0]["message"]
    assert message["reasoning"] == "ab"


def test_a_completion_counts_from_the_mark_of_its_prompt():
    one = model()
    rig = one._rig(Script)
    ask = {"max_tokens": 100, "ignore_eos": False, "skip_special_tokens": False}
    (choice,) = rig.complete(prompt="Q<think>", thinking_token_budget=3, **ask)["choices"]
    assert choice["text"] == "Let</think>Hi there."
    (choice,) = rig.complete(prompt="Q", thinking_token_budget=3, **ask)["choices"]
    assert choice["text"] == THOUGHT + "</think>" + ANSWER
    rig.assert_idle()
    rig.close()


def test_a_response_has_the_field_too():
    rig = model()._rig(Script)
    ask = OPENS | {"input": "hi", "thinking_token_budget": 4, "max_output_tokens": 200}
    answer = rig.post(RESPONSES, ask)
    reasoning, message = answer["output"]
    assert reasoning["content"][0]["text"] == "Let"
    assert message["content"][0]["text"] == ANSWER
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == 3
    rig.close()


def test_a_message_bounds_its_thinking(monkeypatch):
    monkeypatch.setattr(Thinking, "thought", "x" * 2000)
    one = model(template=TEMPLATE.replace("if opens", "if enable_thinking"))
    rig = one._rig(Script)
    ask = {"messages": HI, "max_tokens": 2500, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    thinking, text = rig.post("/v1/messages", ask)["content"]
    assert thinking["thinking"] == "x" * 1023
    assert text["text"] == ANSWER
    rig.close()


def test_a_message_to_a_model_that_never_reasons_is_answered(make_rig):
    rig = make_rig(limits=LIMITS)
    ask = {"messages": HI, "max_tokens": 1500, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    assert rig.post("/v1/messages", ask)["content"]


@pytest.mark.parametrize("value", [True, False, 1.0, 0.5, -2, "1", [], 2**63])
def test_wrong_budgets_are_refused(value):
    assert model().refused(thinking_token_budget=value)["param"] == "thinking_token_budget"


def test_without_marks_of_reasoning_a_budget_is_refused(make_rig):
    for rig in (make_rig(), make_rig(settings={"reasoning_parser": "none"}, tokenizer=None)):
        error = rig.refused("/v1/completions", {"prompt": [1], "thinking_token_budget": 0})
        assert error["param"] == "thinking_token_budget"
        assert rig.complete(prompt=[1], thinking_token_budget=-1)["choices"]
        assert rig.complete(prompt=[1], thinking_token_budget=None)["choices"]
    plain = model(settings={"reasoning_parser": "none"})
    assert plain.refused(thinking_token_budget=5)["param"] == "thinking_token_budget"


def test_marks_of_the_server_are_enough(make_rig):
    config = {"reasoning_start_str": "[", "reasoning_end_str": "so]"}
    rig = make_rig(reasoning_config=config, settings={"reasoning_parser": "none"})
    (choice,) = rig.complete(prompt="why [", thinking_token_budget=0, max_tokens=4)["choices"]
    assert choice["text"].startswith("so]")


def test_the_field_is_there_for_a_grammar_behind_reasoning():
    one = model()
    rig = one._rig(Script)
    form = {"regex": "[0-9]{4}"}
    body = OPENS | {"messages": HI, "thinking_token_budget": 4, "structured_outputs": form, "max_tokens": 200}
    (choice,) = rig.post(CHAT, body)["choices"]
    assert choice["message"]["reasoning"] == "Let"
    assert choice["message"]["content"].isdigit()
    assert len(choice["message"]["content"]) == 4
    rig.close()


def test_a_tokenizer_that_is_shared_keeps_counts_apart():
    rig = Rig(tokenizer=lambda: byte_tokenizer(TEMPLATE, MARKS), limits=LIMITS, max_num_batched_tokens=1024)
    body = OPENS | {"messages": HI, "thinking_token_budget": 5, "n": 3, "max_tokens": 30, "seed": 2, "temperature": 1.0}
    choices = rig.post(CHAT, body)["choices"]
    assert len({choice["message"].get("reasoning") for choice in choices}) == 3
    rig.assert_idle()
    rig.close()


def test_an_answer_that_repeats_itself_ends_for_it_whole_and_streamed(monkeypatch):
    one = Scripted("So: " + "ab" * 30)
    ask = {"repetition_detection": {"max_pattern_size": 4, "min_pattern_size": 2, "min_count": 3}}
    whole = one.whole(**ask)
    (choice,) = whole["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("So: ababab", "repetition")
    assert choice["stop_reason"] == "repetition_detected"
    for n_tokens in STEPS:
        assert_same(Streamed(one.stream(monkeypatch, n_tokens, **ask)), whole)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"max_pattern_size": 4, "min_count": 1}, "repetition_detection.min_count"),
        ({"max_pattern_size": -1}, "repetition_detection.max_pattern_size"),
        ({"max_pattern_size": 1, "min_pattern_size": 2, "min_count": 2}, "repetition_detection.min_pattern_size"),
        ({"max": 4}, "repetition_detection"),
        ({"min_count": "2"}, "repetition_detection.min_count"),
        (3, "repetition_detection"),
    ],
)
def test_wrong_detections_are_refused(given, param):
    assert model().refused(repetition_detection=given)["param"] == param
