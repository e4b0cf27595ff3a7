"""What a backend replays: ops over buffers that are written in place. This is the whole list; nothing else can appear.

A buffer is a matrix of `rows` (a free dimension) by `width` columns. Its kind is F32 (row-major float32, rows `width`
apart) or Q8 (rows rounded to int8 in groups of 32, laid out as the backend likes). All float arithmetic is float32.

    op           reads                      writes   meaning (definitions: `ops.reference`)
    RopeTable    step positions             y        y = [cos | sin](position * inv_freq) * magnitude          [T, 2*d2]
    Embed        step tokens                y        y = row token of w, or masked for -1, times scale          [T, E]
    Norm         x, residual?               y        y = rms_norm(x, w, eps) (+ residual); y is F32 or Q8
    Quantize     x                          y (Q8)   y = x rounded to int8
    LinearGroup  x (F32 or Q8), residual?   y        y[:, y_col : y_col + N] = x @ w.T (+ bias) (+ residual), each part
    RopeKv       qkv, cos_sin?              qkv      norm, then rotation, of q (if any) and k; q stays in place, k and v
                                                     go to the layer's store. qkv = [q: H*D | k: K*D | v: K*D]
    Attention    q (a qkv buffer, or        y        y = attention of q[:, : H*D] over the layer's store, of all rows
                 selected rows), store               or of those that need logits, each as the last of its
                                                     sequence's rows if it `sees_block`                        [., H*D]
    Gated        x [., 2F]                  y        y = act(x[:, :F]) * x[:, F:]; y is F32 or Q8
    SelectRows   x [T, .], step rows        y [R,E]  y = the first E columns of the rows that need logits
    Softcap      x                          x        x = cap * tanh(x / cap)
    Add          x, y                       x        x = x + y
    Router       x (logits)                 y        y = [numbers | weights] of the chosen experts          [., 2*top_k]
    Experts      x (F32 or Q8), route       y        y = the chosen experts' weighted sum; `rounds_hidden`: what they
                                                     make between their products is rounded to int8
    LatentKv     latents, cos_sin?          latents  latents = latent_rows(latents), which go to the layer's store
    LatentQuery  q, cos_sin?                y        y = of each head [q[:nope] @ w_key | q[nope:] rotated]
    LatentOut    x                          y        y = of each head x @ w_value transposed          [., H*v]
    SigmoidGate  x, gate                    y        y = x * sigmoid(gate)
    ShortConv    x, state                   y        y = act(each channel's filter over the sequence), of C columns of x
    DeltaRule    qkv, gate, beta, state     y        y = the gated delta rule's outputs                        [T, H*E]
    DeltaLayer   x, gate, beta, z, state    y        y = GatedNorm of DeltaRule of ShortConv, as one op    [T, H*E]
    GatedNorm    x, z                       y        y = norm of each head of x, or x, times act(columns of z)
    EmbedRows    step positions, segments   y        y = row first + position, or first + segment, of w         [T, E]
    LayerNorm    x                          y        y = layer_norm(x, w, bias, eps)
    Activate     x                          x        x = act(x)
    SequenceAttention  qkv                  y        y = attention of q to all rows of its sequence in the step [T, H*D]
    ResidualMix  sources                    y        y = their sum, weighed by the softmax of w . (each one's norm)
    Given        rows of the step           y        y = the rows that the step brings along                    [T, W]
    Join         x, z                       y        y = [x | z]
    Ssd          xbc, dt, state             y        y = Mamba2's recurrence over the sequence                  [T, H*P]
    GateNorm     x, z                       y        y = norm of each group of x * silu(columns of z)
    BlockConv    x, delta                   y        y = each row with those before it in its block             [T, C]
    Scale        x                          x        x = factor * x

Rules, held by `Lowered.check`: a residual may be y itself (in place), and is not Q8; after RopeKv, columns H*D.. of the
qkv buffer are not defined; the parts of a LinearGroup fill disjoint columns of y; a LinearGroup on Q8 has quantised
weights only and one on F32 may have any; Q8 is read by LinearGroup and Experts only. An Experts' route is a Router's y
(`ops.lower` sees to it). A `Weight` with `plus_one` is used as value + 1; it is a vector always. T, S and R may be 0.

The file is long because it is the whole list.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import ClassVar

import msgspec

from tiercel.base.errors import ShapeError
from tiercel.ops import costs
from tiercel.ops.activations import broken_activation
from tiercel.ops.buffers import Buffer as Buffer
from tiercel.ops.buffers import BufferKind as BufferKind
from tiercel.ops.buffers import are_alike
from tiercel.ops.costs import Cost
from tiercel.ops.dims import ACTIVATION_GROUP, MAX_RESIDUALS, UNARY, Bounds, Dim
from tiercel.ops.lowered_draft import BlockConv as BlockConv
from tiercel.ops.lowered_draft import DraftOp
from tiercel.ops.lowered_draft import Scale as Scale
from tiercel.ops.lowered_draft import rules as draft_rules
from tiercel.ops.lowered_recurrent import DeltaLayer as DeltaLayer
from tiercel.ops.lowered_recurrent import DeltaRule as DeltaRule
from tiercel.ops.lowered_recurrent import GatedNorm as GatedNorm
from tiercel.ops.lowered_recurrent import GateNorm as GateNorm
from tiercel.ops.lowered_recurrent import RecurrentOp
from tiercel.ops.lowered_recurrent import ShortConv as ShortConv
from tiercel.ops.lowered_recurrent import Ssd as Ssd
from tiercel.ops.lowered_recurrent import rules as recurrent_rules
from tiercel.ops.program import Constant, KvLayer, StateLayer, Weight, attr_text, constant_text
from tiercel.ops.routing import Routing
from tiercel.ops.vocabulary_recurrent import delta_rule, ssd


class RopeTable(msgspec.Struct, frozen=True, tag="rope_table"):
    """See the module's list."""

    kind: ClassVar[str] = "rope_table"
    inv_freq: Constant
    magnitude: float
    y: Buffer


