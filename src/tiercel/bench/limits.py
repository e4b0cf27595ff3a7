"""What the machine can do at most, measured just before something is compared with it.

    read      GB/s of reading memory in order, by working set, all threads together
    f32       GFLOP/s of a large float32 matrix product (BLAS), as many threads
    int8      GOP/s of int8 dot products; derived from f32 by how many more a vector instruction does at this level

numpy does the work, in a process of its own: its BLAS takes the number of threads only at its start. A busy machine
lowers what is found; the best of several tries is kept, as a limit is not an average.
"""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

from tiercel.base.errors import RequestFailed
from tiercel.base.units import MIB

WORKING_SETS_MIB = (1, 4, 16, 64, 160, 512)
_N_TRIES = 5
_READ_BYTES = 256 * MIB  # a try's reading at least, in passes of the working set
_SGEMM_N = 1024
_DEADLINE_S = 120.0
# Products of int8 for each of float32 that an instruction of the same kind does. avx512: one vpdpbusd is 64 for an
# FMA's 16. avx2: maddubs, madd and add are 32 in three instructions for an FMA's 8.
INT8_PER_F32: Mapping[str, float] = {"avx512": 4.0, "avx2": 4 / 3, "scalar": 1.0}


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
    """Measure the machine's limits with `n_threads`; `level` is the kernels' instruction set.

    Raises: RequestFailed: the measuring process failed.
    """
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    environment = os.environ | {name: str(n_threads) for name in names}
    command = [sys.executable, "-m", "tiercel.bench.limits", str(n_threads)]
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, timeout=_DEADLINE_S, check=True)
        told = json.loads(ended.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise RequestFailed(f"bench ops: measuring the machine's limits: {error}; need numpy to run") from None
    read = {int(mib): rate for mib, rate in told["read_gb_s"].items()}
    return Limits(n_threads, read, told["f32_gflop_s"], told["f32_gflop_s"] * INT8_PER_F32[level])


def read_rate_gb_s(working_set_bytes: int, n_threads: int) -> float:
    """Measure reading `working_set_bytes` again and again, each thread its own part."""
    import threading

    import numpy as np

    words = max(working_set_bytes // 8 // n_threads, 1)
    parts = [np.ones(words, np.uint64) for _ in range(n_threads)]
    n_passes = max(1, _READ_BYTES // working_set_bytes)
    barrier = threading.Barrier(n_threads + 1)

    def read(part: "np.ndarray") -> None:
        for _ in range(_N_TRIES):
            barrier.wait()
            for _ in range(n_passes):
                np.bitwise_or.reduce(part)
            barrier.wait()

    threads = [threading.Thread(target=read, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    best_s = math.inf
    for _ in range(_N_TRIES):
        barrier.wait()
        start_s = time.perf_counter()
        barrier.wait()
        best_s = min(best_s, time.perf_counter() - start_s)
    for thread in threads:
        thread.join()
    return 8 * words * n_threads * n_passes / best_s / 1e9


def f32_rate_gflop_s() -> float:
    """Measure a large float32 matrix product."""
    import numpy as np

    a = np.ones((_SGEMM_N, _SGEMM_N), np.float32)
    out = a @ a
    best_s = math.inf
    for _ in range(2 * _N_TRIES):
        start_s = time.perf_counter()
        np.matmul(a, a, out=out)
        best_s = min(best_s, time.perf_counter() - start_s)
    return 2 * _SGEMM_N**3 / best_s / 1e9


def _main(n_threads: int) -> None:
    told = {
        "read_gb_s": {mib: read_rate_gb_s(mib * MIB, n_threads) for mib in WORKING_SETS_MIB},
        "f32_gflop_s": f32_rate_gflop_s(),
    }
    json.dump(told, sys.stdout)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
