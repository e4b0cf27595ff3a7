"""Chats with tiny pools, on every model with recurrent state: a turn that goes on from a kept state gets the bits that
it gets alone, whatever was evicted, preempted, aborted, forked or drafted meanwhile.
"""

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from speculation_kit import KnowingDrafter
from test_native_engine import GREEDY, MAX_LEN, PENALISED, SAMPLED, SCORED, VOCAB, Ask, Session, TinyModel, alone, words

from tiercel.engine.speculation import Speculation
from tiercel.quant.formats import Format
from tiercel.spec.settings import SpeculationSettings

MODELS = [
    ("qwen3_5", Format.Q8_0, "float16"),
    ("qwen3_5_linear_last_tied", Format.F32, "float32"),
    ("qwen3_5_moe", Format.Q4_0, "float16"),
    ("qwen3_next", Format.Q8_0, "float32"),
    ("kimi_linear", Format.Q8_0, "float16"),
    ("ling_clamped", Format.F32, "float16"),
    ("lfm2", Format.Q8_0, "float16"),
    ("mamba2", Format.Q8_0, "float16"),
]


@pytest.fixture(scope="module", params=MODELS, ids=lambda m: m[0])
def model(request):
    return TinyModel(*request.param)


@dataclass(frozen=True)
class Turn:
    """A request of one of the chats: what was said there so far, and some more."""

    chat: int
    n_new: int
    params: tuple
    n_rounds: int  # before it
    is_again: bool  # the last turn is asked once more, with another end
    n_outputs: int
    is_aborted: bool


turns = st.builds(
    Turn,
    chat=st.sampled_from([0, 0, 0, 1, 1, 2]),
    n_new=st.integers(1, 24),
    params=st.sampled_from([SAMPLED, GREEDY, PENALISED, SCORED]).map(lambda p: tuple(p.items())),
    n_rounds=st.integers(0, 6),
    is_again=st.sampled_from([False, False, False, True]),
    n_outputs=st.sampled_from([1, 1, 1, 3]),
    is_aborted=st.sampled_from([False, False, False, False, True]),
)
engines = st.fixed_dictionaries(
    {
        "async_scheduling": st.booleans(),
        "max_num_batched_tokens": st.sampled_from([8, 24, 64]),
        "max_num_seqs": st.sampled_from([4, 2]),
        "long_prefill_token_threshold": st.sampled_from([0, 0, 5]),
    }
)
runners = st.fixed_dictionaries(
    {
        "n_pages": st.sampled_from([7, 9, 12, 30]),
        "n_snapshots": st.sampled_from([1, 2, 3, 5, 24]),
        "spacing": st.sampled_from([16, 32, 64]),
        "n_threads": st.sampled_from([1, 2]),
    }
)
drafting = st.none() | st.fixed_dictionaries(
    {"n": st.sampled_from([2, 7, 20]), "p_right": st.sampled_from([0.5, 0.9, 1.0]), "is_ahead": st.booleans()}
)
SYSTEM = words(21, 99)


class Chats:
    """Three conversations that begin alike; each goes on from what it really got."""

    def __init__(self, session, answers=None):
        self.session = session
        self.answers = answers  # what a drafter may know: of each prompt, all that it is answered
        self.said = [SYSTEM] * 3
        self.sent = {}

    def ask(self, turn):
        """Send a turn, as several requests where it has several outputs."""
        chat, session, said = turn.chat, self.session, self.said[turn.chat]
        if turn.is_again:
            said = said[: -min(len(said) - 1, turn.n_new)]
        prompt = said + words(turn.n_new, len(self.sent))
        params = dict(turn.params)
        if len(prompt) + params["max_tokens"] > MAX_LEN:
            prompt = SYSTEM + words(turn.n_new, len(self.sent))
        names = [f"t{len(self.sent)}.{i}" for i in range(turn.n_outputs)]
        for i, name in enumerate(names):
            self.sent[name] = Ask(prompt, params, i)
            if self.answers is not None:
                self.answers.setdefault(prompt, []).append(alone(session.model, self.sent[name])[0])
            session.ask(name, self.sent[name])
        for _ in range(turn.n_rounds):
            session.step()
        if turn.is_aborted:
            session.core.finish(names[:1])
            self.said[chat] = prompt
            return
        while names[0] not in session.finals:
            session.step()
        self.said[chat] = prompt + tuple(session.tokens[names[0]])


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(trace=st.lists(turns, min_size=3, max_size=7), engine=engines, runner=runners, how=drafting)
def test_a_turn_of_a_chat_gets_the_bits_it_gets_alone(model, trace, engine, runner, how):
    answers, options = None, {}
    if how is not None:
        answers = {}
        drafts = SpeculationSettings(n_tokens_max=how["n"], is_adaptive=False, is_ahead=how["is_ahead"])
        speculation = Speculation(KnowingDrafter(answers, p_right=how["p_right"]), drafts, vocab_size=VOCAB)
        options = {"speculation": speculation, "max_draft_rows": 24}
    session = Session(model, runner=runner, **engine, **options)
    chats = Chats(session, answers)
    for turn in trace:
        chats.ask(turn)
    session.run()
    aborted = {name for name, final in session.finals.items() if final.finish_reason == "abort"}
    got = {name: session.result(name) for name in chats.sent if name not in aborted}
    keeper = session.scheduler.states
    snapshot = session.end()
    event(f"hits: {min(snapshot.n_total_snapshots_hit, 3)}")
    event(f"evicted: {snapshot.n_total_snapshots_evicted > 0}")
    event(f"preempted: {snapshot.n_total_preemptions > 0}")
    event(f"accepted: {how is not None and snapshot.speculation.n_accepted_tokens > 0}")
    store = keeper.store
    assert (store.n_free + store.n_kept, store.n_reserved, store.n_pinned) == (runner["n_snapshots"], 0, 0)
    keeper.reset()
    assert store.n_free == runner["n_snapshots"]
    assert got == {name: alone(model, chats.sent[name]) for name in got}


@pytest.mark.parametrize("is_async", [False, True])
def test_a_preempted_sequence_goes_on_from_a_state_and_gets_its_bits(model, is_async):
    requests = [Ask(words(20, i), GREEDY | {"max_tokens": 40}) for i in range(3)]
    session = Session(model, runner={"n_pages": 7, "spacing": 32}, async_scheduling=is_async)
    for i, ask in enumerate(requests):
        session.ask(f"r{i}", ask)
    session.run()
    assert [session.result(f"r{i}") for i in range(3)] == [alone(model, ask) for ask in requests]
    snapshot = session.end()
    assert snapshot.n_total_preemptions > 0
    assert snapshot.n_total_snapshots_hit > 0
    n_needed = sum(len(ask.prompt) + 39 for ask in requests)
    # A page, and what was planned and not taken, is computed again: not all that a preempted sequence had.
    assert snapshot.n_total_computed_tokens - n_needed < snapshot.n_total_tokens_lost


@pytest.mark.parametrize("is_async", [False, True])
def test_outputs_that_fork_from_one_prompt_compute_it_once(model, is_async):
    requests = [Ask(words(75), SAMPLED, seed) for seed in range(3)]
    session = Session(model, runner={"spacing": 64}, async_scheduling=is_async)
    for i, ask in enumerate(requests):
        session.ask(f"r{i}", ask)
    session.run()
    assert [session.result(f"r{i}") for i in range(3)] == [alone(model, ask) for ask in requests]
    assert [session.firsts[f"r{i}"].n_cached_tokens for i in range(3)] == [0, 64, 64]
    session.end()
