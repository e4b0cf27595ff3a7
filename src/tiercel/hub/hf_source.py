"""A repository of the Hugging Face hub as a source of model files, by `huggingface_hub`, which keeps its own cache.

That library honours HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE and HF_TOKEN; nothing here reads the last. Code files (`*.py`)
and pickled weights are never fetched. All files of a model come from one snapshot.
"""

import sys
from pathlib import Path
from typing import Any

import msgspec

from tiercel.base.errors import DownloadError, ModelNotFound, TiercelError

_TIMEOUT_S = 10.0  # what huggingface_hub gives its own requests
_CONFIG = "config.json"
_DENSE = ("*.json", "tokenizer*", "*.jinja", "*.safetensors")


class HubAccess(msgspec.Struct, frozen=True):
    """A key for the hub (None: what the library knows) and the folder of its cache (None: the library's). The key is
    not shown.
    """

    token: str | None = None
    cache_dir: str | None = None

    def __repr__(self) -> str:
        return f"HubAccess(cache_dir={self.cache_dir!r})"

    @property
    def keywords(self) -> dict[str, Any]:
        """The library's keywords for a download."""
        folder = None if self.cache_dir is None else str(Path(self.cache_dir).expanduser())
        return {"token": self.token, "cache_dir": folder}


def fetch_repository(
    repository: str,
    *,
    pick: str | None,
    revision: str | None,
    offline: bool,
    access: HubAccess | None = None,
    config_only: bool = False,
) -> Path:
    """Fetch `repository` unless it is here; return its snapshot's folder, or its `.gguf` file if it has no safetensors.

    `pick` is a part of the wanted `.gguf` file's name. With `config_only`, of a repository that has a config beside its
    safetensors nothing else is fetched; the folder may still hold what was fetched before. When the hub cannot be
    reached, a snapshot that is here is used.

    Raises:
        ModelNotFound: no such repository or revision, no access to it, no weights in it, or `pick` does not fit one.
        DownloadError: the hub cannot be reached and nothing is here, or the download failed.
    """
    import huggingface_hub
    from huggingface_hub.constants import HF_HUB_OFFLINE

    access = access or HubAccess()
    where = f"model {repository}" + (f" at {revision}" if revision else "")
    try:
        if offline or HF_HUB_OFFLINE:
            return _cached(repository, pick, revision, where, access, config_only=config_only)
        try:
            api = huggingface_hub.HfApi(token=access.token)
            info = api.model_info(repository, revision=revision, timeout=_TIMEOUT_S)
        except _unreachable():
            return _cached(repository, pick, revision, where, access, config_only=config_only)
        names = [sibling.rfilename for sibling in info.siblings or []]
        patterns = _patterns(names, pick, where)
        is_config_enough = config_only and patterns == list(_DENSE) and _CONFIG in names
        if is_config_enough:
            patterns = [_CONFIG]
        folder = Path(
            huggingface_hub.snapshot_download(repository, revision=revision, allow_patterns=patterns, **access.keywords)
        )
    except TiercelError:
        raise
    except _refused() as error:
        raise ModelNotFound(
            f"{where}: {_first_line(error)}; need a repository that exists and that you may read; "
            "check the spelling, and for a gated or private one set HF_TOKEN"
        ) from error
    except _failed() as error:
        raise DownloadError(
            f"{where}: {_first_line(error)}; need the hub to be reachable, or the model in its cache; "
            "check the network, HF_ENDPOINT and HF_HUB_OFFLINE"
        ) from error
    return folder if is_config_enough else _weights_in(folder, pick, where)


def choose_gguf(names: list[str], pick: str | None, where: str) -> str:
    """Return the one of `names` that `pick` singles out: the only one, or the only one with `pick` in it, in any case.

    Raises:
        ModelNotFound: none or several fit, or the one that does is a piece of a split model.
    """
    fitting = [name for name in names if pick is None or pick.lower() in name.lower()]
    if len(fitting) > 1 and pick is not None:
        # `Q4_K` is also in the name of a Q4_K_M file: the one whose name ends with it is meant.
        ends = [name for name in fitting if name.lower().removesuffix(".gguf").endswith(pick.lower())]
        fitting = ends or fitting
    if len(fitting) != 1:
        raise ModelNotFound(
            f"{where}: {len(fitting)} .gguf files fit {pick or 'no choice'!r}; need one of {', '.join(sorted(names))}; "
            "add a part of its name after a colon, as in org/name:Q4_K_M"
        )
    if "-of-0" in fitting[0]:
        raise ModelNotFound(
            f"{where}: {fitting[0]} is one piece of a split model; need a single .gguf file; join the pieces first"
        )
    return fitting[0]


def _patterns(names: list[str], pick: str | None, where: str) -> list[str]:
    """Choose what to fetch of a repository that holds `names`: its safetensors if no file is picked, else one .gguf."""
    ggufs = [name for name in names if name.lower().endswith(".gguf")]
    if pick is None and any(name.endswith(".safetensors") and "/" not in name for name in names):
        return list(_DENSE)
    if not ggufs:
        raise ModelNotFound(
            f"{where}: holds no .safetensors in its top folder and no .gguf; need one of the two; "
            "pickled weights (.bin, .pt) are not read, because they can run code"
        )
    return [choose_gguf(ggufs, pick, where)]


def _cached(
    repository: str, pick: str | None, revision: str | None, where: str, access: HubAccess, *, config_only: bool
) -> Path:
    """Return what is here of `repository`: a whole snapshot, or one .gguf file, which is there whole or not at all."""
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def snapshot() -> str:
        return huggingface_hub.snapshot_download(
            repository,
            revision=revision,
            allow_patterns=[_CONFIG] if config_only else list(_DENSE),
            local_files_only=True,
            cache_dir=access.keywords["cache_dir"],
        )

    try:
        folder = Path(snapshot())
    except LocalEntryNotFoundError as error:
        # Newer versions know that files are missing and say where the others are.
        folder = Path(getattr(error, "snapshot_path", "") or "/nonexistent")
        ggufs = [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")]
        if not ggufs or (pick is None and any(folder.glob("*.safetensors"))):
            raise
        return folder / choose_gguf(ggufs, pick, where)
    if config_only and pick is None and (folder / _CONFIG).is_file():
        return folder
    return _weights_in(folder, pick, where)


def _weights_in(folder: Path, pick: str | None, where: str) -> Path:
    """Return the snapshot's folder, or its one fitting .gguf file; refuse a snapshot without weights."""
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    if _patterns(names, pick, where)[0].lower().endswith(".gguf"):
        return folder / choose_gguf([name for name in names if name.lower().endswith(".gguf")], pick, where)
    return folder


def _refused() -> tuple[type[BaseException], ...]:
    from huggingface_hub import errors

    # LocalEntryNotFoundError is not listed: absence from the cache is no refusal.
    return (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError)


def _unreachable() -> tuple[type[BaseException], ...]:
    """List the errors of a request without an answer, for whichever HTTP library is under huggingface_hub."""
    libraries = (("httpx2", "RequestError"), ("httpx", "RequestError"), ("requests.exceptions", "RequestException"))
    loaded = [getattr(sys.modules[module], name) for module, name in libraries if module in sys.modules]
    return (ConnectionError, TimeoutError, *loaded)


def _failed() -> tuple[type[BaseException], ...]:
    from huggingface_hub import errors

    return (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError, *_unreachable())


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0].rstrip(".:") if text else type(error).__name__
