"""Heads that pick drafts, at every level, against the heads' formulas in numpy and against what the sampler draws."""

import numpy as np
import pytest

from tiercel import _native
from tiercel.sampling.philox import gumbel, token_words

LEVELS = range(len(_native.kernel_levels()))
V, D, E, R, K = 700, 150, 72, 24, 7


def numbers(seed, *shape, scale=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def sigmoid(x):
    return 1 / (1 + np.exp(-np.asarray(x, float)))


def offsets(seed=5, n=D):
    """The target ids of n drafted ids, in no order, and what is stored of them."""
    ids = np.random.default_rng(seed).permutation(V)[:n]
    return ids, (ids - np.arange(n)).astype(np.int32)


def tables(seed=1, n=D, scale=1.0):
    return {"w1": numbers(seed, V, R, scale=scale), "w2": numbers(seed + 1, n, R, scale=scale)}


def weights_of(markov, *, bias=True, scale=1.0):
    found = tables(scale=scale)
    if markov == "gated":
        found |= {"gate": numbers(3, R, E + R, scale=0.1)} | ({"gate_bias": numbers(4, R)} if bias else {})
    if markov == "rnn":
        found |= {"joint": numbers(3, 3 * R, 2 * R + E, scale=0.1)} | (
            {"joint_bias": numbers(4, 3 * R)} if bias else {}
        )
    return found


def confident(weights, *, reads_markov, bias=True):
    n = E + (R if reads_markov else 0)
    return weights | {"confidence": numbers(8, 1, n, scale=0.1)} | ({"confidence_bias": numbers(9, 1)} if bias else {})


def markov_biases(weights, markov, hidden, predecessors):
    """B_k of each row, from the formulas; `predecessors` are the tokens that came before each."""
    state, out = np.zeros(R), []
    for h, before in zip(hidden.astype(float), predecessors, strict=True):
        e = weights["w1"][before].astype(float)
        if markov == "vanilla":
            v = e
        elif markov == "gated":
            v = sigmoid(weights["gate"].astype(float) @ np.concatenate([h, e]) + weights.get("gate_bias", 0)) * e
        else:
            z = np.concatenate([state, e, h])
            w_a, w_c, w_o = weights["joint"].astype(float).reshape(3, R, -1)
            b_a, b_c, b_o = np.asarray(weights.get("joint_bias", np.zeros(3 * R)), float).reshape(3, R)
            a = sigmoid(w_a @ z + b_a)
            state = a * state + (1 - a) * np.tanh(w_c @ z + b_c)
            v = np.tanh(w_o @ z + b_o)
        out.append(weights["w2"].astype(float) @ v)
    return np.array(out)


def softmax(x):
    p = np.exp(x - x.max())
    return p / p.sum()


def picked(scores, ids, params):
    """The index of the largest of scores / temperature + noise; the noise is the sampler's of the token."""
    temperature, seed, position = params
    if temperature == 0:
        return int(np.argmax(scores))
    return int(np.argmax(scores / temperature + gumbel(token_words(seed, position, ids))))


def walk(logits, ids, bias_after, *, anchor, topk=0, temperature=0.0, seed=0, position=0):
    """Tokens and shares of the softmax, one row after the other; `bias_after(row, tokens so far)` gives its biases."""
    tokens, shares = [anchor], []
    for i, row in enumerate(logits.astype(float)):
        row = row + 0.0
        kept = np.argsort(-row, kind="stable")[:topk] if topk else np.arange(len(row))
        scores = np.full(len(row), -np.inf)
        scores[kept] = (row + bias_after(i, tokens))[kept]
        at = picked(scores, ids, (temperature, seed, position + i))
        tokens.append(int(ids[at]))
        shares.append(softmax(scores)[at])
    return tokens[1:], shares


def params(temperature, seed=0):
    return _native.make_sampler_params(temperature=temperature, seed=seed)


def check(got, expected):
    assert got[0] == expected[0]
    np.testing.assert_allclose(got[1], expected[1], rtol=2e-4, atol=1e-6)


IDS = {"whole": (np.arange(D), None), "reduced": offsets()}


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("which", IDS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_plain_head_takes_each_rows_best_token_and_its_share(level, which, temperature):
    ids, d2t = IDS[which]
    head = _native.make_draft_head("plain", D, V, {}, d2t=d2t, level=level)
    for seed in range(20):
        logits = numbers(seed, K, D, scale=3)
        got = head.pick(logits, None, 5, params(temperature, seed), 40)
        how = {"temperature": temperature, "seed": seed, "position": 40}
        check(got, walk(logits, ids, lambda i, t: 0.0, anchor=5, **how))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("topk", [0, 16, D])
@pytest.mark.parametrize("which", IDS)
@pytest.mark.parametrize("markov", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_markov_head_adds_the_bias_of_the_token_before(level, markov, which, topk, bias):
    ids, d2t = IDS[which]
    weights = weights_of(markov, bias=bias)
    head = _native.make_draft_head("markov", D, V, weights, markov=markov, topk=topk, d2t=d2t, level=level)
    assert head.hidden_width == (0 if markov == "vanilla" else E)
    for seed in range(4):
        logits, hidden = numbers(seed, K, D, scale=3), numbers(seed + 50, K, E)

        def bias_after(i, tokens, hidden=hidden):
            return markov_biases(weights, markov, hidden[: i + 1], tokens)[-1]

        for temperature in (0.0, 1.3):
            got = head.pick(logits, hidden, 11, params(temperature, seed), 9)
            how = {"topk": topk, "temperature": temperature, "seed": seed, "position": 9}
            check(got, walk(logits, ids, bias_after, anchor=11, **how))


@pytest.mark.parametrize("reads_markov", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("markov", ["vanilla", "gated", "rnn"])
def test_a_confidence_head_reads_the_hidden_row_and_the_token_before(markov, bias, reads_markov):
    weights = confident(weights_of(markov), reads_markov=reads_markov, bias=bias)
    options = {"markov": markov, "confidence_reads_markov": reads_markov}
    head = _native.make_draft_head("markov", D, V, weights, topk=8, d2t=offsets()[1], **options)
    assert head.hidden_width == E
    logits, hidden = numbers(1, K, D, scale=3), numbers(2, K, E)
    tokens, confidence = head.pick(logits, hidden, 3)
    for i, before in enumerate([3, *tokens[:-1]]):
        read = np.concatenate([hidden[i], weights["w1"][before]]) if reads_markov else hidden[i]
        logit = weights["confidence"][0].astype(float) @ read + (weights["confidence_bias"][0] if bias else 0.0)
        assert confidence[i] == pytest.approx(sigmoid(logit), rel=1e-5)
    assert len(set(confidence)) == K


def selector_weights(scale=1.0):
    found = {"predecessor": numbers(1, V, R, scale=scale), "successor": numbers(2, D, R, scale=scale)}
    return found | {"projection": numbers(3, R, E, scale=0.2)}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("which", IDS)
@pytest.mark.parametrize("level", LEVELS)
def test_a_selector_walks_the_edges_between_the_best_of_each_row(level, which, temperature):
    """S_j(p -> c) of all predecessors and candidates is made first, as the published walk does."""
    ids, d2t = IDS[which]
    weights = selector_weights()
    head = _native.make_draft_head("selector", D, V, weights, topk=16, d2t=d2t, level=level)
    a, b, p = (weights[name].astype(float) for name in ("predecessor", "successor", "projection"))
    for seed in range(10):
        logits, hidden = numbers(seed, K, D, scale=2), numbers(seed + 9, K, E)
        best = np.argsort(-logits, axis=1, kind="stable")[:, :16]
        predecessors = [np.full(16, 77), *(ids[c] for c in best[:-1])]
        edges = [
            logits[j][best[j]][None, :] + (a[predecessors[j]] * (p @ hidden[j].astype(float))) @ b[best[j]].T
            for j in range(K)
        ]
        at, tokens, shares = 0, [], []
        for j in range(K):
            row = edges[j][at]
            at = picked(row, ids[best[j]], (temperature, seed, 30 + j))
            tokens.append(int(ids[best[j][at]]))
            shares.append(softmax(row)[at])
        check(head.pick(logits, hidden, 77, params(temperature, seed), 30), (tokens, shares))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_heads_whose_tables_are_zero_pick_what_a_plain_head_does(temperature):
    ids, d2t = offsets()
    del ids
    plain = _native.make_draft_head("plain", D, V, {}, d2t=d2t)
    zero = {name: np.zeros_like(w) for name, w in tables().items()} | {"w1": tables()["w1"]}
    markov = _native.make_draft_head("markov", D, V, zero, d2t=d2t)
    zero = {name: np.zeros_like(w) for name, w in selector_weights().items()}
    selector = _native.make_draft_head("selector", D, V, zero, topk=16, d2t=d2t)
    for seed in range(50):
        logits, hidden = numbers(seed, K, D, scale=4), numbers(1, K, E)
        how = params(temperature, seed)
        expected = plain.pick(logits, None, 4, how, 6)
        assert markov.pick(logits, None, 4, how, 6) == expected
        if temperature == 0.0:
            assert selector.pick(logits, hidden, 4, how, 6)[0] == expected[0]


def test_the_lower_id_wins_ties():
    logits = np.zeros((2, D), np.float32)
    logits[:, [9, 40, 80]] = 1.0
    plain = _native.make_draft_head("plain", D, V, {})
    assert plain.pick(logits, None, 0)[0] == [9, 9]
    zero = {"w1": np.zeros((V, R), np.float32), "w2": np.zeros((D, R), np.float32)}
    for topk in (0, 2, 3):
        assert _native.make_draft_head("markov", D, V, zero, topk=topk).pick(logits, None, 0)[0] == [9, 9]
    ids = np.arange(D)[::-1]
    backwards = _native.make_draft_head("markov", D, V, zero, topk=3, d2t=(ids - np.arange(D)).astype(np.int32))
    assert backwards.pick(logits, None, 0)[0] == [ids[80], ids[80]]


def test_picks_do_not_depend_on_what_is_picked_beside_or_before_them():
    weights = confident(weights_of("rnn"), reads_markov=True)
    options = {"markov": "rnn", "topk": 16, "confidence_reads_markov": True}
    logits, hidden = numbers(1, K, D), numbers(2, K, E)
    all_levels = [
        _native.make_draft_head("markov", D, V, weights, level=level, **options).pick(
            logits, hidden, 3, params(0.5, 8), 2
        )
        for level in LEVELS
    ]
    assert all(found == all_levels[0] for found in all_levels)
    head = _native.make_draft_head("markov", D, V, weights, **options)
    shorter = head.pick(logits[:3], hidden[:3], 3, params(0.5, 8), 2)
    assert shorter == tuple(part[:3] for part in all_levels[0])


# Coupling: a draft and its verification see one noise.


def acceptances(q_logits, p_logits, ids, temperature, n_seeds, head):
    """For how many seeds the head's draft from q is what the sampler draws from p, at one position."""
    target = np.full(V, -60.0, np.float32)
    target[ids] = p_logits
    n = 0
    for seed in range(n_seeds):
        how = params(temperature, seed)
        draft = head.pick(q_logits[None], None, 0, how, 12)[0][0]
        n += draft == _native.sample_row(target, how, np.zeros(12, np.int32), 3)[0]
    return n


@pytest.mark.parametrize("which", IDS)
def test_a_draft_from_the_models_own_distribution_is_what_the_model_draws(which):
    ids, d2t = IDS[which]
    head = _native.make_draft_head("plain", D, V, {}, d2t=d2t)
    logits = numbers(3, D, scale=2)
    for temperature in (0.3, 1.0, 2.5):
        assert acceptances(logits, logits, ids, temperature, 300, head) == 300


def test_coupled_drafts_are_accepted_as_often_as_the_coupling_promises():
    """Gumbel coupling differs with a chance of 2 TV / (1 + TV) at most; independent draws would agree far less."""
    ids, d2t = offsets()
    head = _native.make_draft_head("plain", D, V, {}, d2t=d2t)
    n = 3000
    for spread in (0.2, 0.7, 1.5):
        q = numbers(3, D, scale=1.5)
        p = q + numbers(4, D, scale=spread)
        p_probabilities, q_probabilities = softmax(p.astype(float)), softmax(q.astype(float))
        distance = 0.5 * np.abs(p_probabilities - q_probabilities).sum()
        rate = acceptances(q, p, ids, 1.0, n, head) / n
        noise = 3 * np.sqrt(0.25 / n)
        assert rate >= (1 - distance) / (1 + distance) - noise
        assert rate <= 1 - distance + noise  # no coupling does better
        assert rate > 4 * (p_probabilities * q_probabilities).sum()


def test_drafts_follow_the_draft_distribution():
    head = _native.make_draft_head("plain", 8, V, {})
    logits = np.array([[2.0, 1.0, 0.0, -1.0, 1.5, 0.5, -2.0, 0.0]], np.float32)
    n = 4000
    found = np.bincount([head.pick(logits, None, 0, params(0.8, seed), 5)[0][0] for seed in range(n)], minlength=8) / n
    np.testing.assert_allclose(found, softmax(logits[0].astype(float) / 0.8), atol=4 * np.sqrt(0.25 / n))


# What cannot be picked from, and what cannot be built.


@pytest.mark.parametrize("bad", [np.nan, np.inf, "all -inf"])
@pytest.mark.parametrize("kind", ["plain", "markov", "markov-topk", "selector"])
def test_from_a_row_that_is_no_distribution_on_nothing_is_drafted(kind, bad):
    made = {
        "plain": ("plain", {}, 0),
        "markov": ("markov", tables(), 0),
        "markov-topk": ("markov", tables(), 16),
        "selector": ("selector", selector_weights(), 16),
    }
    name, weights, topk = made[kind]
    head = _native.make_draft_head(name, D, V, weights, topk=topk)
    logits, hidden = numbers(1, K, D), numbers(2, K, E)
    good = head.pick(logits, hidden, 3)
    if bad == "all -inf":
        logits[4] = -np.inf
    else:
        logits[4, 17] = bad
    tokens, confidence = head.pick(logits, hidden, 3)
    assert tokens == [*good[0][:4], -1, -1, -1]
    assert confidence[:4] == good[1][:4]
    assert np.isnan(confidence[4:]).all()


def test_a_bias_that_overflows_ends_the_drafts():
    weights = {"w1": np.full((V, R), 3e30, np.float32), "w2": np.full((D, R), 3e30, np.float32)}
    for topk in (0, 5):
        head = _native.make_draft_head("markov", D, V, weights, topk=topk)
        assert head.pick(numbers(1, 2, D), None, 3)[0] == [-1, -1]


@pytest.mark.parametrize("anchor", [-1, V])
def test_behind_an_anchor_that_is_no_token_nothing_is_drafted(anchor):
    for kind, weights in (("plain", {}), ("markov", tables())):
        tokens, confidence = _native.make_draft_head(kind, D, V, weights).pick(numbers(1, 2, D), None, anchor)
        assert tokens == [-1, -1]
        assert np.isnan(confidence).all()


def test_logits_that_forbid_tokens_are_picked_from():
    logits = np.full((1, D), -np.inf, np.float32)
    logits[0, [7, 9]] = [1.0, 2.0]
    for topk in (0, 16):
        head = _native.make_draft_head("markov", D, V, {n: w * 0 for n, w in tables().items()}, topk=topk)
        assert head.pick(logits, None, 0)[0] == [9]
        assert {head.pick(logits, None, 0, params(1.0, seed), 3)[0][0] for seed in range(40)} == {7, 9}


@pytest.mark.parametrize(
    ("kind", "change", "options", "message"),
    [
        ("plain", {"w1": numbers(1, V, R)}, {}, "plain: got weights or topk"),
        ("markov", {"w3": numbers(1, V, R)}, {}, "w3: a markov head of this kind has no such weight"),
        ("plain", {}, {"topk": 4}, "plain: got weights or topk"),
        ("tree", {}, {}, "kind: got 'tree'"),
        ("markov", {}, {"markov": "lstm"}, "markov: got 'lstm'"),
        ("markov", {"w1": numbers(1, V - 1, R)}, {}, rf"w1: got \[{V - 1}, {R}\]; \[{V}, {R}\] is needed"),
        ("markov", {"w2": numbers(1, R, D)}, {}, rf"w2: got \[{R}, {D}\]; \[{D}, {D}\] is needed"),
        ("markov", {"w2": numbers(1, D, R) * np.nan}, {}, "w2: holds NaN or infinity"),
        ("markov", {"gate": numbers(1, R, E)}, {}, "gate: a vanilla head has none"),
        ("markov", {}, {"markov": "gated"}, r"gate: got \[0, 0\]; more columns than 24"),
        ("markov", {"gate": numbers(1, R + 1, E)}, {"markov": "gated"}, rf"gate: got \[{R + 1}, {E}\]; \[{R}, {E}\]"),
        ("markov", {"joint": numbers(1, R, E)}, {"markov": "rnn"}, rf"joint: got \[{R}, {E}\]; \[{3 * R}, {E}\]"),
        (
            "markov",
            {"gate": numbers(1, R, E + R), "gate_bias": numbers(1, 3)},
            {"markov": "gated"},
            rf"gate_bias: got \[1, 3\]; \[1, {R}\]",
        ),
        ("markov", {}, {"topk": D + 1}, f"topk: got {D + 1}; 0 to the {D}"),
        ("markov", {"confidence_bias": numbers(1, 1)}, {}, "confidence_bias: one number for a confidence head"),
        ("markov", {"confidence": numbers(1, 2, E)}, {}, rf"confidence: got \[2, {E}\]; \[1, {E}\]"),
        (
            "markov",
            {"gate": numbers(1, R, E + R), "confidence": numbers(1, 1, E)},
            {"markov": "gated", "confidence_reads_markov": True},
            rf"confidence: got \[1, {E}\]; \[1, {E + R}\]",
        ),
        ("markov", {}, {"d2t": np.zeros(D - 1, np.int32)}, f"d2t: got {D - 1} offsets"),
        ("markov", {}, {"d2t": np.full(D, V - D + 1, np.int32)}, rf"d2t: drafted id {D - 1} stands for token {V}"),
        ("markov", {}, {"d2t": -np.arange(D).astype(np.int32)}, "d2t: drafted id 1 stands for token 0"),
        ("markov", {}, {"d2t": np.zeros(0, np.int32)}, "d2t: got no offsets"),
        ("markov", {}, {"level": 99}, "level: must be in"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_by_its_part(kind, change, options, message):
    weights = (tables() if kind == "markov" else {}) | change
    with pytest.raises(ValueError, match=f"DraftHead: {message}"):
        _native.make_draft_head(kind, D, V, weights, **options)


def test_a_selector_that_does_not_fit_is_refused_by_its_part():
    for change, topk, message in (
        ({}, 0, "topk: got 0; a selector needs"),
        ({"projection": numbers(1, E, R)}, 16, rf"projection: got \[{E}, {R}\]; \[{R}, {R}\]"),
        ({"predecessor": numbers(1, D, R)}, 16, rf"predecessor: got \[{D}, {R}\]; \[{V}, {R}\]"),
        ({"confidence": numbers(1, 1, E)}, 16, "confidence: a selector has none"),
        ({"projection": numbers(1, 2, 2, 2)}, 16, "projection: got 3 dimensions"),
    ):
        with pytest.raises(ValueError, match=message):
            _native.make_draft_head("selector", D, V, selector_weights() | change, topk=topk)


@pytest.mark.parametrize(
    ("logits", "hidden", "position", "message"),
    [
        (numbers(1, 2, D + 1), numbers(1, 2, E), 0, f"logits: got {D + 1} columns; {D} ids"),
        (numbers(1, 2, D), None, 0, rf"hidden: got \[0, 0\]; \[2, {E}\]"),
        (numbers(1, 2, D), numbers(1, 2, E + 1), 0, rf"hidden: got \[2, {E + 1}\]; \[2, {E}\]"),
        (numbers(1, 2, D), numbers(1, 2, E), -1, "position: must be 0 or more"),
    ],
)
def test_rows_of_wrong_shapes_are_refused(logits, hidden, position, message):
    head = _native.make_draft_head("selector", D, V, selector_weights(), topk=4)
    with pytest.raises(ValueError, match=message):
        head.pick(logits, hidden, 0, None, position)
