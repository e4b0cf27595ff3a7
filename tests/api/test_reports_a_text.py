"""Public reports about streamed text elsewhere, each tried here; `docs/reports.md` lists the rows.

Each answer is compared with its streams at 1, 2, 3 and all tokens a step.
"""

import pytest
from kit import byte_tokenizer
from responding import Responder, texts_of
from scripted import COMPLETE, STEPS, TOOLS, Scripted, both, both_texts, calls_of
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from tiercel.text.backend import Traits
from tiercel.text.tokenizer import Tokenizer

ELLIPSIS = "…".encode()


@pytest.mark.parametrize(
    ("script", "text"),
    [(ELLIPSIS[2:] + b" ok", "… ok"), (b"ok", "\ufffdok"), (ELLIPSIS, "\ufffd…"), (b"", "\ufffd")],
)
def test_v48853_a_prompt_that_ends_inside_a_character_is_no_part_of_the_answer(monkeypatch, script, text):
    prompt = list(b"Hello world " + ELLIPSIS[:2])
    choice, streams = both_texts(monkeypatch, Scripted(script), prompt=prompt)
    assert choice["text"] == text
    assert all("Hello" not in piece for pieces in streams for piece in pieces)


def test_v8627_text_is_what_the_tokenizer_makes_of_all_ids(monkeypatch):
    text = "你好，世界。今天天气很好！"
    choice, streams = both(monkeypatch, Scripted(text), return_token_ids=True)
    tokenizer = byte_tokenizer()
    assert choice["message"]["content"] == text == tokenizer.decode(choice["token_ids"])
    assert not any("\ufffd" in (delta.get("content") or "") for streamed in streams for delta in streamed.deltas)


# Broken beginnings, lone continuations, an overlong form, a surrogate, and ids that the tokenizer has no token for.
ODD_IDS = [*b"a\xe2(\xff\x80\xf0\x9f\xc0\x80\xed\xa0\x80", 263, 300, 319, *b"ok \xe4\xbd"]


def test_v17448_bytes_that_are_no_text_and_ids_that_are_no_token_end_nothing(monkeypatch):
    choice, _ = both_texts(monkeypatch, Scripted(ODD_IDS), return_token_ids=True)
    known = bytes(i for i in ODD_IDS if i < 256)
    assert choice["text"] == known.decode("utf-8", "replace")
    assert choice["token_ids"] == [*ODD_IDS, 256]


def test_v21951_a_decoder_of_words_takes_ids_that_are_no_token(monkeypatch):
    words = ["?", "▁he", "llo", "▁a", "b", "é"]
    backend = Backend(models.WordLevel(dict(zip(words, range(len(words)), strict=True)), unk_token="?"))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken("<s>", normalized=False, special=True)])
    tokenizer = Tokenizer(backend, Traits())
    assert tokenizer.byte_decoding is None
    script = [1, 2, 300, 3, 5, 6, 319, 263, 4, 3]
    choice, _ = both_texts(monkeypatch, Scripted(script, tokenizer=tokenizer), prompt=[1, 2])
    assert choice["text"] == " hello aéb a"


def test_mlxvlm1126_an_emoji_of_many_tokens_is_whole(monkeypatch):
    text = "👩\u200d👩\u200d👧\u200d👦 and 🏳️\u200d🌈!"
    choice, streams = both(monkeypatch, Scripted(text))
    assert choice["message"]["content"] == text
    assert not any("\ufffd" in (delta.get("content") or "") for streamed in streams for delta in streamed.deltas)


def test_v3574_nothing_of_a_stop_string_is_streamed(monkeypatch):
    model = Scripted("DEFGHIJKLMNOP")
    choice, streams = both_texts(monkeypatch, model, prompt="English alphabet: ABC", stop=["DEFGHIJ"], temperature=0)
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", "DEFGHIJ")
    assert all(piece == "" for pieces in streams for piece in pieces)


def test_v2577_a_long_stop_string_ends_a_stream_as_it_ends_the_whole(monkeypatch):
    text = "Thought: I look it up.\nAction: search\nObserve\nObservation: none\nThought:"
    choice, _ = both_texts(monkeypatch, Scripted(text), stop="\nObservation:")
    assert choice["text"] == "Thought: I look it up.\nAction: search\nObserve"
    chat, _ = both(monkeypatch, Scripted(text), stop="\nObservation:")
    assert (chat["message"]["content"], chat["stop_reason"]) == (choice["text"], "\nObservation:")


