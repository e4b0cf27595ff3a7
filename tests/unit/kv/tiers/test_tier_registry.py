"""What a person writes under `kv_tiers` becomes tiers, or is refused with its place and what to do."""

import sys
import time
from pathlib import Path
from threading import Event

import pytest

from tiercel.base.errors import ConfigError
from tiercel.kv.tiers.interface import Outcome
from tiercel.kv.tiers.registry import Admission, make_tier, read_tiers
from tiercel.testing.tier_kit import IDENTITY, PATIENCE_S, TierContract, TierDriver, body_of, bytes_of

PLUGGED = {"type": "PluggedTier", "module_path": "plugged_tiers", "url": "u", "capacity": "1MiB"}
DISK = {"type": "disk", "path": "kv", "capacity": "1MiB"}


def opened(entry, identity=IDENTITY, wake=None):
    (spec,) = read_tiers([entry])
    woken = Event()
    return TierDriver(make_tier(spec, identity, wake or woken.set, time.monotonic), woken)


class TestPluggedTier(TierContract):
    def make_tier(self, identity, wake, capacity_bytes):
        # The kit counts bytes of objects; a sealed one is longer by its header, and one of the kit's tiers is tiny.
        (spec,) = read_tiers([PLUGGED | {"capacity": max(capacity_bytes, 2048)}])
        return make_tier(spec, identity, wake, time.monotonic)

    test_objects_of_the_wrong_length_or_group_are_not_served = None
    test_what_can_never_fit_is_refused = None


def test_entries_become_specs_in_order():
    specs = read_tiers(
        [
            {"type": "memory", "capacity": 4096},
            {"type": "disk", "path": "~/kv", "capacity": "20GiB", "store_sights": 1, "load_deadline_s": 2},
            PLUGGED | {"chunk": "2KiB"},
        ]
    )
    assert [spec.label for spec in specs] == ["1:memory", "2:disk", "3:PluggedTier"]
    assert [spec.capacity_bytes for spec in specs] == [4096, 20 << 30, 1 << 20]
    assert [(spec.kind.medium, spec.kind.locality) for spec in specs] == [
        ("cpu", "local"),
        ("storage", "local"),
        ("storage", "remote"),
    ]
    assert specs[0].admission == Admission()
    assert specs[1].admission == Admission(store_sights=1, load_deadline_s=2.0)
    assert specs[1].options.path == Path.home() / "kv"
    assert (specs[2].options.url, specs[2].options.n_threads, specs[2].options.chunk) == ("u", 2, 2048)
    assert read_tiers([]) == ()


@pytest.mark.parametrize("entry", [DISK, {"type": "memory", "capacity": "1MiB"}, PLUGGED], ids=lambda e: e["type"])
def test_a_spec_makes_a_tier_that_keeps_objects(tmp_path, entry):
    tier = opened(entry | ({"path": str(tmp_path / "kv")} if entry is DISK else {}))
    assert tier.tier.drain(PATIENCE_S)
    assert tier.store([1, 2]) == [Outcome.DONE] * 2
    assert bytes_of(tier.load([2])[0]) == body_of(2)
    tier.tier.close()


