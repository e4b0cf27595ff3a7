"""The policies of tiers, as functions of numbers."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tiercel.kv.tiers.policy import (
    CREDIT_MAX_S,
    Rates,
    StoreBudget,
    compute_s,
    keep_score,
    load_s,
    next_credit_s,
    should_load,
    should_store,
)

rates = st.builds(Rates, st.floats(0, 1e5), st.floats(0, 1e11), st.floats(0, 60))
counts = st.integers(0, 1_000_000)
checked = settings(max_examples=200, deadline=None, derandomize=True)


@checked
@given(counts, counts, rates)
def test_a_load_is_chosen_exactly_when_it_is_faster(n_tokens, n_bytes, r):
    chosen = should_load(n_tokens, n_bytes, r)
    assert chosen == (n_tokens > 0 and load_s(n_bytes, r) < compute_s(n_tokens, r))


@checked
@given(counts, counts, rates, st.floats(1, 10))
def test_a_load_that_is_chosen_stays_so_when_it_gets_cheaper_or_saves_more(n_tokens, n_bytes, r, factor):
    if should_load(n_tokens, n_bytes, r):
        assert should_load(n_tokens, int(n_bytes / factor), r)
        assert should_load(n_tokens, n_bytes, replace(r, latency_s=r.latency_s / factor))
        assert should_load(n_tokens, n_bytes, replace(r, load_bytes_s=r.load_bytes_s * factor))
        assert should_load(n_tokens, n_bytes, replace(r, prefill_tok_s=r.prefill_tok_s / factor))


def test_a_disk_that_was_never_measured_or_stands_still_is_not_loaded_from():
    assert not should_load(1000, 1, Rates(100.0, 0.0, 0.0))
    assert not should_load(0, 0, Rates(100.0, 1e9, 0.0))
    assert should_load(1000, 1, Rates(0.0, 1e9, 0.0)), "what cannot be computed is loaded"


def test_the_break_even_of_a_slow_and_a_fast_disk():
    """2,048 tokens of 23,040 bytes, computed at 2,000 tokens a second: 1.02 s against 47 MB."""
    assert should_load(2048, 2048 * 23_040, Rates(2000.0, 1.5e9, 0.01))
    assert not should_load(2048, 2048 * 23_040, Rates(2000.0, 40e6, 0.01))


store_args = (st.integers(1, 5), counts, st.integers(1, 1024), counts, rates)


@checked
@given(*store_args, st.floats(0, 100))
def test_what_no_load_could_win_is_not_stored(n_seen, before, n_tokens, n_bytes, r, worth_s):
    if should_store(n_seen, before, n_tokens, n_bytes, r, worth_s=worth_s):
        assert should_load(before + n_tokens, n_bytes * (before + n_tokens) // n_tokens, r)


@checked
@given(*store_args, st.floats(0, 100))
def test_a_second_sight_never_makes_storing_less_likely(n_seen, before, n_tokens, n_bytes, r, worth_s):
    if should_store(n_seen, before, n_tokens, n_bytes, r, worth_s=worth_s):
        assert should_store(n_seen + 1, before, n_tokens, n_bytes, r, worth_s=worth_s)


def test_a_first_sight_is_stored_only_above_its_worth():
    r = Rates(1000.0, 1e9, 0.0)
    assert not should_store(1, 0, 16, 1000, r, worth_s=0.5)
    assert should_store(2, 0, 16, 1000, r, worth_s=0.5)
    assert should_store(1, 1024, 16, 1000, r, worth_s=0.5)
    assert should_store(1, 0, 16, 1000, r, worth_s=0.5, n_sights=1)
    assert not should_store(2, 0, 16, 1000, r, worth_s=0.5, n_sights=3)
    assert not should_store(1, 1024, 16, 1000, r, worth_s=float("inf"))


@checked
@given(st.integers(0, 1000), counts, st.integers(0, 10_000), st.integers(1, 100_000), st.integers(0, 100))
def test_a_page_never_scores_below_one_deeper_in_its_chain(n_uses, age, depth, half_life, more):
    """One before it was used at least as often, and at least as lately."""
    deeper = keep_score(n_uses, age, depth, half_life)
    assert keep_score(n_uses + more, max(0, age - more), max(0, depth - 1), half_life) >= deeper
    assert depth == 0 or deeper == 0.0 or keep_score(n_uses, age, depth - 1, half_life) > deeper


def test_a_tail_that_is_used_is_worth_more_than_a_head_that_is_not():
    assert keep_score(1, 0, 100, 1024) > keep_score(0, 0, 0, 1024)
    assert keep_score(9, 1000, 1000, 1024) > keep_score(0, 0, 0, 1024)


spans = st.floats(0, 1000)


@checked
@given(st.floats(0, CREDIT_MAX_S), spans, st.floats(-1000, 1000), spans, spans)
def test_a_credit_has_bounds_grows_with_steps_and_savings_and_shrinks_with_costs(credit_s, stepped, saved, spent, more):
    got_s = next_credit_s(credit_s, stepped_s=stepped, saved_s=saved, spent_s=spent)
    assert 0 <= got_s <= CREDIT_MAX_S
    assert next_credit_s(credit_s, stepped_s=stepped + more, saved_s=saved, spent_s=spent) >= got_s
    assert next_credit_s(credit_s, stepped_s=stepped, saved_s=saved + more, spent_s=spent) >= got_s
    assert next_credit_s(credit_s, stepped_s=stepped, saved_s=saved, spent_s=spent + more) <= got_s
    assert next_credit_s(credit_s) == credit_s


@checked
@given(st.lists(st.tuples(st.sampled_from(["step", "save", "spend"]), st.floats(0, 3)), max_size=60))
def test_storing_at_first_sight_costs_a_small_part_of_running_and_half_of_what_it_saves(events):
    """Whatever happens in whatever order: without reuse, 0.5 % of what steps take, and a tenth of a second once."""
    budget, spent_s, stepped_s, saved_s = StoreBudget(), 0.0, 0.0, 0.0
    for what, time_s in events:
        if what == "step":
            budget.stepped(time_s)
            stepped_s += time_s
        elif what == "save":
            budget.saved(time_s)
            saved_s += time_s
        else:
            before_s = budget.credit_s
            is_granted = budget.spend(time_s)
            assert is_granted == (time_s <= before_s)
            assert is_granted or budget.credit_s == before_s
            spent_s += time_s * is_granted
    assert spent_s + budget.credit_s <= 0.1 + 0.005 * stepped_s + 0.5 * saved_s + 1e-9


def test_a_load_that_took_longer_than_computing_is_paid_for_by_later_stores():
    budget = StoreBudget()
    budget.saved(-1.0)
    assert budget.credit_s == 0.0
    assert not budget.spend(0.001)
    assert budget.spend(0.0)
