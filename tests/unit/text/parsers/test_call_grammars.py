"""What a family's grammar of calls lets through, its parser reads as calls whose arguments validate."""

import json
import sys
from pathlib import Path

import jsonschema
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "sampling"))

from grammar_kit import Forms, bpe_tokenizer

from tiercel.text.parsers.call_grammars import CallTool, NotExpressible
from tiercel.text.parsers.interface import CallArguments, CallBegin, Content, ToolSchemas, merged
from tiercel.text.parsers.registry import CALL_FORMATS, ParserChoice

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "n": {"type": "integer"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "deep": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"ok": {"type": "boolean"}, "x": {"type": "number"}},
                "required": ["ok"],
                "additionalProperties": False,
            },
            "maxItems": 2,
        },
    },
    "required": ["city", "n"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": WEATHER, "get_time": {"type": "object", "properties": {}, "additionalProperties": False}}
TOOLS = [CallTool(name, schema) for name, schema in SCHEMAS.items()]
CHANNELS = {"openai": "openai_gptoss", "kimi_k3": "kimi_k3"}
# How an answer with a call begins in each family: where calls are not required, a walk of chance finds none.
BEGINNINGS = {
    "hermes": "Well: <tool_call>",
    "granite": "Well: <|tool_call|>[",
    "mistral": "Well: [TOOL_CALLS]",
    "pythonic": "[",
    "llama3_json": 'Well: {"name',
    "qwen3_coder": "Well: <tool_call>",
    "glm45": "Well: <tool_call>",
    "deepseek_v3": "Well: <｜tool▁calls▁begin｜>",
    "deepseek_v31": "Well: <｜tool▁calls▁begin｜>",
    "deepseek_v4": "Well: <｜DSML｜tool_calls>",
    "kimi_k2": "Well: <|tool_calls_section_begin|>",
    "minimax_m2": "Well: <minimax:tool_call>",
    "openai": "<|channel|>commentary",
}
FAMILIES = sorted({*BEGINNINGS, "seed_oss", "lfm2", "olmo3", "kimi_k3"})


class Family:
    def __init__(self, name, *, has_special):
        marks = [text for text in CALL_FORMATS[name].texts if text.startswith(("<|", "[T", "[A", "<｜t"))]
        self.forms = Forms(bpe_tokenizer(marks if has_special else ()), n_padding=3)
        tokenizer = self.forms.tokenizer
        self.parsers = ParserChoice(
            calls=name, reasoning=CHANNELS.get(name), special=frozenset(tokenizer.special_tokens)
        )

    def compile(self, tools=TOOLS, **options):
        special = self.forms.tokenizer.special_tokens
        lark, self.reading = self.parsers.form_of_calls(special, tools, **options)
        return self.forms.compile(grammar=lark)

    def read(self, text):
        """Give the calls in a text, and what stands around them."""
        parser = self.reading.make(ToolSchemas(SCHEMAS), has_calls=True, is_thinking=False, calls_end_reasoning=False)
        calls, content = [], ""
        for event in merged([*parser.feed(text), *parser.finish()]):
            if isinstance(event, CallBegin):
                calls.append([event.name, ""])
            elif isinstance(event, CallArguments):
                calls[-1][1] += event.text
            elif isinstance(event, Content):
                content += event.text
        return [(name, json.loads(arguments)) for name, arguments in calls], content


@pytest.mark.parametrize("has_special", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_required_calls_are_read_as_calls_that_validate(name, has_special):
    family = Family(name, has_special=has_special)
    n_ended = 0
    for is_single in (True, False):
        compiled = family.compile(is_required=True, is_single=is_single)
        for seed in range(10):
            text = family.forms.walk(compiled.start(), seed, n_max=250)
            if text is None:
                continue
            n_ended += 1
            calls, content = family.read(text)
            assert calls, text
            assert not content.strip(), text
            assert len(calls) == 1 or not is_single, text
            for tool, arguments in calls:
                jsonschema.validate(arguments, SCHEMAS[tool])
    family.forms.close()
    assert n_ended >= 2


WRITTEN = {
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nZürich\n</parameter>\n<parameter=n>\n3\n"
    "</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n<arg_key>n</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>",
    "deepseek_v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" '
    'string="true">Zürich</｜DSML｜parameter>\n<｜DSML｜parameter name="n" string="false">3'
    "</｜DSML｜parameter>\n</｜DSML｜invoke>\n"
    "</｜DSML｜tool_calls>",
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "n": 3}}\n</tool_call>',
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" '
    'type="string"<|sep|>Zürich<|close|>argument<|sep|><|open|>argument key="n" type="integer"<|sep|>3'
    "<|close|>argument<|sep|>"
    "<|close|>call<|sep|><|close|>tools<|sep|>",
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_what_a_family_has_learnt_to_write_is_let_through(name):
    family = Family(name, has_special=True)
    constraint = family.compile(is_required=True, is_single=True).start()
    family.forms.say(constraint, WRITTEN[name])
    assert constraint.may_end
    assert family.read(WRITTEN[name])[0] == [("get_weather", {"city": "Zürich", "n": 3})]
    family.forms.close()


@pytest.mark.parametrize("name", sorted(BEGINNINGS))
def test_calls_of_strict_tools_validate_where_one_is_begun(name):
    family = Family(name, has_special=True)
    compiled = family.compile(is_required=False, is_single=False)
    n_read = 0
    for seed in range(6):
        text = family.forms.walk(compiled.start(), seed, n_max=250, first=BEGINNINGS[name])
        calls, _ = family.read(text) if text is not None else ([], "")
        n_read += len(calls)
        for tool, arguments in calls:
            jsonschema.validate(arguments, SCHEMAS[tool])
    family.forms.close()
    assert n_read > 0


def test_an_answer_in_words_is_let_through_where_calls_are_not_required():
    family = Family("hermes", has_special=True)
    constraint = family.compile(is_required=False, is_single=False).start()
    family.forms.say(constraint, 'It is {"name": 3} degrees.\n')
    assert constraint.may_end


def test_parameters_that_tags_cannot_say_are_written_as_plain_json():
    tool = CallTool(
        "pick", {"type": "object", "properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "string"}]}}}
    )
    family = Family("qwen3_coder", has_special=False)
    constraint = family.compile([tool], is_required=True, is_single=True).start()
    family.forms.say(constraint, '{"name": "pick", "parameters": {"a": "3"}}')
    assert constraint.is_complete
    assert family.reading.calls == "llama3_json"
    with pytest.raises(NotExpressible, match=r"pick\.a"):
        family.compile([tool], is_required=False, is_single=True)
    family.forms.close()
