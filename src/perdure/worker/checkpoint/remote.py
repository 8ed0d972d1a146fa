"""Checkpoints at an fsspec URL: staged in a local directory, uploaded, checked, tagged last.

The staging directory lies beside the job and is shared by its ranks; what it still holds need not
be fetched again.
"""

import os
import shutil
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import fsspec

from perdure.model.checkpoints import LATEST, MANIFEST, TEMPORARY, Manifest, parse_checkpoint_name
from perdure.model.codec import decode
from perdure.model.errors import PlatformError
from perdure.model.job import CheckpointConfig
from perdure.worker.checkpoint.files import remove_surplus


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
        if self._fs.exists(target):  # Damaged, or cut off: no manifest may vouch for a mixture.
            self._fs.rm(target, recursive=True)
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

    def list_names(self) -> list[str]:
        """Return the names of the checkpoints there.

        A place that cannot be reached raises: to begin at step 0 instead would lose the training.
        """
        self._fs.invalidate_cache()
        try:
            rows = self._fs.ls(self._path, detail=False)
        except FileNotFoundError:
            return []
        names = [row.rstrip("/").rsplit("/", 1)[-1] for row in rows]
        return [name for name in names if parse_checkpoint_name(name) is not None]

    def fetch(self, root: Path, name: str) -> str:
        """Bring a checkpoint into the staging directory if it is not there; return why it cannot.

        It gets its name there when it is whole, so that two processes may both do it.
        """
        if (root / name / MANIFEST).exists():
            return ""
        root.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(suffix=TEMPORARY, prefix="fetch-", dir=root))
        try:
            for path in self._fs.ls(f"{self._path}/{name}", detail=False):
                self._fs.get_file(path, str(temporary / path.rsplit("/", 1)[-1]))
            shutil.rmtree(root / name, ignore_errors=True)
            os.replace(temporary, root / name)
        except OSError as error:
            if not (root / name / MANIFEST).exists():
                return f"cannot be fetched: {error}"
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return ""

    def apply_retention(self, config: CheckpointConfig, newest: int) -> None:
        """Remove remote checkpoints that no rule keeps."""
        steps = {parse_checkpoint_name(name) or 0: name for name in self.list_names()}

        def read(step: int) -> Manifest:
            data = self._fs.cat_file(f"{self._path}/{steps[step]}/{MANIFEST}")
            manifest: Manifest = decode(data, Manifest)
            return manifest

        def remove(step: int) -> None:
            self._fs.rm(f"{self._path}/{steps[step]}", recursive=True)

        remove_surplus(steps, config, newest, read=read, remove=remove)


def open_place(url: str) -> tuple[Path, Remote | None]:
    """Return (local directory, remote end or None) of a checkpoint URL."""
    if "://" not in url or url.startswith("file://"):
        return Path(url.removeprefix("file://")).absolute(), None
    base = os.environ.get("PERDURE_SPEC", "")
    local = Path(base).parent if base else Path(tempfile.gettempdir())
    return local / f"staging-{sha256(url.encode()).hexdigest()[:12]}", Remote(url)
