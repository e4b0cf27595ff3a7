import json
import os
from pathlib import Path

import model_bytes as mb
import numpy as np
import pytest

from tiercel.base.errors import ModelFileError, ModelNotFound, UnsupportedModel
from tiercel.loaders.checkpoint import Tensor, open_checkpoint
from tiercel.loaders.gguf_file import GgufFile
from tiercel.quant.formats import Format

ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)
CONFIG = {"model_type": "llama", "hidden_size": 3}
INDEX = "model.safetensors.index.json"


def shard(*names, kind="F32"):
    return mb.safetensors({name: (kind, (2, 3), ROWS.tobytes()) for name in names})


@pytest.fixture
def folder(put, tmp_path):
    """Fill a folder: JSON for what is no bytes; config.json unless it is given."""

    def fill(files):
        for name, content in {"config.json": CONFIG, **files}.items():
            if content is not None:
                put(content if isinstance(content, bytes) else json.dumps(content).encode(), name)
        return tmp_path

    return fill


def indexed(**weight_map):
    return {"metadata": {"total_size": 48}, "weight_map": weight_map}


def assert_refused(path, match, error=ModelFileError):
    with pytest.raises(error, match=match):
        open_checkpoint(path)


# Safetensors folders


@pytest.mark.parametrize("name", ["model.safetensors", "weights.safetensors"])
def test_a_folder_with_one_file_is_read(folder, name):
    path = folder({name: shard("w"), "generation_config.json": {"eos_token_id": 2}})
    with open_checkpoint(path) as checkpoint:
        assert (checkpoint.kind, checkpoint.config, checkpoint.path) == ("safetensors", CONFIG, path)
        assert checkpoint.generation_config == {"eos_token_id": 2}
        assert (checkpoint.metadata, checkpoint.norm_weights_include_one) == ({}, False)
        assert checkpoint.tokenizer_source == path
        tensor = checkpoint.tensors["w"]
    np.testing.assert_array_equal(tensor.float32(), ROWS)


def test_an_index_tells_which_files_and_tensors_count(folder):
    index = indexed(a="model-1.safetensors", b="model-2.safetensors")
    files = {
        "model-1.safetensors": shard("a", "extra"),
        "model-2.safetensors": shard("b"),
        "other.safetensors": shard("c"),
        INDEX: index,
    }
    checkpoint = open_checkpoint(folder(files))
    assert sorted(checkpoint.tensors) == ["a", "b"]
    assert checkpoint.generation_config == {}


