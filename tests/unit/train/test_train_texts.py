"""Texts that the target writes: the same whatever interrupts it, and none to learn from that is measured on."""

import numpy as np
import pytest

from tiercel import LLM
from tiercel.base.errors import ConfigError, ModelFileError
from tiercel.protocol.params import SamplingParams
from tiercel.testing.tiny_model import write_tiny_model
from tiercel.train import texts
from tiercel.train.texts import Conversation, TextOptions, distinct, make_texts, read_prompts, read_shard, save_shard

PROMPTS = tuple(f"question {i}?" for i in range(64))


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(texts, "SHARD", 16)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def options(**changes):
    usual = {"n_answer_tokens": 500, "n_held_out": 2, "max_len_tokens": 128, "temperature": 0.8, "top_p": 0.95}
    return TextOptions(**{**usual, "greedy_frac": 0.5, "seed": 3, "prompts": PROMPTS, **changes})


def engine_of(model, made=None):
    def make():
        if made is not None:
            made.append(1)
        return LLM(str(model), threads=1, max_model_len=256, max_num_seqs=8, speculative="off")

    return make


def told(*_):
    pass


def same(a, b):
    return len(a) == len(b) and all(
        np.array_equal(x.token_ids, y.token_ids) and x[1:] == y[1:] for x, y in zip(a, b, strict=True)
    )


def test_a_run_that_was_killed_ends_with_the_texts_of_one_that_was_not(model, tmp_path):
    whole = make_texts(engine_of(model), tmp_path, options(n_answer_tokens=1200), told)
    assert len(whole) > 1
    last = len(whole) - 1
    texts.shard_path(tmp_path, last).unlink()
    made = []
    again = make_texts(engine_of(model, made), tmp_path, options(n_answer_tokens=1200), told)
    assert all(same(a, b) for a, b in zip(whole, again, strict=True))
    assert len(made) == 1
    # All is there: no engine is started.
    make_texts(engine_of(model, made), tmp_path, options(n_answer_tokens=1200), told)
    assert len(made) == 1


def test_a_conversation_depends_on_its_number_and_the_seed_alone(model, tmp_path, monkeypatch):
    folders = [tmp_path / name for name in ("whole", "halves", "other")]
    for folder in folders:
        folder.mkdir()
    (first, *_) = make_texts(engine_of(model), folders[0], options(n_answer_tokens=1), told)
    monkeypatch.setattr(texts, "SHARD", 8)
    n_learned = texts.n_answer_tokens(first)
    halves = make_texts(engine_of(model), folders[1], options(n_answer_tokens=n_learned), told)
    joined = [one.token_ids.tolist() for shard in halves for one in shard]
    assert joined == [one.token_ids.tolist() for one in first]
    (other, *_) = make_texts(engine_of(model), folders[2], options(n_answer_tokens=1, seed=4), told)
    assert [one.token_ids.tolist() for one in other] != joined[: len(other)]


def test_answers_are_what_the_target_says_and_held_out_ones_are_greedy(model, tmp_path):
    (shard, *_) = make_texts(engine_of(model), tmp_path, options(), told)
    held_out = [one for one in shard if one.is_held_out]
    assert held_out
    assert all(one.is_greedy for one in held_out)
    assert {one.is_greedy for one in shard if not one.is_held_out} == {True, False}
    with engine_of(model)() as llm:
        for one in [*held_out, next(x for x in shard if x.is_greedy)]:
            prompt, answer = one.token_ids[: one.answer_start].tolist(), one.token_ids[one.answer_start :].tolist()
            params = SamplingParams(temperature=0.0, max_tokens=len(answer))
            (said,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
            assert list(said.outputs[0].token_ids) == answer


def text(ids, start=2, **flags):
    return Conversation(np.array(ids, np.int32), start, **{"is_greedy": True, "is_held_out": False, **flags})


def test_no_question_that_is_measured_on_is_learned_from():
    kept = distinct(
        [text([1, 2, 9], is_held_out=True), text([1, 2, 8]), text([1, 3, 8]), text([1, 3, 8]), text([1, 3, 9])]
    )
    assert [one.token_ids.tolist() for one in kept] == [[1, 2, 9], [1, 3, 8], [1, 3, 9]]


def test_a_target_without_a_chat_template_is_refused(tmp_path):
    model = write_tiny_model(tmp_path / "plain", chat_template=None)
    with pytest.raises(ConfigError, match="no chat template"):
        make_texts(engine_of(model), tmp_path, options(), told)


def test_a_target_that_asks_nothing_is_given_up(model, tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "_LONGEST_QUESTION", 1)
    with pytest.raises(ConfigError, match="too few to learn from; give questions with --prompts"):
        make_texts(engine_of(model), tmp_path, options(prompts=()), told)


def test_a_damaged_shard_is_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    save_shard(path, [text([1, 2, 3]), text([4, 5, 6, 7], start=3)])
    assert [(one.shard, one.first_row) for one in read_shard(path, 5)] == [(5, 0), (5, 3)]
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ModelFileError, match=r"is damaged .* remove it, and it is made again"):
        read_shard(path, 0)


def test_questions_are_read_a_line_each_or_from_objects(tmp_path):
    plain, objects = tmp_path / "a.txt", tmp_path / "b.jsonl"
    plain.write_text(" one? \n\ntwo?\n")
    objects.write_text('{"prompt": "one?"}\n\n{"prompt": "two\\nlines?", "more": 1}\n')
    assert read_prompts(plain) == ("one?", "two?")
    assert read_prompts(objects) == ("one?", "two\nlines?")
    objects.write_text('{"text": "one?"}')
    with pytest.raises(ConfigError, match="line 1: need an object with a text"):
        read_prompts(objects)
    plain.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        read_prompts(plain)
    with pytest.raises(ConfigError, match="one question a line"):
        read_prompts(tmp_path / "none.txt")
