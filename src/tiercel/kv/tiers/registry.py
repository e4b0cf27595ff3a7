"""From what a person wrote under `kv_tiers` to tiers: which types there are, what each takes. Knows no engine.

    kv_tiers:
      - {type: disk, path: ~/.cache/tiercel/kv, capacity: 20GiB}
      - {type: ValkeyTier, module_path: tiercel_tier_valkey, url: redis://127.0.0.1:6379, capacity: 4GiB}

`read_tiers(entries)` gives one `TierSpec` an entry, in order, and refuses what it does not know by name; nothing is
made yet, but a plug-in's module is imported. `make_tier(spec, identity, wake, clock)` makes the tier behind its guard.

Every entry has `type`, `capacity`, and may have the fields of `Admission`; the rest belongs to the type. A type without
`module_path` is one of `BUILT_IN`. With one, it is the name of a class in that module, which has

- `Options`: a frozen dataclass, whose fields are the keys that an entry may have, those without a default must be
  there. A field's type is checked (`bool`, `int`, `float`, `str`, lists and unions of them); one made by
  `tier_option(parse=...)` is read by that function instead, such as `base.units.parse_bytes`.
- `medium` ("cpu" or "storage") and `locality` ("local" or "remote"): what a request's `kv_load_tiers` selects by.
- `__init__(identity, options, capacity_bytes, wake, clock)`, and the methods of `kv.tiers.interface.Tier`.

A plug-in's objects are sealed by the guard: what it is given and gives back are records (`kv.tiers.record`) of the
lengths that its `identity` tells, so it needs no checksum of its own. `tiercel.testing.tier_kit` tests it.
"""

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, get_type_hints

import msgspec

from tiercel.base.errors import ConfigError
from tiercel.base.units import format_bytes, parse_bytes
from tiercel.kv.tiers.disk import DiskTier
from tiercel.kv.tiers.disk_files import FileOps
from tiercel.kv.tiers.disk_state import N_READERS, DiskLimits
from tiercel.kv.tiers.guard import GuardedTier, sealed_identity
from tiercel.kv.tiers.identity import TierIdentity
from tiercel.kv.tiers.interface import Clock, Tier, Wake
from tiercel.kv.tiers.memory import MemoryTier
from tiercel.kv.tiers.record import RecordFormat

_NEEDED: Final = object()
_N_READERS_MAX = 64
_BOUNDED: Final = ("lookup_deadline_s", "load_deadline_s", "store_deadline_s", "rest_s")
_WAIT_MAX_S = 3600


def tier_option(*, parse: Callable[[str], Any], default: Any = _NEEDED) -> Any:
    """Declare a field of a type's `Options` whose text `parse` reads; it raises ValueError on what it cannot read."""
    if default is _NEEDED:
        return dataclasses.field(metadata={"parse": parse})
    return dataclasses.field(default=default, metadata={"parse": parse})


def _parse_folder(text: str) -> Path:
    if not text:
        raise ConfigError("got ''; need a folder")
    return Path(text).expanduser().absolute()


@dataclass(frozen=True, slots=True)
class Admission:
    """What goes into a tier, and for how long anybody waits for it: keys that any entry may have. Times are seconds.

    `store_sights`: an object is stored when its key is seen so often (1: at once); `store_worth_s`: or earlier, when
    having it would save more than this; `stores_early`: or at first sight, at the latest when it is evicted, as long as
    that costs little of what it saves (`kv.tiers.policy.next_credit_s`). Guards take `lookup_deadline_s` for lookups;
    the owner of a tier gives its jobs `load_deadline_s` and `store_deadline_s`. After faults a tier is left alone for
    `rest_s`.
    """

    store_sights: int = 2
    store_worth_s: float = 10.0
    stores_early: bool = True
    lookup_deadline_s: float = 1.0
    load_deadline_s: float = 5.0
    store_deadline_s: float = 60.0
    rest_s: float = 30.0


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """What a `disk` entry takes. `direct_reads`: what the page cache does not have is read past it."""

    path: Path = tier_option(parse=_parse_folder)  # noqa: RUF009 - a field, as `dataclasses.field` makes it
    direct_reads: bool = True
    n_readers: int = N_READERS

    def __post_init__(self) -> None:
        if not 1 <= self.n_readers <= _N_READERS_MAX:
            raise ValueError(f"n_readers: got {self.n_readers}; need 1 to {_N_READERS_MAX}")


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """What a `memory` entry takes beside what all take: nothing."""


@dataclass(frozen=True, slots=True)
class TierKind:
    """One type of tier. `make(identity, options, capacity_bytes, wake, clock)` makes one; `seals` is the guard's."""

    name: str
    options: type
    make: Callable[[TierIdentity, Any, int, Wake, Clock], Tier]
    medium: str
    locality: str
    seals: bool


