"""The native ops of recurrent layers, and the rules of their shapes; `ops.lowered` has them in its list."""

from collections.abc import Iterator
from typing import ClassVar

import msgspec

from tiercel.ops.buffers import Buffer, are_alike
from tiercel.ops.program import Weight


class ShortConv(msgspec.Struct, frozen=True, tag="short_conv"):
    """See the list of `ops.lowered`; columns x_col .. x_col + y.width of x."""

    kind: ClassVar[str] = "short_conv"
    x: Buffer
    x_col: int
    width: int
    w: tuple[Weight, ...]
    bias: tuple[Weight, ...]
    act: str
    layer: int
    y: Buffer


class DeltaRule(msgspec.Struct, frozen=True, tag="delta_rule"):
    """See the list of `ops.lowered`; `gate` and `beta` begin at columns gate_col and beta_col of their buffers."""

    kind: ClassVar[str] = "delta_rule"
    qkv: Buffer
    gate: Buffer
    gate_col: int
    beta: Buffer
    beta_col: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    lower_bound: float
    a_log: Weight
    dt_bias: Weight
    eps: float
    layer: int
    y: Buffer


class GatedNorm(msgspec.Struct, frozen=True, tag="gated_norm"):
    """See the list of `ops.lowered`."""

    kind: ClassVar[str] = "gated_norm"
    x: Buffer
    z: Buffer
    z_col: int
    is_gate_per_head: bool
    heads: int
    w: Weight | None
    eps: float
    act: str
    y: Buffer


class DeltaLayer(msgspec.Struct, frozen=True, tag="delta_layer"):
    """See the list of `ops.lowered`; fields as its three parts have them, the norm's own begin with `norm`."""

    kind: ClassVar[str] = "delta_layer"
    x: Buffer
    x_col: int
    width: int
    w: tuple[Weight, ...]
    bias: tuple[Weight, ...]
    act: str
    gate: Buffer
    gate_col: int
    beta: Buffer
    beta_col: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    lower_bound: float
    a_log: Weight
    dt_bias: Weight
    eps: float
    layer: int
    z: Buffer
    z_col: int
    is_gate_per_head: bool
    norm: Weight | None
    norm_eps: float
    norm_act: str
    y: Buffer

    @property
    def channels(self) -> int:
        """Columns of all queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


class Ssd(msgspec.Struct, frozen=True, tag="ssd"):
    """See the list of `ops.lowered`; `dt` begins at column dt_col of its buffer."""

    kind: ClassVar[str] = "ssd"
    xbc: Buffer
    dt: Buffer
    dt_col: int
    heads: int
    head_dim: int
    groups: int
    state_dim: int
    dt_min: float
    dt_max: float
    a_log: Weight
    dt_bias: Weight
    d: Weight
    layer: int
    y: Buffer


class GateNorm(msgspec.Struct, frozen=True, tag="gate_norm"):
    """See the list of `ops.lowered`; columns z_col .. z_col + y.width of z."""

    kind: ClassVar[str] = "gate_norm"
    x: Buffer
    z: Buffer
    z_col: int
    groups: int
    w: Weight
    eps: float
    y: Buffer


RecurrentOp = ShortConv | DeltaRule | GatedNorm | DeltaLayer | Ssd | GateNorm


def rules(op: RecurrentOp) -> Iterator[tuple[bool, str]]:
    """Yield each rule of an op's shapes as (holds, what is wrong)."""
    y = op.y
    if isinstance(op, ShortConv):
        yield op.x_col + y.width <= op.x.width, f"x {op.x.type_text}, {y.width} channels from {op.x_col} on"
        yield y.width * op.width == sum(w.n_weights for w in op.w), "w is no [channels, width]"
    elif isinstance(op, DeltaRule):
        fits = op.gate_col + op.dt_bias.n_weights <= op.gate.width and op.beta_col + op.value_heads <= op.beta.width
        yield fits, f"gate {op.gate.type_text}, beta {op.beta.type_text}"
        yield op.qkv.width == 2 * op.key_heads * op.key_dim + y.width, f"qkv {op.qkv.type_text}, y {y.type_text}"
    elif isinstance(op, GatedNorm):
        z_width = op.heads if op.is_gate_per_head else y.width
        yield are_alike(op.x, y) and op.z.rows is y.rows and op.z_col + z_width <= op.z.width, f"z {op.z.type_text}"
    elif isinstance(op, DeltaLayer):
        ends = (
            (op.x, op.x_col, op.channels),
            (op.gate, op.gate_col, op.dt_bias.n_weights),
            (op.beta, op.beta_col, op.value_heads),
            (op.z, op.z_col, op.value_heads if op.is_gate_per_head else y.width),
        )
        yield (
            all(b.rows is y.rows and col + n <= b.width for b, col, n in ends),
            f"x {op.x.type_text}, z {op.z.type_text}",
        )
        yield op.channels * op.width == sum(w.n_weights for w in op.w), "w is no [channels, width]"
        yield y.width == op.value_heads * op.value_dim, f"y {y.type_text}"
    elif isinstance(op, Ssd):
        fits = op.xbc.width == y.width + 2 * op.groups * op.state_dim and op.dt_col + op.heads <= op.dt.width
        yield fits, f"xbc {op.xbc.type_text}, dt {op.dt.type_text} from column {op.dt_col} on, y {y.type_text}"
    elif isinstance(op, GateNorm):
        yield are_alike(op.x, y) and op.z_col + y.width <= op.z.width, f"x {op.x.type_text}, z {op.z.type_text}"