REFUSED = {
    "no list": ({"type": "disk"}, r"kv_tiers: .*need a list"),
    "a text": ("disk", r"kv_tiers: .*need a list"),
    "no mapping": (["disk"], r"kv_tiers\[0\]: got 'disk'; need keys"),
    "no type": ([{"path": "kv"}], r"kv_tiers\[0\]\.type: got None; need one of disk, memory"),
    "an unknown type": (
        [{"type": "disc"}],
        r"kv_tiers\[0\]\.type: got 'disc'; need one of disk, memory, or module_path",
    ),
    "the second": ([DISK, {"type": "disc"}], r"kv_tiers\[1\]\.type"),
    "an unknown key": ([DISK | {"pth": "x"}], r"kv_tiers\[0\]\.pth: unknown; a disk tier takes type, .*mean path\?"),
    "a number as key": ([DISK | {7: "x"}], r"kv_tiers\[0\]\.7: unknown"),
    "another type's key": ([DISK | {"url": "x"}], r"kv_tiers\[0\]\.url: unknown"),
    "no path": ([{"type": "disk", "capacity": 1}], r"kv_tiers\[0\]\.path: missing"),
    "an empty path": ([DISK | {"path": ""}], r"kv_tiers\[0\]\.path: got ''; need a folder"),
    "a path of another type": ([DISK | {"path": 3}], r"kv_tiers\[0\]\.path: got 3; need text"),
    "no readers": ([DISK | {"n_readers": 0}], r"kv_tiers\[0\]: n_readers: got 0; need 1 to 64"),
    "a switch that is none": ([DISK | {"direct_reads": "yes"}], r"kv_tiers\[0\]\.direct_reads: Expected `bool`"),
    "no capacity": ([{"type": "disk", "path": "kv"}], r"kv_tiers\[0\]\.capacity: got None; need a size"),
    "a capacity of true": ([DISK | {"capacity": True}], r"kv_tiers\[0\]\.capacity: got True; need a size"),
    "a capacity in words": (
        [DISK | {"capacity": "much"}],
        r"kv_tiers\[0\]\.capacity: got 'much'; need a size in bytes",
    ),
    "no bytes": ([DISK | {"capacity": 0}], r"kv_tiers\[0\]\.capacity: got 0; need at least one"),
    "negative bytes": ([DISK | {"capacity": -1}], r"kv_tiers\[0\]\.capacity: got -1; need at least one"),
    "no sights": ([DISK | {"store_sights": 0}], r"kv_tiers\[0\]\.store_sights: got 0; need at least 1"),
    "half a sight": ([DISK | {"store_sights": 1.5}], r"kv_tiers\[0\]\.store_sights: Expected `int`"),
    "a negative time": ([DISK | {"rest_s": -1}], r"kv_tiers\[0\]\.rest_s: got -1\.0; need at least 0"),
    "no time": ([DISK | {"rest_s": float("nan")}], r"kv_tiers\[0\]\.rest_s: got nan; need at least 0"),
    "no end": (
        [DISK | {"load_deadline_s": float("inf")}],
        r"\.load_deadline_s: got inf; need at most 3600: nobody waits",
    ),
    "one folder twice": ([DISK, DISK], r"kv_tiers: got one folder for two disk tiers"),
    "no such module": (
        [PLUGGED | {"module_path": "no_such.module"}],
        r"module_path: 'no_such.module' cannot .*install",
    ),
    "no module's name": ([PLUGGED | {"module_path": 7}], r"module_path: got 7; need a module's name"),
    "no such class": (
        [PLUGGED | {"type": "Plugged"}],
        r"type: module 'plugged_tiers' has no class 'Plugged'; it has Plugg",
    ),
    "no class at all": ([PLUGGED | {"type": "parse_bytes"}], r"has no class 'parse_bytes'"),
    "a class that is no tier": ([PLUGGED | {"type": "Half"}], r"Half is no tier: it lacks drain, locality, one of"),
    "options that can change": (
        [PLUGGED | {"type": "Loose"}],
        r"Loose is no tier: it lacks Options, a frozen dataclass",
    ),
    "options of any tier": ([PLUGGED | {"type": "Clashing"}], r"Clashing declares rest_s, which any tier has"),
    "a plug-in's option is missing": (
        [{k: v for k, v in PLUGGED.items() if k != "url"}],
        r"kv_tiers\[0\]\.url: missing",
    ),
    "a plug-in's option of another type": ([PLUGGED | {"n_threads": "two"}], r"\.n_threads: Expected `int`, got `str`"),
    "a plug-in's option out of range": (
        [PLUGGED | {"n_threads": 0}],
        r"kv_tiers\[0\]: n_threads: got 0; need at least 1",
    ),
    "a plug-in's size": ([PLUGGED | {"chunk": "much"}], r"kv_tiers\[0\]\.chunk: got 'much'; need a size"),
}


@pytest.mark.parametrize(("entries", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_wrong_is_refused_with_its_place(entries, words):
    with pytest.raises(ConfigError, match=words):
        read_tiers(entries)


def test_a_disk_reads_as_its_entry_says(tmp_path):
    entry = DISK | {"path": str(tmp_path / "kv"), "direct_reads": False, "n_readers": 3}
    tier = opened(entry)
    assert tier.store([1, 2]) == [Outcome.DONE] * 2
    assert bytes_of(tier.load([2])[0]) == body_of(2)
    inner = tier.tier._tier
    assert (inner._limits.n_readers, inner._folder._ops._reads_past_cache) == (3, False)
    tier.tier.close()


def test_a_module_that_raises_when_it_is_imported_is_named(tmp_path, monkeypatch):
    (tmp_path / "broken_tiers.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"'broken_tiers' cannot be imported: ZeroDivisionError"):
        read_tiers([PLUGGED | {"module_path": "broken_tiers"}])
    assert "broken_tiers" not in sys.modules


def test_a_constructor_that_raises_is_named_with_what_it_said():
    with pytest.raises(ConfigError, match="1:PluggedTier: its constructor raised ConnectionError: nobody listens"):
        opened(PLUGGED | {"url": "refused"})


def test_a_tier_too_small_for_one_object_is_refused():
    with pytest.raises(ConfigError, match="1:memory: got capacity 100 B; one object of this model takes"):
        opened({"type": "memory", "capacity": 100})
