"""A draft model on a fake runner: what it reads, how long it drafts, and what it believes of itself."""

import pytest

from tiercel.protocol.params import SamplingParams
from tiercel.spec.drafters.draft_model import Confidence, DraftModelDrafter
from tiercel.spec.drafters.interface import Sampling
from tiercel.testing.fake_runner import FakeRunner, expected_tokens, make_limits

GREEDY = SamplingParams(temperature=0.0)
PROMPT = [3, 1, 4, 1, 5]


class Runner(FakeRunner):
    """Notes its steps."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.seen = []

    def submit(self, plan):
        self.seen.append((plan.seq_start.tolist(), plan.seq_tokens.tolist()))
        super().submit(plan)


def drafter_of(**options):
    compute_ns = options.pop("compute_ns", 0)
    return DraftModelDrafter(Runner(make_limits(**options), compute_ns=compute_ns), target_vocab_size=97)


def test_it_says_what_it_would_answer():
    drafter = drafter_of()
    sequence = drafter.begin(PROMPT, shares=True)
    want = expected_tokens(PROMPT, 12, GREEDY)
    guess = sequence.propose(4)
    assert guess.token_ids == want[:4]
    assert guess.probabilities == sorted(guess.probabilities, reverse=True)
    assert all(0.0 < p <= 1.0 for p in guess.probabilities)
    sequence.extend(want[:2])
    assert sequence.propose(3).token_ids == want[2:5]
    # Read: the prompt and three drafts; then nothing again but the last token that came.
    assert drafter.runner.seen == [([0], [5]), ([5], [1]), ([6], [1]), ([7], [1]), ([6], [1]), ([7], [1]), ([8], [1])]
    drafter.check()
    sequence.end()
    assert drafter.n_pages_free == 64


def test_what_did_not_come_is_read_anew():
    drafter = drafter_of()
    sequence = drafter.begin(PROMPT, shares=True)
    drafts = sequence.propose(4).token_ids
    came = [drafts[0], (drafts[1] + 1) % 97, 7]
    sequence.extend(came)
    drafter.runner.seen.clear()
    assert sequence.propose(2).token_ids == expected_tokens([*PROMPT, *came], 2, GREEDY)
    assert drafter.runner.seen[0] == ([6], [2])


@pytest.mark.parametrize("seed", range(3))
def test_a_sampled_sequence_is_drafted_with_its_own_noise(seed):
    params = SamplingParams(temperature=1.0, logprobs=2, min_tokens=30, max_tokens=40)
    drafter = drafter_of()
    sequence = drafter.begin_sampled(PROMPT, Sampling(params, seed, (5, 6)), shares=True)
    assert sequence.propose(6).token_ids == expected_tokens(PROMPT, 6, params, seed=seed, stop_ids=(5, 6))


def test_a_prompt_is_read_in_pieces_and_those_that_lack_least_come_first():
    drafter = drafter_of(max_step_tokens=8)
    short, long = drafter.begin(PROMPT, shares=True), drafter.begin(range(20), shares=True)
    answers = drafter.propose_all([(long, 2), (short, 2)])
    assert answers[0] is None
    assert answers[1].token_ids == expected_tokens(PROMPT, 2, GREEDY)
    assert drafter.runner.seen[0] == ([0, 0], [5, 3])
    assert drafter.propose_all([(long, 2)]) == [None]
    assert drafter.propose_all([(long, 2)]) == [None]
    assert drafter.propose_all([(long, 2)])[0].token_ids == expected_tokens(range(20), 2, GREEDY)
    drafter.check()


def test_no_guess_goes_beyond_its_context():
    drafter = drafter_of(max_len_tokens=8)
    sequence = drafter.begin(PROMPT, shares=True)
    assert len(sequence.propose(9).token_ids) == 3
    sequence.extend([1, 2, 3])
    assert sequence.propose(9) is None
    sequence.extend([4, 5])
    assert sequence.propose(9) is None


def test_ids_that_the_model_has_no_row_for_are_left_out():
    drafter = drafter_of()
    sequence = drafter.begin([*PROMPT[:2], 97, *PROMPT[2:], 1000], shares=True)
    assert sequence.propose(2).token_ids == expected_tokens(PROMPT, 2, GREEDY)


def test_a_draft_that_the_target_has_no_row_for_ends_the_guess():
    drafter = DraftModelDrafter(Runner(make_limits()), target_vocab_size=40)
    sequence = drafter.begin(PROMPT, shares=True)
    want = expected_tokens(PROMPT, 8, GREEDY)
    n = next(i for i, token in enumerate(want) if token >= 40)
    guess = sequence.propose(8)
    assert (guess.token_ids if guess is not None else []) == want[:n]
    drafter.check()


def test_passes_end_where_one_more_costs_more_than_it_brings():
    drafter = drafter_of(compute_ns=1_000_000)
    sequence = drafter.begin(PROMPT, shares=True)
    sequence.propose(6)  # which measures a pass
    assert drafter.pass_s == pytest.approx(1e-3)
    for token_s, n_least, n_most in ((1e-9, 1, 2), (2e-3, 2, 5), (1.0, 6, 6)):
        sequence.extend(expected_tokens([*PROMPT], 1, GREEDY))
        ((guess),) = drafter.propose_all([(sequence, 6)], token_s=token_s)
        assert n_least <= len(guess.token_ids) <= n_most
    drafter.check()


def test_slots_and_pages_go_to_those_that_draft():
    drafter = drafter_of(n_slots=2, n_pages=8)
    sequences = [drafter.begin([*PROMPT, i], shares=True) for i in range(3)]
    for _ in range(2):
        for i, sequence in enumerate(sequences):
            assert sequence.propose(2).token_ids == expected_tokens([*PROMPT, i], 2, GREEDY)
            drafter.check()
    # More than there are, all at once: some have no guess, and nothing is lost.
    answers = drafter.propose_all([(one, 2) for one in sequences])
    assert [answer is None for answer in answers].count(True) == 1
    drafter.check()
    for one in sequences:
        one.end()
    assert drafter.n_pages_free == 8
    drafter.check()


@pytest.mark.parametrize("is_sampled", [False, True])
def test_confidence_is_what_came_true(is_sampled):
    confidence = Confidence(is_sampled=is_sampled)
    assert 0.0 < confidence.chance(0.0) <= confidence.chance(0.5) <= confidence.chance(1.0) <= 1.0
    for i in range(400):
        confidence.observe(0.9, is_right=i % 4 != 0)
        confidence.observe(0.1, is_right=i % 2 == 0)
    assert confidence.chance(0.9) == pytest.approx(0.75, abs=0.06)
    assert confidence.chance(0.1) == pytest.approx(0.5, abs=0.06)
