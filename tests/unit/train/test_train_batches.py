"""What a step learns from, and the tables that are made of the texts."""

import numpy as np
import pytest

from tiercel.base.errors import ModelFileError
from tiercel.train.batches import Sampler, gather
from tiercel.train.taps import TapFiles
from tiercel.train.texts import Conversation
from tiercel.train.vocabulary import Before, count_tokens, coverage, draft_ids

E, N_TAPS = 2, 3


@pytest.fixture
def texts():
    """Two texts; a tap's row t is t, t + 100, t + 200; the final row is -t."""
    lengths, begin, made = (9, 6), 0, []
    for n in lengths:
        made.append(Conversation(np.arange(10, 10 + n, dtype=np.int32), 3, True, False, 0, begin))
        begin += n
    return made


@pytest.fixture
def files(texts, tmp_path):
    rows = [
        np.concatenate([[[t + 100 * i] * E for i in range(N_TAPS)], [[-t] * E]]).ravel()
        for one in texts
        for t in range(len(one.token_ids))
    ]
    np.save(tmp_path / "taps-00000.npy", np.array(rows, np.float16))
    return TapFiles(tmp_path, [texts], n_taps=N_TAPS, hidden=E)


def test_a_slot_has_the_token_after_it_and_the_row_that_foretold_it(texts, files):
    batch = gather(texts, [np.array([3, 6]), np.array([4, 4])], files, 3)
    assert batch.lengths.tolist() == [6, 4]
    assert batch.taps[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]
    assert batch.taps.shape == (10, N_TAPS * E)
    assert batch.next_ids.tolist() == [11, 12, 13, 14, 15, 16, 11, 12, 13, 14]
    assert batch.tokens[0].tolist() == [[13, 14, 15, 16], [16, 17, 18, 0]]
    assert batch.is_valid[0].tolist() == [[True, True, True], [True, True, False]]
    assert batch.teacher[0, :, :, 0].tolist() == [[-3, -4, -5], [-6, -7, 0]]
    assert batch.is_valid[1].tolist() == [[True, False, False]] * 2


def test_what_a_step_learns_from_is_a_function_of_the_seed_and_its_number(texts):
    def chosen(step, seed=0):
        found, anchors = Sampler(texts, n_texts=1, n_anchors=4, seed=seed).choose(step)
        return [one.first_row for one in found], [one.tolist() for one in anchors]

    assert chosen(5) == chosen(5)
    assert len({str(chosen(step)) for step in range(20)}) > 5
    assert [chosen(step) for step in range(9)] != [chosen(step, seed=1) for step in range(9)]


def test_anchors_are_in_answers_and_have_a_token_after_them(texts):
    for step in range(50):
        found, anchors = Sampler(texts, n_texts=2, n_anchors=4, seed=0).choose(step)
        for one, places in zip(found, anchors, strict=True):
            assert len(places) == 4
            assert one.answer_start <= places.min() <= places.max() <= len(one.token_ids) - 2


def test_taps_of_other_texts_are_refused(texts, files, tmp_path):
    with pytest.raises(ModelFileError, match=r"holds float16 of \[15, 8\]; float16 of \[15, 6\] is needed"):
        TapFiles(tmp_path, [texts], n_taps=2, hidden=E)
    (tmp_path / "taps-00000.npy").write_bytes(b"nothing")
    with pytest.raises(ModelFileError, match="is damaged"):
        TapFiles(tmp_path, [texts], n_taps=N_TAPS, hidden=E)


def test_the_most_frequent_tokens_of_answers_can_be_drafted(texts):
    counts = count_tokens(texts, 30)
    assert counts[12] == 0
    assert counts[13] == 2
    assert counts[18] == 1
    ids = draft_ids(counts, 4)
    assert ids.tolist() == [13, 14, 15, 16]
    assert coverage(counts, ids) == pytest.approx(7 / 9)


def test_tokens_too_rare_for_a_row_share_one():
    before = Before(np.array([5, 0, 2, 9]), n_seen_min=3)
    assert before.n_rows == 3
    table = np.array([[0.0], [1.0], [2.0]], np.float32)
    assert before.whole(table).ravel().tolist() == [1.0, 0.0, 0.0, 2.0]
