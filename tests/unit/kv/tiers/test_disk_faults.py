"""Whatever happens to the disk, a load gives the right bytes or none, and every job ends."""

import errno
import random
import shutil
import stat
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from disk_kit import FaultyOps, files, opened, temps

from tiercel.kv.tiers.disk_files import is_used
from tiercel.kv.tiers.disk_state import DiskLimits
from tiercel.kv.tiers.guard import GuardedTier
from tiercel.kv.tiers.interface import Answer, Outcome
from tiercel.kv.tiers.record import RecordFormat
from tiercel.testing.clock import VirtualClock
from tiercel.testing.tier_kit import IDENTITY, PAGES, PATIENCE_S, TierDriver, body_of, bytes_of, key_of


def file_of(path, i):
    return path / IDENTITY.name() / key_of(i).hex()[:2] / f"{key_of(i).hex()}.kv"


def assert_is_lost_and_nothing_else(tier, path, i, other):
    """What is damaged is neither served nor left, and can be stored again."""
    (result,) = tier.load([i])
    assert result.outcome in (Outcome.FAILED, Outcome.ABSENT)
    assert not file_of(path, i).exists()
    assert tier.lookup(i) is Answer.MISS
    assert bytes_of(tier.load([other])[0]) == body_of(other)
    assert tier.store([i]) == [Outcome.DONE]
    assert bytes_of(tier.load([i])[0]) == body_of(i)


@pytest.mark.parametrize("seed", range(10))
def test_a_file_with_a_flipped_bit_is_not_served(tmp_path, seed):
    with opened(tmp_path) as tier:
        tier.store([1, 2])
        data = bytearray(file_of(tmp_path, 1).read_bytes())
        bit = random.Random(seed).randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        file_of(tmp_path, 1).write_bytes(data)
        assert_is_lost_and_nothing_else(tier, tmp_path, 1, 2)
        assert tier.tier.counters().n_invalid == 1


@pytest.mark.parametrize("n_bytes", [0, 1, 100, 500, -1])
def test_a_truncated_file_is_not_served(tmp_path, n_bytes):
    with opened(tmp_path) as tier:
        tier.store([1, 2])
        file_of(tmp_path, 1).write_bytes(file_of(tmp_path, 1).read_bytes()[:n_bytes])
        assert_is_lost_and_nothing_else(tier, tmp_path, 1, 2)


def test_two_files_that_are_swapped_are_not_served(tmp_path):
    with opened(tmp_path) as tier:
        tier.store([1, 2, 3])
        one, other = file_of(tmp_path, 1).read_bytes(), file_of(tmp_path, 2).read_bytes()
        file_of(tmp_path, 1).write_bytes(other)
        file_of(tmp_path, 2).write_bytes(one)
        assert_is_lost_and_nothing_else(tier, tmp_path, 1, 3)
        assert_is_lost_and_nothing_else(tier, tmp_path, 2, 3)


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize(
    "other",
    [
        replace(IDENTITY, model_digest="other"),
        replace(IDENTITY, weights_digest="other"),
        replace(IDENTITY, groups=(replace(IDENTITY.groups[0], dtype="bfloat16"), IDENTITY.groups[1])),
    ],
    ids=["model", "weights", "dtype"],
)
def test_the_folder_of_another_model_is_not_served(tmp_path, other, restarts):
    with opened(tmp_path / "other", identity=other) as tier:
        tier.store([1, 2])
    ours = tmp_path / "ours"
    if restarts:
        shutil.copytree(tmp_path / "other" / other.name(), ours / IDENTITY.name())
    with opened(ours) as tier:
        if not restarts:
            shutil.copytree(tmp_path / "other" / other.name(), ours / IDENTITY.name(), dirs_exist_ok=True)
        assert [tier.lookup(i) for i in (1, 2)] == [Answer.MISS] * 2
        assert [result.outcome for result in tier.load([1, 2])] == [Outcome.ABSENT] * 2
        assert files(ours) == []
        assert tier.tier.counters().n_invalid == 2


