"""The native sampler against its definition: every token, rank and log-probability is the reference's, bit for bit."""

import math
import struct

import numpy as np
import pytest

from tiercel import _native
from tiercel.protocol.params import SamplingParams
from tiercel.sampling import reference
from tiercel.sampling.native import native_params

VOCAB_SIZES = (1, 2, 5, 63, 64, 65, 130, 700, 2900)


def native_sample(logits, params, history, n_prompt, seed, stop_ids=(), *, n_top=0, mask=None):
    return _native.sample_row(
        logits, native_params(params, seed, stop_ids), np.asarray(history, np.int32), n_prompt, n_top=n_top, mask=mask
    )


def test_tokens_that_are_named_are_told_of_in_their_order():
    rng = np.random.default_rng(5)
    for v in (2, 65, 2900):
        for temperature in (0.0, 1.0):
            logits = rng.normal(0, 3, v).astype(np.float32)
            logits[0] = -np.inf
            named = rng.permutation(v)[:100].tolist()
            params = SamplingParams(temperature=temperature, logprob_token_ids=named)
            for n_top in (len(named), len(named) + 3, 1, 0):
                expected = reference.sample(logits, params, [0, 1], 1, 7, n_top=n_top)
                assert_same(native_sample(logits, params, [0, 1], 1, 7, n_top=n_top), expected, n_top)
                assert expected.top_ids.tolist() == named[:n_top]


