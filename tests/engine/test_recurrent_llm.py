"""A model with recurrent state through `LLM` and the server: slots, preemption, what start says and refuses."""

import json
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from time import sleep

import httpx
import pytest

from tiercel import LLM, SamplingParams
from tiercel.api.http.app import make_app
from tiercel.api.http.facade import EngineFacade
from tiercel.api.http.settings import ServerSettings
from tiercel.base.errors import OutOfPages
from tiercel.protocol.beams import BeamSearchParams
from tiercel.testing.tiny_model import write_tiny_model

SMALL = {"threads": 2, "max_num_seqs": 3, "max_num_batched_tokens": 48, "max_model_len": 128}
TEXT = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "rope_theta": None,
}
PROMPTS = [list(range(5 + i, 45 + 3 * i)) for i in range(7)]
SAMPLED = SamplingParams(temperature=0.9, seed=4, max_tokens=24, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "hybrid", config=TEXT)


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
    """Slots are used again while steps that named their last owner are still under way."""
    with LLM(str(folder), **SMALL) as llm:
        for _ in range(2):
            assert answers(llm, PROMPTS) == alone


def test_turns_of_a_chat_go_on_from_kept_states_and_get_what_they_get_without(folder):
    def turns(llm):
        prompt, found = PROMPTS[0], []
        for i in range(3):
            found += answers(llm, [prompt, prompt])  # the second time as a request that is sent again
            prompt = prompt + found[-1][0] + PROMPTS[i + 1][:3]
        return found, llm.client.snapshot

    small = SMALL | {"max_model_len": 256}
    with LLM(str(folder), **small) as kept, LLM(str(folder), **small, enable_prefix_caching=False) as plain:
        (got, now), (want, never) = turns(kept), turns(plain)
    assert got == want
    assert (never.n_total_prefix_hits_tokens, never.n_snapshots) == (0, 0)
    # Of each turn's two requests the second finds the prompt's last whole page; from the second turn on, so does the
    # first of the turn before. Prompts are 40, 67 and 94 tokens long.
    assert now.n_total_prefix_hits_tokens == 32 + (48 + 64) + (80 + 80)
    assert now.n_total_snapshots_hit == 5


def test_beams_go_on_from_kept_states_and_find_what_they_find_without(folder):
    params = BeamSearchParams(beam_width=3, max_tokens=24, ignore_eos=True)
    prompts = [{"prompt_token_ids": PROMPTS[0]}]
    with LLM(str(folder), **SMALL) as kept, LLM(str(folder), **SMALL, enable_prefix_caching=False) as plain:
        got, want = (
            [(one.tokens, one.cum_logprob) for one in llm.beam_search(prompts, params)[0].sequences]
            for llm in (kept, plain)
        )
        assert kept.client.snapshot.n_total_snapshots_hit > 0
    assert got == want


def test_preempted_requests_get_what_each_gets_alone(folder, alone):
    # One full layer of 2 heads of 32: 16 tokens in float16 are 4 KiB; 11 pages hold little more than one sequence.
    with LLM(str(folder), **SMALL, kv_cache_memory_bytes=11 * 4096) as llm, ThreadPoolExecutor(1) as thread:
        core, begins = llm.client.core, Event()
        core.call_soon(begins.wait)  # or a busy machine answers one before it asks the next
        asked = thread.submit(answers, llm, PROMPTS)
        while core._n_waiting < len(PROMPTS) and not asked.done():
            sleep(1e-3)
        begins.set()
        assert asked.result() == alone
        assert llm.client.snapshot.n_total_preemptions > 0


def test_a_checkpoint_that_sees_answers_texts_as_its_text_part_does(folder, tmp_path, alone):
    """Its vision weights lie there and are not read."""
    from safetensors.numpy import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    outer = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": config}
    renamed = {name.replace("model.", "model.language_model.", 1): w for name, w in weights.items()}
    renamed["model.visual.patch_embed.proj.weight"] = weights["model.norm.weight"]
    (tmp_path / "config.json").write_text(json.dumps(outer | {"vision_config": {"depth": 2}, "image_token_id": 9}))
    save_file(renamed, tmp_path / "model.safetensors")
    with LLM(str(tmp_path), **SMALL, skip_tokenizer_init=True) as llm:
        assert answers(llm, PROMPTS[:2]) == alone[:2]


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


def test_prefix_caching_that_is_asked_for_without_room_is_refused_with_the_reason(folder):
    with pytest.raises(OutOfPages, match=r"enable_prefix_caching: .* recurrent state .* raise kv_cache_memory_bytes"):
        LLM(str(folder), **SMALL, kv_cache_memory_bytes=9 * 4096, enable_prefix_caching=True)


def test_start_says_what_states_take_and_how_many_are_kept(folder):
    with LLM(str(folder), **SMALL) as llm:
        plan = llm.engine.plan
        assert plan.capacity.state_bytes == plan.info.state_bytes > 0
        assert "MiB for 3; 12 snapshots of it (0 MiB), in prompts every 512 tokens" in plan.capacity.describe()
        assert llm.client.core.config.enable_prefix_caching


@pytest.mark.parametrize("change", [{"enable_prefix_caching": False}, {"kv_cache_memory_bytes": 9 * 4096}])
def test_start_says_that_prompts_are_not_cached(folder, change):
    with LLM(str(folder), **SMALL | change) as llm:
        assert "MiB for 3; prefix caching is off, as no states are kept" in llm.engine.plan.capacity.describe()
        assert not llm.client.core.config.enable_prefix_caching


def test_states_that_memory_cannot_hold_are_refused(folder):
    with pytest.raises(OutOfPages, match=r"recurrent state: .* lower max_num_seqs"):
        LLM(str(folder), **SMALL | {"max_num_seqs": 1 << 26, "max_num_batched_tokens": 1 << 26})
