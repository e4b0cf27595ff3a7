"""From a pooling model's rows to what was asked for: in float64, rounded once. Runs on the thread that reads an output.

A result depends on its own rows only, so it is the same whatever else was in the batch.
"""

from typing import TYPE_CHECKING

import msgspec

from tiercel.engine.request import Pools
from tiercel.models.pooling import PoolingSpec
from tiercel.protocol.pooling import PoolingParams, refused

if TYPE_CHECKING:
    import numpy as np

_SHORTEST = 1e-12  # a vector shorter than this is divided by it, as in torch


class Pooler:
    """Pools one model's rows. Frozen; threads may share it."""

    def __init__(self, spec: PoolingSpec, width: int) -> None:
        self.spec = spec
        self.width = width

    def check(self, params: PoolingParams) -> PoolingParams:
        """Return the parameters with the task that they mean.

        Raises:
            RequestError: the model does not do that; `param` names the field.
        """
        task = params.task or self.spec.tasks[0]
        if task not in self.spec.tasks:
            raise refused("task", f"got {task!r}; this model does {' and '.join(self.spec.tasks)}; ask for that")
        if params.dimensions is not None:
            self._check_dimensions(params.dimensions, task)
        return msgspec.structs.replace(params, task=task)

    def wants(self, params: PoolingParams) -> Pools:
        """Return which rows a task reads. Requires: `check` gave the parameters."""
        return "last" if params.task in ("embed", "classify") and self.spec.method == "last" else "all"

    def finish(self, rows: "np.ndarray", params: PoolingParams) -> "np.ndarray":
        """Return the answer.

        Shapes:
            rows     [T or 1, W]  float32
            returns  [D] or [T, D]  float32
        """
        import numpy as np

        x = rows
        if params.task in ("embed", "classify"):
            if self.spec.method == "mean":
                x = rows.mean(axis=0, dtype=np.float64)
            else:
                x = rows[0 if self.spec.method == "cls" else -1]
        wide = np.asarray(x, np.float64)
        if params.task in ("embed", "token_embed"):
            wide = wide[..., : params.dimensions]
            if params.use_activation if params.use_activation is not None else self.spec.is_normalised:
                wide = wide / np.maximum(np.sqrt(np.square(wide).sum(axis=-1, keepdims=True)), _SHORTEST)
        elif params.use_activation is not False:
            wide = self._activated(wide)
        return wide.astype(np.float32)

    def _activated(self, logits: "np.ndarray") -> "np.ndarray":
        import numpy as np

        if self.spec.activation == "identity":
            return logits
        if self.spec.activation == "sigmoid":
            with np.errstate(over="ignore"):  # exp may be infinite; 1 / inf is the right limit
                return np.asarray(1.0 / (1.0 + np.exp(-logits)))
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        return np.asarray(weights / weights.sum(axis=-1, keepdims=True))

    def _check_dimensions(self, n: int, task: str) -> None:
        allowed = self.spec.dimensions
        if task not in ("embed", "token_embed"):
            raise refused("dimensions", f"got {n} with {task}; only embeddings can be cut; leave it out")
        if allowed is None:
            raise refused("dimensions", f"got {n}; this model's embeddings cannot be cut; leave it out")
        if n > self.width or (allowed and n not in allowed):
            needed = f"one of {', '.join(map(str, allowed))}" if allowed else f"1 to {self.width}"
            raise refused("dimensions", f"got {n}; {needed} is needed")
