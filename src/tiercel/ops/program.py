"""A recorded step: a flat list of ops over values that are each written once, with its text form.

The program is complete: with the weights it names, a step's tokens and a store of keys and values, it gives the logits.
It knows no buffers, no order of memory and no backend; `ops.lower` turns it into what a backend replays.

The text is stable (golden tests compare it): one line an op, `%n = op %inputs attributes w=weights : kind[rows,width]`.
"""

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from tiercel.base.errors import ShapeError
from tiercel.ops.dims import Dim
from tiercel.quant.formats import Format

Attr = int | float | str


class Weight(msgspec.Struct, frozen=True):
    """A tensor of the checkpoint, by its canonical name. With `plus_one`, what is used is the stored value plus one.

    With `n_experts` it is that many tensors of one shape and format, one an expert, whose number stands for the `{}` in
    the name.

    With `rows`, it is those rows of a matrix, and `shape` is theirs.
    """

    name: str
    shape: tuple[int, ...]
    format: Format
    plus_one: bool = False
    n_experts: int = 0
    rows: tuple[int, int, int] | None = None  # (p, a, n): of each p rows of the tensor, n from the a-th on

    def each(self) -> "tuple[Weight, ...]":
        """Return the single tensors."""
        if not self.n_experts:
            return (self,)
        names = (self.name.replace("{}", str(e)) for e in range(self.n_experts))
        return tuple(Weight(name, self.shape, self.format, self.plus_one) for name in names)

    @property
    def key(self) -> str:
        """What tells it from other weights, and other rows, of a checkpoint."""
        return self.name if self.rows is None else "{}[{}:{}+{}]".format(self.name, *self.rows)

    @property
    def n_weights(self) -> int:
        """Number of elements."""
        count = self.n_experts or 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def nbytes(self) -> int:
        """Bytes in the file's layout."""
        return self.format.nbytes(self.n_weights)

    def __str__(self) -> str:
        extents = (f"{self.n_experts}x" if self.n_experts else "") + ",".join(map(str, self.shape))
        return f"{self.key}{'+1' if self.plus_one else ''}({self.format}[{extents}])"


class Constant(msgspec.Struct, frozen=True):
    """A vector that the config gives, not the checkpoint. Each value is exactly a float32."""

    name: str
    values: tuple[float, ...]

    def __str__(self) -> str:
        return f"{self.name}(f32[{len(self.values)}])"


class Value(msgspec.Struct, frozen=True):
    """A float32 matrix that one op writes; `rows` is its free dimension. A model's forward passes these around."""

    id: int
    rows: Dim
    width: int

    def __str__(self) -> str:
        return f"%{self.id}"

    @property
    def type_text(self) -> str:
        """Kind and shape, as the text form shows them."""
        return f"f32[{self.rows},{self.width}]"


class OpCall(msgspec.Struct, frozen=True):
    """One op of the vocabulary, applied. What inputs, weights and attributes mean is the op's (`ops.vocabulary`)."""

    op: str
    inputs: tuple[Value, ...]
    output: Value
    weights: Mapping[str, Weight] = msgspec.field(default_factory=lambda: MappingProxyType({}))
    constants: tuple[Constant, ...] = ()
    attrs: Mapping[str, Attr] = msgspec.field(default_factory=lambda: MappingProxyType({}))

    def integer(self, name: str) -> int:
        """Return an attribute that is an int."""
        value = self.attrs[name]
        assert isinstance(value, int), f"{self.op}.{name} is {value!r}"
        return value

    def real(self, name: str) -> float:
        """Return an attribute that is a float."""
        value = self.attrs[name]
        assert isinstance(value, float), f"{self.op}.{name} is {value!r}"
        return value

    def word(self, name: str) -> str:
        """Return an attribute that is a string."""
        value = self.attrs[name]
        assert isinstance(value, str), f"{self.op}.{name} is {value!r}"
        return value

    def __str__(self) -> str:
        parts = [self.op, *map(str, self.inputs), *map(str, self.constants)]
        parts += [f"{name}={attr_text(value)}" for name, value in self.attrs.items()]
        parts += [f"{name}={weight}" for name, weight in self.weights.items()]
        return f"{self.output} = {' '.join(parts)} : {self.output.type_text}"


class KvLayer(msgspec.Struct, frozen=True):
    """One layer's keys and values: what a token leaves behind. `window` 0 keeps every token; W needs the last W.

    `latent_values` above 0: the token leaves one latent row of `head_dim` columns, a key whose first `latent_values`
    columns are the value too.
    """

    index: int
    n_kv_heads: int
    head_dim: int
    window: int
    latent_values: int = 0

    def __str__(self) -> str:
        kept = f" window={self.window}" if self.window else ""
        kept += f" latent={self.latent_values}" if self.latent_values else ""
        return f"kv {self.index}: K={self.n_kv_heads} D={self.head_dim}{kept}"


