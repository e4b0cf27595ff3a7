import numpy as np
import pytest

from tiercel.base.errors import ShapeError
from tiercel.ops import reference as ref


def seeded(*shape, seed=0, amp=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * amp).astype(np.float32)


def test_norm_of_a_row_has_the_root_mean_square_of_its_weight():
    x, w = seeded(3, 64, amp=7.0), np.full(64, 2.0, np.float32)
    y = ref.rms_norm(x, w, 0.0)
    assert np.allclose(np.sqrt(np.mean(y**2, axis=-1)), 2.0, rtol=1e-6)


def test_norm_of_zeros_is_zero_and_not_nan():
    assert not ref.rms_norm(np.zeros((1, 8), np.float32), np.ones(8, np.float32), 1e-6).any()


def test_rounded_activations_are_within_half_a_step():
    x = seeded(5, 96, amp=3.0)
    q, scale = ref.quantize_activations(x)
    assert q.dtype == np.int8
    assert scale.shape == (5, 3)
    error = np.abs(ref.dequantize_activations(q, scale) - x).reshape(5, 3, 32)
    assert np.all(error <= scale[..., None] * 0.5000001)


def test_the_largest_activation_of_a_group_becomes_127():
    x = seeded(4, 32)
    q, _ = ref.quantize_activations(x)
    assert np.all(np.abs(q).max(axis=-1) == 127)


def test_rounding_is_half_to_even():
    x = np.zeros((1, 32), np.float32)
    x[0, :5] = [127.0, 0.5, 1.5, 2.5, -0.5]
    q, scale = ref.quantize_activations(x)
    assert scale[0, 0] == 1.0
    assert q[0, :5].tolist() == [127, 0, 2, 2, 0]


def test_a_group_of_zeros_has_scale_zero():
    q, scale = ref.quantize_activations(np.zeros((2, 32), np.float32))
    assert not q.any()
    assert not scale.any()


def test_an_activation_that_is_not_finite_makes_its_product_nan():
    x = np.ones((2, 64), np.float32)
    x[0, 3] = np.inf
    y = ref.linear_q8(x, np.ones((4, 64), np.float32))
    assert np.isnan(y[0]).all()
    assert np.isfinite(y[1]).all()


def test_linear_on_rounded_activations_is_near_the_float_product():
    x, w = seeded(6, 128), seeded(10, 128, seed=1, amp=128**-0.5)
    assert np.abs(ref.linear_q8(x, w) - ref.linear(x, w)).max() < 0.03


def test_linear_of_no_rows_has_no_rows():
    assert ref.linear(seeded(0, 8), seeded(3, 8)).shape == (0, 3)


def test_an_id_outside_the_vocabulary_is_refused():
    with pytest.raises(ShapeError, match=r"ops.embed: got ids in 4\.\.9"):
        ref.embed(np.array([4, 9]), seeded(9, 2))


def test_gelu_and_silu_have_their_known_values():
    x = np.array([[1.0, -1.0, 2.0, 3.0]], np.float32)
    assert np.allclose(ref.gated(x, "silu"), [[2 * 0.7310586, 3 * -0.2689414]], rtol=1e-6)
    assert np.allclose(ref.gated(x, "gelu_tanh"), [[2 * 0.8411920, 3 * -0.1588080]], rtol=1e-6)


def test_silu_of_a_very_negative_gate_is_zero():
    assert ref.gated(np.array([[-1000.0, 5.0]], np.float32), "silu")[0, 0] == 0.0


def test_rotation_keeps_lengths_and_depends_on_distance_only():
    inv_freq = np.array([1.0, 0.1], np.float32)
    q, k = seeded(1, 1, 6), seeded(1, 1, 6, seed=1)

    def score(at_q, at_k):
        a = ref.rope(q, ref.rope_table(np.array([at_q]), inv_freq))
        b = ref.rope(k, ref.rope_table(np.array([at_k]), inv_freq))
        assert np.allclose(np.linalg.norm(a), np.linalg.norm(q), rtol=1e-6)
        assert np.array_equal(a[..., 4:], q[..., 4:])
        return float((a * b).sum())

    assert score(9, 5) == pytest.approx(score(14, 10), rel=1e-5)
    assert score(9, 5) != pytest.approx(score(9, 6), rel=1e-3)


