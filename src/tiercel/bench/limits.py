"""What the machine can do at most, measured just before something is compared with it.

    read      GB/s of reading memory in order, by working set, all threads together
    f32       GFLOP/s of fused multiply-adds in registers, as many threads
    int8      GOP/s of int8 dot products in registers, as many threads

The native core does the work with the kernels' own instructions (`measure_rate`). A busy machine lowers what is found;
the best of several tries is kept, as a limit is not an average (`Limits.best`).

Below the int8 limit lies a format's ceiling: a scale for each group of 32 weights takes arithmetic slots beside the
dot products, by construction (`ceiling_frac`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tiercel.base.units import MIB
from tiercel.quant.formats import Format

WORKING_SETS_MIB = (1, 4, 16, 64, 160, 512)

# Of a group of 32 weights, 16 columns and one row: 8 dot products, then convert, multiply the scales, multiply-add; a
# minimum is one multiply-add more; Q6_K's two sub-scales two multiplications and an addition more.
_N_DOTS = 8
_N_SLOTS = {
    **dict.fromkeys((Format.Q4_0, Format.Q5_0, Format.Q8_0, Format.MXFP4), 11),
    **dict.fromkeys((Format.Q4_1, Format.Q5_1, Format.Q4_K, Format.Q5_K), 12),
    Format.Q6_K: 14,
    Format.NVFP4: 14,
}


def ceiling_frac(weights: Format) -> float:
    """Return what part of the int8 limit products with weights of this format can reach; 1 where they are floats."""
    return _N_DOTS / _N_SLOTS[weights] if weights in _N_SLOTS else 1.0


@dataclass(frozen=True, slots=True)
class Limits:
    """The machine's limits, for `n_threads`. `read_gb_s`: working set in MiB -> GB/s."""

    n_threads: int
    read_gb_s: Mapping[int, float]
    f32_gflop_s: float
    int8_gop_s: float

    def read_rate(self, working_set_bytes: float) -> float:
        """Return GB/s for a working set: between the two measured around it, on a logarithmic scale."""
        sizes = sorted(self.read_gb_s)
        mib = min(max(working_set_bytes / MIB, sizes[0]), sizes[-1])
        above = next(size for size in sizes if size >= mib)
        below = max((size for size in sizes if size <= mib), default=above)
        if above == below:
            return self.read_gb_s[above]
        part = math.log(mib / below) / math.log(above / below)
        return self.read_gb_s[below] + part * (self.read_gb_s[above] - self.read_gb_s[below])

    def best(self, other: "Limits") -> "Limits":
        """Return the better of two measurements, limit by limit."""
        sets = sorted({*self.read_gb_s, *other.read_gb_s})
        read = {mib: max(self.read_gb_s.get(mib, 0.0), other.read_gb_s.get(mib, 0.0)) for mib in sets}
        return Limits(
            self.n_threads,
            read,
            max(self.f32_gflop_s, other.f32_gflop_s),
            max(self.int8_gop_s, other.int8_gop_s),
        )

    def floor_s(self, n_bytes: float, n_ops: float, *, is_int8: bool, working_set_bytes: float) -> float:
        """Return the least time that `n_bytes` and `n_ops` can take."""
        rate = self.int8_gop_s if is_int8 else self.f32_gflop_s
        return max(n_bytes / (self.read_rate(working_set_bytes) * 1e9), n_ops / (rate * 1e9))


def measure_reading(n_threads: int, level: str, working_set_bytes: float) -> float:
    """Measure GB/s of reading one working set in order."""
    from tiercel import _native

    return _native.measure_rate(level, "read", n_threads, max(round(working_set_bytes / MIB), 1) * MIB) / 1e9


def measure(n_threads: int, level: str, working_set_bytes: float = 0.0) -> Limits:
    """Measure the machine's limits with `n_threads`; `level` is the kernels' instruction set. Takes two seconds.

    Reading is measured with `working_set_bytes` too, so that a step of that size has a limit of its own.
    """
    from tiercel import _native

    own = max(round(working_set_bytes / MIB), 1)
    read = {
        mib: _native.measure_rate(level, "read", n_threads, mib * MIB) / 1e9 for mib in sorted({*WORKING_SETS_MIB, own})
    }
    rates = {kind: _native.measure_rate(level, kind, n_threads) / 1e9 for kind in ("fma", "dot")}
    return Limits(n_threads, read, f32_gflop_s=rates["fma"], int8_gop_s=rates["dot"])
