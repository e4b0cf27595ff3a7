"""What `tiercel show` tells of a model."""

from typing import TYPE_CHECKING

from tiercel.base.config import EngineOptions
from tiercel.boot.plan import Plan, make_plan
from tiercel.quant.formats import Format

if TYPE_CHECKING:
    from tiercel.ops.program import Weight
    from tiercel.runner.sizes import ModelSizes


def describe(model: str | None, *, program: bool = False, explain: bool = False) -> dict[str, object]:
    """Return what `tiercel show` prints: a summary, and on request the recorded program and the choice of each op's
    kernel.
    """
    plan = make_plan(EngineOptions(model=model))
    with plan.checkpoint:
        info = plan.info
        formats: dict[str, int] = {}
        for name, shape in plan.model.expected_weights().items():
            tensor_format = plan.checkpoint.tensors[name].format
            formats[str(tensor_format)] = formats.get(str(tensor_format), 0) + tensor_format.nbytes(_count(shape))
        summary = [
            ("architecture", info.architecture),
            ("vocabulary", f"{info.vocab_size:,}"),
            ("context", f"{info.max_len_tokens:,} tokens"),
            (
                "formats",
                ", ".join(
                    f"{name} {size / (1 << 20):.1f} MiB" for name, size in sorted(formats.items(), key=lambda f: -f[1])
                ),
            ),
            *([("stored as", stored.describe())] if (stored := plan.checkpoint.quantization) is not None else []),
            ("here", plan.capacity.describe()),
            ("threads", plan.n_threads),
            ("identity", plan.identity),
        ]
        found: dict[str, object] = {"summary": summary, "sizes": _sizes(plan)}
        if program:
            found["program"] = f"{plan.program.text()}\n{plan.lowered.text()}"
        if explain:
            from tiercel.runner.explain import explain_program

            found["explain"] = explain_program(plan.lowered, is_float32_compute=plan.is_float32_compute)
        return found


def _sizes(plan: Plan) -> "ModelSizes":
    """Return the model's arithmetic, with bytes as the checkpoint has them."""
    from tiercel.runner.sizes import sizes_of

    tensors = plan.checkpoint.tensors
    matrix_names = [name for name, shape in plan.model.expected_weights().items() if len(shape) == 2]
    floats = {tensors[name].format for name in matrix_names} & {Format.F32, Format.F16, Format.BF16}

    def n_bytes_of(name: str, weight: "Weight") -> int:
        tensor, count = tensors[name], _count(weight.shape)
        if tensor.matrix is not None:
            return tensor.matrix.n_bytes * count // _count(tensor.shape)
        return tensor.format.nbytes(count)

    stored = min((f.nbytes(1) for f in floats), default=Format.F32.nbytes(1))
    return sizes_of(plan.program, plan.info, n_bytes_of, stored_float_bytes=stored)


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count
