"""Measured rates, and what is waited for: properties of pure functions."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tiercel.kv.tiers.policy import RateMeter, Rates, compute_s, load_deadline_s

amounts = st.floats(0, 1e9)
times = st.floats(0, 1e4)


@settings(deadline=None)
@given(st.lists(st.tuples(amounts, times), max_size=10), st.floats(0, 100))
def test_a_rate_is_above_zero_and_between_what_was_seen_and_what_was_thought(seen, gap_s):
    meter = RateMeter(100.0, 1.0, 60.0)
    now_s = 0.0
    for amount, took_s in seen:
        now_s += gap_s
        meter.add(amount, took_s, now_s)
    rates = [100.0, *(amount / took_s if took_s else float("inf") for amount, took_s in seen if amount or took_s)]
    assert meter.rate(now_s) > 0
    assert min(rates) * (1 - 1e-9) <= meter.rate(now_s) <= max(rates) * (1 + 1e-9)


@settings(deadline=None)
@given(amounts, times)
def test_without_news_a_rate_returns_to_what_was_thought(amount, took_s):
    meter = RateMeter(100.0, 1.0, 60.0)
    meter.add(amount, took_s, 0.0)
    apart = [abs(meter.rate(now_s) - 100.0) for now_s in (0.0, 60.0, 600.0, 60_000.0)]
    assert apart == sorted(apart, reverse=True)
    assert apart[-1] < 1e-6


@settings(deadline=None)
@given(st.floats(1, 1e6))
def test_a_failure_that_took_long_lowers_the_rate(took_s):
    meter = RateMeter(100.0, 1.0, 60.0)
    meter.add(0, took_s, 5.0)
    assert meter.rate(5.0) <= 50.0


def test_what_was_seen_last_counts_most():
    meter = RateMeter(100.0, 1.0, 60.0)
    meter.add(1e6, 1.0, 0.0)
    meter.add(1e3, 1.0, 600.0)
    assert meter.rate(600.0) < 2e3


@settings(deadline=None)
@given(st.integers(0, 10**6), st.floats(0.01, 1e6), st.floats(0.01, 100))
def test_a_load_is_never_waited_for_longer_than_allowed_nor_much_longer_than_computing(n_tokens, prefill_tok_s, most_s):
    rates = Rates(prefill_tok_s, 1e9, 0.001)
    deadline_s = load_deadline_s(n_tokens, rates, most_s)
    assert 0 < deadline_s <= most_s
    assert deadline_s <= max(0.2 * most_s, 2 * compute_s(n_tokens, rates))
    assert deadline_s <= load_deadline_s(n_tokens + 1, rates, most_s)
