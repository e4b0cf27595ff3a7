import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tiercel.base.errors import ModelFileError
from tiercel.loaders.checkpoint import Tensor, open_checkpoint
from tiercel.loaders.stacked_experts import split_experts
from tiercel.models.registry import build_model
from tiercel.models.weights import check_weights
from tiercel.quant.formats import Format
from tiercel.testing.tiny_model import MIXTURE_CONFIG, write_tiny_model

MOE = dict(MIXTURE_CONFIG)


def tensor(name, values):
    return Tensor(name, values.shape, Format.F32, values.reshape(-1).view(np.uint8))


def stack_experts(folder):
    """Stack a written model's experts as transformers holds them."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    separate = dict(weights)
    layers = {name.split(".experts.")[0] for name in weights if ".experts." in name}
    for layer in layers:
        gate, up, down = (
            [weights.pop(f"{layer}.experts.{e}.{kind}_proj.weight") for e in range(MOE["num_experts"])]
            for kind in ("gate", "up", "down")
        )
        weights[f"{layer}.experts.gate_up_proj"] = np.stack(
            [np.concatenate(pair) for pair in zip(gate, up, strict=True)]
        )
        weights[f"{layer}.experts.down_proj"] = np.stack(down)
    save_file(weights, str(path))
    return separate


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_stacked_experts_are_those_of_separate_tensors(tmp_path, dtype):
    folder = write_tiny_model(tmp_path, config=MOE, dtype=dtype)
    separate = stack_experts(folder)
    with open_checkpoint(folder) as checkpoint:
        assert set(checkpoint.tensors) == set(separate)
        for name, values in separate.items():
            np.testing.assert_array_equal(checkpoint.tensors[name].float32(), values.astype(np.float32))
        check_weights(build_model(checkpoint.config), checkpoint.tensors)


def test_stacks_of_a_model_type_with_another_order_are_left_alone(tmp_path):
    folder = write_tiny_model(tmp_path, config=MOE)
    stack_experts(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "another_moe"}))
    with open_checkpoint(folder) as checkpoint:
        assert any(name.endswith("experts.gate_up_proj") for name in checkpoint.tensors)
        with pytest.raises(ModelFileError, match=r"experts\.0\.gate_proj\.weight .*is missing"):
            check_weights(build_model(checkpoint.config), checkpoint.tensors)


@pytest.mark.parametrize("n_experts", [3, 5])
def test_a_stack_of_another_number_of_experts_is_refused_by_the_model(tmp_path, n_experts):
    folder = write_tiny_model(tmp_path, config=MOE | {"num_experts": n_experts})
    with open_checkpoint(folder) as checkpoint:
        asked = build_model(checkpoint.config | {"num_experts": 4})
        with pytest.raises(ModelFileError, match=r"mlp\.gate\.weight has shape \[5|experts\.3\.gate_proj\.weight"):
            check_weights(asked, checkpoint.tensors)


def test_an_expert_that_is_there_twice_is_refused():
    whole = np.zeros((2, 4, 3), np.float32)
    given = {
        "a.experts.gate_up_proj": tensor("a.experts.gate_up_proj", whole),
        "a.experts.1.up_proj.weight": tensor("a.experts.1.up_proj.weight", whole[0, :2]),
    }
    with pytest.raises(ModelFileError, match=r"a\.experts\.1\.up_proj\.weight is there twice"):
        split_experts(given, "here")


def test_a_stack_that_cannot_be_halved_is_refused():
    with pytest.raises(ModelFileError, match=r"gate_up_proj has shape \[2, 5, 3\]"):
        split_experts({"a.experts.gate_up_proj": tensor("a.experts.gate_up_proj", np.zeros((2, 5, 3), "f4"))}, "here")
