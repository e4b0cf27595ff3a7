"""The line of the log that says how fast the engine is."""

import asyncio
import logging

from msgspec.structs import replace

from tiercel.api.http.stats_log import is_idle, keep_logging, stats_line
from tiercel.engine.stats import EngineSnapshot

BEFORE = EngineSnapshot(n_pages=100, n_total_prompt_tokens=10, n_total_generation_tokens=10, n_total_steps=5)
NOW = replace(
    BEFORE,
    n_running=3,
    n_waiting=1,
    n_pages_used=25,
    n_total_prompt_tokens=60,
    n_total_generation_tokens=110,
    n_total_prefix_queries_tokens=50,
    n_total_prefix_hits_tokens=10,
    n_total_steps=9,
)


def test_the_line_says_rates_of_the_time_between():
    assert stats_line(BEFORE, NOW, 10.0) == (
        "Engine 000: Avg prompt throughput: 5.0 tokens/s, Avg generation throughput: 10.0 tokens/s, Running: 3 reqs, "
        "Waiting: 1 reqs, KV cache usage: 25.0%, Prefix cache hit rate: 20.0%"
    )


def test_preemptions_are_told_when_there_were_some():
    assert stats_line(BEFORE, replace(NOW, n_total_preemptions=2), 1.0).endswith(", Preemptions: 2")
    assert "Preemptions" not in stats_line(BEFORE, NOW, 1.0)


def test_an_engine_is_idle_only_when_nothing_runs_and_nothing_was_computed():
    assert is_idle(BEFORE, BEFORE)
    assert not is_idle(BEFORE, NOW)
    assert not is_idle(BEFORE, replace(BEFORE, n_waiting=1))
    assert not is_idle(BEFORE, replace(BEFORE, n_total_steps=6))


def test_an_idle_engine_logs_at_debug_only(caplog):
    snapshots = iter([BEFORE, BEFORE, NOW])

    async def run():
        try:
            await keep_logging(lambda: next(snapshots), 0.001)
        except RuntimeError:  # out of snapshots
            return

    with caplog.at_level(logging.DEBUG, "tiercel.api.http.stats_log"):
        asyncio.run(run())
    assert [record.levelname for record in caplog.records] == ["DEBUG", "INFO"]
