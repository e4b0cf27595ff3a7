"""Writes tiny checkpoints in each quantised layout, and what their weights are by the layout's definition.

Written from the definitions, number by number, with nothing of Tiercel's: codes, scales and zero points are drawn, the
floats follow.
"""

import json
import struct

import numpy as np

from tiercel.models.registry import build_model
from tiercel.testing.fill import tiny_checkpoint
from tiercel.testing.tiny_model import CONFIG, byte_tokenizer_json

SIZES_OF_E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
GROUP = 32


def e2m1(code):
    return (-1.0 if code & 8 else 1.0) * SIZES_OF_E2M1[code & 7]


def e4m3(byte):
    exponent, fraction = (byte >> 3) & 15, byte & 7
    size = fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
    return -size if byte & 128 else size


E2M1 = np.array([e2m1(code) for code in range(16)], np.float32)
E4M3 = np.array([e4m3(byte) for byte in range(256)], np.float32)


def part(array, dtype):
    return dtype, array.shape, np.ascontiguousarray(array).tobytes()


def f32(value):
    return part(np.array(value, "<f4"), "F32")


def bf16(values):
    """The type's bits, and the values they mean."""
    bits = (np.asarray(values, np.float32).view(np.uint32) >> 16).astype("<u2")
    return part(bits, "BF16"), (bits.astype(np.uint32) << 16).view(np.float32)


def draw_e2m1(rng, n, k):
    codes = rng.integers(0, 16, (n, k), np.uint8)
    return part(codes[:, 0::2] | codes[:, 1::2] << 4, "U8"), E2M1[codes]


