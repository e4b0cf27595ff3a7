"""Drafters' folders that are damaged, or of another target: each is refused by the field or tensor at fault."""

import json

import numpy as np
import pytest
import tiny_drafters as tiny
from tiny_drafters import E, V, draft_config, draft_tensors, write_drafter

from tiercel.base.errors import ConfigError, ModelFileError, ModelNotFound, UnsupportedModel
from tiercel.loaders.checkpoint import Tensor
from tiercel.models.drafters.checkpoint import open_drafter
from tiercel.quant.formats import Format
from tiercel.quant.quantize import quantize

KINDS = ["dflash", "dflash2", "dspark", "eagle3"]


def opened(folder, config, tensors, **target_changes):
    target, _, target_tensors = tiny.target(**target_changes)
    return open_drafter(write_drafter(folder, config, tensors), target, target_tensors)


FIELDS = {
    "hidden size": ("dspark", {"hidden_size": 128, "head_dim": 16}, "hidden_size is 128; 64"),
    "target hidden size": ("eagle3", {"target_hidden_size": 32}, "target_hidden_size is 32; 64"),
    "vocabulary": ("dflash", {"vocab_size": 130}, "vocab_size is 130; 128"),
    "draft vocabulary": ("dspark", {"draft_vocab_size": 400}, "draft_vocab_size is 400"),
    "draft vocabulary without d2t": ("dspark", {"draft_vocab_size": 40}, "draft_vocab_size is 40; a tensor d2t"),
    "layers of the target": ("dflash", {"num_target_layers": 36}, "num_target_layers is 36; 7"),
    "a tap behind the last inner layer": ("dspark", {"target_layer_ids": [1, 6]}, "target_layer_ids.*tap 6"),
    "taps that are none": ("dspark", {"target_layer_ids": ["a"]}, "target_layer_ids is"),
    "no taps": ("dspark", {"target_layer_ids": None}, "target_layer_ids is None"),
    "base": ("dspark", {"rope_theta": 5e5}, "rope_theta is 500000"),
    "layout": ("dspark", {"rope_layout": "interleaved"}, "rope_layout is 'interleaved'"),
    "mask": ("dspark", {"mask_token_id": V}, "mask_token_id is 128"),
    "no mask": ("dspark", {"mask_token_id": None}, "mask_token_id is None"),
    "head type": ("dspark", {"markov_head_type": "deep"}, "markov_head_type is 'deep'"),
    "block": ("dflash", {"block_size": 1}, "block_size is 1"),
    "taps of a convolution longer than the block": (
        "dflash2",
        {"block_size": 3, "dflash_config": {"conv_kernel_size": 4, "mask_token_id": 1, "target_layer_ids": [1]}},
        "conv_kernel_size is 4",
    ),
    "group": (
        "dflash2",
        {"dflash_config": {"conv_group_size": 24, "mask_token_id": 1, "target_layer_ids": [1]}},
        "conv_group_size is 24",
    ),
    "candidates": (
        "dflash2",
        {"dflash_config": {"selector_top_k": 999, "mask_token_id": 1, "target_layer_ids": [1]}},
        "selector_top_k is 999",
    ),
    "anchor": ("dflash2", {"sample_from_anchor": True}, "sample_from_anchor is True"),
    "a field nobody knows": ("dspark", {"hybrid_context_fusion": True}, "hybrid_context_fusion is True"),
    "a thing said twice": (
        "dflash",
        {"mask_token_id": 3},
        "dflash_config.mask_token_id is 127; 3",
    ),
    "taps said twice": (
        "eagle3",
        {
            "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]},
        },
        r"eagle_config.eagle_aux_hidden_state_layer_ids is \[2, 3, 4\]; \[0, 1, 2\]",
    ),
    "kind": ("dspark", {"architectures": ["Gemma4DSparkModel"]}, "'Gemma4DSparkModel' is no drafter"),
    "kind said otherwise": ("dspark", {"speculators_model_type": "mlp"}, "'mlp' is no drafter"),
    "act": ("dspark", {"hidden_act": "relu2"}, "hidden_act is 'relu2'"),
    "topk": ("dspark", {"dspark_draft_topk": 500}, "dspark_draft_topk is 500"),
    "layer types": ("dflash", {"layer_types": ["linear_attention"] * 2}, "layer_types is 'linear_attention'"),
    "window": ("dflash", {"layer_types": ["sliding_attention"] * 2}, "sliding_window is None"),
}


