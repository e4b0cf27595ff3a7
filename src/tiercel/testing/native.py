"""Native runners over weights in memory: for tests that need a model and no file. Knows no engine."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tiercel.loaders.checkpoint import Tensor
from tiercel.ops.passes import Passes, lower_and_fuse
from tiercel.ops.program import Program
from tiercel.protocol.params import SamplingParams
from tiercel.protocol.step import StepPlan
from tiercel.quant.formats import Format
from tiercel.runner.capacity import Capacity
from tiercel.runner.native import NativeRunner, NativeSettings
from tiercel.runner.weights import PackedWeightStore

Floats = npt.NDArray[np.float32]

_PAGE_SIZE_TOKENS = 16


def float_tensors(weights: Mapping[str, Floats]) -> dict[str, Tensor]:
    """Return float32 arrays as a checkpoint's tensors; a program of other formats has them quantised in packing."""
    return {
        name: Tensor(name, tuple(w.shape), Format.F32, np.ascontiguousarray(w, np.float32).view(np.uint8).reshape(-1))
        for name, w in weights.items()
    }


def native_runner(
    program: Program,
    tensors: Mapping[str, Tensor],
    *,
    max_len_tokens: int = 256,
    n_slots: int = 4,
    max_step_tokens: int = 256,
    kv_dtype: str = "float32",
    n_threads: int = 2,
    expand_to_f32: bool = False,
    level: str | None = None,
    passes: Passes | None = None,
) -> NativeRunner:
    """Build a runner with pages for all its slots at full length. `level` None: what the environment asks for."""
    n_pages = n_slots * -(-max_len_tokens // _PAGE_SIZE_TOKENS)
    capacity = Capacity(_PAGE_SIZE_TOKENS, 1, n_pages, max_len_tokens, n_slots)
    settings = NativeSettings(max_step_tokens, max_step_tokens, kv_dtype, n_threads, level)
    return sized_runner(program, tensors, capacity, settings, expand_to_f32=expand_to_f32, passes=passes)


def sized_runner(
    program: Program,
    tensors: Mapping[str, Tensor],
    capacity: Capacity,
    settings: NativeSettings,
    *,
    expand_to_f32: bool = False,
    passes: Passes | None = None,
) -> NativeRunner:
    """Build a runner with a pool of any size."""
    store = PackedWeightStore(tensors, expand_to_f32=expand_to_f32, n_threads=settings.n_threads)
    return NativeRunner(lower_and_fuse(program, passes), store, capacity, settings)


def native_logits(
    runner: NativeRunner,
    ids: Sequence[int],
    chunks: Sequence[int],
    *,
    slot: int = 0,
    pages: Sequence[int] | None = None,
) -> Floats:
    """Compute one sequence's logits in chunks of the given lengths, alone on an idle runner.

    Returns: float32 [T, V].
    """
    size = runner.limits.page_size_tokens
    n_pages = -(-len(ids) // size)
    runner.admit(slot, list(ids), len(ids), SamplingParams(temperature=0.0), 0, ())
    runner.set_pages(slot, 0, list(pages if pages is not None else range(n_pages)))
    rows, start = [], 0
    for step_id, n in enumerate(chunks):
        runner.submit(one_sequence(step_id, slot, start, n))
        runner.collect()
        rows.append(runner.last_logits(n))
        start += n
    runner.release(slot)
    assert start == len(ids), f"chunks add up to {start}, there are {len(ids)} tokens"
    return np.concatenate(rows)


def one_sequence(step_id: int, slot: int, start: int, n: int) -> StepPlan:
    """Return a step of one sequence that scores all its rows and samples none."""
    at, first, count = (np.array([value], np.int32) for value in (slot, start, n))
    return StepPlan(step_id, at, first, count, np.array([False]), np.array([True]), n_logprobs=None)
