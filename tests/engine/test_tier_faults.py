"""What may happen to a disk tier below an engine: each time the text is that of computing, within the deadline, every
page goes back, and no file stays that would be read as good.
"""

import errno
import random
import shutil
from threading import Event

import pytest
from tier_bench import TierBench, disk

from tiercel.kv.page_keys import extend, root_key
from tiercel.kv.tiers.disk_files import FileOps
from tiercel.protocol.params import SamplingParams
from tiercel.testing.fake_runner import expected_tokens, make_limits
from tiercel.testing.tier_kit import PATIENCE_S

PROMPT = list(range(23))
WANT = expected_tokens(PROMPT, 3, SamplingParams(), seed=7)


class Ops(FileOps):
    """A disk that waits, fails, or is full, when it is told to."""

    def __init__(self):
        super().__init__()
        self.may_read = Event()
        self.may_read.set()
        self.may_write = Event()
        self.may_write.set()
        self.fails = False
        self.n_room = None

    def read_object(self, path, buffer):
        assert self.may_read.wait(PATIENCE_S)
        if self.fails:
            raise OSError(errno.EIO, "injected")
        return super().read_object(path, buffer)

    def write(self, fd, data):
        assert self.may_write.wait(PATIENCE_S)
        if self.n_room is None:
            return super().write(fd, data)
        if self.n_room == 0:
            raise OSError(errno.ENOSPC, "injected")
        n = super().write(fd, memoryview(data)[: self.n_room])
        self.n_room -= n
        return n


def fill(path, **options):
    """Put the prompt's pages on disk; return their files in the order of the chain."""
    bench = TierBench(disk(path, **options))
    bench.add("first", PROMPT, max_tokens=3)
    bench.run()
    assert bench.tokens["first"] == WANT
    bench.close()
    files = {file.stem: file for file in path.rglob("*.kv")}
    return [files[key.hex()] for key in extend(root_key("w", "f16", 4), PROMPT, 4)]


def ask_again(path, **options):
    """Ask an engine that was started anew; return the tokens that it had, and the bench, closed."""
    bench = TierBench(disk(path, **options))
    began_s = bench.clock()
    bench.add("again", PROMPT, max_tokens=3)
    bench.run()
    assert bench.tokens["again"] == WANT
    assert bench.finals["again"].error is None
    assert bench.finals["again"].time_s - began_s < 6.0
    bench.close()
    return bench.finals["again"].n_cached_tokens, bench


def test_CVE_2026_43629_a_saved_page_is_not_believed_when_any_byte_of_it_changed(tmp_path):
    """Flipped bits of header, description, checksums and body; each time the file is replaced by a whole one."""
    files = fill(tmp_path)
    good = files[2].read_bytes()
    rng = random.Random(5)
    places = sorted(
        {0, 8, 12, 16, 50, 90, 112, 144, 148, 152, 160, 168, len(good) - 1, *rng.sample(range(len(good)), 20)}
    )
    for place in places:
        bad = bytearray(good)
        bad[place] ^= 1 << rng.randrange(8)
        files[2].write_bytes(bad)
        n_cached, _ = ask_again(tmp_path)
        assert n_cached == 8, f"byte {place}"
        assert files[2].read_bytes() == good, f"byte {place}: what was computed again is stored again"


