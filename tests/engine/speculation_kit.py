"""Drafters for the engine's tests: they know what a fake runner will answer, and are wrong as often as they are
told."""

import random

from tiercel.engine.speculation import Speculation
from tiercel.spec.drafters.interface import Proposal
from tiercel.spec.settings import SpeculationSettings

VOCAB = 97


class KnowingDrafter:
    """Proposes what may come, from `answers`: for a prompt, all that it may be answered; each token right with
    `p_right`."""

    def __init__(self, answers, *, p_right=0.8, seed=0):
        self.answers = answers
        self.p_right = p_right
        self.rng = random.Random(seed)
        self.n_begun = self.n_ended = 0

    def begin(self, prompt_ids, *, shares):
        self.n_begun += 1
        return KnowingSequence(self, tuple(prompt_ids))

    def check(self):
        assert self.n_ended <= self.n_begun

    def close(self):
        pass


class KnowingSequence:
    def __init__(self, drafter, prompt):
        self.drafter, self.prompt, self.output = drafter, prompt, []

    def extend(self, token_ids):
        self.output += token_ids

    def propose(self, n_max):
        rng, n = self.drafter.rng, len(self.output)
        fitting = [a for a in self.drafter.answers.get(self.prompt, []) if a[:n] == self.output and len(a) > n]
        if not fitting or rng.random() < 0.1:
            return None
        ids = rng.choice(fitting)[n : n + rng.randrange(1, n_max + 1)]
        ids = [i if rng.random() < self.drafter.p_right else rng.randrange(VOCAB) for i in ids]
        return Proposal(ids, [0.9 ** (k + 1) for k in range(len(ids))], 1 + n % 12)

    def end(self):
        self.drafter.n_ended += 1


def always(drafter, n=5, **settings):
    """Speculation that computes all drafts there are."""
    return Speculation(drafter, SpeculationSettings(n_tokens_max=n, is_adaptive=False, **settings), vocab_size=VOCAB)


def adaptive(drafter, n, clock=lambda: 0.0):
    """Speculation that computes what pays, by what the runner says of its steps; the clock stands still."""
    return Speculation(drafter, SpeculationSettings(n_tokens_max=n), vocab_size=VOCAB, clock=clock)