@pytest.mark.parametrize(("kind", "changes", "message"), FIELDS.values(), ids=FIELDS)
def test_a_field_of_another_target_is_refused_by_its_name(tmp_path, kind, changes, message):
    with pytest.raises((ModelFileError, UnsupportedModel), match=message):
        opened(tmp_path, draft_config(kind, **changes), draft_tensors(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_every_missing_and_every_unknown_tensor_is_named(tmp_path, kind):
    tensors = draft_tensors(kind)
    for i, name in enumerate(tensors):
        if name == "t2d":
            continue
        left = {n: w for n, w in tensors.items() if n != name}
        message = "d2t" if name in ("d2t",) else name.replace("midlayer", "layers.0")
        if name == "lm_head.weight":
            continue  # the target's rows take its place
        # With q_norm gone there is to be no k_norm; a bias that is gone is none.
        message = "k_norm" if name.endswith("0.self_attn.q_norm.weight") else message
        if name.endswith(".bias"):
            opened(tmp_path / str(i), draft_config(kind), left)
            continue
        with pytest.raises(ModelFileError, match=message.replace(".", r"\.")):
            opened(tmp_path / str(i), draft_config(kind), left)
    with pytest.raises(ModelFileError, match=r"tensor other\.weight of shape \[3, 4\] is read by nothing"):
        opened(tmp_path / "more", draft_config(kind), tensors | {"other.weight": np.zeros((3, 4), np.float32)})


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_of_another_shape_is_named_with_both(tmp_path, kind):
    tensors = draft_tensors(kind)
    tensors["fc.weight"] = np.zeros((E, 5 * E), np.float32)
    with pytest.raises(ModelFileError, match=r"fc\.weight has shape \[64, 320\]; \[64, 192\] is needed"):
        opened(tmp_path, draft_config(kind), tensors)


@pytest.mark.parametrize("cut", [4, 40, -8])
def test_a_truncated_file_is_refused(tmp_path, cut):
    folder = write_drafter(tmp_path, draft_config("dspark"), draft_tensors("dspark"))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    target, _, target_tensors = tiny.target()
    with pytest.raises(ModelFileError, match=r"model\.safetensors"):
        open_drafter(folder, target, target_tensors)


def test_a_folder_that_is_not_there_or_has_no_config_is_refused(tmp_path):
    target, _, target_tensors = tiny.target()
    with pytest.raises(ModelNotFound):
        open_drafter(tmp_path / "none", target, target_tensors)
    folder = write_drafter(tmp_path / "bare", draft_config("dspark"), draft_tensors("dspark"))
    (folder / "config.json").unlink()
    with pytest.raises((ModelFileError, ModelNotFound), match=r"config\.json"):
        open_drafter(folder, target, target_tensors)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_confidence_that_is_no_number_is_refused_at_once(tmp_path, value):
    tensors = draft_tensors("dspark")
    tensors["confidence_head.proj.weight"][0, 3] = value
    with pytest.raises(ModelFileError, match=r"confidence_head\.proj\.weight: holds NaN or infinity"):
        opened(tmp_path, draft_config("dspark"), tensors)


@pytest.mark.parametrize("name", ["markov_head.markov_w1.weight", "markov_head.markov_w2.weight"])
def test_a_head_that_holds_nan_gives_no_arrays(tmp_path, name):
    tensors = draft_tensors("dspark")
    tensors[name][1, 1] = np.nan
    drafter = opened(tmp_path, draft_config("dspark"), tensors)
    with pytest.raises(ModelFileError, match="markov"):
        drafter.head_arrays()


@pytest.mark.parametrize(
    ("kind", "most"), [("dflash", 4), ("dflash2", 4), ("dspark", 4), ("eagle3", 16)], ids=lambda x: str(x)
)
def test_more_drafts_than_a_block_has_are_refused(tmp_path, kind, most):
    model = opened(tmp_path, draft_config(kind), draft_tensors(kind)).model
    model.check_n_draft(most)
    for n in (0, most + 1):
        with pytest.raises(ConfigError, match=f"num_speculative_tokens: got {n}"):
            model.check_n_draft(n)


def test_a_vocabulary_of_its_own_takes_the_targets_rows(tmp_path):
    target, weights, target_tensors = tiny.target()
    tensors = draft_tensors("dspark", n_draft=40)
    folder = write_drafter(tmp_path, draft_config("dspark", draft_vocab_size=40), tensors)
    drafter = open_drafter(folder, target, target_tensors)
    ids = np.arange(40) + tensors["d2t"]
    np.testing.assert_array_equal(drafter.d2t, tensors["d2t"])
    np.testing.assert_array_equal(drafter.tensors["draft.lm_head.weight"].float32(), weights["lm_head.weight"][ids])
    assert drafter.model.head().d2t == "draft.d2t"


def test_a_quantised_targets_rows_are_taken_as_they_are(tmp_path):
    target, weights, target_tensors = tiny.target()
    rows = quantize(weights["lm_head.weight"], Format.Q8_0)
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        target_tensors[name] = Tensor(name, (V, E), Format.Q8_0, rows.reshape(-1))
    tensors = draft_tensors("eagle3", n_draft=40)
    del tensors["lm_head.weight"]
    drafter = open_drafter(
        write_drafter(tmp_path, draft_config("eagle3", draft_vocab_size=40), tensors), target, target_tensors
    )
    head = drafter.tensors["draft.lm_head.weight"]
    np.testing.assert_array_equal(head.rows(), rows[np.arange(40) + tensors["d2t"]])


@pytest.mark.parametrize(
    ("offsets", "message"),
    [([0] * 39 + [-1], "one id"), ([0] * 39 + [V], "of another target"), ([0] * 39, "length of tensor d2t")],
)
def test_a_vocabulary_that_leads_nowhere_is_refused(tmp_path, offsets, message):
    tensors = draft_tensors("dspark", n_draft=40) | {"d2t": np.array(offsets, np.int64)}
    with pytest.raises(ModelFileError, match=message):
        opened(tmp_path, draft_config("dspark", draft_vocab_size=40), tensors)


def test_matrices_may_be_rounded_and_vectors_and_the_heads_are_not(tmp_path):
    drafter = opened(tmp_path, draft_config("dflash2"), draft_tensors("dflash2"))
    planned = drafter.planned(Format.Q8_0)
    assert planned["draft.fc.weight"].format is Format.Q8_0
    assert planned["draft.norm.weight"].format is Format.F32
    assert planned["draft.layers.0.mlp_conv.kernel_projection.weight"].format is Format.F32
    assert not any("selector" in name for name in planned)
    assert {t.format for t in drafter.planned(None).values()} == {Format.F32}


def test_the_nested_form_and_the_flat_one_are_one_drafter(tmp_path):
    """The same tensors, as speculators say their config: layers apart, taps counted from the embeddings."""
    tensors = draft_tensors("dspark")
    flat = draft_config("dspark")
    of_head = {"architectures", "block_size", "mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type"}
    of_head |= {"enable_confidence_head", "confidence_head_with_markov"}
    nested = {name: value for name, value in flat.items() if name in of_head - {"target_layer_ids"}}
    nested |= {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "speculators_version": "0.9.0",
        "sample_from_anchor": True,
        "aux_hidden_state_layer_ids": [1, 3, 4],
        "draft_vocab_size": V,
        "speculators_config": {"algorithm": "dspark"},
        "transformer_layer_config": {name: value for name, value in flat.items() if name not in of_head},
    }
    first = opened(tmp_path / "flat", flat, tensors).model
    second = opened(tmp_path / "nested", nested, tensors).model
    assert (first.config, first.markov) == (second.config, second.markov)
    del nested["sample_from_anchor"]
    assert opened(tmp_path / "silent", nested, tensors).model.n_draft_max == 3


def test_what_a_drafter_was_trained_on_is_told(tmp_path):
    config = draft_config("dspark", target_digest="abc", training={"seed": 1})
    drafter = opened(tmp_path, config, draft_tensors("dspark"))
    assert drafter.trained_on == "abc"
    assert len(drafter.digest) == 64
    assert json.loads((tmp_path / "config.json").read_text())["training"] == {"seed": 1}
    drafter.close()
