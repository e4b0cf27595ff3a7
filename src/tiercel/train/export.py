"""From a trained drafter to the folder that loaders read: `config.json` and `model.safetensors`, as they are published.

What training changed for its own sake is undone: the taps' root mean squares go into `fc`'s columns, and the table by
the token before gets a row for each of the target's tokens. The embedding and the head are the target's own and are not
written: whoever reads the folder takes the head's rows by `d2t`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tiercel.base.errors import TrainingFailed
from tiercel.train.shape import DraftShape
from tiercel.train.store import write_text, write_whole
from tiercel.train.vocabulary import Before

Floats = npt.NDArray[np.float32]

WEIGHTS = "model.safetensors"
_TABLES = ("markov_head.markov_w1.weight", "candidate_selector.predecessor_codebook")


def published_tensors(
    params: Mapping[str, Floats], shape: DraftShape, tap_rms: Floats, before: Before, ids: npt.NDArray[np.int64]
) -> dict[str, np.ndarray[Any, Any]]:
    """Return the tensors of the published layout, float16, and `d2t`, int64 [V_draft], target id minus own id.

    Raises: TrainingFailed: a value is more than float16 holds, or no number.
    """
    found: dict[str, np.ndarray[Any, Any]] = {}
    for name, array in params.items():
        whole = array
        if name == "fc.weight":
            whole = array / tap_rms
        elif name in _TABLES:
            whole = before.whole(array)
        half = whole.astype(np.float16)
        if not np.isfinite(half).all():
            raise TrainingFailed(
                f"train: tensor {name} holds {np.abs(whole).max():g}, which float16 does not; lower --learning-rate"
            )
        published = name.replace("layers.0.", "midlayer.", 1) if shape.kind == "eagle3" else name
        found[published] = half
    if len(ids) < shape.vocab:
        found["d2t"] = ids - np.arange(len(ids))
    return found


def write_checkpoint(
    folder: Path, tensors: Mapping[str, np.ndarray[Any, Any]], shape: DraftShape, training: Mapping[str, Any]
) -> None:
    """Write the folder's two files; `training` says how they came to be, and is read by people only.

    Raises: TiercelError: there is no room.
    """
    from safetensors.numpy import save

    config = {**shape.config(), "target_digest": training["target_digest"], "training": dict(training)}
    data = save({name: np.ascontiguousarray(one) for name, one in tensors.items()}, metadata={"format": "pt"})
    write_whole(folder / WEIGHTS, lambda file: file.write(data))
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