def test_two_models_under_one_path_do_not_meet(tmp_path):
    other = replace(IDENTITY, weights_digest="other")
    with opened(tmp_path) as tier, opened(tmp_path, identity=other) as another:
        tier.store([1])
        assert another.lookup(1) is Answer.MISS
        another.store([1])
        assert len(files(tmp_path)) == 2


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("n_room", [0, 1, 300, 700])
def test_a_disk_that_fails_mid_write_leaves_nothing_and_stores_again_later(tmp_path, n_room, error, caplog):
    ops, clock = FaultyOps(), VirtualClock()
    with opened(tmp_path, ops=ops, clock=clock, capacity_bytes=20_000) as tier:
        tier.store([1])
        tier.load([1])
        tier.store([10, 11, 12, 13])
        ops.n_room, ops.write_error = n_room, error
        assert tier.store([2]) == [Outcome.FAILED]
        is_full = error in (errno.ENOSPC, errno.EDQUOT)
        assert len(files(tmp_path)) == tier.tier.usage().n_objects == (3 if is_full else 5), (
            "a full disk gets some back"
        )
        assert temps(tmp_path) == []
        assert tier.lookup(2) is Answer.MISS
        ops.n_room = None
        assert tier.store([2, 3]) == [Outcome.REFUSED] * 2, "left alone for a while"
        assert bytes_of(tier.load([1])[0]) == body_of(1), "loads go on"
        assert tier.tier.counters().n_degraded == 1
        assert [r.message for r in caplog.records if "stores nothing" in r.message] != []
        clock.advance(DiskLimits().retry_s)
        assert tier.store([2]) == [Outcome.DONE]


def test_on_a_disk_that_is_smaller_than_the_capacity_new_objects_take_the_place_of_old_ones(tmp_path):
    class SmallDisk(FaultyOps):
        def __init__(self):
            super().__init__()
            self.n_room = 5_000

        def unlink(self, path):
            self.n_room += path.stat().st_size
            super().unlink(path)

    ops, clock = SmallDisk(), VirtualClock()
    with opened(tmp_path, ops=ops, clock=clock, capacity_bytes=40_000) as tier:
        held = []
        for i in range(40):
            held += [i] * (tier.store([i]) == [Outcome.DONE])
            clock.advance(DiskLimits().retry_s)
        assert len(held) > 25
        assert tier.lookup(held[-1]) is Answer.HIT
        assert tier.lookup(held[0]) is Answer.MISS
        assert 0 < tier.tier.usage().used_bytes <= 5_000


def test_a_crash_at_any_byte_leaves_no_object(tmp_path):
    n_bytes = RecordFormat(IDENTITY).record_bytes(PAGES)
    for n_room in [*range(0, n_bytes, 61), n_bytes - 1]:
        path = tmp_path / str(n_room)
        ops = FaultyOps()
        with opened(path, ops=ops) as tier:
            tier.store([1])
            ops.crashes, ops.n_room = True, n_room
            tier.store([2])
            assert len(temps(path)) == 1
        ops.crashes = False
        with opened(path) as tier:
            assert [tier.lookup(i) for i in (1, 2)] == [Answer.HIT, Answer.MISS]
            assert temps(path) == [], "a scan removes what no writer holds"


def test_reads_that_fail_are_failed_and_not_asked_for_again(tmp_path):
    ops = FaultyOps()
    with opened(tmp_path, ops=ops) as tier:
        tier.store([1])
        ops.read_error = errno.EIO
        assert tier.load([1])[0].outcome is Outcome.FAILED
        assert tier.lookup(1) is Answer.MISS
        assert tier.tier.counters().n_load_failures == 1


def test_reads_that_never_end_are_late_and_hang_nobody(tmp_path):
    ops, clock = FaultyOps(), VirtualClock()
    with opened(tmp_path, ops=ops, clock=clock, limits=DiskLimits(n_readers=1, close_s=0.0)) as inner:
        inner.store([1, 2])
        tier = TierDriver(GuardedTier("disk", inner.tier, IDENTITY, clock, seals=False), threading.Event())
        ops.may_read.clear()
        jobs = [tier.submit_load([i], deadline_s=10.0) for i in (1, 2)]
        assert ops.is_reading.wait(PATIENCE_S)
        assert tier.tier.drain(0.0) is False
        clock.advance(10.0)
        tier.finish()
        assert [tier.results[job, key_of(i)].outcome for job, i in zip(jobs, (1, 2), strict=True)] == [Outcome.LATE] * 2
        assert tier.lookup(1) is Answer.MISS
        tier.tier.close()
        ops.may_read.set()


def test_closing_a_tier_whose_disk_hangs_cancels_what_is_under_way_once(tmp_path):
    ops = FaultyOps()
    with opened(tmp_path, ops=ops, limits=DiskLimits(n_readers=1, close_s=0.0)) as tier:
        tier.store([1])
        ops.may_read.clear()
        job_id = tier.submit_load([1])
        assert ops.is_reading.wait(PATIENCE_S)
        tier.tier.close()
        tier.finish()
        assert tier.results[job_id, key_of(1)].outcome is Outcome.CANCELLED
        ops.may_read.set()
        for thread in tier.tier._threads:
            thread.join(PATIENCE_S)
        assert tier.poll() == 0