def test_a_file_that_was_cut_or_has_grown_is_not_believed(tmp_path):
    files = fill(tmp_path)
    good = files[0].read_bytes()
    for bad in (b"", good[:1], good[:100], good[: len(good) // 2], good[:-1], good + b"\0"):
        files[0].write_bytes(bad)
        assert ask_again(tmp_path)[0] == 0
        assert files[0].read_bytes() == good


def test_two_files_that_were_swapped_are_not_believed(tmp_path):
    files = fill(tmp_path)
    first, second = files[1].read_bytes(), files[3].read_bytes()
    files[1].write_bytes(second)
    files[3].write_bytes(first)
    n_cached, bench = ask_again(tmp_path)
    assert n_cached == 4
    assert bench.core.snapshot.tiers[0].counters.n_invalid >= 1
    assert files[1].read_bytes() == first


def test_files_of_another_model_under_our_name_are_not_believed(tmp_path):
    ours = fill(tmp_path)
    fill(tmp_path / "theirs", weights="other")
    theirs = {file.name: file for file in (tmp_path / "theirs").rglob("*.kv")}
    for file in ours:
        shutil.copyfile(theirs[file.name], file)
    assert ask_again(tmp_path)[0] == 0


@pytest.mark.parametrize("n_room", [0, 1, 300, 700])
def test_a_disk_that_fills_up_costs_no_token_and_leaves_no_half_file(tmp_path, n_room):
    ops = Ops()
    ops.n_room = n_room
    bench = TierBench(disk(tmp_path, ops=ops))
    bench.add("a", PROMPT, max_tokens=3)
    bench.run()
    assert bench.tokens["a"] == WANT
    bench.close()
    assert not [file for file in tmp_path.rglob("*") if file.name.endswith(".tmp")]
    ask_again(tmp_path)


def test_reads_that_take_ten_seconds_cost_the_deadline_and_no_more(tmp_path):
    fill(tmp_path)
    ops = Ops()
    ops.may_read.clear()
    bench = TierBench(disk(tmp_path, ops=ops))
    began_s = bench.clock()
    bench.add("again", PROMPT, max_tokens=3)
    for _ in range(10_000):
        if not bench.step() and not bench.core.has_work:
            break
    assert bench.tokens["again"] == WANT
    assert bench.finals["again"].time_s - began_s < 1.5  # a fifth of what is allowed, as computing takes no time
    assert bench.tally().n_pages_late > 0
    ops.may_read.set()
    bench.settle()
    bench.close()


def test_reads_that_fail_are_misses(tmp_path):
    fill(tmp_path)
    ops = Ops()
    ops.fails = True
    n_cached, bench = ask_again(tmp_path, ops=ops)
    assert n_cached == 0
    assert bench.tally().n_pages_failed > 0


def test_two_engines_share_a_folder(tmp_path):
    """Each finds what the other stored, also what came after it was started."""
    one, two = TierBench(disk(tmp_path)), TierBench(disk(tmp_path))
    one.add("a", PROMPT, max_tokens=3)
    one.run()
    two.add("b", PROMPT, max_tokens=3)
    two.run()
    assert two.finals["b"].n_cached_tokens == 20
    assert two.tokens["b"] == one.tokens["a"] == WANT
    one.close()
    two.close()


def test_a_folder_that_vanishes_is_a_tier_without_pages_until_it_is_made_again(tmp_path, caplog):
    path = tmp_path / "kv"
    fill(path)
    bench = TierBench(disk(path))
    shutil.rmtree(path)
    for name in "ab":
        bench.add(name, PROMPT, max_tokens=3)
        bench.run()
        assert bench.tokens[name] == WANT
        bench.scheduler.pool.reset_cached()
    assert not path.exists()
    assert bench.core.snapshot.tiers[0].counters.n_degraded == 1
    assert "its folder is gone" in caplog.text
    bench.clock.advance(30.0)
    for name in "cd":
        bench.add(name, PROMPT, max_tokens=3)
        bench.run()
        assert bench.tokens[name] == WANT
    bench.close()
    assert ask_again(path)[0] == 20


def test_a_folder_with_room_for_one_page_serves_that_one(tmp_path):
    files = fill(tmp_path)
    one = files[0].stat().st_size
    n_cached, bench = ask_again(tmp_path, capacity_bytes=one)
    assert n_cached in (0, 4)
    assert bench.core.snapshot.tiers[0].usage.used_bytes <= one


def test_a_pool_of_the_least_pages_still_loads_and_ends(tmp_path):
    fill(tmp_path)
    bench = TierBench(disk(tmp_path), limits=make_limits(n_pages=7))
    for i in range(6):
        bench.add(f"r{i}", PROMPT, max_tokens=3)
    bench.run()
    assert all(bench.tokens[f"r{i}"] == WANT for i in range(6))
    bench.close()


def test_pages_that_were_loaded_before_their_write_failed_are_stored_when_they_are_seen_again(tmp_path):
    ops = Ops()
    bench = TierBench(disk(tmp_path, ops=ops, rest_s=1.0))

    def run_on(name):
        bench.add(name, PROMPT, max_tokens=3)
        while name not in bench.finals:
            bench.step()
        assert bench.tokens[name] == WANT

    ops.may_write.clear()
    run_on("a")
    bench.scheduler.pool.reset_cached()
    run_on("b")
    assert bench.finals["b"].cached_by_tier == {"1:disk": 20}
    ops.n_room = 0
    ops.may_write.set()
    bench.settle()
    assert not list(tmp_path.rglob("*.kv"))
    ops.n_room = None
    bench.clock.advance(5.0)
    run_on("c")
    bench.settle()
    assert len(list(tmp_path.rglob("*.kv"))) == 6
    bench.close()