@dataclass(frozen=True, slots=True)
class TierSpec:
    """One entry of `kv_tiers`. `label` is its name in metrics: its place, where 0 is the page pool, and its type."""

    label: str
    kind: TierKind
    capacity_bytes: int
    admission: Admission
    options: Any


def _make_disk(identity: TierIdentity, options: DiskOptions, capacity_bytes: int, wake: Wake, clock: Clock) -> Tier:
    limits = DiskLimits(n_readers=options.n_readers)
    ops = FileOps(reads_past_cache=options.direct_reads)
    return DiskTier(identity, options.path, capacity_bytes, wake, clock, limits=limits, ops=ops)


def _make_memory(identity: TierIdentity, options: MemoryOptions, capacity_bytes: int, wake: Wake, clock: Clock) -> Tier:
    return MemoryTier(identity, capacity_bytes, wake, clock)


BUILT_IN: Final = {
    "disk": TierKind("disk", DiskOptions, _make_disk, "storage", "local", seals=False),
    "memory": TierKind("memory", MemoryOptions, _make_memory, "cpu", "local", seals=False),
}
_MEDIA, _LOCALITIES = ("cpu", "storage"), ("local", "remote")
_CALLS = sorted(name for name, member in vars(Tier).items() if callable(member) and not name.startswith("_"))


def read_tiers(entries: object, *, where: str = "kv_tiers") -> tuple[TierSpec, ...]:
    """Read the list of tiers, as JSON or YAML gives it.

    Raises:
        ConfigError: an entry is not of the form, or its plug-in cannot be had; the message begins with its place.
    """
    if isinstance(entries, str | bytes | Mapping) or not isinstance(entries, Sequence):
        raise ConfigError(
            f"{where}: got {entries!r:.80}; need a list such as [{{type: disk, path: ..., capacity: 20GiB}}]"
        )
    specs = tuple(_read_tier(entry, i, f"{where}[{i}]") for i, entry in enumerate(entries))
    paths = [spec.options.path for spec in specs if isinstance(spec.options, DiskOptions)]
    if len(set(paths)) != len(paths):
        raise ConfigError(f"{where}: got one folder for two disk tiers; need a folder each, or one tier")
    return specs


def make_tier(spec: TierSpec, identity: TierIdentity, wake: Wake, clock: Clock) -> GuardedTier:
    """Make a tier for the objects of `identity`, behind its guard. A disk tier may still be opening its folder.

    Raises:
        ConfigError: not one object fits, or a plug-in's class raised; the message names it.
    """
    fmt = RecordFormat(identity)
    largest = max(fmt.record_bytes(group_idx) for group_idx in range(len(identity.groups)))
    if spec.capacity_bytes < largest:
        raise ConfigError(
            f"kv_tiers: {spec.label}: got capacity {format_bytes(spec.capacity_bytes)}; one object of this model takes "
            f"{format_bytes(largest)}; give it room for many"
        )
    inner_identity = sealed_identity(identity) if spec.kind.seals else identity
    try:
        tier = spec.kind.make(inner_identity, spec.options, spec.capacity_bytes, wake, clock)
    except Exception as error:
        if not spec.kind.seals:
            raise
        raise ConfigError(
            f"kv_tiers: {spec.label}: its constructor raised {type(error).__name__}: {error}; "
            "correct its options, or leave the tier out"
        ) from error
    missing = [name for name in _CALLS if not callable(getattr(tier, name, None))]
    if missing:
        raise ConfigError(
            f"kv_tiers: {spec.label}: it has no {', '.join(missing)}; need all of kv.tiers.interface.Tier"
        )
    return GuardedTier(
        spec.label,
        tier,
        identity,
        clock,
        lookup_deadline_s=spec.admission.lookup_deadline_s,
        rest_s=spec.admission.rest_s,
        seals=spec.kind.seals,
    )


