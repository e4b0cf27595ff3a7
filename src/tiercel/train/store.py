"""Files of a training run: written whole or not at all, and a manifest that says what they were made with.

A folder with a manifest is gone on with only by a run of the same options: what is there already would otherwise be
mixed with what comes. Knows nothing of what the files hold.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from tiercel.base.errors import ConfigError, TiercelError
from tiercel.base.units import format_bytes

MANIFEST = "manifest.json"


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Have `write` fill a file that gets its name only when it is complete and on the disk.

    Raises: TiercelError: there is no room, or no right to write.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise _no_room(path, error) from error
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file whole.

    Raises: TiercelError: as `write_whole`.
    """
    write_whole(path, lambda file: file.write(text.encode()))


def check_room(folder: Path, n_bytes: int, what: str) -> None:
    """Refuse what will not fit before hours are spent on it.

    Raises: TiercelError: the disk has less.
    """
    free = shutil.disk_usage(folder).free
    if free < n_bytes:
        raise TiercelError(
            f"train: {what} need {format_bytes(n_bytes)}, and the disk of {folder} has {format_bytes(free)}; "
            "free some, choose another folder, or ask for fewer tokens or taps"
        )


def open_folder(folder: Path, kind: str, options: Mapping[str, Any]) -> None:
    """Make a folder for what `options` make, or find that it is one of the very same.

    Raises:
        ConfigError: it was made with other options (the message names them), or holds something else.
        TiercelError: it cannot be made.
    """
    found = read_manifest(folder)
    wanted = {"kind": kind, **json.loads(json.dumps(options))}
    if found is None:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(
                f"{folder}: holds something that is no {kind} of this command; give a new or an empty folder"
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _no_room(folder, error) from error
        write_text(folder / MANIFEST, json.dumps(wanted, indent=2) + "\n")
        return
    names = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
    if names:
        told = "; ".join(f"{name} was {found.get(name)!r} and is {wanted.get(name)!r}" for name in names[:4])
        raise ConfigError(
            f"{folder}: was begun with other options: {told}; give those again to go on, or another folder"
        )


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return what a folder was made with; None if it has no manifest.

    Raises: ConfigError: the manifest is damaged.
    """
    path = folder / MANIFEST
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); remove the folder, or choose another") from None
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: is damaged; remove the folder, or choose another")
    return found


def _no_room(path: Path, error: OSError) -> TiercelError:
    full = "no space is left on its disk" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
    return TiercelError(
        f"{path}: {full or error}; what was complete before is kept; make room, or choose another folder, and give the "
        "same command again to go on"
    )
