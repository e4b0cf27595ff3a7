"""Taps: the residual streams that drafters read, against models cut off after the tapped layer."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tiny_latent_drafters import tapped

from tiercel.base.errors import UnsupportedModel
from tiercel.models.registry import build_model
from tiercel.ops import reference as ref
from tiercel.ops.passes import lower_and_fuse
from tiercel.quant.formats import Format
from tiercel.runner.reference import Chunk, ReferenceExecutor
from tiercel.testing.fill import tiny_checkpoint
from tiercel.testing.native import float_tensors, native_logits, native_runner

FIXTURES = Path(__file__).parent / "fixtures"
MODELS = [
    *("llama_rope_llama3_tied", "qwen2_yarn_window", "qwen3", "gemma3_pattern_3_softcap", "qwen3_moe", "gpt_oss"),
    *("smollm3_nope", "deepseek_v3_experts", "qwen3_5", "qwen3_5_moe", "qwen3_next", "lfm2", "kimi_linear"),
    *("ling_clamped", "mamba2"),
]
IDS = np.random.default_rng(1).integers(0, 128, 40).tolist()


def load(name):
    config = json.loads((FIXTURES / f"{name}.json").read_text())["config"]
    return config, build_model(config)


def tensors_of(weights, format=Format.F32):
    def planned(w):
        fits = w.ndim == 2 and w.shape[1] % 32 == 0
        return SimpleNamespace(shape=w.shape, format=format if fits else Format.F32)

    return {name: planned(w) for name, w in weights.items()}


def cut_after(config, n):
    """The config of the model's first n layers."""
    whole = config["num_hidden_layers"]
    lists = {k: v[:n] for k, v in config.items() if isinstance(v, list) and len(v) == whole and k != "architectures"}
    return {**config, **lists, "num_hidden_layers": n}


def hidden_of(program, weights):
    executor = ReferenceExecutor(lower_and_fuse(program), weights, max_tokens=len(IDS))
    executor.step([Chunk(0, IDS[:7])])
    first = executor.last_hidden
    executor.step([Chunk(0, IDS[7:])])
    return np.concatenate([first, executor.last_hidden])


@pytest.mark.parametrize("name", MODELS)
def test_a_tap_is_the_residual_stream_after_its_layer(name):
    """Normed, it is what the model cut off behind that layer hands to its head."""
    config, model = load(name)
    weights = tiny_checkpoint(config)
    n_layers, width = config["num_hidden_layers"], model.info.hidden_size
    taps = tuple(range(-1, n_layers - 1))
    rows = hidden_of(model.record(tensors_of(weights), taps=taps), weights)
    parts = rows.reshape(len(IDS), n_layers + 1, width)
    norm = next(
        w for n, w in weights.items() if n.endswith(("model.norm.weight", "norm_f.weight", "embedding_norm.weight"))
    )
    eps = next(config[k] for k in ("rms_norm_eps", "layer_norm_epsilon", "norm_eps") if config.get(k))
    for i in taps[1:]:
        cut = build_model(cut_after(config, i + 1))
        expected = hidden_of(cut.record(tensors_of(weights), keeps_hidden=True), weights)
        got = ref.rms_norm(parts[:, i + 1], norm + (1 if model.norms_add_one else 0), eps)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    whole = hidden_of(model.record(tensors_of(weights), keeps_hidden=True), weights)
    np.testing.assert_array_equal(parts[:, -1], whole)
    table = weights[model.ends()[0]]
    scale = np.float32(model.config.hidden_size**0.5) if "gemma" in name else np.float32(1)
    np.testing.assert_array_equal(parts[:, 0], table[IDS] * scale)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("format", [Format.F32, Format.Q8_0], ids=str)
