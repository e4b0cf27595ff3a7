"""A recurrent layer's convolution, delta rule and gated norm as one op: bit for bit what they are as three."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

from tiercel.models.registry import build_model
from tiercel.ops.lowered import DeltaLayer, DeltaRule, ShortConv
from tiercel.ops.passes import Passes, lower_and_fuse
from tiercel.quant.formats import Format
from tiercel.testing.fill import tiny_checkpoint
from tiercel.testing.native import float_tensors, native_logits, native_runner

FOLDER = Path(__file__).parent / "fixtures"
NAMES = ("qwen3_5", "qwen3_next", "kimi_linear", "kimi_linear_delta_last")
CHUNKS = ([60], [1] * 60, [17, 1, 2, 33, 7])
# More threads than key heads: then the parts run one after the other.
THREADS = (1, 2, 7)


@pytest.fixture(scope="module", params=NAMES)
def recorded(request):
    config = json.loads((FOLDER / f"{request.param}.json").read_text())["config"]
    weights = tiny_checkpoint(config)
    tensors = {name: SimpleNamespace(shape=w.shape, format=Format.F32) for name, w in weights.items()}
    return build_model(config).record(tensors), float_tensors(weights)


def kinds(program, kind):
    return [op for op in program.ops if isinstance(op, kind)]


def test_a_delta_rule_takes_its_convolution_and_its_norm_with_it(recorded):
    program, _ = recorded
    fused, apart = lower_and_fuse(program), lower_and_fuse(program, replace(Passes(), fuse_delta=False))
    n_rules, n_joined = len(kinds(apart, DeltaRule)), len(kinds(fused, DeltaLayer))
    assert n_joined >= n_rules - 1 > 0, "at most the last layer, whose norm is of chosen rows, stays apart"
    assert not kinds(apart, DeltaLayer)
    for kind in (ShortConv, DeltaRule):
        assert len(kinds(fused, kind)) == n_rules - n_joined
    assert set(fused.weights()) == set(apart.weights())


def test_one_op_gives_the_bits_of_three_in_any_chunks_on_any_threads(recorded):
    program, tensors = recorded
    ids = np.random.default_rng(1).integers(0, 128, 60).tolist()
    found = []
    for passes in (replace(Passes(), fuse_delta=False), Passes()):
        for n_threads in THREADS:
            for chunks in CHUNKS:
                runner = native_runner(program, tensors, n_threads=n_threads, passes=passes)
                found.append(native_logits(runner, ids, chunks))
                runner.close()
    assert np.isfinite(found[0]).all()
    for other in found[1:]:
        np.testing.assert_array_equal(other.view(np.uint32), found[0].view(np.uint32))
