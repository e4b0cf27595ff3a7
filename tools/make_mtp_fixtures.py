"""Makes tests/model/mtp_fixtures: logits of tiny models' draft heads, by way of transformers.

transformers has no draft heads. A head's layer, its norm and its logits are those of a model of one such layer that is
given embeddings: what the head makes of tokens and of what the model gives out, which is computed here. From the
repository's root:

    HF_HUB_OFFLINE=1 PYTHONPATH=src python tools/make_mtp_fixtures.py

A fixture is as `make_fixtures` writes it; row t is the head's at position t, which takes token t + 1.
"""

import copy
from pathlib import Path
from typing import Any

import torch

from make_fixtures import filled, fixture_of, ids_of, models, write
from tiercel.testing.fill import fill_by_name

OUT = Path(__file__).parent.parent / "tests" / "model" / "mtp_fixtures"
QWEN = {"join": "mtp.fc", "token": "mtp.pre_fc_norm_embedding", "hidden": "mtp.pre_fc_norm_hidden"}
QWEN |= {"norm": "mtp.norm", "layer": "mtp.layers.0"}
DEEPSEEK = {"join": "eh_proj", "token": "enorm", "hidden": "hnorm", "norm": "shared_head.norm"}
LING = DEEPSEEK | {"norm": "final_layernorm"}


def names_of(config: Any) -> dict[str, str]:
    if config.model_type.startswith("qwen"):
        return QWEN
    layer = f"model.layers.{config.num_hidden_layers}"
    names = DEEPSEEK if config.model_type == "deepseek_v3" else LING
    return {role: f"{layer}.{name}" for role, name in names.items()} | {"layer": layer}


def one_layer(config: Any) -> Any:
    """Return the config of the head's layer: attention with keys and values, and the model's mixture if it has one."""
    config = copy.deepcopy(config)
    config.num_hidden_layers = 1
    if config.model_type == "deepseek_v3":
        config.first_k_dense_replace = 0
        config.mlp_layer_types = ["sparse"]
    else:
        config.layer_types = ["full_attention"]
        config.mlp_layer_types = ["sparse"]
    return config


def head_logits(config: Any) -> torch.Tensor:
    names, adds_one = names_of(config), config.model_type.startswith("qwen")

    def weight(role: str, *shape: int) -> torch.Tensor:
        return torch.from_numpy(fill_by_name(f"{names[role]}.weight", shape, norms_add_one=adds_one))

    def norm(x: torch.Tensor, role: str) -> torch.Tensor:
        w = weight(role, x.shape[-1]) + (1.0 if adds_one else 0.0)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.rms_norm_eps) * w

    def rename(name: str) -> str:
        name = name.replace("model.layers.0", names["layer"])
        return f"{names['norm']}.weight" if name == "model.norm.weight" else name

    ids, n = torch.tensor([ids_of(config)]), config.hidden_size
    target, head = filled(config), filled(one_layer(config), rename)
    with torch.no_grad():
        hidden = target.model(ids).last_hidden_state[:, :-1]  # normed
        token = target.model.embed_tokens(ids[:, 1:])
        if config.model_type == "deepseek_v3":
            token[:, 0] = 0.0
        joined = torch.cat([norm(token, "token"), norm(hidden, "hidden")], dim=-1)
        return head(inputs_embeds=joined @ weight("join", n, 2 * n).T).logits[0]


if __name__ == "__main__":
    known = models()
    for fixture in ("deepseek_v3_experts", "qwen3_5", "qwen3_5_moe", "ling"):
        write(OUT / f"{fixture}.json", fixture_of(known[fixture], head_logits(known[fixture])))
