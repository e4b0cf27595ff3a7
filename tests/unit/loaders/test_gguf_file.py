import os
import struct
import tracemalloc

import gguf
import model_bytes as mb
import numpy as np
import pytest

from tiercel.base.errors import ModelFileError, ModelNotFound, UnsupportedModel
from tiercel.loaders.gguf_file import MAX_ENTRIES, GgufFile
from tiercel.quant.formats import Format

KEYS = {
    "a.u8": mb.one(mb.U8, 200),
    "a.i8": mb.one(mb.I8, -3),
    "a.u16": mb.one(mb.U16, 60000),
    "a.i16": mb.one(mb.I16, -300),
    "a.u32": mb.one(mb.U32, 1 << 31),
    "a.i32": mb.one(mb.I32, -5),
    "a.f32": mb.one(mb.F32, 0.5),
    "a.bool": mb.one(mb.BOOL, True),
    "a.text": mb.one(mb.STRING, "naïve 🦅"),
    "a.u64": mb.one(mb.U64, 1 << 63),
    "a.i64": mb.one(mb.I64, -(1 << 40)),
    "a.f64": mb.one(mb.F64, 1e300),
    "a.numbers": mb.many(mb.I32, [3, -4]),
    "a.reals": mb.many(mb.F32, [0.25]),
    "a.flags": mb.many(mb.BOOL, [True, False]),
    "a.nothing": mb.many(mb.U8, []),
    "a.no_texts": mb.many(mb.STRING, []),
    "a.texts": mb.many(mb.STRING, ["", "Ġthe", "x" * 300, b"\xe2\x96", "end"]),
}
ROWS = np.arange(64, dtype=np.float32).reshape(2, 32)
TENSORS = {"m.weight": ("f32", (2, 32), ROWS.tobytes()), "v": ("q8_0", (32,), bytes(range(34)))}


def raw_entry(name="w", dims=(32,), type_id=0, offset=0):
    return mb.entry(name, dims, type_id, offset)


def only_tensors(*entries, data=bytes(4096)):
    raw = mb.head(len(entries), 0) + b"".join(entries)
    return raw + bytes(-len(raw) % 32) + data


def only_key(value, name="k"):
    return mb.head(0, 1) + mb.text(name) + value


def assert_refused(path, match, error=ModelFileError):
    tracemalloc.start()
    try:
        with pytest.raises(error, match=match) as caught:
            GgufFile(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert "0x" not in str(caught.value)


@pytest.mark.parametrize("version", [2, 3])
def test_every_value_type_is_read(put, version):
    file = GgufFile(put(mb.gguf(KEYS, TENSORS, version=version)))
    values = dict(file.metadata)
    assert values.pop("a.numbers").tolist() == [3, -4]
    assert values.pop("a.reals").tolist() == [0.25]
    assert values.pop("a.flags").tolist() == [True, False]
    assert len(values.pop("a.nothing")) == len(values.pop("a.no_texts")) == 0
    texts = values.pop("a.texts")
    assert list(texts) == [texts[i] for i in range(5)] == ["", "Ġthe", "x" * 300, "\udce2\udc96", "end"]
    assert texts.raw(3) == b"\xe2\x96"
    assert texts[-1] == "end"
    assert texts[1:3] == ["Ġthe", "x" * 300]
    assert texts.lengths.tolist() == [0, 5, 300, 2, 3]
    with pytest.raises(IndexError):
        texts[5]
    assert values == {
        "a.u8": 200,
        "a.i8": -3,
        "a.u16": 60000,
        "a.i16": -300,
        "a.u32": 1 << 31,
        "a.i32": -5,
        "a.f32": 0.5,
        "a.bool": True,
        "a.text": "naïve 🦅",
        "a.u64": 1 << 63,
        "a.i64": -(1 << 40),
        "a.f64": 1e300,
    }
    assert file.version == version


def test_tensors_are_read_only_views_that_outlive_the_file(put):
    file = GgufFile(put(mb.gguf(KEYS, TENSORS)))
    matrix, vector = file.tensors["m.weight"], file.tensors["v"]
    assert (matrix.shape, matrix.format, vector.format) == ((2, 32), Format.F32, Format.Q8_0)
    data = file.data(matrix)
    file.close()
    assert not data.flags.writeable
    np.testing.assert_array_equal(data.view("<f4").reshape(2, 32), ROWS)


def test_a_file_the_gguf_package_writes_is_read(tmp_path):
    path = tmp_path / "theirs.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(7)
    writer.add_token_list(["a", "b"])
    writer.add_tensor("x.weight", ROWS)
    writer.add_tensor("y.weight", gguf.quants.quantize(ROWS, gguf.GGMLQuantizationType.Q4_0), raw_dtype=2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(path)
    assert file.metadata["llama.block_count"] == 7
    assert list(file.metadata["tokenizer.ggml.tokens"]) == ["a", "b"]
    assert file.data(file.tensors["x.weight"]).tobytes() == ROWS.tobytes()
    assert file.tensors["y.weight"].shape == (2, 32)


def test_the_gguf_package_reads_what_the_tests_write(put):
    reader = gguf.GGUFReader(put(mb.gguf(KEYS, TENSORS)))
    np.testing.assert_array_equal(reader.tensors[0].data, ROWS)
    assert reader.fields["a.i64"].contents() == -(1 << 40)


@pytest.mark.parametrize("alignment", [8, 32, 4096, 65536])
def test_an_alignment_in_bounds_is_honoured(put, alignment):
    raw = mb.gguf({"general.alignment": alignment}, TENSORS, alignment=alignment)
    file = GgufFile(put(raw))
    assert file.data(file.tensors["v"]).tobytes() == bytes(range(34))


@pytest.mark.parametrize("alignment", [0, 1, 4, 12, 33, 1 << 17, 1 << 31])
def test_an_alignment_out_of_bounds_is_refused(put, alignment):
    assert_refused(put(mb.gguf({"general.alignment": alignment}, {})), "power of two from 8 to 65536")


@pytest.mark.parametrize("value", [mb.one(mb.STRING, "32"), mb.one(mb.F32, 32.0), mb.many(mb.U32, [32, 32])])
def test_an_alignment_of_another_type_is_refused(put, value):
    assert_refused(put(mb.gguf({"general.alignment": value}, {})), "power of two")


def test_every_truncation_is_refused(put):
    raw = mb.gguf(KEYS, TENSORS)
    end = len(raw) - (-34 % 32)  # the last tensor's padding may be missing
    GgufFile(put(raw[:end]))
    path = put(raw)
    for length in reversed(range(end)):
        os.truncate(path, length)
        with pytest.raises(ModelFileError):
            GgufFile(path)


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        (b"", "empty"),
        (b"GGML" + bytes(60), "does not begin with GGUF"),
        (b"\x80\x02}q" + bytes(60), "does not begin with GGUF"),
    ],
)
def test_another_file_is_refused(put, raw, match):
    assert_refused(put(raw), match)


