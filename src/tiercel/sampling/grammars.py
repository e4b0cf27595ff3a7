"""The forms that requests ask for, compiled for one model: checked, bounded, kept for the next request.

Order for each form: what `StructuredOutputsParams` holds is checked here and in `schemas`; a worker compiles it as a
trial (`grammar_compiler`); then this process does, and the result is kept as long as `cache_bytes` lasts. `constraint`
is
what one sequence has of it.

State: the library's tokenizer, made once at the first form; compiled grammars, least recently used first. Any thread
may call `compile`. Invariant (`check`): the kept grammars' sizes add up, and to no more than the bound unless one
alone
does.
"""

import functools
import json
import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from tiercel.base.errors import RequestError
from tiercel.protocol.structured import StructuredOutputsParams
from tiercel.sampling import llguidance_forms as forms
from tiercel.sampling.constraint import Constraint, Vocabulary
from tiercel.sampling.grammar_compiler import CompileRefused, GrammarCompiler
from tiercel.sampling.grammar_limits import GrammarLimits
from tiercel.sampling.grammar_worker import WorkerStart
from tiercel.sampling.schemas import SchemaRefused, check_regex, check_schema, closed
from tiercel.sampling.structural_tags import tags_to_lark
from tiercel.text.thinking import ThinkingMarks

if TYPE_CHECKING:
    from tiercel.text.tokenizer import Tokenizer

_N_BYTES_LEAST: Final = 16 << 10  # of a compiled grammar, whatever the worker could see of it


