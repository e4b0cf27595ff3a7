"""The one capacity formula: how many pages the pool gets, how many places for recurrent states, and how long a sequence
may be. Start-up, admission and logs all read its result, so that what is admitted always fits what was allocated.

Pages and snapshots share one budget of bytes. The pages of one sequence of full length come first, then a few
snapshots; what is left is divided as a long prompt needs it: for each spacing of tokens their pages and one snapshot.
What one kind has no use for goes to the other.
"""

import msgspec

from tiercel.base.errors import ConfigError, OutOfPages

_MIB = 1 << 20
# A quarter of what is free: the rest is for weights still to be packed, activations, and everybody else on the machine.
_POOL_FRAC = 0.25
_POOL_FRAC_MAX = 0.5  # for the one sequence that must fit
# What a step of a prompt computes by default: to keep a state more often saves less than a step.
_SPACING_MIN_TOKENS = 512
_SPACING_WITHOUT_KV_TOKENS = 1024
# Of one sequence beside the spaced ones: at its prompt's end, at a fork, and two by turns while it grows.
_N_SNAPSHOTS_BESIDE = 4
_N_SNAPSHOTS_FIRST = 8  # come before pages of a second sequence
# Of pages of no bytes, which take some 40 bytes each to count: 4 M tokens by sixteens, and 10 MB.
_N_COUNTED_PAGES_MAX = 1 << 18
_LESS_DRAFTING = "fewer drafts or sequences take less; speculative=off none"
_SNAPSHOTS_FRAC = 8  # which part of the budget they may take where that makes the longest sequence shorter


class Capacity(msgspec.Struct, frozen=True):
    """What the page pool holds."""

    page_size_tokens: int
    page_bytes: int
    n_pages: int
    max_len_tokens: int
    max_num_seqs: int
    state_bytes: int = 0  # of one sequence, whatever its length; every slot has it beside the pool
    n_snapshots: int = 0  # places for states that are found again
    snapshot_spacing_tokens: int = 0
    drafting_bytes: int = 0  # beside the pool, at most; see `draft_memory`

    @property
    def nbytes(self) -> int:
        """Bytes of all that is said here: pages, each slot's state, snapshots, and what drafting takes at most."""
        states = (self.max_num_seqs + self.n_snapshots) * self.state_bytes
        return self.n_pages * self.page_bytes + states + self.drafting_bytes

    @property
    def n_tokens(self) -> int:
        """Tokens the pool holds; 0 where the model keeps no keys and values."""
        return self.n_pages * self.page_size_tokens

    @property
    def pages_per_sequence(self) -> int:
        """Pages of one sequence of full length."""
        return pages_for(self.max_len_tokens, self.page_size_tokens)

    @property
    def n_full_sequences(self) -> float:
        """How many sequences of full length fit at once; without pages, one a slot."""
        return self.n_pages / self.pages_per_sequence if self.n_pages else float(self.max_num_seqs)

    def describe(self) -> str:
        """Return the line printed at start."""
        return self._describe_pages() + self._describe_state() + self._describe_drafting()

    def _describe_pages(self) -> str:
        if not self.page_bytes:
            return (
                f"KV pool: none, as the model keeps no keys and values; {self.n_full_sequences:g} requests of "
                f"{self.max_len_tokens:,} tokens fit at once"
            )
        return (
            f"KV pool: {self.n_pages:,} pages of {self.page_size_tokens} tokens "
            f"({self.page_bytes / 1024:.0f} KiB each, {self.n_pages * self.page_bytes / _MIB:,.0f} MiB), "
            f"{self.n_tokens:,} tokens; "
            f"{self.n_full_sequences:.2f} requests of {self.max_len_tokens:,} tokens fit at once"
        )

    def _describe_drafting(self) -> str:
        return f"; drafting: up to {self.drafting_bytes / _MIB:,.0f} MiB" if self.drafting_bytes >= _MIB else ""

    def _describe_state(self) -> str:
        if not self.state_bytes:
            return ""
        text = (
            f"; recurrent state: {self.state_bytes / _MIB:,.2f} MiB a sequence, "
            f"{self.max_num_seqs * self.state_bytes / _MIB:,.0f} MiB for {self.max_num_seqs}"
        )
        if not self.n_snapshots:
            return f"{text}; prefix caching is off, as no states are kept"
        return (
            f"{text}; {self.n_snapshots:,} snapshots of it ({self.n_snapshots * self.state_bytes / _MIB:,.0f} MiB), "
            f"in prompts every {self.snapshot_spacing_tokens:,} tokens"
        )


