"""The suffix drafter against counting by hand."""

import random
from array import array

import pytest

from tiercel import _native
from tiercel.base.errors import ConfigError
from tiercel.spec.drafters.suffix import SuffixDrafter


def ints(ids):
    return array("i", ids)


def occurrences(texts, run):
    """Where a run ends, in each text, in the order in which these ends came."""
    n = len(run)
    return [(t, i + n) for t, text in enumerate(texts) for i in range(len(text) - n + 1) if text[i : i + n] == run]


def follow(texts, run, limit, min_probability, depth):
    """The score of always taking the most frequent token; runs longer than `depth` are not counted any more."""
    p, score, run = 1.0, 0.0, list(run)
    for _ in range(limit):
        if len(run) >= depth:
            break
        nexts = [texts[t][end] for t, end in occurrences(texts, run) if end < len(texts[t])]
        if not nexts:
            break
        counts = {token: nexts.count(token) for token in nexts}
        top = max(counts.values())
        p *= top / len(nexts)
        if p < min_probability:
            break
        score += p
        best = [token for token, count in counts.items() if count == top]
        if len(best) > 1:
            return None  # which of them comes first is not defined here
        run.append(best[0])
    return score


@pytest.mark.parametrize("seed", range(6))
def test_counts_are_those_of_all_runs_up_to_the_depth(seed):
    rng = random.Random(seed)
    tree = _native.SuffixTree(6, 1 << 20)
    texts = [[], [], []]
    numbers = [tree.begin() for _ in texts]
    for _ in range(60):
        i = rng.randrange(3)
        more = [rng.randrange(3) for _ in range(rng.randrange(1, 4))]
        texts[i] += more
        assert tree.extend(numbers[i], ints(more))
        for _ in range(10):
            run = [rng.randrange(3) for _ in range(rng.randrange(1, 7))]
            assert tree.count(ints(run)) == len(occurrences(texts, run))


@pytest.mark.parametrize("seed", range(6))
def test_the_best_continuation_is_the_most_frequent_one(seed):
    rng = random.Random(100 + seed)
    depth, n_compared = 7, 0
    tree = _native.SuffixTree(depth, 1 << 20)
    number, text = tree.begin(), []
    for _ in range(150):
        token = rng.randrange(4) if rng.random() < 0.5 else len(text) % 4
        text.append(token)
        tree.extend(number, ints([token]))
        tokens, probabilities, n_matched, score = tree.propose(ints(text[-depth:]), 5, 1.0, 0.1)
        assert len(tokens) == len(probabilities) <= min(5, max(n_matched, 0))
        assert sum(probabilities) == pytest.approx(score)
        assert probabilities == sorted(probabilities, reverse=True)
        run, p = text[-n_matched:], 1.0
        for i, token in enumerate(tokens):
            if n_matched + i + 1 > depth:
                break
            nexts = [text[end] for _, end in occurrences([text], run) if end < len(text)]
            p *= nexts.count(token) / len(nexts)
            assert probabilities[i] == pytest.approx(p)
            run.append(token)
        scores = [follow([text], text[-m:], min(5, m), 0.1, 99) for m in range(1, n_matched + 1)]
        if scores and None not in scores and n_matched + 5 <= depth:
            n_compared += 1
            assert score == pytest.approx(max(scores))
    assert n_compared > 5


def test_a_text_that_came_once_is_continued_to_its_end():
    drafter = SuffixDrafter(max_spec_factor=8.0)
    sequence = drafter.begin([5, 6, 7, 8, 9, 10, 11, 5, 6], shares=False)
    proposal = sequence.propose(24)
    assert proposal.token_ids == [7, 8, 9, 10, 11, 5, 6]
    assert proposal.probabilities == [1.0] * 7
    assert proposal.n_matched == 2


def test_drafts_are_no_longer_than_the_match_allows():
    sequence = SuffixDrafter().begin([5, 6, 7, 8, 9, 10, 11, 5, 6], shares=False)
    assert sequence.propose(24).token_ids == [7, 8]
    assert sequence.propose(1).token_ids == [7]


def test_nothing_is_proposed_for_a_text_without_repetition():
    sequence = SuffixDrafter().begin(list(range(50)), shares=True)
    assert sequence.propose(8) is None


def test_what_others_answered_is_proposed_and_what_they_were_asked_is_not():
    drafter = SuffixDrafter()
    first = drafter.begin([1, 2, 3, 4], shares=True)
    first.extend([30, 31, 32, 33])
    first.end()
    second = drafter.begin([50, 30, 31], shares=True)
    assert second.propose(4).token_ids == [32, 33]
    third = drafter.begin([50, 1, 2], shares=True)
    assert third.propose(4) is None


@pytest.mark.parametrize(("writes", "reads"), [(False, True), (True, False)])
def test_a_sequence_that_does_not_share_neither_tells_nor_hears(writes, reads):
    drafter = SuffixDrafter()
    drafter.begin([1], shares=writes).extend([30, 31, 32, 33])
    assert drafter.begin([50, 30, 31], shares=reads).propose(4) is None


def test_the_history_keeps_within_its_bytes_and_forgets_the_oldest():
    drafter = SuffixDrafter(history_bytes=1 << 15)
    rng = random.Random(0)
    texts = [[rng.randrange(30_000) for _ in range(40)] for _ in range(120)]
    for text in texts:
        drafter.begin([1], shares=True).extend(text)
        drafter.check()
    asked = [drafter.begin(text[:4], shares=True).propose(4) for text in texts]
    assert asked[0] is None
    assert asked[-1].token_ids == texts[-1][4:8]


def test_at_most_so_many_sequences_are_remembered():
    drafter = SuffixDrafter(max_cached_requests=4)
    for i in range(8):
        drafter.begin([1], shares=True).extend([100 + i, 200 + i, 300 + i])
    known = [drafter.begin([100 + i, 200 + i], shares=True).propose(2) is not None for i in range(8)]
    assert known[-1]
    assert sum(known) <= 4
    assert not any(known[:4])


def test_no_history_is_kept_when_it_is_switched_off():
    drafter = SuffixDrafter(max_cached_requests=0)
    drafter.begin([1], shares=True).extend([30, 31, 32, 33])
    assert drafter.begin([50, 30, 31], shares=True).propose(4) is None


def test_a_full_tree_stops_growing_and_is_still_asked():
    drafter = SuffixDrafter(sequence_bytes=1 << 13)
    rng = random.Random(0)
    sequence = drafter.begin([7, 8, 9, 10], shares=False)
    for _ in range(50):
        sequence.extend([rng.randrange(1000) for _ in range(20)])
    assert sequence._tree.n_bytes < 1 << 15
    sequence.extend([7, 8])
    assert sequence.propose(2).token_ids == [9, 10]


@pytest.mark.parametrize("wrong", [{"max_tree_depth": 1}, {"min_token_prob": 1.5}, {"max_spec_factor": -1.0}])
def test_a_limit_out_of_its_range_is_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SuffixDrafter(**wrong)
