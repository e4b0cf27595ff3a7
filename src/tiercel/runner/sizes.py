"""What a model is made of, in weights and bytes, and what fits in given memory: arithmetic on its recorded program.

Which part a weight belongs to is read off the op that uses it and off its name; no shape is written down here, so that
what is told is what runs. Knows no file and no machine.
"""

import re
from collections.abc import Callable

import msgspec

from tiercel.models.info import ModelInfo
from tiercel.ops.program import OpCall, Program, Weight

EMBEDDING, HEAD, TIED = "embedding", "head", "embedding and head"
EXPERTS, SHARED, ROUTING = "experts", "shared experts", "routers and their projections"
ATTENTION, RECURRENT, DENSE, NORMS, REST = "attention", "recurrent mixers", "feed-forward", "norms", "other"
_ORDER = (EXPERTS, SHARED, ROUTING, ATTENTION, RECURRENT, DENSE, EMBEDDING, HEAD, TIED, NORMS, REST)

_LAYER = re.compile(r"\.(?:layers?|blocks)\.(\d+)\.")
_MIXER = re.compile(r"attn|attention|\.mixer\.|\.conv\.")
_NORM_OPS = ("rms_norm", "layer_norm", "gated_norm", "gate_norm")


class Part(msgspec.Struct, frozen=True):
    """Weights of one kind: how many, how many of them a token is multiplied with, and their bytes in the checkpoint."""

    name: str
    n_weights: int
    n_active: int
    n_bytes: int


class ModelSizes(msgspec.Struct, frozen=True):
    """A model's arithmetic. `kv_bytes` is of one token by the pool's type; states are of one sequence.

    `state_bytes` is what a slot takes here, in float32. `state_stored_bytes` has convolutions' windows in the
    checkpoint's own type, as other engines keep them.
    """

    parts: tuple[Part, ...]
    n_layers: int
    n_attention_layers: int
    n_state_layers: int
    max_len_tokens: int
    kv_bytes: dict[str, int]
    state_bytes: int
    state_stored_bytes: int

    @property
    def n_weights(self) -> int:
        """All weights."""
        return sum(part.n_weights for part in self.parts)

    @property
    def n_active(self) -> int:
        """Weights that one token is multiplied with: of experts those it goes to, of an embedding its row."""
        return sum(part.n_active for part in self.parts)

    @property
    def n_bytes(self) -> int:
        """Bytes of all weights in the checkpoint."""
        return sum(part.n_bytes for part in self.parts)

    @property
    def shared_bytes(self) -> int:
        """Bytes of the experts that every token goes to; 0 if there are none."""
        return sum(part.n_bytes for part in self.parts if part.name == SHARED)

    def saved_by_sharding(self, n_ranks: int) -> int:
        """Bytes that a rank has less when the shared experts are cut over `n_ranks` that had all of them each.

        Source: tensor parallelism of one feed-forward; each rank keeps 1 / n_ranks of its rows and columns.
        """
        return self.shared_bytes - self.shared_bytes // n_ranks


class Fit(msgspec.Struct, frozen=True):
    """What memory holds beside the weights.

    `left_bytes` below 0 is what the weights lack. `n_tokens` is how long one sequence may be, None where nothing but
    the model bounds it; `n_sequences` says how many of each length fit at once.
    """

    memory_bytes: int
    left_bytes: int
    n_tokens: int | None
    n_sequences: dict[int, int]


