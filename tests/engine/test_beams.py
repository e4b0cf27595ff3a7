"""The search for the likeliest sequences: against one written down plainly, and on the engine."""

import asyncio
import itertools
import math
import random

import pytest
from engine_kit import make_client

from tiercel.base.errors import RequestError
from tiercel.engine.beams import BeamSearch
from tiercel.protocol.beams import BeamSearchParams
from tiercel.protocol.outputs import Logprob
from tiercel.protocol.params import SamplingParams

V = 5  # tokens of the models below
EOS = 4


def model(seed):
    """Log-probabilities of every token, as a function of those before it."""

    def step(ids):
        draw = random.Random(f"{seed} {ids}")
        weights = [draw.choice([1, 1, 2, 3, 5, 8]) for _ in range(V)]  # some are equal
        total = sum(weights)
        entries = [(i, math.log(w / total)) for i, w in enumerate(weights)]
        return sorted(entries, key=lambda one: -one[1])

    return step


def searched(step, params, n_max, eos=(EOS,)):
    search = BeamSearch(params, frozenset(eos), n_max)
    n_steps = 0
    while not search.is_done:
        n = params.n_candidates
        positions = [{i: Logprob(x) for i, x in step(beam.token_ids())[:n]} for beam in search.live]
        search.take(positions)
        n_steps += 1
        assert n_steps <= n_max
    return [(beam.token_ids(), beam.logprob, beam.finish_reason) for beam in search.found()]


def plainly(step, width, penalty, n_max):
    """The same without an early end, bounds or sharing."""

    def score(one):
        ids, logprob = one
        return logprob / max(len(ids) - (ids[-1] == EOS), 1) ** penalty

    live, ended = [([], 0.0)], []
    for _ in range(n_max):
        grown = [([*ids, i], x + y) for ids, x in live for i, y in step(ids)[: 2 * width]]
        ended += [one for one in grown if one[0][-1] == EOS]
        live = sorted((one for one in grown if one[0][-1] != EOS), key=score, reverse=True)[:width]
    return sorted(ended + live, key=score, reverse=True)[:width]


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("width", [2, 3])
def test_a_search_that_ends_early_finds_what_the_plain_one_finds(width, penalty):
    for seed in range(60):
        params = BeamSearchParams(beam_width=width, max_tokens=6, length_penalty=penalty)
        found = [(ids, x) for ids, x, _ in searched(model(seed), params, 6)]
        assert found == plainly(model(seed), width, penalty, 6)


def test_a_search_as_wide_as_all_sequences_finds_the_likeliest_one():
    for seed in range(20):
        step = model(seed)
        params = BeamSearchParams(beam_width=V**3, max_tokens=3, ignore_eos=True, length_penalty=0.0)
        every = {
            ids: sum(dict(step(list(ids[:k])))[ids[k]] for k in range(3))
            for ids in itertools.product(range(V), repeat=3)
        }
        ids, logprob, reason = searched(step, params, 3)[0]
        assert logprob == pytest.approx(max(every.values()))
        assert every[tuple(ids)] == pytest.approx(logprob)
        assert reason == "length"


def test_a_search_of_width_one_is_greedy():
    for seed in range(40):
        step, ids = model(seed), []
        while len(ids) < 6 and EOS not in ids:
            ids.append(step(ids)[0][0])
        ((found, _, reason),) = searched(step, BeamSearchParams(beam_width=1, max_tokens=6), 6)
        assert found == ids
        assert reason == ("stop" if EOS in ids else "length")


def test_of_equal_sequences_the_first_followed_is_the_better():
    def step(_):
        return [(i, -1.0) for i in range(V)]

    params = BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True)
    assert [ids for ids, *_ in searched(step, params, 3)] == [[0, 0, 0], [0, 0, 1]]


def test_a_token_that_cannot_be_is_never_followed():
    def step(_):
        return [(0, -0.1), (1, -math.inf), (2, -math.inf), (3, -math.inf)]

    assert [ids for ids, *_ in searched(step, BeamSearchParams(beam_width=2, max_tokens=2), 2)] == [[0, 0]]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": True}, "beam_width"),
        ({"beam_width": 2.0}, "beam_width"),
        ({"beam_width": None}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 0.5}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"length_penalty": math.inf}, "length_penalty"),
        ({"length_penalty": "1"}, "length_penalty"),
        ({"length_penalty": -101}, "length_penalty"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"logprobs": -1}, "logprobs"),
    ],
)
def test_a_search_out_of_its_range_is_refused(fields, param):
    with pytest.raises(RequestError) as caught:
        BeamSearchParams(**({"beam_width": 2, "max_tokens": 4} | fields))
    assert caught.value.param == param


async def one_output(handle):
    return [output async for output in handle]


@pytest.fixture
def client():
    client = make_client()
    yield client
    client.close()


def test_a_width_of_one_says_what_the_engine_says_greedily(client):
    *_, greedy = client.submit("hello", SamplingParams(temperature=0, max_tokens=20))
    (found,) = asyncio.run(one_output(client.beam_search("hello", BeamSearchParams(beam_width=1, max_tokens=20))))
    assert found.outputs[0].token_ids == greedy.outputs[0].token_ids
    assert found.outputs[0].text == greedy.outputs[0].text
    assert found.outputs[0].finish_reason == greedy.outputs[0].finish_reason
    assert found.finished


def test_a_search_is_the_same_each_time_and_its_best_is_no_worse_than_greedy(client):
    params = BeamSearchParams(beam_width=4, max_tokens=12, ignore_eos=True, logprobs=3)
    (one,) = asyncio.run(one_output(client.beam_search("hello", params)))
    (two,) = asyncio.run(one_output(client.beam_search("hello", params)))
    assert one.outputs == two.outputs
    assert len(one.outputs) == 4
    assert len({tuple(out.token_ids) for out in one.outputs}) == 4
    sums = [out.cumulative_logprob for out in one.outputs]
    assert sums == sorted(sums, reverse=True)
    for out in one.outputs:
        assert len(out.logprobs) == len(out.token_ids) == 12
        assert out.cumulative_logprob == pytest.approx(
            sum(entries[i].logprob for i, entries in zip(out.token_ids, out.logprobs, strict=True))
        )
        assert all(next(iter(entries)) == i for i, entries in zip(out.token_ids, out.logprobs, strict=True))
        assert all(3 <= len(entries) <= 4 for entries in out.logprobs)


def test_a_width_above_half_of_the_log_probabilities_is_refused(client):
    with pytest.raises(RequestError, match="max_logprobs"):
        client.beam_search("hello", BeamSearchParams(beam_width=11, max_tokens=4))


def test_a_search_that_is_left_or_aborted_frees_what_it_holds(client):
    params = BeamSearchParams(beam_width=3, max_tokens=60, ignore_eos=True)

    async def leave():
        task = asyncio.create_task(one_output(client.beam_search("hello", params)))
        while not client._requests:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def abort():
        handle = client.beam_search("hello", params)
        task = asyncio.create_task(one_output(handle))
        while handle._search.live[0].n < 3:
            await asyncio.sleep(0)
        handle.abort()
        return await task

    asyncio.run(leave())
    (output,) = asyncio.run(abort())
    assert all(out.finish_reason == "abort" for out in output.outputs)
    assert all(len(out.token_ids) < 60 for out in output.outputs)
    assert client.reset_prefix_cache() in (True, False)
    while client._owners:
        client.reset_prefix_cache()
    assert not client._requests
