"""A model's chat template: messages in, the prompt's text out.

Templates come with models and are programs by strangers: see `template_sandbox` for how they are held. A template that
cannot be compiled is the model file's fault; one that refuses or fails on messages is the request's. It knows no
tokens but the texts of two, and validates messages only as far as the template needs.
"""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal

from tiercel.base.errors import ModelFileError, RequestError

if TYPE_CHECKING:
    from jinja2 import Template, nodes

    from tiercel.text.template_sandbox import TemplateEnvironment

SOURCE_BYTES_MAX: Final = 1 << 20
OUTPUT_CHARS_MAX: Final = 16 << 20
N_TURNS_MAX: Final = 2_000_000  # of all loops of a rendering: 10,000 messages and 128 tools for each of them
RENDER_S_MAX: Final = 5.0
_FORBIDDEN: Final = frozenset({"tokenize", "chat_template", "messages", "tools", "documents"})
_FORBIDDEN_BEGINNINGS: Final = ("return_", "add_special", "_")
_ADDRESS: Final = re.compile(r"\s*at 0x[0-9a-fA-F]+")
_PATH: Final = re.compile(r"(?:[A-Za-z]:)?[/\\][\w.\-]+(?:[/\\][\w.\-]+)+")
# Letters for private use, which no template trims and no client's text is expected to hold.
_END_OF_CONTENT: Final = "\ue0f0end of content\ue0f1"


class ChatTemplate:
    """A compiled template. Threads may share it."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str | None,
        eos_token: str | None,
        now: Callable[[], datetime] = datetime.now,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        n_bytes = len(source.encode("utf-8", "replace"))
        if n_bytes > SOURCE_BYTES_MAX:
            raise ModelFileError(
                f"chat_template: {n_bytes} bytes; at most {SOURCE_BYTES_MAX} are compiled; "
                "give another with --chat-template"
            )
        self._special = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        self._clock = clock
        self._environment, self._tree, self._template = _compile(source, now)

    @cached_property
    def content_format(self) -> Literal["openai", "string"]:
        """Whether the template goes through a message's parts itself ("openai") or needs one text ("string")."""
        return "openai" if _loops_over_content(self._tree) else "string"

    @cached_property
    def _takes_text(self) -> bool:
        from jinja2 import nodes

        return any(test.name == "string" for test in self._tree.find_all(nodes.Test))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Write the prompt of a chat.

        `continue_final_message` ends the prompt with the last message's content, for the model to go on with it, and
        needs `add_generation_prompt=False`. Further keywords are the template's own variables.

        Raises:
            RequestError: the template refuses or fails on these messages, or takes too long.
        """
        _check_kwargs(kwargs)
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message: set together with add_generation_prompt; one of them is needed; "
                "send add_generation_prompt false",
                param="continue_final_message",
            )
        prepared = [self._prepared(message) for message in messages]
        if continue_final_message:
            _mark_end(prepared)
        variables = {
            **self._special,
            **kwargs,
            "messages": prepared,
            "tools": list(tools) if tools else None,
            "documents": list(documents) if documents else None,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        text = self._run(variables)
        if not continue_final_message:
            return text
        cut = text.rfind(_END_OF_CONTENT)
        if cut < 0:
            raise _refusal("it does not print the last message's content", param="continue_final_message")
        return text[:cut]

    def _run(self, variables: Mapping[str, Any]) -> str:
        from jinja2 import TemplateError

        from tiercel.text.template_sandbox import Budget

        budget = Budget(
            n_turns=N_TURNS_MAX,
            # Text is charged wherever it is made, on its way to the output too: through a few macros and filters.
            n_chars=4 * OUTPUT_CHARS_MAX,
            deadline_s=self._clock() + RENDER_S_MAX,
            clock=self._clock,
        )
        pieces: list[str] = []
        n_chars = 0
        try:
            with self._environment.spending(budget):
                for piece in self._template.generate(**variables):
                    pieces.append(piece)
                    n_chars += len(piece)
                    budget.spend()
                    if n_chars > OUTPUT_CHARS_MAX:
                        raise _refusal(f"its output exceeds {OUTPUT_CHARS_MAX} characters")
        except RecursionError as error:
            raise _refusal("it calls itself too often") from error
        except _failures() as error:
            if isinstance(error, RequestError):
                raise
            name = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
            raise _refusal(f"{name}{_clean(str(error))}") from error
        return "".join(pieces)

    def _prepared(self, message: Mapping[str, Any]) -> dict[str, Any]:
        if not isinstance(message, Mapping):
            raise _refusal(f"a message is a {type(message).__name__}, where an object is needed")
        prepared = dict(message)
        if "content" in prepared:
            prepared["content"] = self._content(prepared["content"])
        calls = prepared.get("tool_calls")
        if isinstance(calls, list | tuple):
            prepared["tool_calls"] = [_with_arguments(call) for call in calls]
            if not calls:
                del prepared["tool_calls"]
        return prepared

    def _content(self, content: Any) -> Any:
        if content is None:
            return ""
        if self.content_format == "openai":
            as_parts = isinstance(content, str) and not self._takes_text
            return [{"type": "text", "text": content}] if as_parts else content
        if isinstance(content, list | tuple):
            return "\n".join(_part_text(part) for part in content)
        return content


def default_template(templates: Mapping[str, str], *, has_tools: bool) -> str | None:
    """Choose among a model's named templates: the one for tools if there are tools, else the default one, else None.

    None is for the caller to refuse a chat with: there is no template that fits every model.
    """
    if has_tools and "tool_use" in templates:
        return templates["tool_use"]
    return templates.get("default")


def _compile(source: str, now: Callable[[], datetime]) -> "tuple[TemplateEnvironment, nodes.Template, Template]":
    from jinja2 import Template

    from tiercel.text.template_sandbox import TemplateEnvironment

    environment = TemplateEnvironment(now)
    try:
        tree = environment.parse(source)
        code = environment.compile(environment.bounded(environment.parse(source)))
    except _failures() as error:
        line = getattr(error, "lineno", None)
        where = f" in line {line}" if isinstance(line, int) else ""
        raise ModelFileError(
            f"chat_template: {_clean(str(error)) or type(error).__name__}{where}; a Jinja template of reasonable depth "
            "is needed; give another with --chat-template"
        ) from None
    return environment, tree, Template.from_code(environment, code, environment.make_globals(None))


def _failures() -> tuple[type[Exception], ...]:
    """List all that a template's code can raise: it computes with its own values, so any error of a computation."""
    from jinja2 import TemplateError

    return (
        TemplateError,
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        MemoryError,
        RuntimeError,
        SyntaxError,
        TypeError,
        ValueError,
    )