class CompiledGrammar:
    """A form that can be kept to, ready to be started for any number of sequences. Frozen."""

    def __init__(self, matcher: Any, vocabulary: Vocabulary, n_bytes: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self.n_bytes = n_bytes

    def start(
        self, *, stop_ids: Iterable[int] = (), ignores_eos: bool = False, thinking: ThinkingMarks | None = None
    ) -> Constraint:
        """Begin a sequence.

        `stop_ids` may be chosen only where the text may end. `ignores_eos`: the text goes on as long as it can.
        `thinking`: the form begins behind the reasoning.
        """
        return Constraint(
            self._matcher.deep_copy(), self._vocabulary, stop_ids=stop_ids, ignores_eos=ignores_eos, thinking=thinking
        )


class Grammars:
    """All of one model's. `close` ends the workers."""

    def __init__(
        self, tokenizer: "Tokenizer", vocab_size: int, eos_ids: Iterable[int], limits: GrammarLimits | None = None
    ) -> None:
        self.limits = limits or GrammarLimits()
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        self._compiler = GrammarCompiler(self._worker_start, self.limits)
        self._lock = threading.Lock()  # guards the rest
        self._vocabulary: Vocabulary | None = None
        self._kept: OrderedDict[tuple[str, str, str], CompiledGrammar] = OrderedDict()
        self._n_bytes = 0

    def compile(self, params: StructuredOutputsParams) -> CompiledGrammar:
        """Compile a form, or give it as it was compiled before. Takes up to seconds.

        Raises: RequestError: it is malformed, too large, or cannot be kept to; `param` names the field.
        """
        form, text, options = self._read(params)
        key = (form, text, json.dumps(options, sort_keys=True))
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
        try:
            answer = self._compiler.compile(form, text, options)
            compiled = self._compile_here(answer.grammar, max(answer.n_bytes, _N_BYTES_LEAST) + 2 * len(text))
        except CompileRefused as error:
            raise params.refused(str(error), self._field(params)) from None
        self._keep(key, compiled)
        return compiled

    def checked_schema(self, param: str, schema: Any, *, is_closed: bool) -> Any:
        """Give a schema that is part of a larger grammar, checked; `is_closed`: its objects have no other properties.

        Raises: RequestError: it is refused; `param` names it.
        """
        try:
            check_schema(schema, self.limits)
        except SchemaRefused as error:
            raise RequestError(f"{param}: {error}", param=param) from None
        return closed(schema, self.limits.schema_depth_max) if is_closed else schema

    def close(self) -> None:
        """End the workers. Idempotent."""
        self._compiler.close()

    def check(self) -> None:
        """Raise AssertionError when the module's invariant does not hold."""
        with self._lock:
            total = sum(one.n_bytes for one in self._kept.values())
            assert total == self._n_bytes, f"grammars: {total} bytes are kept, {self._n_bytes} are counted"
            assert total <= self.limits.cache_bytes or len(self._kept) == 1, f"grammars: {total} bytes are kept"

    def _keep(self, key: tuple[str, str, str], compiled: CompiledGrammar) -> None:
        with self._lock:
            old = self._kept.pop(key, None)
            self._n_bytes += compiled.n_bytes - (old.n_bytes if old is not None else 0)
            self._kept[key] = compiled
            while self._n_bytes > self.limits.cache_bytes and len(self._kept) > 1:
                self._n_bytes -= self._kept.popitem(last=False)[1].n_bytes

    def _compile_here(self, grammar: str, n_bytes: int) -> CompiledGrammar:
        from llguidance import LLMatcher

        vocabulary = self._vocabulary_of()
        limits = forms.parser_limits(self.limits.n_lexer_states_max)
        matcher = LLMatcher(vocabulary.tokenizer, grammar, log_level=forms.LIBRARY_QUIET, limits=limits)
        if matcher.is_error():
            raise CompileRefused(" ".join(matcher.get_error().split())[:300])
        return CompiledGrammar(matcher, vocabulary, n_bytes)

    def _vocabulary_of(self) -> Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                start = self._worker_start()
                encode = functools.partial(self._tokenizer.encode, add_special_tokens=False)
                tokenizer = forms.make_tokenizer(start.tokens, start.special_ids, start.eos_ids, encode)
                self._vocabulary = Vocabulary(tokenizer, self._tokenizer, self._vocab_size, self._eos_ids)
            return self._vocabulary

    def _worker_start(self) -> WorkerStart:
        tokens = [self._tokenizer.token_bytes(i) for i in range(self._vocab_size)]
        # An end is never text of a form, also where the vocabulary has it as a common token.
        special = sorted(i for i in {*self._tokenizer.special_ids, *self._eos_ids} if i < self._vocab_size)
        eos_ids = self._eos_ids
        if not eos_ids:
            # The library needs one; a token that no model has is never sampled.
            tokens.append(b"<end>")
            special.append(self._vocab_size)
            eos_ids = [self._vocab_size]
        return WorkerStart(tokens, special, eos_ids, self.limits.worker_bytes, self.limits.n_lexer_states_max)

    def _field(self, params: StructuredOutputsParams) -> str:
        return params.form if params.name == "structured_outputs" else ""

    def _read(self, params: StructuredOutputsParams) -> tuple[str, str, dict[str, Any]]:
        """Check a form; give it in the words of `llguidance_forms.to_grammar`."""
        form, field = params.form, self._field(params)
        try:
            match form:
                case "json":
                    return "json", self._read_schema(params), self._json_options(params)
                case "json_object":
                    return "json", '{"type":"object"}', self._json_options(params)
                case "regex":
                    assert params.regex is not None
                    check_regex("the expression", params.regex, self.limits)
                    return "regex", params.regex, {}
                case "choice":
                    return "choice", self._read_choices(params), {}
                case "structural_tag":
                    assert isinstance(params.structural_tag, str)
                    self._check_size(params.structural_tag)
                    tags = json.loads(params.structural_tag)
                    return "lark", tags_to_lark(tags, self.limits, self._tokenizer.special_tokens), {}
                case _:
                    assert params.grammar is not None
                    self._check_size(params.grammar)
                    return "grammar", params.grammar, {}
        except SchemaRefused as error:
            raise params.refused(str(error), field) from None

    def _read_schema(self, params: StructuredOutputsParams) -> str:
        assert isinstance(params.json, str)
        self._check_size(params.json)
        schema = json.loads(params.json)
        check_schema(schema, self.limits)
        if schema is True:
            schema = {}
        if schema is False:
            raise SchemaRefused("the schema: false allows nothing; a schema that something meets is needed")
        if not params.disable_additional_properties:
            return json.dumps(schema, ensure_ascii=False)
        return json.dumps(closed(schema, self.limits.schema_depth_max), ensure_ascii=False)

    def _read_choices(self, params: StructuredOutputsParams) -> str:
        assert params.choice is not None
        if len(params.choice) > self.limits.n_choices_max:
            raise SchemaRefused(
                f"{len(params.choice)} texts to choose from; at most {self.limits.n_choices_max} are taken"
            )
        text = json.dumps(list(params.choice), ensure_ascii=False)
        self._check_size(text)
        return text

    def _json_options(self, params: StructuredOutputsParams) -> dict[str, Any]:
        options: dict[str, Any] = {"disable_any_whitespace": params.disable_any_whitespace}
        if params.whitespace_pattern is not None:
            check_regex("whitespace_pattern", params.whitespace_pattern, self.limits)
            options["whitespace_pattern"] = params.whitespace_pattern
        return options

    def _check_size(self, text: str) -> None:
        if len(text.encode("utf-8", "replace")) > self.limits.grammar_bytes_max:
            raise SchemaRefused(f"{len(text)} characters; at most {self.limits.grammar_bytes_max} bytes are taken")
