"""Each newer architecture, tiny, through `LLM`, the server and preemption: a request gets what it gets alone."""

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tiercel import LLM, SamplingParams
from tiercel.api.http.app import make_app
from tiercel.api.http.facade import EngineFacade
from tiercel.api.http.settings import ServerSettings
from tiercel.base.errors import ModelFileError
from tiercel.testing.tiny_model import write_tiny_model

GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "intermediate_size": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 24,
}
LING = {
    "architectures": ["BailingMoeV3ForCausalLM"],
    "model_type": "bailing_hybrid",
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "layer_group_size": 2,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "expert_swiglu_limit_list": [0, 0, 0, 0.2],
    "share_expert_swiglu_limit_list": [0, 0, 0.1, 0],
}
LFM2 = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "block_multiple_of": 32,
    "rms_norm_eps": None,
}
MODELS = {"gpt-oss": GPT_OSS, "ling": LING, "lfm2": LFM2}
SMALL = {"threads": 2, "max_num_seqs": 3, "max_num_batched_tokens": 48, "max_model_len": 128}
PROMPTS = [list(range(5 + i, 45 + 3 * i)) for i in range(6)]
SAMPLED = SamplingParams(temperature=0.9, seed=4, max_tokens=24, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module", params=MODELS, ids=list(MODELS))
def folder(request, tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / request.param, config=MODELS[request.param])


def answers(llm, prompts):
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], SAMPLED, use_tqdm=False)
    return [
        (list(o.outputs[0].token_ids), [next(iter(e.values())).logprob for e in o.outputs[0].logprobs]) for o in outputs
    ]


@pytest.fixture(scope="module")
def alone(folder):
    """Each prompt in an engine of one slot, one after the other."""
    with LLM(str(folder), **SMALL | {"max_num_seqs": 1, "threads": 1, "async_scheduling": False}) as llm:
        return [answers(llm, [prompt])[0] for prompt in PROMPTS]


@pytest.mark.parametrize("options", [{}, {"quantization": "q8_0"}], ids=["float", "q8_0"])
def test_more_requests_than_slots_get_what_each_gets_alone(folder, alone, options):
    with LLM(str(folder), **SMALL, **options) as llm:
        expected = alone if not options else [answers(llm, [prompt])[0] for prompt in PROMPTS]
        for _ in range(2):  # the second time from the prefix cache, where there is one
            assert answers(llm, PROMPTS) == expected


def test_preempted_requests_get_what_each_gets_alone(folder, alone):
    with LLM(str(folder), **SMALL) as llm:
        memory = SMALL["max_model_len"] * llm.engine.plan.info.kv_bytes_per_token()  # one of full length
    with LLM(str(folder), **SMALL, kv_cache_memory_bytes=memory) as llm:
        assert answers(llm, PROMPTS) == alone
        assert llm.client.snapshot.n_total_preemptions > 0


@pytest.mark.anyio
async def test_the_server_says_the_same(folder, alone):
    with LLM(str(folder), **SMALL) as llm:
        facade = EngineFacade(client=llm.client, tokenizer=llm.engine.tokenizer, fingerprint="f")
        app = make_app(facade, ServerSettings(served_names=("tiny",)))
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            ask = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 24, "temperature": 0.9, "seed": 4}
            answer = await client.post("/v1/completions", json=ask | {"ignore_eos": True, "logprobs": 1})
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["logprobs"]["token_logprobs"] == alone[0][1]
        app.service.close()


# Ling: what files may have otherwise, and bad input.


@pytest.fixture(scope="module")
def ling(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "ling", config=LING)


def rewritten(source, folder, change, config=LING):
    """Write the model anew, its tensors changed."""
    write_tiny_model(folder, config=config)
    weights = load_file(source / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    return folder


def test_decays_may_have_axes_of_one_and_a_layer_that_drafts_is_left_unread(ling, tmp_path):
    def change(weights):
        for name in [name for name in weights if name.endswith(".A_log")]:
            weights[name] = weights[name].reshape(1, 1, 4, 1)
        weights["model.layers.4.eh_proj.weight"] = np.zeros((64, 128), np.float32)

    folder = rewritten(ling, tmp_path, change, LING | {"num_nextn_predict_layers": 1})
    with LLM(str(ling), **SMALL) as plain, LLM(str(folder), **SMALL) as other:
        assert answers(other, PROMPTS[:2]) == answers(plain, PROMPTS[:2])


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.attention.A_log", (5,)),
        ("model.layers.0.attention.f_proj.weight", (32, 64)),
        ("model.layers.0.attention.k_conv1d.weight", (64, 1, 3)),
        ("model.layers.1.attention.g_proj.weight", (64, 64)),
        ("model.layers.1.attention.dense.weight", (64, 32)),
        ("model.layers.1.mlp.gate.expert_bias", (5,)),
        ("model.layers.3.mlp.experts.2.up_proj.weight", (48, 64)),
        ("model.layers.3.mlp.shared_experts.down_proj.weight", (64, 64)),
    ],
)
def test_a_tensor_of_another_shape_is_refused_with_both(ling, tmp_path, name, shape):
    needed = []

    def change(weights):
        needed.append(", ".join(map(str, weights[name].shape)))
        weights[name] = np.zeros(shape, np.float32)

    folder = rewritten(ling, tmp_path, change)
    with pytest.raises(ModelFileError) as refused:
        LLM(str(folder), **SMALL)
    assert f"{name} has shape [{', '.join(map(str, shape))}]; [{needed[0]}] is needed" in str(refused.value)


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.experts.3.gate_proj.weight", "model.layers.2.attention.q_conv1d.weight"]
)
def test_a_tensor_that_is_missing_is_refused_by_its_name(ling, tmp_path, name):
    folder = rewritten(ling, tmp_path, lambda weights: weights.pop(name))
    with pytest.raises(ModelFileError, match=f"{name} is missing"):
        LLM(str(folder), **SMALL)


def test_experts_past_the_configs_number_are_refused_by_name(ling, tmp_path):
    name = "model.layers.1.mlp.experts.4.gate_proj.weight"
    folder = rewritten(ling, tmp_path, lambda weights: weights.update({name: np.zeros((32, 64), np.float32)}))
    with pytest.raises(ModelFileError, match=f"{name} of shape .* is read by no op"):
        LLM(str(folder), **SMALL)


# LFM2.


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.conv.in_proj.weight", (128, 64)),
        ("model.layers.0.conv.conv.weight", (64, 1, 4)),
        ("model.layers.1.self_attn.k_layernorm.weight", (64,)),
        ("model.layers.3.feed_forward.w2.weight", (64, 96)),
        ("model.embedding_norm.weight", (32,)),
    ],
)
def test_lfm2_refuses_a_tensor_of_another_shape_with_both(tmp_path, name, shape):
    write_tiny_model(tmp_path, config=LFM2)
    weights = load_file(tmp_path / "model.safetensors")
    needed = ", ".join(map(str, weights[name].shape))
    weights[name] = np.zeros(shape, np.float32)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError) as refused:
        LLM(str(tmp_path), **SMALL)
    assert f"{name} has shape [{', '.join(map(str, shape))}]; [{needed}] is needed" in str(refused.value)
