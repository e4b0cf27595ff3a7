"""What rounding costs: packed weights and int8 activations against float32 compute on the same weights.

The real models are read on a text of more than 2,000 tokens, whole distributions compared. Every weight format is run
through a tiny model, against the reference executor on what the format's definition says the bytes mean.
"""

import math
from pathlib import Path

import numpy as np
import pytest
from real_models import NAMES, need_model

from tiercel import _native
from tiercel.base.config import EngineOptions
from tiercel.boot.plan import make_plan
from tiercel.boot.runner import build_runner
from tiercel.boot.text import load_tokenizer
from tiercel.loaders.checkpoint import Tensor
from tiercel.models.registry import build_model
from tiercel.ops.passes import lower_and_fuse
from tiercel.ops.recorder import ComputeDtype
from tiercel.protocol.params import SamplingParams
from tiercel.quant.formats import Format
from tiercel.quant.quantize import quantize
from tiercel.runner.reference import Chunk, ReferenceExecutor
from tiercel.testing.fill import tiny_checkpoint
from tiercel.testing.native import float_tensors, native_logits, native_runner, one_sequence

ESSAY = Path(__file__).parent / "text/essay.txt"
N_ROWS = 64  # rows of logits at a time: of Gemma's they are 64 MiB
KL_MAX = 0.01
PERPLEXITY_FRAC = 0.01
INT8_KV_PERPLEXITY_FRAC = 0.005


def log_softmax(logits):
    """In place."""
    logits -= logits.max(axis=1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True, dtype=np.float64)).astype(np.float32)
    return logits


def divergence(log_p, log_q):
    """KL(p || q) of each row, in nats."""
    p = np.exp(log_p)
    log_p = log_p - log_q
    log_p *= p
    return log_p.sum(axis=1, dtype=np.float64)


def perplexity_of(log_ps):
    return math.exp(-np.mean(log_ps))


def same_bits(a, b):
    return a.shape == b.shape and np.array_equal(a.view(np.uint32), b.view(np.uint32))


# Real models.


