import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercel.base.errors import ConfigError, OutOfPages
from tiercel.runner.capacity import Beside, divide, pages_for, plan, snapshot_spacing

MIB = 1 << 20


def capacity(**changes):
    settings = {
        "kv_token_bytes": 1024,
        "page_size_tokens": 16,
        "model_len_tokens": 2048,
        "max_model_len": None,
        "max_num_seqs": 4,
        "pool_bytes": None,
        "available_bytes": 1 << 30,
    }
    return plan(**(settings | changes))


def test_plenty_of_memory_gives_every_slot_a_full_sequence_and_no_more():
    assert capacity().n_pages == 4 * 128
    assert capacity(pool_bytes=1 << 30).n_pages == 4 * 128


def test_pool_takes_at_most_a_quarter_of_what_is_free():
    found = capacity(available_bytes=16 * MIB)
    assert found.n_pages == 16 * MIB // 4 // (16 * 1024)
    assert found.max_len_tokens == 2048


def test_one_full_sequence_may_take_half_of_what_is_free():
    found = capacity(available_bytes=4 * MIB)
    assert found.n_pages == 128
    assert found.n_full_sequences == 1.0


def test_default_length_shrinks_to_what_fits():
    found = capacity(available_bytes=2 * MIB)
    assert found.max_len_tokens == found.n_pages * 16 == 1024


def test_a_length_that_was_asked_for_is_refused_with_what_would_fit():
    with pytest.raises(OutOfPages, match=r"lower max_model_len to 1024 or give more memory"):
        capacity(max_model_len=2048, pool_bytes=MIB)


def test_minus_one_asks_for_the_largest_that_fits():
    assert capacity(max_model_len=-1, pool_bytes=MIB).max_len_tokens == 1024


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"page_size_tokens": 24}, "block_size"),
        ({"page_size_tokens": 0}, "block_size"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"max_model_len": 4096}, "own limit is 2048"),
        ({"pool_bytes": 100}, "0 pages"),
    ],
)
def test_bad_settings_are_refused_by_name(change, word):
    with pytest.raises((ConfigError, OutOfPages), match=word):
        capacity(**change)


def test_a_model_without_keys_and_values_needs_no_pool():
    found = capacity(kv_token_bytes=0, available_bytes=1 << 10)
    assert (found.page_bytes, found.n_pages, found.n_tokens) == (0, 0, 0)
    assert (found.max_len_tokens, found.n_full_sequences) == (2048, 4.0)
    assert found.describe() == (
        "KV pool: none, as the model keeps no keys and values; 4 requests of 2,048 tokens fit at once"
    )


def test_where_only_states_are_kept_pages_are_counted_and_not_without_end():
    """By their keys states are found; a context that nothing bounds must not have as many records."""
    many = {"kv_token_bytes": 0, "state_bytes": MIB, "available_bytes": 1 << 34, "keeps_states": True}
    found = capacity(**many)
    assert (found.n_pages, found.page_bytes, found.n_full_sequences) == (4 * 128, 0, 4.0)
    assert found.n_snapshots > 0
    endless = capacity(**many, model_len_tokens=1 << 20, max_num_seqs=64)
    assert (endless.n_pages, endless.max_len_tokens) == (1 << 18, 1 << 20)
    assert "; 4 requests of 1,048,576 tokens fit at once" in endless.describe()
    assert capacity(**many | {"keeps_states": False}).n_pages == 0


def test_states_alone_may_be_more_than_there_is():
    with pytest.raises(OutOfPages, match=r"recurrent state: 4 sequences of 1\.00 MiB each"):
        capacity(kv_token_bytes=0, state_bytes=MIB, available_bytes=3 * MIB)


def test_the_line_at_start_names_pages_tokens_and_requests():
    line = capacity().describe()
    assert "512 pages" in line
    assert "8,192 tokens" in line
    assert "4.00 requests of 2,048 tokens" in line


