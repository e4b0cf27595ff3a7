"""Compares a checkpoint's tensors with what a model expects, before a byte of them is used."""

from collections.abc import Mapping

from tiercel.base.errors import ModelFileError
from tiercel.models.model import Model, Tensor


def check_weights(model: Model, tensors: Mapping[str, Tensor]) -> None:
    """Check that every expected weight is there with its shape, and that nothing else is, save what may be ignored.

    Raises:
        ModelFileError: a tensor is missing, has another shape, or is unknown; the message names it.
    """
    expected = model.expected_weights()
    _check_shapes(model, expected, tensors)
    extra = [name for name in tensors if name not in expected and not model.may_ignore(name)]
    if extra:
        raise ModelFileError(
            f"models: {model.info.architecture}: tensor {_first(extra)} of shape "
            f"{_extents(tuple(tensors[extra[0]].shape))} is read by no op; "
            f"only the model's own {len(expected)} tensors are needed; check that the config is this checkpoint's"
        )


def check_mtp_weights(model: Model, tensors: Mapping[str, Tensor], n_modules: int | None = None) -> None:
    """Check that every weight of the model's own draft head, or its first modules, is there with its shape.

    Raises:
        ModelFileError: a tensor is missing or has another shape; the message names it.
    """
    _check_shapes(model, model.mtp_weights(n_modules), tensors)


def _check_shapes(model: Model, expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]) -> None:
    where = f"models: {model.info.architecture}"
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise ModelFileError(
            f"{where}: tensor {_first(missing)} is missing; {_extents(expected[missing[0]])} is needed; "
            f"the checkpoint has {len(tensors)} tensors; check that all its files are there"
        )
    for name, shape in expected.items():
        got = tuple(tensors[name].shape)
        if got != shape:
            raise ModelFileError(
                f"{where}: tensor {name} has shape {_extents(got)}; {_extents(shape)} is needed; "
                f"the config and the weights are not of one model"
            )


def _first(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"


def _extents(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