def random_mask(rng, v):
    """Words of all kinds: nothing, everything, some; bits behind the vocabulary say nothing."""
    words = rng.integers(0, 2**32, -(-v // 32), np.uint64).astype(np.uint32)
    words[rng.random(len(words)) < 0.4] = 0
    words[rng.random(len(words)) < 0.3] = 0xFFFFFFFF
    return words


def bits(x):
    return "nan" if math.isnan(x) else struct.pack("f", x)


def assert_same(native, expected, n_top):
    token, logprob, rank, top_ids, top_logprobs = native
    assert (token, bits(logprob), rank) == (expected.token, bits(expected.logprob), expected.rank)
    n = len(expected.top_ids)
    assert top_ids == [*expected.top_ids.tolist(), *[-1] * (n_top - n)]
    assert [bits(x) for x in top_logprobs] == [*map(bits, expected.top_logprobs.tolist()), *["nan"] * (n_top - n)]


def random_logits(rng, v):
    kind = rng.integers(9)
    x = rng.normal(0, rng.choice([0.1, 1.0, 3.0, 8.0]), v).astype(np.float32)
    if kind == 0:
        x = np.round(x)  # many exact ties
    elif kind == 1:
        x[:] = x[0]  # nothing but ties
    elif kind == 2:
        x[rng.random(v) < 0.5] = -np.inf
    elif kind == 3:
        x *= np.float32(10.0) ** rng.integers(-40, 38)  # denormal to nearly infinite
    elif kind == 4:
        x[rng.integers(v)] += 20  # one likely token
    elif kind == 5:
        x = np.sort(x)[:: rng.choice([-1, 1])].copy()
    elif kind == 6 and rng.random() < 0.5:
        x[rng.integers(v)] = rng.choice([np.nan, np.inf, -np.inf])
    return x


def random_case(rng):
    v = int(rng.choice(VOCAB_SIZES))

    def maybe(chance, value, otherwise):
        return value() if rng.random() < chance else otherwise

    def some_ids(n_max):
        return [int(i) for i in rng.integers(0, v + 3, rng.integers(1, n_max))]

    n_prompt, n_output = (int(n) for n in rng.integers(0, 30, 2))
    # Few distinct ids, so that counts grow and bad words' prefixes occur.
    history = rng.integers(0, min(v, int(rng.choice([3, 8, 3000]))), n_prompt + n_output)
    greedy = rng.random() < 0.15
    params = SamplingParams(
        temperature=0.0 if greedy else float(rng.choice([0.01, 0.5, 0.7, 1.0, 1.3, 2.0])),
        top_k=maybe(0.4, lambda: int(rng.choice([1, 2, 3, 20, 400, v, v + 1])), 0),
        top_p=maybe(
            0.5, lambda: float(rng.choice([1e-9, 0.1, 0.5, 0.9, 0.95, 0.999999, 1 - 2**-53, rng.random()])), 1.0
        ),
        min_p=maybe(0.3, lambda: float(rng.choice([1e-300, 0.01, 0.2, 1.0, rng.random()])), 0.0),
        presence_penalty=maybe(0.3, lambda: float(rng.uniform(-2, 2)), 0.0),
        frequency_penalty=maybe(0.3, lambda: float(rng.uniform(-2, 2)), 0.0),
        repetition_penalty=maybe(0.3, lambda: float(rng.choice([0.5, 1.1, 3.0, 1e-30, 1e300])), 1.0),
        logit_bias=maybe(0.3, lambda: {i: float(rng.uniform(-100, 100)) for i in some_ids(6)}, None),
        allowed_token_ids=maybe(0.2, lambda: some_ids(40), None),
        bad_words_token_ids=maybe(0.3, lambda: [some_ids(4) for _ in range(4)], ()),
        min_tokens=maybe(0.4, lambda: int(rng.integers(0, 40)), 0),
        max_tokens=None,
    )
    stop_ids = some_ids(5)
    return random_logits(rng, v), params, history, n_prompt, int(rng.integers(-(2**63), 2**63)), stop_ids


@pytest.mark.parametrize("chunk", range(8))
def test_native_equals_reference_on_random_rows(chunk):
    rng = np.random.default_rng(1000 + chunk)
    n_failed_rows = 0
    for _ in range(500):
        case = random_case(rng)
        n_top = int(rng.choice([0, 1, 5, 70]))
        expected = reference.sample(*case, n_top=n_top)
        assert_same(native_sample(*case, n_top=n_top), expected, n_top)
        without_logprobs = _native.sample_row(
            case[0], native_params(case[1], case[4], case[5]), case[2].astype(np.int32), case[3]
        )
        assert without_logprobs[0] == expected.token
        n_failed_rows += expected.token < 0
    assert n_failed_rows < 100  # the cases are mostly about tokens


@pytest.mark.parametrize("chunk", range(3))
def test_native_equals_reference_under_a_mask(chunk):
    rng = np.random.default_rng(3000 + chunk)
    n_chosen = 0
    for _ in range(400):
        case = random_case(rng)
        mask = random_mask(rng, len(case[0]))
        n_top = int(rng.choice([0, 5]))
        expected = reference.sample(*case, n_top=n_top, mask=mask)
        assert_same(native_sample(*case, n_top=n_top, mask=mask), expected, n_top)
        if expected.token >= 0:
            assert mask[expected.token // 32] >> np.uint32(expected.token % 32) & 1
            n_chosen += 1
    assert n_chosen > 150


def test_a_mask_that_leaves_stop_tokens_only_goes_before_min_tokens():
    logits = np.arange(40, dtype=np.float32)
    mask = np.array([1 << 7, 0], np.uint32)
    params = SamplingParams(min_tokens=5, max_tokens=9)
    assert native_sample(logits, params, [1], 1, 3, [7], mask=mask)[0] == 7
    assert native_sample(logits, params, [1], 1, 3, [7], mask=np.zeros(2, np.uint32))[0] == reference.NOTHING_ALLOWED


def test_a_mask_of_the_wrong_size_is_refused():
    with pytest.raises(ValueError, match="mask"):
        native_sample(np.zeros(40, np.float32), SamplingParams(), [1], 1, 3, mask=np.zeros(1, np.uint32))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("top_p", [0.5, 0.99, 1.0])
def test_native_equals_reference_on_a_whole_vocabulary(temperature, top_p):
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 3, 49152).astype(np.float32)
    params = SamplingParams(temperature=temperature, top_p=top_p)
    for seed in range(10):
        expected = reference.sample(logits, params, [1, 2, 3], 2, seed, n_top=20)
        assert_same(native_sample(logits, params, [1, 2, 3], 2, seed, n_top=20), expected, 20)


def test_native_scores_equal_the_reference():
    rng = np.random.default_rng(11)
    for _ in range(300):
        logits = random_logits(rng, int(rng.choice(VOCAB_SIZES)))
        token, n_top = int(rng.integers(len(logits))), int(rng.choice([0, 3, 100]))
        assert_same(_native.score_row(logits, token, n_top=n_top), reference.score(logits, token, n_top=n_top), n_top)


def test_every_kernel_level_gives_the_same_token():
    rng = np.random.default_rng(2)
    logits = rng.normal(0, 2, 1000).astype(np.float32)
    params = native_params(SamplingParams(top_p=0.9), 3, ())
    history, outcomes = np.arange(5, dtype=np.int32), []
    for level in range(64):
        try:
            outcomes.append(_native.sample_row(logits, params, history, 2, n_top=4, level=level))
        except ValueError:
            break
    assert outcomes
    assert all(outcome == outcomes[0] for outcome in outcomes)


def test_min_p_falls_on_the_same_side_where_its_logarithm_lies_between_two_floats():
    rng = np.random.default_rng(4)
    for _ in range(100):
        min_p = float(rng.uniform(0.3, 1.0))
        nearest = np.float32(math.log(min_p))
        logits = np.array([0, nearest, np.nextafter(nearest, np.float32(-1)), np.nextafter(nearest, np.float32(0))])
        for seed in range(12):
            case = (logits, SamplingParams(min_p=min_p), [], 0, seed)
            assert native_sample(*case)[0] == reference.sample(*case).token


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63)])
def test_a_seed_of_any_sign_means_the_same_in_both(seed):
    logits = np.zeros(500, np.float32)
    got = native_sample(logits, SamplingParams(), [], 0, seed)[0]
    assert got == reference.sample(logits, SamplingParams(), [], 0, seed).token


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": float("nan")},
        {"temperature": -1.0},
        {"temperature": 1e-60},
        {"top_p": 0.0},
        {"top_k": -1},
        {"min_p": 1.5},
        {"presence_penalty": float("inf")},
        {"repetition_penalty": 0.0},
        {"min_tokens": -1},
        {"logit_bias": [(1, float("nan"))]},
        {"bad_words": [[]]},
    ],
    ids=str,
)
def test_native_parameters_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        _native.make_sampler_params(**wrong)


