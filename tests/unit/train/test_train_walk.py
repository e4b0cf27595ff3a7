"""Drafts walked through greedy texts, against the steps one by one; and confidences that are made honest."""

import numpy as np
import pytest

from tiercel.train.texts import Conversation
from tiercel.train.walk import Drafted, calibrate, expected_error, ngram_drafts, walk


def conversation(ids, start):
    return Conversation(np.array(ids, np.int32), start, is_greedy=True, is_held_out=True)


def random_drafts(seed, n=60, start=5, n_slots=4):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 3, n)
    tokens = rng.integers(0, 3, (n - 1 - start, n_slots))
    return Drafted(conversation(ids, start), tokens, np.zeros(tokens.shape))


def decoded(drafted, n_slots):
    """Speculative decoding, step by step: tokens and steps until the text is there."""
    ids = drafted.text.token_ids.tolist()
    at, n_tokens, n_steps = drafted.text.answer_start, 0, 0
    while at < len(ids) - 1:
        n_steps += 1
        came = [ids[at + 1]]
        for draft in drafted.tokens[at - drafted.text.answer_start][:n_slots]:
            if draft != came[-1] or at + len(came) + 1 >= len(ids):
                break
            came.append(ids[at + len(came) + 1])
        n_tokens += len(came)
        at += len(came)
    return n_tokens, n_steps


@pytest.mark.parametrize("n_slots", [1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_a_walk_takes_the_steps_of_decoding(seed, n_slots):
    drafted = random_drafts(seed)
    found = walk([drafted], n_slots)
    n_tokens, n_steps = decoded(drafted, n_slots)
    assert n_tokens == len(drafted.text.token_ids) - 1 - drafted.text.answer_start
    assert (found.n_tokens, found.n_steps) == (n_tokens, n_steps)
    assert np.all(np.diff(found.survival[:1]) <= 0)


def test_drafts_that_are_always_right_come_whole():
    ids = list(range(30))
    tokens = np.array([[ids[min(a + k + 1, 29)] for k in range(3)] for a in range(9, 29)])
    found = walk([Drafted(conversation(ids, 9), tokens, np.zeros(tokens.shape))])
    assert found.tokens_a_step == 4.0
    assert found.survival.tolist() == [1.0, 1.0, 1.0]


def test_prompt_lookup_drafts_what_followed_and_sees_nothing_of_what_comes():
    ids = [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 9]
    drafts = ngram_drafts(conversation(ids, 5), 2, n_min=2, n_max=3)
    assert drafts.tokens.tolist() == [[-1, -1], [3, 4], [4, 5], [5, 1], [1, 2]]
    unlike = ngram_drafts(conversation([*ids[:8], 7, 7, 7], 5), 2, n_min=2, n_max=3)
    assert unlike.tokens[:3].tolist() == drafts.tokens[:3].tolist()


def test_temperatures_make_confidences_honest():
    rng = np.random.default_rng(1)
    drafts = []
    for _ in range(30):
        chances = rng.uniform(0.2, 0.9, (80, 2))
        ids = np.arange(82)
        right = rng.random((80, 2)) < chances
        at = 1 + np.arange(80)[:, None] + 1 + np.arange(2)
        tokens = np.where(right, at, -1)
        # Three times too sure of itself.
        drafts.append(Drafted(conversation(ids, 1), tokens, 3.0 * np.log(chances / (1 - chances))))
    found = calibrate(drafts[::2])
    assert np.allclose(found.temperatures, 3.0, rtol=0.35)
    assert np.all(found.judge(drafts[1::2]) < 0.5 * found.error_before)


def test_the_error_of_chances_that_come_true_is_none():
    assert expected_error(np.array([0.25] * 4), np.array([1, 0, 0, 0])) == 0.0
    assert expected_error(np.array([0.75] * 4), np.array([1, 0, 0, 0])) == pytest.approx(0.5)
    assert expected_error(np.zeros(0), np.zeros(0, np.int64)) == 0.0
