"""GGUF metadata of an architecture -> Hugging Face configuration: one reader an architecture.

It knows which field means what, and the values that other architectures' fields must have to change nothing. Names and
orders of tensors are `gguf_map`'s. Source: the GGUF specification, and the behaviour of the files that llama.cpp's
converters write.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import log
from typing import Any

from tiercel.base.errors import ModelFileError
from tiercel.loaders.gguf_fields import Fields

Config = dict[str, Any]

# Every Qwen since 1.5 was released with it, or says in its file that it has another.
_QWEN_THETA = 1e6
_ATTENTION_BIASES = ("attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_output.bias")
_MLP_BIASES = ("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias")


@dataclass(frozen=True)
class Facts:
    """What the readers ask about the tensors: the parts of a layer, by the file's names, and the rotary divisors."""

    parts: frozenset[str]
    freq_factors: list[float] | None


def read_common(fields: Fields, embedding: tuple[int, ...], n_layers: int, where: str, *, is_tied: bool) -> Config:
    """Read the fields that all families share."""
    hidden = fields.count("embedding_length")
    n_heads = fields.count("attention.head_count")
    n_kv_heads = fields.count("attention.head_count_kv", n_heads)
    if n_heads % n_kv_heads:
        raise ModelFileError(f"{where}: {n_heads} query heads over {n_kv_heads} key heads; a multiple is needed")
    if not fields.has("attention.key_length") and hidden % n_heads:
        raise ModelFileError(f"{where}: {n_heads} heads do not divide the width {hidden} and no key_length is given")
    head_dim = fields.count("attention.key_length", hidden // n_heads)
    if head_dim % 2:
        raise ModelFileError(f"{where}: heads of width {head_dim}; an even number is needed for rotary positions")
    if fields.count("attention.value_length", head_dim) != head_dim:
        raise fields.refuse("attention.value_length", "another than key_length", "keys and values of one width")
    if len(embedding) != 2 or embedding[1] != hidden:
        raise ModelFileError(f"{where}: token_embd.weight is {list(embedding)}; [vocabulary, {hidden}] is needed")
    if fields.count("vocab_size", embedding[0]) != embedding[0]:
        raise ModelFileError(f"{where}: vocab_size differs from the {embedding[0]} rows of token_embd.weight")
    return {
        "dtype": "float32",
        "hidden_act": "silu",
        "vocab_size": embedding[0],
        "hidden_size": hidden,
        "intermediate_size": fields.count("feed_forward_length"),
        "num_hidden_layers": n_layers,
        "num_attention_heads": n_heads,
        "num_key_value_heads": n_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": fields.count("context_length"),
        "rms_norm_eps": fields.real("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": is_tied,
        "attention_bias": False,
        "sliding_window": None,
    }


def read_llama(fields: Fields, config: Config, facts: Facts) -> None:
    """Read what Llama, Mistral and SmolLM2 files say beyond the common fields."""
    config["attention_bias"] = _all_or_none(fields, facts, _ATTENTION_BIASES)
    config["mlp_bias"] = _all_or_none(fields, facts, _MLP_BIASES)
    window = fields.count_or_zero("attention.sliding_window")
    if window:
        # Llama files have no window of their own: one that has it is Mistral's, where every layer slides.
        if config["attention_bias"] or config["mlp_bias"]:
            raise fields.refuse("attention.sliding_window", window, "a sliding window or biases, not both")
        config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
    # Interleaved rotation of a part of the head would need another row order than the whole head's.
    fields.neutral("rope.dimension_count", config["head_dim"])
    config["rope_parameters"] = _rope(fields, config, facts)
    fields.neutral("final_logit_softcapping", 0.0)
    _check_scale(fields, config)


def read_qwen2(fields: Fields, config: Config, facts: Facts) -> None:
    """Read what Qwen2 and Qwen2.5 files say beyond the common fields."""
    # Qwen2 always has these three biases and no other; a file without one is not what the name promises.
    missing = [name for name in _ATTENTION_BIASES[:3] if name not in facts.parts]
    if missing:
        raise fields.refuse("attention", f"without {missing[0]}", "biases on q, k and v")
    del config["attention_bias"]
    _read_qwen(fields, config, facts)


def read_qwen3(fields: Fields, config: Config, facts: Facts) -> None:
    """Read what Qwen3 files say beyond the common fields."""
    config["attention_bias"] = _all_or_none(fields, facts, _ATTENTION_BIASES)
    _read_qwen(fields, config, facts)


def read_qwen3_moe(fields: Fields, config: Config, facts: Facts) -> None:
    """Read what Qwen3-MoE files say; their layers all have experts, and a router's weights always add up to one."""
    config |= {
        "num_experts": fields.count("expert_count"),
        "num_experts_per_tok": fields.count("expert_used_count"),
        "moe_intermediate_size": fields.count("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    fields.neutral("expert_weights_norm", True)
    fields.neutral("expert_weights_scale", 0.0, 1.0)
    fields.neutral("expert_gating_func", 0, 1)  # softmax
    fields.neutral("expert_group_count", 0, 1)
    fields.neutral("expert_group_used_count", 0, 1)
    fields.neutral("leading_dense_block_count", 0)
    fields.neutral("interleave_moe_layer_step", 0, 1)
    fields.neutral("moe_every_n_layers", 0, 1)
    _read_qwen(fields, config, facts)


def _read_qwen(fields: Fields, config: Config, facts: Facts) -> None:
    # Which layers slide (max_window_layers) has no field in a GGUF file, so a window cannot be honoured.
    fields.neutral("attention.sliding_window", 0)
    config["use_sliding_window"] = False
    fields.neutral("rope.dimension_count", config["head_dim"])
    config["rope_parameters"] = _rope(fields, config, facts, default_theta=_QWEN_THETA)
    fields.neutral("final_logit_softcapping", 0.0)
    _check_scale(fields, config)


def read_gemma3(fields: Fields, config: Config, facts: Facts) -> None:
    """Read what Gemma 3 files say beyond the common fields; `rope_parameters` is one entry a layer type."""
    n_layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    pattern = fields.flags_or_count("attention.sliding_window_pattern", 6)
    if isinstance(pattern, list):
        slides = pattern
        if len(slides) != n_layers:
            raise fields.refuse("attention.sliding_window_pattern", f"{len(slides)} long", f"{n_layers} flags")
    else:
        slides = [(i + 1) % pattern != 0 for i in range(n_layers)]
    fields.neutral("rope.dimension_count", head_dim)
    fields.neutral("rope.dimension_count_swa", head_dim)
    fields.neutral("attention.key_length_swa", head_dim)
    fields.neutral("attention.value_length_swa", head_dim)
    fields.neutral("attention.shared_kv_layers", 0)
    scale = fields.real("attention.scale", 0.0)
    if scale and not 1e-4 <= scale <= 1e4:
        raise fields.wrong("attention.scale", scale, "a number from 1e-4 to 1e4")
    # The 27B model (62 layers) scales by width / heads = 168 and not by its head width; its files do not say so.
    usual = config["hidden_size"] / config["num_attention_heads"] if n_layers == 62 else head_dim
    softcap = fields.real("final_logit_softcapping", 0.0)
    config |= {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": fields.count("attention.sliding_window"),
        "layer_types": ["sliding_attention" if slide else "full_attention" for slide in slides],
        "query_pre_attn_scalar": round(scale**-2, 3) if scale else usual,
        "final_logit_softcapping": softcap or None,
        "attn_logit_softcapping": None,
        "use_bidirectional_attention": False,
    }
    local_theta = fields.real("rope.freq_base_swa", 10000.0)
    config["rope_parameters"] = {
        "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
        "full_attention": _rope(fields, config, facts, default_theta=None),
    }


def _all_or_none(fields: Fields, facts: Facts, names: Iterable[str]) -> bool:
    """Tell whether the layers have these biases; some of them cannot be said in a configuration."""
    have = [name in facts.parts for name in names]
    if any(have) and not all(have):
        raise fields.refuse("attention", "with some biases only", f"all or none of {', '.join(names)}")
    return all(have)


def _check_scale(fields: Fields, config: Config) -> None:
    scale = fields.real("attention.scale", 0.0)
    usual = config["head_dim"] ** -0.5
    if scale and abs(scale - usual) > 1e-6 * usual:
        raise fields.refuse("attention.scale", scale, f"{usual:.6g}, the head width to the power -1/2")


def _rope(fields: Fields, config: Config, facts: Facts, default_theta: float | None = 10000.0) -> Config:
    """Read rotary base and scaling, in Hugging Face's `rope_parameters` form."""
    theta = fields.real("rope.freq_base", default_theta)
    fields.assumed("rope.freq_base", theta)
    kind = fields.text("rope.scaling.type", "linear")
    factor = fields.real("rope.scaling.factor", fields.real("rope.scale_linear", 0.0)) or 1.0
    attention_factor = fields.real("rope.scaling.attn_factor", 1.0)
    original = fields.count("rope.scaling.original_context_length", config["max_position_embeddings"])
    betas = {
        "beta_fast": fields.real("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": fields.real("rope.scaling.yarn_beta_slow", 1.0),
    }
    fields.ignored("rope.scaling.finetuned")
    fields.neutral("rope.scaling.yarn_log_multiplier", 0.0)
    fields.neutral("rope.scaling.yarn_ext_factor", 1.0, -1.0)
    fields.neutral("rope.scaling.yarn_attn_factor", 1.0, -1.0)
    fields.neutral("rope.scaling.alpha", 0.0, 1.0)
    if theta <= 0:
        raise fields.wrong("rope.freq_base", theta, "a positive number")
    if kind not in ("none", "linear", "yarn"):
        raise fields.refuse("rope.scaling.type", repr(kind), "none, linear or yarn")
    if kind != "yarn" and attention_factor != 1.0:
        raise fields.refuse("rope.scaling.attn_factor", attention_factor, "1 unless the type is yarn")
    if factor == 1.0 and kind != "yarn":
        kind = "none"
    plain = {"rope_type": "default", "rope_theta": theta}
    if facts.freq_factors is not None:
        if kind != "none":
            raise fields.refuse("rope.scaling.type", repr(kind), "either rope_freqs.weight or a scaling type")
        return plain | {"rope_type": "tiercel_freq_factors", "freq_factors": facts.freq_factors}
    if kind == "none":
        return plain
    if kind == "linear":
        return plain | {"rope_type": "linear", "factor": factor}
    if not fields.has("rope.scale_linear"):
        fields.assumed("rope.scaling.factor", factor)
    # The file's factor multiplies yarn's own 1 + 0.1 ln F; the configuration's replaces it.
    magnitude = attention_factor * (1.0 + 0.1 * log(factor)) if factor > 1 else attention_factor
    yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    return plain | yarn | betas | ({} if attention_factor == 1.0 else {"attention_factor": magnitude})


def refuse_what_no_family_has(fields: Fields, *, has_experts: bool) -> None:
    """Accept the fields of other architectures at the values that switch them off."""
    experts = () if has_experts else ("expert_count", "expert_used_count")
    for key in (*experts, "expert_shared_count", "nextn_predict_layers", "pooling_type"):
        fields.neutral(key, 0)
    for key in ("attention.clamp_kqv", "attention.max_alibi_bias", "attn_logit_softcapping"):
        fields.neutral(key, 0.0)
    for key in ("logit_scale", "residual_scale", "embedding_scale", "attention.output_scale"):
        fields.neutral(key, 0.0, 1.0)
    fields.neutral("attention.causal", True)
    fields.neutral("use_parallel_residual", False)
    fields.neutral("tensor_data_layout", "Meta AI original pth", "llama")
