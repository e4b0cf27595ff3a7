"""Parts of a JSON object as flags."""

import pytest

from tiercel.cli import serve
from tiercel.cli.parsing import CommandParser


@pytest.fixture
def kwargs():
    parser = CommandParser("tiercel serve", "a test")
    serve.configure(parser)
    return lambda *words: parser.parse(words).default_chat_template_kwargs


FLAG = "--default-chat-template-kwargs"


@pytest.mark.parametrize(
    ("words", "value"),
    [
        ([FLAG, '{"a": 1}'], {"a": 1}),
        ([f"{FLAG}.a", "1"], {"a": 1}),
        ([f"{FLAG}.a=true", f"{FLAG}.b_c", "x"], {"a": True, "b_c": "x"}),
        ([f"{FLAG}.a.b", "1", f"{FLAG}.a.c", "2"], {"a": {"b": 1, "c": 2}}),
        ([f"{FLAG}.a+", "x,2", f"{FLAG}.a+=y"], {"a": ["x", 2, "y"]}),
        ([f"{FLAG}.a", "2", FLAG, '{"a": 1, "b": 1}'], {"a": 2, "b": 1}),
        ([f"{FLAG}.a", "{"], {"a": "{"}),
        (["--default_chat_template_kwargs.a_b", "1"], {"a_b": 1}),
    ],
)
def test_parts_are_put_together(kwargs, words, value):
    assert kwargs("model", *words) == value


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([f"{FLAG}.a"], "got no value"),
        ([f"{FLAG}.a", "--port", "9000"], "got no value"),
        ([f"{FLAG}.", "1"], "got no key"),
        ([f"{FLAG}.a", "1", f"{FLAG}.a.b", "1"], "a has a value already"),
        ([f"{FLAG}.a.b", "1", f"{FLAG}.a", "1"], "a has parts already"),
        ([f"{FLAG}.a", "1", f"{FLAG}.a+", "1"], "no list"),
        ([FLAG, "[1]"], "need a JSON object"),
        ([FLAG, '{"a": 1, "a": 2}'], "is there twice"),
        ([FLAG, "{", f"{FLAG}.a", "1"], "is no JSON"),
        (["--port.a", "1"], "unknown flag --port.a"),
    ],
)
def test_parts_that_do_not_fit_are_refused(kwargs, capsys, words, message):
    with pytest.raises(SystemExit):
        kwargs("model", *words)
    assert message in capsys.readouterr().err
