"""The tokenizers of two real files. Needs a folder with them, named by TIERCEL_TEST_MODELS."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
from tiny_vocabularies import spm_by_the_book

from tiercel.loaders.gguf_file import GgufFile
from tiercel.text.chat_template import ChatTemplate
from tiercel.text.compiled import cached
from tiercel.text.detokenizer import Detokenizer
from tiercel.text.tokenizer import Tokenizer

FOLDER = os.environ.get("TIERCEL_TEST_MODELS")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not FOLDER, reason="TIERCEL_TEST_MODELS names no folder")]
NAMES = ["SmolLM2-135M-Instruct.Q4_1.gguf", "gemma3-270m.gguf"]
TEXTS = [
    "",
    "The capital of France is Paris.",
    "def f(x):\n\t\treturn x**2  # 12345 3.14\n\n\n\nclass A:\n    pass\n",
    "你好，世界。こんにちは 한국어 ไทย हिन्दी العربية",
    "😀👩‍👩‍👧 é e\u0301 \u200b",
    "<table><td>x</td></table>" + " " * 34 + "." + "\n" * 40,
    " leading and trailing ",
    "a" * 300,
]


@pytest.fixture(scope="module", params=NAMES)
def metadata(request):
    path = Path(FOLDER or "") / request.param
    if not path.is_file():
        pytest.skip(f"no {request.param} there")
    return dict(GgufFile(path).metadata)


@pytest.fixture(scope="module")
def tokenizer(metadata):
    return Tokenizer.from_gguf(metadata)


def test_every_text_comes_back(tokenizer):
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        stream = Detokenizer(tokenizer, [])
        assert "".join([*(stream.push([i]) for i in ids), stream.finish()]) == text


def test_the_library_decodes_the_same(tokenizer):
    rng = np.random.default_rng(3)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer._backend.decode(ids) == tokenizer.decode(ids)
    ids = [i for i in rng.integers(0, tokenizer.vocab_size, 2000).tolist() if tokenizer.token_text(i).isascii()]
    assert tokenizer._backend.decode(ids) == tokenizer.decode(ids)


def test_sentencepiece_by_the_book_agrees(metadata, tokenizer):
    if metadata["tokenizer.ggml.model"] != "llama":
        pytest.skip("not a SentencePiece vocabulary")
    tokens = list(metadata["tokenizer.ggml.tokens"])
    added = [tokens[i] for i in np.flatnonzero(np.isin(metadata["tokenizer.ggml.token_type"], (3, 4))).tolist()]
    found_first = re.compile("(" + "|".join(map(re.escape, sorted(added, key=len, reverse=True))) + ")")
    plain = {**metadata, "tokenizer.ggml.tokens": tokens}
    for text in TEXTS:
        parts = found_first.split(text)
        expected = [t for i, part in enumerate(parts) for t in ([part] if i % 2 else spm_by_the_book(plain, part))]
        assert [tokens[i] for i in tokenizer.encode(text, add_special_tokens=False)] == expected


def test_smollm2_s_prompt_is_what_its_template_says(metadata, tokenizer):
    if tokenizer.chat_template is None:
        pytest.skip("no chat template")
    template = ChatTemplate(tokenizer.chat_template, bos_token="<|im_start|>", eos_token="<|im_end|>")
    text = template.render([{"role": "user", "content": "hi"}])
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids.count(tokenizer.bos_id) == 3
    assert ids.count(tokenizer.eos_ids[0]) == 2


def test_the_compiled_form_is_the_same_tokenizer(metadata, tokenizer, tmp_path):
    cached(lambda: tokenizer, tmp_path, "0" * 64)
    loaded = cached(lambda: pytest.fail("built again"), tmp_path, "0" * 64)
    assert loaded.to_json() == tokenizer.to_json()
    assert loaded.extras == tokenizer.extras
