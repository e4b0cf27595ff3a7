"""What is worth keeping, storing and loading: pure functions of counts and measured rates. Knows no tier."""

from dataclasses import dataclass
from math import exp2

# A load is waited for as long as computing would take, and so often more: an estimate may be wrong, a stuck disk is
# not to cost a request more than it could have saved.
_PATIENCE = 2.0
_PATIENCE_LEAST = 0.2  # of the longest wait that is allowed: a disk may have to wake up
# What storing at first sight may cost: so much of the time that steps take, and of what it has saved. Without any reuse
# it stays below 1 %; where prompts come back, one that is found pays for storing several that are not.
_SHARE_OF_STEPS = 0.005
_SHARE_OF_SAVED = 0.5
_CREDIT_BEGIN_S = 0.1
CREDIT_MAX_S = 2.0  # so that what a time of reuse has earned is not all spent when it is over
_DEPTH_SCALE = 1024


@dataclass(frozen=True, slots=True)
class Rates:
    """What was measured. `latency_s` is what a load takes before its first byte, queues included."""

    prefill_tok_s: float
    load_bytes_s: float
    latency_s: float


def keep_score(n_uses: int, age: int, depth: int, half_life: int) -> float:
    """Say how much an object is worth keeping; the lowest goes first.

    `age` and `half_life` count uses of anything since the object's last. An object is used whenever one deeper in its
    chain is, so a chain's head never scores below its tail. Depth decides little beyond that: a tail that is used often
    is worth more than a head that is not.

    Source: vllm-marconi-offload's measurement that depth must lower the score: a chain without its head is useless;
    that dividing by it loses to LRU: docs/log.md.
    """
    return (n_uses + 1) * exp2(-min(age / half_life, 1000.0)) / (1 + depth / _DEPTH_SCALE)


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


def next_credit_s(credit_s: float, *, stepped_s: float = 0.0, saved_s: float = 0.0, spent_s: float = 0.0) -> float:
    """Say what storing at first sight may cost from now on.

    `credit_s` is what it might cost before, `stepped_s` how long steps took since, `saved_s` what loading saved of
    computing (less than 0: what it lost), `spent_s` what storing cost. Never above `CREDIT_MAX_S`, never below 0: who
    spends more than there is owes nothing, so it is asked first.
    """
    credit_s += _SHARE_OF_STEPS * max(stepped_s, 0.0) + _SHARE_OF_SAVED * saved_s - max(spent_s, 0.0)
    return min(max(credit_s, 0.0), CREDIT_MAX_S)


def load_deadline_s(n_tokens: int, rates: Rates, most_s: float) -> float:
    """Say for how long a load of `n_tokens` is worth waiting for, at most `most_s`."""
    return min(most_s, max(_PATIENCE_LEAST * most_s, _PATIENCE * compute_s(n_tokens, rates)))


class StoreBudget:
    """The time that storing at first sight may take: `next_credit_s`, kept for one tier. Times are seconds."""

    def __init__(self) -> None:
        self.credit_s = _CREDIT_BEGIN_S

    def stepped(self, took_s: float) -> None:
        """Note that a step took so long."""
        self.credit_s = next_credit_s(self.credit_s, stepped_s=took_s)

    def saved(self, saved_s: float) -> None:
        """Note that a load took so much less than computing."""
        self.credit_s = next_credit_s(self.credit_s, saved_s=saved_s)

    def spend(self, cost_s: float) -> bool:
        """Take so much, or nothing and say False if there is not enough."""
        if cost_s > self.credit_s:
            return False
        self.credit_s = next_credit_s(self.credit_s, spent_s=cost_s)
        return True


class RateMeter:
    """Amount a second, measured over what was lately seen; without news it returns to what it began with.

    The prior counts like one observation of `prior_amount` in `prior_s`; observations fade by half in `half_life_s`.
    So a disk that was slow once is tried again, and one that failed does not stay out of use for ever.
    """

    def __init__(self, prior_amount: float, prior_s: float, half_life_s: float) -> None:
        self._prior = prior_amount, prior_s
        self._half_life_s = half_life_s
        self._amount = self._time_s = 0.0
        self._at_s: float | None = None

    def add(self, amount: float, took_s: float, now_s: float) -> None:
        """Note that `amount` took `took_s`; nothing in some time is an observation too."""
        fade = self._fade(now_s)
        self._amount = self._amount * fade + amount
        self._time_s = self._time_s * fade + max(took_s, 0.0)
        self._at_s = now_s

    def rate(self, now_s: float) -> float:
        """Return what to expect, above 0."""
        fade = self._fade(now_s)
        return (self._prior[0] + fade * self._amount) / (self._prior[1] + fade * self._time_s)

    def _fade(self, now_s: float) -> float:
        return 1.0 if self._at_s is None else exp2(-max(now_s - self._at_s, 0.0) / self._half_life_s)
