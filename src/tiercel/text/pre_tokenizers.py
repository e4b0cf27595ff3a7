r"""The splits that byte-level BPE models make before merging, by the name a GGUF file gives them.

A wrong split still decodes to the right text, so nothing fails, and the model answers a little worse. Hence there is
no fallback here: a name that is not in the table is refused.

Source: the patterns of each family's published tokenizer.json. We differ from llama.cpp in using those patterns as
published (the library's regex engine knows `(?i:)` and `\p{Lu}`), and in composing Unicode (NFC) where they do.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiercel.base.errors import UnsupportedModel

if TYPE_CHECKING:
    from tokenizers.normalizers import Normalizer
    from tokenizers.pre_tokenizers import PreTokenizer

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _cl100k(n_digits: str, *, letter: str = r"\p{L}", mark: str = "") -> str:
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?{letter}+|\p{{N}}{n_digits}"
        rf"| ?[^\s\p{{L}}{mark}\p{{N}}]+[\r\n]*|{_TAIL}"
    )


def _cased(n_digits: str, suffix: str) -> str:
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{lead}{upper}*{lower}+{suffix}|{lead}{upper}+{lower}*{suffix}"
        rf"|\p{{N}}{n_digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
    )


@dataclass(frozen=True, slots=True)
class Split:
    """How one family of byte-level models prepares text."""

    pattern: str | None = None
    """The regular expression whose matches are words; None for GPT-2's own."""
    is_digitwise: bool = False
    """Each digit stands alone before the pattern is applied."""
    is_composed: bool = False
    """Text is normalised to NFC."""
    ignores_merges: bool = False
    """A word that is a token is that token, whatever the merges say."""
    adds_bos: bool = False
    """What a file that does not say `add_bos_token` means."""

    def pre_tokenizer(self) -> "PreTokenizer":
        """Build the library's object for this split."""
        from tokenizers import Regex, pre_tokenizers

        parts: list[PreTokenizer] = []
        if self.is_digitwise:
            parts.append(pre_tokenizers.Digits(individual_digits=True))
        if self.pattern is not None:
            parts.append(pre_tokenizers.Split(Regex(self.pattern), behavior="isolated"))
        parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.pattern is None))
        return parts[0] if len(parts) == 1 else pre_tokenizers.Sequence(parts)

    def normalizer(self) -> "Normalizer | None":
        """Build the library's normalizer, or None when text is taken as it is."""
        from tokenizers import normalizers

        return normalizers.NFC() if self.is_composed else None


_GPT2 = Split()
_DIGITS = Split(is_digitwise=True)
_LLAMA3 = Split(_cl100k("{1,3}"), ignores_merges=True, adds_bos=True)
_LLAMA3_PLAIN = Split(_cl100k("{1,3}"))
_QWEN2 = Split(_cl100k(""), is_composed=True)
_QWEN35 = Split(_cl100k("", letter=r"[\p{L}\p{M}]", mark=r"\p{M}"), is_composed=True)
_TEKKEN = Split(_cased("", ""), ignores_merges=True, adds_bos=True)
_GPT4O = Split(_cased("{1,3}", f"{_CONTRACTIONS}?"))

SPLITS: dict[str, Split] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "smaug-bpe": _LLAMA3_PLAIN,
    "dbrx": _LLAMA3_PLAIN,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": _QWEN35,
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
}
"""Frozen in use: nothing writes to it after import."""


def split_named(name: str) -> Split:
    """Find the split a GGUF file names in `tokenizer.ggml.pre`.

    Raises:
        UnsupportedModel: the name is not known.
    """
    split = SPLITS.get(name)
    if split is None:
        raise UnsupportedModel(
            f"tokenizer.ggml.pre: {name!r}; known pre-tokenizers are {', '.join(sorted(SPLITS))}; "
            "use a model of a supported family, or load the checkpoint's folder with its tokenizer.json"
        )
    return split
