"""`LLM.chat` put a message without a role, or with a number for content, into the prompt as nothing or as it prints."""

import pytest

from tiercel import LLM, SamplingParams
from tiercel.base.errors import RequestError
from tiercel.testing.tiny_model import write_tiny_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=1)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    with LLM(str(folder), threads=1, max_num_seqs=2) as llm:
        yield llm


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([{}], r"messages\[0\].role: got nothing"),
        ([{"role": "user", "content": "a"}, {"content": "b"}], r"messages\[1\].role: got nothing"),
        ([{"role": 5, "content": "a"}], r"messages\[0\].role: got int"),
        ([{"role": "", "content": "a"}], r"messages\[0\].role: got an empty text"),
        ([{"role": "user"}], r"messages\[0\].content: got nothing"),
        ([{"role": "user", "content": None}], r"messages\[0\].content: got nothing"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content: got int"),
        ([{"role": "user", "content": {"a": 1}}], r"messages\[0\].content: got dict"),
        ([{"role": "user", "content": "a"}, "b"], r"messages\[1\]: got str"),
        ([[{"role": "user", "content": "a"}], {"role": "user", "content": "b"}], r"messages\[1\]: got dict"),
        ("hello", "messages: got str"),
        (None, "messages: got NoneType"),
        (5, "messages: got int"),
        ([5], r"messages\[0\]: got int"),
    ],
    ids=str,
)
def test_what_is_no_message_is_refused_by_its_place(llm, messages, where):
    with pytest.raises(RequestError, match=where):
        llm.chat(messages, GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        {"role": "critic", "content": "a"},
    ],
    ids=str,
)
def test_what_is_one_is_answered(llm, message):
    assert llm.chat([message], GREEDY, use_tqdm=False)[0].finished
