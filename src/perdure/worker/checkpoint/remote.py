"""Checkpoints at an fsspec URL: staged in a local directory, uploaded, checked, tagged last."""

import os
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import fsspec

from perdure.model.checkpoints import LATEST, MANIFEST, Manifest, parse_checkpoint_name
from perdure.model.errors import PlatformError


class Remote:
    """The remote end of a local staging directory."""

    def __init__(self, url: str) -> None:
        """Open `url`'s file system."""
        self._url = url.rstrip("/")
        self._fs: Any
        self._fs, self._path = fsspec.core.url_to_fs(self._url)

    def show(self, local: Path) -> str:
        """Return the URL of a checkpoint by its local directory."""
        return f"{self._url}/{local.name}"

    def upload(self, local: Path, manifest: Manifest) -> None:
        """Copy a checkpoint, its manifest last; check sizes; name it `latest`.

        Raises:
            PlatformError: what arrived has another size.
        """
        target = f"{self._path}/{local.name}"
        self._fs.makedirs(target, exist_ok=True)
        for entry in manifest.files:
            self._fs.put_file(str(local / entry.path), f"{target}/{entry.path}")
            arrived = self._fs.info(f"{target}/{entry.path}")["size"]
            if arrived != entry.bytes:
                raise PlatformError(
                    f"{self.show(local)}/{entry.path} has {arrived} bytes, not {entry.bytes}"
                )
        self._fs.put_file(str(local / MANIFEST), f"{target}/{MANIFEST}")
        with self._fs.open(f"{self._path}/{LATEST}", "wb") as file:
            file.write(local.name.encode())

    def download(self, root: Path) -> None:
        """Bring the newest remote checkpoints that the staging directory lacks."""
        if not self._fs.exists(self._path):
            return
        names = [
            row.rstrip("/").rsplit("/", 1)[-1] for row in self._fs.ls(self._path, detail=False)
        ]
        newest = sorted((n for n in names if parse_checkpoint_name(n) is not None), reverse=True)
        for name in newest[:2]:
            if not (root / name / MANIFEST).exists():
                (root / name).mkdir(parents=True, exist_ok=True)
                for path in self._fs.ls(f"{self._path}/{name}", detail=False):
                    self._fs.get_file(path, str(root / name / path.rsplit("/", 1)[-1]))

    def apply_retention(self, root: Path) -> None:
        """Remove remote checkpoints that the local rules have removed."""
        for path in self._fs.ls(self._path, detail=False):
            name = path.rstrip("/").rsplit("/", 1)[-1]
            if parse_checkpoint_name(name) is not None and not (root / name).exists():
                self._fs.rm(path, recursive=True)


def open_place(url: str) -> tuple[Path, Remote | None]:
    """Return (local directory, remote end or None) of a checkpoint URL."""
    if "://" not in url or url.startswith("file://"):
        return Path(url.removeprefix("file://")).absolute(), None
    base = os.environ.get("PERDURE_SPEC", "")
    local = Path(base).parent if base else Path(tempfile.gettempdir())
    return local / f"staging-{sha256(url.encode()).hexdigest()[:12]}", Remote(url)
