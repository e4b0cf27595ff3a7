"""A file of requests is answered as a server would answer each, in its order, whatever else is in it."""

import asyncio
import io
import json
from pathlib import Path

import pytest

from tiercel.api.http.batch import answer_batch, read_lines
from tiercel.cli import run_batch
from tiercel.cli.main import main
from tiercel.hub.resolve import ResolvedModel

CHAT = "/v1/chat/completions"


def line(custom_id, url=CHAT, **body):
    if url == CHAT and not body:
        body = {"messages": [{"role": "user", "content": f"hi {custom_id}"}], "max_tokens": 4, "seed": 1}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).encode()


def answered(rig, *lines, n_at_once=4, **options):
    written = []
    file = io.BytesIO(b"\n".join(lines))
    run = answer_batch(
        rig.app, read_lines(file, rig.settings.body_bytes_max), written.append, n_at_once=n_at_once, **options
    )
    counts = asyncio.run(run)
    assert counts.n_lines == len(written)
    return [json.loads(one) for one in written], counts


def test_answers_are_the_servers_in_the_order_of_the_lines(rig):
    answers, counts = answered(rig, *(line(str(i)) for i in range(30)))
    assert [one["custom_id"] for one in answers] == [str(i) for i in range(30)]
    assert len({one["id"] for one in answers}) == 30
    for i, one in enumerate(answers):
        assert one["error"] is None
        assert one["response"]["status_code"] == 200
        content = rig.chat(messages=[{"role": "user", "content": f"hi {i}"}], max_tokens=4, seed=1, ignore_eos=None)
        assert one["response"]["body"]["choices"] == content["choices"]
        assert one["response"]["request_id"] in one["response"]["body"]["id"]
    assert (counts.n_lines, counts.n_failed) == (30, 0)


def test_every_route_of_a_batch_is_answered(rig):
    answers, counts = answered(
        rig,
        line("a", "/v1/completions", prompt="x", max_tokens=2),
        line("b", "/v1/messages", messages=[{"role": "user", "content": "x"}], max_tokens=2),
        line("c", "/v1/embeddings", input="x"),
        line("d", "/v1/score", text_1="x", text_2="y"),
    )
    assert [one["response"]["status_code"] for one in answers] == [200, 200, 501, 501]
    assert answers[2]["error"]["code"] == "NotImplementedError"
    assert answers[2]["error"]["message"].startswith("line 3: model: ")
    assert counts.n_failed == 2