def test_position_zero_is_not_rotated():
    x = seeded(1, 2, 8)
    assert np.array_equal(ref.rope(x, ref.rope_table(np.array([0]), seeded(4))), x)


def test_the_magnitude_scales_cosine_and_sine():
    inv_freq = np.array([0.5], np.float32)
    at = np.arange(4)
    assert np.allclose(ref.rope_table(at, inv_freq, 1.5), 1.5 * ref.rope_table(at, inv_freq), rtol=1e-6)


def naive_attention(q, k, v, start, scale, window, cap):
    y = np.zeros(q.shape)
    group = q.shape[1] // k.shape[1]
    for t in range(q.shape[0]):
        first = max(0, start + t - window + 1) if window else 0
        for h in range(q.shape[1]):
            s = k[first : start + t + 1, h // group].astype(np.float64) @ q[t, h] * scale
            s = cap * np.tanh(s / cap) if cap else s
            p = np.exp(s - s.max())
            y[t, h] = p @ v[first : start + t + 1, h // group] / p.sum()
    return y


@pytest.mark.parametrize(("start", "window", "cap"), [(0, 0, 0.0), (5, 0, 0.0), (5, 3, 0.0), (0, 1, 0.0), (2, 4, 1.5)])
def test_attention_equals_one_query_at_a_time(start, window, cap):
    q, k, v = seeded(4, 6, 8), seeded(start + 4, 2, 8, seed=1), seeded(start + 4, 2, 8, seed=2)
    got = ref.attention(q, k, v, start=start, scale=0.3, window=window, softcap=cap)
    assert np.allclose(got, naive_attention(q, k, v, start, 0.3, window, cap), atol=1e-6)


def test_a_window_of_one_returns_the_value_of_the_token_itself():
    q, k, v = seeded(3, 2, 4), seeded(3, 1, 4, seed=1), seeded(3, 1, 4, seed=2)
    got = ref.attention(q, k, v, start=0, scale=1.0, window=1)
    assert np.array_equal(got, np.repeat(v, 2, axis=1))


def test_attention_of_no_tokens_is_empty():
    assert ref.attention(seeded(0, 2, 4), seeded(3, 1, 4), seeded(3, 1, 4), start=3, scale=1.0).shape == (0, 2, 4)


def test_the_softcap_bounds_and_keeps_small_values():
    y = ref.softcap(np.array([-1e6, 1e-3, 1e6], np.float32), 30.0)
    assert y.tolist() == pytest.approx([-30.0, 1e-3, 30.0], rel=1e-6)


@pytest.mark.parametrize(
    "call",
    [
        lambda: ref.linear(seeded(2, 8), seeded(3, 7)),
        lambda: ref.linear(seeded(2, 8), seeded(3, 8), seeded(2)),
        lambda: ref.rms_norm(seeded(2, 8), seeded(7), 1e-5),
        lambda: ref.quantize_activations(seeded(2, 33)),
        lambda: ref.gated(seeded(2, 7), "silu"),
        lambda: ref.gated(seeded(2, 8), "relu"),
        lambda: ref.rope(seeded(2, 1, 4), seeded(2, 6)),
        lambda: ref.attention(seeded(2, 3, 4), seeded(2, 2, 4), seeded(2, 2, 4), start=0, scale=1.0),
        lambda: ref.attention(seeded(2, 2, 4), seeded(2, 2, 4), seeded(2, 2, 4), start=1, scale=1.0),
        lambda: ref.select_rows(seeded(2, 3), np.array([2])),
        lambda: ref.softcap(seeded(2), 0.0),
        lambda: ref.add(seeded(2), seeded(3)),
    ],
)
def test_operands_that_break_a_contract_are_refused(call):
    with pytest.raises(ShapeError, match=r"^ops\.\w+: got .* (is|are) needed$"):
        call()