def test_a_folder_whose_disk_is_taken_away_is_a_miss_and_not_made_anew_but_used_when_it_is_back(tmp_path, caplog):
    ops, clock, path = FaultyOps(), VirtualClock(), tmp_path / "kv"
    caplog.set_level("INFO")
    with opened(path, ops=ops, clock=clock) as tier:
        tier.store([1, 2])
        path.rename(tmp_path / "elsewhere")
        path.mkdir()  # the mount point
        ops.is_unmounted = True
        assert tier.load([1])[0].outcome is Outcome.ABSENT
        assert tier.lookup(2) is Answer.MISS
        assert tier.store([3]) == [Outcome.REFUSED]
        assert tier.tier.counters().n_degraded == 1
        assert "its folder is gone" in caplog.text
        clock.advance(DiskLimits().retry_s)
        assert tier.store([3]) == [Outcome.REFUSED]
        assert list(path.iterdir()) == []
        path.rmdir()
        (tmp_path / "elsewhere").rename(path)  # mounted anew, it may have another number
        clock.advance(DiskLimits().retry_s)
        assert tier.store([3]) == [Outcome.DONE]
        assert [tier.lookup(i) for i in (1, 2, 3)] == [Answer.HIT] * 3
        assert "there again" in caplog.text


def test_who_only_reads_finds_out_that_a_disk_is_back(tmp_path):
    ops, clock, path = FaultyOps(), VirtualClock(), tmp_path / "kv"
    with opened(path, ops=ops, clock=clock) as tier:
        tier.store([1])
        path.rename(tmp_path / "elsewhere")
        assert tier.load([1])[0].outcome is Outcome.ABSENT
        (tmp_path / "elsewhere").rename(path)
        assert tier.lookup(1) is Answer.MISS
        clock.advance(DiskLimits().retry_s)
        assert tier.lookup(1) is Answer.MISS, "it is looked for now"
        assert tier.tier.drain(PATIENCE_S)
        assert bytes_of(tier.load([1])[0]) == body_of(1)


@pytest.mark.parametrize("what", ["kv", "kv/identity", "kv/.."])
def test_a_folder_that_is_deleted_is_made_again_while_the_tier_runs(tmp_path, what):
    """As by `rm -rf ~/.cache`."""
    clock, path = VirtualClock(), tmp_path / "cache" / "kv"
    with opened(path, clock=clock) as tier:
        tier.store([1, 2])
        shutil.rmtree({"kv": path, "kv/identity": path / IDENTITY.name(), "kv/..": path.parent}[what])
        assert tier.load([1])[0].outcome is Outcome.ABSENT
        assert tier.tier.usage().n_objects == 0
        assert tier.store([2]) == [Outcome.REFUSED], "left alone for a while"
        clock.advance(DiskLimits().retry_s)
        assert tier.store([1, 3]) == [Outcome.DONE] * 2
        assert [tier.lookup(i) for i in (1, 2, 3)] == [Answer.HIT, Answer.MISS, Answer.HIT]
        assert is_used(path / IDENTITY.name())
    with opened(path) as tier:
        assert [bytes_of(result) for result in tier.load([1, 3])] == [body_of(1), body_of(3)]
    shutil.rmtree(path)
    with opened(path) as tier:
        assert tier.store([1]) == [Outcome.DONE], "and at the next start"


def test_a_path_that_cannot_be_a_folder_is_no_tier_until_it_can(tmp_path):
    clock, path = VirtualClock(), tmp_path / "kv"
    path.write_text("a file")
    with opened(path, clock=clock) as tier:
        assert tier.lookup(1) is Answer.MISS
        assert tier.store([1]) == [Outcome.REFUSED]
        path.unlink()
        clock.advance(DiskLimits().retry_s)
        assert tier.store([1]) == [Outcome.DONE]
        assert bytes_of(tier.load([1])[0]) == body_of(1)


def test_files_and_folders_are_for_their_owner_only(tmp_path):
    with opened(tmp_path / "kv") as tier:
        tier.store([1])
    modes = {p: stat.S_IMODE(p.stat().st_mode) for p in [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]}
    assert {mode for p, mode in modes.items() if p.is_dir()} == {0o700}
    assert {mode for p, mode in modes.items() if p.is_file()} == {0o600}


