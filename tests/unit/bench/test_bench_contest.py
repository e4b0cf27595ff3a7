import pytest
from bench_fakes import FakeEngine, continue_ids
from hypothesis import given
from hypothesis import strategies as st

from tiercel.base.errors import RequestFailed
from tiercel.bench.contest import Request, Run, common_prefix, take_turns

GROUP = [Request((1, 2), 3), Request((4,), 2)]
CHECKS = [Request((7,), 8), Request((8,), 8), Request((9,), 8)]


class Rival:
    """A peer in this process. `log` notes whose turn it is."""

    def __init__(self, name="rival", *, log=None, n_right=99, fails_at=None):
        self.versions, self.config = {}, {}
        self.name = name
        self.log = [] if log is None else log
        self.n_right, self.fails_at, self.n_turns = n_right, fails_at, 0

    def generate(self, requests):
        self.n_turns += 1
        self.log.append(self.name)
        if self.n_turns == self.fails_at:
            raise RequestFailed("peer rival: died: no reason")
        ids = []
        for one in requests:
            right = continue_ids(one.token_ids, one.max_tokens)
            ids.append(right[: self.n_right] + (0,) * (len(right) - self.n_right))
        return Run(tuple(ids), 1.0)


def contest(*competitors, **options):
    settings = {"checks": CHECKS, "n_agree_tokens": 4, "n_warmups": 1, "n_rounds": 3} | options
    return take_turns(competitors, [GROUP], **settings)


def test_every_contestant_has_a_run_a_round_and_warm_ups_do_not_count():
    turns = contest(FakeEngine(), Rival())
    assert {name: len(runs) for name, runs in turns.runs.items()} == {"tiercel": 3, "rival": 3}


def test_contestants_take_turns_and_nobody_always_goes_first():
    log = []
    contest(FakeEngine(), Rival("a", log=log), Rival("b", log=log), checks=CHECKS[:1], n_warmups=0, n_rounds=4)
    assert log[2:] == ["a", "b", "b", "a", "a", "b", "b", "a"]


def test_what_is_checked_at_once_is_as_many_as_are_timed_at_once():
    ours = FakeEngine()
    contest(ours)
    assert [len(turn) for turn in ours.turns[:2]] == [2, 1]


def test_a_peer_that_agrees_long_enough_is_timed_and_the_row_can_say_how_long():
    turns = contest(FakeEngine(), Rival(n_right=4))
    assert turns.agreement == {"rival": [4, 4, 4]}
    assert turns.timed_agreement == {"tiercel": [3, 2], "rival": [3, 2]}
    assert not turns.skipped


def test_a_close_call_in_one_text_is_forgiven_and_in_two_is_not():
    class Turned(Rival):
        def generate(self, requests):
            run = super().generate(requests)
            both = zip(requests, run.token_ids, strict=True)
            turned = [ids if one.token_ids[0] > self.n_turned else (0, *ids[1:]) for one, ids in both]
            return Run(tuple(turned), run.elapsed_s)

    for last, is_timed in ((7, True), (8, False)):
        rival = Turned()
        rival.n_turned = last
        turns = contest(FakeEngine(), rival)
        assert ("rival" in turns.runs) is is_timed


def test_a_fast_wrong_answer_has_no_runs():
    rival = Rival(n_right=3)
    turns = contest(FakeEngine(), rival)
    assert "rival" not in turns.runs
    assert "need 4" in turns.skipped["rival"]
    assert rival.n_turns == 2


@pytest.mark.parametrize("fails_at", [1, 3, 5])
def test_a_peer_that_fails_at_any_turn_is_left_out_whole_and_ours_goes_on(fails_at):
    turns = contest(FakeEngine(), Rival(fails_at=fails_at), Rival("other"))
    assert set(turns.runs) == {"tiercel", "other"}
    assert turns.skipped == {"rival": "peer rival: died: no reason"}
    assert len(turns.runs["other"]) == 3


def test_outputs_of_ours_that_change_from_round_to_round_are_an_error():
    with pytest.raises(RequestFailed, match="changed between rounds"):
        contest(FakeEngine(drifts=True))


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2)))
def test_a_common_prefix_is_common_and_no_longer_one_is(a, b):
    n = common_prefix(a, b)
    assert a[:n] == b[:n]
    assert a[: n + 1] != b[: n + 1] or n == min(len(a), len(b))
