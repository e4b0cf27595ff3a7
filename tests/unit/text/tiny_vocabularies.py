"""Tiny vocabularies as GGUF metadata, and the plain SentencePiece algorithm to compare with."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

SPACE = "\u2581"


def byte_letters() -> list[str]:
    """The byte-level alphabet, letter of byte 0 first: bytes that print are themselves, the rest from 256 up."""
    letters, n = [], 0
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or byte >= 0xAE:
            letters.append(chr(byte))
        else:
            letters.append(chr(256 + n))
            n += 1
    return letters


def spelled(text: str) -> str:
    letters = byte_letters()
    return "".join(letters[byte] for byte in text.encode())


def byte_level(pre: str = "gpt-2", **changes: Any) -> dict[str, Any]:
    """256 byte tokens, a few merges, four control tokens and a user-defined one."""
    merges = []
    for word in (" the", "the", "ing", " he", "12", "123", "ll", "é", "你", "好", "\n\n", "  ", "    "):
        letters = spelled(word)
        for end in range(2, len(letters) + 1):
            merges.append((letters[: end - 1], letters[end - 1 : end]))
    merges = list(dict.fromkeys(merges))
    tokens = [*byte_letters(), *dict.fromkeys(a + b for a, b in merges)]
    types = [1] * len(tokens)
    for text, kind in (("<|endoftext|>", 3), ("<|im_start|>", 3), ("<|im_end|>", 3), ("<think>", 4), ("é<x>", 4)):
        tokens.append(text)
        types.append(kind)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in merges],
        "tokenizer.ggml.bos_token_id": tokens.index("<|im_start|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|endoftext|>"),
    }
    return _changed(metadata, changes)


WORDS = ("he", "▁he", "lo", "hel", "▁hello", "ll", "llo", "▁▁", "▁a", "ab", "abc", "bc", "aa", "aaa", "aaaa", "世界")


def spm(words: Sequence[str] = WORDS, scores: Sequence[float] | None = None, **changes: Any) -> dict[str, Any]:
    """The usual first three, 256 byte tokens, two tokens of each further kind, the letters and words given."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "<end_of_turn>", "\n\n", "▁▁▁"]
    # With a space prefix these two would begin a new text behind them, with its own prefix: see gguf_vocab.
    user_defined = 4 if changes.get("add_space_prefix") is False else 1
    types = [2, 3, 3, *[6] * 256, 3, user_defined, user_defined]
    letters = [c for c in dict.fromkeys("".join(words) + SPACE + "helo wrdabc") if c != " "]
    values = [0.0] * len(tokens) + (list(scores) if scores is not None else [-float(i) for i in range(len(words))])
    tokens += [*words, *(c for c in letters if c not in words)]
    types += [1] * (len(tokens) - len(types))
    values += [-1000.0 - i for i in range(len(tokens) - len(values))]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array(values, np.float32),
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return _changed(metadata, changes)


def _changed(metadata: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Set keys by their last part; None takes one out."""
    for name, value in changes.items():
        key = f"tokenizer.{name}" if name.startswith("chat_template") else f"tokenizer.ggml.{name}"
        if value is None:
            metadata.pop(key, None)
        else:
            metadata[key] = value
    return metadata


def spm_by_the_book(metadata: Mapping[str, Any], text: str) -> list[str]:
    """Join the neighbours whose union has the best score, leftmost first, until there are none."""
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata["tokenizer.ggml.token_type"]
    scores = metadata["tokenizer.ggml.scores"]
    score = {t: float(s) for t, s, kind in zip(tokens, scores, types, strict=True) if kind == 1}
    pieces = list(text.replace(" ", SPACE))
    while True:
        best = None
        for i in range(len(pieces) - 1):
            value = score.get(pieces[i] + pieces[i + 1])
            if value is not None and (best is None or value > best[0]):
                best = (value, i)
        if best is None:
            break
        pieces[best[1] : best[1] + 2] = [pieces[best[1]] + pieces[best[1] + 1]]
    return [
        part for piece in pieces for part in ([piece] if piece in score else [f"<0x{b:02X}>" for b in piece.encode()])
    ]
