"""Mutated model files: only the two named errors may escape, and memory stays bounded by the file's size."""

import json
import os
import struct
import tracemalloc

import model_bytes as mb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiercel.base.errors import ModelFileError, ModelNotFound, UnsupportedModel
from tiercel.loaders.checkpoint import open_checkpoint

GGUF = mb.model()
SAFETENSORS = mb.safetensors(
    {
        "a.weight": ("F32", (4, 8), bytes(range(128))),
        "b": ("BF16", (3,), bytes(6)),
        "mask": ("U8", (2, 2), bytes(4)),
    },
    {"format": "pt"},
)
# A header of 7,000 bytes in a file of 60,000: most changes should hit what is parsed.
GGUF_HEADER = GGUF.index(b"blk.1.ffn_down.weight") + 64
LIMIT_BYTES = 8 << 20

HOSTILE_NUMBERS = [
    0,
    1,
    2,
    9,
    0x7F,
    0xFF,
    1 << 16,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 40,
    1 << 63,
    (1 << 64) - 1,
]


def changes(header_bytes):
    """Draw one to four changes: (what, where, a number or a length, bytes)."""
    place = st.integers(0, header_bytes)
    return st.lists(
        st.one_of(
            st.tuples(st.just("flip"), place, st.integers(1, 255), st.none()),
            st.tuples(st.sampled_from(["<I", "<Q"]), place, st.sampled_from(HOSTILE_NUMBERS), st.none()),
            st.tuples(st.just("cut"), place, st.integers(1, 64), st.none()),
            st.tuples(st.just("copy"), place, st.integers(1, 64), place),
            st.tuples(st.just("insert"), place, st.just(0), st.binary(min_size=1, max_size=32)),
            st.tuples(st.just("truncate"), place, st.just(0), st.none()),
        ),
        min_size=1,
        max_size=4,
    )


def changed(raw, drawn):
    """Apply the changes one after the other."""
    raw = bytearray(raw)
    for what, at, number, extra in drawn:
        if what == "flip":
            raw[at : at + 1] = bytes(byte ^ number for byte in raw[at : at + 1])
        elif what in ("<I", "<Q"):
            width = struct.calcsize(what)
            raw[at : at + width] = (number & ((1 << 8 * width) - 1)).to_bytes(width, "little")
        elif what == "cut":
            del raw[at : at + number]
        elif what == "copy":
            raw[at : at + number] = raw[extra : extra + number]
        elif what == "insert":
            raw[at:at] = extra
        else:
            del raw[at:]
    return bytes(raw)


def use_everything(path):
    """Open and read all that a loader would, within the memory limit."""
    tracemalloc.start()
    try:
        with open_checkpoint(path) as checkpoint:
            for name in checkpoint.tensors:
                if name not in checkpoint.tensors.unsupported:
                    checkpoint.tensors[name].float32()
            checkpoint.digest()
            for value in checkpoint.metadata.values():
                str(value)
                if not isinstance(value, int | float | str):
                    list(value)
    except (ModelFileError, UnsupportedModel, ModelNotFound):
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < LIMIT_BYTES


quick = settings(
    max_examples=int(os.environ.get("TIERCEL_FUZZ_EXAMPLES", "80")),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@quick
@given(drawn=changes(GGUF_HEADER))
def test_no_mutated_gguf_file_escapes_the_named_errors(put, drawn):
    use_everything(put(changed(GGUF, drawn)))


@quick
@given(drawn=changes(len(SAFETENSORS)))
def test_no_mutated_safetensors_file_escapes_the_named_errors(put, drawn):
    put(json.dumps({"model_type": "llama"}).encode(), "config.json")
    use_everything(put(changed(SAFETENSORS, drawn), "model.safetensors").parent)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=6,
)
ENTRY = st.fixed_dictionaries({"dtype": JSON | st.just("F32"), "shape": JSON, "data_offsets": JSON})


@quick
@given(
    header=st.dictionaries(st.text(max_size=8) | st.just("__metadata__"), JSON | ENTRY, max_size=3), data=st.binary()
)
def test_no_safetensors_header_escapes_the_named_errors(put, header, data):
    put(b"{}", "config.json")
    use_everything(put(mb.safetensors_raw(json.dumps(header).encode(), data), "model.safetensors").parent)


@quick
@given(raw=st.binary(max_size=300))
def test_no_bytes_after_a_gguf_head_escape_the_named_errors(put, raw):
    use_everything(put(mb.head(2, 3) + raw))


@pytest.mark.parametrize("raw", [GGUF, SAFETENSORS], ids=["gguf", "safetensors"])
def test_the_unmutated_files_are_valid(put, raw):
    if raw is GGUF:
        path = put(raw)
    else:
        put(b"{}", "config.json")
        path = put(raw, "model.safetensors").parent
    assert len(open_checkpoint(path).tensors) > 2
