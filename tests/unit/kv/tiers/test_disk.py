"""The disk tier: what survives a restart, what goes first, and what waits for what."""

import os
from dataclasses import replace

import pytest
from disk_kit import FaultyOps, files, opened

from tiercel.kv.tiers.disk_state import DiskLimits
from tiercel.kv.tiers.interface import Answer, Outcome, StoreItem, StoreJob
from tiercel.testing.clock import VirtualClock
from tiercel.testing.tier_kit import IDENTITY, PAGES, PATIENCE_S, STATES, body_of, bytes_of, key_of


def test_a_restart_finds_what_was_stored(tmp_path, caplog):
    caplog.set_level("INFO")
    with opened(tmp_path) as tier:
        tier.store([1, 2])
        usage = tier.tier.usage()
    with opened(tmp_path) as tier:
        assert tier.tier.usage() == usage
        assert [bytes_of(result) for result in tier.load([1, 2])] == [body_of(1), body_of(2)]
    assert "2 objects" in caplog.text


def test_data_that_lasts_is_written_without_a_copy(tmp_path):
    with opened(tmp_path) as tier:
        take, tier.tier._buffers.take = tier.tier._buffers.take, None
        item = StoreItem(key_of(1), PAGES, 0, body_of(1), is_lasting=True)
        tier.tier.submit_store(StoreJob(1000, [item], 1e9))
        assert tier.tier.drain(PATIENCE_S)
        assert [(r.job_id, r.outcome) for r in tier.tier.poll()] == [(1000, Outcome.DONE)]
        tier.tier._buffers.take = take
        assert bytes_of(tier.load([1])[0]) == body_of(1)


@pytest.mark.parametrize("index", [None, b"", b"\0" * 100, "stale", "cut"])
def test_an_index_that_is_missing_damaged_or_stale_is_made_again_by_a_scan(tmp_path, index):
    path = tmp_path / IDENTITY.name() / "index"
    with opened(tmp_path) as tier:
        tier.store([1, 2])
    kept = path.read_bytes()
    with opened(tmp_path) as tier:
        tier.store([3, 4])
        usage = tier.tier.usage()
    if index is None:
        path.unlink()
    else:
        path.write_bytes({"stale": kept, "cut": kept[:-1]}.get(index, index))
    with opened(tmp_path) as tier:
        assert tier.tier.usage() == usage
        assert [bytes_of(result) for result in tier.load([1, 2, 3, 4])] == [body_of(i) for i in (1, 2, 3, 4)]


@pytest.mark.parametrize("keeps_index", [True, False])
def test_when_room_is_needed_chain_heads_stay_also_after_a_restart(tmp_path, keeps_index):
    with opened(tmp_path, capacity_bytes=20_000) as tier:
        tier.store(range(15))
    if not keeps_index:
        (tmp_path / IDENTITY.name() / "index").unlink()
    with opened(tmp_path, capacity_bytes=20_000) as tier:
        tier.store(range(100, 110))
        held = [i for i in range(15) if key_of(i) in tier.tier._index]
        assert held == list(range(len(held)))
        assert 0 < len(held) < 15
        assert tier.tier.counters().n_evicted > 0
        assert len(files(tmp_path)) == tier.tier.usage().n_objects


def test_a_smaller_capacity_is_kept_from_the_start(tmp_path):
    with opened(tmp_path) as tier:
        tier.store(range(20))
    with opened(tmp_path, capacity_bytes=5_000) as tier:
        assert tier.tier.usage().used_bytes <= 5_000
        assert len(files(tmp_path)) == tier.tier.usage().n_objects > 0


def test_loads_of_one_object_share_one_read(tmp_path):
    ops = FaultyOps()
    with opened(tmp_path, ops=ops) as tier:
        tier.store([1])
        ops.may_read.clear()
        jobs = [tier.submit_load([1]) for _ in range(50)]
        ops.may_read.set()
        tier.finish()
        assert [bytes_of(tier.results[job, key_of(1)]) for job in jobs] == [body_of(1)] * 50
        assert len([what for what, _ in ops.calls if what == "read"]) == 1