def test_pages_for_rounds_up():
    assert [pages_for(n, 16) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


# Recurrent states.

STATE = {"state_bytes": 4 * MIB, "keeps_states": True}


def used_bytes(found):
    return found.n_pages * found.page_bytes + found.n_snapshots * found.state_bytes


def test_states_are_kept_where_a_prompts_pages_take_as_many_bytes():
    assert snapshot_spacing(4 * MIB, 1024, 16) == 4096
    assert snapshot_spacing(4 * MIB + 1, 1024, 16) == 4112


def test_states_are_not_kept_more_often_than_a_step_or_than_1024_tokens_without_pages():
    assert snapshot_spacing(4096, 1024, 16) == 512
    assert snapshot_spacing(4096, 0, 48) == 1056


def test_plenty_of_memory_keeps_all_states_that_there_is_a_use_for():
    found = capacity(**STATE, model_len_tokens=8192)
    assert (found.n_pages, found.snapshot_spacing_tokens) == (4 * 512, 4096)
    assert found.n_snapshots == 4 * (2 + 4)


def test_pages_and_snapshots_share_what_the_pool_may_take():
    found = capacity(**STATE, model_len_tokens=8192, pool_bytes=48 * MIB, max_num_seqs=8)
    # 8 MiB of pages come first; of the 40 that are left, each 4 MiB of pages bring a state of 4 MiB, and 8 at least.
    assert found.n_snapshots == 8
    assert found.n_pages == 16 * MIB // (16 * 1024)
    assert used_bytes(found) == 48 * MIB


def test_one_full_sequence_comes_before_any_snapshot():
    found = capacity(**STATE, max_model_len=2048, pool_bytes=3 * MIB)
    assert (found.n_pages, found.n_snapshots) == (192, 0)
    assert "prefix caching is off, as no states are kept" in found.describe()


def test_a_default_length_gives_way_to_a_few_snapshots():
    found = capacity(state_bytes=MIB // 8, keeps_states=True, model_len_tokens=1 << 20, pool_bytes=16 * MIB)
    assert found.n_snapshots == 8
    assert found.max_len_tokens == found.n_pages * 16 == 15 * 1024


def test_without_prefix_caching_all_is_for_pages():
    found = capacity(state_bytes=4 * MIB, model_len_tokens=8192, pool_bytes=24 * MIB)
    assert (found.n_pages, found.n_snapshots) == (1536, 0)


def test_a_model_without_keys_and_values_gives_its_budget_to_states():
    found = capacity(**STATE, kv_token_bytes=0, pool_bytes=30 * MIB)
    assert (found.page_bytes, found.n_snapshots) == (0, 7)
    assert found.n_pages == 4 * 128


def test_the_line_at_start_names_snapshots_and_their_spacing():
    line = capacity(**STATE, model_len_tokens=8192, max_num_seqs=2).describe()
    assert "recurrent state: 4.00 MiB a sequence, 8 MiB for 2; 12 snapshots of it (48 MiB)" in line
    assert "in prompts every 4,096 tokens" in line


def test_snapshots_larger_than_memory_are_refused_with_both_sizes():
    with pytest.raises(OutOfPages, match=r"pages of .* and .* snapshots of 4\.00 MiB"):
        capacity(**STATE, model_len_tokens=8192, pool_bytes=1 << 40, available_bytes=60 * MIB)


# What drafting takes.


def test_a_pool_that_nobody_sized_leaves_room_for_drafting():
    found = capacity(available_bytes=16 * MIB, beside=Beside(drafting_bytes=4 * MIB))
    assert found.n_pages == (16 - 4) * MIB // 4 // (16 * 1024)
    assert capacity(beside=Beside(drafting_bytes=4 * MIB)).n_pages == capacity().n_pages


@pytest.mark.parametrize("drafting_mib", [1, 3, 40])
def test_drafting_that_nobody_asked_for_refuses_nothing_and_shortens_no_sequence(drafting_mib):
    sizes = {"beside": Beside(drafting_bytes=drafting_mib * MIB), "available_bytes": 4 * MIB}
    assert capacity(**sizes, max_model_len=2048).n_pages == 128
    assert capacity(**sizes).max_len_tokens == 2048
    assert capacity(**sizes, pool_bytes=4 * MIB).n_pages == 256


def test_drafting_that_was_asked_for_is_not_free_for_a_pool():
    sizes = {"beside": Beside(drafting_bytes=3 * MIB, is_drafting_asked=True)}
    assert capacity(**sizes, available_bytes=11 * MIB, pool_bytes=8 * MIB).n_pages == 512
    with pytest.raises(OutOfPages, match=r"10 MiB of memory are free beside 3 MiB for drafting .*speculative=off"):
        capacity(**sizes, available_bytes=13 * MIB, pool_bytes=16 * MIB, max_num_seqs=8)
    with pytest.raises(OutOfPages, match=r"drafting: takes up to 3 MiB .* 2 MiB of memory are free.*speculative=off"):
        capacity(**sizes, available_bytes=2 * MIB)


def test_drafting_that_was_asked_for_makes_a_default_length_shorter_before_it_is_refused():
    asked = Beside(drafting_bytes=2 * MIB, is_drafting_asked=True)
    assert capacity(available_bytes=4 * MIB, beside=asked).max_len_tokens == 1024


def test_the_line_at_start_names_drafting_where_it_is_worth_a_word():
    assert capacity(beside=Beside(drafting_bytes=120 * MIB)).describe().endswith("fit at once; drafting: up to 120 MiB")
    assert "drafting" not in capacity(beside=Beside(drafting_bytes=1000)).describe()


def test_all_bytes_are_pages_states_snapshots_and_drafting():
    found = capacity(**STATE, model_len_tokens=8192, beside=Beside(drafting_bytes=5 * MIB))
    assert found.nbytes == used_bytes(found) + 4 * 4 * MIB + 5 * MIB


@given(
    st.integers(0, 1 << 30),
    st.sampled_from([0, 1 << 10, 1 << 16]),
    st.integers(1, 1 << 22),
    st.integers(1, 500),
    st.integers(1, 64),
    st.integers(1, 200),
)
def test_what_is_divided_is_never_more_than_there_is(budget, page_bytes, state_bytes, n_first, n_spacing, n_wanted):
    n_pages, n_snapshots = divide(
        budget, page_bytes, state_bytes, pages=(n_first, 4 * n_first), spacing_pages=n_spacing, n_wanted=n_wanted
    )
    assert n_pages * page_bytes + n_snapshots * state_bytes <= budget
    assert 0 <= n_snapshots <= n_wanted
    assert n_pages <= 4 * n_first
    if page_bytes:
        assert n_pages >= min(n_first, budget // page_bytes)
