"""Chat templates: what they print, and what they cannot do."""

from datetime import datetime

import pytest

from tiercel.base.errors import ModelFileError, RequestError
from tiercel.text import chat_template
from tiercel.text.chat_template import ChatTemplate, default_template

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# In the manner of Gemma 3: alternation is checked, content is text or parts, everything is trimmed.
TURNS = """{{ bos_token }}
{%- for message in messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate") }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}{{ '<image>' }}{%- else -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""
USER = [{"role": "user", "content": "hi"}]


class _Clock:
    """A clock that moves by a fixed step whenever it is read."""

    def __init__(self, step_s: float) -> None:
        self.now_s = 0.0
        self.step_s = step_s

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


def _template(source, **more):
    return ChatTemplate(source, bos_token="<bos>", eos_token="<eos>", **more)


def _render(source, messages=USER, **more):
    return _template(source).render(messages, **more)


def test_smollm2_prints_its_turns():
    assert _render(SMOLLM2) == (
        "<|im_start|>system\nYou are helpful<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_turns_template_prints_text_and_parts_alike():
    expected = "<bos><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n"
    assert _render(TURNS) == expected
    assert _render(TURNS, [{"role": "user", "content": [{"type": "text", "text": " hi "}]}]) == expected


def test_the_template_s_own_refusal_reaches_the_client():
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        _render(TURNS, [*USER, *USER])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (SMOLLM2, "string"),
        (TURNS, "openai"),
        ("{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}", "openai"),
        ("{% for m in messages %}{% set c = m['content'] %}{% for p in c %}{{ p }}{% endfor %}{% endfor %}", "openai"),
        ("{% macro show(content) %}{% for p in content %}{{ p }}{% endfor %}{% endmacro %}", "openai"),
        ("{% for m in messages[1:] %}{{ m.content | trim }}{% endfor %}", "string"),
    ],
)
def test_the_form_of_content_is_read_from_the_template(source, expected):
    assert _template(source).content_format == expected


def test_parts_are_joined_for_templates_that_want_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert _render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb"
    with pytest.raises(RequestError, match="'image_url'"):
        _render("{{ messages[0].content }}", [{"role": "user", "content": [{"type": "image_url"}]}])


def test_text_becomes_a_part_for_templates_that_know_only_parts():
    assert _render("{% for p in messages[0].content %}[{{ p.text }}]{% endfor %}") == "[hi]"


def test_content_that_is_null_is_empty():
    assert _render("<{{ messages[0].content }}>", [{"role": "assistant", "content": None}]) == "<>"


def test_arguments_of_tool_calls_are_objects_to_the_template():
    call = {"type": "function", "function": {"name": "f", "arguments": '{"é": 1}'}}
    source = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    assert _render(source, [{"role": "assistant", "tool_calls": [call]}]) == '{"é": 1}'
    call["function"]["arguments"] = "{"
    with pytest.raises(RequestError, match="not JSON"):
        _render(source, [{"role": "assistant", "tool_calls": [call]}])


def test_the_client_s_messages_are_not_changed():
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}], "tool_calls": []}]
    _render("{{ messages[0].content }}", messages)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "a"}], "tool_calls": []}]


def test_tojson_escapes_neither_html_nor_letters():
    assert _render("{{ tools | tojson }}", tools=[{"a": "<é&'>"}]) == '[{"a": "<é&\'>"}]'
    assert _render("{{ tools | tojson(indent=2) }}", tools=[{"a": 1}]) == '[\n  {\n    "a": 1\n  }\n]'


def test_what_templates_use_is_there():
    now = datetime(2031, 2, 3)
    assert _template("{{ strftime_now('%d %b %Y') }}", now=lambda: now).render([]) == "03 Feb 2031"
    assert _render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "1"
    assert _render("a{% generation %}b{{ 1 }}{% endgeneration %}c") == "ab1c"
    assert _render("{{ eos_token }}{{ x }}{{ nothing }}{{ none }}", x=3) == "<eos>3None"
    assert _render("{% if true %}\n  a\n{% endif %}\nb") == "  a\nb"
    assert _render("{{ 'a-b'.split('-')[1].upper() ~ '%s' % 3 ~ '{}'.format(4) ~ 'x' * 2 }}") == "B34xx"
    assert (
        _render("{{ ['a', 'b'] | join(',') }}{{ 'aba' | replace('a', 'c') }}{{ 'aba'.replace('b', '') }}") == "a,bcbcaa"
    )
    assert _render("{% for x in [[1, [2]], [3, []]] recursive %}{{ x[0] }}{% endfor %}") == "13"
    assert _render("{% for x in [1, 2, 3] if x != 2 %}{{ loop.index }}{{ loop.last }}{% endfor %}") == "1False2True"
    assert _render("{% macro f(a) %}<{{ a }}>{% endmacro %}{{ f(1) }}{{ 'a\nb' | indent(1) }}") == "<1>a\n b"
    assert _render("{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ 2 ** 3 }}{{ 7 % 4 }}") == "283"


def test_a_final_message_is_continued_without_its_end():
    chat = [*USER, {"role": "assistant", "content": "The capital "}]
    text = _render(SMOLLM2, chat, continue_final_message=True, add_generation_prompt=False)
    assert text.endswith("<|im_start|>assistant\nThe capital ")
    parts = [*USER, {"role": "assistant", "content": [{"type": "text", "text": "The"}]}]
    text = _render(TURNS, parts, continue_final_message=True, add_generation_prompt=False)
    assert text.endswith("<start_of_turn>model\nThe")


@pytest.mark.parametrize(
    ("messages", "more"),
    [
        (USER, {"add_generation_prompt": True}),
        ([], {"add_generation_prompt": False}),
        ([{"role": "assistant"}], {"add_generation_prompt": False}),
    ],
)
def test_what_cannot_be_continued_is_refused(messages, more):
    with pytest.raises(RequestError):
        _render("x", messages, continue_final_message=True, **more)


def test_a_template_that_hides_the_final_message_cannot_continue_it():
    with pytest.raises(RequestError, match="does not print the last message"):
        _render("x", continue_final_message=True, add_generation_prompt=False)


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "return_tensors", "add_special_tokens", "_private"])
def test_variables_that_would_change_how_it_is_run_are_refused(name):
    with pytest.raises(RequestError, match=name) as caught:
        _render("x", **{name: True})
    assert caught.value.param == "chat_template_kwargs"


HOSTILE = {
    "huge range": "{% for i in range(10**9) %}x{% endfor %}",
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loop in a test": "{% for i in range(99999) if range(9999) | list | length == 0 %}{% endfor %}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "macro that doubles": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "recursive loop": "{% for x in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 40 }}{% endfor %}",
    "long text": "{{ 'x' * 10**10 }}",
    "long text twice": "{{ 10**10 * 'x' }}",
    "long list": "{{ ([1] * 10**10) | length }}",
    "long number": "{{ 10 ** (10 ** 10) }}",
    "number that squares": "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "text that doubles": "{% set n = namespace(s='aa') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "sum that doubles": "{% set n = namespace(s='aa') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "lists of lists": "{% set n = namespace(s=['a']) %}{% for i in range(99) %}{% set n.s = [n.s, n.s] %}{% endfor %}"
    "{{ n.s }}",
    "lists of lists as json": "{% set n = namespace(s=['a']) %}{% for i in range(99) %}{% set n.s = [n.s, n.s] %}"
    "{% endfor %}{{ n.s | tojson }}",
    "width of format": "{{ '%999999999d' | format(1) }}",
    "width of %": "{{ '%*d' % (999999999, 1) }}",
    "width of str.format": "{{ '{:999999999}'.format(1) }}",
    "width of a method": "{{ 'a'.ljust(10**10) }}",
    "width of strftime": "{{ strftime_now('%9999999d') }}",
    "width of indent": "{{ 'a\nb' | indent(10**10) }}",
    "width of json": "{{ messages | tojson(indent=10**9) }}",
    "replace": "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "replace method": "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "join": "{{ (['a'] * 99999) | join('b' * 100000) }}",
    "join method": "{{ ('b' * 100000).join(['a'] * 99999) }}",
    "long output": "{% for i in range(99999) %}" + "y" * 1000 + "{% endfor %}",
    "long block": "{% set x %}{% for i in range(99999) %}" + "y" * 1000 + "{% endfor %}{% endset %}",
    "sum of lists": "{{ [[1], [2]] | sum(start=[]) }}",
    "change": "{{ messages.append(1) }}",
    "file": "{% include '/etc/passwd' %}",
    "function": "{{ raise_exception }}",
    "class": "{{ namespace }}",
    "missing": "{{ messages[9].role.x }}",
    "type": "{{ 'a' + 1 }}",
    "zero": "{{ 1 / 0 }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_stopped(name):
    # The clock moves 2 ms a charge: the five seconds are over after 2,500 of them, however slow the machine is.
    template = _template(HOSTILE[name], clock=_Clock(2e-3))
    with pytest.raises(RequestError) as caught:
        template.render(USER)
    assert caught.value.param == "messages"
    assert "0x" not in str(caught.value)
    assert "/etc" not in str(caught.value)


@pytest.mark.parametrize("source", ["{{ ().__class__.__mro__ }}", "{{ cycler.__init__ }}", "{{ messages.__len__ }}"])
def test_python_s_internals_are_out_of_reach(source):
    try:
        assert _render(source) == ""
    except RequestError as error:
        assert "unsafe" in str(error) or "undefined" in str(error)  # noqa: PT017


def test_turns_are_counted_though_the_clock_stands_still(monkeypatch):
    monkeypatch.setattr(chat_template, "N_TURNS_MAX", 1000)
    source = "{% for i in range(n) %}{% for j in range(10) %}{% endfor %}{% endfor %}ok"
    assert _template(source, clock=lambda: 0.0).render([], n=90) == "ok"
    with pytest.raises(RequestError, match="too many turns"):
        _template(source, clock=lambda: 0.0).render([], n=91)


def test_budgets_of_two_renderings_are_apart(monkeypatch):
    monkeypatch.setattr(chat_template, "N_TURNS_MAX", 1000)
    template = _template("{% for i in range(900) %}{% endfor %}ok", clock=lambda: 0.0)
    assert [template.render([]) for _ in range(3)] == ["ok"] * 3


@pytest.mark.parametrize(
    "source",
    [
        "{% if a %}" * 5000 + "{% endif %}" * 5000,
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "[" * 50_000,
        "{% for x in y %}" * 60 + "{% endfor %}" * 60,
        "{{ " + "-" * 20_000 + "1 }}",
        "{{ a" + ".b" * 5000 + " }}",
        "{% nonsense %}",
        "{{ 'a' | center(10**9) }}",
        "{{",
        "x" * ((1 << 20) + 1),
        "é" * (1 << 19) + "x",
    ],
    ids=lambda source: source[:12],
)
def test_a_template_that_cannot_be_compiled_is_the_model_s_fault(source):
    with pytest.raises(ModelFileError, match="chat_template") as caught:
        _template(source)
    assert len(str(caught.value)) < 500


def test_named_templates_are_chosen_by_the_presence_of_tools():
    assert default_template({"default": "d", "tool_use": "t"}, has_tools=True) == "t"
    assert default_template({"default": "d", "tool_use": "t"}, has_tools=False) == "d"
    assert default_template({}, has_tools=True) is None
