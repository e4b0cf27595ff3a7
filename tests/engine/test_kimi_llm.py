"""Kimi's tiny models, states and latent rows in one, through `LLM` and the server: slots, preemption, refusals."""

import json

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

SMALL = {"threads": 2, "max_num_seqs": 3, "max_num_batched_tokens": 48, "max_model_len": 128}
LINEAR = {"num_heads": 3, "head_dim": 16, "short_conv_kernel_size": 4, "kda_layers": [1, 3], "full_attn_layers": [2, 4]}
KIMI_LINEAR = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "linear_attn_config": LINEAR,
    "q_lora_rank": None,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
}
KIMI_K3 = KIMI_LINEAR | {
    "linear_attn_config": LINEAR | {"gate_lower_bound": -5.0, "use_full_rank_gate": True},
    "q_lora_rank": 24,
    "mla_use_output_gate": True,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "routed_expert_hidden_size": 32,
    "latent_moe_use_norm": True,
    "attn_res_block_size": 3,
}
PAGE_BYTES = 16 * 2 * (24 + 8) * 2  # tokens, full layers, columns, bytes of a half
PROMPTS = [list(range(5 + i, 45 + 3 * i)) for i in range(7)]
SAMPLED = SamplingParams(temperature=0.9, seed=4, max_tokens=24, ignore_eos=True, logprobs=1)
MODELS = {"kimi_linear": KIMI_LINEAR, "kimi_k3": KIMI_K3}


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS)
def folder(request, tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "kimi", config=request.param)


def answers(llm, prompts):
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], SAMPLED, use_tqdm=False)
    return [
        (list(o.outputs[0].token_ids), [next(iter(e.values())).logprob for e in o.outputs[0].logprobs]) for o in outputs
    ]


@pytest.fixture(scope="module")
def alone(folder):
    """Each prompt in an engine of its own size, one after the other in one slot."""
    with LLM(str(folder), **SMALL | {"max_num_seqs": 1, "threads": 1, "async_scheduling": False}) as llm:
        return [answers(llm, [prompt])[0] for prompt in PROMPTS]


def test_more_requests_than_slots_get_what_each_gets_alone(folder, alone):
    with LLM(str(folder), **SMALL) as llm:
        for _ in range(2):
            assert answers(llm, PROMPTS) == alone


def test_preempted_requests_get_what_each_gets_alone(folder, alone):
    with LLM(str(folder), **SMALL, kv_cache_memory_bytes=11 * PAGE_BYTES) as llm:
        assert answers(llm, PROMPTS) == alone
        assert llm.client.snapshot.n_total_preemptions > 0


@pytest.mark.parametrize("quantization", ["q8_0", "q4_0"])
def test_quantised_requests_together_get_what_each_gets_alone(folder, quantization):
    with LLM(str(folder), **SMALL, quantization=quantization) as llm:
        alone = [answers(llm, [prompt])[0] for prompt in PROMPTS[:4]]
        assert answers(llm, PROMPTS[:4]) == alone


@pytest.mark.anyio
async def test_the_server_answers_and_refuses_images(folder):
    with LLM(str(folder), **SMALL) as llm:
        facade = EngineFacade(client=llm.client, tokenizer=llm.engine.tokenizer, fingerprint="f")
        app = make_app(facade, ServerSettings(served_names=("tiny",)))
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            ask = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            answer = (await client.post("/v1/completions", json=ask)).json()
            assert answer["usage"]["completion_tokens"] == 8
            image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
            ask = {"model": "tiny", "messages": [{"role": "user", "content": image}]}
            refused = await client.post("/v1/chat/completions", json=ask)
            assert refused.status_code == 400
            assert "image_url" in refused.json()["error"]["message"]
        app.service.close()


@pytest.mark.parametrize("shape", [(1, 1, 3, 1), (128,)], ids=str)
def test_decays_may_have_axes_of_one_or_others_of_no_use_behind_them(folder, alone, tmp_path, shape):
    weights = load_file(folder / "model.safetensors")
    for name, w in weights.items():
        if name.endswith(".A_log"):
            assert w.shape == (3,)
            weights[name] = np.concatenate([w, np.full(125, np.nan, np.float32)])[: np.prod(shape)].reshape(shape)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(weights, tmp_path / "model.safetensors")
    with LLM(str(tmp_path), **SMALL, skip_tokenizer_init=True) as llm:
        assert answers(llm, PROMPTS[:2]) == alone[:2]


def test_decays_of_another_number_of_heads_are_refused(folder, tmp_path):
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith(".A_log"))
    weights[name] = np.zeros(64, np.float32)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"A_log has shape \[64\]; \[3\] is needed"):
        LLM(str(tmp_path), **SMALL, skip_tokenizer_init=True)


def seeing(folder, to, more=None):
    """Write K3 as its checkpoints have it: a text part behind a prefix, beside vision weights."""
    weights = load_file(folder / "model.safetensors")
    renamed = {f"language_model.{name}": w for name, w in weights.items()}
    renamed["vision_tower.patch_embed.proj.weight"] = np.zeros((4, 3, 2, 2), np.float32)
    renamed["mm_projector.proj.0.weight"] = np.zeros((4, 4), np.float32)
    text = json.loads((folder / "config.json").read_text())
    outer = {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "text_config": text}
    outer |= {"vision_config": {"vt_num_hidden_layers": 2}, "media_placeholder_token_id": 9}
    (to / "config.json").write_text(json.dumps(outer))
    save_file(renamed | (more or {}), to / "model.safetensors")


def test_a_checkpoint_that_sees_answers_texts_as_its_text_part_does(folder, tmp_path, alone):
    seeing(folder, tmp_path)
    with LLM(str(tmp_path), **SMALL, skip_tokenizer_init=True) as llm:
        assert answers(llm, PROMPTS[:2]) == alone[:2]


def test_a_tensor_that_neither_texts_nor_images_need_is_refused(folder, tmp_path):
    seeing(folder, tmp_path, {"audio_tower.weight": np.zeros(3, np.float32)})
    with pytest.raises(ModelFileError, match=r"tensor audio_tower\.weight of shape \[3\] is read by no op"):
        LLM(str(tmp_path), **SMALL, skip_tokenizer_init=True)
