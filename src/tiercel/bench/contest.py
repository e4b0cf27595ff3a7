"""Who competes, and how: contestants complete the same requests in turn, in one run, after their outputs agreed.

A fast wrong answer has no row: before anything is timed, every contestant continues the same short texts greedily, and
a peer must agree with ours on the first tokens, of all texts but
one (a close call may turn on rounding); while timed, each must give as many tokens as asked, and ours the same
tokens each time. A peer that fails is left out with its reason and the others go on; if ours fails, all ends.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tiercel.base.errors import RequestFailed
from tiercel.bench.rows import OURS


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to be continued greedily by exactly `max_tokens` tokens, whatever they are.

    `schema`: JSON of what their text must begin; only ours is asked for it. `may_end`: the answer ends where the model
    ends it, if that comes first; only ours is told.
    """

    token_ids: tuple[int, ...]
    max_tokens: int
    schema: str | None = None
    may_end: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """One contestant's turn: the tokens of each request, and how long all took.

    `first_token_s`, `decode_s` (each request's time from its first token to its last), `kernel_s` (the kernels' time in
    all of it): None if not known.
    """

    token_ids: tuple[tuple[int, ...], ...]
    elapsed_s: float
    first_token_s: tuple[float, ...] | None = None
    kernel_s: float | None = None
    decode_s: tuple[float, ...] | None = None


class Competitor(Protocol):
    """An engine with the model loaded."""

    name: str
    versions: Mapping[str, str]
    config: Mapping[str, Any]

    def generate(self, requests: Sequence[Request]) -> Run:
        """Complete all of `requests`, as fast as it can."""
        ...


@dataclass(slots=True)
class Turns:
    """What a contest gave.

    `runs`: contestant -> for each round, a run of each group. `agreement`: peer -> for each check text, how many first
    tokens are ours. `timed_agreement`: contestant -> the same for each timed request. `skipped`: peer -> why
    it has no runs.
    """

    runs: dict[str, list[tuple[Run, ...]]] = field(default_factory=dict)
    agreement: dict[str, list[int]] = field(default_factory=dict)
    timed_agreement: dict[str, list[int]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many first tokens are the same."""
    n = 0
    for one, other in zip(a, b, strict=False):
        if one != other:
            break
        n += 1
    return n


def take_turns(
    competitors: Sequence[Competitor],
    groups: Sequence[Sequence[Request]],
    *,
    checks: Sequence[Request],
    n_agree_tokens: int,
    n_warmups: int,
    n_rounds: int,
    on_round: Callable[[int], None] = lambda _: None,
) -> Turns:
    """Check the outputs of all, then let each complete every group of requests, one after the other, once a round.

    The first competitor is ours. In every other round the order is reversed, so that nobody always follows the same
    one.

    Raises: RequestFailed: ours failed, or its outputs changed from one round to the next.
    """
    turns = Turns()
    assert competitors[0].name == OURS
    assert checks, "contest: outputs are compared before times are"
    # As many at once as are timed at once, so that what is checked is what is timed.
    size = max(map(len, groups))
    check_groups = [checks[i : i + size] for i in range(0, len(checks), size)]
    inside = _check_outputs(competitors, check_groups, n_agree_tokens, turns)
    for round_idx in range(n_warmups + n_rounds):
        order = inside if round_idx % 2 == 0 else inside[::-1]
        for one in order:
            runs = _turn(one, groups, turns)
            if runs is not None and round_idx >= n_warmups:
                turns.runs.setdefault(one.name, []).append(runs)
        inside = [one for one in inside if one.name not in turns.skipped]
        on_round(round_idx - n_warmups)
    for name in turns.skipped:
        turns.runs.pop(name, None)
    first = _outputs(turns.runs[OURS][0])
    if any(_outputs(runs) != first for runs in turns.runs[OURS]):
        raise RequestFailed("bench: our outputs changed between rounds of the same requests; report this")
    for name, rounds in turns.runs.items():
        theirs = _outputs(rounds[0])
        turns.timed_agreement[name] = [common_prefix(a, b) for a, b in zip(theirs, first, strict=True)]
    return turns


def _outputs(runs: Sequence[Run]) -> list[tuple[int, ...]]:
    return [ids for run in runs for ids in run.token_ids]


def _check_outputs(
    competitors: Sequence[Competitor], checks: Sequence[Sequence[Request]], n_agree_tokens: int, turns: Turns
) -> list[Competitor]:
    """Return those whose outputs may be timed."""
    ours = _turn(competitors[0], checks, turns)
    assert ours is not None
    inside = [competitors[0]]
    for peer in competitors[1:]:
        theirs = _turn(peer, checks, turns)
        if theirs is None:
            continue
        agreed = [common_prefix(a, b) for a, b in zip(_outputs(ours), _outputs(theirs), strict=True)]
        turns.agreement[peer.name] = agreed
        if sorted(agreed)[:2][-1] < n_agree_tokens:
            turns.skipped[peer.name] = (
                f"wrong: of the check texts' greedy tokens, {agreed} are the same as ours; need {n_agree_tokens} of "
                "all texts but one; see that both have the same model"
            )
        else:
            inside.append(peer)
    return inside


def _turn(one: Competitor, groups: Sequence[Sequence[Request]], turns: Turns) -> tuple[Run, ...] | None:
    """Let one complete the groups; a peer that cannot is left out, and None is returned."""
    runs = []
    try:
        for requests in groups:
            run = one.generate(requests)
            fault = fault_of(run, requests)
            if fault:
                raise RequestFailed(f"{one.name}: wrong: {fault}")
            runs.append(run)
    except RequestFailed as error:
        if one.name == OURS:
            raise
        turns.skipped[one.name] = str(error)
        return None
    return tuple(runs)


def fault_of(run: Run, requests: Sequence[Request]) -> str | None:
    """Return what cannot be right about a run's outputs, or None."""
    if len(run.token_ids) != len(requests):
        return f"{len(run.token_ids)} outputs for {len(requests)} requests"
    for i, (ids, request) in enumerate(zip(run.token_ids, requests, strict=True)):
        if len(ids) != request.max_tokens and not (request.may_end and 2 <= len(ids) < request.max_tokens):
            return f"{len(ids)} tokens for request {i}, which asks for {request.max_tokens}"
    if run.first_token_s is not None and len(run.first_token_s) != len(requests):
        return f"{len(run.first_token_s)} first tokens' times for {len(requests)} requests"
    if run.elapsed_s <= 0:
        return f"{run.elapsed_s} s for the whole"
    return None
