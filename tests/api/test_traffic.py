"""Random traffic leaves nothing behind: no page, slot, task, file or thread, and a healthy server."""

import asyncio
import gc
import os
import threading
from concurrent.futures import wait

import httpx
from kit import FakeRunner, Rig, wait_until
from live import LiveServer
from traffic import Traffic

SEED = 20


def run(n_requests, n_at_once):
    """Serve random traffic; give what was answered, when everything has come back."""
    limits = {"n_slots": 16, "n_pages": 256}
    settings = {"port": 0, "shutdown_s": 0.0, "read_stall_s": 5.0, "write_stall_s": 5.0}
    rig = Rig(settings=settings, limits=limits, runner=FakeRunner, check_each_step=False)
    live = LiveServer(rig)
    try:
        # Threads and workers start when they are first needed: after these they are there.
        asyncio.run(Traffic(SEED).send("127.0.0.1", live.port, 40, n_at_once=8))
        for pool in (rig.service._pool, rig.service._form_pool):
            together = threading.Barrier(rig.settings.n_threads)
            assert wait([pool.submit(together.wait, 10) for _ in range(rig.settings.n_threads)], 10).not_done == set()
        rig.chat(structured_outputs={"choice": ["a"]})
        wait_until(lambda: live.n_connections == 0)
        before = held()
        traffic = Traffic(SEED + 1)
        asyncio.run(traffic.send("127.0.0.1", live.port, n_requests, n_at_once=n_at_once))
        rig.assert_idle()
        rig.core.check()
        wait_until(lambda: live.n_connections == 0 and not live.server.server_state.tasks)
        assert httpx.get(f"{live.url}/health").status_code == 200
        wait_until(lambda: live.n_connections == 0)
        gc.collect()
        assert held() <= before
        assert not rig.service._running
        return traffic
    finally:
        live.close()
        rig.close()


def held():
    """Count open files and threads."""
    return len(os.listdir("/proc/self/fd")) + threading.active_count()  # noqa: PTH208  names are enough


def test_300_random_requests_leave_nothing_behind():
    traffic = run(300, n_at_once=16)
    assert not traffic.failures
    kinds = {kind for kind, _ in traffic.statuses}
    assert kinds == {"read", "left", "unread", "half_closed", "cut"}
    assert {status for _, status in traffic.statuses} >= {200, 400, 404, 501}
