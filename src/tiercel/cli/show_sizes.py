"""The arithmetic that `tiercel show` prints: a model's parts in weights and bytes, what a sequence takes, what fits.

A folder that holds a config and no weights, or a path to a config, is enough: the model is recorded from it, and no
weight is made.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tiercel.base.errors import ConfigError
from tiercel.base.units import GIB, format_bytes
from tiercel.quant.formats import Format
from tiercel.runner.sizes import SHARED, Fit, ModelSizes, sizes_of, what_fits

RANKS = (4, 8)
"""Over how many ranks shared experts are said to be cut."""

Rows = list[tuple[str, str]]
_WEIGHTS = (".safetensors", ".gguf")


class _Planned(msgspec.Struct, frozen=True):
    shape: tuple[int, ...]
    format: Format


def config_named(model: str | None) -> Path | None:
    """Return the config that a word names if it names no more: a .json file, or a folder with one and no weights."""
    if not model:
        return None
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            has_weights = any(entry.suffix.lower() in _WEIGHTS for entry in path.iterdir())
            return path / "config.json" if not has_weights and (path / "config.json").is_file() else None
        return path if path.suffix.lower() == ".json" and path.is_file() else None
    except (OSError, ValueError, RuntimeError):
        return None


def describe_config(path: Path) -> Mapping[str, Any]:
    """Return what a config alone tells: a summary and the model's arithmetic.

    Raises:
        ModelFileError: it is no config, or its fields make no sense.
        UnsupportedModel: the model, or the way its weights are stored, is not implemented.
    """
    from tiercel.loaders.mapped_file import read_json_object
    from tiercel.loaders.stored_sizes import stored_sizes
    from tiercel.models.registry import build_model

    config = read_json_object(path, may_be_infinite=True)
    model, stored = build_model(config), stored_sizes(config, str(path))
    info = model.info
    tensors = {name: _Planned(shape, stored.base) for name, shape in model.expected_weights().items()}
    sizes = sizes_of(
        model.record(tensors),
        info,
        lambda name, weight: stored.n_bytes(name, weight.shape),
        stored_float_bytes=stored.base.nbytes(1),
    )
    summary = [
        ("architecture", info.architecture),
        ("vocabulary", f"{info.vocab_size:,}"),
        ("context", f"{info.max_len_tokens:,} tokens"),
        ("stored as", stored.describe()),
    ]
    if config.get("vision_config"):
        summary.append(("vision", "left unread and not counted: images are not read yet"))
    return {"summary": summary, "sizes": sizes}


def rows_of(sizes: ModelSizes, memory_bytes: int | None) -> Rows:
    """Return the arithmetic as lines of a name and a text."""
    rows: Rows = [("layers", _layers_told(sizes)), ("parameters", _count(sizes.n_weights))]
    if sizes.n_active != sizes.n_weights:
        rows.append(("active a token", f"{_count(sizes.n_active)}, of an embedding one row"))
    rows.append(("weights", _size(sizes.n_bytes)))
    for part in sizes.parts:
        active = "" if part.n_active == part.n_weights else f", {_short(part.n_active)} active"
        rows.append((f"  {part.name}", f"{_size(part.n_bytes)}: {_short(part.n_weights)}{active}"))
    kept = ", ".join(f"{n:,} B ({dtype})" for dtype, n in sizes.kv_bytes.items() if n)
    rows.append(("KV a token", kept or "none: nothing is kept by the token"))
    if sizes.state_bytes:
        rows.append(("state a sequence", _state_told(sizes)))
    if sizes.shared_bytes:
        saved = ", ".join(f"{sizes.saved_by_sharding(n) / GIB:.2f} GiB over {n}" for n in RANKS)
        rows.append((f"{SHARED} cut", f"saves each rank {saved} ranks"))
    if memory_bytes is not None:
        rows += _fit_told(what_fits(sizes, memory_bytes), sizes)
    return rows


def as_json(sizes: ModelSizes, memory_bytes: int | None) -> dict[str, Any]:
    """Return the arithmetic as numbers."""
    told: dict[str, Any] = msgspec.to_builtins(sizes)
    told |= {"n_weights": sizes.n_weights, "n_active": sizes.n_active, "n_bytes": sizes.n_bytes}
    if sizes.shared_bytes:
        told["shared_experts_saved_bytes"] = {str(n): sizes.saved_by_sharding(n) for n in RANKS}
    if memory_bytes is not None:
        told["fits"] = msgspec.to_builtins(what_fits(sizes, memory_bytes), str_keys=True)
    return told


def read_memory(text: str) -> int:
    """Read `--memory`.

    Raises:
        ConfigError: it is no size of at least a byte.
    """
    from tiercel.base.units import parse_bytes

    try:
        found = parse_bytes(text)
    except ConfigError as error:
        raise ConfigError(f"--memory: {error}") from None
    if found < 1:
        raise ConfigError(f"--memory: got {text!r}; need a size such as 24GiB")
    return found


def _layers_told(sizes: ModelSizes) -> str:
    """Say how many layers there are, and of which kinds if they are not all of attention."""
    if sizes.n_attention_layers == sizes.n_layers:
        return str(sizes.n_layers)
    kinds = ((sizes.n_attention_layers, "of attention"), (sizes.n_state_layers, "with recurrent state"))
    return f"{sizes.n_layers}: " + ", ".join(f"{n} {kind}" for n, kind in kinds if n)


def _state_told(sizes: ModelSizes) -> str:
    here, stored = f"{sizes.state_bytes / 1e6:,.1f} MB", f"{sizes.state_stored_bytes / 1e6:,.1f} MB"
    if here == stored:
        return f"{here} ({sizes.state_bytes:,} B)"
    return f"{stored} with convolutions in the checkpoint's type; {here} here, all float32 ({sizes.state_bytes:,} B)"


def _fit_told(fit: Fit, sizes: ModelSizes) -> Rows:
    name = f"in {_size(fit.memory_bytes)}"
    if fit.left_bytes < 0:
        return [(name, f"the weights alone do not fit: {_size(-fit.left_bytes)} are missing")]
    rows = [(name, f"{_size(fit.left_bytes)} are left beside the weights")]
    if fit.n_tokens is not None:
        is_all = " (all that it may have)" if fit.n_tokens == sizes.max_len_tokens else ""
        rows.append(("  one sequence", f"{fit.n_tokens:,} tokens, keys and values in float16{is_all}"))
    for length, n in fit.n_sequences.items():
        text = f"of {length:,} tokens" if sizes.kv_bytes["float16"] else "of any length"
        rows.append(("  sequences", f"{n:,} {text}"))
    return rows


def _size(n_bytes: int) -> str:
    return f"{n_bytes / GIB:,.1f} GiB" if n_bytes >= GIB else format_bytes(n_bytes)


def _count(n: int) -> str:
    return f"{_short(n)} ({n:,})" if n >= 1000 else str(n)


def _short(n: int) -> str:
    """Write a count with three digits: 2.78 T, 104 B, 135 M."""
    for unit, letter in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if n >= unit:
            value = n / unit
            return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {letter}"
    return str(n)
