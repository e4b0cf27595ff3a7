"""The tokenizer of a checkpoint's folder: `tokenizer.json` and the small files beside it.

It knows no weights and no configuration of the model but the ids that end a text.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tiercel.base.errors import ModelFileError
from tiercel.text.backend import Traits, frame, library_errors

if TYPE_CHECKING:
    import tokenizers

_TOKENIZER_BYTES_MAX: Final = 256 << 20
_SIDE_FILE_BYTES_MAX: Final = 32 << 20  # tokenizer_config.json repeats every added token: 6 MB with Gemma's


def read(folder: Path) -> "tuple[tokenizers.Tokenizer, Traits]":
    """Read a folder's tokenizer and what it does not hold itself.

    Raises:
        ModelFileError: `tokenizer.json` is absent, or a file is too long or malformed.
    """
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelFileError(
            "tokenizer.json: absent from the model's folder; Tiercel reads no other tokenizer file; "
            "convert the tokenizer to tokenizer.json, or serve token ids with skip_tokenizer_init"
        )
    _check_size(path, _TOKENIZER_BYTES_MAX)
    with library_errors("tokenizer.json"):
        backend = Tokenizer.from_file(str(path))
    # A file may carry the settings of its training, which would cut prompts in silence.
    backend.no_truncation()
    backend.no_padding()

    config = _json(folder / "tokenizer_config.json") or {}
    names = (_json(folder / "special_tokens_map.json") or {}) | config
    bos_id, eos_id, pad_id = (_token_id(backend, names.get(f"{name}_token")) for name in ("bos", "eos", "pad"))
    templates = _templates(folder, config)
    add_bos, add_eos = _framing(backend, config, bos_id, eos_id)
    return backend, Traits(
        bos_id=bos_id,
        eos_ids=_eos_ids(folder, eos_id),
        pad_id=pad_id,
        add_bos=add_bos,
        add_eos=add_eos,
        chat_template=templates.get("default"),
        chat_templates=templates,
    )


def _check_size(path: Path, n_bytes_max: int) -> None:
    n_bytes = path.stat().st_size
    if n_bytes > n_bytes_max:
        raise ModelFileError(f"{path.name}: {n_bytes} bytes; at most {n_bytes_max} are read; fetch the file again")


def _text(path: Path) -> str | None:
    if not path.is_file():
        return None
    _check_size(path, _SIDE_FILE_BYTES_MAX)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{path.name}: not UTF-8; text is needed; fetch the file again") from error


def _json(path: Path) -> dict[str, Any] | None:
    text = _text(path)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path.name}: not JSON; a JSON object is needed; fetch the file again") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{path.name}: a {type(value).__name__}; a JSON object is needed; fetch the file again")
    return value


def _token_id(backend: "tokenizers.Tokenizer", token: object) -> int | None:
    if isinstance(token, dict):
        token = token.get("content")
    return backend.token_to_id(token) if isinstance(token, str) else None


def _eos_ids(folder: Path, eos_id: int | None) -> tuple[int, ...]:
    """List the tokenizer's own, then the generation settings', or the model's where there are none of those."""
    found = [] if eos_id is None else [eos_id]
    for name in ("generation_config.json", "config.json"):
        value = (_json(folder / name) or {}).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(i) is not int or i < 0 for i in ids):
            raise ModelFileError(f"{name}: eos_token_id is {str(value)[:40]}; ids are needed; fetch the file again")
        found += ids
        if ids:
            break
    return tuple(dict.fromkeys(found))


def _framing(
    backend: "tokenizers.Tokenizer", config: dict[str, Any], bos_id: int | None, eos_id: int | None
) -> tuple[bool, bool]:
    """Tell whether encoding adds begin and end tokens; tokenizer_config.json, where it says so, is made to hold."""
    with library_errors("tokenizer.json"):
        bare = backend.encode("a", add_special_tokens=False).ids
        full = backend.encode("a").ids
    has = (full != bare and full[:1] == [bos_id], full != bare and full[-1:] == [eos_id])
    wants = tuple(
        config[key] if isinstance(config.get(key), bool) and token_id is not None else now
        for key, token_id, now in (("add_bos_token", bos_id, has[0]), ("add_eos_token", eos_id, has[1]))
    )
    if wants != has:
        pairs = [
            (i, backend.id_to_token(i)) if wanted and i is not None else None
            for i, wanted in zip((bos_id, eos_id), wants, strict=True)
        ]
        frame(backend, bos=pairs[0], eos=pairs[1])  # type: ignore[arg-type]
    return bool(wants[0]), bool(wants[1])


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name; a file of its own comes before the configuration's field."""
    source: object = _text(folder / "chat_template.jinja")
    if source is None:
        source = (_json(folder / "chat_template.json") or config).get("chat_template", config.get("chat_template"))
    if source is None:
        return {}
    if isinstance(source, str):
        return {"default": source}
    if isinstance(source, list) and all(
        isinstance(one, dict) and isinstance(one.get("name"), str) and isinstance(one.get("template"), str)
        for one in source
    ):
        return {one["name"]: one["template"] for one in source}
    raise ModelFileError(
        f"chat_template: a {type(source).__name__}; a text or a list of names and templates is needed; "
        "fetch the file again"
    )