# Chi-square's 1 - 1e-4 quantile (Wilson, Hilferty 1931); seeds are fixed, so a test passes always or never.
def chi_square_limit(freedom):
    return freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3


def chi_square(observed, expected):
    held = expected > 0
    assert not observed[~held].any()
    return float((((observed - expected) ** 2)[held] / expected[held]).sum()), int(held.sum()) - 1


SETTINGS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1, "temperature": 1.5},
    {"top_k": 9, "top_p": 0.9, "repetition_penalty": 1.3, "logit_bias": {3: 1.0}},
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_draws_follow_the_distribution_that_is_left(setting):
    """Half of the draws vary the seed and half the position, as a request's own draws do."""
    logits = np.random.default_rng(9).normal(0, 1.5, 12).astype(np.float32)
    params, history = SamplingParams(**setting), [2, 5, 5]
    kept = reference.keep_likely(
        reference.tempered(reference.edit(logits, params, np.array(history), 3, ()), params.temperature), params
    )
    p = np.exp(kept.astype(np.float64))
    n = 10_000
    counts = np.zeros(12)
    for seed in range(n):
        counts[native_sample(logits, params, history, 3, seed)[0]] += 1
    native, tokens = native_params(params, 77, ()), np.array([2, 5] * n, np.int32)
    for position in range(3, n + 3):
        counts[_native.sample_row(logits, native, tokens[:position], position)[0]] += 1
    statistic, freedom = chi_square(counts, p / p.sum() * 2 * n)
    assert statistic < chi_square_limit(freedom)


def test_draws_at_neighbouring_positions_are_independent():
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    p = np.exp(logits.astype(np.float64))
    pairs = np.zeros((4, 4))
    for seed in range(6000):
        first = native_sample(logits, SamplingParams(), [0], 1, seed)[0]
        second = native_sample(logits, SamplingParams(), [0, 1], 1, seed)[0]
        pairs[first, second] += 1
    statistic, freedom = chi_square(pairs.ravel(), np.outer(p, p).ravel() / p.sum() ** 2 * pairs.sum())
    assert statistic < chi_square_limit(freedom)


def test_draws_of_neighbouring_seeds_are_independent():
    """`n` outputs of one request use seed, seed + 1 and so on."""
    logits = np.zeros(4, np.float32)
    pairs = np.zeros((4, 4))
    for position in range(6000):
        tokens = np.zeros(position, np.int32)
        first, second = (
            _native.sample_row(logits, native_params(SamplingParams(), s, ()), tokens, position)[0] for s in (5, 6)
        )
        pairs[first, second] += 1
    statistic, freedom = chi_square(pairs.ravel(), np.full(16, pairs.sum() / 16))
    assert statistic < chi_square_limit(freedom)
