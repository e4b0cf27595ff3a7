"""A tiny DeepSeek through `LLM`: text, pools, prefix hits, preemption, and what is refused."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tiercel import LLM, SamplingParams
from tiercel.base.errors import ConfigError, ModelFileError
from tiercel.testing.tiny_model import LATENT_CONFIG, write_tiny_model

SMALL = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
PROMPTS = ["a", "the quick brown fox", "of " * 30, "latent"]
PAGE_BYTES = 16 * 2 * (32 + 8) * 2  # tokens, layers, columns, bytes of a half


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "latent", config=LATENT_CONFIG)


def generated(llm, prompts):
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [(o.outputs[0].token_ids, o.outputs[0].cumulative_logprob) for o in outputs]


@pytest.mark.parametrize("options", [{}, {"quantization": "q8_0"}, {"kv_cache_dtype": "float32"}])
def test_requests_together_get_what_each_gets_alone(folder, options):
    with LLM(str(folder), threads=1, **SMALL, **options) as llm:
        alone = [generated(llm, [prompt])[0] for prompt in PROMPTS]
        assert generated(llm, PROMPTS) == alone  # from the prefix cache
        llm.reset_prefix_cache()
        assert generated(llm, PROMPTS) == alone
    with LLM(str(folder), threads=2, max_num_seqs=2, max_num_batched_tokens=7, **options) as other:
        assert generated(other, PROMPTS) == alone


def test_requests_that_are_preempted_get_the_same(folder):
    prompts = [f"{i} " * 40 for i in range(3)]
    with LLM(str(folder), threads=1, **SMALL) as llm:
        alone = [generated(llm, [prompt])[0] for prompt in prompts]
    small = {"max_model_len": 112, "kv_cache_memory_bytes": 10 * PAGE_BYTES, "enable_prefix_caching": False}
    with LLM(str(folder), threads=1, **SMALL, **small) as llm:
        assert generated(llm, prompts) == alone


def test_a_pool_of_bytes_is_refused_before_anything_is_packed(folder):
    with pytest.raises(ConfigError, match=r"kv_cache_dtype: got int8; DeepseekV3ForCausalLM keeps latent rows"):
        LLM(str(folder), threads=1, kv_cache_dtype="int8")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.self_attn.kv_b_proj.weight", (120, 32)),
        ("model.layers.1.self_attn.kv_a_proj_with_mqa.weight", (48, 64)),
        ("model.layers.1.mlp.gate.e_score_correction_bias", (5,)),
        ("model.layers.1.mlp.shared_experts.up_proj.weight", (64, 64)),
    ],
)
def test_a_tensor_of_another_shape_is_refused_with_both(tmp_path, name, shape):
    write_tiny_model(tmp_path, config=LATENT_CONFIG)
    weights = load_file(tmp_path / "model.safetensors")
    needed = ", ".join(map(str, weights[name].shape))
    weights[name] = np.zeros(shape, np.float32)
    save_file(weights, str(tmp_path / "model.safetensors"))
    with pytest.raises(ModelFileError) as refused:
        LLM(str(tmp_path), threads=1)
    assert f"{name} has shape [{', '.join(map(str, shape))}]; [{needed}] is needed" in str(refused.value)


def test_layers_that_draft_tokens_are_left_unread(folder, tmp_path):
    write_tiny_model(tmp_path, config={**LATENT_CONFIG, "num_nextn_predict_layers": 1})
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.2.eh_proj.weight"] = np.zeros((64, 128), np.float32)
    save_file(weights, str(tmp_path / "model.safetensors"))
    with LLM(str(tmp_path), threads=1, **SMALL) as llm, LLM(str(folder), threads=1, **SMALL) as plain:
        assert generated(llm, PROMPTS[:2]) == generated(plain, PROMPTS[:2])
