"""The definition itself, on rows small enough to see the answer."""

import math

import numpy as np
import pytest

from tiercel.protocol.params import SamplingParams
from tiercel.sampling import arithmetic, philox, reference

GREEDY = {"temperature": 0.0}
NINF = -np.inf


def row(*values):
    return np.array(values, np.float32)


def greedy(logits, history=(), n_prompt=0, stop_ids=(), **params):
    return reference.sample(logits, SamplingParams(**GREEDY, **params), list(history), n_prompt, 0, stop_ids).token


def kept(z, **params):
    return np.flatnonzero(reference.keep_likely(row(*z), SamplingParams(**params)) > NINF).tolist()


def edited(logits, history, n_prompt, **params):
    return reference.edit(logits, SamplingParams(**params), np.array(history, np.int64), n_prompt, ()).tolist()


def test_greedy_takes_the_first_of_equal_largest():
    assert greedy(row(1, 3, 2, 3)) == 1


def test_greedy_heeds_bias_allowed_ids_and_penalties():
    assert greedy(row(1, 3, 2), logit_bias={0: 5.0}) == 0
    assert greedy(row(1, 3, 2), allowed_token_ids=[0, 2]) == 2
    assert greedy(row(1, 3, 2), allowed_token_ids=[0, 2], logit_bias={1: 100.0}) == 2
    assert greedy(row(1, 3, 2), history=[1], repetition_penalty=2.0) == 2


def test_min_tokens_forbids_stop_ids_until_enough_are_generated():
    assert greedy(row(1, 3, 2), [9, 0], n_prompt=1, stop_ids=[1], min_tokens=2) == 2
    assert greedy(row(1, 3, 2), [9, 0, 0], n_prompt=1, stop_ids=[1], min_tokens=2) == 1


def test_min_tokens_yields_where_only_stop_ids_are_allowed():
    assert greedy(row(1, 3, 2), stop_ids=[1], min_tokens=2, allowed_token_ids=[1]) == 1


def test_contradicting_constraints_answer_nothing_allowed():
    got = reference.sample(
        row(1, 2), SamplingParams(allowed_token_ids=[1], bad_words_token_ids=[[1]]), [], 0, 0, n_top=1
    )
    assert (got.token, got.rank, len(got.top_ids)) == (reference.NOTHING_ALLOWED, 0, 0)
    assert math.isnan(got.logprob)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_logits_answer_so_even_at_a_token_that_is_not_allowed(bad):
    assert greedy(row(1, 3, bad), allowed_token_ids=[0]) == reference.BAD_LOGITS


def test_a_bad_words_last_token_is_forbidden_only_after_its_beginning_in_the_output():
    words = {"bad_words_token_ids": [[5, 6, 1]]}
    assert greedy(row(1, 3, 2), [5, 6], n_prompt=0, **words) == 2
    assert greedy(row(1, 3, 2), [5, 6], n_prompt=1, **words) == 1  # the prompt's part does not count
    assert greedy(row(1, 3, 2), [6, 5], n_prompt=0, **words) == 1
    assert greedy(row(1, 3, 2), bad_words_token_ids=[[1]]) == 2


def test_repetition_divides_positive_and_multiplies_negative_logits_of_prompt_and_output():
    assert edited(row(4, -4, 4, 4), [0, 1, 1, 2], 3, repetition_penalty=2.0) == [2, -8, 2, 4]


def test_presence_and_frequency_count_the_output_only():
    assert edited(row(4, 4, 4), [0, 1, 1, 2], 1, presence_penalty=0.5, frequency_penalty=1.0) == [4, 1.5, 2.5]


def test_an_edit_never_forbids_a_token_nor_makes_one_infinite():
    x = edited(row(3e38, -3e38, 0, NINF), [0, 1, 2, 3], 4, repetition_penalty=1e-300)
    assert x == [np.finfo(np.float32).max, pytest.approx(0), 0, NINF]
    assert edited(row(1, -3e38), [1], 1, repetition_penalty=1e300)[1] == -np.finfo(np.float32).max


def test_ids_outside_the_vocabulary_change_nothing():
    x = edited(row(1, 2), [-1, 2, 7], 0, repetition_penalty=2.0, presence_penalty=1.0, logit_bias={2: 1.0})
    assert x == [1, 2]


def test_top_k_keeps_ties_at_its_threshold():
    assert kept([0, -1, -1, -2], top_k=2) == [0, 1, 2]
    assert kept([0, -1, -1, -2], top_k=9) == [0, 1, 2, 3]


def test_min_p_keeps_what_has_that_share_of_the_likeliest():
    z = [0, math.log(0.5) + 1e-6, math.log(0.5) - 1e-6]
    assert kept(z, min_p=0.5) == [0, 1]
    assert kept([0, 0, -1e-6], min_p=1.0) == [0, 1]


