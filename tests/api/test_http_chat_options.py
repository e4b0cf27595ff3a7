"""What the server's options say about chats: its template, and the template's variables."""

import pytest
from kit import byte_tokenizer
from scripted import MARKS, Scripted

from tiercel.api.http.settings import ServerSettings
from tiercel.base.errors import ConfigError
from tiercel.base.options import parse_template

OTHER = "{{ messages[0]['content'] }} {{ color }} {{ enable_thinking }}"


def prompt_of(rig, **fields):
    return rig.chat(return_prompt_text=True, **fields)["prompt_text"]


def test_a_template_that_is_given_writes_every_prompt(make_rig):
    rig = make_rig(settings={"chat_template": OTHER + "{{ tools | length if tools else '' }}"})
    assert prompt_of(rig) == "hi  "
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    assert prompt_of(rig, tools=[tool], tool_choice="none").startswith("hi ")
    assert rig.post("/tokenize", {"messages": [{"role": "user", "content": "hey"}]})["count"] == len("hey  ")


def test_a_template_that_is_given_serves_a_model_without_one(make_rig):
    rig = make_rig(tokenizer=lambda: byte_tokenizer(None), settings={"chat_template": OTHER})
    assert prompt_of(rig) == "hi  "


def test_a_template_that_is_given_and_broken_ends_the_start(make_rig):
    with pytest.raises(ConfigError, match="chat_template"):
        make_rig(settings={"chat_template": "{% if %}"})


def test_a_template_is_a_file_or_the_text_itself(tmp_path):
    file = tmp_path / "chat.jinja"
    file.write_text("from a file {{ x }}")
    assert parse_template(str(file)) == "from a file {{ x }}"
    assert parse_template("{{ x }}") == "{{ x }}"
    for wrong in (str(tmp_path / "none.jinja"), str(tmp_path)):
        with pytest.raises(ConfigError, match="need a file with a chat template"):
            parse_template(wrong)


def test_variables_of_the_server_count_where_a_request_says_nothing(make_rig):
    defaults = {"color": "red", "enable_thinking": False}
    rig = make_rig(tokenizer=lambda: byte_tokenizer(OTHER), settings={"default_chat_template_kwargs": defaults})
    assert prompt_of(rig) == "hi red False"
    assert prompt_of(rig, chat_template_kwargs={"color": "blue"}) == "hi blue False"
    assert prompt_of(rig, reasoning_effort="high") == "hi red True"
    assert prompt_of(rig, reasoning_effort="high", chat_template_kwargs={"enable_thinking": False}) == "hi red False"


def test_thinking_that_the_server_switches_off_is_not_looked_for():
    off = {"default_chat_template_kwargs": {"enable_thinking": False}}
    one = Scripted("so", special=MARKS, settings={"reasoning_parser": "qwen3"} | off)
    assert one.whole()["choices"][0]["message"]["content"] == "so"
    one = Scripted("why</think>so", special=MARKS, settings={"reasoning_parser": "qwen3"} | off)
    assert one.whole(reasoning_effort="low")["choices"][0]["message"]["reasoning"] == "why"


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_a_variable_of_the_server_that_is_a_field_of_a_request_is_refused(name):
    with pytest.raises(ConfigError, match="default_chat_template_kwargs"):
        ServerSettings(served_names=("a",), default_chat_template_kwargs={name: 1})
