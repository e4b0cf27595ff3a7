"""Requests' forms in the terms of llguidance, the library that keeps to them. The only file that knows its names.

Imported by the worker's process too, so it imports little, and the library lazily.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from tiercel.text.lark import BLANKS, JSON_OPTIONS, quoted

LIBRARY_QUIET: Final = 0  # its warnings go to the standard error otherwise


def make_tokenizer(
    tokens: Sequence[bytes],
    special_ids: Sequence[int],
    eos_ids: Sequence[int],
    encode: Callable[[str], list[int]] | None = None,
) -> Any:
    """Build the library's view of a vocabulary.

    `encode` cuts text as the model has learnt to read it: where only one text may follow, the library allows just the
    tokens it is cut into. Without it, the longest that fit are taken.

    Cost: some 0.1 s for 50,000 tokens, 30 MiB.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    vocabulary = _Vocabulary(tokens, special_ids, eos_ids, encode)
    vocabulary.library = LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=len(tokens), eos_token=list(eos_ids))
    return vocabulary.library


class _Vocabulary:
    """What the library wants to know of one."""

    bos_token_id = None

    def __init__(
        self,
        tokens: Sequence[bytes],
        special_ids: Sequence[int],
        eos_ids: Sequence[int],
        encode: Callable[[str], list[int]] | None,
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = list(special_ids)
        self._special_ids = frozenset(special_ids) | frozenset(eos_ids)
        self.eos_token_id = eos_ids[0]
        self.library: Any = None
        self._encode = encode

    def __call__(self, text: bytes) -> list[int]:
        """Cut a text. The library passes over what a cut leaves out, so one that is not exact is not used."""
        if self._encode is not None:
            ids = self._encode(text.decode("utf-8", "replace"))
            # Text that spells a special token is that text, not the token, which may even end the answer.
            is_exact = b"".join(self.tokens[i] for i in ids if i < len(self.tokens)) == text
            if is_exact and self._special_ids.isdisjoint(ids):
                return ids
        return [] if self.library is None else list(self.library.greedy_tokenize(text.decode("utf-8", "replace")))


def parser_limits(n_lexer_states_max: int) -> Any:
    """Give the bounds of work that a compiled grammar keeps to at each token; errors show nothing of its insides."""
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=n_lexer_states_max, verbose_errors=False)


def json_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Give the library's options for JSON of a request."""
    if options.get("disable_any_whitespace"):
        return {**JSON_OPTIONS, "whitespace_flexible": False, "whitespace_pattern": None}
    return {**JSON_OPTIONS, "whitespace_pattern": options.get("whitespace_pattern") or BLANKS}


def to_grammar(form: str, text: str, options: Mapping[str, Any]) -> str:
    """Give the library's grammar of a form.

    `form` is json, regex, choice (`text` is a JSON list), grammar (Lark or GBNF) or lark.

    Raises: ValueError: it is malformed; some mistakes show only when the grammar is compiled.
    """
    from llguidance import LLMatcher

    if form == "json":
        return LLMatcher.grammar_from_json_schema(text, overrides=json_options(options))  # type: ignore[arg-type]
    if form == "regex":
        return LLMatcher.grammar_from_regex(text)
    if form == "choice":
        return LLMatcher.grammar_from_lark("start: " + "\n | ".join(map(quoted, json.loads(text))))
    if form == "lark":
        return LLMatcher.grammar_from_lark(text)
    assert form == "grammar", f"grammar: no form {form}"
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return LLMatcher.grammar_from_lark(any_to_lark(text))
    except Exception as error:
        raise ValueError(f"it could not be read as GBNF: {error}") from error
