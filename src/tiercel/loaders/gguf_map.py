"""GGUF metadata and tensor names -> Hugging Face configuration and names, for llama, qwen2, qwen3, qwen3moe and gemma3.

It knows the conventions of GGUF writers; it does not know what the models compute. Three conventions matter:

- **llama**: the writers reorder the rows of q and k (and their biases) so that rotary pairs are neighbours. `place`
  gives the permutation that restores halves: row (head, half, j) of ours is row (head, j, half) of the file.
- **rope_freqs.weight**: Llama 3.1's rotary scaling is stored as D/2 divisors of the frequencies, which do not tell the
  four parameters they came from. The configuration gets `rope_parameters = {"rope_type": "tiercel_freq_factors",
  "rope_theta": .., "freq_factors": [D/2 floats]}`, and frequency j is theta^(-2j/D) / freq_factors[j]. The tensor also
  stays in the checkpoint under its own name.
- **gemma3**: norm weights are stored with their +1 already added.

Every key under the architecture's prefix is honoured, accepted at a value that changes nothing, or refused by name.
Source: the GGUF specification, and the behaviour of the files that llama.cpp's converters write.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from tiercel.base.errors import ModelFileError, UnsupportedModel
from tiercel.loaders.gguf_config import (
    Config,
    Facts,
    read_common,
    read_gemma3,
    read_llama,
    read_qwen2,
    read_qwen3,
    read_qwen3_moe,
    refuse_what_no_family_has,
)
from tiercel.loaders.gguf_fields import Fields, scalar
from tiercel.loaders.gguf_file import GgufTensor, Value
from tiercel.loaders.gguf_vocabulary import check_vocabulary, token_ids
from tiercel.quant.formats import Format

_MAX_LAYERS = 4096
_ROPE_FACTORS = "rope_freqs.weight"
_EMBEDDING = "token_embd.weight"
_REQUIRED = (_EMBEDDING, "output_norm.weight")

_MODEL_NAMES: Mapping[str, str] = MappingProxyType(
    {
        _EMBEDDING: "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
)
_MATRICES: Mapping[str, str] = MappingProxyType(
    {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)
_NORMS: Mapping[str, str] = MappingProxyType({"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"})
# Of a model with experts in every layer: the router, and one tensor of all experts.
_EXPERT_MATRICES: Mapping[str, str] = MappingProxyType(
    {name: place for name, place in _MATRICES.items() if not name.startswith("ffn_")}
    | {
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.experts.gate_proj",
        "ffn_up_exps": "mlp.experts.up_proj",
        "ffn_down_exps": "mlp.experts.down_proj",
    }
)
_QK_NORMS: Mapping[str, str] = MappingProxyType({"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"})
_GEMMA_NORMS: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
_ATTENTION_BIASES = ("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias")
_MLP_BIASES = ("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias")


@dataclass(frozen=True)
class _Family:
    """What is special about one architecture's files."""

    model_type: str
    architecture: str
    norms: Mapping[str, str]
    biases: tuple[str, ...]  # the biases that the model can have
    read: Callable[[Fields, Config, "Facts"], None]
    has_interleaved_rope: bool = False
    has_freq_factors: bool = False
    norms_include_one: bool = False
    has_experts: bool = False  # in every layer, instead of the dense feed-forward

    def layer_names(self) -> dict[str, str]:
        """Map `blk.<i>.` names, without that prefix, onto names under `model.layers.<i>.`."""
        matrices = _EXPERT_MATRICES if self.has_experts else _MATRICES
        weights = {f"{old}.weight": f"{new}.weight" for old, new in {**matrices, **self.norms}.items()}
        return weights | {bias: f"{_MATRICES[bias.removesuffix('.bias')]}.bias" for bias in self.biases}


@dataclass(frozen=True)
class Placed:
    """Where a tensor of the file belongs: its Hugging Face name, and the row order that its values need."""

    name: str
    row_permutation: npt.NDArray[np.intp] | None


@dataclass(frozen=True)
class Mapped:
    """A GGUF model in Hugging Face terms."""

    config: Config
    places: Mapping[str, Placed]  # by the file's tensor name
    norm_weights_include_one: bool


