"""How calls are written, as grammars: what makes a model's calls well-formed, in the form that its family has learnt.

The other half of the parsers: a text that one of these grammars allows is read by the parser of the same family as
calls of known tools whose arguments keep to their schemas. A family is a `CallTexts`; `form_of_calls` writes the
grammar.

Where arguments stand in tags of their own, or as Python's, each value is written in its parameter's type. A parameter
whose type the text does not tell (several types, a pattern for a string that is written bare) is not expressible there:
`NotExpressible`. Whoever asks may then take `PLAIN`, JSON objects with `; ` between, which `llama_json` reads.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tiercel.text.lark import Lark
from tiercel.text.parsers import deepseek, glm, kimi, qwen3_coder
from tiercel.text.parsers.sections import SectionTexts
from tiercel.text.parsers.tagged import TagTexts

_WORD: Final = re.compile(r"[A-Za-z_]\w*")
FIRST_IS_NO_CALL: Final = r"([^\[<\s](.|\n)*)?"
# What says nothing about which values are allowed.
_WORDS_ONLY: Final = frozenset({"type", "title", "description", "default", "examples", "$comment", "deprecated"})
_OF_OBJECTS: Final = _WORDS_ONLY | {"properties", "required", "additionalProperties", "$defs", "definitions", "strict"}
_BARE_TYPES: Final = ("integer", "number", "boolean", "object", "array", "null")


class NotExpressible(ValueError):
    """A tool's parameters cannot be written in a family's form so that they are surely read back."""


@dataclass(frozen=True)
class CallTool:
    """A tool of the request: its name, and its parameters' schema, checked."""

    name: str
    schema: Mapping[str, Any] = field(default_factory=dict)


Body = Callable[[Lark, CallTool], str]


@dataclass(frozen=True)
class CallTexts:
    """What stands around calls, and `body`, which gives the expression of one between `begin` and `end`.

    is_first_only   calls are such at the beginning of a text only, and need no mark there
    lead, answer    for channels: expressions of what may stand before all calls, and of an answer without any
    """

    body: Body
    section: str = ""
    begin: str = ""
    end: str = ""
    between: str = ""
    section_end: str = ""
    is_first_only: bool = False
    lead: Callable[[Lark], str] | None = None
    answer: Callable[[Lark], str] | None = None


def form_of_calls(
    texts: CallTexts, special: Mapping[str, int], tools: Sequence[CallTool], *, is_required: bool, is_single: bool
) -> str:
    """Give the grammar of an answer that is calls of these tools, or, unless `is_required`, one that may hold some.

    Raises: NotExpressible
    """
    lark = Lark(special)
    one = lark.one_of([texts.body(lark, tool) for tool in tools])
    lead = texts.lead(lark) if texts.lead is not None else ""
    calls = _calls(lark, texts, one, texts.section, is_single)
    if is_required:
        return lark.build(f"{lead} {calls}")
    if texts.answer is not None:
        return lark.build(f"{lead} ({calls} | {texts.answer(lark)})")
    mark = texts.section or texts.begin
    if texts.is_first_only:
        return lark.build(f"{calls} | {lark.regex(FIRST_IS_NO_CALL)}")
    if not mark:
        # Nothing tells a call from an answer that holds a brace, so no answer does.
        return lark.build(f"{lark.regex('[^{<]*')} ({calls})?")
    head = mark.split("\n")[0]
    rest = _calls(lark, texts, one, texts.section, is_single, after=head)
    again = "?" if is_single else "*"
    return lark.build(f"({lark.text_before(head)} {rest}){again} {_text_after(lark, head, is_single)}")


def _text_after(lark: Lark, mark: str, is_single: bool) -> str:
    return lark.text_without([mark]) if is_single else lark.any_text()


def _calls(lark: Lark, texts: CallTexts, one: str, section: str, is_single: bool, after: str = "") -> str:
    """Give the expression of a section of calls; of what comes behind `after`, its beginning."""
    first = f"{section}{texts.begin}".removeprefix(after)
    pieces = [lark.literal(first), one, lark.literal(texts.end)]
    if not is_single and (section or not after):
        again = f"{lark.literal(texts.between + texts.begin)} {one} {lark.literal(texts.end)}"
        pieces.append(f"({again})*")
    return " ".join([*pieces, lark.literal(texts.section_end)])


def _json_body(arguments: str) -> Body:
    def body(lark: Lark, tool: CallTool) -> str:
        before = f'{{"name": "{tool.name}", "{arguments}": '
        return f"{lark.literal(before)} {lark.json(tool.schema)} {lark.literal('}')}"

    return body