@pytest.mark.parametrize(("version", "match"), [(1, "version 1"), (4, "version 4"), (3 << 24, "big-endian")])
def test_another_version_is_refused_as_unsupported(put, version, match):
    assert_refused(put(mb.head(0, 0, version=version)), match, UnsupportedModel)


@pytest.mark.parametrize("n", [1, MAX_ENTRIES, MAX_ENTRIES + 1, 1 << 32, 1 << 61, (1 << 64) - 1])
@pytest.mark.parametrize("place", ["tensors", "keys"])
def test_a_count_beyond_the_file_is_refused_before_anything_is_allocated(put, n, place):
    raw = mb.head(n if place == "tensors" else 0, n if place == "keys" else 0)
    assert_refused(put(raw + bytes(13)), f"{n} {place}")


@pytest.mark.parametrize("n", [5, 1 << 31, 1 << 60, (1 << 61) + 1, (1 << 64) - 1])
@pytest.mark.parametrize("kind", [mb.U8, mb.I32, mb.F64, mb.STRING])
def test_an_array_length_beyond_the_file_is_refused(put, n, kind):
    assert_refused(put(only_key(mb.many(kind, [], count=n))), "left")


@pytest.mark.parametrize("n", [60, 1 << 31, (1 << 63) - 1, (1 << 64) - 1])
def test_a_text_length_beyond_the_file_is_refused(put, n):
    length = struct.pack("<Q", n)
    for raw in (
        mb.head(0, 1) + length + b"key" + bytes(32),
        only_key(struct.pack("<I", mb.STRING) + length + b"text"),
        only_key(struct.pack("<IIQ", mb.ARRAY, mb.STRING, 1) + length + b"text"),
        only_tensors(length + b"name" + bytes(40), data=b""),
    ):
        with pytest.raises(ModelFileError):
            GgufFile(put(raw))