def map_model(
    metadata: Mapping[str, Value],
    tensors: Mapping[str, GgufTensor],
    data: Callable[[GgufTensor], npt.NDArray[np.uint8]],
    path: Path,
) -> Mapped:
    """Translate one model. `data` gives a tensor's bytes; only `rope_freqs.weight` is read.

    Raises:
        UnsupportedModel: an architecture, field or tensor that Tiercel does not compute; named.
        ModelFileError: fields and tensors contradict each other.
    """
    where = str(path)
    arch, family = _family(metadata, where)
    fields = Fields(metadata, arch, where)
    n_layers, parts = _layers(fields, tensors, family, where)
    config: Config = {"architectures": [family.architecture], "model_type": family.model_type}
    config |= read_common(fields, tensors[_EMBEDDING].shape, n_layers, where, is_tied="output.weight" not in tensors)
    factors = _freq_factors(tensors, data, config["head_dim"], where) if family.has_freq_factors else None
    facts = Facts(parts, factors)
    family.read(fields, config, facts)
    refuse_what_no_family_has(fields, has_experts=family.has_experts)
    fields.finish()
    check_vocabulary(metadata, config["vocab_size"], where)
    config |= token_ids(metadata, config["vocab_size"], where)
    return Mapped(config, _places(tensors, family, config, where), family.norms_include_one)


