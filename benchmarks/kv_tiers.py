"""Whether tiers below the page pool pay on this machine's disk. Prints one JSON object a line.

    python benchmarks/kv_tiers.py restore|shared|stores|zipf [MODEL] [FOLDER]

restore  time to the first token of a prompt of 2,048 tokens: computed, and found on disk by an engine that was started
         anew, with the files' pages dropped from the system's cache
shared   50 requests that share such a prompt, which only the disk has: loads, and the slowest first token against one
stores   32 streams at once, without a tier, with one that stores what it sees twice (nothing, here), and with one that
         stores everything: taking turns, tokens a second

zipf     prompts of ten times what the pool holds, asked for by Zipf's law: hit rate and first tokens, with and without

Outputs are compared before times are.
"""

import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tiercel import LLM, SamplingParams

IDS = [(7919 * i) % 40_000 + 100 for i in range(2048)]
ONE = SamplingParams(temperature=0.0, max_tokens=1, logprobs=1)


def engine(model: str, folder: Path | None, sights: int = 1) -> LLM:
    """Start an engine, with a tier in the folder if one is given."""
    tier = {"type": "disk", "path": str(folder), "capacity": "8GiB", "store_sights": sights}
    tiers: list[dict[str, Any]] = [] if folder is None else [tier]
    return LLM(model, kv_tiers=tiers, max_model_len=4096, kv_cache_memory_bytes=1 << 30)


def first_token(llm: LLM, ids: list[int]) -> tuple[float, int, Any]:
    """Return seconds to the first token, how many were cached, and the token with its log-probability."""
    start_s = time.perf_counter()
    (output,) = llm.generate([{"prompt_token_ids": ids}], ONE, use_tqdm=False)
    took_s = time.perf_counter() - start_s
    return took_s, output.num_cached_tokens or 0, (output.outputs[0].token_ids, output.outputs[0].logprobs)


def warm_up(llm: LLM) -> None:
    """Have the weights read once, as a start does not."""
    first_token(llm, list(range(100, 164)))


def drop(folder: Path) -> None:
    """Have the system forget the files' contents."""
    os.sync()
    for file in folder.rglob("*.kv"):
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def restore(model: str, folder: Path) -> None:
    """Compare computing with finding on disk."""
    with engine(model, folder) as llm:
        warm_up(llm)
        computed_s, n_cached, want = first_token(llm, IDS)
        assert n_cached == 0
    found: list[float] = []
    computed = [computed_s]
    for _ in range(5):
        drop(folder)
        with engine(model, folder) as llm:
            warm_up(llm)
            took_s, n_cached, got = first_token(llm, IDS)
            assert got == want
            assert n_cached == 2032
            found.append(took_s)
        with engine(model, None) as llm:
            warm_up(llm)
            took_s, _, got = first_token(llm, IDS)
            assert got == want
            computed.append(took_s)
    told("restore", found_s=found, computed_s=computed, ratio=statistics.median(found) / statistics.median(computed))


def shared(model: str, folder: Path) -> None:
    """Send 50 requests at once that share a prefix which only the disk has."""
    with engine(model, folder) as llm:
        first_token(llm, IDS)
    drop(folder)
    with engine(model, folder) as llm:
        warm_up(llm)
        alone_s, _, _ = first_token(llm, [*IDS, 7])
    drop(folder)
    with engine(model, folder) as llm:
        warm_up(llm)
        n_before = llm.stats()["tier 1:disk"]["n_loads"]
        slowest_s = fifty(llm, 100)
        n_loads = llm.stats()["tier 1:disk"]["n_loads"] - n_before
        own_s = fifty(llm, 200)  # the pool has the prefix now: what is left is each one's own tokens
    limit_s = 1.2 * alone_s + own_s
    told("shared", alone_s=alone_s, slowest_s=slowest_s, own_s=own_s, limit_s=limit_s, n_loads=n_loads)


def fifty(llm: LLM, first_id: int) -> float:
    """Return the slowest first token of 50 requests that share the prompt."""
    start_s = time.monotonic()
    prompts = [{"prompt_token_ids": [*IDS, first_id + i]} for i in range(50)]
    outputs = llm.generate(prompts, ONE, use_tqdm=False)
    assert all((output.num_cached_tokens or 0) >= 2032 for output in outputs)
    return max(output.metrics.first_token_s for output in outputs) - start_s


def stores(model: str, folder: Path) -> None:
    """Compare the throughput of 32 streams with and without storing."""
    kinds = {
        "none": engine(model, None),
        "twice": engine(model, folder / "twice", 2),
        "all": engine(model, folder / "all", 1),
    }
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    for i in range(5):
        prompts = [{"prompt_token_ids": [100 + 977 * i + 31 * s + 7 * t for t in range(64)]} for s in range(32)]
        answers = {}
        for kind, llm in kinds.items():
            start_s = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            took_s = time.perf_counter() - start_s
            answers[kind] = [output.outputs[0].token_ids for output in outputs]
            if i > 0:  # the first is a warm-up
                rates[kind].append(32 * 64 / took_s)
        assert answers["none"] == answers["twice"] == answers["all"]
    n_stored = kinds["all"].stats()["tier 1:disk"]["n_stored"]
    for llm in kinds.values():
        llm.close()
    cost = {k: 1 - statistics.median(rates[k]) / statistics.median(rates["none"]) for k in ("twice", "all")}
    told("stores", tok_s=rates, cost=cost, n_stored=n_stored)


def zipf(model: str, folder: Path) -> None:
    """Ask for 56 prompts of 512 tokens, each with 8 of its own behind it, one after the other, from a pool for 5."""
    rng = random.Random(4)
    asked = rng.choices(range(56), [1 / (rank + 1) for rank in range(56)], k=56)
    prompts = [[100 + (977 * n + 7 * t) % 40_000 for t in range(512)] + [200 + i] * 8 for i, n in enumerate(asked)]
    found: dict[str, Any] = {}
    answers = {}
    for kind in ("none", "disk"):
        tier = {"type": "disk", "path": str(folder), "capacity": "8GiB"}
        tiers = [tier] if kind == "disk" else []
        with LLM(model, kv_tiers=tiers, max_model_len=1024, kv_cache_memory_bytes=64 << 20) as llm:
            warm_up(llm)
            results = [first_token(llm, ids) for ids in prompts]
        answers[kind] = [result[2] for result in results]
        times = sorted(took_s for took_s, _, _ in results)
        hit_rate = sum(n for _, n, _ in results) / sum(map(len, prompts))
        found[kind] = {"hit_rate": hit_rate, "p50_s": times[28], "p99_s": times[-1], "mean_s": statistics.mean(times)}
    assert answers["none"] == answers["disk"]
    told("zipf", **found)


def told(case: str, **numbers: Any) -> None:
    """Print a result."""
    print(json.dumps({"case": case} | numbers))


def main() -> None:
    """Run what the command line names."""
    case, model, folder, *_ = [*sys.argv[1:], *["restore", "smollm2-135m", ""][len(sys.argv) - 1 :]]
    path = Path(folder or tempfile.mkdtemp(prefix="tiercel-kv-"))
    try:
        {"restore": restore, "shared": shared, "stores": stores, "zipf": zipf}[case](model, path)
    finally:
        if not folder:
            shutil.rmtree(path)


if __name__ == "__main__":
    main()
