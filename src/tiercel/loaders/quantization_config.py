"""Reads a checkpoint's `quantization_config`: which way its matrices were quantised, and what that promises.

It knows the dialects, not tensors; `quantized_matrices` reads those by the `Scheme` found here. Whatever would change
the arithmetic and is not done is refused, an unknown key included. That a scheme rounds activations is no such thing:
here they stay float32 beside float weights, or are rounded to int8 with a scale for each 32 beside integer ones, as for
every quantised file. A note tells the log.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tiercel.base.errors import ModelFileError, UnsupportedModel

Kind = Literal["mxfp4", "nvfp4", "fp8", "gptq", "awq", "int4"]

_METHODS = "compressed-tensors, fp8, modelopt, quark, mxfp4, gptq and awq"
_GROUPS: Mapping[Kind, int] = {"mxfp4": 32, "nvfp4": 16}


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the matrices of one checkpoint are stored.

    `group` is how many columns share a scale where the scheme names it (None: all of a row); `block` is the shape that
    shares one, of FP8 with blocks. `divides` says that the global scale divides. `zero_offset` is what is added to a
    stored zero point. `ignored` are modules that are not quantised, as patterns for `re.fullmatch`.
    """

    kind: Kind
    name: str
    group: int | None = None
    block: tuple[int, int] | None = None
    divides: bool = False
    zero_offset: int = 0
    ignored: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def is_ignored(self, module: str) -> bool:
        """Tell whether the config says that the module is not quantised."""
        return any(re.fullmatch(pattern, module) for pattern in self.ignored)


class _Settings:
    """One object of the config, and which of its keys were read; `finish` refuses the others unless they are off."""

    def __init__(self, raw: object, where: str) -> None:
        if not isinstance(raw, dict):
            raise ModelFileError(f"{where}: a {type(raw).__name__}; an object is needed; check config.json")
        self._raw = dict(raw)
        self.where = where

    def take(self, name: str, default: Any = None) -> Any:
        found = self._raw.pop(name, None)
        return default if found is None else found

    def settings(self, name: str) -> "_Settings | None":
        found = self.take(name)
        return None if found is None else _Settings(found, f"{self.where}.{name}")

    def refuse(self, name: str, found: object, needed: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"{self.where}.{name}: got {str(found)[:60]!r}; {needed} is needed; use another quantisation of this model"
        )

    def only(self, name: str, default: object, *allowed: object) -> None:
        found = self.take(name, default)
        if found not in allowed:
            raise self.refuse(name, found, " or ".join(map(str, allowed)))

    def names(self, *keys: str) -> list[str]:
        found: list[str] = []
        for key in keys:
            value = self.take(key, [])
            if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
                raise ModelFileError(f"{self.where}.{key}: a list of module names is needed; check config.json")
            found += value
        return found

    def finish(self, harmless: str = "") -> None:
        known = set(harmless.split())
        for name, value in self._raw.items():
            if name not in known and value not in (None, False, 0, "", [], {}):
                raise self.refuse(name, value, "no such key (it may change the arithmetic)")


def read_scheme(config: Mapping[str, Any], where: str) -> Scheme | None:
    """Return how the weights are stored, None if the config says nothing.

    Raises:
        UnsupportedModel: in a way that is not read.
        ModelFileError: the config contradicts itself.
    """
    raw = config.get("quantization_config")
    text = config.get("text_config")
    if raw is None and isinstance(text, dict):
        raw = text.get("quantization_config")
    if raw is None:
        return None
    settings = _Settings(raw, f"{where}: quantization_config")
    method = settings.take("quant_method", "modelopt" if "quant_algo" in settings._raw else None)
    if method not in _READERS:
        raise settings.refuse("quant_method", method, f"one of {_METHODS}")
    return _READERS[method](settings)


def _suffixes(names: list[str]) -> tuple[str, ...]:
    """Return patterns for names that mean a module, or everything below it, wherever it is; `re:` marks a pattern."""
    found = []
    for name in names:
        if name.startswith("re:"):
            pattern = name[3:] + ".*"
        else:
            pattern = r"(.*\.)?" + re.escape(name.removesuffix(".weight")).replace(r"\*", ".*") + r"(\..*)?"
        try:
            re.compile(pattern)
        except re.error as error:
            raise ModelFileError(f"quantization_config: {name[:60]!r} is no pattern ({error})") from error
        found.append(pattern)
    return tuple(found)


def _compressed_tensors(settings: _Settings) -> Scheme:
    status = settings.take("quantization_status", "compressed")
    if status != "compressed":
        raise settings.refuse("quantization_status", status, "compressed")
    if (sparsity := settings.settings("sparsity_config")) is not None:
        sparsity.only("format", "dense", "dense")
    if transform := settings.take("transform_config"):
        raise settings.refuse("transform_config", transform, "no transform of activations")
    file_format = settings.take("format")
    groups = settings.settings("config_groups")
    notes: list[str] = []
    if settings.take("kv_cache_scheme"):
        notes.append(_KV_NOTE)
    schemes: set[tuple[Kind, int | None, tuple[int, int] | None]] = set()
    names = list(groups._raw) if groups is not None else []
    for name in names:
        assert groups is not None
        group = groups.settings(name)
        assert group is not None
        schemes.add(_group(group, group.take("format", file_format), notes))
    if len(schemes) != 1:
        raise settings.refuse("config_groups", sorted(map(str, schemes)), "groups of one scheme")
    ((kind, size, block),) = schemes
    ignored = _suffixes(settings.names("ignore"))
    settings.finish("version global_compression_ratio sparsity_config")
    return Scheme(
        kind,
        f"compressed-tensors {file_format}",
        group=size,
        block=block,
        divides=True,
        ignored=ignored,
        notes=tuple(dict.fromkeys(notes)),
    )