@pytest.mark.parametrize("length", [50, 1 << 31, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
@pytest.mark.parametrize("n_before", [0, 2])
def test_a_text_in_an_array_that_ends_past_the_file_is_refused(put, length, n_before):
    head = struct.pack("<IIQ", mb.ARRAY, mb.STRING, 4)
    bad = only_key(head + mb.text("x") * n_before + struct.pack("<Q", length) + b"short" * 9)
    assert_refused(put(bad), "runs past the end")


def test_arrays_of_arrays_are_refused(put):
    inner = struct.pack("<IQ", mb.ARRAY, 1) * 1000
    assert_refused(put(only_key(struct.pack("<I", mb.ARRAY) + inner)), "array of arrays")


@pytest.mark.parametrize("kind", [13, 255, (1 << 32) - 1])
def test_an_undefined_value_type_is_refused(put, kind):
    assert_refused(put(only_key(struct.pack("<I", kind) + bytes(16))), f"value type {kind}")
    assert_refused(put(only_key(struct.pack("<IIQ", mb.ARRAY, kind, 1) + bytes(16))), f"element type {kind}")


@pytest.mark.parametrize("value", [struct.pack("<IB", mb.BOOL, 2), struct.pack("<IIQB", mb.ARRAY, mb.BOOL, 1, 255)])
def test_a_truth_value_other_than_0_and_1_is_refused(put, value):
    assert_refused(put(only_key(value)), "neither 0 nor 1")


def test_bad_utf8_is_refused_in_names_and_texts(put):
    assert_refused(put(only_key(mb.one(mb.U8, 1), name=b"\xff\xfe")), "key's name is not UTF-8")
    assert_refused(put(only_key(mb.one(mb.STRING, b"\xc3\x28"))), "not UTF-8")
    assert_refused(put(only_tensors(raw_entry(b"\xed\xa0\x80"))), "tensor's name is not UTF-8")


def test_names_must_be_unique_and_not_empty(put):
    twice = mb.text("k") + mb.one(mb.U8, 1)
    assert_refused(put(mb.head(0, 2) + twice + twice), "key 'k' occurs twice")
    assert_refused(put(only_key(mb.one(mb.U32, 1), name="")), "key without a name")
    assert_refused(put(only_tensors(raw_entry(), raw_entry(offset=128))), "tensor 'w' occurs twice")
    assert_refused(put(only_key(mb.one(mb.U8, 1), name="k" * 65_536)), "at most 65535")
    assert_refused(put(only_tensors(raw_entry("w" * 1025))), "at most 1024")


@pytest.mark.parametrize("n_dims", [0, 5, 1 << 31])
def test_a_number_of_dimensions_out_of_bounds_is_refused(put, n_dims):
    raw = mb.text("w") + struct.pack("<I", n_dims) + bytes(64)
    assert_refused(put(only_tensors(raw)), f"{n_dims} dimensions")


@pytest.mark.parametrize("dim", [0, (1 << 40) + 1, 1 << 63, (1 << 64) - 1])
def test_a_dimension_out_of_bounds_is_refused(put, dim):
    assert_refused(put(only_tensors(raw_entry(dims=(32, dim)))), f"dimension of {dim}")


def test_sizes_that_wrap_in_64_bits_are_refused(put):
    # 2^40 * 2^24 elements are 2^64: zero, if the product wraps.
    assert_refused(put(only_tensors(raw_entry(dims=(1 << 40, 1 << 24)))), "truncated")
    assert_refused(put(only_tensors(raw_entry(dims=(1 << 40,) * 4))), "truncated")
    assert_refused(put(only_tensors(raw_entry(offset=(1 << 64) - 32))), "truncated")


@pytest.mark.parametrize("offset", [1, 16, 33])
def test_an_offset_off_the_alignment_is_refused(put, offset):
    assert_refused(put(only_tensors(raw_entry(offset=offset))), "multiple of 32")


def test_a_tensor_past_the_end_is_refused(put):
    GgufFile(put(only_tensors(raw_entry(offset=128), data=bytes(256))))
    assert_refused(put(only_tensors(raw_entry(offset=128), data=bytes(255))), "truncated")


def test_overlapping_tensors_are_refused(put):
    GgufFile(put(only_tensors(raw_entry("a"), raw_entry("b", offset=128))))
    assert_refused(put(only_tensors(raw_entry("a", dims=(33,)), raw_entry("b", offset=128))), "'b' overlaps")
    assert_refused(put(only_tensors(raw_entry("a"), raw_entry("b"))), "overlaps")


def test_rows_that_end_inside_a_group_are_refused(put):
    # 16 * 2 weights would fill one group of 32, but a row is only half of it.
    assert_refused(put(only_tensors(raw_entry(dims=(16, 2), type_id=8))), "multiple of 32")


def test_an_unread_format_is_refused_by_name(put):
    assert_refused(put(only_tensors(raw_entry(dims=(256,), type_id=10))), "format Q2_K", UnsupportedModel)
    assert_refused(put(only_tensors(raw_entry(dims=(256,), type_id=23))), "format IQ4_XS", UnsupportedModel)
    assert_refused(put(only_tensors(raw_entry(dims=(256,), type_id=77))), "type 77")


def test_what_is_no_readable_file_is_refused(tmp_path):
    with pytest.raises(ModelNotFound):
        GgufFile(tmp_path / "none.gguf")
    with pytest.raises(ModelFileError, match="not a regular file"):
        GgufFile(tmp_path)