@pytest.mark.parametrize(
    ("stops", "text", "said", "reason"),
    [
        (["ab", "abc"], "xx abc", "xx ", "ab"),
        (["abc", "ab"], "xx abc", "xx ", "ab"),
        (["abcd", "bc"], "xx abcd", "xx a", "bc"),
        (["abx", "abc"], "ababa abx", "ababa ", "abx"),
        (["aab", "abc"], "aaaab", "aa", "aab"),
    ],
)
def test_s11446_the_stop_string_that_ends_first_wins(monkeypatch, stops, text, said, reason):
    choice, _ = both_texts(monkeypatch, Scripted(text), stop=stops)
    assert (choice["text"], choice["stop_reason"]) == (said, reason)


def test_s11446_only_the_beginning_of_a_stop_string_is_held_back(monkeypatch):
    streams = both_texts(monkeypatch, Scripted("caba xabd"), stop=["ab!", "abc"])[1]
    assert streams[0] == ["c", "ab", "a ", "x", "abd", ""]


def test_fastchat3467_a_line_end_that_only_began_a_stop_string_is_delivered(monkeypatch):
    for text in ("a\nb", "a\n", "\n[en", "a\n\n[end"):
        choice, streams = both_texts(monkeypatch, Scripted(text), stop=["\n[end]"])
        assert (choice["text"], choice["finish_reason"]) == (text, "stop")
        assert choice["stop_reason"] is None
        assert all("".join(pieces) == text for pieces in streams)


def test_smg2203_text_held_back_until_the_end_goes_through_the_parsers(monkeypatch):
    call = '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
    choice, streams = both(monkeypatch, Scripted(call), tools=TOOLS, stop=["</tool_call>!"])
    assert calls_of(choice["message"]["tool_calls"]) == [("get_time", {})]
    assert all((s.content, s.finish_reason) == ("", "tool_calls") for s in streams)
    choice, streams = both(monkeypatch, Scripted("<think>why</think>"), stop=["</think>!"])
    assert choice["message"]["reasoning"] == "why"
    assert all((s.content, s.reasoning) == ("", "why") for s in streams)


@pytest.mark.parametrize(
    ("text", "said", "reason"),
    [
        ("a" * 40, "a" * 20, "a"),
        ("banana " * 5, ("banana " * 5)[:22], "a"),
        ("a" * 20 + "bcd", "a" * 20 + "bcd", None),
    ],
)
def test_v22014_a_stop_string_is_not_looked_for_before_min_tokens(monkeypatch, text, said, reason):
    choice, _ = both_texts(monkeypatch, Scripted(text), min_tokens=20, stop=["a"])
    assert (choice["text"], choice["stop_reason"]) == (said, reason)


def test_v51556_stop_strings_are_honoured_on_every_route_that_has_them():
    model = Scripted("one STOP two")
    assert model.whole(path=COMPLETE, stop=["STOP"])["choices"][0]["text"] == "one "
    assert model.whole(stop="STOP")["choices"][0]["message"]["content"] == "one "
    message = model.whole(path="/v1/messages", stop_sequences=["STOP"])
    assert message["content"] == [{"type": "text", "text": "one "}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "STOP")
    response = Responder("one STOP two").whole(stop=["STOP"])
    assert texts_of(response) == [("message", "one ")]


@pytest.mark.parametrize("n_tokens", STEPS[:3])
def test_o9092_with_tools_a_story_comes_in_pieces(monkeypatch, n_tokens):
    text = "Once upon a time there was a {small} [fox] who said: a < b.\n"
    chunks = Scripted(text).stream(monkeypatch, n_tokens, tools=TOOLS)
    pieces = [c["choices"][0]["delta"].get("content") for c in chunks]
    pieces = [piece for piece in pieces if piece]
    assert "".join(pieces) == text
    assert len(pieces) > len(text) / n_tokens / 2
    assert max(map(len, pieces)) < 8
