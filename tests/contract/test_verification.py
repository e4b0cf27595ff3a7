"""Drafts drawn apart and verified by rejection, in C++, against the definitions and against what the target gives."""

import numpy as np
import pytest

from tiercel import _native
from tiercel.spec import verify
from tiercel.spec.verify import Stream, gumbels, uniforms

V, K, SEED = 150, 4, 11
HOW = {"standard": verify.standard, "block": verify.block}
TOKENS = np.array([3, 1, 4, 1, 5], np.int32)


def sampling(seed=SEED, temperature=1.0, **more):
    return _native.make_sampler_params(seed=seed, temperature=temperature, **more)


def softmax(x):
    e = np.exp(np.asarray(x, float) - np.max(x))
    return e / e.sum()


def numbers(seed, *shape, scale=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def dense(odds, v=V):
    q = np.zeros((1, len(odds), v))
    for i, (ids, chances) in enumerate(odds):
        q[0, i, ids] = chances
    return q


def by_definition(how, p, drafts, odds, seed, position, v=V):
    """What the definition makes of one block, with the noise that the core is to use."""
    k, ids = len(drafts), np.arange(v)
    accept = uniforms(seed, position, np.arange(k))[None]
    residual = np.stack([gumbels(seed, position + i, Stream.RESIDUAL, ids) for i in range(k)])
    last = gumbels(seed, position + k, Stream.TARGET, ids)
    got = HOW[how](p[None], dense(odds, v), np.array([drafts]), accept, np.concatenate([residual, last[None]])[None])
    return got.token_ids[0][: got.n_accepted[0] + 1].tolist()


def plain_head(v=V):
    return _native.make_draft_head("plain", v, v, {})


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_drafts_drawn_apart_are_accepted_as_defined(how, temperature):
    n_accepted = []
    for case in range(300):
        logits = numbers(case, K + 1, V, scale=2.0)
        drafter = logits[:K] + numbers(case + 1000, K, V)
        drafts, _, odds = plain_head().pick_apart(drafter, None, 0, sampling(case, temperature), len(TOKENS))
        got = _native.verify_drafts(how, logits, drafts, odds, sampling(case, temperature), TOKENS, 2)
        p = np.stack([softmax(row.astype(float) / temperature) for row in logits])
        assert got == by_definition(how, p, drafts, odds, case, len(TOKENS))
        n_accepted.append(len(got) - 1)
    assert set(n_accepted) == set(range(K + 1))


@pytest.mark.parametrize("how", HOW)
def test_certain_drafts_are_accepted_as_defined(how):
    lengths = set()
    for case in range(300):
        logits = numbers(case, K + 1, V, scale=5.0)
        drafts = [int(row.argmax()) for row in logits[:K]]
        odds = [([token], [1.0]) for token in drafts]
        got = _native.verify_drafts(how, logits, drafts, odds, sampling(case), TOKENS, 2)
        assert got == by_definition(how, np.stack([softmax(row) for row in logits]), drafts, odds, case, len(TOKENS))
        lengths.add(len(got))
    assert lengths == set(range(1, K + 2))


@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_a_draft_is_drawn_from_what_is_kept_of_it(temperature):
    logits = numbers(5, 1, V, scale=2.0)
    counts = np.zeros(V)
    for seed in range(20_000):
        (token,), (confidence,), (kept,) = plain_head().pick_apart(logits, None, 0, sampling(seed, temperature), 7)
        counts[token] += 1
    ids, q = np.array(kept[0]), np.array(kept[1])
    best = np.argsort(-logits[0], kind="stable")[:64]
    assert sorted(ids) == sorted(best)
    np.testing.assert_allclose(q, softmax(logits[0][ids].astype(float) / temperature), rtol=1e-6)
    assert confidence == pytest.approx((q**2).sum() ** 0.5, rel=1e-5)
    is_common = q * counts.sum() > 5
    expected = q[is_common] * counts.sum()
    assert (((counts[ids[is_common]] - expected) ** 2) / expected).sum() < 2.5 * is_common.sum() + 20
    assert counts[ids].sum() == counts.sum()


def test_a_heads_bias_is_in_what_drafts_are_drawn_from_and_in_what_is_kept():
    r, d = 8, 40
    weights = {"w1": numbers(1, V, r), "w2": numbers(2, d, r)}
    d2t = (np.random.default_rng(3).permutation(V)[:d] - np.arange(d)).astype(np.int32)
    logits = numbers(4, 2, d)
    for topk in (0, 8):
        head = _native.make_draft_head("markov", d, V, weights, markov="vanilla", topk=topk, d2t=d2t)
        drafts, _, odds = head.pick_apart(logits, None, 9, sampling(), 7)
        for i, before in enumerate([9, drafts[0]]):
            scores = logits[i] + weights["w2"] @ weights["w1"][before]
            among = np.argsort(-logits[i], kind="stable")[:topk] if topk else np.arange(d)
            ids, q = odds[i]
            assert sorted(ids) == sorted((among + d2t[among]).tolist())
            chances = dict(zip((among + d2t[among]).tolist(), softmax(scores[among]), strict=True))
            np.testing.assert_allclose(q, [chances[token] for token in ids], rtol=1e-5)
            assert drafts[i] in ids


def chain(v, seed):
    """A target and a drafter whose next token follows from the one before: logits [v, v] of each."""
    target = numbers(seed, v, v, scale=1.5)
    return target, target + numbers(seed + 1, v, v)


def generate(how, seed, *, n_tokens, target, drafter, options):
    """Draft and verify until there are so many tokens behind the first."""
    v = len(target)
    texts = [0]
    head = _native.make_draft_head("plain", v, v, {})
    params = sampling(seed, **options)
    while len(texts) <= n_tokens:
        drafts, odds = [], []
        for i in range(2):  # one row at a time, as a row follows from the draft before
            rows = np.ascontiguousarray(drafter[[(texts + drafts)[-1]] * (i + 1)])
            picked, _, kept = head.pick_apart(rows, None, 0, params, len(texts))
            drafts.append(picked[i])
            odds.append(kept[i])
        rows = np.ascontiguousarray(target[[texts[-1], *drafts]])
        texts += _native.verify_drafts(how, rows, drafts, odds, params, np.array(texts, np.int32), 1)
    return texts[1 : n_tokens + 1]


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"temperature": 2.5, "min_p": 0.1}])
@pytest.mark.parametrize("how", HOW)
def test_texts_made_of_several_blocks_have_the_targets_distribution(how, options):
    """Three tokens of a chain, 20,000 seeds of each of six ways: every text as often as the target has it."""
    v, n, n_tokens = 4, 20_000, 3
    target, drafter = chain(v, 3)
    counts = np.zeros((v,) * n_tokens)
    for seed in range(n):
        counts[tuple(generate(how, seed, n_tokens=n_tokens, target=target, drafter=drafter, options=options))] += 1
    z = target.astype(float) / options.get("temperature", 1.0)
    if "top_k" in options:
        z = np.where(z >= np.sort(z, axis=1)[:, -3, None], z, -np.inf)
    p = np.exp(z - z.max(axis=1, keepdims=True))
    p = np.where(p >= options.get("min_p", 0.0), p, 0.0)
    p /= p.sum(axis=1, keepdims=True)
    expected = n * p[0][:, None, None] * p[:, :, None] * p[None]
    assert counts[expected == 0].sum() == 0
    is_common = expected > 5
    found = ((counts - expected) ** 2)[is_common] / expected[is_common]
    n_free = is_common.sum() - 1
    assert n_free > 8
    assert found.sum() < n_free + 4.5 * (2 * n_free) ** 0.5


