"""Ten thousand requests (seed 21) over some 140 engines, on a disk that fails in every way: no token differs."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))

from tier_chaos import run

pytestmark = pytest.mark.slow


def test_10000_requests_on_failing_disks_get_the_tokens_they_get_alone(tmp_path):
    counts = run(21, 10_000, tmp_path)
    print("\n".join(f"{what}: {n}" for what, n in sorted(counts.items())))
    assert counts["requests"] == 10_000
    assert counts["tokens loaded"] > 10_000
