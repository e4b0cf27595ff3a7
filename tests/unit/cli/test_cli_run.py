import io
import os
import signal
import sys

import pytest
from fake_engine import FakeEngine

from tiercel.base.errors import ConfigError, ModelNotFound
from tiercel.cli import run
from tiercel.cli.answer import Answer, show_answer, show_stats
from tiercel.cli.main import main
from tiercel.cli.run_request import RunRequest, read_request


def request(*words, model=None, piped="", terminal=None):
    stdin = terminal("") if terminal else io.StringIO(piped)
    return read_request(words, model, stdin, io.StringIO())


@pytest.mark.parametrize(
    ("words", "model", "expected"),
    [
        (["Why?"], None, RunRequest(None, "Why?")),
        (["smollm2-135m", "Why?"], None, RunRequest("smollm2-135m", "Why?")),
        (["org/name", "Why?"], None, RunRequest("org/name", "Why?")),
        (["Why?"], "anything", RunRequest("anything", "Why?")),
        (["org/name"], "other", RunRequest("other", "org/name")),
    ],
)
def test_words_are_told_apart(home, words, model, expected):
    assert request(*words, model=model) == expected


@pytest.mark.parametrize("word", ["smollm2-135m", "org/name", "."])
def test_one_word_that_names_a_model_is_the_model(home, terminal, word):
    assert request(word, terminal=terminal) == RunRequest(word, None, is_guess=True)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("smolm2-135m", "did you mean smollm2-135m?"),
        ("SmolLM2-135M", "did you mean smollm2-135m?"),
        ("smollm2", "did you mean smollm2-135m?"),
        ("gemma3-270", "did you mean gemma3-270m?"),
        ("./no/model", "no such file or folder"),
        ("/no/model", "no such file or folder"),
        ("~/no.model", "no such file or folder"),
        ("model.gguf", "no such file or folder"),
        ("model.Q4_0.GGUF", "no such file or folder"),
    ],
)
def test_a_word_that_looks_like_a_model_and_names_none_is_no_prompt(home, word, meant):
    with pytest.raises(ConfigError) as caught:
        request(word)
    assert meant in str(caught.value)
    assert f"tiercel run -m MODEL '{word}'" in str(caught.value)
    assert request(word, model="tiny").prompt == word
    with pytest.raises(ConfigError) as caught:
        request(word, "Why?")
    assert meant in str(caught.value)


@pytest.mark.parametrize(
    "word", ["Why?", "Hello", "small", "gemma", "Summarise:", "a/b/c", "./a b", "a.gguf is what?", "x"]
)
def test_a_word_that_does_not_look_like_a_model_is_a_prompt(home, word):
    assert request(word) == RunRequest(None, word)


def test_no_words_on_a_terminal_is_a_chat(home, terminal):
    assert request(terminal=terminal) == RunRequest(None, None)


def test_piped_text_is_the_prompt_without_its_last_line_end(home):
    assert request(piped="Why?\n").prompt == "Why?"
    assert request("smollm2-135m", piped=" a\n\nb\n").prompt == " a\n\nb"


def test_piped_text_follows_the_written_prompt_after_an_empty_line(home):
    assert request("Summarise:", piped="a text\n").prompt == "Summarise:\n\na text"
    assert request("Summarise:", piped="").prompt == "Summarise:"


def test_a_device_that_holds_nothing_is_not_waited_for(home):
    with open(os.devnull) as nothing:  # noqa: PTH123  # a text stream over a character device
        assert read_request(["Why?"], None, nothing, io.StringIO()).prompt == "Why?"


def test_without_standard_input_the_written_prompt_serves(home):
    assert read_request(["Why?"], None, None, io.StringIO()).prompt == "Why?"
    with pytest.raises(ConfigError, match="no prompt"):
        read_request([], None, None, io.StringIO())


def test_an_open_pipe_on_which_nothing_comes_is_told(home, monkeypatch):
    from tiercel.cli import run_request

    reader, writer = os.pipe()
    notices = io.StringIO()

    def silent(*_):
        os.close(writer)
        return [], [], []

    monkeypatch.setattr(run_request.select, "select", silent)
    with open(reader) as stdin:  # noqa: PTH123
        assert read_request(["Why?"], None, stdin, notices).prompt == "Why?"
    assert "reading the prompt from standard input" in notices.getvalue()


@pytest.mark.parametrize(
    ("words", "model", "message"),
    [
        (["Why", "is"], None, "quotes"),
        (["a", "b", "c"], None, "got 3 words"),
        (["a", "b"], "org/name", "got 2 words"),
        ([], None, "no prompt"),
        (["and/or"], None, "'and/or' was taken as the model"),
    ],
)
def test_what_cannot_be_told_apart_is_refused(home, words, model, message):
    with pytest.raises(ConfigError, match=message):
        request(*words, model=model)


def test_piped_bytes_that_are_no_text_are_refused(home):
    stdin = io.TextIOWrapper(io.BytesIO(b"abc\xff"), encoding="utf-8")
    with pytest.raises(ConfigError, match="byte 3"):
        read_request([], None, stdin, io.StringIO())


def test_more_text_than_a_model_reads_is_refused(home, monkeypatch):
    from tiercel.cli import run_request

    monkeypatch.setattr(run_request, "_MOST_PIPED_CHARS", 10)
    assert request(piped="x" * 10).prompt == "x" * 10
    with pytest.raises(ConfigError, match="piped in"):
        request(piped="x" * 11)


def test_the_answer_is_all_that_standard_output_gets(engines, capsys):
    assert main(["run", "hello"]) == 0
    said = capsys.readouterr()
    assert said.out == "You said: hello\n"
    assert said.err == ""
    assert engines.only.asked == [[{"role": "user", "content": "hello"}]]
    assert engines.only.is_closed