def test_half_floats_expand_to_their_values(folder):
    half = np.array([0.5, -2.0], np.float16)
    brain = (np.array([0.5, -2.0], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    path = folder(
        {
            "model.safetensors": mb.safetensors(
                {"h": ("F16", (2,), half.tobytes()), "b": ("BF16", (2,), brain.tobytes())}
            )
        }
    )
    tensors = open_checkpoint(path).tensors
    assert tensors["h"].float32().tolist() == tensors["b"].float32().tolist() == [0.5, -2.0]


def test_a_tensor_of_an_unread_type_is_listed_and_refused_when_used(folder):
    path = folder(
        {"model.safetensors": mb.safetensors({"mask": ("BOOL", (4,), bytes(4)), "w": ("F32", (1,), bytes(4))})}
    )
    tensors = open_checkpoint(path).tensors
    assert sorted(tensors) == ["mask", "w"]
    assert "mask" in tensors
    assert tensors.unsupported == {"mask": "BOOL"}
    with pytest.raises(UnsupportedModel, match="'mask' has type BOOL"):
        tensors["mask"]
    with pytest.raises(KeyError):
        tensors["absent"]


@pytest.mark.parametrize(
    ("files", "match"),
    [
        ({}, "no .safetensors and no .gguf"),
        ({"pytorch_model.bin": b"\x80\x02"}, "pickled weights"),
        ({"a.safetensors": shard("a"), "b.safetensors": shard("b")}, "no model.safetensors.index.json"),
        ({"a.safetensors": shard("a"), "b.safetensors": shard("b"), INDEX: {}}, "weight_map is missing"),
        ({"a.safetensors": shard("a"), "b.safetensors": shard("b"), INDEX: indexed()}, "weight_map is missing"),
        ({"a.safetensors": shard("a"), INDEX: indexed(a="b.safetensors")}, "'a' is in 'b.safetensors'"),
        ({"a.safetensors": shard("a"), INDEX: indexed(a="../a.safetensors")}, "'../a.safetensors'"),
        ({"a.safetensors": shard("a"), INDEX: indexed(a="..\\a.safetensors")}, "of the folder"),
        ({"a.safetensors": shard("a"), INDEX: indexed(a="/etc/passwd")}, "of the folder"),
        ({"a.safetensors": shard("a"), INDEX: indexed(a=3)}, "of the folder"),
        ({"a.safetensors": shard("a"), INDEX: indexed(a="config.json")}, "of the folder"),
        ({"a.safetensors": shard("a"), INDEX: indexed(z="a.safetensors")}, "'z' there and it is missing"),
        ({"a.safetensors": shard("a"), INDEX: b"{"}, "not valid UTF-8 JSON"),
        ({"model.safetensors": shard("a"), "config.json": b"[" * 100_000}, "nested too deeply"),
        ({"model.safetensors": shard("a"), "config.json": b"\xff"}, "not valid UTF-8 JSON"),
        ({"model.safetensors": shard("a"), "config.json": b"[]"}, "an object is needed"),
        ({"model.safetensors": shard("a"), "generation_config.json": b"no"}, "not valid UTF-8 JSON"),
        ({"model.safetensors": shard("a")[:-1]}, "truncated"),
    ],
)
def test_a_damaged_folder_is_refused(folder, files, match):
    assert_refused(folder(files), match)


def test_a_folder_without_a_configuration_is_refused(folder):
    assert_refused(
        folder({"config.json": None, "model.safetensors": shard("a")}), "config.json: no such file", ModelNotFound
    )


# Paths


def test_other_paths_are_refused_with_what_to_do(put, tmp_path):
    assert_refused(tmp_path / "none", "no such file or folder", ModelNotFound)
    assert_refused(put(b"x", "model.safetensors"), "give the folder")
    assert_refused(put(b"x", "model.pt"), "pickled weights")
    assert_refused(put(b"x", "notes.txt"), "a folder or a .gguf file")


def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "model.gguf")
    assert_refused(tmp_path / "model.gguf", "not a regular file")


# GGUF


def test_a_gguf_file_and_its_folder_open_alike(put):
    path = put(mb.model())
    with open_checkpoint(path) as by_file, open_checkpoint(path.parent) as by_folder:
        assert by_file.kind == "gguf"
        assert by_file.config == by_folder.config
        assert isinstance(by_file.tokenizer_source, GgufFile)
        assert by_file.tokenizer_source.metadata is by_file.metadata
        assert by_file.digest() == by_folder.digest()


def test_two_gguf_files_in_a_folder_are_ambiguous(put):
    put(mb.model(), "a.gguf")
    assert_refused(put(mb.model(), "b.gguf").parent, r"2 GGUF models \(a.gguf, b.gguf\)")


def parts(n=2, **changes):
    """A model in `n` parts, the tensors dealt in turn; the metadata in the first."""
    tensors = list(mb.filled(mb.shapes()).items())
    found = {}
    for i in range(n):
        keys = {"split.no": i, "split.count": n, "split.tensors.count": len(tensors)} | changes
        found[f"m-{i + 1:05}-of-{n:05}.gguf"] = mb.gguf((mb.metadata() if i == 0 else {}) | keys, dict(tensors[i::n]))
    return found


def test_parts_open_as_the_whole_model(put):
    whole = open_checkpoint(put(mb.model(), "whole/model.gguf"))
    for name, raw in parts(3).items():
        path = put(raw, name)
    assert_refused(path, "give the first")
    split = open_checkpoint(path.with_name("m-00001-of-00003.gguf"))
    assert split.config == whole.config
    assert {n: t.data.tobytes() for n, t in split.tensors.items()} == {
        n: t.data.tobytes() for n, t in whole.tensors.items()
    }


def test_a_folder_with_one_model_in_parts_opens(put):
    for name, raw in parts().items():
        path = put(raw, name)
    assert open_checkpoint(path.parent).path.name == "m-00001-of-00002.gguf"


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda p: p.pop("m-00002-of-00002.gguf"), "no such file"),
        (lambda p: p.update({"m-00002-of-00002.gguf": p["m-00001-of-00002.gguf"]}), "another part"),
        (lambda p: p.update(parts(**{"split.tensors.count": 7})), "7 are needed"),
        (lambda p: p.update(parts(**{"split.count": 1 << 20})), "split.count"),
        (lambda p: p.update(parts(**{"split.count": 3})), "one of 3 parts"),
    ],
)
def test_incomplete_parts_are_refused(put, tmp_path, spoil, match):
    files = parts()
    spoil(files)
    for name, raw in files.items():
        put(raw, name)
    assert_refused(tmp_path / "m-00001-of-00002.gguf", match, (ModelFileError, ModelNotFound))