class StateLayer(msgspec.Struct, frozen=True):
    """What one layer keeps of a sequence whatever its length: float32, zeros before its first token.

    A convolution's last `conv_width` - 1 inputs of `conv_channels`, then `heads` matrices of `key_dim` by `value_dim`.
    """

    index: int
    kind: str
    conv_channels: int
    conv_width: int
    heads: int
    key_dim: int
    value_dim: int

    @property
    def conv_bytes(self) -> int:
        """Bytes of the convolution's window, on whole cache lines."""
        return -(-4 * (self.conv_width - 1) * self.conv_channels // 64) * 64

    @property
    def nbytes(self) -> int:
        """Bytes of all of it; value columns are kept by sixteens."""
        return self.conv_bytes + 4 * self.heads * self.key_dim * (-(-self.value_dim // 16) * 16)

    def __str__(self) -> str:
        conv = f" C={self.conv_channels} W={self.conv_width}" if self.conv_channels else ""
        heads = f" H={self.heads} D={self.key_dim} E={self.value_dim}" if self.heads else ""
        return f"state {self.index}: {self.kind}{conv}{heads}"


class Program(msgspec.Struct, frozen=True):
    """A recorded step. `output` is the logits, [R, V]; with `is_pooling`, a pooling model's rows, [R, W].

    `hidden`, [T, E], is what a draft head reads of each token, or reads again of what it made itself.
    """

    name: str
    ops: tuple[OpCall, ...]
    output: Value
    kv_layers: tuple[KvLayer, ...]
    state_layers: tuple[StateLayer, ...] = ()
    is_pooling: bool = False
    hidden: Value | None = None

    def constants(self) -> tuple[Constant, ...]:
        """Return each constant once, in order of use."""
        return tuple(dict.fromkeys(c for op in self.ops for c in op.constants))

    def weights(self) -> tuple[Weight, ...]:
        """Return each weight once, in order of use."""
        return tuple(dict.fromkeys(one for op in self.ops for w in op.weights.values() for one in w.each()))

    def text(self) -> str:
        """Return the stable text form."""
        lines = [f"program {self.name}"]
        lines += [str(layer) for layer in (*self.kv_layers, *self.state_layers)]
        lines += [constant_text(constant) for constant in self.constants()]
        lines += [str(op) for op in self.ops]
        lines += [] if self.hidden is None else [f"hidden {self.hidden}"]
        return "\n".join([*lines, f"return {'rows ' if self.is_pooling else ''}{self.output}"]) + "\n"

    def check(self) -> None:
        """Check that each value is written once, before it is read, and that keys and values have one writer a layer.

        Raises:
            ShapeError: it is not so.
        """
        written: set[int] = set()
        for op in self.ops:
            for value in op.inputs:
                _need(value.id in written, f"{self.name}: {op} reads {value} before it is written")
            _need(op.output.id not in written, f"{self.name}: {op} writes {op.output} a second time")
            written.add(op.output.id)
        _need(self.output.id in written, f"{self.name}: no op writes the output {self.output}")
        _need(self.hidden is None or self.hidden.id in written, f"{self.name}: no op writes the rows {self.hidden}")
        _need(sum(op.op == "given" for op in self.ops) <= 1, f"{self.name}: rows are taken from the step twice")
        keepers = ("attention", "latent_attention", "keep_kv", "keep_latents")
        layers = [op.integer("layer") for op in self.ops if op.op in keepers]
        known = [layer.index for layer in self.kv_layers]
        _need(
            sorted(layers) == known == sorted(set(known)),
            f"{self.name}: attention of layers {layers}, keys and values of layers {known}",
        )


def attr_text(value: Attr) -> str:
    """Return an attribute as the text forms show it: floats by their shortest exact digits, up to nine."""
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def constant_text(constant: Constant) -> str:
    """Return a constant's line: its first and last values say which table it is."""
    values = constant.values
    shown = [f"{v:.6g}" for v in values] if len(values) <= 4 else [f"{v:.6g}" for v in values[:3]]
    if len(values) > 4:
        shown += ["..", f"{values[-1]:.6g}"]
    return f"const {constant} = {' '.join(shown)}"


def _need(holds: bool, message: str) -> None:
    if not holds:
        raise ShapeError(f"ops.program: {message}")
