"""The vocabulary side of a GGUF file's metadata: its arrays checked, and the ids that begin and end texts.

It does not build a tokenizer; `text` does that from the same metadata.
"""

from collections.abc import Mapping
from itertools import chain
from math import inf
from types import MappingProxyType
from typing import Any

import numpy as np

from tiercel.base.errors import ModelFileError
from tiercel.loaders.gguf_fields import scalar, shortest
from tiercel.loaders.gguf_file import StringArray, Value

# Words that end a turn or a document, whatever the file declares: many files name one of several such tokens only.
_END_TOKENS = frozenset(
    {b"<|im_end|>", b"<|eot_id|>", b"<|eom_id|>", b"<end_of_turn>", b"<|end|>", b"<|endoftext|>", b"<|end_of_text|>"}
)
_CONTROL_TOKEN = 3
# Key -> the configuration's name for it; the two without one only end answers, see `generation_config`.
_TOKEN_KEYS: Mapping[str, str | None] = MappingProxyType(
    {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id", "eot": None, "eom": None}
)
_NO_TOKEN = 0xFFFFFFFF  # how some writers say "none" in a uint32


def generation_config(metadata: Mapping[str, Value], where: str) -> dict[str, Any]:
    """Collect the ids that end an answer and the writer's recommended sampling, in `generation_config.json` form.

    `eos_token_id` lists the declared end-of-sequence, end-of-turn and end-of-message tokens, then the control tokens
    whose text is one of the usual end marks.
    """
    found: dict[str, Any] = {}
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if type(bos) is int and bos != _NO_TOKEN:
        found["bos_token_id"] = bos
    declared = (metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
    ends = list(dict.fromkeys(chain((i for i in declared if type(i) is int and i != _NO_TOKEN), _end_tokens(metadata))))
    if ends:
        found["eos_token_id"] = ends
    for key, name in (("temp", "temperature"), ("top_k", "top_k"), ("top_p", "top_p"), ("min_p", "min_p")):
        value = scalar(metadata, f"general.sampling.{key}", "", where)
        if value == "":
            continue
        if type(value) not in (int, float) or not 0 <= float(value) < inf:
            raise ModelFileError(
                f"{where}: general.sampling.{key} is {str(value)[:24]}; a number of 0 or more is needed"
            )
        found[name] = shortest(value) if isinstance(value, float) else value
    return found


def token_ids(metadata: Mapping[str, Value], vocab_size: int, where: str) -> dict[str, Any]:
    """Read `bos_token_id`, `eos_token_id` and `pad_token_id`; None where the file names none.

    Raises:
        ModelFileError: one of them, or an end-of-turn or end-of-message id, is not in the vocabulary.
    """
    found: dict[str, Any] = {}
    for key, name in _TOKEN_KEYS.items():
        value = scalar(metadata, f"tokenizer.ggml.{key}_token_id", _NO_TOKEN, where)
        if value != _NO_TOKEN and (type(value) is not int or not 0 <= value < vocab_size):
            raise ModelFileError(
                f"{where}: tokenizer.ggml.{key}_token_id is {str(value)[:24]}; 0 to {vocab_size - 1} are valid"
            )
        if name is not None:
            found[name] = None if value == _NO_TOKEN else value
    return found


def check_vocabulary(metadata: Mapping[str, Value], vocab_size: int, where: str) -> None:
    """Check that the vocabulary's arrays have the declared types and one element a row of the embedding."""
    wanted = {"tokens": "texts", "scores": "float32", "token_type": "int32", "merges": "texts"}
    for name, kind in wanted.items():
        value = metadata.get(f"tokenizer.ggml.{name}")
        if value is None:
            continue
        is_kind = (
            isinstance(value, StringArray)
            if kind == "texts"
            else isinstance(value, np.ndarray) and str(value.dtype) in (kind, "u" + kind)
        )
        if not is_kind:
            raise ModelFileError(f"{where}: tokenizer.ggml.{name} has another element type; {kind} are needed")
        if name != "merges" and len(value) != vocab_size:  # type: ignore[arg-type]
            raise ModelFileError(
                f"{where}: tokenizer.ggml.{name} has {len(value)} elements and the embedding {vocab_size} rows; "  # type: ignore[arg-type]
                "both must be equal"
            )


def _end_tokens(metadata: Mapping[str, Value]) -> list[int]:
    tokens, kinds = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, StringArray) or not isinstance(kinds, np.ndarray) or len(kinds) != len(tokens):
        return []
    # By length first: Gemma has 6,000 control tokens, of which a handful are worth reading.
    is_candidate = (kinds == _CONTROL_TOKEN) & np.isin(tokens.lengths, [len(word) for word in _END_TOKENS])
    return [int(i) for i in np.flatnonzero(is_candidate) if tokens.raw(int(i)) in _END_TOKENS]