def test_a_tensor_in_two_parts_is_refused(put):
    keys = {"split.count": 2, "split.no": 1}
    files = parts() | {"m-00002-of-00002.gguf": mb.gguf(keys, mb.filled(mb.shapes()))}
    for name, raw in files.items():
        path = put(raw, name)
    assert_refused(path.with_name("m-00001-of-00002.gguf"), "earlier part")


# Tensors


def test_rows_are_a_view_of_the_file_unless_they_are_reordered(put):
    tensors = open_checkpoint(put(mb.model())).tensors
    plain = tensors["model.layers.0.self_attn.v_proj.weight"]
    assert np.shares_memory(plain.rows(), plain.data)
    assert plain.rows().shape == (mb.KV_HEADS * mb.HEAD_DIM, mb.WIDTH * 4)
    reordered = tensors["model.layers.0.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(reordered.rows(), reordered.data.reshape(-1, mb.WIDTH * 4)[reordered.row_permutation])


def test_quantized_rows_are_reordered_whole():
    raw = np.random.default_rng(0).integers(0, 256, (4, 34), dtype=np.uint8)
    raw[:, 1] &= 0x3F  # finite scales
    order = np.array([2, 0, 3, 1])
    plain = Tensor("w", (4, 32), Format.Q8_0, raw.reshape(-1))
    reordered = Tensor("w", (4, 32), Format.Q8_0, raw.reshape(-1), order)
    np.testing.assert_array_equal(reordered.rows(), raw[order])
    np.testing.assert_array_equal(reordered.float32(), plain.float32()[order])


def test_vectors_and_scalars_are_one_row():
    data = np.arange(4, dtype=np.float32).view(np.uint8)
    assert Tensor("v", (4,), Format.F32, data).rows().shape == (1, 16)
    assert Tensor("v", (4,), Format.F32, data, np.array([3, 2, 1, 0])).float32().tolist() == [3, 2, 1, 0]
    assert Tensor("s", (), Format.F32, data[:4]).rows().shape == (1, 4)
    assert Tensor("e", (0, 4), Format.F32, data[:0]).rows().shape == (0, 16)


# Digests


def test_the_digest_names_the_weights_and_the_configuration(folder, put):
    def digest(files):
        return open_checkpoint(folder(files)).digest()

    first = digest({"model.safetensors": shard("w")})
    assert len(first) == 64
    assert digest({"model.safetensors": shard("w")}) == first
    assert digest({"model.safetensors": shard("v")}) != first
    assert digest({"model.safetensors": shard("w").replace(ROWS[1].tobytes(), ROWS[0].tobytes())}) != first
    assert digest({"model.safetensors": shard("w"), "config.json": {**CONFIG, "rms_norm_eps": 1.0}}) != first


def test_only_the_full_digest_sees_the_middle_of_a_large_tensor(folder):
    values = np.zeros(1 << 16, np.float32)

    def digests():
        checkpoint = open_checkpoint(
            folder({"model.safetensors": mb.safetensors({"w": ("F32", values.shape, values.tobytes())})})
        )
        return checkpoint.digest(), checkpoint.full_digest()

    before = digests()
    values[1 << 15] = 1
    after = digests()
    assert before[0] == after[0]
    assert before[1] != after[1]
    values[-1] = 1
    assert digests()[0] != after[0]


# Real files


@pytest.mark.parametrize(
    ("name", "n_tensors", "norm_mean"),
    [("SmolLM2-135M-Instruct.Q4_1.gguf", 272, 1.80266), ("gemma3-270m.gguf", 236, 26.3464)],
)
def test_a_real_model_opens(name, n_tensors, norm_mean):
    folder_name = os.environ.get("TIERCEL_TEST_MODELS")
    if folder_name is None or not (Path(folder_name) / name).exists():
        pytest.skip(f"TIERCEL_TEST_MODELS names no folder with {name}")
    with open_checkpoint(Path(folder_name) / name) as checkpoint:
        assert len(checkpoint.tensors) == n_tensors
        assert checkpoint.config["tie_word_embeddings"] is True
        assert len(checkpoint.metadata["tokenizer.ggml.tokens"]) == checkpoint.config["vocab_size"]
        assert checkpoint.tensors["model.norm.weight"].float32().mean() == pytest.approx(norm_mean, rel=1e-4)
