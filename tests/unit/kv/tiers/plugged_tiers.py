"""Classes that a `kv_tiers` entry may name by `module_path`: one tier, and several that are none."""

from dataclasses import dataclass

from tiercel.base.units import parse_bytes
from tiercel.kv.tiers.registry import tier_option
from tiercel.testing.scripted_tier import ScriptedTier


class PluggedTier(ScriptedTier):
    """A tier as a plug-in writes it."""

    medium = "storage"
    locality = "remote"

    @dataclass(frozen=True)
    class Options:
        url: str
        n_threads: int = 2
        chunk: int = tier_option(parse=parse_bytes, default=1024)

        def __post_init__(self):
            if self.n_threads < 1:
                raise ValueError(f"n_threads: got {self.n_threads}; need at least 1")

    def __init__(self, identity, options, capacity_bytes, wake, clock):
        super().__init__(identity, wake, capacity_bytes, clock)
        self.options = options
        if options.url == "refused":
            raise ConnectionError("nobody listens")


class Half(PluggedTier):
    """Lacks a method and a place."""

    locality = "nowhere"
    drain = None


class Loose(PluggedTier):
    """Its options can be changed."""

    @dataclass
    class Options:
        url: str


class Clashing(PluggedTier):
    """Its options have a name that any tier has."""

    @dataclass(frozen=True)
    class Options:
        rest_s: float
