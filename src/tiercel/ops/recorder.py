"""Writes a program while a model's forward runs once on symbolic values.

The recorder is passed to the forward; there is no current one. It resolves weights by canonical name, checks each op
against the vocabulary as it is recorded, and decides which activations a linear reads: int8 where the weight is
quantised and the compute dtype allows it, else float32. It knows no model.
"""

import enum
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from tiercel.base.errors import ModelFileError
from tiercel.ops.dims import Dim
from tiercel.ops.program import Attr, Constant, KvLayer, OpCall, Program, Value, Weight
from tiercel.ops.vocabulary import VOCABULARY
from tiercel.quant.formats import Format


class ComputeDtype(enum.StrEnum):
    """What activations are when they meet quantised weights: AUTO rounds them to int8, FLOAT32 never."""

    AUTO = "auto"
    FLOAT32 = "float32"


class Recorder:
    """Records one program. Owner: the function that records a model; it lives for one recording.

    `shapes` and `formats` describe the weights that may be named. Each method records the op of its name.
    """

    def __init__(
        self,
        name: str,
        shapes: Mapping[str, tuple[int, ...]],
        formats: Mapping[str, Format],
        compute_dtype: ComputeDtype,
    ) -> None:
        self._name = name
        self._shapes = shapes
        self._formats = formats
        self._compute_dtype = compute_dtype
        self._ops: list[OpCall] = []
        self._kv_layers: list[KvLayer] = []

    def embed(self, weight: str, *, scale: float = 1.0) -> Value:
        """Look up the step's tokens in a weight [V, E]."""
        return self._record("embed", (), {"w": self.weight(weight)}, {"scale": float(scale)})

    def rms_norm(self, x: Value, weight: str, eps: float, *, heads: int = 1, plus_one: bool = False) -> Value:
        """Normalise each of `heads` equal parts of every row; with `plus_one`, multiply by 1 + weight."""
        w = replace(self.weight(weight), plus_one=plus_one)
        return self._record("rms_norm", (x,), {"w": w}, {"heads": heads, "eps": float(eps)})

    def linear(self, x: Value, weight: str, *, bias: str | None = None) -> Value:
        """Multiply by the transpose of a weight [N, K]."""
        w = self.weight(weight)
        rounds = self._compute_dtype is ComputeDtype.AUTO and w.format.is_quantized
        weights = {"w": w} if bias is None else {"w": w, "bias": self.weight(bias)}
        return self._record("linear", (x,), weights, {"act": "q8" if rounds else "f32"})

    def rope_table(self, name: str, inv_freq: npt.NDArray[np.float32], *, magnitude: float = 1.0) -> Value:
        """Make the cosines and sines of the step's positions; `name` tells tables apart in the text."""
        constant = Constant(name, tuple(float(f) for f in inv_freq))
        return self._record("rope_table", (), {}, {"magnitude": float(magnitude)}, (constant,))

    def rope(self, x: Value, table: Value, *, heads: int) -> Value:
        """Rotate each head of every row."""
        return self._record("rope", (x, table), {}, {"heads": heads})

    def attention(
        self,
        q: Value,
        k: Value,
        v: Value,
        *,
        layer: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
    ) -> Value:
        """Keep k and v in the layer's store, then attend each query to its own sequence.

        q has all rows of the step, or those that need logits.
        """
        attrs: dict[str, Attr] = {"layer": layer, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        attrs |= {"scale": float(scale), "window": window, "softcap": float(softcap)}
        y = self._record("attention", (q, k, v), {}, attrs)
        self._kv_layers.append(KvLayer(layer, kv_heads, head_dim, window))
        return y

    def gated(self, gate: Value, up: Value, act: str) -> Value:
        """Return act(gate) * up."""
        return self._record("gated", (gate, up), {}, {"act": act})

    def add(self, x: Value, y: Value) -> Value:
        """Return x + y."""
        return self._record("add", (x, y), {}, {})

    def select_rows(self, x: Value) -> Value:
        """Keep the rows that need logits."""
        return self._record("select_rows", (x,), {}, {})

    def softcap(self, x: Value, cap: float) -> Value:
        """Return cap * tanh(x / cap)."""
        return self._record("softcap", (x,), {}, {"cap": float(cap)})

    def format_of(self, weight: str) -> Format:
        """Return the format that a weight has in the checkpoint."""
        return self.weight(weight).format

    def weight(self, name: str) -> Weight:
        """Return the reference of a weight.

        Raises:
            ModelFileError: the checkpoint has no such tensor.
        """
        if name not in self._shapes or name not in self._formats:
            raise ModelFileError(f"models: tensor {name} is missing from the checkpoint; {self._name} needs it")
        return Weight(name, self._shapes[name], self._formats[name])

    def finish(self, output: Value) -> Program:
        """Return the program whose result is `output`.

        Raises:
            ShapeError: the program breaks its own rules; see `Program.check`.
        """
        layers = tuple(sorted(self._kv_layers, key=lambda layer: layer.index))
        program = Program(self._name, tuple(self._ops), output, layers)
        program.check()
        return program

    def _record(
        self,
        op: str,
        inputs: tuple[Value, ...],
        weights: Mapping[str, Weight],
        attrs: Mapping[str, Attr],
        constants: tuple[Constant, ...] = (),
    ) -> Value:
        unplaced = Value(len(self._ops), Dim.TOKENS, 0)
        call = OpCall(op, inputs, unplaced, MappingProxyType(dict(weights)), constants, MappingProxyType(dict(attrs)))
        rows, width = VOCABULARY[op].infer(call)
        value = Value(len(self._ops), rows, width)
        self._ops.append(replace(call, output=value))
        return value
