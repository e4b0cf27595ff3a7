"""A tiny mixture of experts through `LLM`: text, formats, what is said of it, and a request that fails alone."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tiercel import LLM, SamplingParams
from tiercel.base.errors import ModelFileError, RequestFailed
from tiercel.testing.tiny_model import MIXTURE_CONFIG, write_tiny_model

SMALL = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0, ignore_eos=True)
PROMPTS = ["a", "the quick brown fox", "of " * 30, "mixture"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("models") / "mixture", config=MIXTURE_CONFIG)


def tokens_of(output):
    return output.outputs[0].token_ids, output.outputs[0].cumulative_logprob


def generated(llm, prompts):
    return [tokens_of(output) for output in llm.generate(prompts, PARAMS, use_tqdm=False)]


@pytest.mark.parametrize(
    "options", [{}, {"quantization": "q8_0"}, {"quantization": "q4_0"}, {"kv_cache_dtype": "int8"}]
)
def test_requests_together_get_what_each_gets_alone(folder, options):
    with LLM(str(folder), threads=1, **SMALL, **options) as llm:
        alone = [generated(llm, [prompt])[0] for prompt in PROMPTS]
        llm.reset_prefix_cache()
        assert generated(llm, PROMPTS) == alone
    with LLM(str(folder), threads=2, max_num_seqs=2, max_num_batched_tokens=7, **options) as other:
        assert generated(other, PROMPTS) == alone


def test_stacked_experts_give_the_text_of_separate_ones(folder, tmp_path):
    write_tiny_model(tmp_path, config=MIXTURE_CONFIG)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    prefix = "model.layers.1.mlp.experts"
    gate, up, down = ([weights.pop(f"{prefix}.{e}.{p}_proj.weight") for e in range(4)] for p in ("gate", "up", "down"))
    weights[f"{prefix}.gate_up_proj"] = np.stack([np.concatenate(pair) for pair in zip(gate, up, strict=True)])
    weights[f"{prefix}.down_proj"] = np.stack(down)
    save_file(weights, str(path))
    with LLM(str(folder), threads=1, **SMALL) as separate, LLM(str(tmp_path), threads=1, **SMALL) as stacked:
        assert generated(stacked, PROMPTS) == generated(separate, PROMPTS)


def test_a_nan_among_a_routers_scores_fails_its_request_and_no_other(tmp_path):
    """The others of the batch get the tokens and probabilities that they get where no router overflows."""
    write_tiny_model(tmp_path, config=MIXTURE_CONFIG)
    weights = load_file(tmp_path / "model.safetensors")
    # Column 0 is what no token has but "!", whose logits of the router then overflow: inf - inf in its softmax.
    weights["model.embed_tokens.weight"][:, 0] = 0
    weights["model.embed_tokens.weight"][ord("!"), 0] = 100
    for writes in ("layers.0.self_attn.o_proj", "layers.0.mlp.down_proj", "layers.1.self_attn.o_proj"):
        weights[f"model.{writes}.weight"][0] = 0
    save_file(weights, str(tmp_path / "model.safetensors"))
    with LLM(str(tmp_path), threads=1, **SMALL) as sound:
        before = generated(sound, ["oh!"])
        expected = generated(sound, ["fine", "also fine"])
    assert np.isfinite(before[0][1])
    weights["model.layers.1.mlp.gate.weight"][:, 0] = 3e38
    save_file(weights, str(tmp_path / "model.safetensors"))
    with LLM(str(tmp_path), threads=1, **SMALL) as llm:
        handles = [llm.client.submit(text, PARAMS) for text in ("fine", "oh!", "also fine")]
        with pytest.raises(RequestFailed, match="NaN"):
            list(handles[1])
        *_, first = handles[0]
        *_, last = handles[2]
        assert [tokens_of(output) for output in (first, last)] == expected
        assert generated(llm, ["fine"]) == expected[:1]


def test_a_model_that_lacks_an_expert_is_refused_by_its_name(tmp_path):
    write_tiny_model(tmp_path, config=MIXTURE_CONFIG)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.experts.2.down_proj.weight"]
    save_file(weights, str(tmp_path / "model.safetensors"))
    with pytest.raises(ModelFileError, match=r"experts\.2\.down_proj\.weight is missing; \[64, 32\] is needed"):
        LLM(str(tmp_path), threads=1, **SMALL)
