"""What `latency` and `throughput` share: open ours and the peers, let them take turns, and make the row."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tiercel.base.errors import ConfigError
from tiercel.bench import machine, ours
from tiercel.bench.cases import judge
from tiercel.bench.contest import Competitor, Request, Run, Turns, take_turns
from tiercel.bench.peers import Peer, PeerFailed, peer_command
from tiercel.bench.prompts import CHECK_TOKENS, check_requests
from tiercel.bench.rows import OURS, Contestant, Row, ratios, spread

Groups = Sequence[Sequence[Request]]
Measure = Callable[[Groups, Sequence[Run]], Mapping[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """Who takes part and how often. `peers`: name -> its interpreter; `peer_models`: name -> what it loads, if that
    is not our model's file. `n_agree_tokens`: first greedy tokens that a peer must share with ours, of all check texts
    but one.
    """

    model: str | None
    options: Mapping[str, Any]
    n_warmups: int
    n_rounds: int
    seed: int = 0
    peers: Mapping[str, Path] = field(default_factory=dict)
    peer_models: Mapping[str, Path] = field(default_factory=dict)
    peers_folder: Path | None = None
    n_agree_tokens: int = 4
    deadline_s: float = 600.0

    def __post_init__(self) -> None:
        if self.n_rounds < 1 or self.n_warmups < 0:
            raise ConfigError(
                f"bench: got {self.n_rounds} iterations after {self.n_warmups} to warm up; need 1 or more, 0 or more"
            )
        if not 0 <= self.n_agree_tokens <= CHECK_TOKENS:
            raise ConfigError(f"bench: agree-tokens: got {self.n_agree_tokens}; need 0 to {CHECK_TOKENS}")
        for name in self.peer_models:
            if name not in self.peers:
                raise ConfigError(f"bench: peer-model: got {name!r}, which takes no part; add --peer {name}=PYTHON")
        if self.peers and self.peers_folder is None:
            raise ConfigError(
                "bench: peers: their scripts are in a checkout of this project, and there is none here; name their "
                "folder with --peers-dir"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a row says beside its measurement."""

    case: str
    bench: str
    command: str
    kind: str = "info"
    reach: Sequence[Mapping[str, Any]] = ()


def run(
    who: Field,
    told: Told,
    work: Mapping[str, Any],
    make_groups: Callable[[int], Groups],
    measure: Measure,
    *,
    on_note: Callable[[str], None] = lambda _: None,
) -> Row:
    """Measure one piece of work with everybody, and return the row.

    `make_groups` is told the vocabulary's size; a round is every group once, one after the other. Peers that cannot
    take part are in the row's `skipped`.

    Raises: TiercelError: ours cannot be loaded or fails.
    """
    with contextlib.ExitStack() as open_:
        engine = ours.open_engine(who.model, who.options)
        open_.callback(engine.close)
        if work.get("step_overhead"):
            engine.time_kernels()
        groups = make_groups(engine.vocab_size)
        checks = check_requests(engine.encode)
        skipped: dict[str, str] = {}
        competitors: list[Competitor] = [engine]
        competitors += open_peers(who, engine, groups, checks, open_, skipped)
        for name, why in skipped.items():
            on_note(f"{name} is left out: {why}")
        state = machine.describe()
        turns = take_turns(
            competitors,
            groups,
            checks=checks,
            n_agree_tokens=who.n_agree_tokens,
            n_warmups=who.n_warmups,
            n_rounds=who.n_rounds,
            on_round=lambda i: on_note(f"round {i + 1} of {who.n_rounds}" if i >= 0 else "warming up"),
        )
        for name, why in turns.skipped.items():
            on_note(f"{name} is left out: {why}")
        contestants = {
            one.name: _contestant(one, groups, turns, measure) for one in competitors if one.name in turns.runs
        }
        config = {"work": dict(work) | _field_config(who), "engine": dict(engine.config)}
    return make_row(told, config, contestants, skipped | turns.skipped, state)


def make_row(
    told: Told,
    config: Mapping[str, Any],
    contestants: Mapping[str, Contestant],
    skipped: Mapping[str, str],
    state: Mapping[str, Any],
) -> Row:
    """Put together what is known of one measurement."""
    commit, is_dirty = machine.commit(machine.checkout())
    against = ratios(contestants)
    return Row(
        case=told.case,
        bench=told.bench,
        command=told.command,
        kind=told.kind,
        config=config,
        machine=state,
        commit=commit,
        is_dirty=is_dirty,
        contestants=contestants,
        ratios=against,
        reach=judge(told.reach, contestants, against),
        skipped={name: machine.without_paths(why) for name, why in skipped.items()},
    )


def open_peers(
    who: Field,
    engine: ours.LocalEngine,
    groups: Groups,
    checks: Sequence[Request],
    open_: contextlib.ExitStack,
    skipped: dict[str, str],
) -> list[Peer]:
    """Start the peers and let them load; those that cannot go to `skipped`."""
    longest = max(len(one.token_ids) + one.max_tokens for group in [*groups, checks] for one in group)
    n_most = max(map(len, groups))
    ready = []
    for name, python in who.peers.items():
        assert who.peers_folder is not None
        try:
            command = peer_command(name, python, who.peers_folder)
            peer = open_.enter_context(Peer(name, command, n_threads=engine.n_threads, deadline_s=who.deadline_s))
            model = who.peer_models.get(name, engine.model_path)
            peer.load(model, max_len_tokens=longest, max_num_seqs=n_most)
        except PeerFailed as failure:
            skipped[name] = str(failure)
            continue
        ready.append(peer)
    return ready


def overhead(run: Run) -> dict[str, float]:
    """Return the part of a run in which no kernel ran, where the kernels' time is known."""
    return {} if run.kernel_s is None else {"step_overhead_frac": 1 - run.kernel_s / run.elapsed_s}


def _contestant(one: Competitor, groups: Groups, turns: Turns, measure: Measure) -> Contestant:
    rounds = turns.runs[one.name]
    measured = [measure(groups, runs) for runs in rounds]
    # A measure that one run lacks (a first token's time, say) is not one of all of them.
    shared = [name for name in measured[0] if all(name in of_run for of_run in measured)]
    digest = hashlib.sha256(json.dumps([run.token_ids for run in rounds[0]]).encode()).hexdigest()[:16]
    outputs: dict[str, Any] = {"digest": digest, "n_requests": sum(map(len, groups))}
    if one.name != OURS:
        outputs["check_tokens_agreed"] = turns.agreement[one.name]
        outputs["check_tokens_of"] = CHECK_TOKENS
        outputs["timed_tokens_agreed"] = turns.timed_agreement[one.name]
    return Contestant(
        versions=one.versions,
        # Ours is the row's.
        config={} if one.name == OURS else one.config,
        measures={name: spread([of_run[name] for of_run in measured]) for name in shared},
        outputs=outputs,
    )


def _field_config(who: Field) -> dict[str, Any]:
    told = asdict(who)
    return {name: told[name] for name in ("n_warmups", "n_rounds", "seed", "n_agree_tokens")}