@pytest.mark.parametrize("how", HOW)
def test_a_residual_of_a_nucleus_is_what_is_left_of_it(how):
    """A token that the nucleus cut leaves a bound behind in its block of 64, above all that is left of the others."""
    n = 4000
    row = np.full(128, -20.0, np.float32)
    row[[0, 1, 70]] = 0.0, -0.3, -0.305  # of which the nucleus ends between the last two, in one bucket
    logits = np.stack([row, row])
    weights = np.exp(row.astype(float))
    params = {"top_p": float((weights[0] + 0.9 * weights[1]) / weights.sum())}
    share = weights[:2] / weights[:2].sum()
    for q0 in (0.3, 0.9):
        counts = np.zeros(2)
        for seed in range(n):
            draft = int(uniforms(seed + 10**6, 3, np.arange(1))[0] > q0)
            odds = [([0, 1], [q0, 1 - q0])]
            counts[_native.verify_drafts(how, logits, [draft], odds, sampling(seed, **params), TOKENS, 2)[0]] += 1
        np.testing.assert_allclose(counts / n, share, atol=4.5 * (0.25 / n) ** 0.5)


@pytest.mark.parametrize("how", HOW)
def test_a_row_without_a_distribution_ends_the_block_and_is_told(how):
    logits = numbers(1, K + 1, V)
    logits[2] = np.nan
    drafts = [int(row.argmax()) for row in logits[:K]]
    odds = [([token], [0.001]) for token in drafts]  # so unlikely that each is accepted
    assert _native.verify_drafts(how, logits, drafts, odds, sampling(), TOKENS, 2) == [*drafts[:2], -1]


@pytest.mark.parametrize("how", HOW)
def test_a_draft_that_may_not_come_is_never_accepted(how):
    logits = numbers(1, K + 1, V)
    drafts = [7] * K
    odds = [([7, 8], [0.5, 0.5])] * K
    for seed in range(50):
        (got,) = _native.verify_drafts(how, logits, drafts, odds, sampling(seed, bad_words=[[7]]), TOKENS, 2)
        assert got != 7


@pytest.mark.parametrize("how", HOW)
def test_block_accepts_more_than_standard_and_both_less_than_nothing_forbids(how):
    """Of one drafter and many seeds: the drafts that are taken."""
    n_accepted = {one: 0 for one in HOW}
    for case in range(400):
        logits = numbers(case, K + 1, V, scale=2.0)
        drafter = logits[:K] + numbers(case + 1000, K, V, scale=0.5)
        drafts, _, odds = plain_head().pick_apart(drafter, None, 0, sampling(case), len(TOKENS))
        for one in HOW:
            n_accepted[one] += len(_native.verify_drafts(one, logits, drafts, odds, sampling(case), TOKENS, 2)) - 1
    assert 400 < n_accepted["standard"] < n_accepted["block"] < 400 * K
