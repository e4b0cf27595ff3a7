"""What the machine can do at most, measured just before something is compared with it.

    read      GB/s of reading memory in order, by working set, all threads together
    f32       GFLOP/s of fused multiply-adds in registers, as many threads
    int8      GOP/s of int8 dot products in registers, as many threads

The native core does the work with the kernels' own instructions (`measure_rate`). A busy machine lowers what is found;
the best of several tries is kept, as a limit is not an average.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tiercel.base.units import MIB

WORKING_SETS_MIB = (1, 4, 16, 64, 160, 512)


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

    def floor_s(self, n_bytes: float, n_ops: float, *, is_int8: bool, working_set_bytes: float) -> float:
        """Return the least time that `n_bytes` and `n_ops` can take."""
        rate = self.int8_gop_s if is_int8 else self.f32_gflop_s
        return max(n_bytes / (self.read_rate(working_set_bytes) * 1e9), n_ops / (rate * 1e9))


def measure(n_threads: int, level: str) -> Limits:
    """Measure the machine's limits with `n_threads`; `level` is the kernels' instruction set. Takes two seconds."""
    from tiercel import _native

    read = {mib: _native.measure_rate(level, "read", n_threads, mib * MIB) / 1e9 for mib in WORKING_SETS_MIB}
    rates = {kind: _native.measure_rate(level, kind, n_threads) / 1e9 for kind in ("fma", "dot")}
    return Limits(n_threads, read, f32_gflop_s=rates["fma"], int8_gop_s=rates["dot"])
