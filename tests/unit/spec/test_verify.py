"""Verification: greedy and matching by hand, rejection by its distribution."""

import numpy as np
import pytest

from tiercel.spec.verify import NO_DRAFT, Stream, block, greedy, gumbels, matching, standard, uniforms

N = 200_000
P = np.array([[0.3, 0.5, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.4, 0.1]])
Q = np.array([[0.5, 0.4, 0.1, 0.0], [0.4, 0.3, 0.2, 0.1]])
# 0.9999 of chi-square with 3 degrees of freedom.
CHI_SQUARE_3 = 21.1


def draw(distribution, noise):
    with np.errstate(divide="ignore"):
        return (np.log(distribution) + noise).argmax(axis=-1)


def noise(position, stream, seed=11):
    ids = np.arange(N * P.shape[1])
    return gumbels(seed, position, stream, ids).reshape(N, P.shape[1])


def make_drafts(*, is_certain, seed=11):
    if is_certain:
        return np.tile([1, 3], (N, 1)), None
    drafts = np.stack([draw(Q[i], noise(i, Stream.DRAFT, seed)) for i in range(2)], axis=1)
    return drafts, np.broadcast_to(Q, (N, *Q.shape))


def verify(how, *, is_certain, residual=Stream.RESIDUAL):
    drafts, q = make_drafts(is_certain=is_certain)
    p = np.broadcast_to(P, (N, *P.shape))
    accept = np.stack([uniforms(11, i, np.arange(N)) for i in range(2)], axis=1)
    residuals = np.stack([noise(i, residual) for i in range(3)], axis=1)
    return how(p, q, drafts, accept, residuals)


def chi_square(token_ids, p):
    counts = np.bincount(token_ids, minlength=len(p))
    expected = p * counts.sum()
    assert counts[p == 0].sum() == 0
    return (((counts - expected) ** 2)[p > 0] / expected[p > 0]).sum()


@pytest.mark.parametrize("how", [standard, block])
@pytest.mark.parametrize("is_certain", [False, True])
def test_each_emitted_token_has_the_targets_distribution(how, is_certain):
    """The first always; the second and third given that they were emitted at all, as p does not depend on the drafts
    here.

    What is conditioned on must not look at the token: the whole emitted text is continued by plain draws.
    """
    got = verify(how, is_certain=is_certain)
    plain = np.stack([draw(P[i], noise(i + 50, Stream.TARGET)) for i in range(3)], axis=1)
    whole = np.where(got.token_ids >= 0, got.token_ids, plain)
    for i in range(3):
        assert chi_square(whole[:, i], P[i]) < CHI_SQUARE_3
    pairs = whole[:, 0] * 4 + whole[:, 1]
    joint = (P[0][:, None] * P[1]).reshape(-1)
    assert chi_square(pairs, joint) < 3 * CHI_SQUARE_3


@pytest.mark.parametrize("is_certain", [False, True])
def test_block_verification_accepts_at_least_as_much(is_certain):
    n_standard = verify(standard, is_certain=is_certain).n_accepted.mean()
    assert verify(block, is_certain=is_certain).n_accepted.mean() >= n_standard - 0.005


def test_a_residual_with_the_drafts_noise_is_biased():
    """The bug that the streams are there for: seen, so that the test above is known to see it."""
    good, bad = verify(standard, is_certain=False), verify(standard, is_certain=False, residual=Stream.DRAFT)
    assert chi_square(good.token_ids[:, 0], P[0]) < CHI_SQUARE_3
    assert chi_square(bad.token_ids[:, 0], P[0]) > 100
    share = np.bincount(bad.token_ids[:, 0], minlength=4) / N
    np.testing.assert_allclose(share, [0.3, 0.477, 0.223, 0.0], atol=0.005)


def test_matching_accepts_certain_drafts_as_often_as_standard_rejection():
    """And emits what plain decoding draws, whatever is drafted."""
    chosen = np.stack([draw(P[i], noise(i, Stream.TARGET)) for i in range(3)], axis=1)
    for drafts in (np.tile([1, 3], (N, 1)), np.tile([0, 2], (N, 1))):
        got = matching(chosen, drafts)
        is_emitted = got.token_ids >= 0
        assert (got.token_ids[is_emitted] == chosen[is_emitted]).all()
        assert (is_emitted.sum(axis=1) == got.n_accepted + 1).all()
        assert abs((got.n_accepted >= 1).mean() - P[0][drafts[0, 0]]) < 0.005


def test_a_draft_drawn_with_the_targets_noise_changes_nothing_and_is_accepted_more_often():
    """Gumbel coupling: the draft sees the noise that the verifier will see."""
    chosen = np.stack([draw(P[i], noise(i, Stream.TARGET)) for i in range(3)], axis=1)
    coupled = np.stack([draw(Q[i], noise(i, Stream.TARGET)) for i in range(2)], axis=1)
    apart = np.stack([draw(Q[i], noise(i, Stream.DRAFT)) for i in range(2)], axis=1)
    got = matching(chosen, coupled)
    assert (got.token_ids[got.token_ids >= 0] == chosen[got.token_ids >= 0]).all()
    assert (got.n_accepted >= 1).mean() > (matching(chosen, apart).n_accepted >= 1).mean() + 0.2


