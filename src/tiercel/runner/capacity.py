"""The one capacity formula: how many pages the pool gets and how long a sequence may be. Start-up, admission and logs
all read its result, so that what is admitted always fits what was allocated.
"""

import msgspec

from tiercel.base.errors import ConfigError, OutOfPages

_MIB = 1 << 20
# A quarter of what is free: the rest is for weights still to be packed, activations, and everybody else on the machine.
_POOL_FRAC = 0.25
_POOL_FRAC_MAX = 0.5  # for the one sequence that must fit


class Capacity(msgspec.Struct, frozen=True):
    """What the page pool holds."""

    page_size_tokens: int
    page_bytes: int
    n_pages: int
    max_len_tokens: int
    max_num_seqs: int
    state_bytes: int = 0  # of one sequence, whatever its length; every slot has it beside the pool

    @property
    def n_tokens(self) -> int:
        """Tokens the pool holds."""
        return self.n_pages * self.page_size_tokens

    @property
    def pages_per_sequence(self) -> int:
        """Pages of one sequence of full length."""
        return pages_for(self.max_len_tokens, self.page_size_tokens)

    @property
    def n_full_sequences(self) -> float:
        """How many sequences of full length fit at once."""
        return self.n_pages / self.pages_per_sequence

    def describe(self) -> str:
        """Return the line printed at start."""
        return (
            f"KV pool: {self.n_pages:,} pages of {self.page_size_tokens} tokens "
            f"({self.page_bytes / 1024:.0f} KiB each, {self.n_pages * self.page_bytes / _MIB:,.0f} MiB), "
            f"{self.n_tokens:,} tokens; "
            f"{self.n_full_sequences:.2f} requests of {self.max_len_tokens:,} tokens fit at once"
        ) + self._describe_state()

    def _describe_state(self) -> str:
        if not self.state_bytes:
            return ""
        total = self.max_num_seqs * self.state_bytes / _MIB
        return (
            f"; recurrent state: {self.state_bytes / _MIB:,.2f} MiB a sequence, {total:,.0f} MiB for "
            f"{self.max_num_seqs}; prefix caching is off, as states are not kept"
        )


def pages_for(n_tokens: int, page_size_tokens: int) -> int:
    """Return how many pages hold `n_tokens`."""
    return -(-n_tokens // page_size_tokens)


def slots_for(state_bytes: int, wanted: int, available_bytes: int) -> int:
    """Return how many sequences may be computed together, when nobody says: their states take an eighth of memory."""
    return wanted if state_bytes == 0 else max(1, min(wanted, available_bytes // 8 // state_bytes))


def plan(
    *,
    kv_token_bytes: int,
    page_size_tokens: int,
    model_len_tokens: int,
    max_model_len: int | None,
    max_num_seqs: int,
    pool_bytes: int | None,
    available_bytes: int,
    state_bytes: int = 0,
) -> Capacity:
    """Choose the pool's size and the longest sequence.

    `max_model_len` None means the model's own length, or the largest that fits if memory is short; -1 asks for the
    largest that fits. `pool_bytes` None means enough for `max_num_seqs` full sequences, but at most a quarter of
    `available_bytes`. Each of `max_num_seqs` slots takes `state_bytes` of memory first.

    Raises:
        ConfigError: a setting is out of its range.
        OutOfPages: the pool cannot hold one sequence of the length that was asked for, or is larger than memory.
    """
    if page_size_tokens % 16 or not 16 <= page_size_tokens <= 1024:
        raise ConfigError(f"block_size: got {page_size_tokens}; needs a multiple of 16 from 16 to 1024")
    if max_num_seqs < 1:
        raise ConfigError(f"max_num_seqs: got {max_num_seqs}; needs 1 or more")
    if max_model_len is not None and max_model_len != -1 and max_model_len < 2:
        raise ConfigError(f"max_model_len: got {max_model_len}; needs at least 2, or -1 for the largest that fits")
    if max_model_len is not None and max_model_len > model_len_tokens:
        raise ConfigError(
            f"max_model_len: got {max_model_len}; the model's own limit is {model_len_tokens} tokens; "
            "lower it to that or leave it out"
        )
    available_bytes -= state_bytes * max_num_seqs
    if available_bytes < 0:
        raise OutOfPages(
            f"recurrent state: {max_num_seqs} sequences of {state_bytes / _MIB:,.2f} MiB each; "
            f"{(available_bytes + state_bytes * max_num_seqs) / _MIB:,.0f} MiB of memory are free; lower max_num_seqs"
        )
    page_bytes = kv_token_bytes * page_size_tokens
    len_tokens = model_len_tokens if max_model_len in (None, -1) else max_model_len
    assert len_tokens is not None
    if page_bytes == 0:
        n_pages = max_num_seqs * pages_for(len_tokens, page_size_tokens)
        return Capacity(page_size_tokens, 0, n_pages, len_tokens, max_num_seqs, state_bytes)
    wanted = max_num_seqs * pages_for(len_tokens, page_size_tokens)
    if pool_bytes is not None:
        n_pages, limit_name = min(wanted, pool_bytes // page_bytes), "kv_cache_memory_bytes"
        if n_pages * page_bytes > available_bytes:
            raise OutOfPages(
                f"kv pool: kv_cache_memory_bytes={pool_bytes} makes {n_pages} pages of {page_bytes / _MIB:.2f} MiB; "
                f"{available_bytes / _MIB:,.0f} MiB of memory are free; lower it, max_model_len or max_num_seqs"
            )
    else:
        one = pages_for(len_tokens, page_size_tokens)
        quarter, half = (
            int(available_bytes * _POOL_FRAC) // page_bytes,
            int(available_bytes * _POOL_FRAC_MAX) // page_bytes,
        )
        n_pages, limit_name = min(wanted, max(quarter, min(one, half))), "half of the free memory"
    if n_pages * page_size_tokens < len_tokens:
        if max_model_len not in (None, -1) or n_pages < 1:
            shorter = f"lower max_model_len to {n_pages * page_size_tokens} or " if n_pages else ""
            raise OutOfPages(
                f"kv pool: {n_pages} pages of {page_bytes / _MIB:.2f} MiB fit in {limit_name}; "
                f"one sequence of max_model_len={len_tokens} needs {pages_for(len_tokens, page_size_tokens)}; "
                f"{shorter}give more memory"
            )
        len_tokens = n_pages * page_size_tokens
    return Capacity(page_size_tokens, page_bytes, min(n_pages, wanted), len_tokens, max_num_seqs, state_bytes)
