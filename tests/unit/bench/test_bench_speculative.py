"""`bench latency --compare-speculative`: pairs of answers, compared before their times count."""

import json

import pytest
from bench_fakes import continue_ids

from tiercel.base.errors import ConfigError
from tiercel.bench import speculative, texts
from tiercel.bench.contest import Run
from tiercel.bench.speculative import LocalPair, SpeculativeWork
from tiercel.cli import main
from tiercel.testing.tiny_model import write_tiny_model

WORDS = ["bench", "latency", "--compare-speculative", "--output-len", "6", "--num-iters", "4"]


class FakePair:
    """With speculation it takes half the time, and of three drafts a time two come."""

    versions = {"tiercel": "0"}  # noqa: RUF012  a fake's
    config = {"threads": 2}  # noqa: RUF012
    vocab_size = 1000

    def __init__(self):
        self.asked = []
        self.stats = {"n_drafts": 0, "n_draft_tokens": 0, "n_accepted_tokens": 0, "drafter_s": 0.0}
        self.stats["n_accepted_by_position"] = [0, 0, 0]
        self.is_wrong = self.is_closed = False
        self.n_short = 0

    def ask(self, text):
        return [ord(letter) for letter in text]

    def generate(self, requests, *, speculates):
        self.asked.append((speculates, tuple(requests)))
        drift = [7] if self.is_wrong and speculates else []
        ids = tuple(continue_ids([*drift, *one.token_ids], one.max_tokens - self.n_short) for one in requests)
        if speculates:
            positions = self.stats["n_accepted_by_position"]
            self.stats = {
                "n_drafts": self.stats["n_drafts"] + 2,
                "n_draft_tokens": self.stats["n_draft_tokens"] + 6,
                "n_accepted_tokens": self.stats["n_accepted_tokens"] + 3,
                "drafter_s": self.stats["drafter_s"] + 0.25,
                "n_accepted_by_position": [positions[0] + 2, positions[1] + 1, positions[2]],
            }
        firsts = tuple(0.5 for _ in requests)
        return Run(ids, 1.5 if speculates else 2.5, firsts, decode_s=tuple(1.0 if speculates else 2.0 for _ in ids))

    def first_token_s(self, behind, late, *, speculates):
        assert late.max_tokens == 1
        return (0.6 if speculates else 0.5), self.generate(behind, speculates=speculates)

    def counts(self):
        return self.stats

    def close(self):
        self.is_closed = True


@pytest.fixture
def pair(monkeypatch):
    fake = FakePair()
    monkeypatch.setattr(speculative, "open_pair", lambda model, options: fake)
    return fake


