"""Where training starts: the drafter's tensors before the first step. Functions of the seed and the target alone.

A layer begins as the target's own: the third last and those behind it, whose input the last tap nearly is. Not the last
by itself, which undoes what the others wrote: the first loss is 20 then, and 8 to 9 from the layers before it. The taps
are divided by their root mean squares while training (a few columns are a hundred times the others), so `fc` begins as
the last tap itself with its own sizes, and a little of everything. The last norm is half the target's: larger ones make
logits that take hundreds of steps to shrink. Source: measured for SmolLM2-135M; see `docs/drafters.md`.
"""

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from tiercel.train.shape import DraftShape
from tiercel.train.target import Target

Floats = npt.NDArray[np.float32]

_N_LAST = 3
_TABLE_STD = 0.02
_CODEBOOK_STD = 0.1


def first_tensors(target: Target, shape: DraftShape, tap_rms: Floats, n_before: int, seed: int) -> dict[str, Floats]:
    """Return every tensor of `shape`; a table by the token before has `n_before` rows (`vocabulary.Before`).

    Shapes: tap_rms  float32 [taps * E]
    """
    rng = np.random.default_rng([seed, 1])
    shapes = dict(shape.shapes())
    for name in ("markov_head.markov_w1.weight", "candidate_selector.predecessor_codebook"):
        if name in shapes:
            shapes[name] = (n_before, shape.rank)
    warm = _warm_layers(target, shape)
    found: dict[str, Floats] = {}
    for name, extents in shapes.items():
        drawn = rng.standard_normal(extents).astype(np.float32)  # drawn for all, so that one choice moves no other
        if name in warm:
            found[name] = warm[name]
        elif name == "fc.weight":
            found[name] = _first_fc(shape, tap_rms, drawn)
        elif name == "norm.weight":
            found[name] = np.float32(0.5) * target.final_norm()
        elif name == "mask_embedding":
            found[name] = drawn / np.float32(shape.embedding_scale)
        elif name.endswith(("norm.weight", "base_kernel")):
            found[name] = np.ones(extents, np.float32)
            if name.endswith("base_kernel"):
                found[name][:, 1:] = 0.0
        elif name.endswith(("kernel_projection.weight", ".bias")):
            found[name] = np.zeros(extents, np.float32)
        elif name.endswith("codebook"):
            found[name] = np.float32(_CODEBOOK_STD) * drawn
        elif name.startswith(("markov_head", "candidate_selector", "confidence_head")):
            found[name] = np.float32(_TABLE_STD) * drawn
        else:
            found[name] = drawn / np.float32(math.sqrt(extents[-1]))
    return found


def _warm_layers(target: Target, shape: DraftShape) -> Mapping[str, Floats]:
    found = {}
    expected = shape.layer_shapes()
    for i in range(shape.n_layers):
        layer = target.layer(max(target.n_layers - max(shape.n_layers, _N_LAST) + i, 0))
        if layer is None:
            return {}
        for name, weight in layer.items():
            if weight.shape == expected[name]:
                found[f"layers.{i}.{name}"] = weight
            elif shape.kind == "eagle3" and weight.shape[0] == expected[name][0]:
                # The columns of the embedding first: nothing of the target's reads those.
                found[f"layers.{i}.{name}"] = np.concatenate([np.zeros_like(weight), weight], axis=1)
    return found


def _first_fc(shape: DraftShape, tap_rms: Floats, drawn: Floats) -> Floats:
    e = shape.hidden
    last = tap_rms[-e:]
    fc = np.float32(0.1 / math.sqrt(shape.context_width)) * drawn
    fc[:, -e:] += np.diag(last / np.sqrt(np.mean(last**2)))
    return fc
