"""What a tokenizer of the `tokenizers` library does not hold itself, and how its errors become ours.

It knows neither files nor requests.
"""

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from tiercel.base.errors import ModelFileError, TiercelError

if TYPE_CHECKING:
    import tokenizers


class Traits(msgspec.Struct, frozen=True):
    """Facts about a vocabulary beside its tokens."""

    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    add_bos: bool = False
    add_eos: bool = False
    chat_template: str | None = None
    chat_templates: Mapping[str, str] = msgspec.field(default_factory=dict)
    raw_bytes: Mapping[int, bytes] = msgspec.field(default_factory=dict)
    """The bytes of tokens whose text in the library is only a stand-in."""
    n_chars_max: int | None = None
    """Characters of the longest token, if somebody counted."""

    def to_plain(self) -> dict[str, Any]:
        """Give the facts as values that JSON can hold."""
        plain = msgspec.structs.asdict(self)
        plain["eos_ids"] = list(self.eos_ids)
        plain["raw_bytes"] = {str(i): b.hex() for i, b in self.raw_bytes.items()}
        return plain

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "Traits":
        """Read what `to_plain` gave.

        Raises:
            ModelFileError: a fact is missing, unknown or malformed.
        """
        try:
            raw = {int(i): bytes.fromhex(b) for i, b in plain.get("raw_bytes", {}).items()}
            return cls(**{**plain, "eos_ids": tuple(plain.get("eos_ids", ())), "raw_bytes": raw})
        except (TypeError, ValueError, AttributeError) as error:
            raise ModelFileError(f"text.traits: {error}; what Traits.to_plain gives is needed") from error


@contextmanager
def library_errors(where: str) -> Iterator[None]:
    """Turn an error of the `tokenizers` library into a `ModelFileError` that names `where`."""
    try:
        yield
    except TiercelError:
        raise
    # The library raises plain `Exception` for everything it finds wrong with a file: there is nothing narrower.
    except Exception as error:
        raise ModelFileError(
            f"{where}: {str(error)[:200]}; a tokenizer that the `tokenizers` library can read is needed; "
            "convert the model again or fetch another file"
        ) from error


def frame(backend: "tokenizers.Tokenizer", *, bos: tuple[int, str] | None, eos: tuple[int, str] | None) -> None:
    """Have encoding put these tokens, given as id and text, around each text; with neither, nothing."""
    from tokenizers import processors

    if bos is None and eos is None:
        backend.post_processor = None
        return
    # Named by role: the library's template syntax would take apart a token that holds "$" or ":".
    single = [*(["bos"] if bos else []), "$A", *(["eos"] if eos else [])]
    special = [
        {"id": name, "ids": [token[0]], "tokens": [token[1]]} for name, token in (("bos", bos), ("eos", eos)) if token
    ]
    backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep Python's collector of cycles from running while a vocabulary's pairs are listed.

    Half a million new tuples, none of them garbage, make it look at all of them again and again: a third of the time
    that Gemma's vocabulary takes.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