def test_a_row_says_what_speculation_brings_and_where_drafts_were_accepted(pair, capsys, no_checkout):
    assert main.main([*WORDS, "--num-iters-warmup", "1", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    ours, plain = row["contestants"]["tiercel"], row["contestants"]["without"]
    assert ours["measures"]["decode_tok_s"]["median"] == 5.0
    assert plain["measures"]["decode_tok_s"]["median"] == 2.5
    assert ours["measures"]["stream_tok_s"]["median"] == ours["measures"]["slowest_tok_s"]["median"] == 5.0
    assert ours["measures"]["speedup"] == {"n": 4, "min": 2.0, "median": 2.0, "p95": 2.0, "max": 2.0}
    assert ours["measures"]["tokens_per_step"]["median"] == 2.0  # six tokens, three of them drafted
    assert ours["measures"]["draft_s"]["median"] == 0.25
    assert row["ratios"]["without"]["decode_tok_s"] == 2.0
    assert ours["outputs"]["accepted_by_position_frac"] == [1.0, 0.5]
    assert ours["outputs"]["n_drafts"] == 8  # of the rounds that count
    assert ours["outputs"]["digest"] == plain["outputs"]["digest"]
    assert pair.is_closed


def test_each_question_is_asked_once_of_each_and_nobody_is_always_first(pair, no_checkout):
    assert main.main([*WORDS, "--num-iters-warmup", "0", "--batch-size", "2"]) == 0
    assert [speculates for speculates, _ in pair.asked] == [False, True, True, False] * 2
    questions = [request for speculates, requests in pair.asked if speculates for request in requests]
    assert len(set(questions)) == 8
    assert [r for s, requests in pair.asked if not s for r in requests] == questions


def test_answers_that_differ_are_no_measurement(pair, capsys, no_checkout):
    pair.is_wrong = True
    assert main.main(WORDS) == 1
    assert "speculation changed an answer" in capsys.readouterr().err


def test_a_prompt_behind_streams_is_timed_with_both(pair, capsys, no_checkout):
    assert main.main([*WORDS, "--n-behind", "3", "--input-len", "9", "--json"]) == 0
    ours = json.loads(capsys.readouterr().out)["contestants"]["tiercel"]["measures"]
    assert ours["first_token_ratio"]["median"] == pytest.approx(1.2)
    assert len(pair.asked[0][1]) == 3


def test_the_lines_for_a_terminal_tell_acceptance(pair, capsys, no_checkout):
    assert main.main(WORDS) == 0
    out = capsys.readouterr().out
    assert "accepted by position 1.00 0.50" in out
    assert "speedup" in out


def test_the_questions_of_a_file_are_asked_one_after_the_other(pair, tmp_path, no_checkout):
    (tmp_path / "questions.txt").write_text("Why?\n\n  How so? \nWhen?\n")
    words = [*WORDS, "--questions", str(tmp_path / "questions.txt"), "--num-iters", "3", "--num-iters-warmup", "0"]
    assert main.main(words) == 0
    asked = [requests[0].token_ids for speculates, requests in pair.asked if speculates]
    assert ["".join(map(chr, ids)) for ids in asked] == ["Why?", "How so?", "When?"]


def test_a_file_of_too_few_questions_is_refused(pair, tmp_path, capsys, no_checkout):
    for text, why in (("one\ntwo\n", "has 2; all rounds together ask 4"), (" \n", "is empty")):
        (tmp_path / "few.txt").write_text(text)
        assert main.main([*WORDS, "--questions", str(tmp_path / "few.txt"), "--num-iters-warmup", "0"]) == 2
        assert why in capsys.readouterr().err
    assert main.main([*WORDS, "--questions", str(tmp_path / "none.txt")]) == 2
    assert "none.txt" in capsys.readouterr().err
    assert not pair.asked


def test_answers_end_where_the_model_ends_them_if_asked(pair, capsys, no_checkout):
    pair.n_short = 2
    assert main.main([*WORDS, "--no-ignore-eos", "--json"]) == 0
    ours = json.loads(capsys.readouterr().out)["contestants"]["tiercel"]["measures"]
    assert ours["stream_tok_s"]["median"] == 3.0  # four tokens, three of them after the first
    assert all(request.may_end for _, requests in pair.asked for request in requests)
    assert main.main(WORDS) == 1
    assert "4 tokens for request 0, which asks for 6" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["--text", "prose"], ["--output-len", "1"], ["--batch-size", "0"], ["--peer", "llama_cpp=python"]]
)
def test_what_cannot_be_compared_is_refused(pair, words, capsys, no_checkout):
    assert main.main([*WORDS, *words]) == 2
    assert "bench" in capsys.readouterr().err


@pytest.mark.parametrize("kind", texts.KINDS)
def test_questions_are_others_each_time(kind):
    asked = [texts.question(kind, i) for i in range(40)]
    assert len(set(asked)) == 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny"))


OPTIONS = {"threads": 1, "max_num_seqs": 4, "block_size": 16}


def test_the_same_engine_answers_with_and_without(folder):
    config = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 2, "adaptive": False}
    pair = LocalPair(folder, {**OPTIONS, "speculative_config": config})
    try:
        work = SpeculativeWork(output_len=30, text="chat", batch_size=2)
        first, ids = speculative._round(pair, work, 0, 0, ())
        second, _ = speculative._round(pair, work, 1, 0, ())
        assert first["tiercel"]["drafts"] > 0
        assert second["tiercel"]["drafts"] > 0
        assert len(ids) == 2
        before = dict(pair.counts())
        pair.generate(speculative._requests(pair, work, (0, 1), ()), speculates=False)
        assert pair.counts()["n_drafts"] == before["n_drafts"]
    finally:
        pair.close()


def test_nothing_to_compare_is_refused(folder):
    with pytest.raises(ConfigError, match="nothing is speculated"):
        LocalPair(folder, {**OPTIONS, "speculative": "off"})
