"""Each family's way of writing calls, in every cut of the stream."""

import json

import pytest
from parser_kit import parsed

D = {
    "begin": "<｜tool▁calls▁begin｜>",
    "end": "<｜tool▁calls▁end｜>",
    "call": "<｜tool▁call▁begin｜>",
    "stop": "<｜tool▁call▁end｜>",
    "sep": "<｜tool▁sep｜>",
}
K2 = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
DSML = "｜DSML｜"
TWO = [("f", {"i": 1}), ("g", {"s": "a<b"})]
FIRST, SECOND = '{"i": 1}', '{"s": "a<b"}'

# Parser -> texts that all hold the two calls, and nothing else.
TWO_CALLS = {
    "hermes": [
        f'<tool_call>\n{{"name": "f", "arguments": {FIRST}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "g", "arguments": {SECOND}}}\n</tool_call>',
        f'<tool_call>[{{"name": "f", "arguments": {FIRST}}}, {{"name": "g", "arguments": {SECOND}}}]</tool_call>',
        f'<tool_call>{{"arguments": {FIRST}, "name": "f"}}<tool_call>{{"name":"g","parameters":{SECOND}}}',
        f'<tool_call>{{"name": "f", "arguments": {FIRST}}}\n{{"name": "g", "arguments": {SECOND}}}</tool_call>',
    ],
    "granite": [
        f'<|tool_call|>[{{"name": "f", "arguments": {FIRST}}}, {{"name": "g", "arguments": {SECOND}}}]',
        f'<tool_call>[{{"name": "f", "arguments": {FIRST}}},{{"name": "g", "arguments": {SECOND}}}]',
        f'<function_call> {{"name": "f", "arguments": {FIRST}}}<function_call>{{"name": "g", "arguments": {SECOND}}}',
    ],
    "llama3_json": [
        f'{{"name": "f", "parameters": {FIRST}}};{{"name": "g", "parameters": {SECOND}}}',
        f'<|python_tag|>{{"name": "f", "parameters": {FIRST}}}; {{"name": "g", "arguments": {SECOND}}}',
        f'{{"type": "function", "function": {{"name": "f", "parameters": {FIRST}}}}}\n'
        f'{{"name": "g", "parameters": {SECOND}}}',
    ],
    "pythonic": [
        '[f(i=1), g(s="a<b")]',
        " [ f( i = 1 ) ,\n g(s='a<b') ] ",
        "<|python_start|>[f(i=1), g(s='a<b')]<|python_end|>",
    ],
    "lfm2": ["<|tool_call_start|>[f(i=1), g(s='a<b')]<|tool_call_end|>"],
    "olmo3": ["<function_calls>\nf(i=1)\ng(s='a<b')\n</function_calls>"],
    "mistral": [
        f"[TOOL_CALLS]f[ARGS]{FIRST}[TOOL_CALLS]g[ARGS]{SECOND}",
        f"[TOOL_CALLS]f{FIRST}[TOOL_CALLS]g{SECOND}",
        f'[TOOL_CALLS][{{"name": "f", "arguments": {FIRST}}}, {{"name": "g", "arguments": {SECOND}}}]',
        f'[TOOL_CALLS] [{{"name": "f", "arguments": {FIRST}}}][TOOL_CALLS]g[CALL_ID]abcdef123[ARGS]{SECOND}',
    ],
    "qwen3_coder": [
        "<tool_call>\n<function=f>\n<parameter=i>\n1\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=g>\n<parameter=s>\na<b\n</parameter>\n</function>\n</tool_call>",
        "<function=f><parameter=i>1</parameter></function><function=g><parameter=s>a<b</parameter></function>",
        "<tool_call><function=f>\n<parameter=i>\n1\n</function>\n<function=g>\n<parameter=s>\na<b\n</parameter>",
    ],
    "glm45": [
        "<tool_call>f\n<arg_key>i</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n"
        "<tool_call>g<arg_key>s</arg_key><arg_value>a<b</arg_value></tool_call>",
    ],
    "minimax_m2": [
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="i">1</parameter>\n</invoke>\n'
        "<invoke name='g'><parameter name=s>a<b</parameter></invoke>\n</minimax:tool_call>",
    ],
    "deepseek_v3": [
        f"{D['begin']}{D['call']}function{D['sep']}f\n```json\n{FIRST}\n```{D['stop']}\n"
        f"{D['call']}function{D['sep']}g\n```json\n{SECOND}\n```{D['stop']}{D['end']}",
    ],
    "deepseek_v31": [
        f"{D['begin']}{D['call']}f{D['sep']}{FIRST}{D['stop']}{D['call']}g{D['sep']}{SECOND}{D['stop']}{D['end']}",
        f"{D['call']}f{D['sep']}{FIRST}{D['call']}g{D['sep']}{SECOND}",
    ],
    "deepseek_v4": [
        f'<{DSML}tool_calls>\n<{DSML}invoke name="f">\n<{DSML}parameter name="i" string="false">1</{DSML}parameter>\n'
        f'</{DSML}invoke>\n<{DSML}invoke name="g">\n<{DSML}parameter name="s" string="true">a<b</{DSML}parameter>\n'
        f"</{DSML}invoke>\n</{DSML}tool_calls>",
        f'<{DSML}function_calls><{DSML}invoke name="f"><{DSML}parameter name="input" string="false">{FIRST}'
        f'</{DSML}parameter></{DSML}invoke><{DSML}invoke name="g"><{DSML}parameter name="s" string="true">a<b'
        f"</{DSML}parameter></{DSML}invoke></{DSML}function_calls>",
    ],
    "kimi_k2": [
        f"{K2[0]}<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{FIRST}<|tool_call_end|>"
        f"<|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{SECOND}<|tool_call_end|>{K2[1]}",
    ],
    "kimi_k3": [
        '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="i" type="integer"<|sep|>1'
        '<|close|>argument<|sep|><|close|>call<|sep|><|open|>call tool="g" index="2"<|sep|>'
        '<|open|>argument key="s" type="string"<|sep|>a<b<|close|>argument<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|>",
    ],
    "openai": [
        f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{FIRST}<|call|>"
        f"<|start|>assistant<|channel|>commentary to=functions.g <|constrain|>json<|message|>{SECOND}",
        f" to=functions.f<|channel|>commentary json<|message|>{FIRST}<|end|>"
        f"<|start|>assistant to=functions.g<|channel|>commentary<|message|>{SECOND}<|call|>",
    ],
}
CASES = [(name, text) for name, texts in TWO_CALLS.items() for text in texts]


