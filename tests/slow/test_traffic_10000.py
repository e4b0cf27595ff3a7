"""Ten thousand random requests (seed 21) on real sockets leave nothing behind. Some two minutes."""

import pytest
from test_traffic import run

pytestmark = pytest.mark.slow


def test_10000_random_requests_leave_nothing_behind():
    traffic = run(10_000, n_at_once=32)
    print(sorted(traffic.statuses.items(), key=str))
    assert not traffic.failures
    assert sum(traffic.statuses.values()) == 10_000
