"""A run's state on disk: tensors, the optimiser's two moments of each, and how far it is.

`state.safetensors` holds `param.`, `first.` and `second.` tensors; its metadata hold the step, the seconds spent and
the history. It is replaced as a whole, so what is there is always one moment's.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tiercel.base.errors import ModelFileError
from tiercel.train.store import write_whole

Floats = npt.NDArray[np.float32]

FILE = "state.safetensors"


@dataclass(kw_only=True)
class TrainState:
    """How far a run is. `history`: one entry a look at it, with `step`, `spent_s` and what was measured."""

    step: int
    spent_s: float
    params: dict[str, Floats]
    first: dict[str, Floats]
    second: dict[str, Floats]
    history: list[dict[str, Any]] = field(default_factory=list)


def save(folder: Path, state: TrainState) -> None:
    """Write a state in place of the one before.

    Raises: TiercelError: there is no room; the one before is still there.
    """
    from safetensors.numpy import save as as_bytes

    parts = {"param": state.params, "first": state.first, "second": state.second}
    tensors = {f"{part}.{name}": np.ascontiguousarray(a) for part, found in parts.items() for name, a in found.items()}
    told = {"step": state.step, "spent_s": state.spent_s, "history": state.history}
    data = as_bytes(tensors, metadata={"state": json.dumps(told)})
    write_whole(folder / FILE, lambda file: file.write(data))


def load(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> TrainState | None:
    """Return the state that was saved; None if none was.

    Raises: ModelFileError: the file is damaged, or of a network of other sizes.
    """
    from safetensors import SafetensorError, safe_open

    path = folder / FILE
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="np") as file:
            told = json.loads((file.metadata() or {})["state"])
            parts: list[dict[str, Floats]] = [
                {name: file.get_tensor(f"{part}.{name}") for name in shapes} for part in ("param", "first", "second")
            ]
        wrong = [name for name, shape in shapes.items() for found in parts if found[name].shape != shape]
        if wrong:
            raise ValueError(f"{wrong[0]} has another shape")
        step, spent_s, history = int(told["step"]), float(told["spent_s"]), list(told["history"])
    except (SafetensorError, KeyError, ValueError, TypeError, OSError) as error:
        raise ModelFileError(f"{path}: is damaged ({error}); remove it to begin anew") from error
    return TrainState(step=step, spent_s=spent_s, params=parts[0], first=parts[1], second=parts[2], history=history)