def what_fits(sizes: ModelSizes, memory_bytes: int, kv_dtype: str = "float16") -> Fit:
    """Return what fits in memory whose rest, after the weights as the checkpoint has them, is for sequences alone.

    A model that keeps nothing of a sequence has no counts.
    """
    left = memory_bytes - sizes.n_bytes
    token, state = sizes.kv_bytes[kv_dtype], sizes.state_bytes
    if left < 0:
        return Fit(memory_bytes, left, 0, {})
    n_tokens = min(sizes.max_len_tokens, max(0, left - state) // token) if token else None
    lengths = [n for n in (4096, 32768) if n < sizes.max_len_tokens] if token else []
    one = {n: state + n * token for n in (*lengths, sizes.max_len_tokens)}
    return Fit(memory_bytes, left, n_tokens, {n: left // size for n, size in one.items() if size})


def sizes_of(
    program: Program, info: ModelInfo, n_bytes_of: Callable[[str, Weight], int], *, stored_float_bytes: int
) -> ModelSizes:
    """Return the arithmetic of a recorded program.

    `n_bytes_of` gives a tensor's bytes in the checkpoint by its name and a reference to it, or to some of its rows; of
    a family of experts it is asked for the first. `stored_float_bytes` is what an element of what is not quantised
    takes there.
    """
    found: dict[str, Part] = {}
    seen: dict[str, str] = {}
    head = _head(program)
    states = {layer.index for layer in program.state_layers}
    sparse = {_layer_of(w) for op in program.ops if op.op == "experts" for w in op.weights.values()}
    for op in program.ops:
        for weight in op.weights.values():
            name = _part_of(op, weight, head, states, sparse)
            if weight.key in seen:
                if {name, seen[weight.key]} == {EMBEDDING, HEAD}:
                    found[TIED] = _tied(found.pop(EMBEDDING), found.pop(HEAD, None), weight)
                continue
            seen[weight.key] = name
            n_bytes = n_bytes_of(weight.name.replace("{}", "0"), weight) * (weight.n_experts or 1)
            before = found.get(name, Part(name, 0, 0, 0))
            n, n_active = weight.n_weights, _active(op, weight)
            found[name] = Part(name, before.n_weights + n, before.n_active + n_active, before.n_bytes + n_bytes)
    layers = {_layer_of(one) for op in program.ops for one in op.weights.values()} - {None}
    stored = sum(
        stored_float_bytes * (s.conv_width - 1) * s.conv_channels + 4 * s.heads * s.key_dim * s.value_dim
        for s in info.state_layers
    )
    return ModelSizes(
        parts=tuple(found[name] for name in _ORDER if name in found),
        n_layers=len(layers),
        n_attention_layers=sum(op.op in ("attention", "latent_attention", "sequence_attention") for op in program.ops),
        n_state_layers=len(states),
        max_len_tokens=info.max_len_tokens,
        kv_bytes={dtype: info.kv_bytes_per_token(dtype) for dtype in info.kv_dtypes},
        state_bytes=info.state_bytes,
        state_stored_bytes=stored,
    )


def _head(program: Program) -> OpCall | None:
    """Return the product that makes the logits; None: the program ends in rows."""
    made = {op.output: op for op in program.ops}
    op = made[program.output]
    if op.op == "softcap":
        op = made[op.inputs[0]]
    return op if op.op == "linear" and not program.is_pooling else None


def _layer_of(weight: Weight) -> int | None:
    match = _LAYER.search(weight.name)
    return int(match[1]) if match else None


def _part_of(op: OpCall, weight: Weight, head: OpCall | None, states: set[int], sparse: set[int | None]) -> str:
    name, layer = weight.name, _layer_of(weight)
    if op.op in ("embed", "embed_rows"):
        return EMBEDDING
    if op is head:
        return HEAD
    if op.op in _NORM_OPS or (len(weight.shape) == 1 and "norm" in name):
        return NORMS
    if op.op == "experts":
        return EXPERTS
    if "shared_expert" in name:
        return SHARED
    if _MIXER.search(name):
        return RECURRENT if layer in states else ATTENTION
    if layer is None:
        return REST
    return ROUTING if layer in sparse else DENSE


def _active(op: OpCall, weight: Weight) -> int:
    if op.op == "experts":
        return weight.n_weights // weight.n_experts * (op.inputs[1].width // 2)
    if op.op in ("embed", "embed_rows"):
        return weight.shape[1]
    return weight.n_weights


def _tied(embedding: Part, head: Part | None, weight: Weight) -> Part:
    """Join an embedding with the head that is the same matrix: all of it is active."""
    assert head is None, "a head of its own beside a tied one"
    return Part(TIED, embedding.n_weights, embedding.n_active - weight.shape[1] + weight.n_weights, embedding.n_bytes)