def _refusal(reason: str, *, param: str = "messages") -> RequestError:
    return RequestError(f"{param}: the model's chat template cannot render this chat: {reason}", param=param)


def _clean(text: str) -> str:
    """Take addresses and paths out of an error's text, and its middle if it is long."""
    return _PATH.sub("…", _ADDRESS.sub("", text))[:300]


def _check_kwargs(kwargs: Mapping[str, Any]) -> None:
    for name in kwargs:
        if name in _FORBIDDEN or name.startswith(_FORBIDDEN_BEGINNINGS):
            raise RequestError(
                f"chat_template_kwargs: {name[:40]!r}; variables of the template are needed, and this would change how "
                "it is run; leave it out",
                param="chat_template_kwargs",
            )


def _part_text(part: Any) -> str:
    text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise _refusal(f"a part of type {str(kind)[:40]!r}, where only text is understood")
    return text


def _with_arguments(call: Any) -> Any:
    """Give a tool call with its arguments as an object: clients send JSON text, templates print it again."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(arguments := function.get("arguments"), str | None):
        return call
    try:
        value = json.loads(arguments) if arguments else {}
    except (ValueError, RecursionError) as error:
        raise _refusal("a tool call's arguments are not JSON") from error
    return {**call, "function": {**function, "arguments": value}}


def _mark_end(messages: list[dict[str, Any]]) -> None:
    content = messages[-1].get("content") if messages else None
    if isinstance(content, list) and content and isinstance(content[-1], Mapping) and "text" in content[-1]:
        messages[-1]["content"] = [*content[:-1], {**content[-1], "text": f"{content[-1]['text']}{_END_OF_CONTENT}"}]
    elif isinstance(content, str):
        messages[-1]["content"] = f"{content}{_END_OF_CONTENT}"
    else:
        raise _refusal("the last message has no text to go on with", param="continue_final_message")


def _loops_over_content(tree: "nodes.Template") -> bool:
    """Whether a loop goes through `something.content`, or through a variable set from one or named `content`."""
    from jinja2 import nodes

    names = {"content"}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, set()):
            names.add(assign.target.name)
    return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _is_content(node: "nodes.Node", names: set[str]) -> bool:
    from jinja2 import nodes

    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        if isinstance(node.arg, nodes.Slice):
            return _is_content(node.node, names)
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in names
