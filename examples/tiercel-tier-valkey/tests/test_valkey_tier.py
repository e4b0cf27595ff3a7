"""A tier in a real server: it keeps the contract, its bound, and its owner's patience, whatever the server does."""

import itertools
import threading
import time
from threading import Event

import pytest

valkey = pytest.importorskip("valkey", reason="the Python package valkey is not installed")

from tiercel.base.errors import ConfigError
from tiercel.kv.tiers.guard import sealed_identity
from tiercel.kv.tiers.interface import Answer, Outcome
from tiercel.kv.tiers.registry import make_tier, read_tiers
from tiercel.testing.clock import VirtualClock
from tiercel.testing.tier_kit import (
    IDENTITY,
    PATIENCE_S,
    TierContract,
    TierDriver,
    body_of,
    bytes_of,
    key_of,
)
from tiercel_tier_valkey import ValkeyOptions, ValkeyTier
from tiercel_tier_valkey.server import ValkeyServer
from valkey_process import ServerProcess

_NAMESPACES = itertools.count()


@pytest.fixture(scope="module")
def server():
    process = ServerProcess()
    yield process
    process.close()


@pytest.fixture
def own_server():
    process = ServerProcess()
    yield process
    process.close()


def a_namespace():
    return f"test.{next(_NAMESPACES)}"


class TestValkeyTier(TierContract):
    @pytest.fixture(autouse=True)
    def _server(self, server):
        self.url = server.url

    def make_tier(self, identity, wake, capacity_bytes):
        options = ValkeyOptions(self.url, namespace=a_namespace())
        return ValkeyTier(identity, options, capacity_bytes, wake, time.monotonic)


class TestGuardedValkeyTier(TestValkeyTier):
    """As an engine makes it: from the words of its configuration, sealed."""

    def make_tier(self, identity, wake, capacity_bytes):
        (spec,) = read_tiers([entry(self.url, capacity=max(capacity_bytes, 1100), lookup_deadline_s=3600.0)])
        return make_tier(spec, identity, wake, time.monotonic)

    # The guard's owner is our own code, which never stores an object of another length; a record is larger than 128.
    test_objects_of_the_wrong_length_or_group_are_not_served = None
    test_what_can_never_fit_is_refused = None


def entry(url, **more):
    own = {"namespace": a_namespace(), "capacity": "1MiB"}
    return {"type": "ValkeyTier", "module_path": "tiercel_tier_valkey", "url": url} | own | more


class Opened:
    """Drivers of tiers that are closed at the end."""

    def __init__(self):
        self._drivers = []

    def __call__(self, url, capacity_bytes=1 << 20, clock=time.monotonic, **options):
        woken = Event()
        tier = ValkeyTier(IDENTITY, ValkeyOptions(url, **options), capacity_bytes, woken.set, clock)
        self._drivers.append(TierDriver(tier, woken, clock))
        return self._drivers[-1]

    def close(self):
        for driver in self._drivers:
            driver.tier.close()
            driver.finish()


@pytest.fixture
def opened():
    every = Opened()
    yield every
    every.close()
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("tiercel-valkey")] == []


def test_what_one_engine_stored_another_finds_also_after_the_first_ended(server, opened):
    namespace = a_namespace()
    one = opened(server.url, namespace=namespace)
    one.store([1, 2])
    other = opened(server.url, namespace=namespace)
    assert [other.lookup(i) for i in (1, 2, 3)] == [Answer.HIT, Answer.HIT, Answer.MISS]
    one.tier.close()
    assert [bytes_of(result) for result in other.load([1, 2])] == [body_of(1), body_of(2)]


def test_another_models_objects_are_not_found(server, opened):
    namespace = a_namespace()
    opened(server.url, namespace=namespace).store([1])
    woken = Event()
    other = ValkeyTier(
        sealed_identity(IDENTITY), ValkeyOptions(server.url, namespace=namespace), 1 << 20, woken.set, time.monotonic
    )
    assert TierDriver(other, woken).lookup(1) is Answer.MISS
    other.reset()
    assert other.drain(PATIENCE_S)
    other.close()
    assert opened(server.url, namespace=namespace).lookup(1) is Answer.HIT, "a reset is of one model"