@pytest.mark.parametrize(
    ("bad", "custom_id", "message"),
    [
        (b"{", None, "line 2: body: it is not JSON"),
        (b"[]", None, "line 2: body: got a list"),
        (b"\xff", None, "line 2: body: it is not JSON"),
        (b"[" * 100_000, None, "line 2: body: "),
        (b'{"custom_id": "x"}', "x", "line 2: "),
        (line(1), None, "line 2: custom_id: "),
        (line("a"), "a", "line 2: custom_id: 'a' is an earlier line's too"),
        (line("x", "/v1/chat"), "x", "line 2: url: got '/v1/chat'"),
        (line("x", "/tokenize", prompt="x"), "x", "line 2: url: "),
        (line("x", "http://127.0.0.1/v1/completions"), "x", "line 2: url: "),
        (line("x").replace(b"POST", b"GET"), "x", "line 2: method: "),
        (line("x").replace(b'"body"', b'"bodies"'), "x", "line 2: bodies: an unknown field; did you mean body?"),
        (line("x", messages=[], stream=True), "x", "line 2: body.stream: "),
        (line("x", messages=[]), "x", "line 2: messages: it is empty"),
        (line("x", messages=[], model="other"), "x", "line 2: model: got 'other'"),
        (b'{"custom_id": "' + b"x" * 5000 + b'"}', None, "line 2: body: the line has more than 4000 bytes"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_line_is_told_by_its_number_and_the_others_go_on(make_rig, bad, custom_id, message):
    rig = make_rig(settings={"body_bytes_max": 200_000 if bad.startswith(b"[[") else 4000})
    answers, counts = answered(rig, line("a"), bad, b"  ", line("b"))
    assert [one["custom_id"] for one in answers] == ["a", custom_id, "b"]
    assert [one["response"]["status_code"] < 400 for one in answers] == [True, False, True]
    assert answers[1]["error"]["message"].startswith(message)
    assert answers[1]["response"]["body"]["error"]["message"]
    assert (counts.n_lines, counts.n_failed) == (3, 1)


def test_a_line_that_finds_the_server_full_waits(make_rig):
    rig = make_rig(settings={"n_open_max": 1})
    answers, counts = answered(rig, *(line(str(i)) for i in range(6)))
    assert counts.n_failed == 0
    assert len(answers) == 6


def test_as_many_lines_run_at_once_as_are_let_and_no_more(rig):
    seen = []

    class Counting:
        service = rig.service

        async def __call__(self, scope, receive, send):
            seen.append(self.n_open + 1)
            self.n_open += 1
            await rig.app(scope, receive, send)
            self.n_open -= 1

        n_open = 0

    asyncio.run(answer_batch(Counting(), enumerate(map(line, "abcdefghi"), 1), lambda _: None, n_at_once=3))
    assert len(seen) == 9
    assert max(seen) == 3


def test_a_slow_line_does_not_hold_up_more_than_a_window(rig):
    """Answers that wait for an earlier one's are bounded."""
    taken = []

    def lines():
        for i in range(100):
            taken.append(i)
            yield i + 1, line(str(i))

    async def run():
        await answer_batch(rig.app, lines(), lambda _: most.append(len(taken)), n_at_once=1)

    most = []
    asyncio.run(run())
    assert all(n_taken - n_written <= 8 for n_written, n_taken in enumerate(most))


def test_what_cannot_be_written_ends_the_run_and_frees_all(rig):
    def fails(_):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        asyncio.run(answer_batch(rig.app, enumerate(map(line, "abcdef"), 1), fails, n_at_once=4))
    rig.assert_idle()


def test_a_byte_order_mark_and_line_ends_are_no_part_of_a_line():
    file = io.BytesIO(b"\xef\xbb\xbfa\r\n\r\n\nb\nc" + b"x" * 9 + b"\nd")
    assert list(read_lines(file, 8)) == [(1, b"a\r\n"), (4, b"b\n"), (5, None), (6, b"d")]


@pytest.fixture
def command(make_rig, monkeypatch, tmp_path):
    """`run-batch` over an engine without a model, in an empty folder."""
    rigs = []

    def build(config):
        rigs.append(make_rig(settings={"served_names": config.settings.served_names}))
        return rigs[-1].facade

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_batch, "build_facade", build)
    monkeypatch.setattr(run_batch, "find_model", lambda *_, **__: ResolvedModel(Path("tiny.gguf"), "tiny", "path"))
    return lambda *words: main(["run-batch", *words])


def test_the_command_answers_a_file(command, capsys):
    Path("in.jsonl").write_bytes(b"\n".join([line("a"), line("b")]))
    assert command("-i", "in.jsonl", "-o", "out.jsonl", "--model", "tiny", "--max-num-seqs", "4") == 0
    answers = [json.loads(one) for one in Path("out.jsonl").read_text().splitlines()]
    assert [one["custom_id"] for one in answers] == ["a", "b"]
    assert answers[0]["response"]["body"]["model"] == "tiny"
    assert "2 lines; the answers are in out.jsonl" in capsys.readouterr().err
    assert not Path("out.jsonl.partial").exists()


def test_the_command_fails_when_a_line_did_and_still_writes_all(command, capsys):
    Path("in.jsonl").write_bytes(b"\n".join([line("a"), b"{", line("b")]))
    assert command("-i", "in.jsonl", "-o", "out.jsonl") == 1
    assert len(Path("out.jsonl").read_text().splitlines()) == 3
    assert "3 lines, 1 of them refused or failed" in capsys.readouterr().err


def test_an_empty_file_has_an_empty_answer(command):
    Path("in.jsonl").touch()
    assert command("-i", "in.jsonl", "-o", "out.jsonl") == 0
    assert Path("out.jsonl").read_text() == ""


def test_an_interrupted_run_leaves_the_old_output_and_says_where_the_new_one_is(command, monkeypatch, capsys):
    Path("in.jsonl").write_bytes(line("a"))
    Path("out.jsonl").write_text("old")

    async def interrupted(engine, settings, requests, answers, bar):
        answers.write(b"{}\n")
        raise KeyboardInterrupt

    monkeypatch.setattr(run_batch, "_run", interrupted)
    assert command("-i", "in.jsonl", "-o", "out.jsonl") == 130
    assert Path("out.jsonl").read_text() == "old"
    assert Path("out.jsonl.partial").read_text() == "{}\n"
    assert "out.jsonl.partial" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("-i", "http://x/in.jsonl", "-o", "out.jsonl"), 2, "need a file of this machine"),
        (("-i", "in.jsonl", "-o", "s3://x/out.jsonl"), 2, "need a file of this machine"),
        (("-i", ".", "-o", "out.jsonl"), 2, "a folder"),
        (("-i", "missing.jsonl", "-o", "out.jsonl"), 1, "missing.jsonl"),
        (("-i", "in.jsonl", "-o", "missing/out.jsonl"), 1, "out.jsonl"),
        (("-i", "in.jsonl"), 2, "-o"),
        (("-i", "in.jsonl", "-o", "out.jsonl", "--port", "1"), 2, "nothing is listened on"),
        (("-i", "in.jsonl", "-o", "out.jsonl", "--max-num-seqs", "many"), 2, "--max-num-seqs"),
    ],
)
def test_what_cannot_be_done_is_told_before_a_model_is_loaded(command, monkeypatch, capsys, words, code, message):
    Path("in.jsonl").touch()
    monkeypatch.setattr(run_batch, "build_facade", None)
    assert command(*words) == code
    assert message in capsys.readouterr().err
    assert not Path("out.jsonl").exists()