def test_taps_change_no_bit_of_the_logits_and_depend_on_no_chunks(name, format):
    config, model = load(name)
    weights = tiny_checkpoint(config)
    tensors = tensors_of(weights, format)
    taps = tuple(range(-1, config["num_hidden_layers"] - 1))
    made = [native_runner(model.record(tensors, taps=t), float_tensors(weights), n_threads=1) for t in ((), taps)]
    try:
        plain, tapped = made
        expected = native_logits(plain, IDS, [len(IDS)])
        assert native_logits(tapped, IDS, [len(IDS)]).tobytes() == expected.tobytes()
        whole = tapped.last_hidden(len(IDS))
        assert native_logits(tapped, IDS, [1, 22, 17]).tobytes() == expected.tobytes()
        assert tapped.last_hidden(17).tobytes() == whole[-17:].tobytes()
    finally:
        for runner in made:
            runner.close()


@pytest.mark.parametrize("taps", [(2,), (-2,), (0, 0), (1, 7)], ids=str)
def test_a_tap_that_is_no_inner_layer_is_refused(taps):
    config, model = load("qwen3")
    with pytest.raises(UnsupportedModel, match="tap"):
        model.record(tensors_of(tiny_checkpoint(config)), taps=taps)


def banked():
    config = {"architectures": ["KimiLinearForCausalLM"]}
    config |= json.loads((FIXTURES.parent / "kimi_k3.json").read_text())["config"]
    return config, build_model(config)


def mixed_after(config, weights, n, norm, proj):
    """What the first n layers' bank and running row mix to by these weights, by the model cut off there."""
    lists = {
        k: [i for i in v if i <= n] if k.endswith("layers") else v for k, v in config["linear_attn_config"].items()
    }
    cut = build_model(config | {"num_hidden_layers": n, "linear_attn_config": lists})
    weights = weights | {"model.output_attn_res_norm.weight": norm, "model.output_attn_res_proj.weight": proj}
    return hidden_of(cut.record(tensors_of(weights), keeps_hidden=True), weights)


def test_a_tap_of_a_model_with_a_bank_is_the_running_row_or_what_the_next_layer_mixes():
    config, model = banked()
    weights, every, n_layers = tiny_checkpoint(config), config["attn_res_block_size"], config["num_hidden_layers"]
    taps, width = tuple(range(-1, n_layers - 1)), config["hidden_size"]
    rows = {stream: tapped(model, weights, taps, stream, IDS) for stream in ("prefix", "attn_res")}
    running, mixed = (x.reshape(len(IDS), n_layers, width) for x in rows.values())
    np.testing.assert_array_equal(running[:, 0], weights["model.embed_tokens.weight"][IDS])
    np.testing.assert_array_equal(mixed[:, 0], running[:, 0])
    even = np.zeros((1, width), np.float32)
    for n in range(1, n_layers):
        names = (f"model.layers.{n}.self_attention_res_{part}.weight" for part in ("norm", "proj"))
        expected = mixed_after(config, weights, n, *(weights[name] for name in names))
        np.testing.assert_allclose(mixed[:, n], expected, rtol=1e-4, atol=1e-5)
        # Weighed alike, the mixture is the mean of the bank's rows, which are running rows too, and the last one.
        bank = [running[:, i] for i in range(0, n, every)]
        mean = mixed_after(config, weights, n, np.ones(width, np.float32), even)
        np.testing.assert_allclose(running[:, n], (len(bank) + 1) * mean - sum(bank), rtol=1e-4, atol=1e-4)


def test_a_model_without_one_stream_refuses_taps_that_do_not_say_which_by_name():
    _, model = banked()
    with pytest.raises(UnsupportedModel, match=f"{model.info.architecture} has no residual stream"):
        model.check_taps([0])
    model.check_taps([])
    model.check_taps([-1, 4], "prefix")
    with pytest.raises(UnsupportedModel, match="tap 5"):
        model.check_taps([5], "attn_res")
    with pytest.raises(UnsupportedModel, match="no attn_res stream"):
        load("qwen3")[1].check_taps([0], "attn_res")