@pytest.mark.parametrize(("name", "text"), CASES)
def test_two_calls_are_read_in_every_cut(name, text):
    said = parsed(text, calls=name)
    assert said.json_calls == TWO
    assert (said.content, said.reasoning) == ("", "")


@pytest.mark.parametrize(("name", "text"), CASES)
def test_words_around_calls_are_content_and_blanks_are_not(name, text):
    if name in ("pythonic", "openai", "kimi_k3") and not text.startswith("<|python_start|>"):
        pytest.skip("the format has no words before calls")
    said = parsed(f"Let me see: 1 < 2.\n\n{text}\n\n", calls=name)
    assert said.content == "Let me see: 1 < 2."
    assert said.json_calls == TWO


@pytest.mark.parametrize(("name", "text"), CASES)
def test_a_call_that_is_cut_is_delivered_as_far_as_it_came(name, text):
    whole = [arguments for _, arguments in parsed(text, calls=name).calls]
    for end in range(len(text)):
        said = parsed_once(text[:end], name)
        for got, full in zip(said.calls, whole, strict=False):
            # A cut call's arguments begin like the whole one's; only their last brace may come early.
            assert full.startswith(got[1]) or full.startswith(got[1].removesuffix("}"))


def parsed_once(text, name):
    from parser_kit import events_of, parser_of, read

    return read(events_of([text], lambda: parser_of(calls=name)))


