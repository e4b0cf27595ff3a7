"""Says which kernel and format each op of a program gets on the native backend, and why. Reads only; runs nothing."""

from tiercel.ops import lowered as ops
from tiercel.runner.native import chosen_level


def explain_program(program: ops.Lowered, *, is_float32_compute: bool) -> str:
    """Return one line for each distinct choice: op, how often, level, what it reads and writes, and the reason."""
    level = chosen_level()
    counts: dict[str, int] = {}
    for op in program.ops:
        line = _line(op, is_float32_compute=is_float32_compute)
        counts[line] = counts.get(line, 0) + 1
    rows = [f"{count:>4} x {line}" for line, count in counts.items()]
    return "\n".join(
        [f"backend native, level {level} (the strongest this processor runs, unless TIERCEL_ISA says otherwise)", *rows]
    )


def _line(op: ops.NativeOp, *, is_float32_compute: bool) -> str:
    if isinstance(op, ops.LinearGroup):
        parts = ", ".join(f"{p.w.format}[{p.w.shape[0]},{p.w.shape[1]}]" for p in op.parts)
        extras = "".join((" + bias" if op.parts[0].bias else "", " + residual" if op.residual else ""))
        return f"linear        {parts}{extras}: {_why_linear(op, is_float32_compute=is_float32_compute)}"
    if isinstance(op, ops.Experts):
        parts = ", ".join(f"{w.format}[{w.shape[0]},{w.shape[1]}]" for w in (op.gate, op.up, op.down))
        reads = "int8 dot products" if op.x.kind is ops.BufferKind.Q8 else "float32 products"
        chosen = f"{op.route.width // 2} of {op.gate.n_experts}"
        return f"experts       {chosen}, {parts}, {op.act}: {reads}; rows sorted by expert, sums by expert number"
    if isinstance(op, ops.Embed):
        return f"embed         {op.w.format}[{op.w.shape[0]},{op.w.shape[1]}]: rows are dequantised exactly"
    if isinstance(op, ops.Norm | ops.Gated) and op.y.kind is ops.BufferKind.Q8:
        return f"{op.kind:<13} [{op.y.width}] -> int8: rounded where it is made, as its readers' weights are quantised"
    if isinstance(op, ops.Attention):
        window = f", window {op.window}" if op.window else ""
        heads = f"H={op.n_heads} K={op.n_kv_heads} D={op.head_dim}"
        return f"attention     {heads}{window}: fixed 256-token splits of paged KV, float32 sums"
    return f"{op.kind:<13} [{ops.writes(op).width}]: float32"


def _why_linear(op: ops.LinearGroup, *, is_float32_compute: bool) -> str:
    if op.x.kind is ops.BufferKind.Q8:
        return "int8 dot products, exact within a group of 32, as the weights are quantised"
    if is_float32_compute and any(p.w.format.is_quantized for p in op.parts):
        return "float32 products on weights expanded to float32 while loading, as compute_dtype is float32"
    return "float32 products, as the weights are floats"
