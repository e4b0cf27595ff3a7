"""Qwen2 and Qwen2.5 (biases on q, k and v) and Qwen3 (norms of q and k heads instead).

With `use_sliding_window`, layers from `max_window_layers` on slide. Source: Yang et al. 2024 (arXiv:2407.10671) and
2025 (arXiv:2505.09388); weights' names as transformers has them.
"""

from collections.abc import Mapping
from typing import Any, Self

from tiercel.models.decoder import Decoder, DecoderConfig, default_scale, read_activation, read_sizes, read_windows
from tiercel.models.fields import ConfigFields
from tiercel.models.rope import read_rope


class Qwen2(Decoder):
    """Qwen2 and Qwen2.5."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read a Qwen2 config; see `Model.from_config`."""
        fields = ConfigFields(config)
        fields.only("attention_bias", True, why="Qwen2 always has biases on q, k and v")
        return cls(read_qwen(fields, "Qwen2ForCausalLM", qkv_bias=True, o_bias=False, qk_norm=False))


class Qwen3(Decoder):
    """Qwen3. Without `head_dim` in the config, a head is 128 wide."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read a Qwen3 config; see `Model.from_config`."""
        fields = ConfigFields(config)
        bias = fields.flag("attention_bias", default=False)
        return cls(
            read_qwen(fields, "Qwen3ForCausalLM", qkv_bias=bias, o_bias=bias, qk_norm=True, default_head_dim=128)
        )


def read_qwen(
    fields: ConfigFields,
    architecture: str,
    *,
    qkv_bias: bool,
    o_bias: bool,
    qk_norm: bool,
    default_head_dim: int | None = None,
) -> DecoderConfig:
    """Read what the Qwen2 and Qwen3 families share.

    Raises:
        UnsupportedModel: a field asks for arithmetic that is not implemented.
        ModelFileError: a field is missing or makes no sense.
    """
    fields.only("mlp_bias", False, why="Qwen has no biases in its feed-forward")
    fields.only("use_mrope", False, why="multimodal rotation")
    sizes = read_sizes(fields, default_head_dim=default_head_dim)
    uses_window = fields.flag("use_sliding_window", default=False)
    window = fields.size("sliding_window", 4096) if uses_window else None
    fields.raw("sliding_window")
    first = fields.raw("max_window_layers")
    first = 28 if first is None else first
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise fields.broken("max_window_layers", first, "an integer >= 0")
    slides = [window is not None and i >= first for i in range(sizes.n_layers)]
    rope = read_rope(fields, head_dim=sizes.head_dim, max_position=sizes.max_position, default_theta=10000.0)
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
        is_tied=fields.flag("tie_word_embeddings", default=False),
        windows=read_windows(fields, sizes.n_layers, window, slides),
        ropes={"rope": rope},
        layer_ropes=("rope",) * sizes.n_layers,
        attention_scale=default_scale(sizes.head_dim),
        has_qkv_bias=qkv_bias,
        has_o_bias=o_bias,
        has_qk_norm=qk_norm,
    )
    fields.finish()
    return result
