"""A draft model for the engine's tests: a fake runner of its own, which answers as the target's does."""

from tiercel.spec.drafters.draft_model import DraftModelDrafter
from tiercel.testing.fake_runner import FakeRunner, make_limits

VOCAB = 97


class OtherRunner(FakeRunner):
    """Another model: right about every token but each `n`th of a digest."""

    n_wrong = 3

    def _run_sequence(self, plan, s, start, n):
        rows = super()._run_sequence(plan, s, start, n)
        row = self._row(int(plan.seq_slot[s]))
        for i, (place, position, token, value) in enumerate(rows):
            if token >= 0 and value % self.n_wrong == 0:
                rows[i] = (place, position, (token + 1) % self._limits.vocab_size, value)
                row.tokens[position + 1] = rows[i][2]
        return rows


def make_drafter(*, kind=FakeRunner, vocabulary=None, target_vocab_size=VOCAB, runner=None, **limits):
    """Give a draft model with room for four sequences, unless told otherwise; `options` are the runner's."""
    options = {name: limits.pop(name) for name in ("fail_steps", "nan_token_id", "is_strict") if name in limits}
    runner = runner or kind(make_limits(**limits), **options)
    return DraftModelDrafter(runner, target_vocab_size=target_vocab_size, vocabulary=vocabulary)
