"""One choice's text as a chat's parts, content, reasoning and tool calls: deltas while it comes, a message at its end.

A parser's fault is the answer's boundary: it is logged with the request's id, and what the parser could not take apart
is content. Knows no stream and no engine.
"""

import json
import logging
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tiercel.text.parsers.interface import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    OutputParser,
    Reasoning,
    ToolSchemas,
    merged,
)
from tiercel.text.parsers.registry import ParserChoice
from tiercel.text.thinking import ThinkingMarks

if TYPE_CHECKING:
    from tiercel.api.http.schema import ChatRequest
    from tiercel.api.http.service import Service
    from tiercel.api.http.tools import ToolUse

_log = logging.getLogger(__name__)

_SHORT_ID: Final = re.compile(r"[A-Za-z0-9]{9}")
_LETTERS: Final = string.ascii_letters + string.digits
Delta = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ParsePlan:
    """How a chat's choices are taken apart.

    needs_special_tokens   the engine must leave special tokens in the text
    shows_special          the client wants them too
    marks                  ids of the tokens that open reasoning, and of those that close it; None: they are not tokens
    """

    schemas: ToolSchemas
    use: "ToolUse"
    is_thinking: bool
    has_reasoning: bool
    includes_reasoning: bool
    needs_special_tokens: bool
    shows_special: bool
    marks: tuple[frozenset[int], frozenset[int]] | None
    parsers: ParserChoice
    has_form: bool


def parse_plan(
    service: "Service", ask: "ChatRequest", use: "ToolUse", prompt: str, choice: ParserChoice, *, has_form: bool
) -> ParsePlan | None:
    """Plan the parsing of a chat's answer with these parsers; None when its text is its content, as it is.

    `has_form`: the answer keeps to a form, which begins behind the reasoning.
    """
    if service.engine.tokenizer is None or not (use.has_calls or choice.has_reasoning):
        return None
    needs_special = choice.needs_special_tokens
    tokenizer = service.engine.tokenizer
    marks = choice.reasoning_marks(has_calls=use.has_calls and not has_form)
    ids = tuple(frozenset(i for i in map(tokenizer.id_of, texts) if i is not None) for texts in marks)
    return ParsePlan(
        schemas=ToolSchemas.of_tools(use.tools),
        use=use,
        is_thinking=_is_thinking(service, ask, prompt),
        has_reasoning=choice.has_reasoning,
        includes_reasoning=ask.include_reasoning is not False,
        needs_special_tokens=needs_special,
        # Where the engine leaves them out, what spells one is ordinary text.
        shows_special=ask.skip_special_tokens is False or not needs_special,
        marks=(ids[0], ids[1]) if all(ids) else None,
        parsers=choice,
        has_form=has_form,
    )


def thinking_marks(
    service: "Service", ask: "ChatRequest", prompt: str, *, before_calls: bool = False
) -> ThinkingMarks | None:
    """Give what tells a chat's reasoning apart, for the engine; None: the model has none that is known."""
    if service.engine.tokenizer is None or not service.parsers.has_reasoning:
        return None
    return service.parsers.thinking_marks(
        prompt,
        is_open=_is_thinking(service, ask, prompt),
        is_continued=_continued(ask) is not None,
        before_calls=before_calls,
    )


def _is_thinking(service: "Service", ask: "ChatRequest", prompt: str) -> bool:
    return service.parsers.thinks_first(prompt, is_enabled=_is_thinking_wanted(ask, service), continued=_continued(ask))


def _is_thinking_wanted(ask: "ChatRequest", service: "Service") -> bool | None:
    """Say what the request asks of the template, else its effort, else what the server does by default."""
    wanted = _thinking_in(ask.chat_template_kwargs or {})
    if wanted is None and ask.reasoning_effort is not None:
        return ask.reasoning_effort != "none"
    return _thinking_in(service.settings.default_chat_template_kwargs) if wanted is None else wanted


def _thinking_in(kwargs: Mapping[str, Any]) -> bool | None:
    found = (kwargs[name] for name in ("enable_thinking", "thinking") if isinstance(kwargs.get(name), bool))
    return next(found, None)


def _continued(ask: "ChatRequest") -> str | None:
    """Give the text that the answer goes on with."""
    content = ask.messages[-1].get("content") if ask.continue_final_message else None
    return content if isinstance(content, str) else None


