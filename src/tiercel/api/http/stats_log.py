"""The line that says, every few seconds, how fast the engine is and how full. Knows no metrics library.

Its words are those of vLLM's line, which people grep for; an idle engine says nothing (at level debug it does).
"""

import asyncio
import logging
from collections.abc import Callable

from tiercel.engine.stats import EngineSnapshot

_log = logging.getLogger(__name__)


def stats_line(before: EngineSnapshot, now: EngineSnapshot, elapsed_s: float) -> str:
    """Give the line for what happened between two snapshots, `elapsed_s` apart."""
    prompt = (now.n_total_prompt_tokens - before.n_total_prompt_tokens) / elapsed_s
    generated = (now.n_total_generation_tokens - before.n_total_generation_tokens) / elapsed_s
    queries = now.n_total_prefix_queries_tokens - before.n_total_prefix_queries_tokens
    hits = now.n_total_prefix_hits_tokens - before.n_total_prefix_hits_tokens
    preempted = now.n_total_preemptions - before.n_total_preemptions
    line = (
        f"Engine 000: Avg prompt throughput: {prompt:.1f} tokens/s, Avg generation throughput: {generated:.1f} "
        f"tokens/s, Running: {now.n_running} reqs, Waiting: {now.n_waiting} reqs, KV cache usage: "
        f"{100 * now.kv_usage_frac:.1f}%, Prefix cache hit rate: {100 * hits / queries if queries else 0.0:.1f}%"
    )
    return f"{line}, Preemptions: {preempted}" if preempted else line


def is_idle(before: EngineSnapshot, now: EngineSnapshot) -> bool:
    """Whether nothing happened between two snapshots and nothing is under way."""
    return not (now.n_running or now.n_waiting) and now.n_total_steps == before.n_total_steps


async def keep_logging(snapshot: Callable[[], EngineSnapshot], interval_s: float) -> None:
    """Log a line every `interval_s`, until cancelled."""
    loop = asyncio.get_running_loop()
    before, before_s = snapshot(), loop.time()
    while True:
        await asyncio.sleep(interval_s)
        now, now_s = snapshot(), loop.time()
        level = logging.DEBUG if is_idle(before, now) else logging.INFO
        _log.log(level, "%s", stats_line(before, now, now_s - before_s))
        before, before_s = now, now_s