class Embed(msgspec.Struct, frozen=True, tag="embed"):
    """See the module's list."""

    kind: ClassVar[str] = "embed"
    w: Weight
    scale: float
    y: Buffer
    skips_first: bool = False  # the row at position 0 is zeros
    masked: Weight | None = None


class Norm(msgspec.Struct, frozen=True, tag="norm"):
    """See the module's list."""

    kind: ClassVar[str] = "norm"
    x: Buffer
    w: Weight
    eps: float
    y: Buffer
    residual: Buffer | None = None


class Quantize(msgspec.Struct, frozen=True, tag="quantize"):
    """See the module's list."""

    kind: ClassVar[str] = "quantize"
    x: Buffer
    y: Buffer


class LinearPart(msgspec.Struct, frozen=True):
    """One product of a group; it fills columns y_col .. y_col + N of the group's y."""

    w: Weight
    bias: Weight | None
    y_col: int

    def __str__(self) -> str:
        return f"[{self.y_col}] {self.w}" + (f"+{self.bias}" if self.bias else "")


class LinearGroup(msgspec.Struct, frozen=True, tag="linear_group"):
    """See the module's list."""

    kind: ClassVar[str] = "linear_group"
    x: Buffer
    parts: tuple[LinearPart, ...]
    y: Buffer
    residual: Buffer | None = None


class RopeKv(msgspec.Struct, frozen=True, tag="rope_kv"):
    """See the module's list."""

    kind: ClassVar[str] = "rope_kv"
    qkv: Buffer
    n_heads: int
    n_kv_heads: int
    head_dim: int
    q_norm: Weight | None
    k_norm: Weight | None
    eps: float
    cos_sin: Buffer | None
    layer: int


