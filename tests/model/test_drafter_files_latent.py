"""Folders of DSpark drafters in Kimi K3's layout that are damaged or of another target: refused by what is at fault."""

from math import prod

import numpy as np
import pytest
import tiny_drafters
import tiny_latent_drafters as tiny
from tiny_latent_drafters import E, V, draft_config, draft_tensors, write_drafter

from tiercel.base.errors import ConfigError, ModelFileError, UnsupportedModel
from tiercel.models.drafters.checkpoint import open_drafter, read_drafter
from tiercel.models.drafters.config import in_one_form
from tiercel.models.registry import build_model
from tiercel.quant.formats import Format


def opened(folder, config, tensors, made=tiny.target):
    target, _, target_tensors = made()
    return open_drafter(write_drafter(folder, config, tensors), target, target_tensors)


FIELDS = {
    "hidden size": ({"hidden_size": 128}, "hidden_size is 128; 64"),
    "target hidden size": ({"target_hidden_size": 32}, "target_hidden_size is 32; 64"),
    "layers of the target": ({"target_num_hidden_layers": 93}, "target_num_hidden_layers is 93; this target's 6"),
    "vocabulary": ({"vocab_size": 130}, "vocab_size is 130; 128"),
    "draft vocabulary": ({"draft_vocab_size": 40}, "draft_vocab_size is 40; 128"),
    "a tap behind the last inner layer": ({"target_layer_ids": [0, 3, 5]}, "target_layer_ids.*tap 5"),
    "taps that are none": ({"target_layer_ids": [0, True, 2]}, "target_layer_ids is"),
    "no taps": ({"target_layer_ids": None}, "target_layer_ids is None"),
    "taps out of order": ({"target_layer_ids": [3, 0, 4]}, r"target_layer_ids is \[3, 0, 4\]; layers in ascending"),
    "a number of taps": ({"num_target_layers": 5}, "num_target_layers is 5; 3"),
    "stream": ({"aux_hidden_stream": "materialized"}, "aux_hidden_stream is 'materialized'"),
    "layout of pairs": ({"rope_interleave": False}, "rope_interleave is False"),
    "layout said our way": ({"rope_layout": "half_split"}, "rope_layout is 'half_split'"),
    "rotation": ({"rope_parameters": {"rope_type": "mrope"}}, "rope_type is 'mrope'"),
    "no rotation": ({"mla_use_nope": True}, "mla_use_nope is True"),
    "gate": ({"mla_use_output_gate": True}, "mla_use_output_gate is True"),
    "norms of heads": ({"mla_use_qk_norm": True}, "mla_use_qk_norm is True"),
    "a row for the anchor": ({"dspark_bonus_anchor": True}, "dspark_bonus_anchor is True"),
    "queries of one matrix": ({"q_lora_rank": None}, "q_lora_rank is missing"),
    "rank": ({"kv_lora_rank": 12}, "kv_lora_rank is 12"),
    "heads of keys": ({"num_key_value_heads": 1}, "num_key_value_heads is 1; num_attention_heads 4"),
    "biases": ({"attention_bias": True}, "attention_bias is True"),
    "experts": ({"n_routed_experts": 8}, "n_routed_experts is 8"),
    "mask": ({"mask_token_id": V}, "mask_token_id is 128"),
    "no mask": ({"mask_token_id": None}, "mask_token_id is None"),
    "head type": ({"markov_head_type": "deep"}, "markov_head_type is 'deep'"),
    "block": ({"block_size": 65}, "block_size is 65"),
    "block of masks": ({"block_size": 1, "sample_from_anchor": False}, "block_size is 1; 2 to"),
    "act": ({"hidden_act": "relu2"}, "hidden_act is 'relu2'"),
    "a field nobody knows": ({"context_gate": True}, "context_gate is True"),
    "V4's": ({"architectures": ["DeepseekV4DSparkModel"]}, "'DeepseekV4DSparkModel' is no drafter"),
    "Gemma's": ({"architectures": ["Gemma4DSparkModel"]}, "'Gemma4DSparkModel' is no drafter"),
    "GQA's architecture": ({"architectures": ["Qwen3DSparkModel"], "num_target_layers": 6}, "no residual stream"),
}


@pytest.mark.parametrize(("changes", "message"), FIELDS.values(), ids=FIELDS)
def test_a_field_of_another_target_is_refused_by_its_name(tmp_path, changes, message):
    with pytest.raises((ModelFileError, UnsupportedModel), match=message):
        opened(tmp_path, draft_config(**changes), draft_tensors())


def test_every_missing_and_every_unknown_tensor_is_named(tmp_path):
    config, tensors = draft_config(fc_norm=True), draft_tensors(tap_norms=True)
    for i, name in enumerate(tensors):
        left = {n: w for n, w in tensors.items() if n != name}
        if name in ("embed_tokens.weight", "confidence_head.proj.bias"):  # the target has the one, zero is the other
            opened(tmp_path / str(i), config, left)
            continue
        with pytest.raises(ModelFileError, match=name.replace(".", r"\.")):
            opened(tmp_path / str(i), config, left)
    for name in ("other.weight", "lm_head.weight", "mask_embedding", "layers.0.self_attn.g_proj.weight"):
        with pytest.raises(ModelFileError, match=rf"tensor {name} of shape \[3, 4\] is read by nothing"):
            opened(tmp_path / "more", config, tensors | {name: np.zeros((3, 4), np.float32)})