def _named_body(before: str, between: str, after: str = "") -> Body:
    """Give the body of calls that are a name and JSON."""

    def body(lark: Lark, tool: CallTool) -> str:
        return f"{lark.literal(before + tool.name + between)} {lark.json(tool.schema)} {lark.literal(after)}"

    return body


def _mistral_body(lark: Lark, tool: CallTool) -> str:
    return f"{lark.literal(f'{tool.name}[ARGS]')} {lark.json(tool.schema)}"


def _section_texts(texts: SectionTexts, body: Body, between: str = "") -> CallTexts:
    return CallTexts(
        body, section=texts.section_begin, begin=texts.call_begin, end=texts.call_end, between=between,
        section_end=texts.section_end,
    )  # fmt: skip


def _kimi_body(lark: Lark, tool: CallTool) -> str:
    index = lark.regex("[0-9]{1,3}")
    head = lark.literal(f"functions.{tool.name}:")
    return f"{head} {index} {lark.literal(kimi.K2.header_end)} {lark.json(tool.schema)}"


def parameters_of(tool: CallTool) -> list[tuple[str, Mapping[str, Any], bool]]:
    """Give a tool's parameters one by one: name, schema, whether it is required; the required ones first.

    Raises: NotExpressible: the schema says more about the object than that.
    """
    schema = tool.schema
    for key in schema:
        if key not in _OF_OBJECTS and not key.startswith("x-"):
            raise NotExpressible(f"{tool.name}: {key} of all parameters together")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if any(name not in properties for name in required):
        raise NotExpressible(f"{tool.name}: a required parameter without a schema")
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    found = []
    for name, one in properties.items():
        if one is False:
            continue
        written = {**shared, **one} if isinstance(one, Mapping) else shared
        found.append((name, written, name in required))
    return sorted(found, key=lambda one: not one[2])


def _value(
    lark: Lark, tool: CallTool, name: str, schema: Mapping[str, Any], end: str, not_in_text: Sequence[str]
) -> str:
    """Give the expression of a value that stands bare between tags, and of `end`, behind it."""
    kind = schema.get("type")
    says = {key for key in schema if key not in ("$defs", "definitions")} - _WORDS_ONLY
    if kind == "string" and not says:
        return lark.text_before(end, without=not_in_text)
    if kind == "string" and says == {"enum"} and all(isinstance(one, str) for one in schema["enum"]):
        texts = schema["enum"]
        if all(one and one.strip() == one and not any(mark in one for mark in not_in_text) for one in texts):
            return f"{lark.one_of([lark.literal(one) for one in texts])} {lark.literal(end)}"
    elif kind in _BARE_TYPES:
        return f"{lark.json(schema)} {lark.literal(end)}"
    raise NotExpressible(f"{tool.name}.{name}: a value whose text does not tell its type")


def _tagged_body(texts: TagTexts, *, line: str = "", says_type: bool = False) -> Body:
    """Give the body of calls whose arguments stand in tags; `line` stands between tags."""
    pad = "\n" if texts.strips_lines else ""
    ends = sorted({texts.value_end, *(f"\n{end}" for end in (texts.key, texts.call_end, *texts.wrapper_ends) if end)})

    def attribute(name: str) -> str:
        return f' name="{name}"' if texts.has_attributes else name

    def body(lark: Lark, tool: CallTool) -> str:
        opening = f"{texts.call}{attribute(tool.name)}>" if texts.call else tool.name
        pieces = [lark.literal(f"{opening}{line}")]
        for name, schema, is_required in parameters_of(tool):
            if not _WORD.fullmatch(name):
                raise NotExpressible(f"{tool.name}.{name}: a name that is no word")
            told = f' string="{str(schema.get("type") == "string").lower()}"' if says_type else ""
            before = f"{texts.key}{attribute(name)}{told}{texts.key_end}{line if texts.value else ''}{texts.value}{pad}"
            value = _value(lark, tool, name, schema, f"{pad}{texts.value_end}", ends)
            one = lark.rule(f"{lark.literal(before)} {value} {lark.literal(line)}")
            pieces.append(one if is_required else f"{one}?")
        return " ".join([*pieces, lark.literal(texts.call_end)])

    return body


def _tagged(texts: TagTexts, *, line: str = "\n", says_type: bool = False) -> CallTexts:
    body = _tagged_body(texts, line=line, says_type=says_type)
    if not texts.call:
        return CallTexts(body, begin=texts.wrapper, end=texts.wrapper_end, between="\n")
    return CallTexts(
        body, begin=f"{texts.wrapper}{line}", end=f"{line}{texts.wrapper_end}", between="\n"
    )  # fmt: skip