class Attention(msgspec.Struct, frozen=True, tag="attention"):
    """See the module's list."""

    kind: ClassVar[str] = "attention"
    q: Buffer
    y: Buffer
    n_heads: int
    n_kv_heads: int
    head_dim: int
    scale: float
    window: int
    softcap: float
    layer: int
    sinks: Weight | None = None
    latent_values: int = 0  # above 0: the store holds latent rows of head_dim columns, the first of which are values
    sees_block: bool = False

    @property
    def value_dim(self) -> int:
        """Columns of a head's result."""
        return self.latent_values or self.head_dim


class Gated(msgspec.Struct, frozen=True, tag="gated"):
    """See the module's list."""

    kind: ClassVar[str] = "gated"
    x: Buffer
    f: int
    act: str
    y: Buffer
    params: tuple[float, ...] = ()


class SelectRows(msgspec.Struct, frozen=True, tag="select_rows"):
    """See the module's list."""

    kind: ClassVar[str] = "select_rows"
    x: Buffer
    y: Buffer


class Softcap(msgspec.Struct, frozen=True, tag="softcap"):
    """See the module's list."""

    kind: ClassVar[str] = "softcap"
    x: Buffer
    cap: float


class Add(msgspec.Struct, frozen=True, tag="add"):
    """See the module's list."""

    kind: ClassVar[str] = "add"
    x: Buffer
    y: Buffer


class Router(msgspec.Struct, frozen=True, tag="router"):
    """See the module's list."""

    kind: ClassVar[str] = "router"
    x: Buffer
    routing: Routing
    bias: Weight | None
    y: Buffer


class Experts(msgspec.Struct, frozen=True, tag="experts"):
    """See the module's list."""

    kind: ClassVar[str] = "experts"
    x: Buffer
    route: Buffer
    gate: Weight
    up: Weight
    down: Weight
    act: str
    y: Buffer
    rounds_hidden: bool
    params: tuple[float, ...] = ()
    gate_bias: Weight | None = None
    up_bias: Weight | None = None
    down_bias: Weight | None = None


class LatentKv(msgspec.Struct, frozen=True, tag="latent_kv"):
    """See the module's list."""

    kind: ClassVar[str] = "latent_kv"
    latents: Buffer
    norm: Weight
    rope: int
    eps: float
    cos_sin: Buffer | None
    interleaved: bool
    layer: int


class LatentQuery(msgspec.Struct, frozen=True, tag="latent_query"):
    """See the module's list. `w` is kv_b_proj whole: of each head, w_key [nope, rank], then w_value [v, rank]."""

    kind: ClassVar[str] = "latent_query"
    q: Buffer
    w: Weight
    n_heads: int
    nope: int
    rope: int
    cos_sin: Buffer | None
    interleaved: bool
    y: Buffer


class LatentOut(msgspec.Struct, frozen=True, tag="latent_out"):
    """See the module's list. `w` as `LatentQuery` has it."""

    kind: ClassVar[str] = "latent_out"
    x: Buffer
    w: Weight
    n_heads: int
    nope: int
    y: Buffer


class SigmoidGate(msgspec.Struct, frozen=True, tag="sigmoid_gate"):
    """See the module's list."""

    kind: ClassVar[str] = "sigmoid_gate"
    x: Buffer
    gate: Buffer
    y: Buffer


class EmbedRows(msgspec.Struct, frozen=True, tag="embed_rows"):
    """See the module's list. `of` is "position" or "segment"."""

    kind: ClassVar[str] = "embed_rows"
    w: Weight
    of: str
    first: int
    y: Buffer


class LayerNorm(msgspec.Struct, frozen=True, tag="layer_norm"):
    """See the module's list."""

    kind: ClassVar[str] = "layer_norm"
    x: Buffer
    w: Weight
    bias: Weight
    eps: float
    y: Buffer


class Activate(msgspec.Struct, frozen=True, tag="activate"):
    """See the module's list."""

    kind: ClassVar[str] = "activate"
    x: Buffer
    act: str


class SequenceAttention(msgspec.Struct, frozen=True, tag="sequence_attention"):
    """See the module's list."""

    kind: ClassVar[str] = "sequence_attention"
    qkv: Buffer
    n_heads: int
    n_kv_heads: int
    head_dim: int
    scale: float
    y: Buffer


