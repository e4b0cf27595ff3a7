"""Llama 2 and 3.x, SmolLM2 (a plain Llama), Mistral (a window on every layer) and SmolLM3 (layers without positions).

Source: Touvron et al. 2023 (arXiv:2302.13971), Jiang et al. 2023 (arXiv:2310.06825); weights' names as transformers has
them.
"""

from collections.abc import Mapping
from typing import Any, Self

from tiercel.models.decoder import (
    Decoder,
    DecoderConfig,
    default_scale,
    read_activation,
    read_n_layers,
    read_sizes,
    read_windows,
    refuse_mixed,
)
from tiercel.models.fields import ConfigFields
from tiercel.models.rope import read_rope


class Llama(Decoder):
    """Llama: optional biases, any rotation, full attention."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read a Llama config; see `Model.from_config`."""
        fields = ConfigFields(config)
        fields.only("pretraining_tp", 1, why="weights split for training-time tensor parallelism")
        fields.only("sliding_window", why="Llama has no window; Mistral has")
        bias = fields.flag("attention_bias", default=False)
        mlp_bias = fields.flag("mlp_bias", default=False)
        n_layers = read_n_layers(fields)
        windows = read_windows(fields, n_layers, None, [False] * n_layers)
        return cls(_plain(fields, "LlamaForCausalLM", windows, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias))


class Mistral(Decoder):
    """Mistral: no biases, a sliding window on every layer unless it is null."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read a Mistral config; see `Model.from_config`. An absent window is the architecture's 4096; null is none."""
        fields = ConfigFields(config)
        for name in ("attention_bias", "mlp_bias"):
            fields.only(name, False, why="Mistral has no biases")
        window = fields.size("sliding_window") if fields.has("sliding_window") else None
        if "sliding_window" not in config:
            window = 4096
        fields.raw("sliding_window")
        n_layers = read_n_layers(fields)
        windows = read_windows(fields, n_layers, window, [window is not None] * n_layers)
        refuse_mixed(fields, "Mistral", windows)
        return cls(_plain(fields, "MistralForCausalLM", windows))


class SmolLM3(Decoder):
    """SmolLM3: a Llama whose every fourth layer has no positions."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read a SmolLM3 config; see `Model.from_config`."""
        fields = ConfigFields(config)
        n_layers = read_n_layers(fields)
        interval = fields.size("no_rope_layer_interval", 4)
        listed = fields.raw("no_rope_layers")
        if listed is None:
            has_rope = [(i + 1) % interval != 0 for i in range(n_layers)]
        elif isinstance(listed, list) and len(listed) == n_layers and all(v in (0, 1) for v in listed):
            has_rope = [bool(v) for v in listed]
        else:
            raise fields.broken("no_rope_layers", listed, f"a list of {n_layers} zeros and ones")
        uses_window = fields.flag("use_sliding_window", default=False)
        window = fields.size("sliding_window") if fields.has("sliding_window") and uses_window else None
        fields.raw("sliding_window")
        windows = read_windows(fields, n_layers, window, [window is not None and not rope for rope in has_rope])
        bias = fields.flag("attention_bias", default=False)
        mlp_bias = fields.flag("mlp_bias", default=False)
        plain = _plain(
            fields,
            "SmolLM3ForCausalLM",
            windows,
            qkv_bias=bias,
            o_bias=bias,
            mlp_bias=mlp_bias,
            has_rope=has_rope,
            default_theta=2e6,
            default_tied=True,
        )
        return cls(plain)


def _plain(
    fields: ConfigFields,
    architecture: str,
    windows: tuple[int, ...],
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    has_rope: list[bool] | None = None,
    default_theta: float = 10000.0,
    default_tied: bool = False,
) -> DecoderConfig:
    sizes = read_sizes(fields)
    rope = read_rope(fields, head_dim=sizes.head_dim, max_position=sizes.max_position, default_theta=default_theta)
    result = DecoderConfig(
        architecture=architecture,
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        n_heads=sizes.n_heads,
        n_kv_heads=sizes.n_kv_heads,
        head_dim=sizes.head_dim,
        eps=fields.float32("rms_norm_eps", 1e-6),
        act=read_activation(fields, "hidden_act", "silu"),
        max_position=sizes.max_position,
        is_tied=fields.flag("tie_word_embeddings", default=default_tied),
        windows=windows,
        ropes={"rope": rope},
        layer_ropes=tuple("rope" if rotates else None for rotates in has_rope or [True] * len(windows)),
        attention_scale=default_scale(sizes.head_dim),
        has_qkv_bias=qkv_bias,
        has_o_bias=o_bias,
        has_mlp_bias=mlp_bias,
    )
    fields.finish()
    return result
