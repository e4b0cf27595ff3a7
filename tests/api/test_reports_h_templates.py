"""Public reports about chat templates elsewhere, each tried here; `docs/reports.md` lists the rows."""

import pytest
from kit import byte_tokenizer
from scripted import CHAT, HI, Scripted

CALL = {"type": "function", "id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}
BOS = "<|im_start|>"  # of the tests' tokenizer
BOS_ID = 257


def prompt_of(template, messages=HI, **ask):
    """Give the text and the ids of a chat's prompt."""
    model = Scripted("ok", template=template, settings={"tool_call_parser": "none"})
    answer = model.whole(messages=messages, return_prompt_text=True, return_token_ids=True, **ask)
    return answer["prompt_text"], answer["prompt_token_ids"]


def test_l13178_content_that_is_null_is_no_fault():
    messages = [*HI, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "2"}]
    text, _ = prompt_of(
        "{% for m in messages %}[{{ m.content.strip() }}{{ m.tool_calls | length }}]{% endfor %}{{ tools }}", messages
    )
    assert text.startswith("[hi0][1][20]")


def test_l13178_a_template_that_refuses_null_content_is_told_to_the_client():
    template = "{% for m in messages if not m.content %}{{ raise_exception('content!') }}{% endfor %}{{ tools }}"
    messages = [*HI, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    error = Scripted("ok", template=template).refused(400, messages=messages)
    assert error["param"] == "messages"
    assert "content!" in error["message"]


def test_jan6123_a_template_may_use_the_methods_of_texts():
    template = (
        "{% for m in messages %}{{ m.content.split('</think>')[-1].lstrip('\\n').rstrip() }}"
        "{{ m.content.startswith('<think>') }}{{ m.role.title() }}{% endfor %}{{ strftime_now('%Y') | length }}"
    )
    messages = [{"role": "user", "content": "<think>a</think>\nb  "}]
    assert prompt_of(template, messages)[0] == "bTrueUser4"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a b  c'.split() | join('|') }}", "a|b|c"),
        ("{{ 'a-b-c'.split('-', 1)[1] }}", "b-c"),
        ("{{ 'aXbX'.rstrip('X').lower() }}", "axb"),
        ("{{ 'ab'.endswith('b') and not 'ab'.endswith('a') }}", "True"),
        ("{{ {'a': 1}.items() | list | length }}", "1"),
        ("{{ ' x '.strip() ~ 'a,b'.replace(',', ';') }}", "xa;b"),
        ("{{ 'abc'[::-1] ~ 'abc'[:1] }}", "cbaa"),
        ("{{ (messages | selectattr('role', 'equalto', 'user') | list)[0].content }}", "hi"),
        ("{{ [1, 2] | tojson }}{{ 'é' | tojson }}", '[1, 2]"é"'),
        ("{{ namespace(a=1).a is number }}{{ 'a' is string }}{{ [] is iterable }}", "TrueTrueTrue"),
    ],
)
def test_gpustack3641_what_templates_of_models_use_is_there(source, text):
    assert prompt_of(source)[0] == text


def test_lmstudio1586_messages_without_a_users_are_a_refusal_and_no_fault():
    template = (
        "{% set found = messages | selectattr('role', 'equalto', 'user') | list %}"
        "{% if not found %}{{ raise_exception('No user query found in messages.') }}{% endif %}{{ messages }}"
    )
    error = Scripted("ok", template=template).refused(400, messages=[{"role": "system", "content": "Be brief."}])
    assert error["param"] == "messages"
    assert "No user query found" in error["message"]


def frames(make_rig, template):
    """Serve a tokenizer that puts a BOS before every text, behind a template."""
    tokenizer = byte_tokenizer(template, add_bos=True)
    assert tokenizer.encode("a") == [BOS_ID, ord("a")]
    return make_rig(tokenizer=lambda: tokenizer)


@pytest.mark.parametrize("adds", [None, False, True])
def test_p1501_a_template_that_writes_the_first_token_gets_no_second(make_rig, adds):
    rig = frames(make_rig, "{{ bos_token }}{{ messages[0].content }}")
    ids = rig.chat(add_special_tokens=adds, return_token_ids=True)["prompt_token_ids"]
    assert ids == [BOS_ID, *b"hi"]
    counted = rig.post("/tokenize", {"messages": HI, "add_special_tokens": adds})
    assert counted["tokens"] == ids


def test_p1501_a_template_without_the_first_token_gets_it_when_asked(make_rig):
    rig = frames(make_rig, "{{ messages[0].content }}")
    assert rig.chat(return_token_ids=True)["prompt_token_ids"] == [*b"hi"]
    assert rig.chat(return_token_ids=True, add_special_tokens=True)["prompt_token_ids"] == [BOS_ID, *b"hi"]


def test_l15086_tokens_that_a_template_writes_on_purpose_are_kept(make_rig):
    rig = frames(make_rig, "[gMASK]<sop>{{ bos_token }}{{ bos_token }}{{ messages[0].content }}")
    ids = rig.chat(return_token_ids=True)["prompt_token_ids"]
    assert ids == [*b"[gMASK]<sop>", BOS_ID, BOS_ID, *b"hi"]


def test_l15086_a_prompt_that_is_text_gets_the_token_its_vocabulary_asks_for(make_rig):
    rig = frames(make_rig, "x")
    assert rig.complete(prompt="hi", return_token_ids=True)["choices"][0]["prompt_token_ids"] == [BOS_ID, *b"hi"]
    ask = {"prompt": "hi", "add_special_tokens": False, "return_token_ids": True}
    assert rig.complete(**ask)["choices"][0]["prompt_token_ids"] == [*b"hi"]


def test_no_fault_of_a_template_is_a_fault_of_the_server(make_rig):
    """What a template does with odd histories is told as the request's error, whatever it raises."""
    rig = make_rig(tokenizer=lambda: byte_tokenizer("{{ messages[9].content + 1 }}"))
    assert rig.refused(CHAT, {"messages": HI})["param"] == "messages"
