"""A model's name -> files on this machine. The one door of the package: whatever is told a model's name asks here.

A name is, in this order: a path that exists, a catalogue name, a repository of the Hugging Face hub (`org/name`).
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tiercel.base.errors import ModelNotFound
from tiercel.hub.catalogue import Catalogue, load_catalogue
from tiercel.hub.store import ModelStore, store_in

if TYPE_CHECKING:
    from tiercel.hub.wheel_source import Progress

_REPOSITORY = re.compile(
    r"(?P<repository>[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95})(?::(?P<pick>[A-Za-z0-9._-]{1,96}))?",
    re.ASCII,
)
# How alike a word and a catalogue name are for one to be taken for a slip in the other: some letters of a dozen.
_NEAR = 0.75
_PATH_BEGINNINGS = ("./", "../", "/", "~/")
_MODEL_ENDINGS = (".gguf", ".safetensors")
# What tools for cutting up files call the pieces; GGUF's own parts are files that end in .gguf.
_PIECE = re.compile(r"((.+\.gguf)[.-](?:part|split-))(?:\d+of\d+|-?[0-9a-z]{1,3})", re.ASCII | re.IGNORECASE)


class ResolvedModel(msgspec.Struct, frozen=True):
    """Where a model's files are: a folder or a `.gguf` file, a short name to show, and "path", "catalogue" or "hub"."""

    path: Path
    display_name: str
    source: str


def is_model_name(text: str, *, catalogue: Catalogue | None = None) -> bool:
    """Whether `text` names a model rather than being a prompt: a path that exists, a catalogue name, or `org/name`.

    Says nothing of whether the repository exists: `and/or` is a model's name by its form.
    """
    if not text or "\n" in text:
        return False
    if _existing_path(text) is not None or _REPOSITORY.fullmatch(text) is not None:
        return True
    known = load_catalogue() if catalogue is None else catalogue
    return known.find(text) is not None


def meant_model(text: str, *, catalogue: Catalogue | None = None) -> str | None:
    """Say what a word that names no model was probably meant to name; None: it does not look like a model's name.

    It looks like one where it is nearly a catalogue's, or is written as a path.
    """
    import difflib

    known = load_catalogue() if catalogue is None else catalogue
    if not text or any(letter.isspace() for letter in text) or is_model_name(text, catalogue=known):
        return None
    family = [name for name in known.names if name.partition("-")[0] == text.lower()]
    near = family or difflib.get_close_matches(text.lower(), known.names, n=1, cutoff=_NEAR)
    if near:
        return f"did you mean {near[0]}?"
    if text.startswith(_PATH_BEGINNINGS) or text.lower().endswith(_MODEL_ENDINGS):
        return "there is no such file or folder"
    return None


def resolve(
    name: str | None,
    *,
    offline: bool = False,
    revision: str | None = None,
    hf_token: str | None = None,
    download_dir: str | None = None,
    progress: "Progress | None" = None,
    store: ModelStore | None = None,
    catalogue: Catalogue | None = None,
    config_only: bool = False,
) -> ResolvedModel:
    """Bring the model called `name` to this machine if it is not here, and say where it is.

    None is the catalogue's default. `offline` fetches nothing. `revision` (a branch, tag or commit) is for repositories
    of the hub only, as is `hf_token`. `download_dir` is where what is fetched is kept. A repository with several
    `.gguf` files is named `org/name:Q4_K_M`, with a part of the file's name. With `config_only`, of a repository of
    safetensors the config is enough.

    Raises:
        ModelNotFound: `name` names nothing, or nothing that is here while `offline`.
        DownloadError: the model could not be fetched.
    """
    path = None if name is None else _existing_path(name)
    if path is not None:
        _refuse_revision(name, revision)
        return _local_model(path)
    known = load_catalogue() if catalogue is None else catalogue
    entry = known.find(known.default if name is None else name)
    if entry is not None:
        _refuse_revision(entry.name, revision)
        kept = store_in(download_dir) if store is None else store
        found = kept.find(entry)
        if found is None and offline:
            raise ModelNotFound(
                f"model {entry.name}: not in {kept.folder}; need it there to work offline; "
                f"run `tiercel pull {entry.name}` once"
            )
        return ResolvedModel(found or kept.fetch(entry, progress), entry.name, "catalogue")
    match = _REPOSITORY.fullmatch(name or "")
    if match is None:
        raise ModelNotFound(_unknown_name(name or "", known))
    from tiercel.hub.hf_source import HubAccess, fetch_repository

    where = HubAccess(hf_token, download_dir)
    path = fetch_repository(
        match["repository"],
        pick=match["pick"],
        revision=revision,
        offline=offline,
        access=where,
        config_only=config_only,
    )
    return ResolvedModel(path, match["repository"], "hub")


def _existing_path(text: str) -> Path | None:
    # An over-long or NUL-holding text is a prompt, and the system's refusal to look it up means just that.
    try:
        path = Path(text).expanduser()
        path.stat()
    except (OSError, ValueError, RuntimeError):
        return None
    return path if text else None


def _local_model(path: Path) -> ResolvedModel:
    if path.is_dir():
        return ResolvedModel(path, path.resolve().name, "path")
    if path.suffix.lower() == ".gguf":
        return ResolvedModel(path, path.stem, "path")
    piece = _PIECE.fullmatch(path.name)
    if piece is not None:
        raise ModelNotFound(
            f"model {path}: got one piece of a file that was cut up; need the whole file; join the pieces in their "
            f"order, as in `cat {piece[1]}* > {piece[2]}`, and name that"
        )
    raise ModelNotFound(
        f"model {path}: got a file that does not end in .gguf; need a .gguf file or a folder (config.json and "
        "*.safetensors); for a .safetensors file name its folder"
    )


def _refuse_revision(name: str | None, revision: str | None) -> None:
    if revision is not None:
        raise ModelNotFound(
            f"model {name}: got revision {revision!r}; only a hub repository (org/name) has revisions; leave it out"
        )


def _unknown_name(name: str, known: Catalogue) -> str:
    import difflib

    near = difflib.get_close_matches(name, known.names, n=1)
    meant = f" (did you mean {near[0]}?)" if near else ""
    shown = name if len(name) <= 80 else f"{name[:77]}..."
    return (
        f"model {shown!r}: no such path, catalogue name or hub repository{meant}; need a folder or .gguf file that "
        f"exists, a catalogue name ({', '.join(known.names)}), or a hub repository written org/name; "
        "`tiercel list` shows what is here"
    )
