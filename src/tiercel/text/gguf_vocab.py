"""The vocabulary in a GGUF file's `tokenizer.ggml.*` metadata, checked, and built into a tokenizer of the library.

Two kinds: `gpt2`, byte-level BPE with merges and a named split, and `llama`, SentencePiece BPE with scores. It knows
neither folders nor the rest of the file; `Tokenizer.from_gguf` is the way in.

Source: the key names are those of the GGUF specification; defaults of absent keys follow llama.cpp. We differ in
refusing a `gpt2` vocabulary without `tokenizer.ggml.pre` instead of guessing its split. We agree with it, and with
Llama 2's published tokenizer, in that each stretch of text between added tokens gets a space prefix of its own.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tiercel.base.errors import ModelFileError, UnsupportedModel
from tiercel.text.backend import Traits, collector_paused, frame, library_errors
from tiercel.text.pre_tokenizers import Split, split_named
from tiercel.text.spm_merges import MAX_TOKEN_CHARS, derive_merges

if TYPE_CHECKING:
    import numpy.typing as npt
    import tokenizers

_P: Final = "tokenizer.ggml."
_MAX_TOKENS: Final = 1 << 22
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_ABSENT_ID: Final = 0xFFFFFFFF  # what a converter's -1 becomes in an unsigned field
_SPACE: Final = "\u2581"
TURN_ENDS: Final = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end_of_turn|>", "<|eot|>")
"""Tokens that end a turn whenever the model's own chat template writes them, whatever `eos_token_id` says."""


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The arrays of the file, of one length, with every token a distinct text that UTF-8 can hold."""

    tokens: list[str]
    types: "npt.NDArray[np.int32]"
    raw_bytes: dict[int, bytes] = field(default_factory=dict)

    def of_type(self, *types: int) -> list[int]:
        return [int(i) for i in np.flatnonzero(np.isin(self.types, types))]


def build(metadata: Mapping[str, Any]) -> "tuple[tokenizers.Tokenizer, Traits]":
    """Build the library's tokenizer and what it does not hold itself.

    Raises:
        ModelFileError: arrays of different lengths, wrong types, repeated tokens, ids outside the vocabulary.
        UnsupportedModel: a kind of vocabulary or a split that Tiercel does not implement.
    """
    kind = metadata.get(f"{_P}model")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModel(
            f"tokenizer.ggml.model: {str(kind)[:40]!r}; Tiercel reads 'gpt2' and 'llama'; "
            "load the checkpoint's folder with its tokenizer.json"
        )
    is_spm = kind == "llama"
    vocabulary = _vocabulary(metadata, is_spm=is_spm)
    ids = {name: _special_id(metadata, name, len(vocabulary.tokens)) for name in _SPECIAL_IDS}
    with library_errors("tokenizer.ggml"), collector_paused():
        if is_spm:
            backend, split = _spm(metadata, vocabulary, ids), None
        else:
            backend, split = _byte_level(metadata, vocabulary)
        _add_tokens(backend, vocabulary, ids)
    template, templates = _templates(metadata)
    traits = Traits(
        bos_id=ids["bos"],
        eos_ids=_eos_ids(vocabulary, ids, template),
        pad_id=ids["padding"],
        add_bos=_flag(metadata, "add_bos_token", ids["bos"] is not None and (split.adds_bos if split else True)),
        add_eos=_flag(metadata, "add_eos_token", False),
        chat_template=template,
        chat_templates=templates,
        raw_bytes=vocabulary.raw_bytes,
        n_chars_max=max(map(len, vocabulary.tokens)),
    )
    _frame(backend, vocabulary, traits, ids["eos"])
    return backend, traits


_SPECIAL_IDS: Final = ("bos", "eos", "eot", "eom", "unknown", "padding")


def _bad(key: str, got: str, needed: str) -> ModelFileError:
    return ModelFileError(f"{_P}{key}: {got}; {needed}; convert the model again or fetch another file")


def _vocabulary(metadata: Mapping[str, Any], *, is_spm: bool) -> _Vocabulary:
    source = metadata.get(f"{_P}tokens")
    if not isinstance(source, Iterable) or isinstance(source, str):
        raise _bad("tokens", "no array of strings", "one string for each token is needed")
    tokens: list[str] = list(source)
    if not 0 < len(tokens) <= _MAX_TOKENS or set(map(type, tokens)) != {str}:
        raise _bad("tokens", f"{len(tokens)} values", f"1 to {_MAX_TOKENS} strings are needed")
    if (longest := max(map(len, tokens))) > MAX_TOKEN_CHARS:
        raise _bad("tokens", f"a token of {longest} characters", f"at most {MAX_TOKEN_CHARS} are allowed")
    types = _numbers(metadata, "token_type", len(tokens), np.int32)
    if types is None:
        types = np.full(len(tokens), _NORMAL, np.int32)
    raw_bytes = _name_the_unnameable(tokens)
    if is_spm:
        # Some converters keep the marks for spaces in user-defined tokens, which are looked for in unmarked text.
        for i in np.flatnonzero(types == _USER_DEFINED).tolist():
            tokens[i] = tokens[i].replace(_SPACE, " ")
    if len(set(tokens)) != len(tokens):
        raise _bad("tokens", f"{len(tokens) - len(set(tokens))} tokens repeated", "each must be given once")
    return _Vocabulary(tokens, types, raw_bytes)


def _name_the_unnameable(tokens: list[str]) -> dict[int, bytes]:
    """Give tokens that are empty or not UTF-8 a name nothing matches; return the bytes they stand for."""
    odd: dict[int, bytes] = {}
    try:
        "".join(tokens).encode()
        suspects = [i for i, token in enumerate(tokens) if not token]
    except UnicodeEncodeError:
        suspects = [i for i, token in enumerate(tokens) if not token or any("\ud800" <= c <= "\udfff" for c in token)]
    for i in suspects:
        odd[i] = tokens[i].encode("utf-8", "surrogateescape" if _is_escaped(tokens[i]) else "replace")
        tokens[i] = f"[TIERCEL_UNNAMEABLE_{i}]"
    return odd


def _is_escaped(token: str) -> bool:
    return all("\udc80" <= c <= "\udcff" for c in token if "\ud800" <= c <= "\udfff")


def _numbers(metadata: Mapping[str, Any], key: str, n: int, dtype: type) -> "npt.NDArray[Any] | None":
    source = metadata.get(f"{_P}{key}")
    if source is None:
        return None
    is_listed = isinstance(source, Iterable) and not isinstance(source, np.ndarray)
    values = np.asarray(list(source) if is_listed else source)
    kinds = "iu" if np.dtype(dtype).kind == "i" else "iuf"
    if values.shape != (n,) or values.dtype.kind not in kinds:
        raise _bad(key, f"{values.size} values of type {values.dtype}", f"{n} numbers are needed, one for each token")
    return values.astype(dtype)


def _special_id(metadata: Mapping[str, Any], name: str, n: int) -> int | None:
    value = metadata.get(f"{_P}{name}_token_id")
    if value is None or (isinstance(value, int) and value in (_ABSENT_ID, -1)):
        return None
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < n:
        raise _bad(f"{name}_token_id", str(value)[:40], f"an id from 0 to {n - 1} is needed")
    return int(value)


def _flag(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    value = metadata.get(f"{_P}{key}", default)
    if not isinstance(value, bool | np.bool_):
        raise _bad(key, str(value)[:40], "true or false is needed")
    return bool(value)


def _byte_level(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> "tuple[tokenizers.Tokenizer, Split]":
    from tokenizers import Tokenizer, decoders, models

    pre = metadata.get(f"{_P}pre")
    if not isinstance(pre, str):
        raise _bad("pre", "absent" if pre is None else str(pre)[:40], "the name of the model's pre-tokenizer is needed")
    split = split_named(pre)
    source = metadata.get(f"{_P}merges")
    if not isinstance(source, Iterable) or isinstance(source, str):
        raise _bad("merges", "absent", "the merges of a 'gpt2' vocabulary are needed")
    lines: list[str] = list(source)
    if not set(map(type, lines)) <= {str}:
        raise _bad("merges", "values that are not strings", "strings are needed")
    merges = [(left, right) for left, _, right in [line.partition(" ") for line in lines]]
    if not all(right for _, right in merges):
        raise _bad("merges", "an entry without a space", "two tokens with a space between are needed")
    model = models.BPE(_ids(vocabulary.tokens), merges, ignore_merges=split.ignores_merges)
    backend = Tokenizer(model)
    normalizer = split.normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = split.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend, split


def _spm(metadata: Mapping[str, Any], vocabulary: _Vocabulary, ids: Mapping[str, int | None]) -> "tokenizers.Tokenizer":
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = _numbers(metadata, "scores", len(vocabulary.tokens), np.float32)
    if scores is None or np.isnan(scores).any():
        raise _bad("scores", "absent" if scores is None else "not a number", "one number for each token is needed")
    is_joined = ~np.isin(vocabulary.types, (_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE))
    is_joined[list(vocabulary.raw_bytes)] = False
    merges = derive_merges(vocabulary.tokens, scores, is_joined)
    unknown = ids["unknown"]
    vocab = _ids(vocabulary.tokens)
    model = models.BPE(
        vocab,
        merges,
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=all(f"<0x{byte:02X}>" in vocab for byte in range(256)),
    )
    backend = Tokenizer(model)
    mark = normalizers.Replace(" ", _SPACE)
    unmark = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if _flag(metadata, "add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), mark])
        unmark.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = mark
    backend.decoder = decoders.Sequence(unmark)
    return backend


def _ids(tokens: list[str]) -> dict[str, int]:
    return dict(zip(tokens, range(len(tokens)), strict=True))


def _add_tokens(backend: "tokenizers.Tokenizer", vocabulary: _Vocabulary, ids: Mapping[str, int | None]) -> None:
    """Make the tokens that text is searched for before anything else: control (special) and user-defined (not)."""
    from tokenizers import AddedToken

    # The ids that end or begin a text are control tokens even where a converter forgot to say so.
    control = set(vocabulary.of_type(_CONTROL, _UNKNOWN)) | {
        i for name in ("bos", "eos", "eot", "eom") if (i := ids[name]) is not None
    }
    control -= set(vocabulary.raw_bytes)
    for special, chosen in ((True, sorted(control)), (False, vocabulary.of_type(_USER_DEFINED))):
        added = [
            AddedToken(vocabulary.tokens[i], normalized=False, special=special)
            for i in chosen
            if special or i not in control
        ]
        if added:
            (backend.add_special_tokens if special else backend.add_tokens)(added)


def _frame(backend: "tokenizers.Tokenizer", vocabulary: _Vocabulary, traits: Traits, eos_id: int | None) -> None:
    """Have encoding put the begin and end tokens around a text."""
    around: list[tuple[str, int | None, bool]] = [
        ("bos", traits.bos_id, traits.add_bos),
        ("eos", eos_id, traits.add_eos),
    ]
    for name, token_id, wanted in around:
        if wanted and token_id is None:
            raise _bad(f"add_{name}_token", "true", f"{name}_token_id is needed with it")
    frame(
        backend,
        bos=(traits.bos_id, vocabulary.tokens[traits.bos_id]) if traits.add_bos and traits.bos_id is not None else None,
        eos=(eos_id, vocabulary.tokens[eos_id]) if traits.add_eos and eos_id is not None else None,
    )


def _eos_ids(vocabulary: _Vocabulary, ids: Mapping[str, int | None], template: str | None) -> tuple[int, ...]:
    found = [i for name in ("eos", "eot", "eom") if (i := ids[name]) is not None]
    if template is not None:
        named = [mark for mark in TURN_ENDS if mark in template]
        controls = {vocabulary.tokens[i]: i for i in vocabulary.of_type(_CONTROL)} if named else {}
        found += [controls[mark] for mark in named if mark in controls]
    return tuple(dict.fromkeys(found))


def _templates(metadata: Mapping[str, Any]) -> tuple[str | None, dict[str, str]]:
    prefix = "tokenizer.chat_template"
    named = {
        key[len(prefix) + 1 :]: value
        for key, value in metadata.items()
        if key.startswith(f"{prefix}.") and isinstance(value, str)
    }
    default = metadata.get(prefix)
    if default is not None and not isinstance(default, str):
        raise ModelFileError(f"{prefix}: {type(default).__name__}; a string is needed; convert the model again")
    if default is not None:
        named["default"] = default
    return named.get("default"), named
