"""A case: a file of `benchmarks/cases/` that says what is measured. Flags of the command line win over it.

bench = "latency"              # the subcommand
kind = "gate"                  # or "info"
[work]                         # flags, by keyword name
input_len = 16
[[reach]]                      # what is to be reached; of medians
measure = "decode_tok_s"
against = "llama_cpp"          # the ratio to this peer; without it, the measure itself
at_least = 1.0                 # or at_most
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiercel.base.errors import ConfigError
from tiercel.bench.rows import KINDS, OURS, Contestant

_KEYS = ("bench", "kind", "work", "reach")
_REACH_KEYS = ("measure", "against", "at_least", "at_most")


@dataclass(frozen=True, slots=True)
class Case:
    """What one file says."""

    name: str
    bench: str
    kind: str = "info"
    work: Mapping[str, Any] = field(default_factory=dict)
    reach: Sequence[Mapping[str, Any]] = ()


def find_case(name: str, folder: Path | None) -> Path:
    """Return the file of a case: `name` itself, or `name`.toml in the checkout's `benchmarks/cases`.

    Raises: ConfigError: there is none; the message names those there are.
    """
    if name.endswith(".toml") and Path(name).is_file():
        return Path(name)
    cases = None if folder is None else folder / "benchmarks/cases"
    if cases is not None and (cases / f"{name}.toml").is_file():
        return cases / f"{name}.toml"
    known = sorted(path.stem for path in cases.glob("*.toml")) if cases is not None else []
    raise ConfigError(f"case: got {name!r}; need a .toml file or one of: {', '.join(known) or 'none here'}")


def load_case(path: Path, bench: str) -> Case:
    """Read the case in `path`, which must be one for the subcommand `bench`.

    Raises: ConfigError: it cannot be read, has an unknown key, or is for another subcommand.
    """
    where = f"case {path.stem}"
    try:
        told = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{where}: {error}; need a TOML file") from None
    _refuse_unknown(where, told, _KEYS)
    if told.get("bench") != bench:
        raise ConfigError(
            f"{where}: bench: got {told.get('bench')!r}; this is `bench {bench}`; use the other or fix it"
        )
    if told.get("kind", "info") not in KINDS:
        raise ConfigError(f"{where}: kind: got {told['kind']!r}; need one of {', '.join(KINDS)}")
    if not isinstance(told.get("work", {}), dict) or not isinstance(told.get("reach", []), list):
        raise ConfigError(f"{where}: need a table [work] and tables [[reach]]")
    for target in told.get("reach", []):
        _refuse_unknown(f"{where}: reach", target, _REACH_KEYS)
        if "measure" not in target or ("at_least" in target) == ("at_most" in target):
            raise ConfigError(f"{where}: reach: got {target}; need measure and one of at_least, at_most")
    return Case(path.stem, bench, told.get("kind", "info"), told.get("work", {}), tuple(told.get("reach", ())))


def judge(
    targets: Sequence[Mapping[str, Any]],
    contestants: Mapping[str, Contestant],
    ratios: Mapping[str, Mapping[str, float]],
) -> list[dict[str, Any]]:
    """Put beside each target what was got: a number, or None when there was no such measurement, and whether it
    reaches.
    """
    judged = []
    for target in targets:
        measure, peer = target["measure"], target.get("against")
        if peer is None:
            found = contestants[OURS].measures.get(measure)
            got = None if found is None else found.median
        else:
            got = ratios.get(peer, {}).get(measure)
        reaches = got is not None and (got >= target["at_least"] if "at_least" in target else got <= target["at_most"])
        judged.append({**target, "got": got, "is_reached": reaches})
    return judged


def _refuse_unknown(where: str, told: Mapping[str, Any], known: Sequence[str]) -> None:
    for key in told:
        if key not in known:
            raise ConfigError(f"{where}: got the key {key!r}; known are {', '.join(known)}")
