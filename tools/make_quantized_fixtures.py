"""Makes tests/model/compressed_tensors.json: small matrices as the package compressed-tensors packs and unpacks them.

Needs torch and compressed-tensors (made with 0.20.1); the tests need neither. From the repository's root:

    python tools/make_quantized_fixtures.py

Each entry holds the file format's name, what the config says of the weights, the stored parts (type, shape, bytes in
hexadecimal), and the float32 bytes of the matrix that the package makes of them again.
"""

import json
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import (
    FloatQuantizationCompressor,
    MXFP4PackedCompressor,
    NVFP4PackedCompressor,
    PackedQuantizationCompressor,
)
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize

OUT = Path(__file__).parent.parent / "tests" / "model" / "compressed_tensors.json"
N, K = 6, 96
TYPES = {torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32", torch.float16: "F16"}
TYPES |= {torch.int32: "I32", torch.int64: "I64"}


def amax(weight: torch.Tensor, group: int) -> torch.Tensor:
    return weight.reshape(-1, K // group, group).abs().amax(dim=2)


def stored(tensor: torch.Tensor) -> list[Any]:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes().hex()
    return [TYPES[tensor.dtype], list(tensor.shape), raw]


def one(file_format: str, compressor: Any, args: dict[str, Any], state: dict[str, torch.Tensor]) -> dict[str, Any]:
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
    packed = compressor.compress(state, scheme)
    if packed.get("weight_packed") is not None and packed["weight_packed"].dtype is torch.uint8:
        # Its `decompress` does this in bfloat16.
        again = dequantize(
            x_q=unpack_fp4_from_uint8(packed["weight_packed"], N, K, dtype=torch.float32),
            scale=compressor._decompress_scale(packed["weight_scale"], torch.float32),
            args=scheme.weights,
            global_scale=packed.get("weight_global_scale"),
            dtype=torch.float32,
        )
    else:
        again = compressor.decompress(packed, scheme)["weight"].to(torch.float32)
    return {
        "format": file_format,
        "weights": args,
        "parts": {name: stored(tensor) for name, tensor in packed.items()},
        "values": stored(again),
    }


def main() -> None:
    torch.manual_seed(0)
    weight = torch.randn(N, K) / 8
    base = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False}
    powers = torch.exp2(torch.floor(torch.log2(amax(weight, 32))) - 2)
    mxfp4 = one(
        "mxfp4-pack-quantized",
        MXFP4PackedCompressor,
        {**base, "strategy": "group", "group_size": 32},
        {"weight": weight, "weight_scale": powers},
    )
    factor = (448 * 6 / weight.abs().max()).reshape(1)
    scales = (amax(weight, 16) / 6 * factor).to(torch.float8_e4m3fn).to(torch.float32)
    nvfp4 = one(
        "nvfp4-pack-quantized",
        NVFP4PackedCompressor,
        {**base, "strategy": "tensor_group", "group_size": 16},
        {"weight": weight, "weight_scale": scales, "weight_global_scale": factor},
    )
    fp8 = one(
        "float-quantized",
        FloatQuantizationCompressor,
        {**base, "num_bits": 8, "strategy": "channel"},
        {"weight": weight, "weight_scale": weight.abs().amax(dim=1, keepdim=True) / 448},
    )
    tall = torch.randn(16, K) / 8  # zero points of fewer rows than a word holds are not unpacked by the package
    int4 = one(
        "pack-quantized",
        PackedQuantizationCompressor,
        {"num_bits": 4, "type": "int", "symmetric": False, "dynamic": False, "strategy": "group", "group_size": 32},
        {
            "weight": tall,
            "weight_scale": (amax(tall, 32) / 6).to(torch.float16).to(torch.float32),
            "weight_zero_point": torch.randint(-2, 3, (16, K // 32), dtype=torch.int8),
        },
    )
    OUT.write_text(json.dumps([mxfp4, nvfp4, fp8, int4], indent=1) + "\n")


if __name__ == "__main__":
    main()