class ResidualMix(msgspec.Struct, frozen=True, tag="residual_mix"):
    """See the module's list."""

    kind: ClassVar[str] = "residual_mix"
    sources: tuple[Buffer, ...]
    norm: Weight
    w: Weight
    eps: float
    y: Buffer


class Given(msgspec.Struct, frozen=True, tag="given"):
    """See the module's list."""

    kind: ClassVar[str] = "given"
    y: Buffer


class Join(msgspec.Struct, frozen=True, tag="join"):
    """See the module's list."""

    kind: ClassVar[str] = "join"
    x: Buffer
    z: Buffer
    y: Buffer


NativeOp = (
    RopeTable
    | Embed
    | Norm
    | Quantize
    | LinearGroup
    | RopeKv
    | Attention
    | Gated
    | SelectRows
    | Softcap
    | Add
    | Router
    | Experts
    | LatentKv
    | LatentQuery
    | LatentOut
    | SigmoidGate
    | ShortConv
    | DeltaRule
    | GatedNorm
    | DeltaLayer
    | EmbedRows
    | LayerNorm
    | Activate
    | SequenceAttention
    | ResidualMix
    | Given
    | Join
    | Ssd
    | GateNorm
    | BlockConv
    | Scale
)
"""Any op of a lowered program."""


# A buffer that is changed in place is read too; y is only written, unless the op is an Add.
_READ_FIELDS: Mapping[type, tuple[str, ...]] = MappingProxyType(
    {
        RopeTable: (),
        Embed: (),
        Norm: ("x", "residual"),
        Quantize: ("x",),
        LinearGroup: ("x", "residual"),
        RopeKv: ("qkv", "cos_sin"),
        Attention: ("q",),
        Gated: ("x",),
        SelectRows: ("x",),
        Softcap: ("x",),
        Add: ("x", "y"),
        Router: ("x",),
        Experts: ("x", "route"),
        LatentKv: ("latents", "cos_sin"),
        LatentQuery: ("q", "cos_sin"),
        LatentOut: ("x",),
        SigmoidGate: ("x", "gate"),
        ShortConv: ("x",),
        DeltaRule: ("qkv", "gate", "beta"),
        GatedNorm: ("x", "z"),
        DeltaLayer: ("x", "gate", "beta", "z"),
        EmbedRows: (),
        LayerNorm: ("x",),
        Activate: ("x",),
        SequenceAttention: ("qkv",),
        ResidualMix: ("sources",),
        Given: (),
        Join: ("x", "z"),
        Ssd: ("xbc", "dt"),
        GateNorm: ("x", "z"),
        BlockConv: ("x", "delta"),
        Scale: ("x",),
    }
)


def writes(op: NativeOp) -> Buffer:
    """Return the one buffer that an op writes."""
    if isinstance(op, RopeKv):
        return op.qkv
    if isinstance(op, LatentKv):
        return op.latents
    return op.x if isinstance(op, Softcap | Add | Activate | Scale) else op.y


def reads(op: NativeOp) -> tuple[Buffer, ...]:
    """Return the buffers that an op reads, each once; one that is also written is among them."""
    if isinstance(op, ResidualMix):
        return tuple(dict.fromkeys(op.sources))
    return tuple(dict.fromkeys(b for name in _READ_FIELDS[type(op)] if (b := getattr(op, name)) is not None))


def weights_of(op: NativeOp) -> tuple[Weight, ...]:
    """Return the weights that an op reads."""
    if isinstance(op, LinearGroup):
        return tuple(w for part in op.parts for w in (part.w, part.bias) if w is not None)
    if isinstance(op, ShortConv):
        return op.w + op.bias
    if isinstance(op, DeltaLayer):
        return op.w + op.bias + tuple(w for w in (op.a_log, op.dt_bias, op.norm) if w is not None)
    return tuple(v for name in op.__struct_fields__ if isinstance(v := getattr(op, name), Weight))


