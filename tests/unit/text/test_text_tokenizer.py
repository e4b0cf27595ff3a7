"""Tokenizers from GGUF metadata and folders."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_vocabularies import byte_level, spm

from tiercel.base.errors import ModelFileError, RequestError, UnsupportedModel
from tiercel.text.bad_words import bad_words_ids
from tiercel.text.pre_tokenizers import SPLITS, split_named
from tiercel.text.tokenizer import Tokenizer

TEXTS = [
    "",
    "the thing hello",
    " leading and trailing ",
    "def f(x):\n\t\treturn x**2  # 12345\n\n\n",
    "你好，世界。こんにちは 한국어",
    "😀👩‍👩‍👧 é e\u0301 \u200b",
    "It's we'RE 'll",
    "\r\n \x00\x7f",
]


@pytest.mark.parametrize("pre", [name for name in SPLITS if not split_named(name).is_composed])
def test_byte_level_round_trip_keeps_every_text(pre):
    tokenizer = Tokenizer.from_gguf(byte_level(pre))
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize("has_prefix", [True, False])
def test_spm_round_trip_keeps_every_text(has_prefix):
    tokenizer = Tokenizer.from_gguf(spm(add_space_prefix=has_prefix))
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text(max_size=40))
@settings(max_examples=100, deadline=None)
def test_round_trip_keeps_any_text_that_spells_no_special_token(text):
    for tokenizer in _TOKENIZERS:
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


_TOKENIZERS = [Tokenizer.from_gguf(byte_level("smollm")), Tokenizer.from_gguf(spm()), Tokenizer.from_gguf(byte_level())]


def _words(pre: str, text: str) -> list[str]:
    pieces = split_named(pre).pre_tokenizer().pre_tokenize_str(text)
    return [text[a:b] for _, (a, b) in pieces]


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "It's 1234  ok!!\n\n x", ["It", "'s", " 1234", " ", " ok", "!!", "\n\n", " x"]),
        ("smollm", "a 12b's", ["a", " ", "1", "2", "b", "'s"]),
        ("llama-bpe", "It'S 12345  ok!!\n\n x\n", ["It", "'S", " ", "123", "45", " ", " ok", "!!\n\n", " x", "\n"]),
        ("qwen2", "a 123\u0301", ["a", " ", "1", "2", "3", "\u0301"]),
        ("qwen35", "a\u0301b 12", ["a\u0301b", " ", "1", "2"]),
        ("tekken", "HelloWorld ABc's 12/\n", ["Hello", "World", " ABc", "'s", " ", "1", "2", "/\n"]),
        ("gpt-4o", "HelloWorld's 1234", ["Hello", "World's", " ", "123", "4"]),
    ],
)
def test_each_family_splits_in_its_own_way(pre, text, words):
    assert _words(pre, text) == words


def test_an_unknown_split_is_refused_by_name():
    with pytest.raises(UnsupportedModel, match=r"'poro-chat'.*llama-bpe"):
        Tokenizer.from_gguf(byte_level("poro-chat"))


def test_qwen2_composes_unicode():
    tokenizer = Tokenizer.from_gguf(byte_level("qwen2"))
    assert tokenizer.encode("e\u0301", add_special_tokens=False) == tokenizer.encode("é", add_special_tokens=False)


def test_control_and_user_defined_tokens_are_one_id_and_only_control_is_skipped():
    tokenizer = Tokenizer.from_gguf(byte_level())
    ids = tokenizer.encode("<|im_start|>a<think>b<|im_end|>", add_special_tokens=False)
    assert [tokenizer.token_text(i) for i in ids] == ["<|im_start|>", "a", "<think>", "b", "<|im_end|>"]
    assert tokenizer.decode(ids) == "a<think>b"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>a<think>b<|im_end|>"
    assert tokenizer.special_ids == {tokenizer.id_of(t) for t in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")}


def test_an_added_token_keeps_its_text_though_its_letters_are_in_the_byte_alphabet():
    tokenizer = Tokenizer.from_gguf(byte_level())
    assert tokenizer.token_bytes(tokenizer.id_of("é<x>")) == "é<x>".encode()


def test_bytes_of_tokens_are_the_true_ones():
    tokenizer = Tokenizer.from_gguf(byte_level())
    assert [tokenizer.token_bytes(i) for i in range(256)] == [bytes([b]) for b in range(256)]
    other = Tokenizer.from_gguf(spm())
    assert [other.token_bytes(3 + b) for b in range(256)] == [bytes([b]) for b in range(256)]
    assert other.token_bytes(other.id_of("▁hello")) == b" hello"
    assert other.token_bytes(other.id_of("</s>")) == b"</s>"


@pytest.mark.parametrize("token_id", [-1, -(2**40), 10**6, 2**31, 2**32, 2**64])
def test_ids_outside_the_vocabulary_have_no_text(token_id):
    for tokenizer in _TOKENIZERS:
        known = tokenizer.encode("he", add_special_tokens=False)
        assert tokenizer.token_bytes(token_id) == b""
        assert tokenizer.decode([*known, token_id, *known]) == tokenizer.decode([*known, *known])


def test_partial_characters_are_replaced_one_for_each_broken_run():
    tokenizer = Tokenizer.from_gguf(byte_level())
    assert tokenizer.decode([0xF0, 0x9F, ord("a"), 0xFF, ord("b")]) == "\ufffda\ufffdb"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, False),
        ({"pre": "llama-bpe"}, True),
        ({"pre": "llama-bpe", "add_bos_token": False}, False),
        ({"add_bos_token": True}, True),
    ],
)
def test_bos_is_added_when_the_file_or_its_family_says_so(changes, expected):
    tokenizer = Tokenizer.from_gguf(byte_level(**{"pre": "gpt-2", **changes}))
    assert tokenizer.add_bos is expected
    assert (tokenizer.encode("a")[0] == tokenizer.bos_id) is expected
    assert tokenizer.encode("a", add_special_tokens=False) == [ord("a")]


def test_eos_is_added_when_the_file_says_so():
    tokenizer = Tokenizer.from_gguf(byte_level(add_eos_token=True, add_bos_token=True))
    assert tokenizer.encode("a") == [tokenizer.bos_id, ord("a"), tokenizer.eos_ids[0]]
    assert tokenizer.encode_many(["a", ""]) == [tokenizer.encode("a"), tokenizer.encode("")]


def test_the_tokens_that_end_a_turn_are_end_tokens():
    metadata = byte_level()
    end = metadata["tokenizer.ggml.tokens"].index("<|im_end|>")
    eos = metadata["tokenizer.ggml.eos_token_id"]
    assert Tokenizer.from_gguf(metadata).eos_ids == (eos,)
    assert Tokenizer.from_gguf(byte_level(eot_token_id=end)).eos_ids == (eos, end)
    assert Tokenizer.from_gguf(byte_level(chat_template="{{ '<|im_end|>' }}")).eos_ids == (eos, end)


def test_an_unsigned_minus_one_is_no_token():
    assert Tokenizer.from_gguf(byte_level(padding_token_id=2**32 - 1)).pad_id is None


def test_marked_spaces_in_user_defined_tokens_match_plain_ones():
    tokenizer = Tokenizer.from_gguf(spm(add_space_prefix=False))
    assert [tokenizer.token_text(i) for i in tokenizer.encode("a   b", add_special_tokens=False)] == ["a", "   ", "b"]


def test_a_space_is_put_before_text_only_when_the_vocabulary_wants_it():
    assert Tokenizer.from_gguf(spm()).encode("hello") == Tokenizer.from_gguf(spm(add_space_prefix=False)).encode(
        " hello"
    )


def test_text_behind_a_control_token_begins_with_a_space_too():
    tokenizer = Tokenizer.from_gguf(spm())
    ids = tokenizer.encode("<end_of_turn>hello", add_special_tokens=False)
    assert ids == [tokenizer.id_of("<end_of_turn>"), tokenizer.id_of("▁hello")]


N = len(byte_level()["tokenizer.ggml.tokens"])
M = len(spm()["tokenizer.ggml.tokens"])


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        (byte_level(tokens=None), "tokens"),
        (byte_level(tokens=[]), "tokens: 0 values"),
        (byte_level(tokens="abc"), "tokens"),
        (byte_level(tokens=[1, 2]), "tokens: 2 values"),
        (byte_level(tokens=["a", "a"], token_type=None), "1 tokens repeated"),
        (byte_level(tokens=["a" * 9000], token_type=None), "9000 characters"),
        (byte_level(token_type=np.ones(N - 1, np.int32)), f"{N - 1} values of type int32; {N} numbers"),
        (byte_level(token_type=np.ones(N, np.float32)), "float32"),
        (byte_level(token_type=["x"] * N), "token_type"),
        (byte_level(token_type=3), "token_type"),
        (byte_level(pre=None), "pre: absent"),
        (byte_level(merges=None), "merges: absent"),
        (byte_level(merges=["ab"]), "without a space"),
        (byte_level(merges=[1]), "not strings"),
        (byte_level(merges=["q zzz"]), "zzz"),
        (byte_level(eos_token_id=N), f"an id from 0 to {N - 1}"),
        (byte_level(eos_token_id=-2), "eos_token_id"),
        (byte_level(eos_token_id=True), "eos_token_id"),
        (byte_level(eos_token_id="2"), "eos_token_id"),
        (byte_level(add_bos_token=1), "add_bos_token"),
        (byte_level(add_bos_token=True, bos_token_id=None), "bos_token_id is needed"),
        (byte_level(chat_template=7), "chat_template"),
        ({**spm(), "tokenizer.ggml.scores": np.zeros(M + 1, np.float32)}, f"{M + 1} values"),
        ({**spm(), "tokenizer.ggml.scores": np.full(M, np.nan, np.float32)}, "not a number"),
        ({**spm(), "tokenizer.ggml.scores": ["a"] * M}, "scores"),
    ],
)
def test_inconsistent_metadata_is_refused(metadata, words):
    with pytest.raises(ModelFileError, match=words):
        Tokenizer.from_gguf(metadata)


def test_scores_are_required_of_spm():
    metadata = spm()
    del metadata["tokenizer.ggml.scores"]
    with pytest.raises(ModelFileError, match="scores: absent"):
        Tokenizer.from_gguf(metadata)


@pytest.mark.parametrize("kind", [None, "bert", "t5", 3])
def test_other_kinds_of_vocabulary_are_refused(kind):
    with pytest.raises(UnsupportedModel, match="'gpt2' and 'llama'"):
        Tokenizer.from_gguf({"tokenizer.ggml.model": kind})


def test_tokens_that_are_empty_or_not_utf8_keep_their_bytes():
    metadata = spm(add_space_prefix=False)
    metadata["tokenizer.ggml.tokens"][-1] = b"\xff\xfe".decode("utf-8", "surrogateescape")
    metadata["tokenizer.ggml.tokens"][-2] = ""
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.token_bytes(M - 1) == b"\xff\xfe"
    assert tokenizer.token_bytes(M - 2) == b""
    assert tokenizer.vocab_size == M


def test_text_with_half_a_surrogate_pair_is_refused():
    for tokenizer in _TOKENIZERS:
        with pytest.raises(RequestError, match="surrogate") as caught:
            tokenizer.encode("a\ud800")
        assert caught.value.param == "prompt"
        with pytest.raises(RequestError):
            tokenizer.encode_many(["a", "\udfff"])


def test_no_token_stands_for_more_text_than_it_says():
    for tokenizer in _TOKENIZERS:
        longest = tokenizer.max_chars_per_token
        assert all(len(tokenizer.token_text(i)) <= longest for i in range(tokenizer.vocab_size))
        assert longest == Tokenizer.from_json(tokenizer.to_json(), {}).max_chars_per_token


def _folder(tmp_path, tokenizer_config=None, **files):
    (tmp_path / "tokenizer.json").write_text(Tokenizer.from_gguf(byte_level()).to_json())
    if tokenizer_config is not None:
        files["tokenizer_config.json"] = json.dumps(tokenizer_config)
    for name, text in files.items():
        (tmp_path / name.replace("__", ".")).write_text(text)
    return tmp_path


def test_a_folder_gives_its_vocabulary_and_special_tokens(tmp_path):
    config = {"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|im_start|>", "chat_template": "hi"}
    folder = _folder(tmp_path, config, generation_config__json='{"eos_token_id": [256, 1]}')
    tokenizer = Tokenizer.from_folder(folder)
    end = tokenizer.id_of("<|im_end|>")
    assert tokenizer.eos_ids == (end, 256, 1)
    assert tokenizer.bos_id == tokenizer.id_of("<|im_start|>")
    assert tokenizer.add_bos is False
    assert tokenizer.chat_template == "hi"
    assert tokenizer.decode(tokenizer.encode("the thing 123")) == "the thing 123"


def test_a_template_file_comes_before_the_configuration(tmp_path):
    folder = _folder(tmp_path, {"chat_template": "config"}, chat_template__jinja="file")
    assert Tokenizer.from_folder(folder).chat_template == "file"


def test_named_templates_are_kept_by_name(tmp_path):
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    tokenizer = Tokenizer.from_folder(_folder(tmp_path, {"chat_template": named}))
    assert (tokenizer.chat_template, tokenizer.chat_templates) == ("d", {"default": "d", "tool_use": "t"})
    metadata = byte_level(**{"chat_template": "d", "chat_template.tool_use": "t"})
    assert Tokenizer.from_gguf(metadata).chat_templates == {"default": "d", "tool_use": "t"}


def test_the_configuration_decides_about_bos(tmp_path):
    tokenizer = Tokenizer.from_folder(_folder(tmp_path, {"bos_token": "<|im_start|>", "add_bos_token": True}))
    assert tokenizer.add_bos
    assert tokenizer.encode("a") == [tokenizer.bos_id, ord("a")]


def test_settings_of_training_do_not_cut_prompts(tmp_path):
    folder = _folder(tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert len(Tokenizer.from_folder(folder).encode("xyzxyz")) == 6


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "[" * 100_000),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", "{"),
        ("generation_config.json", '{"eos_token_id": "x"}'),
        ("generation_config.json", '{"eos_token_id": [true]}'),
        ("tokenizer_config.json", '{"chat_template": 5}'),
        ("tokenizer_config.json", "[" * 100_000),
    ],
)
def test_a_malformed_file_is_named(tmp_path, name, text):
    folder = _folder(tmp_path)
    (folder / name).write_text(text)
    with pytest.raises(ModelFileError, match=r"json|chat_template"):
        Tokenizer.from_folder(folder)


def test_a_folder_without_tokenizer_json_is_refused(tmp_path):
    with pytest.raises(ModelFileError, match=r"tokenizer\.json: absent"):
        Tokenizer.from_folder(tmp_path)


def test_bad_words_are_cut_with_and_without_a_space():
    tokenizer = Tokenizer.from_gguf(byte_level())
    the, spaced = (tokenizer.encode(w, add_special_tokens=False) for w in ("the", " the"))
    assert bad_words_ids(tokenizer, ["  the"]) == [the, spaced]
    assert bad_words_ids(tokenizer, ["xy"]) == [[ord("x"), ord("y")]]


@pytest.mark.parametrize("words", [[""], ["  "], ["x"] * 129, ["xy" * 600]])
def test_bad_words_beyond_the_limits_are_refused(words):
    with pytest.raises(RequestError) as caught:
        bad_words_ids(Tokenizer.from_gguf(byte_level()), words)
    assert caught.value.param == "bad_words"


def test_a_long_text_is_cut_as_its_short_pieces_are():
    """The library's two ways of cutting agree, with special tokens in the text and around it."""
    tokenizer = Tokenizer.from_gguf(byte_level())
    text = "Why é \U0001f600 the<|im_end|> is it? " * 300
    for special in (True, False):
        whole = tokenizer._backend.encode(text, add_special_tokens=special).ids
        assert tokenizer.encode(text, add_special_tokens=special) == whole