def test_norms_of_taps_that_no_field_speaks_of_are_refused(tmp_path):
    with pytest.raises(ModelFileError, match=r"fc_norm\.0\.weight.*is read by nothing"):
        opened(tmp_path, draft_config(), draft_tensors(tap_norms=True))


def test_a_confidence_is_read_where_it_is_flagged_and_must_be_there_then(tmp_path):
    silent = opened(tmp_path / "0", draft_config(enable_confidence_head=None), draft_tensors(confidence=False))
    assert "confidence" not in silent.model.head().weights
    assert "confidence" in opened(tmp_path / "1", draft_config(), draft_tensors()).model.head().weights
    with pytest.raises(ModelFileError, match=r"confidence_head\.proj\.weight is missing"):
        opened(tmp_path / "2", draft_config(), draft_tensors(confidence=False))
    with pytest.raises(ModelFileError, match=r"confidence_head\.proj.*is read by nothing"):
        opened(tmp_path / "3", draft_config(enable_confidence_head=False), draft_tensors())


def test_a_vocabulary_of_its_own_is_refused(tmp_path):
    swapped = np.zeros(V, np.int64)
    swapped[:2] = 1, -1
    tensors = draft_tensors() | {"d2t": swapped}
    with pytest.raises(ModelFileError, match="draft_vocab_size is 128; no tensor d2t"):
        opened(tmp_path, draft_config(), tensors)


def test_a_tensor_of_another_shape_is_named_with_both(tmp_path):
    tensors = draft_tensors()
    tensors["context_proj.weight"] = np.zeros((E, 5 * E), np.float32)
    with pytest.raises(ModelFileError, match=r"context_proj\.weight has shape \[64, 320\]; \[64, 192\] is needed"):
        opened(tmp_path, draft_config(), tensors)


@pytest.mark.parametrize("name", ["confidence_head.proj.weight", "markov_head.markov_w2.weight"])
def test_a_head_that_is_no_number_is_refused(tmp_path, name):
    tensors = draft_tensors()
    tensors[name][0, 3] = np.nan
    with pytest.raises(ModelFileError, match="holds NaN or infinity"):
        opened(tmp_path, draft_config(), tensors).head_arrays()


def test_a_target_without_a_bank_has_no_mixture_to_read(tmp_path):
    config = draft_config(aux_hidden_stream="attn_res", target_num_hidden_layers=7)
    with pytest.raises(ModelFileError, match="aux_hidden_stream is 'attn_res'; residual or prefix"):
        opened(tmp_path, config, draft_tensors(), tiny_drafters.target)


def test_more_drafts_than_its_block_has_are_refused(tmp_path):
    model = opened(tmp_path / "7", draft_config(), draft_tensors()).model
    for n in (1, 7):
        model.check_n_draft(n)
    with pytest.raises(ConfigError, match="num_speculative_tokens: got 8"):
        model.check_n_draft(8)
    assert opened(tmp_path / "5", draft_config(block_size=5), draft_tensors()).model.n_draft_max == 5


def test_its_matrices_may_be_rounded_and_its_vectors_and_its_head_are_not(tmp_path):
    planned = opened(tmp_path, draft_config(), draft_tensors()).planned(Format.Q8_0)
    assert planned["draft.context_proj.weight"].format is Format.Q8_0
    assert planned["draft.layers.1.self_attn.kv_a_proj_with_mqa.weight"].format is Format.Q8_0
    assert planned["draft.layers.0.self_attn.kv_b_proj.weight"].format is Format.Q8_0
    assert planned["draft.context_norm.weight"].format is Format.F32
    assert not any("markov" in name or "embed" in name for name in planned)


def test_at_the_released_sizes_it_has_the_tensors_and_parameters_that_its_card_tells():
    """68 tensors of 3,562,312,961 numbers, with the copy of the embedding; scores grow by YaRN's 1.81326."""
    full = [*range(4, 93, 4), 93]
    linear = {"kda_layers": [i for i in range(1, 94) if i not in full], "full_attn_layers": full}
    wide = {"hidden_size": 7168, "num_hidden_layers": 93, "vocab_size": 163840, "max_position_embeddings": 1 << 20}
    wide |= {"linear_attn_config": tiny.K3["linear_attn_config"] | linear, "first_k_dense_replace": 93}
    target = build_model({"architectures": ["KimiLinearForCausalLM"], **tiny.K3, **wide})
    sizes = {"hidden_size": 7168, "intermediate_size": 14336, "num_hidden_layers": 5, "num_attention_heads": 64}
    sizes |= {"num_key_value_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128}
    sizes |= {"qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 163840, "max_position_embeddings": 1 << 20}
    sizes |= {"num_target_layers": 5, "target_hidden_size": 7168, "target_num_hidden_layers": 93, "markov_rank": 256}
    sizes |= {"target_layer_ids": [2, 23, 47, 71, 89], "mask_token_id": 163837}
    yarn = tiny.YARN | {"factor": 32.0, "original_max_position_embeddings": 32768}
    kind, config = in_one_form(draft_config(**sizes, rope_parameters=yarn))
    model = read_drafter(kind, config, target, frozenset({"confidence_head.proj.bias"}))
    shapes = model.draft_weights() | {"draft.embed_tokens.weight": (163840, 7168)}
    assert len(shapes) == 68
    assert sum(map(prod, shapes.values())) == 3_562_312_961
    layers = model.config.layers
    assert layers.attention_scale * 192**0.5 == pytest.approx(1.81326, abs=1e-5)
    assert layers.ropes["rope"].magnitude == 1.0
    assert {(kv.head_dim, kv.latent_values) for kv in model.kv_layers(93)} == {(576, 512)}