class Lowered(msgspec.Struct, frozen=True):
    """A program of native ops. `output` is the logits, F32 [R, V]; with `is_pooling`, a pooling model's rows [R, W].

    `hidden`, F32 [T, E], is what a draft head reads.
    """

    name: str
    ops: tuple[NativeOp, ...]
    output: Buffer
    kv_layers: tuple[KvLayer, ...]
    state_layers: tuple[StateLayer, ...] = ()
    is_pooling: bool = False
    hidden: Buffer | None = None

    def buffers(self) -> tuple[Buffer, ...]:
        """Return each buffer once, in order of first writing."""
        return tuple(dict.fromkeys(writes(op) for op in self.ops))

    def weights(self) -> tuple[Weight, ...]:
        """Return each weight once, in order of use."""
        return tuple(dict.fromkeys(one for op in self.ops for w in weights_of(op) for one in w.each()))

    def constants(self) -> tuple[Constant, ...]:
        """Return each constant once, in order of use."""
        return tuple(dict.fromkeys(op.inv_freq for op in self.ops if isinstance(op, RopeTable)))

    def text(self) -> str:
        """Return the stable text form: one line an op."""
        lines = [f"lowered {self.name}"]
        lines += [str(layer) for layer in (*self.kv_layers, *self.state_layers)]
        lines += [constant_text(constant) for constant in self.constants()]
        lines += [_line(op) for op in self.ops]
        lines += [] if self.hidden is None else [f"hidden {self.hidden}"]
        return "\n".join([*lines, f"return {self.output}"]) + "\n"

    def check(self) -> None:
        """Check the rules of the module's list.

        Raises:
            ShapeError: one is broken.
        """
        written: set[Buffer] = set()
        for op in self.ops:
            for buffer in reads(op):
                _need(buffer in written, op, f"{buffer} is read before it is written")
            written.add(writes(op))
            for claim, broken in _rules(op):
                _need(claim, op, broken)
        if self.output not in written or self.output.rows is not Dim.ROWS or self.output.kind is not BufferKind.F32:
            raise ShapeError(f"ops.lowered: output {self.output} {self.output.type_text}; a written f32[R,V] is needed")
        if self.hidden is not None and (self.hidden not in written or self.hidden.kind is not BufferKind.F32):
            raise ShapeError(f"ops.lowered: hidden {self.hidden} {self.hidden.type_text}; a written f32 is needed")
        if len({b.id for b in written}) != len(written):
            raise ShapeError("ops.lowered: two buffers have one id")


