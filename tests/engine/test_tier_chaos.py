"""A short run of the chaos that `tests/slow/test_tier_chaos_10000.py` runs for longer."""

from tier_chaos import run


def test_2000_requests_on_failing_disks_get_the_tokens_they_get_alone(tmp_path):
    counts = run(7, 2000, tmp_path)
    assert counts["requests"] == 2000
    assert counts["tokens loaded"] > 0
    assert sum(n for what, n in counts.items() if what.startswith("lie")) > 0
    assert counts["n_pages_failed"] + counts["n_pages_late"] > 0