def test_greedy_accepts_the_likeliest_and_corrects_the_first_that_is_not():
    logits = np.eye(5)[[[2, 4, 1], [2, 4, 1], [2, 4, 1]]]
    got = greedy(logits, np.array([[2, 4], [2, 3], [0, 4]]))
    assert got.token_ids.tolist() == [[2, 4, 1], [2, 4, -1], [2, -1, -1]]
    assert got.n_accepted.tolist() == [2, 1, 0]


def test_a_placeholder_is_rejected_and_the_token_drawn_from_the_target_itself():
    p = np.broadcast_to(P, (N, *P.shape))
    drafts = np.full((N, 2), NO_DRAFT)
    residual = np.stack([noise(i, Stream.RESIDUAL) for i in range(3)], axis=1)
    got = standard(p, None, drafts, np.full((N, 2), 1e-9), residual)
    assert (got.n_accepted == 0).all()
    assert chi_square(got.token_ids[:, 0], P[0]) < CHI_SQUARE_3


def chi_square_of_chains(how, *, is_keyed_by_block):
    """Generate four tokens by blocks of three drafts, N times, and compare with what the target's chain gives.

    What a token may be follows from the one before: rows of p for the target, of q for the drafter.
    """
    n_tokens, n_drafts, v = 4, 3, 3
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(v), v), rng.dirichlet(np.ones(v), v)
    by_position = rng.random((n_tokens + n_drafts, N)), rng.gumbel(size=(n_tokens + n_drafts, N, v))
    tokens = np.zeros((N, n_tokens + n_drafts + 1), np.int64)
    n_known = np.zeros(N, np.int64)
    for start in range(n_tokens):
        cases = np.flatnonzero(n_known == start)
        n = len(cases)
        before = tokens[cases, start - 1] if start else np.zeros(n, np.int64)
        drafts, rows = [], [before]
        accept = rng.random((n, n_drafts)) if is_keyed_by_block else by_position[0][start : start + n_drafts, cases].T
        for i in range(n_drafts):
            own = rng.gumbel(size=(n, v)) if is_keyed_by_block else by_position[1][start + i, cases]
            drafts.append(draw(q[rows[-1]], own))
            rows.append(drafts[-1])
        rows = np.stack(rows, axis=1)
        got = how(p[rows], q[rows[:, :-1]], np.stack(drafts, axis=1), accept, rng.gumbel(size=(n, n_drafts + 1, v)))
        for i in range(n_drafts + 1):
            is_there = got.token_ids[:, i] >= 0
            tokens[cases[is_there], start + i] = got.token_ids[is_there, i]
        n_known[cases] += got.n_accepted + 1
    chances = p[0]
    for _ in range(n_tokens - 1):
        chances = (chances.reshape(-1, v)[:, :, None] * p).reshape(-1)
    return chi_square(tokens[:, :n_tokens] @ v ** np.arange(n_tokens - 1, -1, -1), chances)


# 0.9999 of chi-square with 80 degrees of freedom.
CHI_SQUARE_80 = 132.0


@pytest.mark.parametrize("how", [standard, block])
def test_a_text_made_of_blocks_has_the_targets_distribution(how):
    assert chi_square_of_chains(how, is_keyed_by_block=True) < CHI_SQUARE_80


def test_noise_that_blocks_share_by_position_biases_block_verification_and_not_standard():
    """Block verification has looked at the noise of drafts that it rejected, which the next block would use again."""
    assert chi_square_of_chains(standard, is_keyed_by_block=False) < CHI_SQUARE_80
    assert chi_square_of_chains(block, is_keyed_by_block=False) > 500


def test_all_accepted_gives_the_bonus_from_the_last_row():
    p = np.broadcast_to(P, (N, *P.shape))
    residual = np.stack([noise(i, Stream.RESIDUAL) for i in range(3)], axis=1)
    for how in (standard, block):
        got = how(p, p[:, :2], np.tile([1, 2], (N, 1)), np.full((N, 2), 0.999999), residual)
        assert (got.n_accepted == 2).all()
        assert chi_square(got.token_ids[:, 2], P[2]) < CHI_SQUARE_3


def test_streams_differ_and_are_functions_of_seed_and_position():
    ids = np.arange(64)
    assert (gumbels(3, 5, Stream.DRAFT, ids) == gumbels(3, 5, Stream.DRAFT, ids)).all()
    for other in (
        gumbels(3, 5, Stream.RESIDUAL, ids),
        gumbels(3, 6, Stream.DRAFT, ids),
        gumbels(4, 5, Stream.DRAFT, ids),
        gumbels(3, 5, Stream.DRAFT, ids, place=1),
    ):
        assert (gumbels(3, 5, Stream.DRAFT, ids) != other).any()