def mxfp4(rng, n, k):
    packed, values = draw_e2m1(rng, n, k)
    exponents = rng.integers(121, 124, (n, k // 32)).astype(np.uint8)
    scales = np.array([2.0 ** (int(e) - 127) for e in exponents.reshape(-1)], np.float32).reshape(exponents.shape)
    return {"weight_packed": packed, "weight_scale": part(exponents, "U8")}, values * np.repeat(scales, 32, axis=1)


def nvfp4(rng, n, k, *, factor_name, divides):
    packed, values = draw_e2m1(rng, n, k)
    scale_bytes = rng.integers(0x38, 0x78, (n, k // 16)).astype(np.uint8)
    factor = np.float32(1234.567 if divides else 3.3e-4)
    scales = E4M3[scale_bytes] / factor if divides else E4M3[scale_bytes] * factor
    parts = {"weight_scale": part(scale_bytes, "F8_E4M3"), factor_name: f32([factor] if divides else factor)}
    parts |= {"weight_packed" if divides else "weight": packed}
    parts["input_global_scale" if divides else "input_scale"] = f32([1.0])
    return parts, values * np.repeat(scales, 16, axis=1)


def draw_e4m3(rng, n, k):
    raw = rng.integers(0, 256, (n, k)).astype(np.uint8)
    raw[(raw & 127) >= 0x60] &= 0x9F  # no NaN, and values up to 15
    return part(raw, "F8_E4M3"), E4M3[raw]


def fp8_tensor(rng, n, k):
    raw, values = draw_e4m3(rng, n, k)
    return {"weight": raw, "weight_scale": f32(0.0317), "input_scale": f32(0.5)}, values * np.float32(0.0317)


def fp8_channel(rng, n, k):
    raw, values = draw_e4m3(rng, n, k)
    stored, scales = bf16(rng.uniform(0.01, 0.05, (n, 1)))
    return {"weight": raw, "weight_scale": stored}, values * scales


def fp8_block(rng, n, k, *, exact=False):
    raw, values = draw_e4m3(rng, n, k)
    rows, columns = -(-n // 48), -(-k // 32)
    scales = rng.uniform(0.01, 0.05, (rows, columns)).astype("<f4")
    if exact:
        scales = np.exp2(np.floor(np.log2(scales))).astype("<f4")
    out = np.empty((n, k), np.float32)
    for i in range(n):
        for j in range(k):
            out[i, j] = values[i, j] * scales[i // 48, j // 32]
    return {"weight": raw, "weight_scale_inv": part(scales, "F32")}, out


def along_rows(q):
    """int32 [R / 8, C] of [R, C]."""
    out = np.zeros((len(q) // 8, q.shape[1]), np.uint32)
    for i in range(8):
        out |= q[i::8].astype(np.uint32) << (4 * i)
    return out


def along_columns(q, order):
    """int32 [R, C / 8] of [R, C]: nibble i is column order[i] of eight."""
    out = np.zeros((len(q), q.shape[1] // 8), np.uint32)
    for i in range(8):
        out |= q[:, order[i] :: 8].astype(np.uint32) << (4 * i)
    return out


def int4(rng, n, k, *, layout, zero=None, offset=0, order="plain"):
    q = rng.integers(0, 16, (k, n))
    groups = k // GROUP
    z = np.full((groups, n), zero) if zero is not None else rng.integers(offset, 16 + offset, (groups, n))
    scales = rng.uniform(0.01, 0.04, (groups, n)).astype("<f2")
    g_idx = np.arange(k) // GROUP
    if order == "any":
        g_idx = rng.permutation(g_idx)
    values = np.empty((n, k), np.float32)
    for j in range(k):
        values[:, j] = scales[g_idx[j]].astype(np.float32) * (q[j] - z[g_idx[j]]).astype(np.float32)
    plain = list(range(8))
    parts = {"scales": part(scales, "F16")}
    if layout == "awq":
        parts |= {
            "qweight": part(along_columns(q, AWQ_ORDER), "I32"),
            "qzeros": part(along_columns(z, AWQ_ORDER), "I32"),
        }
    else:
        parts |= {"qweight": part(along_rows(q), "I32"), "qzeros": part(along_columns(z - offset, plain), "I32")}
        parts["g_idx"] = part(g_idx.astype("<i4"), "I32")
    return parts, values


def int4_packed(rng, n, k, *, group=GROUP, has_zeros=False, order="plain"):
    """As compressed-tensors packs integers: eight neighbours of a row in a word, the first lowest, each plus 8."""
    q = rng.integers(-8, 8, (n, k))
    groups = k // group if group else 1
    zeros = rng.integers(-8, 8, (n, groups)) if has_zeros else np.zeros((n, groups), int)
    stored, scales = bf16(rng.uniform(0.01, 0.04, (n, groups)))
    g_idx = np.arange(k) // (group or k)
    if order == "any":
        g_idx = rng.permutation(g_idx)
    parts = {
        "weight_packed": part(along_columns(q + 8, list(range(8))), "I32"),
        "weight_scale": stored,
        "weight_shape": part(np.array([n, k], "<i8"), "I64"),
    }
    if has_zeros:
        parts["weight_zero_point"] = part(along_rows(zeros + 8), "I32")
    if order == "any":
        parts["weight_g_idx"] = part(g_idx.astype("<i4"), "I32")
    return parts, (q - zeros[:, g_idx]).astype(np.float32) * scales[:, g_idx]


def compressed(file_format, weights, **extra):
    group = {"targets": ["Linear"], "weights": weights, "input_activations": extra.pop("input_activations", None)}
    base = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "ignore": ["lm_head"]}
    return base | {"format": file_format, "config_groups": {"group_0": group}} | extra


FLOAT4 = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False}
FLOAT8 = FLOAT4 | {"num_bits": 8}
INT4 = FLOAT4 | {"type": "int", "strategy": "group", "group_size": GROUP}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
QUARK = {
    "quant_method": "quark",
    "exclude": ["lm_head"],
    "global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32, "scale_format": "e8m0"}},
    "export": {"weight_format": "real_quantized"},
}


def quark_mxfp4(rng, n, k):
    parts, values = mxfp4(rng, n, k)
    return {"weight": parts["weight_packed"], "weight_scale": parts["weight_scale"]}, values


def quark_nvfp4(rng, n, k):
    parts, values = nvfp4(rng, n, k, factor_name="weight_scale_2", divides=False)
    parts["input_scale_2"] = parts.pop("input_scale")
    return parts, values


# As Quark's own exporter spells it: a second stage rounds the first one's scales.
_STAGE = {"is_dynamic": False, "symmetric": None, "round_method": "half_even", "max_input_numel": 4194304}
QUARK_NVFP4 = QUARK | {
    "global_quant_config": {
        "weight": [
            _STAGE | {"dtype": "fp4", "qscheme": "per_group", "group_size": 16, "ch_axis": -1, "scale_type": "float"},
            _STAGE | {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_scale_quant": True},
        ],
        "input_tensors": [{"dtype": "fp4", "group_size": 16}, {"dtype": "fp8_e4m3"}],
    },
}


def with_(draw, **options):
    return lambda rng, n, k: draw(rng, n, k, **options)


# Name -> what a matrix is stored as, the config's words, the format it is computed in.
SCHEMES = {
    "mxfp4": (mxfp4, compressed("mxfp4-pack-quantized", FLOAT4 | {"group_size": 32, "strategy": "group"}), "mxfp4"),
    "mxfp4-quark": (quark_mxfp4, QUARK, "mxfp4"),
    "nvfp4": (
        with_(nvfp4, factor_name="weight_global_scale", divides=True),
        compressed("nvfp4-pack-quantized", FLOAT4 | {"group_size": 16, "strategy": "tensor_group"}),
        "nvfp4",
    ),
    "nvfp4-modelopt": (
        with_(nvfp4, factor_name="weight_scale_2", divides=False),
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "model.norm*"]},
        "nvfp4",
    ),
    "nvfp4-quark": (quark_nvfp4, QUARK_NVFP4, "nvfp4"),
    "fp8-tensor": (
        fp8_tensor,
        compressed("float-quantized", FLOAT8 | {"strategy": "tensor"}, input_activations={"num_bits": 8}),
        "f32",
    ),
    "fp8-channel": (fp8_channel, compressed("float-quantized", FLOAT8 | {"strategy": "channel"}), "f32"),
    "fp8-block": (fp8_block, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [48, 32]}, "f32"),
    "fp8-block-powers-of-two": (
        with_(fp8_block, exact=True),
        {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [48, 32], "activation_scheme": "dynamic"},
        "bf16",
    ),
    "gptq-symmetric": (with_(int4, layout="gptq", zero=8, offset=1), GPTQ, "q4_0"),
    "gptq-zero-points": (with_(int4, layout="gptq", offset=1), GPTQ | {"sym": False}, "q5_0"),
    "gptq-v2": (with_(int4, layout="gptq"), GPTQ | {"checkpoint_format": "gptq_v2", "sym": False}, "q5_0"),
    "gptq-act-order": (with_(int4, layout="gptq", offset=1, order="any"), GPTQ | {"desc_act": True}, "f32"),
    "awq": (with_(int4, layout="awq"), AWQ, "q5_0"),
    "int4-packed": (int4_packed, compressed("pack-quantized", INT4), "q4_0"),
    "int4-packed-rows": (
        with_(int4_packed, group=None),
        compressed("pack-quantized", INT4 | {"strategy": "channel", "group_size": None}),
        "q4_0",
    ),
    "int4-packed-zero-points": (
        with_(int4_packed, has_zeros=True),
        compressed("pack-quantized", INT4 | {"symmetric": False}),
        "q5_0",
    ),
    "int4-packed-act-order": (
        with_(int4_packed, has_zeros=True, order="any"),
        compressed("pack-quantized", INT4 | {"symmetric": False, "actorder": "group"}),
        "f32",
    ),
}


def tiny_quantized(name, seed=0):
    """Return the config, the file's tensors (type, shape, bytes), and every weight as float32."""
    draw, words, _ = SCHEMES[name]
    rng = np.random.default_rng(seed)
    config = {**CONFIG, "quantization_config": words}
    floats = tiny_checkpoint(CONFIG)
    tensors = {}
    for weight, shape in build_model(config).expected_weights().items():
        if weight.endswith("_proj.weight"):
            parts, floats[weight] = draw(rng, *shape)
            tensors |= {f"{weight.removesuffix('.weight')}.{suffix}": one for suffix, one in parts.items()}
        else:
            tensors[weight] = f32(floats[weight])
    return config, tensors, floats


def write(folder, config, tensors):
    """Write the checkpoint's folder and return it."""
    header, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    (folder / "tokenizer.json").write_text(byte_tokenizer_json())
    return folder
