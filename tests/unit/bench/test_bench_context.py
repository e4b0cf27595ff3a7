import json

import pytest

from tiercel.base.errors import ConfigError, RequestFailed
from tiercel.bench import context, limits
from tiercel.bench.context import ContextWork
from tiercel.cli import main

WORDS = ["bench", "context", "--input-len", "40", "--short-len", "8", "--output-len", "5", "--num-iters", "2"]


@pytest.fixture
def reading(monkeypatch):
    """A machine that reads 2 GB/s; notes the working sets it was asked for."""
    asked = []
    monkeypatch.setattr(limits, "measure_reading", lambda n_threads, level, n_bytes: asked.append(n_bytes) or 2.0)
    return asked


def test_added_bytes_are_read_in_each_step():
    # 4 ms a step, and 2 MB more at 2 GB/s: 5 ms.
    assert context.predict(250.0, 2e6, 2.0) == pytest.approx(200.0)


def test_context_writes_a_row_with_what_was_predicted_and_reached(engine, reading, capsys, no_checkout):
    assert main.main([*WORDS, "--num-iters-warmup", "1", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    found = {name: one["median"] for name, one in row["contestants"]["tiercel"]["measures"].items()}
    # The fake engine makes 4 tokens after the first in 0.45 s, whatever the prompt; 32 tokens more are 3.2 MB, 1.6 ms.
    assert found["short_tok_s"] == found["long_tok_s"] == pytest.approx(4 / 0.45)
    assert found["predicted_tok_s"] == pytest.approx(1 / (0.45 / 4 + 0.0016))
    assert found["of_predicted_frac"] == pytest.approx(1 + 0.0016 / (0.45 / 4))
    assert [len(one.token_ids) for turn in engine.turns for one in turn] == [8, 40] * 3
    assert reading == [1_000_000 + 3_200_000] * 2
    assert row["config"]["work"]["kv_token_bytes"] == 100_000
    assert engine.is_closed


def test_outputs_that_change_are_no_measurement(engine, reading, capsys, no_checkout):
    engine.drifts = True
    assert main.main(WORDS) == 1
    assert "outputs changed" in capsys.readouterr().err


@pytest.mark.parametrize("work", [{"short_len": 0}, {"short_len": 5, "input_len": 5}, {"output_len": 1}])
def test_a_context_that_does_not_grow_is_refused(work):
    with pytest.raises(ConfigError, match="bench context"):
        ContextWork(**work)


def test_without_a_first_tokens_time_there_is_no_rate(engine, reading, no_checkout):
    engine.has_times = False
    with pytest.raises(RequestFailed, match="no time of the first token"):
        context._run(engine, context.Request((1, 2), 3))
