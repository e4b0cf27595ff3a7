"""The commands, with a fake engine and peers that are tiny scripts."""

import json

import pytest
from bench_fakes import PYTHON, continue_ids

from tiercel.bench import latency, throughput
from tiercel.bench.contest import Request, Run
from tiercel.cli import main

SMALL = ["--num-iters", "2", "--num-iters-warmup", "0"]
LATENCY = ["bench", "latency", "--input-len", "4", "--output-len", "5", "--batch-size", "2", *SMALL]


def with_peer(folder):
    return ["--peer", f"fake={PYTHON}", "--peers-dir", str(folder), "--peer-timeout", "20"]


def test_latency_writes_a_row_with_all_that_made_it(engine, peers, tmp_path, capsys, no_checkout):
    path = tmp_path / "r.jsonl"
    assert main.main([*LATENCY, *with_peer(peers()), "--output", str(path)]) == 0
    row = json.loads(path.read_text())
    assert (row["case"], row["bench"], row["kind"]) == ("unnamed", "latency", "info")
    assert row["config"]["work"]["input_len"] == 4
    assert row["config"]["engine"] == {"threads": 2}
    assert str(PYTHON) not in path.read_text()
    ours, peer = row["contestants"]["tiercel"], row["contestants"]["fake"]
    assert ours["measures"]["latency_s"]["n"] == 2
    assert ours["outputs"]["digest"] == peer["outputs"]["digest"]
    assert peer["outputs"]["check_tokens_agreed"] == [16, 16, 16, 16]
    assert row["ratios"]["fake"]["latency_s"] == 0.5
    assert engine.is_closed
    assert "fake" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("dies", "died"),
        ("writes garbage", "garbage"),
        ("refuses", "refused"),
        ("gives too few tokens", "wrong"),
        ("gives an answer too many", "wrong"),
        ("took no time", "wrong"),
    ],
)
@pytest.mark.parametrize("from_turn", [1, 3])
def test_a_peer_that_fails_is_named_and_never_a_zero(
    engine, peers, tmp_path, capsys, no_checkout, fault, kind, from_turn
):
    path = tmp_path / "r.jsonl"
    assert main.main([*LATENCY, *with_peer(peers(fault, from_turn=from_turn)), "--output", str(path)]) == 1
    row = json.loads(path.read_text())
    assert list(row["contestants"]) == ["tiercel"]
    assert kind in row["skipped"]["fake"]
    assert row["ratios"] == {}
    said = capsys.readouterr()
    assert "fake is left out: " in said.out
    assert "Traceback" not in said.err


def test_a_peer_with_other_tokens_is_left_out_by_the_check_texts(engine, peers, capsys, no_checkout):
    assert main.main([*LATENCY, *with_peer(peers("gives other tokens")), "--json"]) == 1
    row = json.loads(capsys.readouterr().out)
    assert "wrong" in row["skipped"]["fake"]