def test_the_bound_is_kept_over_engines_and_the_tail_of_a_chain_goes_first(server, opened):
    namespace, client = a_namespace(), valkey.Valkey.from_url(server.url)
    one = opened(server.url, 20_000, namespace=namespace)
    other = opened(server.url, 20_000, namespace=namespace)
    one.store(range(15))
    other.store(range(100, 112))
    left = [i for i in range(15) if client.exists(name_of(namespace, i))]
    assert left == list(range(len(left)))
    assert 0 < len(left) < 15
    assert other.tier.counters().n_evicted == 15 - len(left)
    used = int(client.get(f"{{{namespace}}}:used"))
    assert used == other.tier.usage().used_bytes <= 20_000
    sizes = sum(client.strlen(name) for name in client.zrange(f"{{{namespace}}}:index", 0, -1))
    assert sizes < used, "what is counted is no less than what is held"
    client.close()


def name_of(namespace, i, group_idx=0):
    options = ValkeyOptions("unix://nobody", namespace=namespace)
    return ValkeyServer(options, IDENTITY.name(), [g.object_bytes for g in IDENTITY.groups])._name(key_of(i), group_idx)


def test_what_was_touched_outlives_what_was_not(server, opened):
    namespace = a_namespace()
    tier = opened(server.url, 9_000, namespace=namespace)
    for i in range(8):
        tier.store([i])
    tier.tier.touch([key_of(0)])
    assert tier.tier.drain(PATIENCE_S)
    for i in range(100, 106):
        tier.store([i])
    fresh = opened(server.url, namespace=namespace)
    assert fresh.lookup(0) is Answer.HIT
    assert fresh.lookup(1) is Answer.MISS


def test_many_objects_take_few_round_trips(own_server, opened):
    client = valkey.Valkey.from_url(own_server.url)
    tier = opened(own_server.url, n_threads=1, batch_objects=50)
    tier.store(range(200))
    client.config_resetstat()
    assert all(result.outcome is Outcome.DONE for result in tier.load(range(200)))
    assert client.info("commandstats")["cmdstat_mget"]["calls"] <= 5  # the first may have been alone in the queue
    client.close()


def test_a_server_that_dies_is_left_alone_and_used_again_when_it_is_back(own_server, opened, caplog):
    clock = VirtualClock()
    tier = opened(own_server.url, clock=clock, n_threads=1, n_faults=2, retry_s=5.0)
    assert tier.store([1]) == [Outcome.DONE]
    own_server.kill()
    assert tier.load([1])[0].outcome is Outcome.FAILED
    assert tier.store([2]) == [Outcome.FAILED]
    assert tier.tier.counters().n_degraded == 1
    assert "left alone for 5 s" in caplog.text
    assert tier.store([3]) == [Outcome.REFUSED]
    assert tier.load([1])[0].outcome is Outcome.REFUSED
    assert tier.tier.lookup(key_of(4)) is Answer.MISS
    clock.advance(5.0)
    assert tier.store([2]) == [Outcome.FAILED], "one fault is enough the second time"
    assert tier.store([3]) == [Outcome.REFUSED]
    own_server.start()
    clock.advance(5.0)
    assert tier.store([2, 3]) == [Outcome.DONE] * 2
    clock.advance(10.0)
    assert tier.lookup(1) is Answer.MISS, "the server came back empty"
    assert tier.tier.usage().n_objects == 2


def test_a_server_that_hangs_fails_what_it_has_and_delays_no_call(own_server, opened):
    tier = opened(own_server.url, n_threads=1, n_faults=1, timeout_s=0.2)
    tier.store([1])
    own_server.stop()
    try:
        assert tier.load([1])[0].outcome is Outcome.FAILED
        assert tier.load([1])[0].outcome is Outcome.REFUSED
    finally:
        own_server.go_on()


def test_a_server_that_was_never_there_is_a_tier_that_misses(tmp_path, opened):
    tier = opened(f"unix://{tmp_path}/nobody", n_faults=1)
    assert tier.lookup(1) is Answer.MISS
    assert tier.store([1]) == [Outcome.REFUSED]


