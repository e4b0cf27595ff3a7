"""A template that a request brings along: refused unless the server trusts it, and then held like a model's."""

import pytest
from kit import byte_tokenizer
from scripted import CHAT, HI, LIMITS, TEMPLATE, TOOLS

SHOUT = "{% for m in messages %}{{ m.content | upper }}!{% endfor %}{{ extra }}"


@pytest.fixture
def trusting(make_rig):
    return make_rig(
        tokenizer=lambda: byte_tokenizer(TEMPLATE),
        limits=LIMITS,
        max_num_batched_tokens=1024,
        settings={"trusts_request_template": True},
    )


def prompt_of(rig, **fields):
    return rig.chat(return_prompt_text=True, **fields)["prompt_text"]


def test_it_is_refused_by_its_field_unless_it_is_trusted(rig):
    for field in ("chat_template", "chat_template_kwargs"):
        value = SHOUT if field == "chat_template" else {"chat_template": SHOUT}
        for path in (CHAT, f"{CHAT}/render", "/tokenize"):
            error = rig.refused(path, {"messages": HI, field: value})
            assert error["param"] == field
            assert "--trust-request-chat-template" in error["message"]


def test_it_writes_the_prompt_from_either_place(trusting):
    assert prompt_of(trusting, chat_template=SHOUT, chat_template_kwargs={"extra": "?"}) == "HI!?"
    assert prompt_of(trusting, chat_template_kwargs={"chat_template": SHOUT}) == "HI!"
    assert prompt_of(trusting).startswith("<|im_start|>")
    tokens = trusting.post("/tokenize", {"messages": HI, "chat_template": SHOUT})["tokens"]
    assert bytes(tokens_of(trusting, tokens)) == b"HI!"


def tokens_of(rig, token_ids):
    return b"".join(rig.tokenizer.token_bytes(i) for i in token_ids)


def test_tools_are_told_in_words_where_it_has_no_place_for_them(trusting):
    text = prompt_of(trusting, chat_template=SHOUT, tools=TOOLS)
    assert "GET_WEATHER" in text
    placed = "{% for t in tools %}{{ t.function.name }} {% endfor %}{{ messages[0].content }}"
    assert prompt_of(trusting, chat_template=placed, tools=TOOLS) == "get_weather get_time hi"


def test_the_last_few_are_kept_compiled(trusting):
    for k in range(20):
        assert prompt_of(trusting, chat_template=SHOUT + str(k)) == f"HI!{k}"
    kept = trusting.service._own_templates
    assert len(kept) == 8
    first = next(iter(kept))
    prompt_of(trusting, chat_template=first)
    assert list(kept)[-1] == first


@pytest.mark.parametrize(
    "source",
    [
        "",
        "{% if",
        "{{ ''.__class__.__mro__ }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{{ 'x' * 10 ** 9 }}",
        "{{ raise_exception('no') }}",
        "{% include 'x' %}",
        "{{ " + "(" * 3000 + ")" * 3000 + " }}",
        "x" * (64 * 1024 + 1),
    ],
    ids=lambda text: text[:20],
)
def test_a_bad_one_is_the_requests_fault(trusting, source):
    error = trusting.refused(CHAT, {"messages": HI, "chat_template": source})
    assert error["param"] in ("chat_template", "messages")
    assert trusting.chat()["choices"]


def test_a_completion_has_none(trusting):
    assert trusting.refused("/v1/completions", {"prompt": "x", "chat_template": SHOUT})["param"] == "chat_template"
