import json
import os

import model_bytes as mb
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tiercel.base.errors import ModelFileError
from tiercel.loaders.safetensors_file import SafetensorsFile
from tiercel.quant.formats import Format

ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)
TENSORS = {
    "a": ("F32", (2, 3), ROWS.tobytes()),
    "half": ("F16", (2,), bytes(4)),
    "brain": ("BF16", (1, 1), bytes(2)),
    "one": ("F32", (), bytes(4)),
    "none": ("F32", (0, 7), b""),
    "mask": ("BOOL", (5,), bytes(5)),
}


def one(**changes):
    """A file with one tensor of 8 bytes whose entry is changed; None removes a field."""
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes
    entry = {key: value for key, value in entry.items() if value is not None}
    return mb.safetensors_raw(json.dumps({"w": entry}).encode(), bytes(8))


def two(first, second, n_bytes=16):
    header = {
        name: {"dtype": "U8", "shape": [ends[1] - ends[0]], "data_offsets": list(ends)}
        for name, ends in (("a", first), ("b", second))
    }
    return mb.safetensors_raw(json.dumps(header).encode(), bytes(n_bytes))


def assert_refused(path, match):
    with pytest.raises(ModelFileError, match=match):
        SafetensorsFile(path)


def test_a_valid_file_is_read(put):
    file = SafetensorsFile(put(mb.safetensors(TENSORS, {"format": "pt"})))
    assert {name: (t.shape, t.format) for name, t in file.tensors.items()} == {
        "a": ((2, 3), Format.F32),
        "half": ((2,), Format.F16),
        "brain": ((1, 1), Format.BF16),
        "one": ((), Format.F32),
        "none": ((0, 7), Format.F32),
        "mask": ((5,), None),
    }
    data = file.data(file.tensors["a"])
    file.close()
    assert not data.flags.writeable
    np.testing.assert_array_equal(data.view("<f4").reshape(2, 3), ROWS)
    assert file.metadata == {"format": "pt"}


def test_a_file_the_safetensors_package_writes_is_read(tmp_path):
    arrays = {"x": ROWS, "y": ROWS.astype(np.float16)[:1], "ids": np.arange(3)}
    save_file(arrays, tmp_path / "m.safetensors", {"format": "np"})
    file = SafetensorsFile(tmp_path / "m.safetensors")
    assert file.data(file.tensors["x"]).tobytes() == ROWS.tobytes()
    assert file.tensors["y"].shape == (1, 3)
    assert file.tensors["ids"].dtype == "I64"


def test_the_safetensors_package_reads_what_the_tests_write(put):
    path = put(mb.safetensors({"a": TENSORS["a"], "none": TENSORS["none"]}))
    np.testing.assert_array_equal(load_file(path)["a"], ROWS)


def test_every_truncation_is_refused(put):
    raw = mb.safetensors(TENSORS)
    path = put(raw)
    for length in reversed(range(len(raw))):
        os.truncate(path, length)
        with pytest.raises(ModelFileError):
            SafetensorsFile(path)


@pytest.mark.parametrize("length", [3, 100_000_001, 1 << 32, 1 << 63, (1 << 64) - 1])
def test_a_header_length_beyond_the_file_is_refused(put, length):
    assert_refused(put(mb.safetensors_raw(b"{}", length=length)), f"claims {length} bytes")


@pytest.mark.parametrize(
    ("header", "match"),
    [
        (b"", "not valid UTF-8 JSON"),
        (b"[]", "an object is needed"),
        (b"{", "not valid UTF-8 JSON"),
        (b'{"\xff": 1}', "not valid UTF-8 JSON"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid UTF-8 JSON"),
        (b'{"a":' * 200_000, "nested too deeply"),
        (b'{"a":' + b"[" * 200_000, "nested too deeply"),
        (b'{"a": {}, "a": {}}', "'a' occurs twice"),
        (b'{"a": {"dtype": "F32", "dtype": "F16"}}', "'dtype' occurs twice"),
        (b'{"a": 3}', "must hold dtype, shape and data_offsets"),
        (b'{"__metadata__": {"a": 1}}', "__metadata__"),
        (b'{"__metadata__": []}', "__metadata__"),
        (b'{"\\ud800": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}', "printable"),
        (b'{"": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}', "printable"),
    ],
)
def test_a_bad_header_is_refused(put, header, match):
    assert_refused(put(mb.safetensors_raw(header)), match)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"dtype": None}, "must hold"),
        ({"extra": 1}, "must hold"),
        ({"dtype": 3}, "a text is needed"),
        ({"dtype": "F16"}, "needs 4"),
        ({"dtype": "BOOL"}, "needs 2"),
        ({"shape": 2}, "a list of integers"),
        ({"shape": [2.0]}, "integers from 0"),
        ({"shape": [True, 2]}, "integers from 0"),
        ({"shape": ["2"]}, "integers from 0"),
        ({"shape": [-1, -2]}, "integers from 0"),
        ({"shape": [(1 << 40) + 1]}, "integers from 0"),
        ({"shape": [1 << 40, 1 << 22, 2]}, "needs"),  # 2^63 elements: a byte count that wraps to 0
        ({"shape": [1] * 9}, "9 dimensions"),
        ({"shape": [3]}, "needs 12"),
        ({"data_offsets": [0]}, "two ascending"),
        ({"data_offsets": [8, 0]}, "two ascending"),
        ({"data_offsets": [0, 8, 8]}, "two ascending"),
        ({"data_offsets": [-8, 0]}, "integers from 0"),
        ({"data_offsets": [0, 1 << 63]}, "integers from 0"),
        ({"data_offsets": [8, 16]}, "gap"),
        ({"data_offsets": [0, 16], "shape": [4]}, "the file has"),
    ],
)
def test_a_bad_entry_is_refused(put, changes, match):
    assert_refused(put(one(**changes)), match)


@pytest.mark.parametrize(
    ("first", "second", "match"),
    [
        ((0, 8), (7, 16), "'b' overlaps"),
        ((0, 8), (9, 16), "'b' leaves a gap"),
        ((0, 16), (0, 16), "overlaps"),
        ((0, 16), (4, 8), "overlaps"),
        ((0, 8), (8, 15), "the file has"),
        ((0, 8), (8, 17), "the file has"),
        ((8, 16), (16, 16), "'a' leaves a gap"),
    ],
)
def test_ranges_must_cover_the_data_exactly(put, first, second, match):
    assert_refused(put(two(first, second)), match)


def test_ranges_may_come_in_any_order(put):
    file = SafetensorsFile(put(two((8, 16), (0, 8))))
    assert file.tensors["b"].start < file.tensors["a"].start


def test_a_type_from_the_future_is_listed_and_its_range_checked(put):
    assert SafetensorsFile(put(one(dtype="F4_X"))).tensors["w"].format is None
    assert_refused(put(one(dtype="F4_X", data_offsets=[0, 9])), "the file has")
