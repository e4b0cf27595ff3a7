"""Writes valid (and, piece by piece, invalid) GGUF and safetensors bytes by hand, for the loaders' tests."""

import json
import struct
from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}
TYPE_IDS = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8, "bf16": 30}


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def scalar(kind: int, value: object) -> bytes:
    return text(value) if kind == STRING else struct.pack("<" + _CODES[kind], value)


def one(kind: int, value: object) -> bytes:
    """A typed value."""
    return struct.pack("<I", kind) + scalar(kind, value)


def many(kind: int, values: Sequence[object], count: int | None = None) -> bytes:
    """A typed array; `count` overrides its length."""
    head = struct.pack("<IIQ", ARRAY, kind, len(values) if count is None else count)
    return head + b"".join(scalar(kind, value) for value in values)


def guess(value: object) -> bytes:
    """A typed value with the type that converters use for its Python type."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, list):
        kind = {str: STRING, int: I32, float: F32, bool: BOOL, bytes: STRING}[type(value[0])]
        return many(kind, value)
    kind = {str: STRING, bool: BOOL, int: U32, float: F32}[type(value)]
    return one(kind, value)


def head(n_tensors: int, n_keys: int, *, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, n_tensors, n_keys)


def entry(name: str | bytes, dims: Sequence[int], type_id: int, offset: int) -> bytes:
    """A tensor's entry; `dims` in the file's order, fastest first."""
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, type_id, offset)


def gguf(
    metadata: Mapping[str, object],
    tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]],
    *,
    alignment: int = 32,
    version: int = 3,
) -> bytes:
    """A valid file. Tensors map a name to (format, shape in numpy's order, bytes)."""
    keys = b"".join(text(key) + guess(value) for key, value in metadata.items())
    entries, data = b"", b""
    for name, (kind, shape, raw) in tensors.items():
        entries += entry(name, tuple(reversed(shape)), TYPE_IDS[kind], len(data))
        data += raw + bytes(-len(raw) % alignment)
    start = head(len(tensors), len(metadata), version=version) + keys + entries
    return start + bytes(-len(start) % alignment) + data


def safetensors(tensors: Mapping[str, tuple[str, Sequence[int], bytes]], metadata: object = None) -> bytes:
    """A valid file. Tensors map a name to (type, shape, bytes)."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return safetensors_raw(json.dumps(header).encode(), data)


def safetensors_raw(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


WIDTH, HEADS, KV_HEADS, HEAD_DIM, FEED, VOCAB, LAYERS = 32, 4, 2, 8, 64, 40, 2
EXPERTS, EXPERT_FEED = 3, 16


def metadata(arch: str = "llama", **changes: object) -> dict[str, object]:
    """A tiny model's metadata; `changes` are keys under the architecture, with `__` for a dot."""
    keys: dict[str, object] = {
        "general.architecture": arch,
        f"{arch}.block_count": LAYERS,
        f"{arch}.context_length": 128,
        f"{arch}.embedding_length": WIDTH,
        f"{arch}.feed_forward_length": FEED,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.key_length": HEAD_DIM,
        f"{arch}.attention.value_length": HEAD_DIM,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(VOCAB)],
        "tokenizer.ggml.token_type": [1] * VOCAB,
        "tokenizer.ggml.merges": ["a b", "b c"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    if arch == "gemma3":
        keys["gemma3.attention.sliding_window"] = 16
    if arch == "qwen3moe":
        keys |= {"qwen3moe.expert_count": EXPERTS, "qwen3moe.expert_used_count": 2}
        keys["qwen3moe.expert_feed_forward_length"] = EXPERT_FEED
    keys.update({f"{arch}.{key.replace('__', '.')}": value for key, value in changes.items()})
    return keys


def shapes(arch: str = "llama", *, is_tied: bool = True, biases: Sequence[str] = ()) -> dict[str, tuple[int, ...]]:
    """A tiny model's tensors, in numpy's order."""
    query, key = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (WIDTH,),
        "ffn_norm.weight": (WIDTH,),
        "attn_q.weight": (query, WIDTH),
        "attn_k.weight": (key, WIDTH),
        "attn_v.weight": (key, WIDTH),
        "attn_output.weight": (WIDTH, query),
        "ffn_gate.weight": (FEED, WIDTH),
        "ffn_up.weight": (FEED, WIDTH),
        "ffn_down.weight": (WIDTH, FEED),
    }
    if arch == "qwen3moe":
        for name in ("gate", "up", "down"):
            del layer[f"ffn_{name}.weight"]
        layer |= {f"ffn_{name}_exps.weight": (EXPERTS, EXPERT_FEED, WIDTH) for name in ("gate", "up")}
        layer |= {"ffn_down_exps.weight": (EXPERTS, WIDTH, EXPERT_FEED), "ffn_gate_inp.weight": (EXPERTS, WIDTH)}
    if arch in ("qwen3", "qwen3moe", "gemma3"):
        layer |= {"attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,)}
    if arch == "gemma3":
        layer |= {"post_attention_norm.weight": (WIDTH,), "post_ffw_norm.weight": (WIDTH,)}
    if arch == "qwen2":
        biases = ("attn_q", "attn_k", "attn_v", *biases)
    for name in biases:
        layer[f"{name}.bias"] = (layer[f"{name}.weight"][0],)
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, WIDTH), "output_norm.weight": (WIDTH,)}
    if not is_tied:
        found["output.weight"] = (VOCAB, WIDTH)
    for i in range(LAYERS):
        found |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return found


def filled(tensor_shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Random float32 values for each shape."""
    rng = np.random.default_rng(7)
    return {
        name: ("f32", shape, rng.standard_normal(prod(shape), np.float32).tobytes())
        for name, shape in tensor_shapes.items()
    }


def model(arch: str = "llama", **changes: object) -> bytes:
    """A whole tiny GGUF model."""
    return gguf(metadata(arch, **changes), filled(shapes(arch)))