class ParsedOutput:
    """One choice's text on its way. States: open, then ended by the push that is last."""

    def __init__(self, service: "Service", plan: ParsePlan, request_id: str) -> None:
        self._choice = plan.parsers
        self._tokenizer = service.tokenizer
        self._plan = plan
        self._request_id = request_id
        self._parser: OutputParser | None = self._choice.make(
            plan.schemas,
            has_calls=plan.use.has_calls,
            is_thinking=plan.is_thinking,
            shows_special=plan.shows_special,
            calls_end_reasoning=not plan.has_form,
        )
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._arguments: list[list[str]] = []
        self._is_thinking = plan.is_thinking
        self._has_thought = False
        self._is_ended = False
        self._n_reasoning = 0

    def push(self, text: str, token_ids: Sequence[int], *, is_last: bool, is_cut: bool = False) -> list[Delta]:
        """Take the next text and its tokens; give the deltas that it makes sure of. `is_cut`: the last text was ended
        by the limit of tokens, so what only begins a call is no content.
        """
        self._count(token_ids)
        self._is_ended = is_last
        deltas: list[Delta] = []
        for event in merged(self._events(text, is_last=is_last, is_cut=is_cut)):
            self._add(event, deltas)
        return deltas

    def finish_reason(self, reason: str | None, stop_reason: int | str | None = None) -> str | None:
        """Give the reason a client is told: an answer that ended by itself with calls ended for them.

        A stop string within a call ended neither: the reason stays, and `message` has no half of a call. A stream
        has told its beginning by then.
        """
        if isinstance(stop_reason, str) and self._calls and not _is_json("".join(self._arguments[-1])):
            del self._calls[-1], self._arguments[-1]
            return reason
        is_for_calls = reason == "stop" and self._calls and not self._plan.use.is_named  # OpenAI's rule for named ones
        return "tool_calls" if is_for_calls else reason

    @property
    def n_reasoning(self) -> int:
        """Tokens of reasoning so far; where its marks are not tokens, those of its text, at its end."""
        if self._plan.marks is not None or not self._reasoning or not self._is_ended:
            return self._n_reasoning
        return len(self._tokenizer.encode("".join(self._reasoning), add_special_tokens=False))

    def message(self, role: str, echo: str) -> dict[str, Any]:
        """Give all of it as a message."""
        content = echo + "".join(self._content)
        reasoning = "".join(self._reasoning)
        is_other = bool(self._calls or self._reasoning)
        message: dict[str, Any] = {"role": role, "content": content if content.strip() or not is_other else None}
        message["refusal"] = None
        if reasoning and self._plan.includes_reasoning:
            message |= _both_names(reasoning)
        if self._calls:
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": "".join(arguments)}}
                for call, arguments in zip(self._calls, self._arguments, strict=True)
            ]
        return message

    def _events(self, text: str, *, is_last: bool, is_cut: bool) -> list[Event]:
        if self._parser is None:
            return [Content(text)] if text else []
        try:
            events = self._parser.feed(text) if text else []
            if not is_last:
                return events
            ending = merged(self._parser.finish())
            return [*events, *(one for one in ending if not (is_cut and self._begins_call(one)))]
        except Exception:  # noqa: BLE001  a request's boundary: logged with its id, and the text is answered as it is
            _log.error("request %s: its answer could not be taken apart", self._request_id, exc_info=True)
            self._parser = None
            return [Content(text)] if text else []

    def _begins_call(self, event: Event) -> bool:
        """Whether what was held back to the end is a call's mark, or half of one, and maybe what came behind it."""
        if not isinstance(event, Content) or not self._plan.use.has_calls:
            return False
        text = event.text.lstrip()  # what stands between text and calls is held back too
        return any(
            text.startswith(mark) or (2 * len(text) > len(mark) and mark.startswith(text))
            for mark in self._choice.call_marks
        )

    def _add(self, event: Event, deltas: list[Delta]) -> None:
        if isinstance(event, Content):
            self._content.append(event.text)
            deltas.append({"content": event.text})
        elif isinstance(event, Reasoning):
            self._reasoning.append(event.text)
            if self._plan.includes_reasoning:
                deltas.append(_both_names(event.text))
        elif isinstance(event, CallEnd) or (self._plan.use.is_single and event.index > 0):
            return
        elif isinstance(event, CallBegin):
            call_id = self._id(event.id)
            self._calls.append({"id": call_id, "type": "function", "function": {"name": event.name}})
            self._arguments.append([])
            function = {"name": event.name, "arguments": ""}
            deltas.append(
                {"tool_calls": [{"index": event.index, "id": call_id, "type": "function", "function": function}]}
            )
        else:
            self._add_arguments(event, deltas)

    def _add_arguments(self, event: CallArguments, deltas: list[Delta]) -> None:
        self._arguments[event.index].append(event.text)
        last = deltas[-1].get("tool_calls") if deltas else None
        if last and last[0]["index"] == event.index:
            last[0]["function"]["arguments"] += event.text
        else:
            deltas.append({"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]})

    def _id(self, given: str | None) -> str:
        """Give a call's id: the model's own if it can be one, else a fresh one in the model's form."""
        is_short = self._choice.has_short_ids
        is_good = given is not None and (not is_short or _SHORT_ID.fullmatch(given) is not None)
        if given is not None and is_good and all(call["id"] != given for call in self._calls):
            return given
        if is_short:
            return "".join(secrets.choice(_LETTERS) for _ in range(9))
        return f"chatcmpl-tool-{secrets.token_hex(16)}"

    def _count(self, token_ids: Sequence[int]) -> None:
        if self._plan.marks is None or self._has_thought:
            return
        begins, ends = self._plan.marks
        for token_id in token_ids:
            if token_id in ends:
                self._has_thought = True
                return
            if token_id in begins:
                self._is_thinking = True
            else:
                self._n_reasoning += self._is_thinking


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _both_names(reasoning: str) -> Delta:
    """Name reasoning as vLLM does now, and as it, SGLang and DeepSeek's clients did."""
    return {"reasoning": reasoning, "reasoning_content": reasoning}
