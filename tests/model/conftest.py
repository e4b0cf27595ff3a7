"""The backends that every fixture is run on. To add one, append a `Backend` to BACKENDS."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tiercel.models.registry import build_model
from tiercel.ops.passes import Passes, lower_and_fuse
from tiercel.ops.program import Program
from tiercel.quant.formats import Format
from tiercel.runner.reference import Chunk, ReferenceExecutor
from tiercel.testing.fill import tiny_checkpoint
from tiercel.testing.native import float_tensors, native_logits, native_runner

FIXTURES = Path(__file__).parent / "fixtures"
Floats = np.ndarray


@dataclass(frozen=True)
class Backend:
    """`run(program, weights, ids, chunks)` computes ids in chunks of the given lengths and returns all logits [T, V].

    `program` is as recorded; `weights` are float32 by canonical name. `tolerance` is the allowed |difference| to the
    oracle.
    """

    name: str
    run: Callable[[Program, Mapping[str, Floats], Sequence[int], Sequence[int]], Floats]
    tolerance: float = 1e-4


def _reference(lower: Callable[[Program], object], **options):
    def run(program, weights, ids, chunks):
        executor = ReferenceExecutor(lower(program), weights, max_tokens=len(ids), **options)
        ends = np.cumsum(chunks)
        assert ends[-1] == len(ids)
        parts = [list(ids[end - n : end]) for end, n in zip(ends, chunks, strict=True)]
        return np.concatenate([executor.step([Chunk(0, part)]) for part in parts])

    return run


def _native(**options):
    def run(program, weights, ids, chunks):
        runner = native_runner(program, float_tensors(weights), **options)
        try:
            return native_logits(runner, ids, chunks)
        finally:
            runner.close()

    return run


BACKENDS = [
    Backend("recorded", _reference(lambda program: program)),
    Backend("lowered", _reference(lower_and_fuse)),
    Backend("lowered-no-passes", _reference(lambda p: lower_and_fuse(p, Passes.none()), reuse_buffers=False)),
    Backend("native", _native()),
    Backend("native-no-passes", _native(passes=Passes.none(), n_threads=1)),
]


@pytest.fixture(params=BACKENDS, ids=lambda b: b.name)
def backend(request):
    return request.param


@pytest.fixture(scope="session", params=sorted(FIXTURES.glob("*.json")), ids=lambda path: path.stem)
def tiny(request):
    """One tiny model: its fixture, float32 weights, and its recorded program."""
    expected = json.loads(request.param.read_text())
    model = build_model(expected["config"])
    weights = tiny_checkpoint(expected["config"])
    tensors = {name: SimpleNamespace(shape=w.shape, format=Format.F32) for name, w in weights.items()}
    return SimpleNamespace(model=model, weights=weights, program=model.record(tensors), expected=expected)