_KINDS: Mapping[str, Kind] = {
    "mxfp4-pack-quantized": "mxfp4",
    "nvfp4-pack-quantized": "nvfp4",
    "float-quantized": "fp8",
    "naive-quantized": "fp8",
    "pack-quantized": "int4",
}
_KV_NOTE = "the scheme's FP8 keys and values are kept in the pool's own type instead"
_ACTIVATION_NOTE = (
    "activations are not rounded to the scheme's own type: they stay float32 beside float weights, and become int8 in "
    "groups of 32 beside quantised ones unless compute_dtype is float32"
)


def _group(group: _Settings, file_format: object, notes: list[str]) -> tuple[Kind, int | None, tuple[int, int] | None]:
    kind = _KINDS.get(file_format) if isinstance(file_format, str) else None
    if kind is None:
        raise group.refuse("format", file_format, " or ".join(_KINDS))
    group.take("targets")
    if _rounds(group, "input_activations", "output_activations"):
        notes.append(_ACTIVATION_NOTE)
    weights = group.settings("weights")
    if weights is None:
        raise group.refuse("weights", None, "a description of the weights")
    weights.only("type", "int", "int" if kind == "int4" else "float")
    weights.only("num_bits", None, 8 if kind == "fp8" else 4)
    weights.only("symmetric", True, True, *([False] if kind == "int4" else []))  # the zero points say it
    weights.only("dynamic", False, False)
    size, block = weights.take("group_size"), weights.take("block_structure")
    if kind == "fp8":
        weights.only("strategy", "tensor", "tensor", "channel", *(["block"] if block else []))
        size = None
    elif kind == "int4":
        weights.only("strategy", "group", "group", "channel")
        size = _group_size(weights, -1 if size is None else size)
    elif size != _GROUPS[kind]:
        raise weights.refuse("group_size", size, str(_GROUPS[kind]))
    weights.take("strategy")
    weights.take("actorder")
    weights.finish("observer observer_kwargs scale_dtype zp_dtype")
    group.finish()
    return kind, size, _block(weights, "block_structure", block)


def _rounds(settings: _Settings, *names: str) -> bool:
    return any([bool(settings.take(name)) for name in names])


def _block(settings: _Settings, name: str, found: object) -> tuple[int, int] | None:
    if found is None:
        return None
    if not isinstance(found, list) or len(found) != 2 or not all(type(n) is int and 0 < n <= 1 << 20 for n in found):
        raise settings.refuse(name, found, "two sizes")
    return found[0], found[1]


def _fp8(settings: _Settings) -> Scheme:
    settings.only("fmt", "e4m3", "e4m3", "float8_e4m3fn")
    settings.only("scale_fmt", "float", "float", "ue8m0")
    settings.only("activation_scheme", "dynamic", "dynamic", "static")
    block = _block(settings, "weight_block_size", settings.take("weight_block_size"))
    ignored = _suffixes(settings.names("modules_to_not_convert", "ignored_layers"))
    settings.finish("dequantize")
    name = "fp8" if block is None else f"fp8 in blocks of {block[0]} x {block[1]}"
    return Scheme("fp8", name, block=block, ignored=ignored, notes=(_ACTIVATION_NOTE,))


def _modelopt(settings: _Settings) -> Scheme:
    algorithm = settings.take("quant_algo")
    if algorithm not in ("FP8", "NVFP4", "W4A16_NVFP4"):
        raise settings.refuse("quant_algo", algorithm, "FP8 or NVFP4")
    notes = [] if algorithm == "W4A16_NVFP4" else [_ACTIVATION_NOTE]
    if _rounds(settings, "kv_cache_scheme", "kv_cache_quant_algo"):
        notes.append(_KV_NOTE)
    kind: Kind = "fp8" if algorithm == "FP8" else "nvfp4"
    if kind == "nvfp4":
        settings.only("group_size", 16, 16)
    settings.take("config_groups")  # says the same again
    ignored = _suffixes(settings.names("ignore", "exclude_modules"))
    settings.finish("producer group_size")
    return Scheme(kind, f"ModelOpt {algorithm}", group=_GROUPS.get(kind), ignored=ignored, notes=tuple(notes))