def test_the_flags_reach_the_engine_and_the_sampler(engines):
    assert (
        main(["run", "--threads", "2", "hello", "-q", "q8_0", "--temperature=0.2", "--top_k", "40", "--seed", "7"]) == 0
    )
    assert engines.only.options == {"threads": 2, "quantization": "q8_0"}
    params = engines.only.params[0]
    assert (params.temperature, params.top_k, params.seed, params.max_tokens) == (0.2, 40, 7, None)


def test_a_system_message_comes_first(engines):
    main(["run", "hello", "--system", "Be brief."])
    assert [message["role"] for message in engines.only.asked[0]] == ["system", "user"]


@pytest.mark.parametrize("has_template", [True, False])
def test_raw_or_no_template_continues_the_text_as_it_stands(engines, has_template):
    engines.settings["has_chat_template"] = has_template
    assert main(["run", "hello", *(["--raw"] if has_template else [])]) == 0
    assert engines.only.asked == ["hello"]


def test_a_system_message_that_has_no_place_is_refused(engines, capsys):
    assert main(["run", "hello", "--raw", "--system", "x"]) == 2
    assert engines.opened == []
    engines.settings["has_chat_template"] = False
    assert main(["run", "hello", "--system", "x"]) == 2
    assert engines.only.is_closed
    assert "no chat template" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags", [["--temperature", "-1"], ["--top-p", "2"], ["--max-tokens", "0"], ["--dtype", "int3"], ["--threads", "0"]]
)
def test_a_value_out_of_range_is_told_before_a_model_is_loaded(engines, capsys, flags):
    assert main(["run", "hello", *flags]) == 2
    assert engines.opened == []
    assert "got" in capsys.readouterr().err


def test_stats_go_to_standard_error(engines, capsys):
    main(["run", "hello", "--stats"])
    said = capsys.readouterr()
    assert said.out == "You said: hello\n"
    assert "first text after" in said.err
    assert "generated_tokens: 7" in said.err
    assert "rate_tok_s: 12.35" in said.err


def test_a_failed_request_closes_the_engine(engines, capsys):
    assert main(["run", "long"]) == 1
    assert engines.only.is_closed
    assert capsys.readouterr().err.startswith("tiercel: prompt: got 99 tokens")


def test_a_guess_that_is_no_model_is_told_how_to_be_a_prompt(home, monkeypatch, terminal, capsys):
    def resolve(name, **_):
        raise ModelNotFound(f"no {name}")

    monkeypatch.setattr(run, "resolve", resolve)
    monkeypatch.setattr(sys, "stdin", terminal(""))
    assert main(["run", "and/or"]) == 1
    assert "if 'and/or' is a prompt: tiercel run -m MODEL 'and/or'" in capsys.readouterr().err


class PressAfter(io.StringIO):
    """An output during whose n-th write Ctrl-C is pressed."""

    def __init__(self, n, *, twice=False):
        super().__init__()
        self.left = n
        self.twice = twice

    def write(self, text):
        self.left -= 1
        if self.left == 0:
            for _ in range(2 if self.twice else 1):
                os.kill(os.getpid(), signal.SIGINT)
        return super().write(text)


@pytest.mark.parametrize("twice", [False, True])
def test_ctrl_c_stops_an_answer_and_aborts_its_request(twice):
    engine, out = FakeEngine(), PressAfter(3, twice=twice)
    before = signal.getsignal(signal.SIGINT)
    answer = show_answer(engine.stream("endless", None), out)
    assert answer.is_stopped
    assert out.getvalue() == answer.text + "\n"
    assert answer.text.count("on and ") == (2 if twice else 3)
    assert engine.n_aborted == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_a_stopped_run_ends_with_130(engines, monkeypatch):
    monkeypatch.setattr(sys, "stdout", PressAfter(3))
    assert main(["run", "endless"]) == 130
    assert engines.only.is_closed


def test_controls_in_an_answer_do_not_reach_a_terminal(terminal):
    attack = "a\x1b]0;title\x07\x9b2J\rb\tc\n"

    def stream():
        yield attack

    shown, piped = terminal(), io.StringIO()
    show_answer(stream(), shown)
    show_answer(stream(), piped)
    assert shown.getvalue() == "a\ufffd]0;title\ufffd\ufffd2J\ufffdb\tc\n"
    assert piped.getvalue() == attack


def test_an_answer_without_text_is_an_empty_line():
    out = io.StringIO()
    answer = show_answer((piece for piece in ()), out)
    assert (answer.text, answer.first_s, out.getvalue()) == ("", None, "\n")


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        (
            {"n_drafts": 4, "n_draft_tokens": 12, "n_accepted_tokens": 5, "n_accepted_by_position": [3, 2, 0]},
            ["5 of 12 drafted tokens accepted in 4 steps", "2.25 tokens a draft", "by position 0.75 0.50;", "0.25 s"],
        ),
        (
            {
                "n_drafts": 0,
                "n_accepted_by_position": [0, 0],
                "n_failures": 2,
                "n_switched_off": 3,
                "n_passed_over": 7,
                "is_drafting": False,
            },
            ["nothing was drafted", "it stopped 3 times", "7 drafts were not worth a row", "2 drafters failed"],
        ),
    ],
)
def test_stats_say_in_a_line_what_speculation_brought(counts, words):
    class Engine:
        def stats(self):
            return {"n_running": 0, "n_verify_steps": 4, "drafter_s": 0.25, "verify_s": 0.5, **counts}

    out = io.StringIO()
    show_stats(Engine(), Answer("a", False, 0.1, 0.2), out)
    lines = out.getvalue().splitlines()
    assert lines[1] == "n_running: 0"
    assert len(lines) == 3
    assert all(word in lines[2] for word in words)
