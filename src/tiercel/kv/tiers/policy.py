"""What is worth keeping, storing and loading: pure functions of counts and measured rates. Knows no tier."""

from dataclasses import dataclass
from math import exp2


@dataclass(frozen=True, slots=True)
class Rates:
    """What was measured. `latency_s` is what a load takes before its first byte, queues included."""

    prefill_tok_s: float
    load_bytes_s: float
    latency_s: float


def keep_score(n_uses: int, age: int, depth: int, half_life: int) -> float:
    """Say how much an object is worth keeping; the lowest goes first.

    `age` and `half_life` count uses of anything since the object's last. An object is used whenever one deeper in its
    chain is, so a chain's head never scores below its tail.

    Source: vllm-marconi-offload's measurement that depth must lower the score: a chain without its head is useless.
    """
    return (n_uses + 1) * exp2(-min(age / half_life, 1000.0)) / (depth + 1)


def load_s(n_bytes: int, rates: Rates) -> float:
    """Estimate the time a load takes."""
    return rates.latency_s + n_bytes / rates.load_bytes_s if rates.load_bytes_s > 0 else float("inf")


def compute_s(n_tokens: int, rates: Rates) -> float:
    """Estimate the time that computing the tokens takes."""
    return n_tokens / rates.prefill_tok_s if rates.prefill_tok_s > 0 else float("inf")


def should_load(n_tokens: int, n_bytes: int, rates: Rates) -> bool:
    """Say whether loading a hit of `n_tokens` is faster than computing it. A tie is computed: it can't fail.

    Decided for the whole hit, never for a part of it: what is left out at the end is what costs most to compute.
    """
    return n_tokens > 0 and load_s(n_bytes, rates) < compute_s(n_tokens, rates)


def should_store(
    n_seen: int,
    n_tokens_before: int,
    n_tokens: int,
    n_bytes: int,
    rates: Rates,
    *,
    worth_s: float,
    n_sights: int = 2,
) -> bool:
    """Say whether an object is worth storing: its key was seen `n_sights` times, or having it saves over `worth_s`.

    `n_seen` counts this sight. `n_tokens_before` is how long its chain is before it: what is saved is the time to
    compute the whole chain less the time to load it, as nobody loads an object without those before it. What a load
    could never win is not stored at all.
    """
    n_chain_tokens = n_tokens_before + n_tokens
    n_chain_bytes = n_bytes * n_chain_tokens // n_tokens if n_tokens > 0 else n_bytes
    if not should_load(n_chain_tokens, n_chain_bytes, rates):
        return False
    saved_s = compute_s(n_chain_tokens, rates) - load_s(n_chain_bytes, rates)
    return n_seen >= n_sights or saved_s > worth_s