def test_queued_loads_go_before_queued_stores(tmp_path):
    ops = FaultyOps()
    with opened(tmp_path, ops=ops, limits=DiskLimits(n_readers=1)) as tier:
        tier.store([1, 2, 3])
        ops.calls.clear()
        ops.may_write.clear()
        ops.is_writing.clear()
        ops.may_read.clear()
        tier.submit_store([4])
        assert ops.is_writing.wait(PATIENCE_S)
        tier.submit_load([1, 2, 3])
        tier.submit_store([5])
        ops.may_write.set()
        ops.may_read.set()
        tier.finish()
        order = [stem for _, stem in ops.calls]
        assert order.index(key_of(5).hex()) > order.index(key_of(2).hex())


def test_a_full_queue_refuses_and_the_rest_is_stored(tmp_path):
    ops = FaultyOps()
    with opened(tmp_path, ops=ops, limits=DiskLimits(queued_store_bytes=2 * 512, n_queued_loads=1)) as tier:
        ops.may_write.clear()
        ops.is_writing.clear()
        tier.submit_store([0])
        assert ops.is_writing.wait(PATIENCE_S)
        job_id = tier.submit_store([1, 2, 3, 4])
        tier.poll()
        assert [tier.results[job_id, key_of(i)].outcome for i in (3, 4)] == [Outcome.REFUSED] * 2
        assert tier.tier.counters().n_refused == 2
        ops.may_write.set()
        tier.finish()
        assert [tier.results[job_id, key_of(i)].outcome for i in (1, 2)] == [Outcome.DONE] * 2


def test_a_state_beyond_the_bound_waits_alone_and_keeps_no_page_out(tmp_path):
    """A state may be larger than the queue: it is taken while none waits. Pages have a bound of their own."""
    ops = FaultyOps()
    large = replace(IDENTITY, groups=(IDENTITY.groups[0], replace(IDENTITY.groups[1], object_bytes=5000)))
    with opened(tmp_path, ops=ops, identity=large, limits=DiskLimits(queued_store_bytes=1000)) as tier:
        ops.may_write.clear()
        ops.is_writing.clear()
        tier.submit_store([0])
        assert ops.is_writing.wait(PATIENCE_S)
        waits = [tier.submit_store([i], STATES, data=b"x" * 5000) for i in (1, 2)]
        page = tier.submit_store([3])
        tier.poll()
        assert tier.results[waits[1], key_of(2)].outcome is Outcome.REFUSED
        tier.tier.check()
        ops.may_write.set()
        tier.finish()
        assert [tier.results[job].outcome for job in ((waits[0], key_of(1)), (page, key_of(3)))] == [Outcome.DONE] * 2
        assert bytes_of(tier.load([1], STATES)[0]) == b"x" * 5000


def test_what_is_not_written_yet_is_loaded_from_memory(tmp_path):
    ops, wall = FaultyOps(), VirtualClock(1000.0)
    with opened(tmp_path, ops=ops, wall=wall) as tier:
        ops.may_write.clear()
        ops.is_writing.clear()
        tier.submit_store([0])
        assert ops.is_writing.wait(PATIENCE_S)
        tier.submit_store([1, 2])
        tier.submit_store([3], ttl_s=5.0)
        wall.advance(6.0)
        assert [tier.tier.lookup(key_of(i)) for i in (0, 1, 2, 4)] == [Answer.HIT] * 3 + [Answer.UNKNOWN]
        load, wrong, late = tier.submit_load([0, 1]), tier.submit_load([2], STATES), tier.submit_load([3])
        tier.poll()
        assert [bytes_of(tier.results[load, key_of(i)]) for i in (0, 1)] == [body_of(0), body_of(1)]
        assert tier.results[wrong, key_of(2)].outcome is Outcome.FAILED
        assert (late, key_of(3)) not in tier.results  # it has expired: a reader looks whether there is another
        ops.n_room = 0  # none of them is ever on the disk
        ops.may_write.set()
        tier.finish()
        assert tier.lookup(0) is Answer.MISS
        assert bytes_of(tier.results[load, key_of(0)]) == body_of(0)


