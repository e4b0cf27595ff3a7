"""Mamba2: layers of a gated recurrence and nothing else; no attention, no positions, no keys and values.

The layer is x += out_proj(gate_norm(ssd(conv(xbc), dt), z)), with z, xbc and dt the rows of one `in_proj` of norm(x),
in this order. Source: Dao and Gu 2024 (arXiv:2405.21060), Mamba2's configs and transformers' class. Where we differ:
steps are kept between `time_step_limit` in decoding too, where transformers forgets it, so that a token's state does
not depend on how its prompt was cut.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Self

from tiercel.models.decoder import read_n_layers
from tiercel.models.fields import ConfigFields
from tiercel.models.info import ModelInfo
from tiercel.models.model import Model, RecordOptions
from tiercel.ops.program import StateLayer, Value
from tiercel.ops.recorder import Recorder

_MAX_LEN_TOKENS = 1 << 20
"""Where a config is silent. The model bounds nothing, but each slot has a row of token ids: 4 MiB of them."""

_UNREAD = (
    "time_step_min",  # these make the initial dt_bias
    "time_step_max",
    "time_step_floor",
    "time_step_rank",
    "time_step_scale",
    "time_step_init_scheme",
    "rescale_prenorm_residual",  # of training
    "residual_in_fp32",  # the residual stream is float32 here
    "chunk_size",  # of other implementations' prefill
    "norm_before_gate",  # old configs say true, and transformers gates first all the same
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Config:
    """Every number of a Mamba2 that changes its arithmetic. `step_limits`: the shortest and the longest step."""

    vocab_size: int
    hidden_size: int
    n_layers: int
    heads: int
    head_dim: int
    groups: int
    state_dim: int
    conv_width: int
    has_conv_bias: bool
    eps: float
    step_limits: tuple[float, float]
    max_position: int
    is_tied: bool

    @property
    def inner(self) -> int:
        """Columns of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Columns that the convolution filters: heads' inputs, and what writes and reads each group's state."""
        return self.inner + 2 * self.groups * self.state_dim


class Mamba2(Model):
    """Mamba2."""

    def __init__(self, config: Mamba2Config) -> None:
        self.config = config

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read a Mamba2 config; see `Model.from_config`."""
        fields = ConfigFields(config)
        found = cls(_read(fields))
        fields.finish()
        return found

    @property
    def info(self) -> ModelInfo:
        """Facts about the model: states of all layers, keys and values of none."""
        c = self.config
        states = tuple(
            StateLayer(i, "ssd", c.channels, c.conv_width, c.heads, c.state_dim, c.head_dim) for i in range(c.n_layers)
        )
        n_parameters = sum(prod(shape) for shape in self.expected_weights().values())
        return ModelInfo("Mamba2ForCausalLM", c.vocab_size, c.hidden_size, c.max_position, n_parameters, (), states)

    def expected_weights(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every weight that the forward pass reads, by canonical name."""
        c = self.config
        shapes: dict[str, tuple[int, ...]] = {"backbone.embeddings.weight": (c.vocab_size, c.hidden_size)}
        for i in range(c.n_layers):
            shapes[f"backbone.layers.{i}.norm.weight"] = (c.hidden_size,)
            shapes |= {f"backbone.layers.{i}.mixer.{name}": shape for name, shape in self._mixer_weights().items()}
        shapes["backbone.norm_f.weight"] = (c.hidden_size,)
        if not c.is_tied:
            shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
        return shapes

    @property
    def n_tap_layers(self) -> int:
        """Layers of the residual stream."""
        return self.config.n_layers

    def ends(self) -> tuple[str, str]:
        """Return the names of the embedding and of the head, which may be one matrix."""
        return "backbone.embeddings.weight", "backbone.embeddings.weight" if self.config.is_tied else "lm_head.weight"

    def may_ignore(self, name: str) -> bool:
        """Tell whether a tensor may be left unread: a tied head's copy."""
        return self.config.is_tied and name == "lm_head.weight"

    def forward(self, rec: Recorder, options: RecordOptions) -> Value:
        """Write one step in ops and return its logits."""
        c = self.config
        x = rec.embed("backbone.embeddings.weight")
        rec.tap(-1, x)
        for i in range(c.n_layers):
            # Of the last layer only the rows that need logits go on; all rows go through its recurrence.
            is_last = i + 1 == c.n_layers and not rec.keeps_hidden
            kept = rec.select_rows(x) if is_last else x
            h = rec.rms_norm(x, f"backbone.layers.{i}.norm.weight", c.eps)
            y = self._mixer(rec, i, h)
            y = rec.linear(rec.select_rows(y) if is_last else y, f"backbone.layers.{i}.mixer.out_proj.weight")
            x = rec.add(kept, y)
            rec.tap(i, x)
        x = rec.rms_norm(x, "backbone.norm_f.weight", c.eps)
        return rec.linear(rec.keep_hidden(x) if rec.keeps_hidden else x, self.ends()[1])

    def _mixer_weights(self) -> dict[str, tuple[int, ...]]:
        c = self.config
        shapes: dict[str, tuple[int, ...]] = {
            "in_proj.weight": (c.inner + c.channels + c.heads, c.hidden_size),
            "conv1d.weight": (c.channels, 1, c.conv_width),
            "A_log": (c.heads,),
            "D": (c.heads,),
            "dt_bias": (c.heads,),
            "norm.weight": (c.inner,),
            "out_proj.weight": (c.hidden_size, c.inner),
        }
        return shapes | ({"conv1d.bias": (c.channels,)} if c.has_conv_bias else {})

    def _mixer(self, rec: Recorder, i: int, h: Value) -> Value:
        c, prefix = self.config, f"backbone.layers.{i}.mixer"
        n_rows, first = c.inner + c.channels + c.heads, 0
        parts = []
        for n in (c.inner, c.channels, c.heads):
            parts.append(rec.linear(h, f"{prefix}.in_proj.weight", rows=(n_rows, first, n)))
            first += n
        z, xbc, dt = parts
        biases = [f"{prefix}.conv1d.bias"] if c.has_conv_bias else []
        mixed = rec.short_conv([xbc], [f"{prefix}.conv1d.weight"], layer=i, act="silu", biases=biases)
        y = rec.ssd(
            mixed,
            dt,
            weights=(f"{prefix}.A_log", f"{prefix}.dt_bias", f"{prefix}.D"),
            layer=i,
            heads=(c.heads, c.head_dim),
            groups=(c.groups, c.state_dim),
            limits=c.step_limits,
        )
        return rec.gate_norm(y, z, f"{prefix}.norm.weight", groups=c.groups, eps=c.eps)


def _read(fields: ConfigFields) -> Mamba2Config:
    for name in _UNREAD:
        fields.raw(name)
    fields.raw("quantization_config")  # read where the tensors are, and refused there
    fields.only("hidden_act", "silu", "swish", why="the convolution and the gate are made for it")
    fields.only("use_bias", False, why="in_proj and out_proj have no biases here")
    fields.only("rms_norm", True, why="the outputs of a layer's recurrence are always normed")
    hidden, expand = fields.size("hidden_size"), fields.size("expand", 2)
    heads, head_dim = fields.size("num_heads"), fields.size("head_dim", 64)
    if heads * head_dim != expand * hidden:
        needed = f"{expand * hidden}, which is expand {expand} times hidden_size {hidden}, over head_dim {head_dim}"
        raise fields.broken("num_heads", heads, needed)
    if fields.size("intermediate_size", heads * head_dim) != heads * head_dim:
        raise fields.broken("intermediate_size", fields.raw("intermediate_size"), f"{heads * head_dim}")
    groups = fields.size("n_groups", 8)
    if heads % groups:
        raise fields.broken("n_groups", groups, f"a divisor of num_heads {heads}")
    if (heads * head_dim) % groups:
        raise fields.broken("n_groups", groups, f"a divisor of {heads * head_dim} columns")
    return Mamba2Config(
        vocab_size=fields.size("vocab_size"),
        hidden_size=hidden,
        n_layers=read_n_layers(fields),
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        state_dim=fields.size("state_size", 128),
        conv_width=fields.size("conv_kernel", 4),
        has_conv_bias=fields.flag("use_conv_bias", default=True),
        eps=fields.float32("layer_norm_epsilon", 1e-5),
        step_limits=_read_limits(fields),
        max_position=fields.size("max_position_embeddings", _MAX_LEN_TOKENS),
        is_tied=fields.flag("tie_word_embeddings", default=False),
    )


def _read_limits(fields: ConfigFields) -> tuple[float, float]:
    """Read the shortest and the longest step; "no longest" is infinity, in either of JSON's spellings."""
    found = fields.raw("time_step_limit")
    pair = [0.0, float("inf")] if found is None else found
    numbers = [_number(value) for value in pair] if isinstance(pair, list | tuple) else []
    if len(numbers) != 2 or not 0.0 <= numbers[0] <= numbers[1]:
        raise fields.broken("time_step_limit", found, "two numbers, the smaller first and not below 0,")
    return numbers[0], numbers[1]


def _number(value: object) -> float:
    if isinstance(value, Mapping) and value.get("__float__") == "Infinity":
        return float("inf")
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else float("nan")
