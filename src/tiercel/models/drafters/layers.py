"""The ops of a drafter's layer: projections, attention and feed-forward, as Llama and Qwen3 have them."""

from collections.abc import Sequence

from tiercel.models.drafters.config import DraftLayers
from tiercel.ops.program import Value
from tiercel.ops.recorder import Recorder


def layer_prefix(i: int) -> str:
    """Return what begins the canonical names of layer i's weights."""
    return f"draft.layers.{i}"


def joined(rec: Recorder, rows: Sequence[Value]) -> Value:
    """Put values side by side."""
    found = rows[0]
    for other in rows[1:]:
        found = rec.join(found, other)
    return found


def rope_table(rec: Recorder, c: DraftLayers, max_len_tokens: int) -> Value:
    """Write the drafter's rotary table."""
    table = c.rope.table(max_len_tokens)
    return rec.rope_table("draft", table.inv_freq, magnitude=table.magnitude)


def projected(rec: Recorder, c: DraftLayers, i: int, x: Value, name: str) -> Value:
    """Write layer i's projection to "q", "k" or "v"."""
    prefix = f"{layer_prefix(i)}.self_attn.{name}_proj"
    return rec.linear(x, f"{prefix}.weight", bias=f"{prefix}.bias" if c.has_qkv_bias else None)


def keyed(rec: Recorder, c: DraftLayers, i: int, x: Value, table: Value, name: str = "k") -> Value:
    """Write layer i's projection to "k" or "q", its norm and rotation."""
    heads = c.n_kv_heads if name == "k" else c.n_heads
    y = projected(rec, c, i, x, name)
    if c.has_qk_norm:
        y = rec.rms_norm(y, f"{layer_prefix(i)}.self_attn.{name}_norm.weight", c.eps, heads=heads)
    return rec.rope(y, table, heads=heads)


def attention(
    rec: Recorder, c: DraftLayers, i: int, x: Value, table: Value, *, layer: int, window: int, sees_block: bool
) -> Value:
    """Write layer i's attention over its normalised input, kept as the pool's `layer`."""
    made = keyed(rec, c, i, x, table, "q"), keyed(rec, c, i, x, table), projected(rec, c, i, x, "v")
    y = rec.attention(
        made[0],
        made[1:],
        layer=layer,
        heads=c.n_heads,
        kv_heads=c.n_kv_heads,
        head_dim=c.head_dim,
        scale=c.attention_scale,
        window=window,
        sees_block=sees_block,
    )
    prefix = f"{layer_prefix(i)}.self_attn.o_proj"
    return rec.linear(y, f"{prefix}.weight", bias=f"{prefix}.bias" if c.has_o_bias else None)


def feed_forward(rec: Recorder, c: DraftLayers, i: int, x: Value) -> Value:
    """Write layer i's gated feed-forward over its normalised input."""
    prefix = f"{layer_prefix(i)}.mlp"

    def linear(x: Value, name: str) -> Value:
        return rec.linear(x, f"{prefix}.{name}.weight", bias=f"{prefix}.{name}.bias" if c.has_mlp_bias else None)

    return linear(rec.gated(linear(x, "gate_proj"), linear(x, "up_proj"), c.act), "down_proj")
