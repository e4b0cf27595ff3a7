"""Engines that follow each other on one folder while its disk fails, its files change and a plug-in lies.

`run(seed, n)` sends `n` requests, of conversations that go on over restarts, through tiny pools, and compares every
token with what the request gets alone. What was injected is counted, so that a run that injected nothing is no proof.
"""

import errno
import random
import shutil
from collections import Counter

from tier_bench import TierBench, disk, scripted

from tiercel.kv.tiers.disk_files import FileOps
from tiercel.protocol.params import SamplingParams
from tiercel.testing.fake_runner import FakeRunner, early_at_random, expected_tokens, make_limits
from tiercel.testing.scripted_tier import Lie
from tiercel.testing.tier_kit import PATIENCE_S

N_LETTERS = 97


class ChaosOps(FileOps):
    """A disk whose every call may fail; what it reads may be changed on the way."""

    def __init__(self, rng, counts):
        super().__init__()
        self.rng = random.Random(rng.random())  # readers and the writer are threads of their own
        self.counts = counts
        self.is_calm = False

    def _happens(self, what, chance):
        if self.is_calm or self.rng.random() >= chance:
            return False
        self.counts[what] += 1
        return True

    def read(self, path, n_bytes):
        if path.suffix == ".kv" and self._happens("failing read", 0.01):
            raise OSError(errno.EIO, "injected")
        data = super().read(path, n_bytes)
        if path.suffix == ".kv" and len(data):
            self._spoil(data, len(data))
        return data

    def read_object(self, path, buffer):
        if self._happens("failing read", 0.01):
            raise OSError(errno.EIO, "injected")
        n = super().read_object(path, buffer)
        self._spoil(buffer, min(n, len(buffer)))
        return n

    def _spoil(self, data, n):
        if n and self._happens("flipped bit in a read", 0.01):
            data[self.rng.randrange(n)] ^= 1 << self.rng.randrange(8)

    def write(self, fd, data):
        if self._happens("full disk", 0.01):
            raise OSError(errno.ENOSPC, "injected")
        if self._happens("short write", 0.05):
            data = memoryview(data)[: max(1, len(data) // 2)]
        return super().write(fd, data)

    def rename(self, path, to):
        if self._happens("failing rename", 0.005):
            raise OSError(errno.EROFS, "injected")
        super().rename(path, to)


def spoil(path, rng, counts):
    """Change some of the files that an engine left."""
    files = sorted(path.rglob("*.kv"))
    for file in rng.sample(files, min(len(files), rng.randint(0, 4))):
        what = rng.choice(["flipped bit", "cut file", "longer file", "swapped files", "lost file", "other's file"])
        counts[what] += 1
        data = bytearray(file.read_bytes())
        if what == "flipped bit" and data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif what == "cut file":
            del data[rng.randrange(len(data) + 1) :]
        elif what == "longer file":
            data += bytes(rng.randint(1, 9))
        elif what == "lost file":
            file.unlink()
            continue
        else:
            other = rng.choice(files)
            if other.exists():
                data, theirs = bytearray(other.read_bytes()), bytes(data)
                if what == "swapped files":
                    other.write_bytes(theirs)
        file.write_bytes(data)


class ChaosBench(TierBench):
    """Its clock moves with its steps, not with the disk: mostly it lets a load end before the next step."""

    def __init__(self, rng, *makers, **options):
        self.rng = rng
        super().__init__(*makers, **options)

    def step(self):
        goes_on = super().step()
        if self.tiers.n_loads and self.rng.random() < 0.9:
            for placed in self.tiers._rig.tiers:
                placed.tier.drain(PATIENCE_S)
        return goes_on


class Talk:
    """A conversation that goes on as long as its context allows."""

    def __init__(self, rng, prefixes):
        self.rng = rng
        self.prompt = [*rng.choice(prefixes), *(rng.randrange(N_LETTERS) for _ in range(rng.randint(1, 6)))]

    def go_on(self, tokens):
        self.prompt += [*tokens, *(self.rng.randrange(N_LETTERS) for _ in range(self.rng.randint(1, 4)))]


def run(seed, n_requests, path):
    """Return what was injected and what was seen; raise AssertionError at the first token that differs."""
    rng = random.Random(seed)
    counts = Counter()
    prefixes = [[], *([rng.randrange(N_LETTERS) for _ in range(n)] for n in (8, 13, 20, 28))]
    talks = [Talk(rng, prefixes) for _ in range(12)]
    n_sent = 0
    while n_sent < n_requests:
        n_sent += one_engine(rng, counts, talks, prefixes, path, min(n_requests - n_sent, rng.randint(20, 120)))
        counts["engines"] += 1
        spoil(path, rng, counts)
        if rng.random() < 0.02:
            counts["lost folder"] += 1
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(exist_ok=True)
    counts["requests"] = n_sent
    return counts


def one_engine(rng, counts, talks, prefixes, path, n_requests):
    """Run one engine for so many requests; return how many."""
    lies, keeps = {}, []
    ops = ChaosOps(rng, counts)
    makers = [
        disk(
            path,
            ops=ops,
            capacity_bytes=rng.choice([2_000, 20_000, 1 << 20]),
            store_sights=rng.choice([1, 2]),
            rest_s=0.3,
        )
    ]
    if rng.random() < 0.5:
        makers.insert(
            rng.randint(0, 1), scripted(lies=lies, keeps=keeps, capacity_bytes=rng.choice([500, 1 << 20]), rest_s=0.3)
        )
    states = {}
    if rng.random() < 0.3:
        counts["engines of a hybrid model"] += 1
        states = {"takes_drafts": False, "state_bytes": 100, "n_snapshots": rng.choice([1, 2, 4, 8])}
        states["snapshot_spacing_tokens"] = 16
    limits = make_limits(n_slots=rng.randint(1, 4), n_pages=rng.choice([16, 17, 20, 32, 64]), **states)
    bench = ChaosBench(
        random.Random(rng.random()),
        *makers,
        runner=FakeRunner(limits, runs_early=early_at_random(rng.randrange(99))),
        check_each_step=rng.random() < 0.1,
        async_scheduling=rng.random() < 0.7,
    )
    asked = {}
    for i in range(n_requests):
        at = rng.randrange(len(talks))
        if len(talks[at].prompt) > 48 or any(one[0] is talks[at] for one in asked.values()):
            talks[at] = Talk(rng, prefixes)
        talk = talks[at]
        n, params = rng.randint(1, 8), {"temperature": rng.choice([0.0, 1.0])}
        if rng.random() < 0.05:
            params["cache_hint"] = {"pin": True, "ttl_s": rng.choice([0.5, 300.0])}
        bench.add(f"r{i}", talk.prompt, max_tokens=n, seed=i % 5, **params)
        asked[f"r{i}"] = talk, list(talk.prompt), n, i % 5, params["temperature"]
        for _ in range(rng.randint(0, 8)):
            bench.step()
        for tier in keeps:
            if tier._held and rng.random() < 0.1:
                lie = rng.choice(list(Lie))
                counts[f"lie: {lie.name}"] += 1
                tier.lies[rng.choice(list(tier._held))] = lie
        if rng.random() < 0.003:
            counts["folder deleted while it is used"] += 1
            shutil.rmtree(path, ignore_errors=True)
        if rng.random() < 0.02:
            bench.core.finish([f"r{rng.randrange(i + 1)}"])
            counts["abort"] += 1
    bench.run()
    for name, (talk, prompt, n, seed, temperature) in asked.items():
        want = expected_tokens(prompt, n, SamplingParams(temperature=temperature), seed=seed)
        final, got = bench.finals[name], bench.tokens.get(name, [])
        assert final.error is None, f"{name}: {final.error}"
        assert got == (want[: len(got)] if final.finish_reason == "abort" else want), f"{name}: other tokens"
        n_loaded = sum((final.cached_by_tier or {}).values())
        counts["tokens"] += len(got)
        counts["tokens found in the pool"] += final.n_cached_tokens - n_loaded
        counts["tokens loaded"] += n_loaded
        counts["tokens loaded by hybrid models"] += n_loaded if states else 0
        talk.go_on(got)
    ops.is_calm = True
    for tally in (one.tally for one in bench.tiers.snapshot()):
        for name in ("n_loads", "n_pages_landed", "n_pages_failed", "n_pages_late", "n_pages_unused", "n_stores"):
            counts[name] += getattr(tally, name)
    counts["pages evicted from the pool"] += bench.scheduler.pool.n_evicted
    if bench.scheduler.states is not None:
        bench.scheduler.states.expire(float("inf"))
    bench.close_pinned()
    return n_requests