WRITER = """
import sys, time
from pathlib import Path
from threading import Event
from tiercel.kv.tiers.disk import DiskTier
from tiercel.testing.tier_kit import *
from dataclasses import replace
woken, (path, first, last, capacity, weights) = Event(), sys.argv[1:]
identity = replace(IDENTITY, weights_digest=weights)
tier = TierDriver(DiskTier(identity, Path(path), int(capacity), woken.set, time.monotonic), woken)
tier.tier.drain(PATIENCE_S)
for i in range(int(first), int(last)):
    tier.submit_store([i])
    job_id = tier.submit_load([i - 3])
    if i % 4 == 0:
        tier.finish()
        print(i, flush=True)
tier.finish()
bodies = {key_of(i): body_of(i) for i in range(int(first) - 3, int(last))}
loaded = [r for r in tier.results.values() if r.data is not None]
assert all(bytes_of(r) == bodies[r.key] for r in loaded)
tier.tier.close()
print("done", len(loaded), flush=True)
"""


def start_writer(path, first, last, capacity_bytes, weights=IDENTITY.weights_digest):
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, path, str(first), str(last), str(capacity_bytes), weights],
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )


def test_a_killed_writer_leaves_only_whole_objects(tmp_path):
    rng = random.Random(6)
    for _ in range(4):
        with start_writer(tmp_path, 0, 100_000, 1 << 30) as process:
            for _ in range(rng.randrange(1, 40)):
                assert process.stdout.readline()
            process.kill()
        with opened(tmp_path) as tier:
            assert tier.tier.counters().n_invalid == 0
            assert temps(tmp_path) == []
            n = len(files(tmp_path))
            assert tier.tier.usage().n_objects == n > 0
            assert [bytes_of(result) for result in tier.load(range(n))] == [body_of(i) for i in range(n)]


def test_two_processes_share_a_folder(tmp_path):
    """Both store the same and different objects into room for a few, and evict each other's."""
    with start_writer(tmp_path, 3, 400, 40_000) as one, start_writer(tmp_path, 200, 600, 40_000) as other:
        for process in (one, other):
            said = process.communicate()[0].split()
            assert process.returncode == 0
            assert said[-2] == "done"
            assert int(said[-1]) > 0
    with opened(tmp_path, capacity_bytes=40_000) as tier:
        assert tier.tier.counters().n_invalid == 0
        assert tier.tier.usage().used_bytes <= 40_000


def test_processes_with_two_models_share_a_capacity_and_one_may_be_killed(tmp_path):
    """One evicts what the other stores, which is killed meanwhile, again and again; then it alone has the room."""
    rng = random.Random(8)
    with start_writer(tmp_path, 3, 400, 100_000) as one:
        for _ in range(2):
            with start_writer(tmp_path, 3, 100_000, 100_000, "others") as other:
                for _ in range(rng.randrange(1, 12)):
                    assert other.stdout.readline()
                other.kill()
        said = one.communicate()[0].split()
        assert one.returncode == 0
        assert said[-2] == "done"
        assert int(said[-1]) > 0
    with opened(tmp_path, capacity_bytes=100_000) as tier:
        assert tier.tier.counters().n_invalid == 0
        assert sum(file.stat().st_size for file in files(tmp_path)) <= 100_000
        held = [i for i in range(400) if key_of(i) in tier.tier._index]
        assert held != []
        assert [bytes_of(result) for result in tier.load(held)] == [body_of(i) for i in held]


def test_what_another_tier_wrote_or_removed_is_found_out(tmp_path):
    clock = VirtualClock()
    with opened(tmp_path, clock=clock) as tier, opened(tmp_path) as another:
        assert tier.lookup(1) is Answer.MISS
        another.store([1, 2])
        assert tier.lookup(1) is Answer.MISS, "an absent key is taken to stay so for a while"
        assert tier.lookup(2) is Answer.HIT
        clock.advance(DiskLimits().recheck_s)
        assert tier.lookup(1) is Answer.HIT
        another.tier.reset()
        assert another.tier.drain(PATIENCE_S)
        assert tier.load([1])[0].outcome is Outcome.ABSENT
        assert tier.lookup(1) is Answer.MISS


def test_a_load_for_which_there_is_no_memory_is_failed(tmp_path):
    ops = FaultyOps()
    with opened(tmp_path, ops=ops) as tier:
        tier.store([1, 2])

        def read(path, buffer):
            raise MemoryError

        ops.read_object = read
        assert tier.load([1])[0].outcome is Outcome.FAILED
        del ops.read_object
        assert bytes_of(tier.load([2])[0]) == body_of(2)


def test_a_folder_of_another_user_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    with opened(tmp_path) as tier:
        assert tier.store([1]) == [Outcome.REFUSED]
        assert tier.tier.counters().n_degraded == 1


def test_a_symlink_in_an_objects_place_is_not_followed(tmp_path):
    with opened(tmp_path) as tier:
        tier.store([1, 2])
        file_of(tmp_path, 1).rename(tmp_path / "elsewhere")
        file_of(tmp_path, 1).symlink_to(tmp_path / "elsewhere")
        assert tier.load([1])[0].outcome is Outcome.FAILED
