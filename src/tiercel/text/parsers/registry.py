"""Which parsers a model needs, and the making of them: found in its chat template and vocabulary, or told by name.

Names are vLLM's. A new family is a row here and a file beside it. Knows no request: `ParserChoice` is made once for a
model, a parser for each output.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Final

from tiercel.base.errors import ConfigError
from tiercel.text.chat_template import default_template
from tiercel.text.parsers import (
    call_grammars,
    deepseek,
    glm,
    granite,
    harmony,
    hermes,
    llama_json,
    mistral,
    pythonic,
    qwen3_coder,
    think,
    tree,
)
from tiercel.text.parsers.chain import Chain
from tiercel.text.parsers.harmony import TEXTS as HARMONY_TEXTS
from tiercel.text.parsers.harmony import Harmony
from tiercel.text.parsers.interface import OutputParser, ToolSchemas
from tiercel.text.parsers.kimi import K2, KimiK2
from tiercel.text.parsers.markers import Markers
from tiercel.text.parsers.tagged import TaggedCalls, TagTexts
from tiercel.text.thinking import ThinkingMarks

if TYPE_CHECKING:
    from tiercel.text.tokenizer import Tokenizer

PLAIN_CALLS: Final = "llama3_json"  # reads `call_grammars.PLAIN`
AUTO: Final = "auto"
NONE: Final = "none"


@dataclass(frozen=True)
class CallFormat:
    """How a family writes calls.

    make             a parser of one output; None: the format has channels too, and one parser reads all (`CHANNELS`)
    texts            the marks it reads
    has_short_ids    a call's id has nine letters and digits, as Mistral's template demands
    ends_reasoning   a call may begin inside of reasoning, which is then over
    grammar          how well-formed calls are written; None: as `call_grammars.PLAIN`
    """

    make: Callable[[ToolSchemas], OutputParser] | None
    texts: tuple[str, ...]
    has_short_ids: bool = False
    ends_reasoning: tuple[str, ...] = ()
    grammar: call_grammars.CallTexts | None = None


def _tagged(texts: TagTexts) -> Callable[[ToolSchemas], OutputParser]:
    return lambda schemas: TaggedCalls(texts, schemas)


def _tag_texts(texts: TagTexts) -> tuple[str, ...]:
    return (*texts.wrappers, *texts.wrapper_ends, texts.key, texts.key_end, texts.value, texts.value_end)


def _pythonic(texts: pythonic.PythonicTexts, grammar: call_grammars.CallTexts) -> CallFormat:
    return CallFormat(lambda schemas: pythonic.Pythonic(texts), (*texts.begins, *texts.ends), grammar=grammar)


_HERMES: Final = CallFormat(
    hermes.hermes,
    (*hermes.OPENERS.texts, *hermes.CLOSERS.texts),
    ends_reasoning=hermes.OPENERS.texts,
    grammar=call_grammars.HERMES,
)
_CODER: Final = CallFormat(
    qwen3_coder.qwen3_coder,
    _tag_texts(qwen3_coder.TEXTS),
    ends_reasoning=qwen3_coder.TEXTS.wrappers,
    grammar=call_grammars.CODER,
)
_SEED: Final = CallFormat(
    _tagged(qwen3_coder.SEED),
    _tag_texts(qwen3_coder.SEED),
    ends_reasoning=qwen3_coder.SEED.wrappers,
    grammar=call_grammars.SEED,
)
_MINIMAX: Final = CallFormat(
    _tagged(qwen3_coder.MINIMAX),
    _tag_texts(qwen3_coder.MINIMAX),
    ends_reasoning=qwen3_coder.MINIMAX.wrappers,
    grammar=call_grammars.MINIMAX,
)
_GLM: Final = CallFormat(glm.glm, _tag_texts(glm.TEXTS), ends_reasoning=glm.TEXTS.wrappers, grammar=call_grammars.GLM)
_DSML: Final = CallFormat(
    deepseek.DeepSeekV4,
    ("｜DSML｜", *_tag_texts(deepseek.DSML)),
    ends_reasoning=deepseek.DSML.wrappers,
    grammar=call_grammars.DSML,
)
_LLAMA: Final = CallFormat(llama_json.llama_json, llama_json.OPENERS.texts)
_GRANITE: Final = CallFormat(
    granite.granite, (*granite.OPENERS.texts, *granite.CLOSERS.texts), grammar=call_grammars.GRANITE
)
_PYTHONIC: Final = _pythonic(pythonic.PLAIN, call_grammars.PYTHONIC)
_TREE: Final = CallFormat(None, tree.TEXTS, grammar=call_grammars.TREE)
_HARMONY: Final = CallFormat(None, HARMONY_TEXTS, grammar=call_grammars.HARMONY)

CALL_FORMATS: Final[Mapping[str, CallFormat]] = {
    "hermes": _HERMES,
    "qwen25": _HERMES,
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "pythonic": _PYTHONIC,
    "llama4_pythonic": _PYTHONIC,
    "lfm2": _pythonic(pythonic.LFM2, call_grammars.LFM2),
    "olmo3": _pythonic(pythonic.OLMO3, call_grammars.OLMO3),
    "mistral": CallFormat(
        mistral.Mistral,
        mistral.TEXTS,
        has_short_ids=True,
        ends_reasoning=mistral.OPENERS.texts,
        grammar=call_grammars.MISTRAL,
    ),
    "qwen3_coder": _CODER,
    "qwen3_xml": _CODER,
    "seed_oss": _SEED,
    "minimax_m2": _MINIMAX,
    "deepseek_v3": CallFormat(lambda schemas: deepseek.deepseek_v3(), deepseek.V3.all, grammar=call_grammars.V3),
    "deepseek_v31": CallFormat(lambda schemas: deepseek.deepseek_v31(), deepseek.V31.all, grammar=call_grammars.V31),
    "deepseek_v32": _DSML,
    "deepseek_v4": _DSML,
    "kimi_k2": CallFormat(
        lambda schemas: KimiK2(), K2.all, ends_reasoning=(K2.section_begin,), grammar=call_grammars.K2
    ),
    "kimi_k3": _TREE,
    "glm45": _GLM,
    "glm47": _GLM,
    "openai": _HARMONY,
    "granite": _GRANITE,
    "granite4": _HERMES,
}

REASONING_FORMATS: Final[Mapping[str, think.ThinkTexts | CallFormat]] = {
    "think": think.THINK,
    "deepseek_r1": think.THINK_FIRST,
    "deepseek_v3": think.THINK,
    "deepseek_v4": think.THINK,
    "qwen3": think.THINK_FIRST,
    "glm45": think.THINK_FIRST,
    "glm47": think.THINK_FIRST,
    "kimi_k2": think.THINK_FIRST,
    "minimax_m2": think.THINK_FIRST,
    "minimax_m3": think.MINIMAX,
    "seed_oss": think.SEED,
    "mistral": think.MISTRAL,
    "granite": think.GRANITE,
    "openai_gptoss": _HARMONY,
    "kimi_k3": _TREE,
}


@dataclass(frozen=True)
class ParserChoice:
    """A model's parsers, by name; None: it has none, or none is wanted. `special` are its special tokens' texts."""

    calls: str | None = None
    reasoning: str | None = None
    special: frozenset[str] = frozenset()

    @property
    def has_calls(self) -> bool:
        """Whether it is known how the model writes calls."""
        return self.calls is not None

    @property
    def call_marks(self) -> tuple[str, ...]:
        """What opens calls, or closes them, but what other text may well begin with: brackets alone."""
        texts = CALL_FORMATS[self.calls].texts if self.calls is not None else ()
        return tuple(text for text in texts if len(text) > _N_BRACKETS)

    @property
    def has_reasoning(self) -> bool:
        """Whether reasoning is told apart."""
        return self.reasoning is not None

    @property
    def has_short_ids(self) -> bool:
        """Whether a call's id has nine letters and digits."""
        return self.calls is not None and CALL_FORMATS[self.calls].has_short_ids

    @cached_property
    def _thinking(self) -> think.ThinkTexts | None:
        found = REASONING_FORMATS[self.reasoning] if self.reasoning is not None else None
        return found if isinstance(found, think.ThinkTexts) else None

    @cached_property
    def _channels(self) -> CallFormat | None:
        """The format whose one parser reads reasoning and calls, if the model's is such."""
        both = [CALL_FORMATS[self.calls]] if self.calls is not None else []
        both += [REASONING_FORMATS[self.reasoning]] if self.reasoning is not None else []  # type: ignore[list-item]
        return next((one for one in both if one in (_HARMONY, _TREE)), None)

    @cached_property
    def _texts(self) -> frozenset[str]:
        texts = set(CALL_FORMATS[self.calls].texts) if self.calls is not None else set()
        found = REASONING_FORMATS[self.reasoning] if self.reasoning is not None else None
        if isinstance(found, think.ThinkTexts):
            texts |= {*found.begins, *found.ends}
        elif found is not None:
            texts |= {*found.texts}
        return frozenset(texts)

    @cached_property
    def needs_special_tokens(self) -> bool:
        """Whether a mark is, or holds, a special token: the text must then be made with those."""
        return any(token in text for text in self._texts for token in self.special)

    @cached_property
    def _hidden(self) -> tuple[Markers, Markers]:
        """Special tokens that no parser reads, and those that one does."""
        read = frozenset(token for token in self.special if any(token in text for text in self._texts))
        return Markers(self.special - read), Markers(read)

    @property
    def reasoning_texts(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What opens reasoning and what closes it; of channels, those of the one that has it. Empty: none is known."""
        channels = self._channels
        if channels is not None:
            return harmony.THOUGHTS if channels is _HARMONY else tree.THOUGHTS
        texts = self._thinking
        return ((), ()) if texts is None else (texts.begins, texts.ends)

    def reasoning_marks(self, *, has_calls: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Give what opens reasoning and what closes it, calls too where the request has them; none for channels."""
        texts = self._thinking
        if texts is None:
            return (), ()
        calls = CALL_FORMATS[self.calls].ends_reasoning if self.calls is not None and has_calls else ()
        return texts.begins, (*texts.ends, *calls)

    def thinking_marks(
        self, prompt: str, *, is_open: bool, is_continued: bool = False, before_calls: bool = False
    ) -> ThinkingMarks:
        """Give what tells a text's reasoning apart, for whoever follows its tokens (`text.thinking`).

        `is_open`: as `thinks_first` says of this prompt. `is_continued`: the text goes on with a message. A format of
        channels has its answer in one of them; all before it is taken for reasoning. `before_calls`: calls
        follow, not an answer.
        """
        channels = self._channels
        if channels is not None and before_calls:
            # Harmony's grammar of calls has its reasoning in it.
            is_open = is_open and channels is _TREE
            return ThinkingMarks((), ("<|close|>think<|sep|>",), is_open=True) if is_open else ThinkingMarks()
        if channels is not None:
            ends = harmony.ANSWERS if channels is _HARMONY else tree.ANSWERS
            is_answering = is_continued or prompt[-64:].rstrip().endswith(ends)
            return ThinkingMarks() if is_answering else ThinkingMarks((), ends, is_open=True)
        texts = self._thinking
        return ThinkingMarks() if texts is None else ThinkingMarks(texts.begins, texts.ends, is_open=is_open)

    def form_of_calls(
        self,
        special: Mapping[str, int],
        tools: Sequence[call_grammars.CallTool],
        *,
        is_required: bool,
        is_single: bool,
    ) -> tuple[str, "ParserChoice"]:
        """Give the grammar of well-formed calls (`call_grammars.form_of_calls`), and the parsers that read them.

        The model's own form where that can say what the tools' schemas do; else, where calls are required, `PLAIN`.

        Raises: NotExpressible: neither can be.
        """
        texts = CALL_FORMATS[self.calls].grammar if self.calls is not None else None
        if texts is call_grammars.MISTRAL and "[ARGS]" not in special:
            texts = call_grammars.MISTRAL_LIST
        if texts is not None:
            try:
                form = call_grammars.form_of_calls(texts, special, tools, is_required=is_required, is_single=is_single)
            except call_grammars.NotExpressible:
                if not is_required or self._channels is not None:
                    raise
            else:
                return form, self
        plain = call_grammars.form_of_calls(
            call_grammars.PLAIN, special, tools, is_required=is_required, is_single=is_single
        )
        return plain, replace(self, calls=PLAIN_CALLS)

    def thinks_first(self, prompt: str, *, is_enabled: bool | None, continued: str | None = None) -> bool:
        """Whether a text behind `prompt` begins inside of reasoning.

        `is_enabled`: the request's own word, or None. `continued`: the beginning of the message that the text goes on
        with; what it holds decides.
        """
        if continued is not None and self._thinking is not None:
            return self._thinking.is_open_in(continued)
        if self._channels is _TREE:
            return prompt[-64:].rstrip().endswith("<|open|>think<|sep|>")
        texts = self._thinking
        if texts is None:
            return False
        said = texts.is_open_at_end(prompt)
        return (texts.is_default and is_enabled is not False) if said is None else said

    def make(
        self,
        schemas: ToolSchemas,
        *,
        has_calls: bool,
        is_thinking: bool,
        shows_special: bool = False,
        calls_end_reasoning: bool = True,
    ) -> OutputParser:
        """Make a parser of one output.

        `has_calls`: the request has tools; without them a call's text is content. `is_thinking`: the text begins inside
        of reasoning. `shows_special`: the request wants special tokens in its text. Without `calls_end_reasoning`,
        only its mark does.
        """
        calls = CALL_FORMATS[self.calls] if self.calls is not None and has_calls else None
        parsers: list[OutputParser] = []
        if self._channels is _TREE:
            parsers.append(tree.Tree(schemas, is_open=is_thinking, has_calls=has_calls))
        elif self._channels is _HARMONY:
            parsers.append(Harmony(schemas, has_calls=has_calls))
        else:
            if self._thinking is not None:
                ends = Markers(calls.ends_reasoning) if calls is not None and calls_end_reasoning else None
                parsers.append(think.Think(self._thinking, is_open=is_thinking, calls=ends))
            if calls is not None and calls.make is not None:
                parsers.append(calls.make(schemas))
        unread, read = (_NO_MARKERS, _NO_MARKERS) if shows_special else self._hidden
        return Chain(parsers, unread=unread, read=read)


_NO_MARKERS: Final = Markers([])
_N_BRACKETS: Final = 2  # characters of a mark that is only brackets

# What a template or a vocabulary has -> the format; the first that fits counts, the most telling come first.
_CALL_SIGNS: Final[Sequence[tuple[str, str]]] = (
    ("<|channel|>", "openai"),
    ("｜DSML｜", "deepseek_v4"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("[TOOL_CALLS]", "mistral"),
    ("<seed:tool_call>", "seed_oss"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<arg_key>", "glm45"),
    ("<|tool_call_start|>", "lfm2"),
    ("<|tool_call|>", "granite"),
    ("<function_calls>", "olmo3"),
)
_TEMPLATE_SIGNS: Final[Sequence[tuple[str, str]]] = (
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("<|python_start|>", "llama4_pythonic"),
)
_REASONING_SIGNS: Final[Sequence[tuple[str, str]]] = (
    ("<|channel|>", "openai_gptoss"),
    ("[THINK]", "mistral"),
    ("<seed:think>", "seed_oss"),
    ("<mm:think>", "minimax_m3"),
    ("Here is my thought process:", "granite"),
    ("<think>", "think"),
)


def choose(
    template: str | None,
    has_token: Callable[[str], bool],
    *,
    calls: str = AUTO,
    reasoning: str = AUTO,
    special: Iterable[str] = (),
) -> ParserChoice:
    """Choose a model's parsers by its template and vocabulary; `calls` and `reasoning` may name them instead.

    Raises: ConfigError: a name is none of a parser.
    """
    check_names(calls, reasoning)
    source = template or ""
    return ParserChoice(
        calls=_find_calls(source, has_token) if calls == AUTO else None if calls == NONE else calls,
        reasoning=_find_reasoning(source, has_token) if reasoning == AUTO else None if reasoning == NONE else reasoning,
        special=frozenset(text for text in special if text),
    )


def choose_of(
    tokenizer: "Tokenizer", *, template: str | None = None, calls: str = AUTO, reasoning: str = AUTO
) -> ParserChoice:
    """Do so for a tokenizer with its templates, or another in their place.

    Raises: ConfigError: a name is none of a parser.
    """
    source = default_template(tokenizer.chat_templates, has_tools=True)
    if "tool_use" not in tokenizer.chat_templates:
        source = tokenizer.chat_template or source
    return choose(
        template or source,
        lambda token: tokenizer.id_of(token) is not None,
        calls=calls,
        reasoning=reasoning,
        special=map(tokenizer.token_text, tokenizer.special_ids),
    )


def check_names(calls: str, reasoning: str) -> None:
    """Refuse what names no parser.

    Raises: ConfigError
    """
    for option, name, known in (
        ("tool_call_parser", calls, CALL_FORMATS),
        ("reasoning_parser", reasoning, REASONING_FORMATS),
    ):
        if name not in (AUTO, NONE) and name not in known:
            shown = ", ".join(sorted(known))
            raise ConfigError(f"{option}: got {name[:40]!r}; {AUTO}, {NONE} or one of {shown} is needed")


def _find_calls(source: str, has_token: Callable[[str], bool]) -> str | None:
    if _is_tree(source, has_token):
        return "kimi_k3"
    for sign, name in _CALL_SIGNS:
        if sign in source or has_token(sign):
            return name
    if "<｜tool▁calls▁begin｜>" in source or has_token("<｜tool▁calls▁begin｜>"):
        return "deepseek_v3" if "```json" in source else "deepseek_v31"
    for sign, name in _TEMPLATE_SIGNS:
        if sign in source:
            return name
    if "<|python_tag|>" in source or has_token("<|python_tag|>"):
        return "llama3_json"
    # A template without a place for tools is given calls in hermes' words.
    return None if "tools" in source else "hermes"


def _find_reasoning(source: str, has_token: Callable[[str], bool]) -> str | None:
    if _is_tree(source, has_token):
        return "kimi_k3"
    return next((name for sign, name in _REASONING_SIGNS if sign in source or has_token(sign)), None)


def _is_tree(source: str, has_token: Callable[[str], bool]) -> bool:
    return all(text in source or has_token(text) for text in ("<|open|>", "<|close|>", "<|sep|>"))
