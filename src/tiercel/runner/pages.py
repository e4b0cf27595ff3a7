"""What the bytes of a page of keys and values, and of a saved state, mean, for whoever keeps them elsewhere. Knows no
page and no tier.

The bytes are those of the core's own page: `docs/formats/kv_page.md`. They are in the order of the whole model's layers
and heads, so that a rank that holds some heads of a layer holds one run of it, whatever the split.
"""

from collections.abc import Sequence
from itertools import groupby

from tiercel.base.errors import ShapeError
from tiercel.kv.tiers.identity import ObjectGroup
from tiercel.kv.tiers.interface import Bytes
from tiercel.ops.program import KvLayer, StateLayer

PAGE_GROUP_NAME = "page"
STATE_GROUP_NAME = "state"
_SCALES = {"int8": "float16 behind each run: a key's of each 64 columns [D/64][16], a value's [16]"}


def page_group(layers: Sequence[KvLayer], kv_dtype: str, page_size_tokens: int, page_bytes: int) -> ObjectGroup | None:
    """Describe a page of a model with these layers; None when no token leaves anything in one.

    Layers that follow each other and are alike share one axis: it counts them, and its name tells what each holds.
    """
    if not layers or page_bytes == 0:
        return None
    runs = [(text, len(list(alike))) for text, alike in groupby(_describe(layer, page_size_tokens) for layer in layers)]
    return ObjectGroup(
        name=PAGE_GROUP_NAME,
        dtype=kv_dtype,
        scales=_SCALES.get(kv_dtype, "none"),
        layout=tuple(text for text, _ in runs),
        counts=tuple(n for _, n in runs),
        object_bytes=page_bytes,
    )


def state_group(layers: Sequence[StateLayer]) -> ObjectGroup | None:
    """Describe a saved state of a model with these layers; None when there are none. Layers share axes as a page's."""
    if not layers:
        return None
    runs = [(text, len(list(alike))) for text, alike in groupby(map(_describe_state, layers))]
    return ObjectGroup(
        name=STATE_GROUP_NAME,
        dtype="float32",
        scales="none",
        layout=tuple(text for text, _ in runs),
        counts=tuple(n for _, n in runs),
        object_bytes=sum(layer.nbytes for layer in layers),
    )


def check_pages(page_ids: Sequence[int], data: Sequence[Bytes], page_bytes: int, *, of: str = "pages") -> None:
    """Refuse what does not fill its page, or its place for a state.

    Raises: ShapeError
    """
    lengths = [memoryview(one).nbytes for one in data]
    if len(lengths) != len(page_ids) or any(n != page_bytes for n in lengths):
        raise ShapeError(
            f"runner.write_{of}: {len(page_ids)} {of}; got {len(lengths)} pieces of {sorted(set(lengths))} bytes; "
            f"{page_bytes} bytes for each are needed"
        )


def _describe(layer: KvLayer, page_size_tokens: int) -> str:
    n_runs = page_size_tokens // 16
    if layer.latent_values:
        return f"layer [run {n_runs}][token 16][latent {layer.head_dim}]"
    return f"layer [head {layer.n_kv_heads}][run {n_runs}][K^T {layer.head_dim}x16, V 16x{layer.head_dim}]"


def _describe_state(layer: StateLayer) -> str:
    window = f"[window {layer.conv_width - 1}][channel {layer.conv_channels}], to 64 bytes"
    return f"layer {window}, [head {layer.heads}][values by 16 of {layer.value_dim}][key {layer.key_dim}][16]"