def _read_tier(entry: object, i: int, where: str) -> TierSpec:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where}: got {entry!r:.80}; need keys and values such as {{type: disk, ...}}")
    values = dict(entry)
    name, module_path = values.pop("type", None), values.pop("module_path", None)
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"{where}.type: got {name!r:.80}; need one of {', '.join(BUILT_IN)}, or a class with module_path"
        )
    if module_path is not None:
        kind = _plug_in(name, module_path, where)
    elif name in BUILT_IN:
        kind = BUILT_IN[name]
    else:
        raise ConfigError(
            f"{where}.type: got {name!r}; need one of {', '.join(BUILT_IN)}, or module_path, the module of that class"
        )
    shared = {field.name for field in dataclasses.fields(Admission)}
    own = {field.name for field in dataclasses.fields(kind.options)}
    known = ["type", "module_path", "capacity", *sorted(own), *sorted(shared)]
    for key in values:
        if key not in known:
            near = get_close_matches(str(key), known, n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{where}.{key}: unknown; a {name} tier takes {', '.join(known)}{meant}")
    capacity_bytes = _read_capacity(values.pop("capacity", None), f"{where}.capacity")
    admission = _read_options(Admission, {k: v for k, v in values.items() if k in shared}, where)
    for field in dataclasses.fields(Admission):
        least, value = 1 if field.type is int else 0, getattr(admission, field.name)
        if not value >= least:
            raise ConfigError(f"{where}.{field.name}: got {value}; need at least {least}")
        if field.name in _BOUNDED and value > _WAIT_MAX_S:
            raise ConfigError(
                f"{where}.{field.name}: got {value}; need at most {_WAIT_MAX_S}: nobody waits without end"
            )
    options = _read_options(kind.options, {k: v for k, v in values.items() if k in own}, where)
    return TierSpec(f"{i + 1}:{name}", kind, capacity_bytes, admission, options)


def _read_capacity(value: object, where: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        n_bytes = value
    elif isinstance(value, str):
        try:
            n_bytes = parse_bytes(value)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    else:
        raise ConfigError(f"{where}: got {value!r:.80}; need a size such as 20GiB: a tier is never without a bound")
    if n_bytes < 1:
        raise ConfigError(f"{where}: got {n_bytes}; need at least one byte, and room for many pages")
    return n_bytes


def _read_options(cls: type, values: Mapping[str, object], where: str) -> Any:
    """Make `cls`, a dataclass, of `values`, whose keys are all fields of it."""
    hints = get_type_hints(cls)
    read: dict[str, object] = {}
    for field in dataclasses.fields(cls):
        if field.name not in values:
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                raise ConfigError(f"{where}.{field.name}: missing; this type of tier needs it")
            continue
        value = values[field.name]
        parse = field.metadata.get("parse")
        try:
            if parse is not None and isinstance(value, str):
                read[field.name] = parse(value)
            elif parse is not None:
                raise ConfigError(f"got {value!r:.80}; need text")
            else:
                read[field.name] = msgspec.convert(value, hints[field.name])
        except ValueError as error:  # of msgspec and ConfigError too
            raise ConfigError(f"{where}.{field.name}: {error}") from None
    try:
        return cls(**read)
    except (ValueError, TypeError) as error:  # what the dataclass itself refuses
        raise ConfigError(f"{where}: {error}") from error


def _plug_in(name: str, module_path: object, where: str) -> TierKind:
    """Import a plug-in's class and see that it is one."""
    if not isinstance(module_path, str) or not module_path:
        raise ConfigError(
            f"{where}.module_path: got {module_path!r:.80}; need a module's name, such as tiercel_tier_valkey"
        )
    try:
        module = importlib.import_module(module_path)
    except Exception as error:  # a plug-in's code runs when it is imported, and may raise anything
        raise ConfigError(
            f"{where}.module_path: {module_path!r} cannot be imported: {type(error).__name__}: {error}; "
            "install the package that has it into this Python, or correct the name"
        ) from error
    cls = getattr(module, name, None)
    if not isinstance(cls, type):
        found = [k for k, v in vars(module).items() if isinstance(v, type) and hasattr(v, "Options")]
        raise ConfigError(
            f"{where}.type: module {module_path!r} has no class {name!r}; it has {', '.join(found) or 'none'}"
        )
    options = getattr(cls, "Options", None)
    is_frozen = dataclasses.is_dataclass(options) and options.__dataclass_params__.frozen  # type: ignore[union-attr]
    missing = [call for call in _CALLS if not callable(getattr(cls, call, None))]
    wrong = [] if isinstance(options, type) and is_frozen else ["Options, a frozen dataclass"]
    wrong += [f"medium, one of {_MEDIA}"] if getattr(cls, "medium", None) not in _MEDIA else []
    wrong += [f"locality, one of {_LOCALITIES}"] if getattr(cls, "locality", None) not in _LOCALITIES else []
    if missing or wrong:
        raise ConfigError(
            f"{where}.type: class {module_path}.{name} is no tier: it lacks {', '.join([*missing, *wrong])}; "
            "see kv.tiers.registry for what a plug-in's class has"
        )
    assert isinstance(options, type)
    taken = {"type", "module_path", "capacity"} | {field.name for field in dataclasses.fields(Admission)}
    clash = sorted(taken & {field.name for field in dataclasses.fields(options)})
    if clash:
        raise ConfigError(f"{where}.type: class {module_path}.{name} declares {', '.join(clash)}, which any tier has")
    return TierKind(name, options, cls, cls.medium, cls.locality, seals=True)  # type: ignore[attr-defined]
