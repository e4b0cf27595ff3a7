"""Public reports about GGUF files elsewhere, each tried here; `docs/reports.md` lists the rows."""

import json

import model_bytes as mb
import numpy as np
import pytest

from tiercel import LLM, SamplingParams
from tiercel.base.errors import ModelFileError, ModelNotFound
from tiercel.hub.resolve import resolve
from tiercel.loaders.checkpoint import open_checkpoint
from tiercel.models.rope import parse_rope


def opened(put, arch="llama", *, drop=(), tensors=None, **changes):
    metadata = mb.metadata(arch, **changes)
    for key in drop:
        del metadata[f"{arch}.{key}"]
    return open_checkpoint(put(mb.gguf(metadata, tensors or mb.filled(mb.shapes(arch)))))


def rope_theta(checkpoint):
    return checkpoint.config["rope_parameters"]["rope_theta"]


def scores_of(path, ids=(3, 1, 4, 1, 5, 9, 2, 6)):
    """Give every position's log-probabilities of the whole vocabulary, in float32 throughout."""
    options = {"compute_dtype": "float32", "kv_cache_dtype": "float32", "skip_tokenizer_init": True}
    with LLM(str(path), threads=1, max_num_seqs=2, max_num_batched_tokens=64, max_logprobs=-1, **options) as llm:
        params = SamplingParams(max_tokens=1, prompt_logprobs=-1, detokenize=False)
        (output,) = llm.generate({"prompt_token_ids": list(ids)}, params, use_tqdm=False)
    return np.array([[position[i].logprob for i in range(mb.VOCAB)] for position in output.prompt_logprobs[1:]])


def test_v7268_rotary_divisors_of_a_llama_file_are_applied(put):
    tensors = mb.filled(mb.shapes())
    ones, divisors = np.ones(4, np.float32), np.array([1, 2, 8, 32], np.float32)
    files = [put(mb.gguf(mb.metadata(), tensors), "plain.gguf")]
    for name, values in (("ones", ones), ("divided", divisors)):
        more = tensors | {"rope_freqs.weight": ("f32", (4,), values.tobytes())}
        files.append(put(mb.gguf(mb.metadata(), more), f"{name}.gguf"))
    plain, with_ones, divided = map(scores_of, files)
    np.testing.assert_array_equal(with_ones, plain)
    assert np.abs(divided - plain).max() > 1e-3


@pytest.mark.parametrize(("arch", "theta"), [("qwen2", 1e6), ("qwen3", 1e6), ("llama", 1e4)])
def test_o2379_a_missing_rotary_base_is_the_architectures_and_is_told(put, caplog, arch, theta):
    assert rope_theta(opened(put, arch, drop=["rope.freq_base"])) == theta
    assert f"{arch}.rope.freq_base is missing; {theta} is taken" in caplog.text
    caplog.clear()
    assert rope_theta(opened(put, arch, rope__freq_base=5e5)) == 5e5
    assert not caplog.records


@pytest.mark.parametrize("name", ["m.gguf.part1of2", "m.Q4_K.gguf-split-a", "m.gguf.part-00", "m.GGUF.part2"])
def test_oobabooga6080_a_piece_of_a_cut_up_file_says_to_join_the_pieces(put, name):
    whole = mb.gguf(mb.metadata(), mb.filled(mb.shapes()))
    with pytest.raises(ModelNotFound, match=r"(?i)one piece of a file.*`cat m\.\S*gguf\S*\* > m\.\S*gguf`") as caught:
        resolve(str(put(whole[: len(whole) // 2], name)))
    assert name in str(caught.value)


def test_oobabooga6080_a_piece_under_a_files_name_is_too_short_for_its_tensors(put):
    whole = mb.gguf(mb.metadata(), mb.filled(mb.shapes()))
    with pytest.raises(ModelFileError, match=r"takes bytes \d+ to \d+ and the file has \d+; .*join it"):
        open_checkpoint(put(whole[: len(whole) // 2]))


def q8_0(values):
    """Quantise by the book: groups of 32, a float16 scale, whole numbers."""
    groups = values.reshape(-1, 32)
    scales = (np.abs(groups).max(1) / 127).astype(np.float16)
    whole = np.round(groups / scales[:, None].astype(np.float32)).astype(np.int8)
    raw = b"".join(s.tobytes() + w.tobytes() for s, w in zip(scales, whole, strict=True))
    return raw, (whole * scales[:, None].astype(np.float32)).reshape(values.shape)


def test_v37220_a_gemma_file_scores_as_the_folder_it_was_made_of(put, tmp_path):
    """Norms hold their one, the embedding is quantised, the head is tied to it, keys are left to their defaults."""
    tensors = mb.filled(mb.shapes("gemma3"))
    embedding = np.frombuffer(tensors["token_embd.weight"][2], np.float32).reshape(mb.VOCAB, mb.WIDTH)
    raw, rounded = q8_0(embedding)
    tensors["token_embd.weight"] = ("q8_0", (mb.VOCAB, mb.WIDTH), raw)
    path = put(mb.gguf(mb.metadata("gemma3", rope__freq_base=1e6), tensors))
    weights = {}
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.norm_weights_include_one
        config = checkpoint.config
        for name, tensor in checkpoint.tensors.items():
            values = tensor.float32().reshape(tensor.shape)
            weights[name] = values - 1 if "norm" in name else values
    np.testing.assert_array_equal(weights["model.embed_tokens.weight"], rounded)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    stored = {name: ("F32", values.shape, values.astype("<f4").tobytes()) for name, values in weights.items()}
    (folder / "model.safetensors").write_bytes(mb.safetensors(stored))
    np.testing.assert_allclose(scores_of(path), scores_of(folder), atol=2e-4)


def test_v37220_a_gemma_files_ends_are_all_known(put):
    metadata = mb.metadata("gemma3") | {"tokenizer.ggml.eot_token_id": 7}
    with open_checkpoint(put(mb.gguf(metadata, mb.filled(mb.shapes("gemma3"))), "eot.gguf")) as checkpoint:
        assert checkpoint.generation_config["eos_token_id"] == [2, 7]


def test_mobius458_yarn_without_a_factor_is_one_and_is_told(put, caplog):
    rope = opened(put, "qwen2", rope__scaling__type="yarn").config["rope_parameters"]
    assert (rope["rope_type"], rope["factor"]) == ("yarn", 1.0)
    assert "qwen2.rope.scaling.factor is missing; 1.0 is taken" in caplog.text
    sizes = {"head_dim": mb.HEAD_DIM, "max_position": 128, "default_theta": 1e4}
    scaled, plain = (parse_rope(params, **sizes).table(128) for params in (rope, {"rope_theta": rope["rope_theta"]}))
    np.testing.assert_array_equal(scaled.inv_freq, plain.inv_freq)
    assert scaled.magnitude == 1.0


def test_mobius458_sliding_layers_of_gemma_have_their_own_base_and_pattern(put):
    config = opened(put, "gemma3", rope__freq_base=1e6, block_count=2).config
    assert config["rope_parameters"]["sliding_attention"]["rope_theta"] == 1e4
    assert config["rope_parameters"]["full_attention"]["rope_theta"] == 1e6
    own = opened(put, "gemma3", rope__freq_base=1e6, rope__freq_base_swa=5e4).config
    assert own["rope_parameters"]["sliding_attention"]["rope_theta"] == 5e4
    assert config["layer_types"] == ["sliding_attention"] * 2
