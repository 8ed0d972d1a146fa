"""A project that is sent in a ConfigMap: packed here, unpacked by the job's first pod."""

import gzip
import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from perdure.launch.kubernetes.manifest import PROJECT
from perdure.launch.ssh.results import repair
from perdure.launch.transfer import list_files
from perdure.model.errors import ConfigError

PACKED = f"{PROJECT}.tar.gz"
LIMIT = 900_000
"""A server takes a ConfigMap of 1 MiB."""


def pack(project: Path, exclude: Sequence[str]) -> bytes:
    """Return what of a project is sent, packed; the same for the same files.

    Raises:
        ConfigError: it is too large.
        PlatformError: there is no rsync, whose patterns `exclude` are.
    """
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w") as archive,
    ):
        for name in list_files(project, exclude):
            archive.add(project / name, name, filter=_anonymize)
            _check_size(buffer.tell(), project)
    _check_size(buffer.tell(), project)
    return buffer.getvalue()


def _anonymize(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


def _check_size(packed: int, project: Path) -> None:
    if packed > LIMIT:
        raise ConfigError(
            f"{project} has more than {LIMIT / 1e6:g} MB, packed: too much for a ConfigMap",
            hint="launch.exclude, or kubernetes.project names it in the image",
        )


def unpack(packed: bytes, target: Path) -> None:
    """Make `target` hold what was packed, file by file; nothing there is deleted.

    Scripts that came from another system are mended.

    Raises:
        OSError: the volume cannot be written.
    """
    target.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{PROJECT}-", dir=target.parent))
    try:
        with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as archive:
            if hasattr(tarfile, "data_filter"):
                archive.extractall(fresh, filter="data")
            else:  # Python before 3.11.4, such as Debian 12's; it is what `pack` has packed.
                archive.extractall(fresh)
        repair(str(fresh))
        for folder, _, names in os.walk(fresh):
            there = target / Path(folder).relative_to(fresh)
            there.mkdir(parents=True, exist_ok=True)
            for name in names:
                os.replace(Path(folder, name), there / name)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
