"""What tests of structured output share: a small real vocabulary, and a walk through whatever a form allows."""

import random

import numpy as np

from tiercel.protocol.structured import StructuredOutputsParams
from tiercel.sampling.constraint import MaskRows
from tiercel.sampling.grammars import Grammars
from tiercel.text.tokenizer import Tokenizer

PIECES = (
    '{"',
    '":',
    '",',
    '": ',
    ', "',
    '"}',
    '"]',
    "}]",
    "[[",
    "{}",
    "[]",
    "true",
    "false",
    "null",
    "12",
    "123",
    "0.5",
    "-1",
    "abc",
    "the",
    " the",
    "ing",
    "name",
    "é",
    "你",
    "2024",
    "-0",
    "\\n",
    '\\"',
    "\n\n",
    "    ",
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = "<|im_end|>"


def byte_letters():
    letters, n = [], 0
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or byte >= 0xAE:
            letters.append(chr(byte))
        else:
            letters.append(chr(256 + n))
            n += 1
    return letters


def bpe_tokenizer(more_special=()):
    """256 bytes, some pieces of JSON and words, and special tokens: a byte-level vocabulary as models have."""
    letters = byte_letters()
    merges = {}
    for piece in PIECES:
        spelt = [letters[byte] for byte in piece.encode()]
        for end in range(2, len(spelt) + 1):
            merges["".join(spelt[: end - 1]), spelt[end - 1]] = None
    special = (*SPECIAL, *more_special)
    tokens = [*letters, *dict.fromkeys(a + b for a, b in merges), *special]
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": np.array([1] * (len(tokens) - len(special)) + [3] * len(special), np.int32),
            "tokenizer.ggml.merges": [f"{a} {b}" for a, b in merges],
            "tokenizer.ggml.bos_token_id": tokens.index("<|im_start|>"),
            "tokenizer.ggml.eos_token_id": tokens.index(EOS),
        }
    )


class Forms:
    """Grammars of one vocabulary, with more logits than tokens, as models pad theirs."""

    def __init__(self, tokenizer=None, *, n_padding=37, eos_ids=None, limits=None):
        self.tokenizer = tokenizer or bpe_tokenizer()
        self.vocab_size = self.tokenizer.vocab_size + n_padding
        self.eos_id = self.tokenizer.id_of(EOS)
        eos_ids = (self.eos_id,) if eos_ids is None else eos_ids
        self.grammars = Grammars(self.tokenizer, self.vocab_size, eos_ids, limits)

    def compile(self, **form):
        return self.grammars.compile(StructuredOutputsParams(**form))

    def start(self, form, **options):
        return self.compile(**form).start(**options)

    def allowed(self, constraint):
        """Give the ids that may come next."""
        masks = MaskRows(1, self.vocab_size)
        masks.words.fill(0xDEADBEEF)
        constraint.fill(masks.rows[0])
        bits = np.unpackbits(masks.words[0].view(np.uint8), bitorder="little")
        assert not bits[self.vocab_size :].any(), "a bit behind the vocabulary"
        return np.flatnonzero(bits).tolist()

    def say(self, constraint, text):
        """Have the constraint take a text, token by token; each must be allowed."""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        for i in ids:
            assert i in self.allowed(constraint), f"{self.tokenizer.token_text(i)!r} of {text!r} is not allowed"
            constraint.accept(i)
        return ids

    def walk(self, constraint, seed, *, n_max=400, first=""):
        """Go wherever the form allows, at random but towards an end; give the text, or None when there came none."""
        rng = random.Random(seed)
        ids = self.say(constraint, first) if first else []
        while not constraint.is_complete:
            ok = self.allowed(constraint)
            assert ok, f"nothing may follow {self.tokenizer.decode(ids)!r}"
            if constraint.may_end and rng.random() < 0.5:
                return self.tokenizer.decode(ids, skip_special_tokens=False)
            if len(ids) > n_max:
                return None
            i = rng.choice(self._towards_an_end(ok, rng, len(ids)))
            if i == self.eos_id:
                continue
            constraint.accept(i)
            ids.append(i)
            constraint.check()
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def _towards_an_end(self, ok, rng, n):
        closing = [i for i in ok if self.tokenizer.token_bytes(i)[:1] in b'"}]>)<' or i in self.tokenizer.special_ids]
        if closing and rng.random() < (0.35 if n < 60 else 0.8):
            return closing
        plain = [i for i in ok if self.tokenizer.token_bytes(i).strip()]
        return plain if plain and rng.random() < 0.9 else ok

    def close(self):
        self.grammars.check()
        self.grammars.close()
