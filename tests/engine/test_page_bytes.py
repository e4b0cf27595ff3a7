"""What is in a page's bytes: `docs/formats/kv_page.md`, against the keys and values of the reference executor."""

import json
from pathlib import Path

import numpy as np
import pytest

from tiercel.models.registry import build_model
from tiercel.ops.program import KvLayer
from tiercel.runner.pages import page_group
from tiercel.runner.reference import Chunk, ReferenceExecutor
from tiercel.testing.fill import tiny_checkpoint
from tiercel.testing.native import float_tensors, native_logits, native_runner

FIXTURES = Path(__file__).parent.parent / "model/fixtures"
IDS = [(7 * i + 3) % 61 for i in range(40)]


def make(name):
    config = json.loads((FIXTURES / f"{name}.json").read_text())["config"]
    weights = tiny_checkpoint(config)
    program = build_model(config).record(float_tensors(weights))
    executor = ReferenceExecutor(program, weights)
    executor.step([Chunk(0, IDS)])
    return program, float_tensors(weights), executor


def pages_of(program, tensors, kv_dtype):
    runner = native_runner(program, tensors, kv_dtype=kv_dtype, n_threads=1)
    native_logits(runner, IDS, [len(IDS)])
    pages = [bytes(one) for one in runner.read_pages([0, 1])]
    group = runner.page_group
    runner.close()
    assert {len(one) for one in pages} == {group.object_bytes}
    return pages, group


@pytest.mark.parametrize("kv_dtype", ["float32", "float16"])
def test_a_page_is_keys_by_column_and_values_by_token_in_the_order_of_layers_and_heads(kv_dtype):
    program, tensors, executor = make("llama_odd_heads_9_3")
    pages, group = pages_of(program, tensors, kv_dtype)
    kept, layer = executor._sequences[0], program.kv_layers[0]
    assert group.counts == (len(program.kv_layers),)
    for p, page in enumerate(pages):
        numbers = np.frombuffer(page, kv_dtype).astype(np.float32)
        parts = numbers.reshape(len(program.kv_layers), layer.n_kv_heads, 2, 16 * layer.head_dim)
        for i in range(len(program.kv_layers)):
            for head in range(layer.n_kv_heads):
                keys = kept.keys[i][16 * p : 16 * p + 16, head]
                values = kept.values[i][16 * p : 16 * p + 16, head]
                got_keys = parts[i, head, 0].reshape(layer.head_dim, 16).T
                got_values = parts[i, head, 1].reshape(16, layer.head_dim)
                assert np.allclose(got_keys, keys, atol=2e-3 if kv_dtype == "float16" else 1e-5)
                assert np.allclose(got_values, values, atol=2e-3 if kv_dtype == "float16" else 1e-5)


def test_types_and_layouts_are_told_apart():
    program, tensors, _ = make("llama_odd_heads_9_3")
    groups = [pages_of(program, tensors, kv_dtype)[1] for kv_dtype in ("float32", "float16", "int8")]
    assert len({group.dtype for group in groups}) == 3
    assert groups[2].scales != "none"
    layers = [KvLayer(0, 2, 64, 0), KvLayer(1, 2, 64, 0), KvLayer(2, 1, 64, 0)]
    heads = page_group(layers, "float16", 16, 1000)
    assert heads.counts == (2, 1)
    assert heads != page_group(layers, "float16", 32, 1000)
    assert heads != page_group(layers[::-1], "float16", 16, 1000)
    latent = page_group([KvLayer(0, 1, 64, 0, latent_values=48)], "float16", 16, 1000)
    assert latent.layout != page_group([KvLayer(0, 1, 64, 0)], "float16", 16, 1000).layout


def test_a_model_that_keeps_no_keys_has_no_page_to_describe():
    assert page_group([], "float16", 16, 0) is None
