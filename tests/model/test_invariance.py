"""Design 1.1, bitwise: a sequence's logits depend on its tokens and nothing else.

Each test computes the same sequences in two ways on tiny models with every branch on, and compares the bits.
"""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import FIXTURES
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercel import _native
from tiercel.models.registry import build_model
from tiercel.protocol.params import SamplingParams
from tiercel.protocol.step import StepPlan
from tiercel.quant.formats import Format
from tiercel.testing.fill import tiny_checkpoint
from tiercel.testing.native import float_tensors, native_logits, native_runner

MODELS = [
    "llama_odd_heads_9_3",
    "mistral_window_8",
    "qwen2_yarn_window_tied",
    "gemma3_pattern_3_softcap",
    "qwen3_moe",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "gpt_oss",
    "lfm2",
]
FORMATS = [Format.F32, Format.Q8_0, Format.Q4_0]
KV_DTYPES = ("float32", "float16", "int8")
CASES = [(m, f, kv) for m in MODELS for f in FORMATS for kv in KV_DTYPES if (f, kv) != (Format.F32, "float32")]
# Latent rows have no int8 form.
LATENT = ["deepseek_v3_experts", "deepseek_v3_halves_plain_q", "kimi_linear", "kimi_k3", "ling_clamped"]
CASES += [(m, f, kv) for m in LATENT for f, kv in ((Format.Q8_0, "float16"), (Format.F32, "float32"))]
# No keys and values at all.
CASES += [("mamba2", f, kv) for f, kv in ((Format.Q8_0, "float16"), (Format.F32, "float32"))]
CASES += [("mamba2_odd_sizes_limits_tied", Format.F32, "float32")]
VOCAB = 128
# Long enough for several 256-token splits of attention, and for chunks that use the panel kernels.
LONG = 300


def _available(name):
    found = sorted(path for folder in (FIXTURES, FIXTURES.parent) for path in folder.glob(name[:5] + "*.json"))
    exact = [path for path in found if path.stem == name]
    return (exact or found)[0]


@pytest.fixture(scope="module", params=CASES, ids=lambda c: f"{c[0]}-{c[1]}-{c[2]}")
def tiny(request):
    name, weight_format, kv_dtype = request.param
    config = json.loads(_available(name).read_text())["config"] | {"max_position_embeddings": 512}
    config.pop("model_max_length", None)  # the same field's other name
    model = build_model(config)
    weights = tiny_checkpoint(config)

    def planned(w):
        fits = w.ndim == 2 and w.shape[1] % 32 == 0
        return SimpleNamespace(shape=w.shape, format=weight_format if fits else Format.F32)

    program = model.record({n: planned(w) for n, w in weights.items()})
    made = []

    def make(**options):
        defaults = {"kv_dtype": kv_dtype, "max_len_tokens": 400, "max_step_tokens": 512}
        made.append(native_runner(program, float_tensors(weights), **(defaults | options)))
        return made[-1]

    yield SimpleNamespace(make=make, runner=make())
    for runner in made:
        runner.close()


def tokens(n, seed):
    return np.random.default_rng(seed).integers(0, VOCAB, n).tolist()


def same_bits(a, b):
    return a.shape == b.shape and np.array_equal(a.view(np.uint32), b.view(np.uint32))


def chunked(n, cuts):
    ends = [*sorted({c % n for c in cuts} - {0}), n]
    return [b - a for a, b in zip([0, *ends], ends, strict=False)]


def test_ragged_chunks_give_the_bits_of_one_prefill(tiny):
    ids = tokens(LONG, 1)
    whole = native_logits(tiny.runner, ids, [LONG])
    assert same_bits(native_logits(tiny.runner, ids, chunked(LONG, [1, 3, 17, 64, 129, 256, 257, 290])), whole)


def test_token_by_token_gives_the_bits_of_one_prefill(tiny):
    ids = tokens(70, 2)
    assert same_bits(native_logits(tiny.runner, ids, [1] * 70), native_logits(tiny.runner, ids, [70]))


