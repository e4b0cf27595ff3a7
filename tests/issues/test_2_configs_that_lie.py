"""Some values in a model's files were not refused: they ended the engine, the process, or were silently something else.

An end-of-sequence id of 2**31 killed the engine at its first request. A billion layers took all memory. A rope factor
of 0.001 or 1e308 ended in bare errors of Python and C++. Heads of 12 columns gave wrong logits without a word. A falsy
hidden_act was taken for the default, and an eps that float32 cannot hold became infinity.
"""

import json

import pytest

from tiercel import LLM, SamplingParams
from tiercel.base.errors import ModelFileError, UnsupportedModel
from tiercel.models.registry import build_model
from tiercel.testing.tiny_model import CONFIG, write_tiny_model

SMALL = {"threads": 1, "max_num_seqs": 2}


def changed(**config):
    return build_model({**CONFIG, **config})


@pytest.mark.parametrize("where", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("eos_id", [2**31, 10**30, 100_000])
def test_an_end_of_sequence_id_beyond_the_vocabulary_never_comes(tmp_path, where, eos_id):
    folder = write_tiny_model(tmp_path / "tiny")
    path = folder / where
    settings = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(settings | {"eos_token_id": [eos_id, 258]}))
    with LLM(str(folder), **SMALL) as llm:
        assert llm.client.eos_ids == {258}
        output = llm.generate("hello", SamplingParams(temperature=0.0, max_tokens=3, min_tokens=2), use_tqdm=False)[0]
        assert output.finished


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MistralForCausalLM", "SmolLM3ForCausalLM"])
def test_a_billion_layers_are_refused_before_anything_is_made_of_them(architecture):
    with pytest.raises(ModelFileError, match="num_hidden_layers is 1000000000; at most 1024 layers"):
        changed(architectures=[architecture], num_hidden_layers=10**9)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 1e308},
        {"rope_type": "linear", "factor": 1e-300},
        {"rope_type": "linear", "factor": 0.001},
        {"rope_type": "yarn", "factor": 1e300},
        {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1},
        {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 1}
        | dict.fromkeys(("short_factor", "long_factor"), [1.0] * 8),
    ],
    ids=str,
)
def test_a_rotation_that_has_no_sense_is_refused(rope):
    with pytest.raises(ModelFileError, match="config: rope_parameters: "):
        changed(rope_scaling=rope)


@pytest.mark.parametrize("given", [0, False, "", [], {}])
def test_an_activation_that_is_no_name_is_not_the_default(given):
    with pytest.raises(UnsupportedModel, match="hidden_act"):
        changed(hidden_act=given)


@pytest.mark.parametrize("given", [0, False, "", []])
def test_a_kind_of_rotation_that_is_no_name_is_not_the_default(given):
    with pytest.raises(UnsupportedModel, match="rope_type"):
        changed(rope_scaling={"rope_type": given})


def test_an_eps_that_float32_cannot_hold_is_refused():
    with pytest.raises(ModelFileError, match=r"rms_norm_eps is 1e\+60"):
        changed(rms_norm_eps=1e60)


@pytest.mark.parametrize("head_dim", [4, 10, 12, 30])
def test_heads_that_attention_would_read_wrongly_are_refused(tmp_path, head_dim):
    folder = write_tiny_model(tmp_path / "tiny", config={"head_dim": head_dim})
    with pytest.raises(UnsupportedModel, match=f"heads of {head_dim} columns; a multiple of 8 is needed"):
        LLM(str(folder), **SMALL)
