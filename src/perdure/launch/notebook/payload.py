"""Project, job and perdure itself as text that fits into a cell.

A notebook is one file, and there is nothing beside it on Colab. The wheel is stored, not deflated,
so that one dictionary serves all of it: a third of its size is saved, which Kaggle's limit needs.
"""

import base64
import functools
import io
import lzma
import os
import tarfile
import tempfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path

from perdure.launch.wheel import name_wheel, write_wheel
from perdure.model.errors import ConfigError

PROJECT_MAX = 32 << 20
"""Bytes of a project, unpacked. Data has other ways: Drive, a data set."""
_WIDTH = 4096
_LONG_AGO = (1980, 1, 1, 0, 0, 0)


@functools.lru_cache(maxsize=1)
def pack(project: str, exclude: tuple[str, ...], job: str) -> str:
    """Return a project, `job.json` and the wheel as lines of base 85; the same for the same.

    Raises:
        ConfigError: the project is too large, or a link points out of it.
    """
    files = {f"project/{name}": path.read_bytes() for name, path in list_files(project, exclude)}
    files |= {"job.json": job.encode(), name_wheel(): _store_wheel()}
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        for name, content in sorted(files.items()):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o755 if content[:2] == b"#!" else 0o644
            archive.addfile(info, io.BytesIO(content))
    text = base64.b85encode(lzma.compress(raw.getvalue())).decode()
    return "\n".join(text[i : i + _WIDTH] for i in range(0, len(text), _WIDTH))


def list_files(project: str, exclude: tuple[str, ...]) -> list[tuple[str, Path]]:
    """Return the files that go along, by their names in the project.

    Raises:
        ConfigError: together they are too large.
    """
    found, size = [], 0
    for folder, folders, names in os.walk(project):
        folders[:] = sorted(d for d in folders if not any(fnmatch(d, p) for p in exclude))
        for name in sorted(names):
            path = Path(folder, name)
            if not path.is_file() or any(fnmatch(name, pattern) for pattern in exclude):
                continue
            size += path.stat().st_size
            if size > PROJECT_MAX:
                raise ConfigError(
                    f"{project} is larger than {PROJECT_MAX >> 20} MiB, and goes into a notebook",
                    hint="launch.exclude; data belongs on Drive or in a data set",
                )
            found.append((str(path.relative_to(project)), path))
    return found


def _store_wheel() -> bytes:
    stored = io.BytesIO()
    with tempfile.TemporaryDirectory(prefix="perdure-") as scratch:
        path = write_wheel(Path(scratch))
        with zipfile.ZipFile(path) as wheel, zipfile.ZipFile(stored, "w") as plain:
            for name in wheel.namelist():
                plain.writestr(zipfile.ZipInfo(name, _LONG_AGO), wheel.read(name))
    return stored.getvalue()