def test_rows_that_need_no_logits_change_no_bit_of_those_that_do(tiny):
    """One step with a sequence that samples, one in mid-prompt, one that scores; then the one in mid-prompt goes on."""
    lengths = [40, 60, 21]
    sequences = [tokens(n, 6 + i) for i, n in enumerate(lengths)]
    alone = [native_logits(tiny.runner, ids, [len(ids)]) for ids in sequences]
    runner = tiny.make()
    for slot, ids in enumerate(sequences):
        runner.admit(slot, ids, len(ids), SamplingParams(temperature=0.0), 0, ())
        runner.set_pages(slot, 0, list(range(4 * slot, 4 * slot + 4)))
    samples, scores = np.array([True, False, False]), np.array([False, False, True])
    start, count = np.array([0, 0, 0], np.int32), np.array([40, 57, 21], np.int32)
    runner.submit(StepPlan(0, np.arange(3, dtype=np.int32), start, count, samples, scores, n_logprobs=None))
    runner.collect()
    assert same_bits(runner.last_logits(22), np.concatenate([alone[0][-1:], alone[2]]))
    one, last = np.array([1], np.int32), np.array([True])
    at, left = np.array([57], np.int32), np.array([3], np.int32)
    runner.submit(StepPlan(1, one, at, left, last, ~last, n_logprobs=None))
    runner.collect()
    assert same_bits(runner.last_logits(1), alone[1][-1:])


def test_page_ids_do_not_matter(tiny):
    ids = tokens(LONG, 3)
    n_pages = -(-LONG // 16)
    pages = np.random.default_rng(0).permutation(tiny.runner.limits.n_pages)[:n_pages].tolist()
    assert same_bits(native_logits(tiny.runner, ids, [LONG], pages=pages), native_logits(tiny.runner, ids, [LONG]))


def test_one_and_three_threads_give_the_bits_of_two(tiny):
    ids = tokens(LONG, 4)
    cuts = chunked(LONG, [5, 200, 201])
    expected = native_logits(tiny.runner, ids, cuts)
    for n_threads in (1, 3):
        assert same_bits(native_logits(tiny.make(n_threads=n_threads), ids, cuts), expected)


def test_every_instruction_set_gives_the_same_bits(tiny):
    ids = tokens(90, 5)
    cuts = [40, 1, 1, 8, 40]
    levels = _native.kernel_levels()
    expected = native_logits(tiny.make(level=levels[0]), ids, cuts)
    for level in levels[1:]:
        assert same_bits(native_logits(tiny.make(level=level), ids, cuts), expected)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=2, max_size=4),
    steps=st.lists(st.lists(st.integers(0, 40), min_size=4, max_size=4), min_size=1, max_size=6),
    seed=st.integers(0, 99),
)
def test_batched_gives_the_bits_of_alone(tiny, lengths, steps, seed):
    runner = tiny.runner
    sequences = [tokens(n, seed * 10 + i) for i, n in enumerate(lengths)]
    alone = [native_logits(runner, ids, [len(ids)]) for ids in sequences]
    together = run_together(runner, sequences, steps)
    for expected, got in zip(alone, together, strict=True):
        assert same_bits(got, expected)


def run_together(runner, sequences, steps):
    """Compute all sequences at once: in step k, sequence i takes up to steps[k][i] tokens; then all take the rest."""
    per_slot = runner.limits.n_pages // runner.limits.n_slots
    for slot, ids in enumerate(sequences):
        runner.admit(slot, ids, len(ids), SamplingParams(temperature=0.0), 0, ())
        runner.set_pages(slot, 0, list(range(slot * per_slot, slot * per_slot + -(-len(ids) // 16))))
    done = [0] * len(sequences)
    logits = [[] for _ in sequences]
    for step_id, counts in enumerate([*steps, [10**6] * 4]):
        todo = [min(c, len(ids) - d) for c, ids, d in zip(counts, sequences, done, strict=False)]
        active = [i for i, n in enumerate(todo) if n > 0]
        if not active:
            continue
        columns = [np.array(v, np.int32) for v in (active, [done[i] for i in active], [todo[i] for i in active])]
        flags = [np.full(len(active), v) for v in (False, True)]
        runner.submit(StepPlan(step_id, *columns, seq_samples=flags[0], seq_scores=flags[1], n_logprobs=None))
        runner.collect()
        rows = runner.last_logits(sum(todo))
        for i in active:
            logits[i].append(rows[: todo[i]])
            rows = rows[todo[i] :]
            done[i] += todo[i]
    return [np.concatenate(parts) for parts in logits]


def test_what_earlier_sequences_left_in_the_pages_does_not_matter(tiny):
    runner = tiny.make(n_slots=1)
    ids = tokens(LONG, 6)
    fresh = native_logits(runner, ids, [LONG])
    native_logits(runner, tokens(390, 7), [390])
    assert same_bits(native_logits(runner, ids, [LONG]), fresh)
