"""`bench startup`: a whole process from its start to the first byte of an answer, and the most memory it ever had.

Ours is `tiercel run` with one token to make; a peer is its script with `--once`, which loads, answers one token, and
ends. They take turns; the answers' first tokens are compared before times are.

Measures of a round: `first_byte_s`, from just before the process is made to its first byte on standard output;
`exit_s`, to its end; `peak_rss_bytes`, the kernel's high-water mark for it (`wait4`). That mark begins at what the
parent had when it made the process, so this module imports nothing heavy; a row says what the parent had.
"""

import contextlib
import os
import resource
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tiercel.base.config import engine_options
from tiercel.base.errors import RequestFailed
from tiercel.base.machine import usable_cpus
from tiercel.bench import machine
from tiercel.bench.offline import Field, Told, make_row
from tiercel.bench.ours import option_words
from tiercel.bench.peers import PeerFailed, about, environment, peer_command
from tiercel.bench.rows import OURS, Contestant, Row, spread

PROMPT = "The capital of France is"


@dataclass(frozen=True, slots=True)
class Command:
    """A process to be started again and again: its words and environment (None: ours)."""

    name: str
    words: tuple[str, ...]
    environment: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """One start that went well."""

    first_byte_s: float
    exit_s: float
    peak_rss_bytes: int
    text: str


