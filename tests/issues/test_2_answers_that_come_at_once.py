"""generate_many lost the output of a request that ended before it was listened to, and raised RuntimeError instead.

It asked whether there was something to read by reading it. The window is a few microseconds wide with a real engine;
here the engine runs to the end inside `add`.
"""

import pytest

from tiercel.base.errors import RequestFailed
from tiercel.engine.client import EngineClient
from tiercel.engine.config import EngineConfig
from tiercel.engine.core import EngineCore
from tiercel.protocol.params import SamplingParams
from tiercel.testing.fake_runner import FakeRunner, make_limits

GREEDY = SamplingParams(temperature=0.0, max_tokens=3)


class HastyCore(EngineCore):
    """Has done what it is given when `add` returns."""

    def add(self, new, *, is_bounded=True):
        super().add(new, is_bounded=is_bounded)
        while self.step_once():
            pass


def hasty_client(**runner):
    core = HastyCore(
        FakeRunner(make_limits(), **runner),
        EngineConfig(max_num_seqs=4, max_num_batched_tokens=16, async_scheduling=False),
    )
    return EngineClient(core, None, weights_digest="w", kv_dtype="f16")


def test_outputs_that_are_there_at_once_are_given():
    client = hasty_client()
    results = dict(client.generate_many([[1, 2, 3], [4, 5]], GREEDY))
    assert [len(results[i].outputs[0].token_ids) for i in (0, 1)] == [3, 3]
    client.close()


def test_an_error_that_is_there_at_once_is_given_and_not_raised():
    client = hasty_client(fail_steps=[0])
    results = dict(client.generate_many([[1, 2, 3], [4, 5]], GREEDY))
    assert isinstance(results[0], RequestFailed)
    assert len(results[1].outputs[0].token_ids) == 3
    client.close()


def test_reading_a_ready_handle_twice_is_no_different():
    client = hasty_client()
    handle = client.submit([1, 2], GREEDY)
    assert list(handle)[-1].finished
    with pytest.raises(StopIteration):
        next(handle)
    client.close()