def _quark(settings: _Settings) -> Scheme:
    whole = settings.settings("global_quant_config")
    found = whole.take("weight") if whole is not None else None
    if whole is None or not found:
        raise settings.refuse("global_quant_config", None, "one with a weight of dtype fp4 or fp8_e4m3")
    # Several: each but the first rounds the scales of the one before it.
    stages = [_Settings(one, f"{whole.where}.weight") for one in (found if isinstance(found, list) else [found])]
    notes = [_ACTIVATION_NOTE] if _rounds(whole, "input_tensors", "output_tensors") else []
    whole.finish("target_device")
    settings.only("layer_type_quant_config", {}, {})
    settings.only("layer_quant_config", {}, {})
    settings.only("algo_config", None, None, [])
    export = settings.settings("export")
    if export is not None:
        export.only("weight_format", "real_quantized", "real_quantized")
    if _rounds(settings, "kv_cache_quant_config"):
        notes.append(_KV_NOTE)
    ignored = _suffixes(settings.names("exclude"))
    settings.finish("quant_mode version log_severity_level min_kv_scale")
    if len(stages) > 1:
        _quark_nvfp4(stages)
        return Scheme("nvfp4", "Quark NVFP4", group=16, ignored=ignored, notes=tuple(notes))
    (weight,) = stages
    dtype = weight.take("dtype")
    weight.only("is_dynamic", False, False)
    weight.only("symmetric", True, True)
    if dtype == "fp4":
        weight.only("scale_format", None, "e8m0")
        weight.only("group_size", None, 32)
        weight.only("qscheme", "per_group", "per_group")
        weight.finish(_QUARK_HARMLESS)
        return Scheme("mxfp4", "Quark MXFP4", group=32, ignored=ignored, notes=tuple(notes))
    if dtype != "fp8_e4m3":
        raise weight.refuse("dtype", dtype, "fp4 or fp8_e4m3")
    weight.only("qscheme", None, "per_tensor", "per_channel")
    weight.finish(_QUARK_HARMLESS)
    return Scheme("fp8", "Quark FP8", ignored=ignored, notes=tuple(notes))


_QUARK_HARMLESS = (
    "observer_cls ch_axis round_method scale_type scale_calculation_mode enable_buffer_reuse max_input_numel"
)


def _quark_nvfp4(stages: list[_Settings]) -> None:
    """Refuse stages other than E2M1 in groups of 16 whose scales are E4M3 with one factor."""
    codes, scales = stages[0], stages[1]
    if len(stages) > 2:
        raise codes.refuse("dtype", f"{len(stages)} stages", "one of fp4, or fp4 with scales of fp8_e4m3,")
    codes.only("dtype", None, "fp4")
    codes.only("qscheme", None, "per_group")
    codes.only("group_size", None, 16)
    codes.take("scale_format")  # the scales' own type says it
    scales.only("dtype", None, "fp8_e4m3")
    scales.only("qscheme", None, "per_tensor")
    scales.take("is_scale_quant")
    for stage in stages:
        stage.only("is_dynamic", False, False)
        stage.only("symmetric", True, True)
        stage.finish(_QUARK_HARMLESS)


def _gpt_oss(settings: _Settings) -> Scheme:
    ignored = _suffixes(settings.names("modules_to_not_convert"))
    settings.finish("dequantize")
    return Scheme("mxfp4", "mxfp4", group=32, ignored=ignored)


def _gptq(settings: _Settings) -> Scheme:
    settings.only("bits", None, 4)
    settings.only("pack_dtype", "int32", "int32")
    settings.only("is_marlin_format", False, False)
    settings.only("dynamic", {}, {})
    version = settings.take("checkpoint_format", "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise settings.refuse("checkpoint_format", version, "gptq or gptq_v2")
    settings.take("sym")  # the zero points say it
    settings.take("desc_act")  # g_idx says it
    size = settings.take("group_size", -1)
    settings.finish(
        """damp_percent damp_auto_increment static_groups true_sequential model_name_or_path model_file_base_name meta
        quantizer tokenizer dataset batch_size exllama_config use_exllama max_input_length use_cuda_fp16 backend
        block_name_to_quantize module_name_preceding_first_block modules_in_block_to_quantize pad_token_id
        cache_block_outputs lm_head model_seqlen disable_exllama format"""
    )
    return Scheme("gptq", f"GPTQ {version}", _group_size(settings, size), zero_offset=1 if version == "gptq" else 0)


def _awq(settings: _Settings) -> Scheme:
    settings.only("bits", None, 4)
    settings.only("zero_point", True, True)
    version = settings.take("version", "gemm")
    if str(version).lower() != "gemm":
        raise settings.refuse("version", version, "gemm")
    size = settings.take("group_size", 128)
    ignored = _suffixes(settings.names("modules_to_not_convert"))
    settings.finish("backend do_fuse exllama_config fuse_max_seq_len modules_to_fuse")
    return Scheme("awq", "AWQ gemm", _group_size(settings, size), ignored=ignored)


def _group_size(settings: _Settings, size: object) -> int | None:
    if size == -1:
        return None
    if type(size) is not int or size <= 0:
        raise settings.refuse("group_size", size, "a positive number, or -1,")
    return size


_READERS: Mapping[object, Callable[[_Settings], Scheme]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "modelopt": _modelopt,
    "quark": _quark,
    "mxfp4": _gpt_oss,
    "gptq": _gptq,
    "awq": _awq,
}
