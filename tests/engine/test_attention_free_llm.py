"""A tiny Mamba2, which keeps no keys and values, through `LLM` and the server: nothing asks for pages."""

import json
from itertools import count

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tiercel import LLM, SamplingParams
from tiercel.api.http.app import make_app
from tiercel.api.http.facade import EngineFacade
from tiercel.api.http.settings import ServerSettings
from tiercel.base.errors import ModelFileError, OutOfPages, PromptTooLong, UnsupportedModel
from tiercel.boot.summary import describe
from tiercel.models.registry import build_model
from tiercel.testing.tiny_model import ATTENTION_FREE_CONFIG, CONFIG, write_tiny_model

SMALL = {"threads": 2, "max_num_seqs": 3, "max_num_batched_tokens": 48}
PROMPTS = [list(range(5 + i, 45 + 3 * i)) for i in range(7)]
SAMPLED = SamplingParams(temperature=0.9, seed=4, max_tokens=24, ignore_eos=True, logprobs=1)
RELEASED = {
    "architectures": ["Mamba2ForCausalLM"],
    "chunk_size": 256,
    "conv_kernel": 4,
    "expand": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 8192,
    "layer_norm_epsilon": 1e-05,
    "model_type": "mamba2",
    "n_groups": 8,
    "norm_before_gate": True,
    "num_heads": 128,
    "num_hidden_layers": 64,
    "rescale_prenorm_residual": False,
    "residual_in_fp32": True,
    "rms_norm": True,
    "state_size": 128,
    "tie_word_embeddings": False,
    "time_step_floor": 0.0001,
    "time_step_limit": [0.0, float("inf")],
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "time_step_rank": 256,
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 32768,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "mamba2", config=ATTENTION_FREE_CONFIG)


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


def test_more_requests_than_slots_get_what_each_gets_alone_without_a_page(folder, alone):
    """Slots are used again while steps that named their last owner are still under way."""
    with LLM(str(folder), **SMALL, enable_prefix_caching=False) as llm:
        for _ in range(2):
            assert answers(llm, PROMPTS) == alone
        llm.client.core._scheduler.check()
        snapshot = llm.client.snapshot
        assert (snapshot.n_pages, snapshot.kv_usage_frac, snapshot.n_total_preemptions) == (0, 0.0, 0)


def test_a_prompt_that_was_computed_is_found_again_and_its_answer_has_the_same_bits(folder, alone):
    """By pages that are counted and hold nothing: their keys are those of states that were kept."""
    with LLM(str(folder), **SMALL) as llm:
        assert llm.client.snapshot.n_pages == 3 * 16
        assert answers(llm, PROMPTS[-2:]) == alone[-2:]
        assert llm.client.snapshot.n_total_prefix_hits_tokens == 0
        assert answers(llm, PROMPTS[-2:]) == alone[-2:]
        assert llm.client.snapshot.n_total_prefix_hits_tokens > 0
        llm.client.core._scheduler.check()


@pytest.mark.parametrize("options", [{"quantization": "q8_0"}, {"kv_cache_dtype": "int8"}, {"dtype": "float32"}])
def test_a_batch_changes_no_token_under_other_options(folder, options):
    with LLM(str(folder), **SMALL, **options) as llm:
        apart = [answers(llm, [prompt])[0] for prompt in PROMPTS[:3]]
        assert answers(llm, PROMPTS[:3]) == apart


@pytest.mark.parametrize("caches", [False, True])
def test_preempted_requests_get_what_each_gets_alone(folder, alone, caches):
    """No page is ever short here, so the test preempts: a failed step's successors are computed again so, too."""
    with LLM(str(folder), **SMALL, enable_prefix_caching=caches) as llm:
        scheduler, numbers = llm.client.core._scheduler, count()
        plan = scheduler.plan

        def preempt_and_plan(now_s, **options):
            running = list(scheduler.running)
            if next(numbers) % 6 == 5 and running and scheduler.n_preemptions < 8:
                scheduler._preempt(running[-1])
            return plan(now_s, **options)

        scheduler.plan = preempt_and_plan
        assert answers(llm, PROMPTS) == alone
        assert llm.client.snapshot.n_total_preemptions == 8


def test_start_and_show_say_that_there_is_no_pool(folder):
    with LLM(str(folder), **SMALL) as llm:
        line = llm.engine.plan.capacity.describe()
    # Two layers of 8 states of 16 by 16 and of 3 inputs of 192 channels, in float32.
    assert line == (
        "KV pool: none, as the model keeps no keys and values; 3 requests of 256 tokens fit at once; recurrent state: "
        "0.02 MiB a sequence, 0 MiB for 3; 12 snapshots of it (0 MiB), in prompts every 1,024 tokens"
    )
    summary = dict(describe(str(folder), program=True, explain=True)["summary"])
    assert "none" in summary["here"]


