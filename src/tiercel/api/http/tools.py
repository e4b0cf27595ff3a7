"""A request's tools: checked before anything is spent on them, and what its `tool_choice` asks for.

Knows no template. A choice that obliges the model (required, a named tool, `strict` ones) becomes a form of the answer:
calls as the model's family writes them, with arguments of the tools' schemas; `text.parsers.call_grammars` says how.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tiercel.base.errors import RequestError
from tiercel.protocol.structured import StructuredOutputsParams
from tiercel.text.parsers.call_grammars import CallTool, NotExpressible
from tiercel.text.parsers.registry import ParserChoice

if TYPE_CHECKING:
    from tiercel.api.http.schema import ChatRequest
    from tiercel.api.http.service import Service
    from tiercel.api.http.settings import ServerSettings

Tool = Mapping[str, Any]
_NAME: Final = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_CHOICES: Final = ("auto", "none", "required")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a chat does with tools.

    tools        shown to the model
    has_calls    the answer is looked through for calls
    is_single    only the first call is given
    callable     those that may be called
    is_required  the answer is calls, at least one
    is_named     ... of the one tool that the request names
    """

    tools: Sequence[Tool] = ()
    has_calls: bool = False
    is_single: bool = False
    callable: Sequence[Tool] = ()
    is_required: bool = False
    is_named: bool = False

    @property
    def has_form(self) -> bool:
        """Whether calls must be well-formed."""
        return self.is_required or any(tool["function"].get("strict") for tool in self.callable)


def tool_use(ask: "ChatRequest", settings: "ServerSettings") -> ToolUse:
    """Check a chat's tools and its choice among them.

    Raises:
        RequestError: one is malformed, too large, or there is nothing to choose from; `param` names the field.
    """
    tools = ask.tools
    if tools is not None:
        check_tools(tools, settings)
    choice = _choice(ask.tool_choice, tools or ())
    if choice is None:
        choice = "auto" if tools else "none"
    if choice == "none" or not tools:
        return ToolUse(tools or ())
    is_named = choice not in _CHOICES
    return ToolUse(
        tools,
        has_calls=True,
        is_single=is_named or ask.parallel_tool_calls is False,
        callable=[tool for tool in tools if not is_named or tool["function"]["name"] == choice],
        is_required=choice != "auto",
        is_named=is_named,
    )


def form_of_tools(service: "Service", use: ToolUse) -> tuple[StructuredOutputsParams, ParserChoice]:
    """Give the form of an answer in which calls are well-formed, and the parsers that read it.

    Raises: RequestError: a tool's schema is refused, or cannot be written in this model's form of calls.
    """
    grammars = service.engine.client.grammars
    called = []
    for tool in use.callable:
        function = tool["function"]
        where = f"tools[{use.tools.index(tool)}].function.parameters"
        schema = {"type": "object", **(function.get("parameters") or {"additionalProperties": False, "properties": {}})}
        is_strict = bool(function.get("strict"))
        called.append(CallTool(function["name"], grammars.checked_schema(where, schema, is_closed=is_strict)))
    try:
        lark, parsers = service.parsers.form_of_calls(
            service.tokenizer.special_tokens, called, is_required=use.is_required, is_single=use.is_single
        )
    except NotExpressible as error:
        raise _refused(
            "tools", f"{error} cannot be kept to in this model's form of calls; simplify it, or leave strict out"
        ) from None
    return StructuredOutputsParams(grammar=lark, name="tools"), parsers


def check_tools(tools: Sequence[Any], settings: "ServerSettings") -> None:
    """Refuse tools that are malformed or too many.

    Raises: RequestError
    """
    if not tools:
        raise _refused("tools", "got an empty list; at least one tool is needed; leave it out")
    if len(tools) > settings.n_tools_max:
        raise _refused("tools", f"got {len(tools)}; at most {settings.n_tools_max} are taken; send fewer")
    n_bytes = len(msgspec.json.encode(tools))
    if n_bytes > settings.tools_bytes_max:
        raise _refused("tools", f"{n_bytes} bytes; at most {settings.tools_bytes_max} are taken; send less")
    for i, tool in enumerate(tools):
        _check_tool(f"tools[{i}]", tool)


def _check_tool(where: str, tool: Mapping[str, Any]) -> None:
    if tool.get("type") != "function":
        raise _refused(f"{where}.type", f'got {str(tool.get("type"))[:40]!r}; "function" is needed')
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise _refused(f"{where}.function", "an object with a name is needed")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _refused(
            f"{where}.function.name", f"got {str(name)[:64]!r}; 1 to 64 letters, digits, _, . or - are needed"
        )
    if not isinstance(function.get("description"), str | None):
        raise _refused(f"{where}.function.description", "text is needed; leave it out")
    if not isinstance(function.get("strict"), bool | None):
        raise _refused(f"{where}.function.strict", "true or false is needed; leave it out")
    parameters = function.get("parameters")
    if parameters is not None and not (isinstance(parameters, Mapping) and _is_of_object(parameters)):
        raise _refused(f"{where}.function.parameters", "a JSON schema of an object is needed; leave it out")


def _is_of_object(schema: Mapping[str, Any]) -> bool:
    properties = schema.get("properties")
    is_object = schema.get("type", "object") in ("object", ["object"])
    return is_object and (properties is None or isinstance(properties, Mapping))


def _choice(choice: Any, tools: Sequence[Tool]) -> str | None:
    """Give "auto", "none", "required", the name of a tool, or None when nothing was said."""
    if choice is None:
        return None
    if not tools and choice != "none":
        raise _refused("tool_choice", "got one without tools; send tools, or leave it out")
    if isinstance(choice, str):
        if choice not in _CHOICES:
            raise _refused("tool_choice", f"got {choice[:40]!r}; {', '.join(_CHOICES)} or a function is needed")
        return choice
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise _refused("tool_choice", 'an object {"type": "function", "function": {"name": ...}} is needed')
    if not any(tool["function"]["name"] == name for tool in tools):
        raise _refused("tool_choice", f"got {name[:64]!r}, which is none of tools; name one of them")
    return name


def _refused(param: str, why: str) -> RequestError:
    return RequestError(f"{param}: {why}", param=param)