def cost(op: NativeOp, bounds: Bounds, kv_dtype: str = "float16") -> Cost:
    """Return the operations and bytes of an op in a step of the given size, over a pool of `kv_dtype`."""
    m = bounds.of(writes(op).rows)
    if isinstance(op, LinearGroup):
        total = Cost(0, 0)
        for part in op.parts:
            total += costs.linear(m, part.w.shape[0], 0, part.w.nbytes) + Cost(2 * m * part.w.n_weights, 0)
        return total + Cost(0, m * (_row_bytes(op.x) + (_row_bytes(op.residual) if op.residual else 0)))
    if isinstance(op, Attention) and op.latent_values:
        rope = op.head_dim - op.latent_values
        return costs.latent_attention(m, bounds, op.n_heads, op.latent_values, rope, kv_dtype)
    if isinstance(op, LatentQuery | LatentOut):
        # Either reads its part of every head's weights, as float32.
        n_weights = op.w.n_weights * (op.nope if isinstance(op, LatentQuery) else op.w.shape[0] // op.n_heads - op.nope)
        n_weights //= op.w.shape[0] // op.n_heads
        n_bytes = 4 * n_weights if m else 0
        return Cost(2 * m * n_weights, n_bytes + m * (sum(map(_row_bytes, reads(op))) + _row_bytes(op.y)))
    if isinstance(op, Attention):
        return costs.attention(m, bounds, op.n_heads, op.n_kv_heads, op.head_dim, op.window, kv_dtype)
    if isinstance(op, Experts):
        families = (op.gate, op.up, op.down)
        each = [(w.n_weights // w.n_experts, w.nbytes // w.n_experts) for w in families]
        return costs.experts(m, op.gate.n_experts, op.route.width // 2, each, op.x.width, op.y.width)
    if isinstance(op, DeltaRule):
        return delta_rule(op.key_heads, op.value_heads, op.key_dim, op.value_dim, bounds, op.gate.width)
    if isinstance(op, Ssd):
        return ssd(op.heads, op.head_dim, op.groups, op.state_dim, bounds)
    if isinstance(op, DeltaLayer):
        windows = bounds.n_sequences * 8 * (op.width - 1) * op.channels + 4 * op.width * op.channels
        rule = delta_rule(op.key_heads, op.value_heads, op.key_dim, op.value_dim, bounds, op.dt_bias.n_weights)
        return rule + Cost(m * (2 * op.width * op.channels + 10 * op.y.width), windows + m * _row_bytes(op.y))
    if isinstance(op, SequenceAttention):
        return costs.attention(m, bounds, op.n_heads, op.n_kv_heads, op.head_dim, 0, "float32")
    n_bytes = m * (sum(map(_row_bytes, reads(op))) + _row_bytes(writes(op)))
    per_column = {"norm": 4, "gated": 5, "quantize": 3, "rope_kv": 3, "softcap": 4, "add": 1, "embed": 1}
    per_column |= {"embed_rows": 1, "layer_norm": 6, "activate": 8}
    n_passes = len(op.sources) if isinstance(op, ResidualMix) else 1
    per_column |= {"residual_mix": 6, "scale": 1}
    per_column |= {"block_conv": 3 * op.taps} if isinstance(op, BlockConv) else {}
    return Cost(per_column.get(op.kind, 0) * n_passes * m * writes(op).width, n_bytes)


def _row_bytes(buffer: Buffer) -> int:
    """Return the bytes of one row; a Q8 row is a byte a column and a float32 a group, without a backend's padding."""
    if buffer.kind is BufferKind.F32:
        return 4 * buffer.width
    return buffer.width + 4 * (buffer.width // ACTIVATION_GROUP)


def _rules(op: NativeOp) -> Iterator[tuple[bool, str]]:
    """Yield each rule of an op's shapes as (holds, what is wrong)."""
    y = writes(op)
    if isinstance(op, Experts):
        yield op.route.kind is BufferKind.F32, "route is no f32"
    elif not isinstance(op, LinearGroup):
        yield all(b.kind is BufferKind.F32 for b in reads(op)), "q8 is read by linear_group and experts only"
    if not isinstance(op, Norm | Gated | Quantize):
        yield y.kind is BufferKind.F32, f"cannot write {y.kind}"
    if y.kind is BufferKind.Q8:
        yield y.width % ACTIVATION_GROUP == 0, f"q8 of {y.width} columns; groups of {ACTIVATION_GROUP} are needed"
    if isinstance(op, Norm | LinearGroup) and op.residual is not None:
        yield (
            are_alike(op.residual, y) and y.kind is BufferKind.F32,
            f"residual {op.residual.type_text}, y {y.type_text}",
        )
    if isinstance(op, RopeTable):
        yield y.width == 2 * len(op.inv_freq.values), f"y is {y.width} wide"
    elif isinstance(op, Embed):
        yield y.width == op.w.shape[1] and (op.masked is None or op.masked.shape == (y.width,)), f"y is {y.width} wide"
    elif isinstance(op, Norm):
        yield are_alike(op.x, y) and op.w.shape == (y.width,), f"x {op.x.type_text}, w {op.w}, y {y.type_text}"
    elif isinstance(op, Quantize):
        yield are_alike(op.x, y) and y.kind is BufferKind.Q8, f"x {op.x.type_text}, y {y.type_text}"
    elif isinstance(op, LinearGroup):
        yield from _group_rules(op)
    elif isinstance(op, RopeKv):
        yield y.width == (op.n_heads + 2 * op.n_kv_heads) * op.head_dim, f"qkv is {y.width} wide"
        norms = [w for w in (op.q_norm, op.k_norm) if w is not None]
        yield all(w.shape == (op.head_dim,) for w in norms), "a head norm's weight is no [head_dim]"
        yield op.cos_sin is None or op.cos_sin.width <= op.head_dim, "the table is wider than a head"
    elif isinstance(op, Attention):
        fits = op.n_heads * op.head_dim <= op.q.width and y.rows is op.q.rows
        fits = fits and y.width == op.n_heads * op.value_dim and op.latent_values <= op.head_dim
        fits = fits and (not op.latent_values or op.n_kv_heads == 1)
        yield fits, f"q {op.q.type_text}, y {y.type_text}"
    elif isinstance(op, Gated):
        yield op.x.width == 2 * op.f and y.width == op.f and op.x.rows is y.rows, f"x {op.x.type_text}, f {op.f}"
        fault = broken_activation(op.act, op.params)
        yield fault is None, f"{fault}"
    elif isinstance(op, SelectRows):
        yield op.x.rows is Dim.TOKENS and y.rows is Dim.ROWS and op.x.width >= y.width, f"x {op.x.type_text}"
    elif isinstance(op, LatentKv | LatentQuery | LatentOut | SigmoidGate):
        yield from _latent_rules(op)
    elif isinstance(op, RecurrentOp):
        yield from recurrent_rules(op)
    elif isinstance(op, DraftOp):
        yield from draft_rules(op)
    elif isinstance(op, Add):
        yield op.x != op.y and are_alike(op.x, op.y), f"x {op.x.type_text}, y {op.y.type_text}"
    elif isinstance(op, Router):
        fits = op.x.width == op.routing.n_experts and y.width == 2 * op.routing.top_k and op.x.rows is y.rows
        yield fits and op.routing.broken() is None, f"x {op.x.type_text}, y {y.type_text}, {op.routing}"
    elif isinstance(op, Experts):
        f, n = op.gate.shape[0], op.gate.n_experts
        fits = op.gate.shape == op.up.shape == (f, op.x.width) and op.down.shape == (y.width, f)
        yield fits and op.x.rows is y.rows is op.route.rows, f"x {op.x.type_text}, {op.gate}, {op.up}, {op.down}"
        yield op.up.n_experts == op.down.n_experts == n >= 1, f"{op.gate}, {op.up}, {op.down}"
        rounds = op.x.kind is BufferKind.Q8
        yield not rounds or (op.gate.format.is_quantized and op.up.format.is_quantized), f"q8 activations for {op.gate}"
        yield not op.rounds_hidden or op.down.format.is_quantized, f"q8 activations for {op.down}"
        yield len({b.id for b in (op.x, op.route, y)}) == 3, "y must not be what is read"
    elif isinstance(op, EmbedRows):
        yield y.width == op.w.shape[1] and y.rows is Dim.TOKENS, f"y {y.type_text}"
    elif isinstance(op, LayerNorm):
        fits = are_alike(op.x, y) and op.w.shape == op.bias.shape == (y.width,)
        yield fits, f"x {op.x.type_text}, w {op.w}, bias {op.bias}, y {y.type_text}"
    elif isinstance(op, Activate):
        yield op.act in UNARY, f"act {op.act!r}"
    elif isinstance(op, SequenceAttention):
        q_width, kv_width = op.n_heads * op.head_dim, op.n_kv_heads * op.head_dim
        fits = op.qkv.width == q_width + 2 * kv_width and y.width == q_width and op.qkv.rows is y.rows is Dim.TOKENS
        yield fits, f"qkv {op.qkv.type_text}, y {y.type_text}"
    elif isinstance(op, ResidualMix):
        fits = (
            all(are_alike(x, y) for x in op.sources) and y not in op.sources and 1 <= len(op.sources) <= MAX_RESIDUALS
        )
        yield fits and op.norm.n_weights == op.w.n_weights == y.width, f"y {y.type_text}, norm {op.norm}, w {op.w}"
    elif isinstance(op, Join):
        fits = op.x.rows is op.z.rows is y.rows and op.x.width + op.z.width == y.width and y not in (op.x, op.z)
        yield fits, f"x {op.x.type_text}, z {op.z.type_text}, y {y.type_text}"


def _group_rules(op: LinearGroup) -> Iterator[tuple[bool, str]]:
    end = 0
    for part in sorted(op.parts, key=lambda part: part.y_col):
        n, k = part.w.shape
        yield part.y_col >= end, f"part at column {part.y_col} overlaps the one before it"
        end = part.y_col + n
        yield k == op.x.width, f"x is {op.x.width} wide, {part.w}"
        yield part.bias is None or part.bias.shape == (n,), f"bias {part.bias} of {part.w}"
        yield op.x.kind is BufferKind.F32 or part.w.format.is_quantized, f"q8 activations for {part.w}"
    yield bool(op.parts) and end <= op.y.width, f"parts end at column {end}, y is {op.y.width} wide"
    yield op.residual is None or sum(part.w.shape[0] for part in op.parts) == op.y.width, "residual on a part of y"
    yield op.x.rows is op.y.rows and op.x != op.y, f"x {op.x.type_text}, y {op.y.type_text}"


def _latent_rules(op: LatentKv | LatentQuery | LatentOut | SigmoidGate) -> Iterator[tuple[bool, str]]:
    if isinstance(op, LatentKv):
        yield op.norm.shape == (op.latents.width - op.rope,), f"latents {op.latents.type_text}, norm {op.norm}"
    if isinstance(op, LatentKv | LatentQuery):
        fits = op.cos_sin is None or (op.cos_sin.width == op.rope and op.cos_sin.rows is Dim.TOKENS)
        yield fits, "the table is not as wide as the rotated part"
    if isinstance(op, LatentQuery):
        heads, rank = op.n_heads, op.w.shape[1]
        fits = op.q.width == heads * (op.nope + op.rope) and op.y.width == heads * (rank + op.rope)
        yield fits and op.q.rows is op.y.rows and op.q != op.y, f"q {op.q.type_text}, w {op.w}, y {op.y.type_text}"
    if isinstance(op, LatentOut):
        fits = op.x.width == op.n_heads * op.w.shape[1] and op.y.width == op.w.shape[0] - op.n_heads * op.nope
        yield fits and op.x.rows is op.y.rows and op.x != op.y, f"x {op.x.type_text}, w {op.w}, y {op.y.type_text}"
    if isinstance(op, SigmoidGate):
        fits = are_alike(op.x, op.y) and op.x.rows is op.gate.rows and op.x.width % op.gate.width == 0
        yield fits, f"x {op.x.type_text}, gate {op.gate.type_text}, y {op.y.type_text}"


def _line(op: NativeOp) -> str:
    y = writes(op)
    parts = [op.kind]
    for name in op.__struct_fields__:
        value = getattr(op, name)
        if (
            value is None
            or value == ()
            or (name in ("latent_values", "skips_first", "sees_block") and not value)
            or (isinstance(value, Buffer) and value == y and name not in ("residual", "qkv", "x", "latents"))
        ):
            continue
        if name == "parts":
            parts += [str(part) for part in value]
        elif isinstance(value, tuple):
            parts += [f"{name}={one}" for one in value]
        elif isinstance(value, Buffer | Constant) and name in ("x", "q", "qkv", "latents", "inv_freq"):
            parts.append(str(value))
        else:
            parts.append(f"{name}={attr_text(value) if isinstance(value, float) else value}")
    return f"{y} = {' '.join(parts)} : {y.type_text}"


def _need(holds: bool, op: NativeOp, broken: str) -> None:
    if not holds:
        raise ShapeError(f"ops.lowered: in {_line(op)}: {broken}")
