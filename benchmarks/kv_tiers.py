"""Whether tiers below the page pool pay on this machine's disk: a row each in benchmarks/results/kv_tiers.jsonl.

    python benchmarks/kv_tiers.py restore|shared|stores|zipf [MODEL] [FOLDER]

restore  time to the first token of a prompt of 2,048 tokens: computed, and found on disk by an engine that was started
         anew, with the files' pages dropped from the system's cache
shared   50 requests that share such a prompt, which only the disk has: loads, and the slowest first token against 1.2
         times that of a single one and its own tokens
stores   32 streams at once, without a tier, with one that stores what it sees twice (nothing, here), and with one that
         stores everything: taking turns, tokens a second
zipf     prompts of ten times what the pool holds, asked for by Zipf's law: hit rate and first tokens, without a tier,
         with ours, and with one that stores all and evicts what was used longest ago; tiers hold half of the prompts;
         in turns of 20 requests

Nothing is speculated: what that brings changes from round to round. Outputs are compared before times are. MODEL is a
catalogue's name; FOLDER is where tiers keep their files.
"""

import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from keeping import command_of, keep_row

from tiercel import LLM, SamplingParams
from tiercel.bench.offline import Told
from tiercel.bench.rows import percentile
from tiercel.kv.tiers import disk_index, disk_state

IDS = [(7919 * i) % 40_000 + 100 for i in range(2048)]
COMPARED = "tokens, and log-probabilities of first tokens, equal those computed"
ONE = SamplingParams(temperature=0.0, max_tokens=1, logprobs=1)


def engine(model: str, folder: Path | None, sights: int = 1) -> LLM:
    """Start an engine, with a tier in the folder if one is given."""
    tier = {"type": "disk", "path": str(folder), "capacity": "8GiB", "store_sights": sights}
    tiers: list[dict[str, Any]] = [] if folder is None else [tier]
    return LLM(model, kv_tiers=tiers, max_model_len=4096, kv_cache_memory_bytes=1 << 30, speculative="off")


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
    keep(
        f"restore-2048-{model}",
        {"prompt_tokens": 2048},
        {"tiercel": {"first_token_s": found}, "computed": {"first_token_s": computed}},
        [{"measure": "first_token_s", "against": "computed", "at_most": 0.08}],
    )


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
    keep(
        f"shared-50-{model}",
        {"prompt_tokens": 2048, "num_prompts": 50},
        {
            "tiercel": {
                "slowest_s": [slowest_s],
                "single_s": [alone_s],
                "own_tokens_s": [own_s],
                "of_limit_frac": [slowest_s / (1.2 * alone_s + own_s)],
                "n_loads": [n_loads],
            }
        },
        [{"measure": "n_loads", "at_most": 1}, {"measure": "of_limit_frac", "at_most": 1.0}],
    )


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
    for i in range(16):
        prompts = [{"prompt_token_ids": [100 + 977 * i + 31 * s + 7 * t for t in range(64)]} for s in range(32)]
        answers = {}
        for kind in [*kinds, *kinds][i % 3 :][:3]:  # each is as often the first of a round
            llm = kinds[kind]
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
    cost = {k: [1 - one / none for one, none in zip(rates[k], rates["none"], strict=True)] for k in ("twice", "all")}
    keep(
        f"stores-32-{model}",
        {"num_prompts": 32, "input_len": 64, "output_len": 64, "pages_stored": n_stored},
        {
            "tiercel": {"out_tok_s": rates["all"], "cost_frac": cost["all"], "no_reuse_cost_frac": cost["twice"]},
            "no_tier": {"out_tok_s": rates["none"]},
        },
        [{"measure": "cost_frac", "at_most": 0.03}, {"measure": "no_reuse_cost_frac", "at_most": 0.01}],
    )


class LastUse(disk_index.DiskIndex):
    """Evicts what was used longest ago."""

    def _score(self, key: bytes, half_life: int) -> tuple[bool, float]:
        return False, float(self._known[key].tick)


def small_engine(model: str, folder: Path, kind: str) -> LLM:
    """Start an engine whose pool holds five and a half of the prompts, and its tier half of all."""
    tier: dict[str, Any] = {"type": "disk", "path": str(folder / kind), "capacity": "336MiB"}
    if kind == "lru":
        tier |= {"store_sights": 1}
    tiers = [] if kind == "no_tier" else [tier]
    disk_state.DiskIndex = LastUse if kind == "lru" else disk_index.DiskIndex  # type: ignore[misc]
    try:
        return LLM(model, kv_tiers=tiers, max_model_len=1024, kv_cache_memory_bytes=64 << 20, speculative="off")
    finally:
        disk_state.DiskIndex = disk_index.DiskIndex  # type: ignore[misc]


def zipf(model: str, folder: Path) -> None:
    """Ask for 56 prompts of 512 tokens, each with 8 of its own behind it, one after the other, from a pool for 5."""
    rng = random.Random(4)
    asked = rng.choices(range(56), [1 / (rank + 1) for rank in range(56)], k=400)
    prompts = [[100 + (977 * n + 7 * t) % 40_000 for t in range(512)] + [200 + i] * 8 for i, n in enumerate(asked)]
    engines = {kind: small_engine(model, folder, kind) for kind in ("no_tier", "lru", "tiercel")}
    results: dict[str, list[tuple[float, int, Any]]] = {kind: [] for kind in engines}
    for llm in engines.values():
        warm_up(llm)
    for i in range(0, len(prompts), 20):  # in turns, so that what else the machine does hits all alike
        for kind, llm in engines.items():
            results[kind] += [first_token(llm, ids) for ids in prompts[i : i + 20]]
    for llm in engines.values():
        llm.close()
    answers = {kind: [token for _, _, token in one] for kind, one in results.items()}
    found: dict[str, dict[str, list[float]]] = {}
    for kind, one in results.items():
        times = [took_s for took_s, _, _ in one]
        found[kind] = {
            "hit_frac": [sum(n for _, n, _ in one) / sum(map(len, prompts))],
            "mean_first_token_s": [statistics.mean(times)],
            "p99_first_token_s": [percentile(times, 99)],
            "first_token_s": times,
        }
    assert answers["no_tier"] == answers["lru"] == answers["tiercel"]
    reach = [
        {"measure": "hit_frac", "against": "no_tier", "at_least": 1.0},
        {"measure": "hit_frac", "against": "lru", "at_least": 1.0},
        {"measure": "p99_first_token_s", "against": "no_tier", "at_most": 1.0},
        {"measure": "p99_first_token_s", "against": "lru", "at_most": 1.0},
    ]
    work = {"prompts": 56, "requests": len(asked), "prompt_tokens": 520, "pool_bytes": 64 << 20}
    keep(f"zipf-{model}", work, found, reach)


def keep(
    case: str,
    work: dict[str, Any],
    found: dict[str, dict[str, list[float]]],
    reach: list[dict[str, Any]],
) -> None:
    """Write the row of a case."""
    keep_row(Told(case=case, bench="kv_tiers", command=command_of(), reach=reach), work, found, COMPARED)


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
