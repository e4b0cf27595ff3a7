import pytest

from tiercel.base.errors import ConfigError, OutOfPages
from tiercel.runner.capacity import pages_for, plan

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