def test_a_full_server_fails_stores_and_goes_on_loading(opened):
    process = ServerProcess("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    try:
        tier = opened(process.url, 64 << 20, n_faults=1, retry_s=1e-9)
        outcomes = [outcome for i in range(0, 4000, 50) for outcome in tier.store(range(i, i + 50))]
        assert outcomes[0] is Outcome.DONE
        assert Outcome.FAILED in outcomes
        assert bytes_of(tier.load([0])[0]) == body_of(0)
        assert tier.tier.counters().n_degraded > 0
    finally:
        process.close()


def test_a_server_that_is_emptied_holds_nothing_and_keeps_its_bound(server, opened):
    namespace, client = a_namespace(), valkey.Valkey.from_url(server.url)
    tier = opened(server.url, 9_000, namespace=namespace)
    tier.store(range(5))
    for name in client.scan_iter(f"{{{namespace}}}:*"):
        client.delete(name)
    assert tier.load([1])[0].outcome is Outcome.ABSENT
    assert tier.lookup(1) is Answer.MISS
    tier.store(range(100, 130))
    assert tier.tier.usage().used_bytes <= 9_000
    client.close()


def test_an_object_that_vanished_alone_is_counted_once_when_it_is_stored_again(server, opened):
    namespace, client = a_namespace(), valkey.Valkey.from_url(server.url)
    tier = opened(server.url, namespace=namespace)
    tier.store([1, 2])
    used = tier.tier.usage().used_bytes
    client.delete(name_of(namespace, 1))
    assert tier.load([1])[0].outcome is Outcome.ABSENT
    tier.store([1])
    assert tier.tier.usage() == type(tier.tier.usage())(2, used, 1 << 20)
    client.close()


def test_bytes_that_changed_in_the_server_are_not_served(server):
    """The seal finds one bit; a length is seen by the tier itself."""
    client, woken = valkey.Valkey.from_url(server.url), Event()
    words = entry(server.url)
    (spec,) = read_tiers([words])
    tier = TierDriver(make_tier(spec, IDENTITY, woken.set, time.monotonic), woken)
    tier.store([1, 2, 3])
    names = {name[-64:].decode(): name for name in client.zrange(f"{{{words['namespace']}}}:index", 0, -1)}
    client.setbit(names[key_of(1).hex()], 9_000, 1 - client.getbit(names[key_of(1).hex()], 9_000))
    client.append(names[key_of(2).hex()], b"x")
    assert tier.load([1])[0].outcome is Outcome.FAILED
    assert tier.load([2])[0].outcome is Outcome.FAILED
    assert bytes_of(tier.load([3])[0]) == body_of(3)
    assert [tier.lookup(i) for i in (1, 2)] == [Answer.MISS] * 2
    assert tier.tier.counters().n_invalid >= 1
    tier.tier.close()
    client.close()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"url": "http://x"}, r"\[0\]: url: .*schemes"),
        ({"url": 7}, r"\[0\].url: Expected `str`"),
        ({"namespace": "a b"}, r"namespace: got 'a b'"),
        ({"n_threads": 0}, "n_threads: got 0"),
        ({"queue_size": "big"}, "queue_size: got 'big'"),
        ({"timeout_s": 0}, r"timeout_s: got 0"),
        ({"secret_word": "x"}, r"secret_word: unknown"),
    ],
)
def test_options_that_are_wrong_are_refused_by_name(more, words):
    with pytest.raises(ConfigError, match=words):
        read_tiers([entry("redis://127.0.0.1") | more])


def test_a_password_is_not_shown():
    (spec,) = read_tiers([entry("redis://:secret@127.0.0.1")])
    assert "secret" not in repr(spec)


def test_a_time_to_live_is_the_servers_and_a_pin_outlives(server, opened):
    namespace, client = a_namespace(), valkey.Valkey.from_url(server.url)
    tier = opened(server.url, 9_000, namespace=namespace)
    tier.submit_store([1], ttl_s=1000.0)
    tier.submit_store([2], is_pinned=True)
    tier.finish()
    assert 990_000 < client.pttl(name_of(namespace, 1)) <= 1_000_000
    tier.submit_store([1], ttl_s=2000.0)
    tier.finish()
    assert client.pttl(name_of(namespace, 1)) > 1_000_000
    tier.submit_store([1], ttl_s=10.0)
    tier.finish()
    assert client.pttl(name_of(namespace, 1)) > 1_000_000
    client.pexpire(name_of(namespace, 1), 0)
    assert tier.load([1])[0].outcome is Outcome.ABSENT
    tier.submit_store([3], is_pinned=True, ttl_s=1000.0)
    tier.submit_store([4], is_pinned=True, ttl_s=0.001)
    tier.finish()
    assert client.pttl(name_of(namespace, 3)) == -1, "a pin ends, its object does not"
    for i in range(100, 130):  # each a chain's head: a tail would be given up before what was used just before it
        tier.store([i])
    assert [client.exists(name_of(namespace, i)) for i in (2, 3, 4)] == [1, 1, 0]
    client.close()
