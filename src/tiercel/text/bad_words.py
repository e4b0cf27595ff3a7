"""The token sequences that stand for the words a request forbids."""

from collections.abc import Sequence
from typing import Final

from tiercel.base.errors import RequestError
from tiercel.text.tokenizer import Tokenizer

N_SEQUENCES_MAX: Final = 128
N_TOKENS_MAX: Final = 1024


def bad_words_ids(tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]]:
    """Cut each word into tokens twice: as it begins a text, and as it follows a space.

    The second is listed only if its first token differs and it is as long: otherwise it is the same word, or one
    that starts with a lone space, which would forbid more than was asked.

    Raises:
        RequestError: a word is blank, or there are too many sequences or tokens.
    """
    sequences: list[list[int]] = []
    for word in words:
        bare = word.lstrip()
        alone = tokenizer.encode(bare, add_special_tokens=False) if bare else []
        if not alone:
            raise RequestError(
                f"bad_words: {word[:20]!r}; a word with at least one letter is needed; leave it out", param="bad_words"
            )
        sequences.append(alone)
        spaced = tokenizer.encode(f" {bare}", add_special_tokens=False)
        if spaced[0] != alone[0] and len(spaced) == len(alone):
            sequences.append(spaced)
    n_tokens = sum(map(len, sequences))
    if len(sequences) > N_SEQUENCES_MAX or n_tokens > N_TOKENS_MAX:
        raise RequestError(
            f"bad_words: {len(sequences)} token sequences of {n_tokens} tokens; at most {N_SEQUENCES_MAX} sequences "
            f"and {N_TOKENS_MAX} tokens are allowed; send fewer or shorter words",
            param="bad_words",
        )
    return sequences
