"""Experts that a checkpoint stacks in one tensor, as a tensor each: views of its bytes, under the models' names.

Read are [X, F, H] as `<..>.experts.{gate,up}_proj`, [X, H, F] as `<..>.experts.down_proj`, each with `.weight` or
without, and [X, 2F, H], gate before up, as `<..>.experts.gate_up_proj`. Expert e of them becomes
`<..>.experts.<e>.{gate,up,down}_proj.weight`. Whether these are the right number and shapes is the model's to check.
"""

import re
from collections.abc import Iterator, Mapping

from tiercel.base.errors import ModelFileError
from tiercel.loaders.checkpoint import Tensor

STACKING_MODEL_TYPES = frozenset({"qwen3_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text"})
"""Model types whose checkpoints stack so; elsewhere the same names stand for other orders (gpt-oss: [X, H, 2F])."""

_STACK = re.compile(r"(?P<prefix>.+\.experts)\.(?P<kind>gate_up_proj|gate_proj|up_proj|down_proj)(\.weight)?")
_MAX_EXPERTS = 4096


def split_experts(tensors: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """Return the tensors with each stack replaced by its experts, in its place.

    Raises:
        ModelFileError: an expert is there twice, or a stack holds more experts than any model.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = _STACK.fullmatch(name)
        is_stack = match is not None and len(tensor.shape) == 3 and tensor.row_permutation is None
        is_stack = is_stack and tensor.matrix is None  # quantised stacks are of other model types
        for one in _experts(tensor, match["prefix"], match["kind"], where) if match and is_stack else (tensor,):
            if one.name in found:
                raise ModelFileError(f"{where}: tensor {one.name} is there twice, one of them in {name}; one is needed")
            found[one.name] = one
    return found


def _experts(tensor: Tensor, prefix: str, kind: str, where: str) -> Iterator[Tensor]:
    n_experts, n_rows, n_columns = tensor.shape
    kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
    if n_experts > _MAX_EXPERTS or n_rows % len(kinds):
        raise ModelFileError(
            f"{where}: tensor {tensor.name} has shape {list(tensor.shape)}; at most {_MAX_EXPERTS} experts, each of "
            f"{' and '.join(kinds)} with equally many rows, are needed"
        )
    shape = (n_rows // len(kinds), n_columns)
    size = tensor.format.nbytes(shape[0] * n_columns)
    for i in range(n_experts * len(kinds)):
        e, half = divmod(i, len(kinds))
        data = tensor.data[i * size : (i + 1) * size]
        yield Tensor(f"{prefix}.{e}.{kinds[half]}.weight", shape, tensor.format, data)
