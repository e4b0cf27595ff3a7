"""Gemma 3, text: norms by 1 + w before and after each half of a layer, two rotations, scaled embeddings.

x += norm(o_proj(attention(norm(x)))); x += norm(down(gelu(gate h) * up h)), h = norm(x). Scores are scaled by
query_pre_attn_scalar ** -0.5. Sliding layers rotate with their own base and without scaling. Embeddings are multiplied
by sqrt(hidden size), rounded to the format the embedding is stored in, as the released models were trained.

Source: Gemma Team 2025 (arXiv:2503.19786); weights' names as transformers has them.
"""

from collections.abc import Mapping
from math import sqrt
from typing import Any, Self

import numpy as np

from tiercel.models.decoder import Decoder, DecoderConfig, read_activation, read_sizes, read_windows
from tiercel.models.fields import ConfigFields
from tiercel.models.model import RecordOptions
from tiercel.models.rope import RopeParameters, parse_rope
from tiercel.ops.program import Value
from tiercel.ops.recorder import Recorder
from tiercel.quant.formats import Format

_SLIDING_THETA, _FULL_THETA = 1e4, 1e6


class Gemma3(Decoder):
    """Gemma 3's text model."""

    norms_add_one = True

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read a Gemma 3 text config; see `Model.from_config`."""
        fields = ConfigFields(config)
        fields.only("use_bidirectional_attention", False, why="embedding models attend without a causal mask")
        fields.only("attn_logit_softcapping", why="Gemma 3 has no cap on attention scores")
        fields.raw("hidden_act")  # older files carry it; transformers reads hidden_activation only
        bias = fields.flag("attention_bias", default=False)
        sizes = read_sizes(fields, default_head_dim=256)
        pattern = fields.size("sliding_window_pattern", fields.raw("_sliding_window_pattern") or 6)
        window = fields.size("sliding_window", 4096)
        slides = [(i + 1) % pattern != 0 for i in range(sizes.n_layers)]
        windows = read_windows(fields, sizes.n_layers, window, slides)
        softcap = fields.raw("final_logit_softcapping")
        result = DecoderConfig(
            architecture="Gemma3ForCausalLM",
            vocab_size=sizes.vocab_size,
            hidden_size=sizes.hidden_size,
            intermediate_size=sizes.intermediate_size,
            n_heads=sizes.n_heads,
            n_kv_heads=sizes.n_kv_heads,
            head_dim=sizes.head_dim,
            eps=fields.float32("rms_norm_eps", 1e-6),
            act=read_activation(fields, "hidden_activation", "gelu_pytorch_tanh"),
            max_position=sizes.max_position,
            is_tied=fields.flag("tie_word_embeddings", default=True),
            windows=windows,
            ropes=_read_ropes(fields, sizes.head_dim, sizes.max_position),
            layer_ropes=tuple("sliding" if window else "full" for window in windows),
            attention_scale=fields.positive("query_pre_attn_scalar", 256.0) ** -0.5,
            has_qkv_bias=bias,
            has_o_bias=bias,
            has_qk_norm=True,
            final_softcap=0.0 if softcap is None else fields.positive("final_logit_softcapping"),
        )
        fields.finish()
        return cls(result)

    def layer_weights(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of one layer's weights; two more norms than the plain layer."""
        norm = (self.config.hidden_size,)
        names = ("pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight")
        return super().layer_weights() | dict.fromkeys(names, norm)

    def embed_scale(self, rec: Recorder) -> float:
        """Return sqrt(hidden size), rounded like the stored embedding; quantised files were made from float32."""
        exact = np.float32(sqrt(self.config.hidden_size))
        match rec.format_of("model.embed_tokens.weight"):
            case Format.BF16:
                bits = int(exact.view(np.uint32))
                rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
                return float(np.uint32(rounded).view(np.float32))
            case Format.F16:
                return float(np.float16(exact))
            case _:
                return float(exact)

    def layer(self, rec: Recorder, options: RecordOptions, i: int, x: Value, tables: Mapping[str, Value]) -> Value:
        """Write layer i and return the residual stream after it, of the rows that it passes on."""
        prefix = f"model.layers.{i}"
        kept = self.kept_rows(rec, i, x)
        h = self.norm(rec, options, x, f"{prefix}.input_layernorm.weight")
        a = self.attention(rec, options, i, h, tables)
        x = rec.add(kept, self.norm(rec, options, a, f"{prefix}.post_attention_layernorm.weight"))
        h = self.norm(rec, options, x, f"{prefix}.pre_feedforward_layernorm.weight")
        m = self.mlp(rec, i, h)
        return rec.add(x, self.norm(rec, options, m, f"{prefix}.post_feedforward_layernorm.weight"))


def _read_ropes(fields: ConfigFields, head_dim: int, max_position: int) -> dict[str, RopeParameters]:
    """Read both rotations: newer files key rope_parameters by layer type, older ones have fields for each."""
    newer, scaling = fields.raw("rope_parameters"), fields.raw("rope_scaling")
    theta, local = fields.raw("rope_theta"), fields.raw("rope_local_base_freq")
    if newer is None:
        full = {"rope_theta": theta, **(scaling or {})}
        sliding = {"rope_theta": local}
    elif isinstance(newer, Mapping) and set(newer) <= {"full_attention", "sliding_attention"} and scaling is None:
        full = {"rope_theta": theta, **(newer.get("full_attention") or {})}
        sliding = {"rope_theta": local, **(newer.get("sliding_attention") or {})}
    else:
        raise fields.refused("rope_parameters", newer, "one entry for each of full_attention and sliding_attention")
    return {
        name: parse_rope(params, head_dim=head_dim, max_position=max_position, default_theta=default)
        for name, params, default in (("sliding", sliding, _SLIDING_THETA), ("full", full, _FULL_THETA))
    }
