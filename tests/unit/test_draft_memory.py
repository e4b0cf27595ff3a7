"""What drafting takes of memory beside the pages, and whose plan leaves room for it."""

import pytest

from tiercel.base import machine
from tiercel.base.config import EngineOptions
from tiercel.base.errors import OutOfPages
from tiercel.boot.plan import capacity_of, make_plan
from tiercel.boot.runner import build_runner
from tiercel.models.info import ModelInfo
from tiercel.ops.program import KvLayer, StateLayer
from tiercel.runner.draft_memory import drafting_bytes, n_trial_rows, trial_row_bytes
from tiercel.testing.tiny_drafter import write_tiny_drafter
from tiercel.testing.tiny_model import write_tiny_model

MIB = 1 << 20
SIZES = {"n_draft_rows": 64, "n_slots": 8, "max_step_tokens": 576, "vocab_size": 1000}
# Of Kimi K3's size: heads of 128 columns, filters of four taps over queries, keys and values.
KDA = StateLayer(0, "delta_rule", 3 * 96 * 128, 4, 96, 128, 128)
SSD = StateLayer(0, "ssd", 2048 + 2 * 128, 4, 32, 128, 64)
CONV = StateLayer(0, "short_conv", 2048, 3, 0, 0, 0)


def test_a_draft_row_takes_a_row_of_logits():
    assert drafting_bytes(**SIZES) == 64 * 1000 * 4


def test_a_row_that_may_be_taken_back_keeps_the_inputs_of_each_recurrent_op():
    one = trial_row_bytes([CONV])
    assert trial_row_bytes([CONV] * 3) - one == 2 * 2048 * 4
    assert trial_row_bytes([SSD] * 2) - trial_row_bytes([SSD]) == (2 * (2048 + 256) + 32) * 4
    assert trial_row_bytes([KDA] * 2) - trial_row_bytes([KDA]) == (3 * 96 * 128 + 96 * 128 + 96) * 4
    assert 13.5e6 < trial_row_bytes([KDA] * 69) < 14.5e6
    assert trial_row_bytes([]) == 0


def test_a_drafted_sequence_has_one_row_more_to_take_back_and_a_step_bounds_all():
    assert n_trial_rows(64, 8, 576) == 72
    assert n_trial_rows(3, 8, 576) == 6
    assert n_trial_rows(64, 64, 100) == 100
    assert n_trial_rows(0, 8, 576) == 0
    beside = drafting_bytes(**SIZES, state_layers=[CONV]) - drafting_bytes(**SIZES)
    assert beside == 72 * trial_row_bytes([CONV])


def test_a_drafter_brings_its_weights_its_tables_and_the_logits_of_a_pass():
    found = drafting_bytes(
        **SIZES, n_pass_rows=40, n_pass_vocab=500, weight_bytes=7 * MIB, head_shapes=[(1000, 16), (500, 16), (16,)]
    )
    assert found - drafting_bytes(**SIZES) == 40 * 500 * 4 + 7 * MIB + (1000 * 16 + 500 * 16 + 16) * 4


# A plan.

HYBRID = ModelInfo("Tiny", 1000, 64, 2048, 1, (KvLayer(0, 2, 64, 0),), (StateLayer(1, "short_conv", 2048, 3, 0, 0, 0),))


@pytest.fixture
def free(monkeypatch):
    def set_free(n_bytes):
        monkeypatch.setattr(machine, "available_bytes", lambda: n_bytes)

    set_free(1 << 30)
    return set_free


def sized(info=HYBRID, promised_bytes=0, **options):
    return capacity_of(EngineOptions(model="tiny", max_num_seqs=8, **options), info, promised_bytes=promised_bytes)


def test_a_plan_counts_rows_of_logits_and_rows_to_take_back(free):
    rows = trial_row_bytes(HYBRID.state_layers)
    assert sized().drafting_bytes == 24 * 1000 * 4 + (24 + 8) * rows
    assert sized(speculative="ngram", speculative_config={"num_speculative_tokens": 4}).drafting_bytes == (
        16 * 1000 * 4 + (16 + 8) * rows
    )
    assert sized(speculative="off").drafting_bytes == 0
    assert sized(speculative="off").n_pages == sized().n_pages


def test_a_default_start_with_little_memory_is_refused_no_more_than_without_drafting(free):
    for n_bytes in (3 * MIB, MIB, MIB // 2):
        free(n_bytes)
        drafting, plain = sized(), sized(speculative="off")
        assert drafting.max_len_tokens == plain.max_len_tokens
        assert 0 < drafting.n_pages <= plain.n_pages


def test_what_is_promised_to_another_is_not_free(free):
    free(8 * MIB)
    assert sized(kv_cache_memory_bytes=6 * MIB).n_pages > 0
    with pytest.raises(OutOfPages, match="MiB of memory are free"):
        sized(kv_cache_memory_bytes=6 * MIB, promised_bytes=6 * MIB)
    assert 0 < sized(promised_bytes=6 * MIB).n_pages < sized().n_pages


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", config={"num_hidden_layers": 5})


def test_a_plan_with_a_drafter_counts_its_files_weights_and_tables(folder, tmp_path):
    drafter = write_tiny_drafter(tmp_path / "drafter", "dspark", folder, range(97, 105))
    options = EngineOptions(
        model=str(folder), max_num_seqs=4, compute_dtype="float32", speculative_config={"model": str(drafter)}
    )
    plan = make_plan(options)
    try:
        floats = sum(t.float32().nbytes for t in plan.drafter.checkpoint.tensors.values())
        rows = 4 * 264 * 8 + 4 * 4 * 5 * 8  # of a step's drafts, and of a pass over blocks of 5
        assert plan.capacity.drafting_bytes == floats + rows
    finally:
        plan.close()


def test_arrays_that_do_not_fit_name_what_drafting_asks_for(folder, monkeypatch):
    def no_memory(*args):
        raise MemoryError

    monkeypatch.setattr("tiercel.runner.native.NativeRunner", no_memory)
    plan = make_plan(EngineOptions(model=str(folder), max_num_seqs=4))
    with pytest.raises(
        OutOfPages, match=r"24 more rows of drafts .* or kv_cache_memory_bytes, or give speculative=off"
    ):
        build_runner(plan)
    plan.close()
    plan = make_plan(EngineOptions(model=str(folder), max_num_seqs=4, speculative="off"))
    with pytest.raises(OutOfPages, match=r"or kv_cache_memory_bytes$"):
        build_runner(plan)
    plan.close()