def unpermute_rows(n_heads: int, head_dim: int) -> npt.NDArray[np.intp]:
    """Return p such that `file_rows[p]` has rotary halves where the file has rotary pairs.

    Of each head, file row 2j + h holds what row h * D/2 + j must hold. With D = 4: p = [0, 2, 1, 3].
    """
    pairs = np.arange(n_heads * head_dim, dtype=np.intp).reshape(n_heads, head_dim // 2, 2)
    return np.ascontiguousarray(pairs.transpose(0, 2, 1)).reshape(-1)


def _family(metadata: Mapping[str, Value], where: str) -> tuple[str, _Family]:
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise ModelFileError(f"{where}: general.architecture is missing; a model's .gguf names it; fetch it again")
    kind = scalar(metadata, "general.type", "model", where)
    if kind != "model":
        raise UnsupportedModel(f"{where}: general.type is {str(kind)[:40]!r}; a file of type 'model' is needed")
    version = scalar(metadata, "general.quantization_version", 2, where)
    if version != 2:
        raise UnsupportedModel(f"{where}: general.quantization_version is {str(version)[:24]}; 2 is read; convert it")
    if arch not in _FAMILIES:
        known = ", ".join(sorted(_FAMILIES))
        raise UnsupportedModel(
            f"{where}: general.architecture is {arch[:40]!r}; Tiercel reads {known} from .gguf files"
        )
    return arch, _FAMILIES[arch]


def _layer_part(name: str) -> tuple[int, str] | None:
    """Split `blk.<i>.<part>`; anything else, and a number written with extra zeros, is no layer's tensor."""
    prefix, _, rest = name.partition(".")
    number, _, part = rest.partition(".")
    if prefix != "blk" or not (number.isascii() and number.isdigit()) or str(int(number)) != number:
        return None
    return int(number), part


def _layers(
    fields: Fields, tensors: Mapping[str, GgufTensor], family: _Family, where: str
) -> tuple[int, frozenset[str]]:
    """Check that the tensors are those of `block_count` whole layers; return that count and a layer's parts."""
    n_layers = fields.count("block_count")
    if n_layers > _MAX_LAYERS:
        raise ModelFileError(f"{where}: block_count is {n_layers}; at most {_MAX_LAYERS} layers are read")
    found = [split[1] for split in map(_layer_part, tensors) if split is not None]
    known = set(family.layer_names())
    # Only known parts: unknown ones are refused by name in `_places`, and n_layers times any number of them is no loop.
    parts = {name for name in known if name.endswith(".weight")} | (known & set(found))
    needed = chain((f"blk.{i}.{part}" for i in range(n_layers) for part in sorted(parts)), _REQUIRED)
    missing = [name for name in needed if name not in tensors]
    if missing:
        raise ModelFileError(
            f"{where}: {len(missing)} tensors are missing, first {missing[0][:80]!r}; {n_layers} layers with the same "
            "parts are needed; fetch the file again, all of its parts"
        )
    return n_layers, frozenset(parts)


def _freq_factors(
    tensors: Mapping[str, GgufTensor],
    data: Callable[[GgufTensor], npt.NDArray[np.uint8]],
    head_dim: int,
    where: str,
) -> list[float] | None:
    """Read the rotary divisors, if the file has them and they divide by anything but 1."""
    tensor = tensors.get(_ROPE_FACTORS)
    if tensor is None:
        return None
    if tensor.shape != (head_dim // 2,) or tensor.format is not Format.F32:
        raise ModelFileError(
            f"{where}: {_ROPE_FACTORS} is {tensor.format.name} of shape {list(tensor.shape)}; F32 of "
            f"[{head_dim // 2}] is needed"
        )
    factors = data(tensor).view("<f4")
    if not np.all(np.isfinite(factors) & (factors > 0)):
        raise ModelFileError(f"{where}: {_ROPE_FACTORS} holds a divisor that is not a positive number")
    return None if np.all(factors == 1) else [float(f) for f in factors]


def _places(tensors: Mapping[str, GgufTensor], family: _Family, config: Config, where: str) -> dict[str, Placed]:
    """Give each tensor its name; refuse the ones that no part of the model would use."""
    names = family.layer_names()
    n_layers = config["num_hidden_layers"]
    orders = _row_orders(tensors, config, where) if family.has_interleaved_rope else {}
    places: dict[str, Placed] = {}
    for name in tensors:
        layer = _layer_part(name)
        if name == _ROPE_FACTORS and family.has_freq_factors:
            places[name] = Placed(name, None)
        elif name in _MODEL_NAMES:
            places[name] = Placed(_MODEL_NAMES[name], None)
        elif layer is not None and layer[0] < n_layers and layer[1] in names:
            number, part = layer
            places[name] = Placed(f"model.layers.{number}.{names[part]}", orders.get(part))
        else:
            raise UnsupportedModel(
                f"{where}: tensor {name!r} has no place in a {family.model_type} model of {n_layers} layers; Tiercel "
                "would ignore it and compute something else; choose another conversion of the model"
            )
    return places


def _row_orders(tensors: Mapping[str, GgufTensor], config: Config, where: str) -> dict[str, npt.NDArray[np.intp]]:
    """Build the row order of each part that the writers reorder, after checking that the tensors have such rows."""
    head_dim = config["head_dim"]
    orders: dict[str, npt.NDArray[np.intp]] = {}
    for part, n_heads in (("attn_q", config["num_attention_heads"]), ("attn_k", config["num_key_value_heads"])):
        for kind, n_dims in (("weight", 2), ("bias", 1)):
            names = (f"blk.{i}.{part}.{kind}" for i in range(config["num_hidden_layers"]))
            for name, tensor in ((name, tensors[name]) for name in names if name in tensors):
                is_plain = n_dims == 2 or not tensor.format.is_quantized
                if len(tensor.shape) != n_dims or tensor.shape[0] != n_heads * head_dim or not is_plain:
                    raise ModelFileError(
                        f"{where}: {name} is {tensor.format.name} of shape {list(tensor.shape)}; {n_dims} dimensions "
                        f"and {n_heads} heads of {head_dim} rows are needed"
                    )
                if f"{part}.{kind}" not in orders:
                    orders[f"{part}.{kind}"] = unpermute_rows(n_heads, head_dim)
    return orders


_FAMILIES: Mapping[str, _Family] = MappingProxyType(
    {
        "llama": _Family("llama", "LlamaForCausalLM", _NORMS, _ATTENTION_BIASES + _MLP_BIASES, read_llama, True, True),
        "qwen2": _Family("qwen2", "Qwen2ForCausalLM", _NORMS, _ATTENTION_BIASES[:3], read_qwen2),
        "qwen3": _Family("qwen3", "Qwen3ForCausalLM", {**_NORMS, **_QK_NORMS}, _ATTENTION_BIASES, read_qwen3),
        "qwen3moe": _Family(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            {**_NORMS, **_QK_NORMS},
            (),
            read_qwen3_moe,
            has_experts=True,
        ),
        "gemma3": _Family(
            "gemma3_text", "Gemma3ForCausalLM", {**_GEMMA_NORMS, **_QK_NORMS}, (), read_gemma3, norms_include_one=True
        ),
    }
)