@pytest.mark.parametrize("name", TWO_CALLS)
@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n ",
        "A plain answer.\n",
        "  indented\n\n\nlines  \n",
        "if a < b and c[0] > d: {x}",
        "[link](http://x) and [1, 2]",
        "```python\nprint({'a': [1]})\n```",
        '{"answer": {"name": "x", "parameters": {}}}',
        "🎉 ünï",
    ],
)
def test_a_plain_answer_passes_letter_by_letter(name, text):
    said = parsed(text, calls=name)
    assert (said.content, said.calls) == (text, [])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>not json</tool_call>"),
        ("hermes", "<tool_call>"),
        ("hermes", '<tool_call>{"name": 5}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call> then'),
        ("hermes", '<tool_call>{"na'),
        ("hermes", "a <tool_c"),
        ("llama3_json", '{"name": "Bob", "age": 3}'),
        ("llama3_json", '{"name": "Bob"}'),
        ("llama3_json", '{"name'),
        ("pythonic", "[f(1)]"),
        ("pythonic", "[f"),
        ("qwen3_coder", "<tool_call>plain</tool_call>"),
        ("qwen3_coder", "<function=" + "x" * 300 + ">"),
        ("glm45", "<tool_call><b>"),
        ("mistral", "[TOOL_CALLS]no arguments here"),
        ("deepseek_v4", f"<{DSML}tool_calls>nothing"),
    ],
)
def test_what_is_no_call_is_content(name, text):
    said = parsed(text, calls=name)
    assert (said.content, said.calls) == (text, [])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "f"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}}</tool_call>'),
        ("llama3_json", '{"name": "f", "parameters": {}}'),
        ("llama3_json", '{"name": "f"}'),
        ("pythonic", "[f()]"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n</function>\n</tool_call>"),
        ("glm45", "<tool_call>f</tool_call>"),
        ("glm45", "<tool_call>f\n</tool_call>"),
        ("kimi_k2", f"{K2[0]}<|tool_call_begin|>functions.f:0<|tool_call_end|>{K2[1]}"),
        ("deepseek_v31", f"{D['begin']}{D['call']}f{D['sep']}{D['stop']}{D['end']}"),
        ("deepseek_v4", f'<{DSML}tool_calls><{DSML}invoke name="f"></{DSML}invoke></{DSML}tool_calls>'),
        ("openai", "<|channel|>commentary to=functions.f<|message|><|call|>"),
        ("kimi_k3", '<|open|>call tool="f" index="1"<|sep|><|close|>call<|sep|>'),
    ],
)
def test_a_call_without_arguments_has_an_empty_object(name, text):
    said = parsed(text, calls=name)
    assert said.calls == [("f", "{}")]
    assert said.content == ""


def test_json_arguments_pass_as_the_model_wrote_them():
    text = '<tool_call>{"name": "f", "arguments": {"a":1 ,\n "b": [ {"c": "}]\\"{"} ]}}</tool_call>'
    assert parsed(text, calls="hermes").calls == [("f", '{"a":1 ,\n "b": [ {"c": "}]\\"{"} ]}')]


def test_what_models_get_wrong_in_json_is_mended():
    arguments = '{"code": "a\n\tb", "re": "\\d+\\.", "l": [1, 2, ], "z": 1,\n}'
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert parsed(text, calls="hermes").json_calls == [("f", {"code": "a\n\tb", "re": "\\d+\\.", "l": [1, 2], "z": 1})]


def test_arguments_inside_of_a_string_are_taken_out():
    inner = json.dumps({"a": 'x"y'})
    text = f'<tool_call>{{"name": "f", "arguments": {json.dumps(inner)}}}</tool_call>'
    assert parsed(text, calls="hermes").calls == [("f", inner)]


def test_a_marker_inside_of_a_string_ends_nothing():
    text = '<tool_call>{"name": "f", "arguments": {"s": "</tool_call><tool_call>"}}</tool_call>ok'
    said = parsed(text, calls="hermes")
    assert said.json_calls == [("f", {"s": "</tool_call><tool_call>"})]
    assert said.content == "ok"


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("s", "007", "007"),
        ("s", '"quoted"\n\tand \\ more', '"quoted"\n\tand \\ more'),
        ("s", "", ""),
        ("s", "\n", "\n"),
        ("s", "x\n\n", "x\n\n"),
        ("i", "42", 42),
        ("i", "4.0", 4),
        ("i", "many", "many"),
        ("x", "1", 1),
        ("x", "1.5", 1.5),
        ("x", "1e999", "1e999"),
        ("b", "True", True),
        ("b", "yes", "yes"),
        ("l", "[1, 'a', None]", [1, "a", None]),
        ("l", "[1, ", "[1, "),
        ("o", '{"a": {"b": []}}', {"a": {"b": []}}),
        ("o", "{'a': True}", {"a": True}),
        ("u", "null", None),
        ("u", "text", "text"),
        ("any", "5", 5),
        ("any", "five", "five"),
        ("unknown", "5", "5"),
        ("o", "[" * 5000, "[" * 5000),
        ("o", "__import__('os')", "__import__('os')"),
    ],
)
def test_values_between_tags_get_their_schemas_type(key, value, expected):
    text = f"<tool_call>\n<function=f>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"
    read_text = parsed if len(text) < 1000 else lambda text, calls: parsed_once(text, calls)
    assert read_text(text, calls="qwen3_coder").json_calls == [("f", {key: expected})]