def pages_for(n_tokens: int, page_size_tokens: int) -> int:
    """Return how many pages hold `n_tokens`."""
    return -(-n_tokens // page_size_tokens)


def slots_for(state_bytes: int, wanted: int, available_bytes: int) -> int:
    """Return how many sequences may be computed together, when nobody says: their states take an eighth of memory."""
    return wanted if state_bytes == 0 else max(1, min(wanted, available_bytes // 8 // state_bytes))


def snapshot_spacing(state_bytes: int, kv_token_bytes: int, page_size_tokens: int) -> int:
    """Return how far apart a prompt's states are kept: where its pages take as many bytes as one state.

    So snapshots at most double what a prompt takes. Not below what a step computes. A multiple of the page.
    """
    tokens = -(-state_bytes // kv_token_bytes) if kv_token_bytes else _SPACING_WITHOUT_KV_TOKENS
    return pages_for(max(tokens, _SPACING_MIN_TOKENS), page_size_tokens) * page_size_tokens


def divide(
    budget_bytes: int, page_bytes: int, state_bytes: int, *, pages: tuple[int, int], spacing_pages: int, n_wanted: int
) -> tuple[int, int]:
    """Divide a budget between pages and snapshots; see the module's docstring.

    `pages` are those that come first and those that there is a use for, `n_wanted` the snapshots of which that is true.
    Returns: pages and snapshots, which the budget holds.
    """
    n_first, n_pages_wanted = pages
    rest_bytes = max(budget_bytes - n_first * page_bytes, 0)
    n_share = rest_bytes // (spacing_pages * page_bytes + state_bytes)
    n_snapshots = min(n_wanted, max(n_share, min(_N_SNAPSHOTS_FIRST, rest_bytes // state_bytes)))
    n_pages = n_pages_wanted
    if page_bytes:
        n_pages = min(n_pages_wanted, (budget_bytes - n_snapshots * state_bytes) // page_bytes)
    return n_pages, min(n_wanted, max(budget_bytes - n_pages * page_bytes, 0) // state_bytes)


class Beside(msgspec.Struct, frozen=True):
    """What takes memory beside the pool that is planned.

    `offloading_bytes` of pages come on top, for what ended requests leave behind: on a CPU the memory below the pool is
    the pool. `drafting_bytes` are what drafting takes at most. Where a person asked for it (`is_drafting_asked`) they
    are not free for anything else. Where nobody did, much of them may never be touched: a pool whose size nobody gave
    is smaller by its share, but neither is one sequence made shorter nor a size that was given refused.
    """

    offloading_bytes: int = 0
    drafting_bytes: int = 0
    is_drafting_asked: bool = False

    def leaves(self, available_bytes: int) -> tuple[int, int]:
        """Return what is free, and what of it counts when the pool's size is chosen.

        Raises: OutOfPages: it does not hold the drafting that was asked for.
        """
        left_bytes = available_bytes - self.drafting_bytes
        if not self.is_drafting_asked:
            return available_bytes, max(left_bytes, 0)
        if left_bytes < 0:
            raise OutOfPages(
                f"drafting: takes up to {self.drafting_bytes / _MIB:,.0f} MiB beside the pool; "
                f"{available_bytes / _MIB:,.0f} MiB of memory are free; {_LESS_DRAFTING}"
            )
        return left_bytes, left_bytes

    def __str__(self) -> str:
        if not self.is_drafting_asked or not self.drafting_bytes:
            return ""
        return f" beside {self.drafting_bytes / _MIB:,.0f} MiB for drafting ({_LESS_DRAFTING})"


_NOTHING = Beside()


def _check_settings(page_size_tokens: int, max_num_seqs: int, max_model_len: int | None, model_len_tokens: int) -> None:
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
    keeps_states: bool = False,
    beside: Beside = _NOTHING,
) -> Capacity:
    """Choose the pool's size and the longest sequence.

    `max_model_len` None means the model's own length, or the largest that fits if memory is short; -1 asks for the
    largest that fits. `pool_bytes` None means enough for `max_num_seqs` full sequences, but at most a quarter of
    `available_bytes`. Each of `max_num_seqs` slots takes `state_bytes` of memory first. With `keeps_states`, snapshots
    share the pool's bytes; what takes memory `beside` does not. A model that keeps no keys and values has no pool, and
    no length is too long for one; where its states are kept, pages are counted, by whose keys they are found.

    Raises:
        ConfigError: a setting is out of its range.
        OutOfPages: the pool cannot hold one sequence of the length that was asked for, or is larger than memory.
    """
    _check_settings(page_size_tokens, max_num_seqs, max_model_len, model_len_tokens)
    available_bytes -= state_bytes * max_num_seqs
    if available_bytes < 0:
        raise OutOfPages(
            f"recurrent state: {max_num_seqs} sequences of {state_bytes / _MIB:,.2f} MiB each; "
            f"{(available_bytes + state_bytes * max_num_seqs) / _MIB:,.0f} MiB of memory are free; lower max_num_seqs"
        )
    available_bytes, pool_free_bytes = beside.leaves(available_bytes)
    page_bytes = kv_token_bytes * page_size_tokens
    len_tokens = model_len_tokens if max_model_len in (None, -1) else max_model_len
    assert len_tokens is not None
    one = pages_for(len_tokens, page_size_tokens)
    wanted = max_num_seqs * one
    spacing = snapshot_spacing(state_bytes, kv_token_bytes, page_size_tokens) if state_bytes and keeps_states else 0
    if page_bytes == 0:
        wanted = min(wanted, max(one, _N_COUNTED_PAGES_MAX)) if spacing else 0
    n_wanted = max_num_seqs * (len_tokens // spacing + _N_SNAPSHOTS_BESIDE) if spacing else 0
    needed_bytes = one * page_bytes + min(n_wanted, _N_SNAPSHOTS_FIRST) * state_bytes
    if pool_bytes is not None:
        budget_bytes, limit_name = pool_bytes, "kv_cache_memory_bytes"
    else:
        half_bytes = int(available_bytes * _POOL_FRAC_MAX)
        budget_bytes = max(int(pool_free_bytes * _POOL_FRAC), min(needed_bytes, half_bytes))
        limit_name = "half of the free memory"
    n_first, n_snapshots = one, 0
    if spacing:
        if page_bytes and max_model_len in (None, -1) and needed_bytes > budget_bytes:
            n_kept = min(_N_SNAPSHOTS_FIRST, n_wanted, budget_bytes // _SNAPSHOTS_FRAC // state_bytes)
            n_first = min(one, (budget_bytes - n_kept * state_bytes) // page_bytes)
        n_pages, n_snapshots = divide(
            budget_bytes,
            page_bytes,
            state_bytes,
            pages=(n_first, wanted),
            spacing_pages=spacing // page_size_tokens,
            n_wanted=n_wanted,
        )
    else:
        n_pages = min(wanted, budget_bytes // page_bytes) if page_bytes else wanted
    used_bytes = n_pages * page_bytes + n_snapshots * state_bytes
    if used_bytes > available_bytes:
        raise OutOfPages(
            f"kv pool: kv_cache_memory_bytes={pool_bytes} makes {n_pages} pages of {page_bytes / _MIB:.2f} MiB"
            + (f" and {n_snapshots} snapshots of {state_bytes / _MIB:.2f} MiB" if n_snapshots else "")
            + f"; {available_bytes / _MIB:,.0f} MiB of memory are free{beside}; lower it, max_model_len or max_num_seqs"
        )
    if wanted and n_pages * page_size_tokens < len_tokens:
        if max_model_len not in (None, -1) or n_pages < 1:
            shorter = f"lower max_model_len to {n_pages * page_size_tokens} or " if n_pages else ""
            raise OutOfPages(
                f"kv pool: {n_pages} pages of {page_bytes / _MIB:.2f} MiB fit in {limit_name}; "
                f"one sequence of max_model_len={len_tokens} needs {one}; "
                f"{shorter}give more memory"
            )
        len_tokens = n_pages * page_size_tokens
    n_pages += beside.offloading_bytes // page_bytes if page_bytes else 0
    if beside.offloading_bytes and n_pages * page_bytes + n_snapshots * state_bytes > available_bytes:
        raise OutOfPages(
            f"kv pool: kv_offloading_size of {beside.offloading_bytes / _MIB:,.0f} MiB makes {n_pages} pages of "
            f"{page_bytes / _MIB:.2f} MiB; {available_bytes / _MIB:,.0f} MiB of memory are free{beside}; lower it"
        )
    return Capacity(
        page_size_tokens,
        page_bytes,
        n_pages,
        len_tokens,
        max_num_seqs,
        state_bytes,
        n_snapshots,
        spacing,
        beside.drafting_bytes,
    )
