"""Attention over pages, and what puts keys and values there, against their definitions, at every level."""

import itertools

import numpy as np
import pytest

from tiercel import _native
from tiercel.ops import reference
from tiercel.ops.costs import kv_head_bytes
from tiercel.ops.reference import TOLERANCE

LEVELS = _native.kernel_levels()
CASES = [  # H, K, D, page_tokens, pool, window, softcap
    (9, 3, 64, 16, "float16", 0, 0.0),
    (4, 1, 24, 16, "float32", 37, 0.0),
    (8, 8, 80, 32, "float16", 0, 20.0),
    (4, 2, 128, 48, "float32", 0, 0.0),
    (4, 2, 256, 16, "float16", 300, 50.0),
    (9, 3, 64, 16, "int8", 0, 0.0),
    (4, 1, 24, 32, "int8", 37, 20.0),
    (4, 1, 256, 16, "int8", 200, 0.0),  # four scales a key
    (4, 2, 80, 16, "int8", 0, 0.0),
]


class Sequences:
    """Some sequences' q, k and v, and a pool of shuffled pages that the native kernels fill with them, step by step."""

    def __init__(self, case, lengths, level, n_threads, sinks=None):
        self.sinks = sinks
        self.H, self.K, self.D, self.page_tokens, self.kv_dtype, self.window, self.softcap = case
        self.level, self.n_threads, self.lengths = level, n_threads, lengths
        rng = np.random.default_rng(5)
        self.qkv = [rng.standard_normal((n, self.H + 2 * self.K, self.D)).astype(np.float32) for n in lengths]
        n_pages = max(-(-n // self.page_tokens) for n in lengths)
        self.page_table = rng.permutation(len(lengths) * n_pages).astype(np.int32).reshape(len(lengths), n_pages)
        page_bytes = self.K * self.page_tokens * kv_head_bytes(self.kv_dtype, self.D)
        self.pool = np.full(self.page_table.size * page_bytes, 0xFF, np.uint8)  # NaN in every type that has it
        self.done = [0] * len(lengths)

    def step(self, *pieces):
        """Compute the next n rows of sequence s for each (s, n); returns the outputs by piece."""
        slots = np.array([s for s, _ in pieces], np.int32)
        start = np.array([self.done[s] for s, _ in pieces], np.int32)
        rows = np.array([0, *itertools.accumulate(n for _, n in pieces)], np.int32)
        parts = [self.qkv[s][self.done[s] : self.done[s] + n] for s, n in pieces]
        qkv = np.concatenate(parts).reshape(rows[-1], -1).copy()
        pages = {"page_tokens": self.page_tokens, "kv_dtype": self.kv_dtype, "n_heads": self.H, "n_kv_heads": self.K}
        nothing = np.zeros((0, 0), np.float32)
        at = (self.level, self.n_threads, slots, start, rows, self.page_table)
        _native.rope_kv(*at, nothing, nothing, eps=0.0, qkv=qkv, pool=self.pool, **pages)
        q = np.ascontiguousarray(qkv[:, : self.H * self.D])
        y = np.full_like(q, np.nan)
        limits = {"scale": self.D**-0.5, "window": self.window, "softcap": self.softcap}
        sinks = np.zeros(0, np.float32) if self.sinks is None else self.sinks
        _native.attention(*at, q, **pages, **limits, sinks=sinks, pool=self.pool, y=y)
        for s, n in pieces:
            self.done[s] += n
        return [y[a:b].reshape(-1, self.H, self.D) for a, b in itertools.pairwise(rows)]

    def expected(self, s, start, n):
        q, k, v = np.split(self.qkv[s], [self.H, self.H + self.K], axis=1)
        k, v = reference.as_stored(k, v, self.kv_dtype)
        limits = {"scale": self.D**-0.5, "window": self.window, "softcap": self.softcap}
        return reference.attention(q[start : start + n], k, v, start=start, sinks=self.sinks, **limits)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_attention_of_a_mixed_step_agrees_with_its_definition(level, case):
    tolerance = TOLERANCE["attention_int8" if "int8" in case else "attention"]
    sequences = Sequences(case, [290, 1, 70, 33], level, n_threads=2)
    sequences.step((0, 250), (2, 3))
    steps = [((0, 1), (1, 1), (2, 40), (3, 33)), ((2, 27), (0, 39))]
    for pieces in steps:
        starts = [sequences.done[s] for s, _ in pieces]
        for (s, n), start, got in zip(pieces, starts, sequences.step(*pieces), strict=True):
            np.testing.assert_allclose(got, sequences.expected(s, start, n), rtol=tolerance.rtol, atol=tolerance.atol)


@pytest.mark.parametrize("case", [CASES[0], *(case for case in CASES if "int8" in case)], ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_a_sequence_decoded_by_tokens_has_the_bits_of_one_prefill(level, case):
    whole = Sequences(case, [300], LEVELS[-1], n_threads=1).step((0, 300))[0]
    sequences = Sequences(case, [300], level, n_threads=3)
    parts = [sequences.step((0, n))[0] for n in (240, *[1] * 20, 7, 33)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[2], CASES[5]], ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_a_sink_takes_its_weight_and_gives_no_value(level, case):
    tolerance = TOLERANCE["attention_int8" if "int8" in case else "attention"]
    sinks = np.linspace(-3.0, 90.0, case[0]).astype(np.float32)  # from less than any score to far more
    sequences = Sequences(case, [290, 40], level, n_threads=2, sinks=sinks)
    sequences.step((0, 270))
    for (s, n), start, got in zip(((0, 20), (1, 40)), (270, 0), sequences.step((0, 20), (1, 40)), strict=True):
        np.testing.assert_allclose(got, sequences.expected(s, start, n), rtol=tolerance.rtol, atol=tolerance.atol)
        assert np.abs(got[:, -1]).max() < 1e-20  # a sink of 90 leaves its head nothing


@pytest.mark.parametrize("level", LEVELS)
def test_with_sinks_a_sequence_decoded_by_tokens_has_the_bits_of_one_prefill(level):
    sinks = np.linspace(-3.0, 5.0, CASES[0][0]).astype(np.float32)
    whole = Sequences(CASES[0], [300], LEVELS[-1], n_threads=1, sinks=sinks).step((0, 300))[0]
    sequences = Sequences(CASES[0], [300], level, n_threads=3, sinks=sinks)
    parts = [sequences.step((0, n))[0] for n in (240, *[1] * 20, 7, 33)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def keys_and_values(pool, n_kv_heads, head_dim, kv_dtype):
    """The pool as k and v [page, kv head, token, D]; pages of one run."""
    if kv_dtype == "int8":
        runs = pool.reshape(-1, n_kv_heads, 16 * kv_head_bytes(kv_dtype, head_dim))
        scales = runs[..., 32 * head_dim :].copy().view(np.float16).astype(np.float32).reshape(*runs.shape[:2], -1, 16)
        key_scales = np.repeat(scales[:, :, :-1].swapaxes(2, 3), 64, axis=3)[..., :head_dim]
        k = runs[..., : 16 * head_dim].reshape(-1, n_kv_heads, head_dim // 2, 16, 2)
        v = runs[..., 16 * head_dim : 32 * head_dim].reshape(-1, n_kv_heads, 8, head_dim, 2)
        k = k.transpose(0, 1, 3, 2, 4).reshape(-1, n_kv_heads, 16, head_dim).view(np.int8)
        v = v.transpose(0, 1, 2, 4, 3).reshape(-1, n_kv_heads, 16, head_dim).view(np.int8)
        return k * key_scales, v * scales[:, :, -1, :, None]
    dtype = np.dtype(kv_dtype)
    runs = pool.view(dtype).reshape(-1, n_kv_heads, 2, 16 * head_dim)
    k = runs[:, :, 0].reshape(-1, n_kv_heads, head_dim, 16).swapaxes(2, 3)
    return k, runs[:, :, 1].reshape(-1, n_kv_heads, 16, head_dim)


@pytest.mark.parametrize(("D", "d2"), [(24, 12), (24, 5), (80, 40)])
@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("level", LEVELS)
def test_rope_kv_norms_rotates_and_stores(level, kv_dtype, D, d2):
    H, K, n = 4, 2, 21
    rng = np.random.default_rng(6)
    qkv = rng.standard_normal((n, H + 2 * K, D)).astype(np.float32)
    norms = rng.standard_normal((2, D)).astype(np.float32)
    inv_freq = rng.random(d2).astype(np.float32)
    cos_sin = reference.rope_table(np.arange(n), inv_freq)
    page_table = np.array([[2, 0]], np.int32)
    pool = np.zeros(3 * K * 16 * kv_head_bytes(kv_dtype, D), np.uint8)
    rows = qkv.reshape(n, -1).copy()
    slot, start, seq_rows = np.zeros(1, np.int32), np.zeros(1, np.int32), np.array([0, n], np.int32)
    pages = {"page_tokens": 16, "kv_dtype": kv_dtype, "n_heads": H, "n_kv_heads": K}
    _native.rope_kv(level, 2, slot, start, seq_rows, page_table, cos_sin, norms, eps=1e-6, qkv=rows, pool=pool, **pages)

    q = reference.rope(reference.rms_norm(qkv[:, :H], norms[0], 1e-6), cos_sin)
    k = reference.rope(reference.rms_norm(qkv[:, H : H + K], norms[1], 1e-6), cos_sin)
    tolerance = {
        "rtol": TOLERANCE["rope"].rtol,
        "atol": 4 * TOLERANCE["rope"].atol,
    }  # a norm, then a rotation
    np.testing.assert_allclose(rows.reshape(n, -1, D)[:, :H], q, **tolerance)
    if kv_dtype == "float16":
        tolerance = {"rtol": 2.0**-10, "atol": 1e-6}
    if kv_dtype == "int8":  # a byte may be off by one where x / scale is next to a half
        tolerance = {"rtol": 0.0, "atol": 1.01 / 127 * np.abs(k).max()}
    k, v = reference.as_stored(k, qkv[:, H + K :], kv_dtype)
    stored_k, stored_v = keys_and_values(pool, K, D, kv_dtype)
    for t in range(n):
        page, lane = page_table[0, t // 16], t % 16
        np.testing.assert_allclose(stored_k[page, :, lane], k[t], **tolerance)
        np.testing.assert_array_equal(stored_v[page, :, lane], v[t])
    assert not stored_v[1].any()  # the page of no sequence


def test_a_page_outside_the_pool_is_refused():
    sequences = Sequences(CASES[0], [40], LEVELS[0], n_threads=1)
    sequences.page_table[0, 1] = 99
    with pytest.raises(ValueError, match="page 99"):
        sequences.step((0, 20))
