"""Tiny models in tiny wheels, and a fetcher that copies them instead of asking a network."""

import hashlib
import shutil
import zipfile
from pathlib import Path

from tiercel.hub.catalogue import CatalogueEntry, WheelSource


def write_wheel(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


class Shelf:
    """A model in several wheels on disk. As a `FetchWheel` it copies them, and notes which were asked for."""

    def __init__(self, folder: Path, pieces: list[bytes], name: str = "tiny") -> None:
        self.folder = folder
        self.content = b"".join(pieces)
        self.asked: list[str] = []
        self.sources = []
        for idx, piece in enumerate(pieces):
            package, member = f"{name}-part{idx}", f"{name}_part{idx}/data/model.bin"
            wheel = write_wheel(folder / f"{package}.whl", {member: piece, "other.txt": b"x"})
            self.sources.append(
                WheelSource(package, "1.0", member, len(piece), hashlib.sha256(piece).hexdigest(), wheel.stat().st_size)
            )
        self.entry = CatalogueEntry(
            name=name,
            description="a tiny model",
            file="model.gguf",
            size_bytes=len(self.content),
            sha256=hashlib.sha256(self.content).hexdigest(),
            licence="none",
            sources=tuple(self.sources),
        )

    def wheel(self, idx: int) -> Path:
        return self.folder / f"{self.sources[idx].package}.whl"

    def __call__(self, source, folder, report):
        self.asked.append(source.package)
        wheel = Path(shutil.copy(self.folder / f"{source.package}.whl", folder))
        report(wheel.stat().st_size)
        return wheel
