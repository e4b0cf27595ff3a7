"""What drafters' configs say alike: their layers' sizes, what they read of their target, their vocabulary.

`in_one_form` makes of each published form (fields at the top, or under `transformer_layer_config`, `dflash_config`,
`dspark_config`, `eagle_config`) one flat dict and a kind. Fields are checked against the target by name. Source: the
published configs; speculators' names for the nested ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tiercel.base.errors import ModelFileError, UnsupportedModel
from tiercel.models.decoder import default_scale, read_activation, read_n_layers
from tiercel.models.fields import ConfigFields
from tiercel.models.model import Model, TapStream
from tiercel.models.rope import RopeParameters, read_rope

WHERE = "drafter's config"

_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "DFlashDraftModel": "dflash",
        "DFlash2DraftModel": "dflash2",
        "DSparkDraftModel": "dspark",
        "Qwen3DSparkModel": "dspark",
        "K3DSparkModel": "dspark",
        "Eagle3DraftModel": "eagle3",
        "Eagle3Speculator": "eagle3",
        "Eagle3LlamaForCausalLM": "eagle3",
        "LlamaForCausalLMEagle3": "eagle3",
    }
)
_NESTED = ("transformer_layer_config", "dflash_config", "dspark_config", "eagle_config")
# A whole speculators config says of itself what its tensors are; its layers' own class name would say less.
_NOT_NESTED = frozenset({"architectures", "model_type"})

_AUX, _OTHER_AUX = "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"

# What says how a drafter was made or is usually run, and is no arithmetic of a draft pass.
_UNREAD = (
    "speculators_config",
    "speculators_model_type",
    "speculators_version",
    "max_anchors",
    "use_sliding_window",
    "max_window_layers",
    "tie_word_embeddings",
    "target_model_type",
    "target_digest",
    "training",
    "training_block_size",
    "embed_requires_grad",
    "draft_arch",
    "pretraining_tp",
    "quantization_config",  # read where the tensors are
    "attention_mode",
    "ttt_steps",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLayers:
    """The sizes of a drafter's layers, all alike, and what they read. `target_size` is the target's hidden size."""

    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    eps: float
    act: str
    rope: RopeParameters
    attention_scale: float
    has_qkv_bias: bool
    has_o_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    taps: tuple[int, ...]
    target_size: int
    vocab_size: int
    draft_vocab_size: int

    @property
    def has_d2t(self) -> bool:
        """Whether its own vocabulary is smaller than the target's."""
        return self.draft_vocab_size < self.vocab_size

    def attention_weights(self, n_in: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a layer's attention that reads `n_in` columns; names follow `layers.i.self_attn.`."""
        q, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "q_proj.weight": (q, n_in),
            "k_proj.weight": (kv, n_in),
            "v_proj.weight": (kv, n_in),
            "o_proj.weight": (self.hidden_size, q),
        }
        if self.has_qkv_bias:
            shapes |= {"q_proj.bias": (q,), "k_proj.bias": (kv,), "v_proj.bias": (kv,)}
        if self.has_o_bias:
            shapes["o_proj.bias"] = (self.hidden_size,)
        if self.has_qk_norm:
            shapes |= {"q_norm.weight": (self.head_dim,), "k_norm.weight": (self.head_dim,)}
        return shapes

    def mlp_weights(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a layer's feed-forward; names follow `layers.i.mlp.`."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name in ("gate_proj", "up_proj", "down_proj"):
            n, k = (self.intermediate_size, self.hidden_size)
            n, k = (k, n) if name == "down_proj" else (n, k)
            shapes[f"{name}.weight"] = (n, k)
            if self.has_mlp_bias:
                shapes[f"{name}.bias"] = (n,)
        return shapes


def in_one_form(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return a drafter's kind ("dflash" | "dflash2" | "dspark" | "eagle3") and its config without nesting.

    Raises:
        UnsupportedModel: the kind is unknown.
        ModelFileError: a field is said twice, and not alike.
    """
    kind = _read_kind(config)
    found = {name: value for name, value in config.items() if name not in _NESTED}
    said_at: dict[str, str] = dict.fromkeys(found, "the top")
    by_layer = None
    for part in _NESTED:
        inner = config.get(part)
        if inner is None:
            continue
        if not isinstance(inner, Mapping):
            raise ConfigFields(config, WHERE).broken(part, inner, "an object")
        for name, value in inner.items():
            if name in _NOT_NESTED or value is None:
                continue
            if name == _AUX:
                by_layer = value
                continue
            if found.get(name) is not None and found[name] != value:
                raise ConfigFields(config, WHERE).broken(
                    f"{part}.{name}", value, f"{found[name]!r}, as {said_at[name]} says,"
                )
            found[name], said_at[name] = value, part
    taps = _read_aux(config, by_layer)
    for name in (_AUX, _OTHER_AUX):
        found.pop(name, None)
    if taps is not None:
        if found.get("target_layer_ids") not in (None, taps):
            raise ConfigFields(config, WHERE).broken("target_layer_ids", found["target_layer_ids"], f"{taps}")
        found["target_layer_ids"] = taps
    return kind, found


def _read_aux(config: Mapping[str, Any], by_layer: Any) -> Any:
    """Return EAGLE-3's taps as layers from 0: at the top a config counts the embeddings first, nested it does not."""
    flat = [config.get(name) for name in (_AUX, _OTHER_AUX) if config.get(name) is not None]
    if not flat:
        return by_layer
    ids = flat[0]
    if any(other != ids for other in flat) or not isinstance(ids, list) or any(type(i) is not int for i in ids):
        raise ConfigFields(config, WHERE).broken(_AUX, ids, "one list of layers")
    taps = [i - 1 for i in ids]
    if by_layer not in (None, ids, taps):
        raise ConfigFields(config, WHERE).broken(f"eagle_config.{_AUX}", by_layer, f"{taps}, or {ids} as at the top,")
    return taps


def _read_kind(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 else names
    said = config.get("speculators_model_type")
    kind = said if said is not None else _KINDS.get(name) if isinstance(name, str) else None
    if not isinstance(kind, str) or kind not in set(_KINDS.values()):
        known = ", ".join(sorted(set(_KINDS.values())))
        shown = repr(said if said is not None else name)[:80]
        raise UnsupportedModel(f"{WHERE}: architectures {shown} is no drafter that is implemented; {known} are")
    return kind


def read_layers(
    fields: ConfigFields, target: Model, names: frozenset[str], *, own_base: bool, usual_taps: list[int] | None = None
) -> DraftLayers:
    """Read what all drafters' configs say; `names` are the checkpoint's tensors, as published.

    Without `own_base` the rotation's base must be one of the target's.

    Raises:
        ModelFileError: a field is missing, makes no sense, or is of another target.
        UnsupportedModel: a field asks for arithmetic that is not implemented, or a layer cannot be tapped.
    """
    for name in _UNREAD:
        fields.raw(name)
    fields.only("use_aux_hidden_state", True, why="drafters read the target's layers")
    info = target.info
    n_layers = target.n_tap_layers
    if fields.size("num_target_layers", n_layers or 1) != n_layers and n_layers:
        raise fields.broken("num_target_layers", fields.raw("num_target_layers"), f"{n_layers}, as this target has,")
    hidden, n_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    n_kv_heads = fields.size("num_key_value_heads", n_heads)
    if n_heads % n_kv_heads:
        raise fields.broken("num_key_value_heads", n_kv_heads, f"a divisor of num_attention_heads {n_heads}")
    if not fields.has("head_dim") and hidden % n_heads:
        raise fields.broken("hidden_size", hidden, f"head_dim, or a multiple of num_attention_heads {n_heads},")
    head_dim = fields.size("head_dim", hidden // n_heads)
    target_size, draft_vocab = read_ends(fields, target, hidden)
    max_position = fields.size("max_position_embeddings", info.max_len_tokens)
    rope = read_rope(fields, head_dim=head_dim, max_position=max_position, default_theta=10000.0)
    _check_rotation(fields, rope, target, own_base=own_base)
    bias = fields.flag("attention_bias", default=False)
    has_norm = "layers.0.self_attn.q_norm.weight" in names
    return DraftLayers(
        hidden_size=hidden,
        intermediate_size=fields.size("intermediate_size"),
        n_layers=read_n_layers(fields),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        eps=fields.float32("rms_norm_eps", 1e-6),
        act=read_activation(fields, "hidden_act", "silu"),
        rope=rope,
        attention_scale=default_scale(head_dim),
        has_qkv_bias=bias,
        has_o_bias=bias,
        has_mlp_bias=fields.flag("mlp_bias", default=False),
        has_qk_norm=fields.flag("use_qk_norm", default=has_norm),
        taps=read_taps(fields, target, usual_taps),
        target_size=target_size,
        vocab_size=info.vocab_size,
        draft_vocab_size=draft_vocab,
    )


def _check_rotation(fields: ConfigFields, rope: RopeParameters, target: Model, *, own_base: bool) -> None:
    fields.only("rope_layout", "half_split", why="heads are rotated as two halves; reorder the rows of q and k")
    thetas = target.rope_thetas
    if not own_base and thetas and rope.theta not in thetas:
        shown = " or ".join(f"{theta:g}" for theta in sorted(thetas))
        raise fields.broken("rope_theta", rope.theta, f"{shown}, as this target has,")


def read_ends(fields: ConfigFields, target: Model, hidden: int) -> tuple[int, int]:
    """Read the hidden size of the target that it is of, and its own vocabulary; `hidden` is its own hidden size.

    Raises:
        ModelFileError: it is of another target.
    """
    info = target.info
    target_size = fields.size("target_hidden_size", hidden)
    if target_size != info.hidden_size:
        name = "target_hidden_size" if fields.has("target_hidden_size") else "hidden_size"
        raise fields.broken(name, target_size, f"{info.hidden_size}, the hidden size of this target,")
    vocab = fields.size("vocab_size")
    draft_vocab = fields.size("draft_vocab_size", vocab)
    wanted = fields.size("target_vocab_size", vocab)
    if wanted != info.vocab_size:
        name = "target_vocab_size" if fields.has("target_vocab_size") else "vocab_size"
        raise fields.broken(name, wanted, f"{info.vocab_size}, the vocabulary of this target,")
    if draft_vocab > info.vocab_size:
        raise fields.broken("draft_vocab_size", draft_vocab, f"at most the target's {info.vocab_size}")
    return target_size, draft_vocab


def read_taps(
    fields: ConfigFields, target: Model, usual: list[int] | None = None, stream: TapStream = "residual"
) -> tuple[int, ...]:
    """Read the target's layers that it reads a stream of.

    Raises:
        ModelFileError: they are no list of layers that can be tapped.
    """
    taps = fields.raw("target_layer_ids")
    taps = usual if taps is None else taps
    if not isinstance(taps, list) or not taps or any(type(i) is not int for i in taps):
        raise fields.broken("target_layer_ids", taps, "a list of layers")
    try:
        target.check_taps(taps, stream)
    except UnsupportedModel as error:
        raise ModelFileError(f"{WHERE}: target_layer_ids is {taps}: {error}") from None
    return tuple(taps)
