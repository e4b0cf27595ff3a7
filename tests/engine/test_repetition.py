"""Outputs that only repeat themselves are ended, and no others are."""

import random

import pytest
from engine_kit import make_client
from test_constraints import Letters

from tiercel.base.errors import RequestError
from tiercel.engine.repetition import RepetitionWatch
from tiercel.protocol.params import SamplingParams
from tiercel.protocol.repetition import RepetitionDetectionParams
from tiercel.protocol.structured import StructuredOutputsParams


def repeats(ids, params):
    sizes = range(max(params.min_pattern_size, 1), params.max_pattern_size + 1)
    return any(
        len(ids) >= size * params.min_count and ids[-size:] * params.min_count == ids[-size * params.min_count :]
        for size in sizes
    )


@pytest.mark.parametrize("seed", range(6))
def test_a_pattern_is_found_as_soon_as_it_stands_there(seed):
    draw = random.Random(seed)
    params = RepetitionDetectionParams(
        max_pattern_size=5, min_pattern_size=draw.randrange(4), min_count=draw.choice((2, 3))
    )
    n_found = 0
    for _ in range(100):
        prompt = [1, 1, 1, 1]
        ids, watch = list(prompt), RepetitionWatch(params)
        pattern = [draw.randrange(3) for _ in range(draw.randrange(1, 7))]
        for k in range(30):
            ids.append(draw.randrange(3) if draw.random() < 0.1 else pattern[k % len(pattern)])
            found = watch.push(ids, len(prompt))
            assert found == repeats(ids[len(prompt) :], params)
            n_found += found
    assert n_found > 100


def test_an_output_that_repeats_itself_ends_and_says_so():
    client = make_client(tokenizer=Letters(()))
    repetition = RepetitionDetectionParams(max_pattern_size=3, min_pattern_size=1, min_count=4)
    form = StructuredOutputsParams(regex="H{50}")
    ask = {"structured_outputs": form, "max_tokens": 40, "repetition_detection": repetition}
    one = list(client.submit("HHHHHH", SamplingParams(**ask)))[-1].outputs[0]
    assert (one.text, one.finish_reason, one.stop_reason) == ("HHHH", "repetition", "repetition_detected")
    one = list(client.submit("H", SamplingParams(min_tokens=9, **ask)))[-1].outputs[0]
    assert (len(one.text), one.finish_reason) == (9, "repetition")
    one = list(client.submit("H", SamplingParams(**(ask | {"max_tokens": 4}))))[-1].outputs[0]
    assert one.finish_reason == "length"
    client.close()


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"max_pattern_size": -1}, "max_pattern_size"),
        ({"max_pattern_size": 513, "min_count": 2}, "max_pattern_size"),
        ({"max_pattern_size": 2.0, "min_count": 2}, "max_pattern_size"),
        ({"max_pattern_size": True, "min_count": 2}, "max_pattern_size"),
        ({"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}, "min_pattern_size"),
        ({"max_pattern_size": 2, "min_count": 1}, "min_count"),
        ({"max_pattern_size": 2}, "min_count"),
    ],
)
def test_wrong_values_are_refused_by_name(given, param):
    with pytest.raises(RequestError) as caught:
        RepetitionDetectionParams(**given)
    assert caught.value.param == f"repetition_detection.{param}"


def test_no_sizes_are_no_detection():
    watch = RepetitionWatch(RepetitionDetectionParams())
    assert not any(watch.push([7] * n, 0) for n in range(1, 50))
