"""One capacity holds for all models under a path: who gives way when room is needed."""

import os
import shutil
from dataclasses import replace

import pytest
from disk_kit import FaultyOps, files, opened

from tiercel.kv.tiers.interface import Answer, Outcome
from tiercel.testing.tier_kit import IDENTITY, body_of, bytes_of, key_of

OTHERS = [replace(IDENTITY, weights_digest=f"other {i}") for i in range(3)]
PAGE_BYTES = 832  # of a file
CAPACITY = 48 * PAGE_BYTES


def used_bytes(path):
    return sum(file.stat().st_size for file in files(path))


def fill(path, identity, ids, last_used_s):
    """Store a chain of another model, whose tier closed long ago."""
    with opened(path, capacity_bytes=1 << 30, identity=identity) as tier:
        assert tier.store(ids) == [Outcome.DONE] * len(ids)
    for name in ("index", "lock"):
        os.utime(path / identity.name() / name, (last_used_s, last_used_s))


def left(path, identity):
    stems = {file.stem for file in (path / identity.name()).rglob("*.kv")}
    return [i for i in range(1000) if key_of(i).hex() in stems]


def test_a_model_that_nobody_uses_gives_way_before_our_own_objects_do(tmp_path):
    fill(tmp_path, OTHERS[0], range(20), 1000)
    with opened(tmp_path, capacity_bytes=CAPACITY) as tier:
        assert len(left(tmp_path, OTHERS[0])) == 20, "there is room for now"
        assert tier.store(range(100, 135)) == [Outcome.DONE] * 35
        assert left(tmp_path, IDENTITY) == list(range(100, 135))
        assert used_bytes(tmp_path) <= CAPACITY
        kept = left(tmp_path, OTHERS[0])
        assert kept == list(range(len(kept))), "of a chain its head stays"
        assert 0 < len(kept) < 20


@pytest.mark.parametrize("keeps_index", [True, False])
def test_of_several_models_the_one_used_longest_ago_goes_first(tmp_path, keeps_index):
    for i, last_used_s in enumerate((3000, 1000, 2000)):
        fill(tmp_path, OTHERS[i], range(10), last_used_s)
        if not keeps_index:
            (tmp_path / OTHERS[i].name() / "index").unlink()
    with opened(tmp_path, capacity_bytes=CAPACITY) as tier:
        tier.store(range(100, 133))
        assert len(left(tmp_path, IDENTITY)) == 33
        assert left(tmp_path, OTHERS[1]) == []
        kept = left(tmp_path, OTHERS[2])
        assert kept == list(range(len(kept)))
        assert 0 < len(kept) < 10
        assert left(tmp_path, OTHERS[0]) == list(range(10))


def test_a_smaller_capacity_takes_from_others_first_at_the_start(tmp_path):
    fill(tmp_path, OTHERS[0], range(20), 1000)
    fill(tmp_path, IDENTITY, range(100, 120), 900)
    with opened(tmp_path, capacity_bytes=25_000) as tier:
        assert used_bytes(tmp_path) <= 25_000
        assert left(tmp_path, IDENTITY) == list(range(100, 120))
        assert tier.tier.usage().n_objects == 20
        assert tier.tier.usage().capacity_bytes == 25_000


def test_models_in_use_have_a_share_each(tmp_path):
    """The first has all; the second takes its half and no more, whatever it wants."""
    with opened(tmp_path, capacity_bytes=CAPACITY, identity=OTHERS[0]) as one:
        one.store(range(40))
        with opened(tmp_path, capacity_bytes=CAPACITY) as other:
            assert other.store(range(100, 160)) == [Outcome.DONE] * 60
            assert used_bytes(tmp_path) <= CAPACITY
            kept = left(tmp_path, OTHERS[0])
            assert 20 < len(kept) <= 24
            assert kept == list(range(len(kept)))
            assert len(left(tmp_path, IDENTITY)) > 20
            gone = next(i for i in range(40) if i not in kept)
            assert one.load([gone])[0].outcome is Outcome.ABSENT
            assert bytes_of(one.load([0])[0]) == body_of(0)
            assert one.lookup(gone) is Answer.MISS


def test_what_of_others_cannot_be_removed_stays_and_bounds_us(tmp_path):
    fill(tmp_path, OTHERS[0], range(30), 1000)
    ops = FaultyOps()
    ops.crashes = True  # removes nothing
    with opened(tmp_path, capacity_bytes=CAPACITY, ops=ops) as tier:

        def unlink(path):
            raise PermissionError(1, "not yours")

        ops.unlink = unlink
        tier.store(range(100, 130))
        assert len(left(tmp_path, OTHERS[0])) == 30
        assert tier.tier.usage().used_bytes <= CAPACITY - 30 * PAGE_BYTES


def test_other_things_under_the_path_are_left_alone(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_bytes(bytes(50_000))
    (tmp_path / ("0" * 32)).symlink_to(tmp_path / "photos")
    with opened(tmp_path, capacity_bytes=CAPACITY) as tier:
        assert tier.store(range(30)) == [Outcome.DONE] * 30
    assert (tmp_path / "photos" / "a.jpg").stat().st_size == 50_000
    shutil.rmtree(tmp_path / "photos")