def test_a_row_says_how_many_timed_outputs_were_the_same(engine, peers, capsys, no_checkout):
    assert main.main([*LATENCY, *with_peer(peers("gives other tokens", from_turn=3)), "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["contestants"]["fake"]["outputs"]["timed_tokens_agreed"] == [0, 0]


def test_a_peer_without_its_environment_is_named_and_skipped(engine, peers, capsys, no_checkout):
    words = ["--peer", "fake=no/such/python", "--peers-dir", str(peers()), "--json"]
    assert main.main([*LATENCY, *words]) == 1
    row = json.loads(capsys.readouterr().out)
    assert "missing" in row["skipped"]["fake"]


def test_throughput_can_be_set_beside_one_request_alone(engine, capsys, no_checkout):
    words = ["bench", "throughput", "--num-prompts", "3", "--input-len", "4", "--output-len", "5", *SMALL]
    assert main.main([*words, "--against-single", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    measures = row["contestants"]["tiercel"]["measures"]
    assert measures["output_tok_s"]["median"] == 30.0
    assert measures["gain_over_single"]["median"] == 3.0


def test_throughput_can_be_set_beside_itself_bound_to_a_form(engine, capsys, no_checkout):
    words = ["bench", "throughput", "--num-prompts", "3", "--input-len", "4", "--output-len", "5", *SMALL]
    assert main.main([*words, "--against-form", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["contestants"]["tiercel"]["measures"]["form_time_ratio"]["median"] == 1.0
    free, bound = engine.turns[-2:]
    assert [one.schema for one in free] == [None] * 3
    assert all(json.loads(one.schema)["type"] == "array" for one in bound)
    assert main.main([*words, "--against-form", "--against-single"]) == 2
    assert "drop one" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["latency", "--batch-size", "2"], ["throughput", "--num-prompts", "2"]], ids=lambda words: words[0]
)
def test_what_is_no_kernel_is_told_when_asked_for(engine, capsys, no_checkout, words):
    words = ["bench", *words, "--input-len", "4", "--output-len", "5", *SMALL, "--json"]
    assert main.main(words) == 0
    assert "step_overhead_frac" not in json.loads(capsys.readouterr().out)["contestants"]["tiercel"]["measures"]
    assert main.main([*words, "--step-overhead"]) == 0
    measures = json.loads(capsys.readouterr().out)["contestants"]["tiercel"]["measures"]
    assert measures["step_overhead_frac"]["median"] == pytest.approx(0.1)


def test_measures_of_latency_are_what_they_say():
    requests = [Request((1,) * 10, 5), Request((2,) * 10, 5)]
    run = Run((continue_ids([1], 5),) * 2, 2.0, (0.5, 1.0))
    assert latency.measure([requests], [run]) == {
        "latency_s": 2.0,
        "first_token_s": 0.75,
        "prefill_tok_s": 20.0,
        "decode_tok_s": 8.0,
    }


def test_without_first_tokens_times_no_rate_is_made_up():
    run = Run((continue_ids([1], 5),), 2.0)
    assert latency.measure([[Request((1,), 5)]], [run]) == {"latency_s": 2.0}


def test_measures_of_throughput_count_prompts_and_outputs():
    requests = [Request((1,) * 10, 5), Request((2,) * 20, 5)]
    run = Run((continue_ids([1], 5),) * 2, 2.0)
    assert throughput.measure([requests], [run]) == {
        "elapsed_s": 2.0,
        "requests_per_s": 1.0,
        "total_tok_s": 20.0,
        "output_tok_s": 5.0,
    }


CASE = """
bench = "latency"
kind = "gate"
[work]
model = "smollm2-135m"
input_len = 4
output_len = 5
batch_size = 1
num_iters = 3
num_iters_warmup = 0
threads = 2
[[reach]]
measure = "latency_s"
at_most = {at_most}
"""


@pytest.mark.parametrize(("at_most", "code"), [(1.0, 0), (0.1, 1)])
def test_a_gate_that_is_not_reached_fails(engine, tmp_path, capsys, no_checkout, at_most, code):
    (tmp_path / "small.toml").write_text(CASE.format(at_most=at_most))
    assert main.main(["bench", "latency", "--case", str(tmp_path / "small.toml"), "--json"]) == code
    row = json.loads(capsys.readouterr().out)
    assert (row["case"], row["kind"]) == ("small", "gate")
    assert row["contestants"]["tiercel"]["measures"]["latency_s"]["n"] == 3
    assert row["reach"] == [{"measure": "latency_s", "at_most": at_most, "got": 0.5, "is_reached": code == 0}]


def test_a_flag_wins_over_the_case(engine, tmp_path, capsys, no_checkout):
    (tmp_path / "small.toml").write_text(CASE.format(at_most=1.0))
    words = ["bench", "latency", "--case", str(tmp_path / "small.toml"), "-m", "other", "--input-len", "9", "--json"]
    assert main.main(words) == 0
    assert json.loads(capsys.readouterr().out)["config"]["work"]["input_len"] == 9


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bench", "latncy"], "need one of latency"),
        (["bench", "latency", "--case", "nowhere"], "case"),
        (["bench", "latency", "--num-iters", "0"], "need 1 or more"),
        (["bench", "latency", "--batch-size", "0"], "batch-size"),
        (["bench", "latency", "--peer", "llama_cpp"], "NAME=PYTHON"),
        (["bench", "latency", "--peer-model", "x=y"], "takes no part"),
        (["bench", "latency", "--agree-tokens", "99"], "agree-tokens"),
        (["bench", "latency", "--input-lenn", "3"], "did you mean --input-len?"),
        (["bench", "latency", "--peer", "x=python"], "--peers-dir"),
    ],
)
def test_a_wrong_command_is_told_and_exits_with_2(engine, capsys, no_checkout, words, said):
    assert main.main(words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bench = 'latency'\nwork = 3", r"\[work\]"),
        ("bench = 'latency'\nwrok = 3", "wrok"),
        ("bench = 'serve'", "'serve'"),
        ("bench = 'latency'\nkind = 'x'", "gate, info"),
        ("bench = 'latency'\n[work]\nnum_prompts = 3", "num_prompts"),
        ("bench = 'latency'\n[[reach]]\nmeasure = 'x'", "at_least, at_most"),
        ("= 3", "TOML"),
    ],
)
def test_a_wrong_case_is_told(engine, tmp_path, capsys, no_checkout, text, said):
    import re

    (tmp_path / "bad.toml").write_text(text)
    assert main.main(["bench", "latency", "--case", str(tmp_path / "bad.toml")]) == 2
    assert re.search(said, capsys.readouterr().err)


def test_bench_has_help(capsys):
    assert main.main(["bench"]) == 2
    assert main.main(["bench", "--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: tiercel bench COMMAND")