def test_a_reset_just_before_the_end_is_carried_out(tmp_path):
    with opened(tmp_path) as tier:
        tier.store([1, 2])
        tier.tier.reset()
    assert files(tmp_path) == []


@pytest.mark.parametrize("keeps_index", [True, False])
def test_a_time_to_live_and_a_pin_hold_over_a_restart(tmp_path, keeps_index):
    wall = VirtualClock(1000.0)
    with opened(tmp_path, capacity_bytes=20_000, wall=wall) as tier:
        tier.submit_store([1], ttl_s=50.0)
        tier.submit_store([2], is_pinned=True)
        tier.finish()
        tier.store(range(10, 20))
    if not keeps_index:
        (tmp_path / IDENTITY.name() / "index").unlink()
    wall.advance(49.0)
    with opened(tmp_path, capacity_bytes=20_000, wall=wall) as tier:
        assert [tier.lookup(i) for i in (1, 2)] == [Answer.HIT] * 2
        assert bytes_of(tier.load([1])[0]) == body_of(1)
        wall.advance(1.0)
        assert tier.lookup(1) is Answer.MISS
        assert tier.load([1])[0].outcome is Outcome.ABSENT
        tier.store(range(100, 130))
        assert tier.lookup(2) is Answer.HIT, "a pin outlives what is used more lately"
        assert key_of(1).hex() not in {path.stem for path in files(tmp_path)}


@pytest.mark.parametrize("index", [None, "stale"])
def test_a_pin_outlives_a_process_that_is_killed_and_ends_at_its_time(tmp_path, index):
    """A killed process leaves no index, or that of the one before it, which knew the object without its pin."""
    wall, path = VirtualClock(1000.0), tmp_path / IDENTITY.name() / "index"
    with opened(tmp_path, capacity_bytes=20_000, wall=wall) as tier:
        tier.store([1])
    kept = path.read_bytes()
    written_ns = path.stat().st_mtime_ns
    file = next(file for file in files(tmp_path) if file.stem == key_of(1).hex())
    file.unlink()
    with opened(tmp_path, capacity_bytes=20_000, wall=wall) as tier:
        tier.submit_store([1], is_pinned=True, ttl_s=50.0)
        tier.finish()
    path.unlink()
    if index == "stale":
        path.write_bytes(kept)
        os.utime(path, ns=(written_ns, written_ns))
        os.utime(file, ns=(written_ns + 1, written_ns + 1))
    with opened(tmp_path, capacity_bytes=20_000, wall=wall) as tier:
        for i in range(100, 160):
            tier.store([i])
        assert tier.lookup(1) is Answer.HIT
        wall.advance(50.0)
        assert tier.lookup(1) is Answer.HIT, "a pin ends, its object does not"
        for i in range(200, 260):
            tier.store([i])
        assert tier.lookup(1) is Answer.MISS


def test_what_another_process_stored_with_a_time_to_live_ends_for_everybody(tmp_path):
    wall = VirtualClock(1000.0)
    with opened(tmp_path, wall=wall) as one, opened(tmp_path, wall=wall) as other:
        one.submit_store([1, 2], ttl_s=10.0)
        one.finish()
        assert other.lookup(1) is Answer.HIT
        wall.advance(10.0)
        assert [other.lookup(i) for i in (1, 2)] == [Answer.MISS] * 2
        assert [result.outcome for result in other.load([1, 2])] == [Outcome.ABSENT] * 2
        assert one.store([1]) == [Outcome.DONE], "what has expired can be stored anew"
        assert bytes_of(one.load([1])[0]) == body_of(1)