def test_top_p_keeps_the_shortest_run_that_reaches_it():
    z = np.log([0.5, 0.25, 0.125, 0.125]) - math.log(0.5)
    assert kept(z, top_p=0.5) == [0]
    assert kept(z, top_p=0.51) == [0, 1]
    assert kept(z, top_p=0.76) == [0, 1, 2]  # of equal ones the lower id
    assert kept(z, top_p=1e-9) == [0]
    assert kept(z, top_p=1 - 2**-53) == [0, 1, 2, 3]


def test_top_p_counts_only_what_top_k_left():
    z = np.log([0.4, 0.3, 0.2, 0.1]) - math.log(0.4)
    assert kept(z, top_p=0.6) == [0, 1]
    assert kept(z, top_p=0.6, top_k=3) == [0, 1]
    assert kept(z, top_p=0.55, top_k=2) == [0]


def test_the_drawn_token_is_always_one_that_is_left():
    rng = np.random.default_rng(0)
    params = SamplingParams(top_k=3, allowed_token_ids=[2, 4, 6, 8], bad_words_token_ids=[[4]])
    for seed in range(300):
        assert reference.sample(rng.normal(0, 1, 10).astype(np.float32), params, [], 0, seed).token in {2, 6, 8}


def test_a_draw_depends_on_seed_and_position_alone():
    logits = np.random.default_rng(1).normal(0, 1, 300).astype(np.float32)
    p = SamplingParams()
    first = [reference.sample(logits, p, [0] * n, 0, 5).token for n in range(30)]
    assert first == [reference.sample(logits, p, [7] * n, n, 5).token for n in range(30)]
    assert first != [reference.sample(logits, p, [0] * n, 0, 6).token for n in range(30)]
    assert len(set(first)) > 5


def test_dropping_a_token_that_lost_does_not_change_the_winner():
    """Why a draft with other filters, or a masked token, still sees the same noise."""
    logits = np.random.default_rng(1).normal(0, 1, 300).astype(np.float32)
    for seed in range(50):
        token = reference.sample(logits, SamplingParams(), [], 0, seed).token
        without = {"bad_words_token_ids": [[(token + 1) % 300]]}
        assert reference.sample(logits, SamplingParams(**without), [], 0, seed).token == token


def test_logprobs_are_the_log_softmax_of_the_logits_as_given():
    x = np.random.default_rng(3).normal(0, 4, 50).astype(np.float32)
    got = reference.sample(x, SamplingParams(temperature=0.5, logit_bias={7: 50.0}), [], 0, 0, n_top=50)
    exact = x.astype(np.float64) - np.log(np.exp(x.astype(np.float64)).sum())
    assert got.token == 7
    assert got.logprob == pytest.approx(exact[7], rel=1e-6)
    np.testing.assert_allclose(got.top_logprobs, exact[got.top_ids], rtol=1e-6)
    assert got.top_ids.tolist() == np.argsort(-x, kind="stable").tolist()
    assert got.top_ids[got.rank - 1] == 7


def test_equal_logits_share_the_better_rank():
    assert [reference.score(row(1, 3, 3, 2), t).rank for t in range(4)] == [4, 1, 1, 3]


def test_the_logits_are_not_changed():
    x = row(1, 2, 3)
    reference.sample(x, SamplingParams(logit_bias={0: 4.0}, repetition_penalty=2.0, top_k=1), [2], 1, 0)
    assert x.tolist() == [1, 2, 3]


def test_arithmetic_is_as_exact_as_it_says():
    x = -np.linspace(0, 39.9, 5001)
    np.testing.assert_allclose(arithmetic.exp_of_nonpositive(x), np.exp(x), rtol=1e-14)
    y = np.concatenate([1 - 2.0 ** -np.arange(2, 40), 10.0 ** np.arange(-300, 300, 7), [5e-324]])
    np.testing.assert_allclose(arithmetic.log(y), np.log(y), rtol=1e-14)
    assert arithmetic.weights(np.array([0.0, NINF, -1e300])).tolist() == [2**44, 0, 0]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ],
)
def test_philox_gives_its_published_words(counter, key, words):
    got = philox.philox4x32((np.array([counter[0]], np.uint32), *counter[1:]), key)
    assert tuple(int(word[0]) for word in got) == words


def test_gumbel_noise_is_finite_at_both_ends_and_falls_with_the_word():
    g = philox.gumbel(np.array([0, 1, 2**31, 2**32 - 1], np.uint32))
    assert np.isfinite(g).all()
    assert (np.diff(g) < 0).all()
    assert 22.8 < g[0] < 22.88