@dataclass(slots=True)
class _Tally:
    starts: dict[str, list[Started]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


def bench(who: Field, told: Told, *, on_note: Callable[[str], None] = lambda _: None) -> Row:
    """Measure how soon and how large each contestant starts.

    Raises: RequestFailed: ours did not start or gave no answer.
    """
    from tiercel.hub.resolve import resolve

    found = resolve(who.model)
    n_threads = int(who.options.get("threads") or usable_cpus())
    commands, skipped = [our_command(found.path, who.options)], {}
    versions = {OURS: machine.versions(("numpy", "tokenizers"))}
    for name, python in who.peers.items():
        assert who.peers_folder is not None
        words = peer_command(name, python, who.peers_folder)
        try:
            versions[name] = about(name, words)
        except PeerFailed as failure:
            skipped[name] = str(failure)
            on_note(f"{name} is left out: {failure}")
            continue
        model = who.peer_models.get(name, found.path)
        once = (*words, "--once", str(model), PROMPT, str(n_threads))
        commands.append(Command(name, once, environment(n_threads)))
    state = machine.describe()
    tally = take_turns(commands, who, on_note)
    config = {
        "work": {
            "prompt": PROMPT,
            "max_tokens": 1,
            "n_warmups": who.n_warmups,
            "n_rounds": who.n_rounds,
            "parent_peak_rss_bytes": _own_peak_bytes(),
        },
        "engine": {**asdict(engine_options(**who.options)), "model": found.display_name, "threads": n_threads},
    }
    contestants = {name: _contestant(starts, versions[name]) for name, starts in tally.starts.items()}
    return make_row(told, config, contestants, skipped | tally.skipped, state)


def our_command(model: Path, options: Mapping[str, Any]) -> Command:
    """Return the command that answers one token with ours, greedily."""
    words = [sys.executable, "-m", "tiercel", "run", "--raw", "--max-tokens", "1", "--temperature", "0"]
    words += ["-m", str(model), *option_words(options)]
    return Command(OURS, (*words, PROMPT))


def take_turns(commands: Sequence[Command], who: Field, on_note: Callable[[str], None]) -> _Tally:
    """Start each command once a round; peers that fail, or whose answer is another, are left out."""
    tally = _Tally()
    for round_idx in range(who.n_warmups + who.n_rounds):
        for command in commands if round_idx % 2 == 0 else commands[::-1]:
            if command.name in tally.skipped:
                continue
            try:
                started = start(command, deadline_s=who.deadline_s)
            except PeerFailed as failure:
                if command.name == OURS:
                    raise RequestFailed(f"bench startup: {failure}") from None
                tally.skipped[command.name] = str(failure)
                on_note(f"{command.name} is left out: {failure}")
                continue
            if round_idx >= who.n_warmups:
                tally.starts.setdefault(command.name, []).append(started)
        on_note(f"round {round_idx - who.n_warmups + 1} of {who.n_rounds}")
    answers = {name: {one.text.strip() for one in starts} for name, starts in tally.starts.items()}
    if len(answers[OURS]) != 1:
        raise RequestFailed(
            f"bench startup: ours: {len(answers[OURS])} answers to one prompt; need the same; report this"
        )
    for name in list(tally.starts):
        # A peer's one token may be longer or shorter text than ours only if its tokenizer is another.
        if name != OURS and answers[name] != answers[OURS]:
            tally.skipped[name] = (
                f"peer {name}: wrong: its first token differs from ours; see that both have the same model"
            )
        if name in tally.skipped:
            del tally.starts[name]
    return tally


def _may_compile(environment: Mapping[str, str]) -> dict[str, str]:
    """Return it without what keeps Python from keeping modules compiled: an installed package's are, and a start that
    compiles them each time takes half as long again.
    """
    return {name: value for name, value in environment.items() if name != "PYTHONDONTWRITEBYTECODE"}


def start(command: Command, *, deadline_s: float) -> Started:
    """Run a command to its end, and note when its first byte came and how much memory it took at most.

    Raises: PeerFailed: it cannot be started, ends with an error, says nothing, or takes longer than `deadline_s`.
    """
    with tempfile.TemporaryFile() as said:
        start_s = time.perf_counter()
        try:
            process = subprocess.Popen(
                command.words,
                env=_may_compile(os.environ if command.environment is None else command.environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=said,
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            raise PeerFailed(command.name, "missing", f"it does not start: {error.strerror}") from None
        try:
            text, first_s = _read_out(command.name, process, start_s, deadline_s)
            # wait4 gives the memory of this one child, which Popen.wait does not; Popen is told the code below.
            _, status, usage = os.wait4(process.pid, 0)
            exit_s = time.perf_counter() - start_s
            process.returncode = os.waitstatus_to_exitcode(status)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        if process.returncode != 0 or first_s is None:
            said.seek(0)
            words = said.read().decode(errors="replace").strip().split("\n")[-1][-300:]
            kind = "died" if process.returncode else "wrong"
            raise PeerFailed(command.name, kind, f"exit code {process.returncode}, {len(text)} bytes; it said: {words}")
        # Kilobytes on Linux, bytes on macOS.
        unit = 1 if sys.platform == "darwin" else 1024
        return Started(first_s, exit_s, usage.ru_maxrss * unit, text.decode(errors="replace"))


def _read_out(
    name: str, process: "subprocess.Popen[bytes]", start_s: float, deadline_s: float
) -> tuple[bytes, float | None]:
    """Read a process's output to its end; return it, and when its first byte came."""
    assert process.stdout is not None
    text, first_s = b"", None
    with selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ)
        while True:
            left_s = start_s + deadline_s - time.perf_counter()
            if left_s <= 0 or not ready.select(left_s):
                raise PeerFailed(name, "stalled", f"not ended in {deadline_s:g} s")
            more = process.stdout.read(1 << 16)
            if not more:
                return text, first_s
            if first_s is None:
                first_s = time.perf_counter() - start_s
            text += more
            if len(text) > 1 << 20:
                raise PeerFailed(name, "garbage", "more than 1 MiB for one token")


def _own_peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _contestant(starts: Sequence[Started], versions: Mapping[str, str]) -> Contestant:
    return Contestant(
        versions=versions,
        config={},
        measures={
            measure: spread([getattr(one, measure) for one in starts])
            for measure in ("first_byte_s", "exit_s", "peak_rss_bytes")
        },
        outputs={"text": starts[0].text.strip()},
    )