def test_a_string_between_tags_streams_and_nothing_is_given_that_could_change():
    from parser_kit import parser_of

    parser = parser_of(calls="qwen3_coder")
    events = []
    for letter in '<tool_call><function=f><parameter=s>a"b':
        events += parser.feed(letter)
    assert [event.text for event in events[1:]] == ['{"s": "', "a", '\\"', "b"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[f(a="x\\"y", b=None, c=1e999)]', {"a": 'x"y', "b": None, "c": "1e999"}),
        ('[f(a="]\\n[")]', {"a": "]\n["}),
        ('[f(a="]\n[")]', {"a": "]\n["}),
        ("[f(a=[1, (2, 3)], b={'k': True}, c=true)]", {"a": [1, [2, 3]], "b": {"k": True}, "c": True}),
        ('[f(a="""x"y\n""", b=\'\')]', {"a": 'x"y\n', "b": ""}),
        ("[f(a=open('x').read(), b={1, 2})]", {"a": "open('x').read()", "b": "{1, 2}"}),
        ("[f(from=1, a.b=2)]", {"from": 1, "a.b": 2}),
        ("[f(a=-1.5e3, b='é')]", {"a": -1500.0, "b": "é"}),
    ],
)
def test_python_literals_become_json_or_strings(text, expected):
    assert parsed(text, calls="pythonic").json_calls == [("f", expected)]


def test_kimis_header_is_the_calls_id():
    text = f"{K2[0]}<|tool_call_begin|>functions.a.b:7<|tool_call_argument_begin|>{{}}<|tool_call_end|>{K2[1]}more"
    said = parsed(text, calls="kimi_k2")
    assert (said.ids, said.calls) == (["functions.a.b:7"], [("a.b", "{}")])
    assert said.content == ""  # behind a section nothing is


def test_mistrals_own_id_is_kept():
    assert parsed("[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{}", calls="mistral").ids == ["abc123def"]


def test_kimi_k3_unescapes_attributes_and_splits_channels():
    text = (
        "<|open|>think<|sep|>why<|close|>think<|sep|><|open|>response<|sep|>Hi<|close|>response<|sep|>"
        '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="a&quot;&amp;" type="string"'
        "<|sep|>v<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|end_of_msg|>"
    )
    said = parsed(text, calls="kimi_k3", reasoning="kimi_k3")
    assert (said.reasoning, said.content, said.json_calls) == ("why", "Hi", [("f", {'a"&': "v"})])


def test_harmonys_channels_are_split():
    text = (
        "<|channel|>analysis<|message|>Hm <b>.<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
        "<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"
        "<|start|>assistant<|channel|>final<|message|>Done<|return|>"
    )
    said = parsed(text, calls="openai", reasoning="openai_gptoss")
    assert (said.reasoning, said.content, said.json_calls) == ("Hm <b>.", "I look.Done", [("f", {})])


def test_an_unknown_wrapper_is_unwrapped_only_when_it_is_alone():
    inner = f'<{DSML}parameter name="arguments" string="true">{{"i": 1}}</{DSML}parameter>'
    other = f'<{DSML}parameter name="s" string="true">x</{DSML}parameter>'

    def text(body):
        return f'<{DSML}tool_calls><{DSML}invoke name="f">{body}</{DSML}invoke></{DSML}tool_calls>'

    assert parsed(text(inner), calls="deepseek_v4").json_calls == [("f", {"i": 1})]
    both = parsed(text(inner + other), calls="deepseek_v4").json_calls
    assert both == [("f", {"arguments": '{"i": 1}', "s": "x"})]