class Reading:
    """One way of computing a real model, reading a text from its beginning."""

    def __init__(self, path, ids, **options):
        size = {"max_model_len": 4096, "max_num_seqs": 1, "max_num_batched_tokens": N_ROWS}
        self.plan = make_plan(EngineOptions(model=str(path), **size, **options))
        self.runner = build_runner(self.plan)
        self.runner.admit(0, ids, len(ids), SamplingParams(temperature=0.0), 0, ())
        self.runner.set_pages(0, 0, range(-(-len(ids) // self.runner.limits.page_size_tokens)))
        self.loss = 0.0
        self.n_steps = self.n_read = 0

    def read(self, ids):
        """Return the log-probabilities after each of the text's next ids, [T, V]."""
        self.runner.submit(one_sequence(self.n_steps, 0, self.n_read, len(ids)))
        self.runner.collect()
        self.n_steps += 1
        self.n_read += len(ids)
        return log_softmax(self.runner.last_logits(len(ids)).copy())

    def close(self):
        self.runner.close()
        self.plan.checkpoint.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_int8_and_float16_keep_a_real_models_distribution_and_perplexity(name, record_property):
    path = need_model(name)
    plan = make_plan(EngineOptions(model=str(path)))
    ids = load_tokenizer(plan).encode(ESSAY.read_text(encoding="utf-8"))
    plan.checkpoint.close()
    assert len(ids) >= 2000
    exact = Reading(path, ids, compute_dtype="float32", kv_cache_dtype="float32")
    packed = Reading(path, ids)
    kl, losses = [], {exact: [], packed: []}
    for start in range(0, len(ids), N_ROWS):
        part, after = ids[start : start + N_ROWS], ids[start + 1 : start + N_ROWS + 1]
        rows = {reading: reading.read(part) for reading in (exact, packed)}
        for reading, log_p in rows.items():
            losses[reading] += log_p[np.arange(len(after)), after].tolist()
        kl += divergence(rows[exact], rows[packed]).tolist()
    exact.close()
    packed.close()
    mean_kl = float(np.mean(kl))
    perplexity = {reading: perplexity_of(losses[reading]) for reading in (exact, packed)}
    record_property("mean_kl", mean_kl)
    record_property("perplexity", (perplexity[exact], perplexity[packed]))
    print(f"{name}: mean KL {mean_kl:.5f}, perplexity {perplexity[exact]:.4f} -> {perplexity[packed]:.4f}")
    assert len(kl) == len(ids)
    assert 0.0 < mean_kl <= KL_MAX
    assert perplexity[packed] == pytest.approx(perplexity[exact], rel=PERPLEXITY_FRAC)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_int8_keys_and_values_keep_a_real_models_perplexity(name, record_property):
    path = need_model(name)
    plan = make_plan(EngineOptions(model=str(path)))
    ids = load_tokenizer(plan).encode(ESSAY.read_text(encoding="utf-8"))
    plan.checkpoint.close()
    readings = {kv: Reading(path, ids, kv_cache_dtype=kv) for kv in ("float16", "int8")}
    kl, losses = [], {kv: [] for kv in readings}
    for start in range(0, len(ids), N_ROWS):
        part, after = ids[start : start + N_ROWS], ids[start + 1 : start + N_ROWS + 1]
        rows = {kv: reading.read(part) for kv, reading in readings.items()}
        for kv, log_p in rows.items():
            losses[kv] += log_p[np.arange(len(after)), after].tolist()
        kl += divergence(rows["float16"], rows["int8"]).tolist()
    for reading in readings.values():
        reading.close()
    mean_kl, perplexity = float(np.mean(kl)), {kv: perplexity_of(losses[kv]) for kv in readings}
    record_property("mean_kl", mean_kl)
    record_property("perplexity", perplexity)
    print(f"{name}: int8 KV: mean KL {mean_kl:.5f}, perplexity {perplexity}")
    assert 0.0 < mean_kl <= KL_MAX
    assert perplexity["int8"] == pytest.approx(perplexity["float16"], rel=INT8_KV_PERPLEXITY_FRAC)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_chunks_threads_and_instruction_sets_change_no_bit_of_a_real_model(name, monkeypatch):
    """Design 1.1 once more, on shapes that a tiny model does not have."""
    path = need_model(name)
    plan = make_plan(EngineOptions(model=str(path)))
    ids = load_tokenizer(plan).encode(ESSAY.read_text(encoding="utf-8"))[:80]
    plan.checkpoint.close()

    def run(chunks, level=None, **options):
        if level is not None:
            monkeypatch.setenv("TIERCEL_ISA", level)
        reading = Reading(path, ids, **options)
        ends = np.cumsum(chunks)
        rows = [reading.read(ids[end - n : end]) for end, n in zip(ends, chunks, strict=True)]
        reading.close()
        return np.concatenate(rows)

    expected = run([64, 16])
    assert same_bits(run([1, 7, 2, 30, 1, 1, 8, 30], threads=1), expected)
    for level in _native.kernel_levels():
        assert same_bits(run([60, 20], level=level), expected), level


# Every format, in a tiny model.

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,  # K formats need whole groups of 256
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 160,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
IDS = np.random.default_rng(0).integers(0, CONFIG["vocab_size"], 75).tolist()
CHUNKS = [48, 1, 2, 7, 1, 16]
FLOATS = {Format.F32: "<f4", Format.F16: "<f2"}
# Bytes in a group at which d lies; how far random codes spread, in units of d; the offset that centres them, also in d,
# and its place. Of the K formats the codes' own 6-bit or 8-bit scales are in it.
CODES = {
    Format.Q4_0: (0, 4.6, None, None),
    Format.Q4_1: (0, 4.6, -7.5, 2),
    Format.Q5_0: (0, 9.2, None, None),
    Format.Q5_1: (0, 9.2, -15.5, 2),
    Format.Q8_0: (0, 74.0, None, None),
    Format.Q4_K: (0, 300.0, 7.5, 2),
    Format.Q5_K: (0, 600.0, 15.5, 2),
    Format.Q6_K: (208, 1370.0, None, None),
}


def random_matrix(rng, weight_format, shape):
    """Return a matrix's bytes: every code and every inner scale occurs, and products keep their size."""
    n, k = shape
    spread = 1 / math.sqrt(k)
    if weight_format is Format.MXFP4:
        groups = rng.integers(0, 256, (n * k // 32, 17), dtype=np.uint8)
        groups[:, 0] = 127 + round(math.log2(spread / 2.9)) + rng.integers(-1, 2, len(groups))
        return groups.reshape(-1)
    if weight_format is Format.NVFP4:
        groups = rng.integers(0, 256, (n * k // 32, 24), dtype=np.uint8)
        groups[:, :8] = (spread / 2.9 * rng.uniform(0.5, 1.5, (len(groups), 2))).astype("<f4").view(np.uint8)
        return groups.reshape(-1)
    if weight_format not in CODES:
        values = (rng.standard_normal(shape) * spread).astype(np.float32)
        if weight_format is Format.BF16:
            return (values.view(np.uint32) >> 16).astype("<u2").view(np.uint8).reshape(-1)
        return values.astype(FLOATS[weight_format]).view(np.uint8).reshape(-1)
    at, code_spread, offset, offset_at = CODES[weight_format]
    groups = rng.integers(0, 256, (n * k // weight_format.group, weight_format.group_bytes), dtype=np.uint8)
    d = spread / code_spread * rng.uniform(0.5, 1.5, (len(groups), 1))
    groups[:, at : at + 2] = d.astype("<f2").view(np.uint8)
    if offset_at is not None:
        groups[:, offset_at : offset_at + 2] = (d * offset).astype("<f2").view(np.uint8)
    return groups.reshape(-1)


def checkpoint(weight_format, seed=0):
    """Return a tiny model and its tensors: matrices in the format, vectors in float32."""
    rng = np.random.default_rng(seed)
    model = build_model(CONFIG)
    tensors = float_tensors(tiny_checkpoint(CONFIG))
    for name, shape in model.expected_weights().items():
        if len(shape) == 2:
            tensors[name] = Tensor(name, shape, weight_format, random_matrix(rng, weight_format, shape))
    return model, tensors


def expanded(tensors):
    return {name: tensor.float32() for name, tensor in tensors.items()}


def run_native(program, tensors, **options):
    # One thread: that the number changes nothing is shown in test_invariance, and two wait for each other.
    runner = native_runner(program, tensors, max_len_tokens=96, n_slots=1, n_threads=1, **options)
    try:
        return native_logits(runner, IDS, CHUNKS)
    finally:
        runner.close()


def run_reference(program, tensors, **options):
    executor = ReferenceExecutor(lower_and_fuse(program), expanded(tensors), max_tokens=len(IDS), **options)
    return executor.step([Chunk(0, IDS)])


# A sum in another order moves a value across the boundary between two codes now and then: of an int8 activation, or of
# a float16 key. The rest of the sequence then differs by a small part of what rounding costs.
LOGIT_TOLERANCE = {"float32": 1e-4, "float16": 1e-3, "int8": 0.15, "int8 KV": 0.05}


@pytest.mark.parametrize(
    ("weight_format", "kv_dtype"),
    [*((f, "float32") for f in Format), *((f, "float16") for f in (Format.F32, Format.Q8_0, Format.Q4_K))],
)
def test_packed_weights_of_every_format_give_the_references_logits(weight_format, kv_dtype):
    model, tensors = checkpoint(weight_format)
    program = model.record(tensors)
    got = run_native(program, tensors, kv_dtype=kv_dtype)
    expected = run_reference(program, tensors, kv_dtype=kv_dtype)
    error = np.abs(got - expected)
    assert expected.std() > 0.5
    assert error.max() <= LOGIT_TOLERANCE["int8" if weight_format.is_quantized else kv_dtype]
    if weight_format.is_quantized:
        unrounded = run_reference(model.record(tensors, compute_dtype=ComputeDtype.FLOAT32), tensors)
        assert error.mean() < 0.5 * np.abs(expected - unrounded).mean()
        # Before a first code differs, which may be in the third row.
        assert np.quantile(error[:8].max(axis=1), 0.1) <= LOGIT_TOLERANCE["float32"]


@pytest.mark.parametrize("weight_format", Format)
def test_weights_expanded_to_float32_are_the_float32_weights_bit_for_bit(weight_format):
    model, tensors = checkpoint(weight_format)
    as_floats = float_tensors(expanded(tensors))
    program = model.record(tensors, compute_dtype=ComputeDtype.FLOAT32)
    got = run_native(program, tensors, expand_to_f32=True)
    assert same_bits(got, run_native(model.record(as_floats), as_floats))


@pytest.mark.parametrize("weight_format", [Format.F32, Format.BF16, Format.Q8_0, Format.Q4_1, Format.Q6_K])
def test_rows_stored_in_another_order_are_read_in_theirs(weight_format):
    model, tensors = checkpoint(weight_format)
    name = "model.layers.0.self_attn.k_proj.weight"
    tensor = tensors[name]
    order = np.random.default_rng(1).permutation(tensor.shape[0])
    stored = np.empty_like(tensor.rows())
    stored[order] = tensor.rows()
    shuffled = Tensor(name, tensor.shape, weight_format, stored.reshape(-1), order)
    program = model.record(tensors)
    assert same_bits(run_native(program, tensors | {name: shuffled}), run_native(program, tensors))


@pytest.mark.parametrize("weight_format", [Format.Q8_0, Format.Q4_0])
@pytest.mark.parametrize("stored_format", [Format.F32, Format.F16, Format.BF16])
def test_quantising_while_packing_is_packing_what_quantize_writes(stored_format, weight_format):
    model, tensors = checkpoint(stored_format)
    names = [name for name, tensor in tensors.items() if len(tensor.shape) == 2]
    quantised = tensors | {
        n: Tensor(n, tensors[n].shape, weight_format, quantize(tensors[n].float32(), weight_format).reshape(-1))
        for n in names
    }
    program = model.record(quantised)  # asks for formats that the tensors below do not have
    assert same_bits(run_native(program, tensors), run_native(program, quantised))


def kl_of(exact, rounded):
    return divergence(log_softmax(exact.copy()), log_softmax(rounded.copy())).mean()


# Measured on this random model: 4.8e-4 and 0.063.
@pytest.mark.parametrize(("weight_format", "kl_max"), [(Format.Q8_0, 1e-3), (Format.Q4_0, 0.1)])
def test_quantising_a_float_checkpoint_costs_what_its_bits_say(weight_format, kl_max):
    model, tensors = checkpoint(Format.F32)
    exact = run_native(model.record(tensors), tensors)
    planned = {
        name: Tensor(name, t.shape, weight_format if len(t.shape) == 2 else t.format, t.data)
        for name, t in tensors.items()
    }
    kl = kl_of(exact, run_native(model.record(planned), tensors))
    assert 0.0 < kl < kl_max


def test_int8_keys_and_values_give_the_references_logits():
    model, tensors = checkpoint(Format.F32)
    program = model.record(tensors)
    error = np.abs(run_native(program, tensors, kv_dtype="int8") - run_reference(program, tensors, kv_dtype="int8"))
    assert error.max() <= LOGIT_TOLERANCE["int8 KV"]
    rounding = np.abs(run_reference(program, tensors, kv_dtype="int8") - run_reference(program, tensors))
    assert error.mean() < 0.1 * rounding.mean()


def test_float16_keys_and_values_cost_next_to_nothing():
    model, tensors = checkpoint(Format.F32)
    program = model.record(tensors)
    kl = kl_of(run_native(program, tensors), run_native(program, tensors, kv_dtype="float16"))
    assert 0.0 < kl < 1e-6
