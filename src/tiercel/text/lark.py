"""Writes grammars in the notation that llguidance reads: Lark's rules, with JSON schemas and special tokens in them.

Knows no model and no request. A special token is not its letters: text between marks never becomes one, so a literal
that spells one is written as the token itself.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

# Bounded: a model that begins with blanks would otherwise go on with them. 64: 32 levels, two spaces each.
BLANKS: Final = r"[\x20\x0A\x0D\x09]{1,64}"
# What a schema may not set itself: all that loosens it.
JSON_OPTIONS: Final[Mapping[str, Any]] = {
    "whitespace_flexible": True,
    "whitespace_pattern": BLANKS,
    "item_separator": ",",
    "key_separator": ":",
    "coerce_one_of": False,
    "lenient": False,
}
ANY_TEXT: Final = r"/(.|\n)*/"


class Lark:
    """A grammar being written. `special`: text of a special token -> its id."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        texts = sorted((text for text in special if text), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        self._rules: list[str] = []

    def literal(self, text: str) -> str:
        """Give an expression for exactly this text."""
        pieces, at = [], 0
        for found in self._pattern.finditer(text):
            pieces += [quoted(text[at : found.start()]), f"<[{self._special[found.group()]}]>"]
            at = found.end()
        pieces.append(quoted(text[at:]))
        return " ".join(piece for piece in pieces if piece) or '""'

    def json(self, schema: Any) -> str:
        """Give an expression for JSON of a schema, checked before."""
        written = schema if isinstance(schema, Mapping) else {}
        if schema is False:
            raise ValueError("a schema that allows nothing")
        return self.rule("%json " + json.dumps({**written, "x-guidance": JSON_OPTIONS}, ensure_ascii=False))

    def rule(self, expression: str, attributes: str = "") -> str:
        """Name an expression; return the name."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {expression}")
        return name

    def terminal(self, expression: str) -> str:
        """Name an expression of literals and regular expressions, which may be joined by & and ~; return the name."""
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {expression}")
        return name

    def regex(self, pattern: str) -> str:
        """Give an expression for text that a regular expression matches whole."""
        return self.terminal(f"/{_slashed(pattern)}/")

    def text_before(self, mark: str, *, without: Iterable[str] = ()) -> str:
        """Give an expression for any text up to the first `mark`, and the mark; the text holds none of `without`.

        Lazy: a text by itself would go on into what is the mark's, as no letter tells them apart.
        """
        text = self.text_without(without) if without else self.any_text()
        is_lazy = self._pattern.match(mark) is None
        return self.rule(f"{text} {self.literal(mark)}", "[lazy]" if is_lazy else "")

    def text_without(self, marks: Iterable[str]) -> str:
        """Give an expression for any text that holds none of these."""
        inside = "|".join(re.escape(mark) for mark in marks)
        return self.terminal(f"{ANY_TEXT} & ~/(.|\\n)*({_slashed(inside)})(.|\\n)*/")

    def any_text(self) -> str:
        """Give an expression for any text."""
        return self.terminal(ANY_TEXT)

    def one_of(self, expressions: Iterable[str]) -> str:
        """Give an expression for one of several."""
        return self.rule(" | ".join(expressions))

    def build(self, start: str) -> str:
        """Give the grammar whose texts are those of `start`."""
        return "\n".join(["%llguidance {}", f"start: {start}", *self._rules])


def quoted(text: str) -> str:
    """Write text as a literal. DEL is escaped: of all that JSON's texts hold, Lark's cannot."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") if text else ""


def _slashed(pattern: str) -> str:
    """Write a regular expression so that it can stand between slashes, on one line."""
    escaped = re.sub(r"\\.|/", lambda found: "\\/" if found.group() == "/" else found.group(), pattern, flags=re.S)
    return escaped.replace("\n", "\\n").replace("\r", "\\r")
