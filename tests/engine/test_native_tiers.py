"""Tiers below the native runner's pool change no bit: random conversations, tiny pools, restarts between turns.

Every answer is compared with the request alone in an engine without tiers: tokens, log-probabilities, ranks, likeliest.
"""

import random

import pytest
from test_native_engine import MODELS, Ask, Session, TinyModel, alone
from tier_bench import TierSteps, disk, scripted

from tiercel.testing.scripted_tier import Lie


class TierSession(TierSteps, Session):
    def __init__(self, model, *makers, runner=None, **config):
        made = model.runner(n_step_tokens=config.setdefault("max_num_batched_tokens", 64), **(runner or {}))
        config["make_tiers"] = self.make_tiers(makers, made)
        shared = type("Made", (), {"has_state": model.has_state, "runner": lambda self, **_: made})()
        super().__init__(shared, **config)
        self.settle()


@pytest.fixture(scope="module", params=MODELS, ids=lambda m: m[0])
def model(request):
    return TinyModel(*request.param)


def ask_for(prompt, seed):
    rng = random.Random(str((prompt, seed)))
    params = rng.choice([{"temperature": 0.0}, {"temperature": 1.0}]) | {
        "max_tokens": rng.randint(1, 12),
        "logprobs": 3,
    }
    return Ask(tuple(prompt), params, seed)


class Talk:
    """One conversation: its prompt grows by each answer and by what is said next."""

    def __init__(self, rng, shared):
        self.rng = rng
        self.prompt = [*shared, *(rng.randrange(128) for _ in range(rng.randint(1, 30)))]

    def next_ask(self):
        return ask_for(self.prompt, self.rng.randrange(3))

    def go_on(self, tokens):
        self.prompt += [*tokens, *(self.rng.randrange(128) for _ in range(self.rng.randint(1, 12)))]


@pytest.mark.parametrize("seed", range(4))
def test_conversations_over_restarts_and_evictions_are_those_of_an_engine_without_tiers(model, tmp_path, seed):
    rng = random.Random(seed)
    shared = [rng.randrange(128) for _ in range(33)]
    talks = [Talk(rng, shared if rng.random() < 0.6 else []) for _ in range(5)]
    lies = {}
    n_loaded = n_evicted = 0
    for turn in range(3):
        makers = [disk(tmp_path / "kv", capacity_bytes=1 << 22)]
        if rng.random() < 0.5:
            makers.insert(0, scripted(lies=lies, capacity_bytes=rng.choice([1 << 14, 1 << 20])))
        session = TierSession(
            model,
            *makers,
            runner={"n_pages": rng.choice([8, 12, 20]), "n_slots": rng.choice([1, 3]), "n_threads": rng.choice([1, 2])},
            max_num_seqs=3,
            max_num_batched_tokens=rng.choice([16, 64]),
            async_scheduling=rng.random() < 0.7,
        )
        asked = {}
        for i, talk in enumerate(talks):
            ask = talk.next_ask()
            if len(ask.prompt) + ask.params["max_tokens"] > 110:
                continue
            asked[f"t{i}"] = (talk, ask)
            session.ask(f"t{i}", ask)
            for _ in range(rng.randint(0, 6)):
                session.step()
        session.run()
        for name, (talk, ask) in asked.items():
            assert session.result(name) == alone(model, ask), (name, turn)
            talk.go_on(session.tokens[name])
        n_loaded += sum(tally.n_pages_landed for tally in session.tiers._rig.tallies)
        n_evicted += session.scheduler.pool.n_evicted
        session.close()
    assert n_loaded > 0
    assert n_evicted > 0


@pytest.mark.parametrize("lie", [Lie.WRONG_BYTES, Lie.WRONG_LENGTH, Lie.NEVER], ids=lambda lie: lie.name)
def test_a_damaged_page_is_computed_again_bit_for_bit(lie):
    model = TinyModel(*MODELS[0])
    ask = ask_for([(5 * i) % 128 for i in range(70)], 1)
    lies = {}
    session = TierSession(model, scripted(lies=lies))
    session.ask("a", ask)
    session.run()
    session.scheduler.pool.reset_cached()
    tier = session.tiers._rig.tiers[0].tier._tier
    tier.lies[list(tier._held)[2]] = lie
    session.ask("b", ask)
    session.run()
    assert session.result("b") == session.result("a") == alone(model, ask)
    assert session.finals["b"].n_cached_tokens < 64
    session.close()