def test_a_context_is_as_long_as_the_model_says_whatever_memory_there_is(folder):
    with LLM(str(folder), **SMALL, kv_cache_memory_bytes=1) as llm:
        ask = SamplingParams(max_tokens=6, ignore_eos=True)
        (output,) = llm.generate({"prompt_token_ids": [1] * 250}, ask, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 6
        with pytest.raises(PromptTooLong, match="at most 255 fit"):
            llm.generate({"prompt_token_ids": [1] * 256}, ask, use_tqdm=False)


@pytest.mark.anyio
async def test_the_server_answers_and_its_metrics_know_no_pages(folder):
    with LLM(str(folder), **SMALL) as llm:
        facade = EngineFacade(client=llm.client, tokenizer=llm.engine.tokenizer, fingerprint="f")
        app = make_app(facade, ServerSettings(served_names=("tiny",)))
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            ask = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            answer = (await client.post("/v1/completions", json=ask)).json()
            assert answer["usage"]["completion_tokens"] == 8
            metrics = (await client.get("/metrics")).text
            usage = next(line for line in metrics.splitlines() if line.startswith("vllm:kv_cache_usage_perc{"))
            assert usage.endswith(" 0.0")
        app.service.close()


def test_states_that_memory_cannot_hold_are_refused(folder):
    with pytest.raises(OutOfPages, match=r"recurrent state: .* lower max_num_seqs"):
        LLM(str(folder), **SMALL | {"max_num_seqs": 1 << 28, "max_num_batched_tokens": 1 << 28})


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("backbone.layers.0.mixer.in_proj.weight", (320, 64)),
        ("backbone.layers.1.mixer.conv1d.weight", (192, 1, 3)),
        ("backbone.layers.1.mixer.A_log", (4,)),
    ],
)
def test_a_tensor_of_another_shape_is_refused_with_both(tmp_path, name, shape):
    write_tiny_model(tmp_path, config=ATTENTION_FREE_CONFIG)
    weights = load_file(tmp_path / "model.safetensors")
    needed = ", ".join(map(str, weights[name].shape))
    weights[name] = np.zeros(shape, np.float32)
    save_file(weights, str(tmp_path / "model.safetensors"))
    with pytest.raises(ModelFileError) as refused:
        LLM(str(tmp_path), threads=1)
    assert f"{name} has shape [{', '.join(map(str, shape))}]; [{needed}] is needed" in str(refused.value)


def test_a_released_config_is_read_with_its_infinity(tmp_path, folder):
    info = build_model(RELEASED).info
    assert info.n_parameters == 7_285_403_648
    assert (info.kv_layers, info.kv_bytes_per_token(), len(info.state_layers)) == ((), 0, 64)
    assert info.state_bytes == 64 * (4 * 128 * 64 * 128 + 4 * 3 * 10_240)
    config = json.loads((folder / "config.json").read_text()) | {"time_step_limit": [0.0, float("inf")]}
    write_tiny_model(tmp_path, config=config)
    assert "Infinity" in (tmp_path / "config.json").read_text()
    assert describe(str(tmp_path))["summary"][0] == ("architecture", "Mamba2ForCausalLM")


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (
            {"num_heads": 9},
            ModelFileError,
            "num_heads is 9; 128, which is expand 2 times hidden_size 64, over head_dim 16",
        ),
        ({"n_groups": 3}, ModelFileError, "n_groups is 3; a divisor of num_heads 8"),
        ({"intermediate_size": 96}, ModelFileError, "intermediate_size is 96; 128 is needed"),
        ({"use_bias": True}, UnsupportedModel, "use_bias is True"),
        ({"rms_norm": False}, UnsupportedModel, "rms_norm is False"),
        ({"hidden_act": "gelu"}, UnsupportedModel, "hidden_act is 'gelu'"),
        ({"time_step_limit": [0.5, 0.1]}, ModelFileError, "time_step_limit"),
        ({"time_step_limit": [-1.0, 1.0]}, ModelFileError, "time_step_limit"),
        ({"time_step_limit": 3}, ModelFileError, "time_step_limit"),
        ({"state_size": 0}, ModelFileError, "state_size is 0"),
        ({"conv_kernel": "4"}, ModelFileError, "conv_kernel is '4'"),
        ({"attention_layers": [1]}, UnsupportedModel, "attention_layers"),
    ],
)
def test_a_config_that_makes_no_sense_or_asks_for_more_is_refused(change, error, says):
    with pytest.raises(error, match=says.replace("(", r"\(").replace("[", r"\[")):
        build_model({**CONFIG, **ATTENTION_FREE_CONFIG, **change})
