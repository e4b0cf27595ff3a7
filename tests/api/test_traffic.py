"""Random traffic leaves nothing behind: no page, slot, task, file or thread, and a healthy server."""

import asyncio
import gc
import os
import threading

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
        asyncio.run(Traffic(SEED).send("127.0.0.1", live.port, 20, n_at_once=4))  # threads of the pool exist now
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
