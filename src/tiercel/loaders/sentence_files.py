"""What sentence-transformers writes beside a model: how its rows are pooled, and how much of a text it reads."""

import json
from pathlib import Path
from typing import Any, Literal

import msgspec

from tiercel.base.errors import ModelFileError, UnsupportedModel

_BYTES_MAX = 1 << 20
_METHODS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}


class SentenceFiles(msgspec.Struct, frozen=True):
    """What the files say; None where they are silent."""

    method: Literal["cls", "last", "mean"] | None = None
    is_normalised: bool = False
    max_len_tokens: int | None = None


def read_sentence_files(folder: Path) -> SentenceFiles | None:
    """Read modules.json and the files that it names; None when there is none.

    Raises:
        ModelFileError: a file is missing, malformed or too long.
        UnsupportedModel: a module, or a way of pooling, that is not implemented.
    """
    path = folder / "modules.json"
    if not path.is_file():
        return None
    modules = _read(path)
    if not isinstance(modules, list) or not all(isinstance(m, dict) for m in modules):
        raise ModelFileError(f"{path}: not a list of modules; fetch the model again")
    method: Literal["cls", "last", "mean"] | None = None
    is_normalised = False
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            method = _method(_inside(folder, module.get("path")) / "config.json")
        elif kind == "Normalize":
            is_normalised = True
        elif kind != "Transformer":
            raise UnsupportedModel(f"{path}: module {kind[:40]} is not implemented; Pooling and Normalize are")
    limits = folder / "sentence_bert_config.json"
    found = _read(limits) if limits.is_file() else {}
    n = found.get("max_seq_length") if isinstance(found, dict) else None
    if n is not None and (type(n) is not int or n < 1):
        raise ModelFileError(f"{limits}: max_seq_length is {str(n)[:40]}; 1 or more is needed; fetch the model again")
    return SentenceFiles(method, is_normalised, n)


def _method(path: Path) -> Literal["cls", "last", "mean"]:
    config = _read(path)
    if not isinstance(config, dict):
        raise ModelFileError(f"{path}: not a JSON object; fetch the model again")
    on = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    if len(on) != 1 or on[0] not in _METHODS:
        raise UnsupportedModel(
            f"{path}: pooling by {', '.join(on) or 'nothing'}; one of {', '.join(_METHODS)} is needed"
        )
    return _METHODS[on[0]]  # type: ignore[return-value]


def _inside(folder: Path, name: object) -> Path:
    """Return a module's folder; a name that leads out of the model's is refused."""
    if not isinstance(name, str) or not name or name.startswith(".") or "/" in name or "\\" in name:
        raise ModelFileError(f"{folder / 'modules.json'}: path {str(name)[:40]!r}; a folder of the model is needed")
    return folder / name


def _read(path: Path) -> Any:
    try:
        if path.stat().st_size > _BYTES_MAX:
            raise ModelFileError(f"{path}: longer than {_BYTES_MAX} bytes; fetch the model again")
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: cannot be read ({str(error)[:100]}); fetch the model again") from error