def _pythonic_body(lark: Lark, tool: CallTool) -> str:
    if not _WORD.fullmatch(tool.name):
        raise NotExpressible(f"{tool.name}: a name that is no word of Python's")
    values = []
    for name, schema, is_required in parameters_of(tool):
        if not _WORD.fullmatch(name):
            raise NotExpressible(f"{tool.name}.{name}: a name that is no word of Python's")
        values.append((lark.rule(f"{lark.literal(f'{name}=')} {lark.json(schema)}"), is_required))
    return f"{lark.literal(f'{tool.name}(')} {_joined(lark, values)} {lark.literal(')')}"


def _joined(lark: Lark, values: Sequence[tuple[str, bool]]) -> str:
    """Give the expression of values with commas between them, the required ones first."""
    behind = ""  # of the values from the last one on: each with the comma before it
    alternatives = ['""'] if not any(is_required for _, is_required in values) else []
    for expression, is_required in reversed(values):
        alternatives.append(f"{expression} {behind}")
        with_comma = f"{lark.literal(', ')} {expression}"
        behind = lark.rule(f"{with_comma} {behind}" if is_required else f"({with_comma})? {behind}")
    n_required = sum(is_required for _, is_required in values)
    return alternatives[-1] if n_required else lark.one_of(alternatives)


def _tree_body(lark: Lark, tool: CallTool) -> str:
    pieces = [
        lark.literal(f'<|open|>call tool="{tool.name}" index="'),
        lark.regex("[0-9]{1,3}"),
        lark.literal('"<|sep|>'),
    ]
    for name, schema, is_required in parameters_of(tool):
        kind = schema.get("type")
        if not _WORD.fullmatch(name) or not isinstance(kind, str):
            raise NotExpressible(f"{tool.name}.{name}: a name that is no word, or a value of several types")
        marks = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
        value = _value(lark, tool, name, schema, "<|close|>argument<|sep|>", marks)
        begin = lark.literal(f'<|open|>argument key="{name}" type="{kind}"<|sep|>')
        one = lark.rule(f"{begin} {value}")
        pieces.append(one if is_required else f"{one}?")
    return " ".join([*pieces, lark.literal("<|close|>call<|sep|>")])


def _harmony_lead(lark: Lark) -> str:
    text = lark.text_without(("<|end|>", "<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|return|>"))
    begin, end = lark.literal("<|channel|>analysis<|message|>"), lark.literal("<|end|><|start|>assistant")
    return f"({begin} {text} {end})*"


def _harmony_answer(lark: Lark) -> str:
    return f"{lark.literal('<|channel|>final<|message|>')} {lark.any_text()}"


PLAIN: Final = CallTexts(_json_body("parameters"), between="; ")
HERMES: Final = CallTexts(_json_body("arguments"), begin="<tool_call>\n", end="\n</tool_call>", between="\n")
GRANITE: Final = CallTexts(_json_body("arguments"), section="<|tool_call|>[", between=", ", section_end="]")
MISTRAL: Final = CallTexts(_mistral_body, begin="[TOOL_CALLS]")
MISTRAL_LIST: Final = CallTexts(_json_body("arguments"), section="[TOOL_CALLS][", between=", ", section_end="]")
CODER: Final = _tagged(qwen3_coder.TEXTS)
SEED: Final = _tagged(qwen3_coder.SEED)
MINIMAX: Final = _tagged(qwen3_coder.MINIMAX)
GLM: Final = _tagged(glm.TEXTS)
DSML: Final = _tagged(deepseek.DSML, says_type=True)
V3: Final = _section_texts(
    deepseek.V3, _named_body(f"function{deepseek.V3.header_end}", f"\n{deepseek.V3.fence}\n", "\n```"), between="\n"
)
V31: Final = _section_texts(deepseek.V31, _named_body("", deepseek.V31.header_end))
K2: Final = _section_texts(kimi.K2, _kimi_body)
PYTHONIC: Final = CallTexts(_pythonic_body, section="[", between=", ", section_end="]", is_first_only=True)
LFM2: Final = CallTexts(_pythonic_body, section="<|tool_call_start|>[", between=", ", section_end="]<|tool_call_end|>")
OLMO3: Final = CallTexts(_pythonic_body, section="<function_calls>", between="\n", section_end="</function_calls>")
TREE: Final = CallTexts(_tree_body, section="<|open|>tools<|sep|>", section_end="<|close|>tools<|sep|>")
HARMONY: Final = CallTexts(
    _named_body("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>"), lead=_harmony_lead,
    answer=_harmony_answer, between="<|call|><|start|>assistant",
)  # fmt: skip
