"""Project, job and perdure itself as text that fits into a cell.

A notebook is one file, and there is nothing beside it on Colab. The wheel is stored, not deflated,
so that one dictionary serves all of it: a third of its size is saved, which Kaggle's limit needs.
For the same reason docstrings stay behind, but for those of which help and schemas are made.
"""

import ast
import base64
import functools
import io
import lzma
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from perdure.launch.transfer import list_files
from perdure.launch.wheel import name_wheel, write_wheel
from perdure.model.errors import ConfigError

PROJECT_MAX = 32 << 20
"""Bytes of a project, unpacked. Data has other ways: Drive, a data set."""
_WIDTH = 4096
_LONG_AGO = (1980, 1, 1, 0, 0, 0)
_KEPT = ("perdure/cli/", "perdure/model/")
"""Rooms whose docstrings are read when the program runs."""


@functools.lru_cache(maxsize=1)
def pack(project: str, exclude: tuple[str, ...], job: str) -> str:
    """Return a project, `job.json` and the wheel as lines of base 85; the same for the same.

    Raises:
        ConfigError: the project is too large, or a link in it leads to no file.
        PlatformError: its files cannot be listed.
    """
    sources = read_project(Path(project), exclude)
    files = {f"project/{name}": data for name, data in sources.items()}
    files |= {"job.json": job.encode(), name_wheel(): _store_wheel()}
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        for name, content in sorted(files.items()):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), 0o755 if content[:2] == b"#!" else 0o644
            archive.addfile(info, io.BytesIO(content))
    text = base64.b85encode(lzma.compress(raw.getvalue())).decode()
    return "\n".join(text[i : i + _WIDTH] for i in range(0, len(text), _WIDTH))


def read_project(project: Path, exclude: Sequence[str]) -> dict[str, bytes]:
    """Return the files that go along, by their names in the project; of links what they lead to.

    Raises:
        ConfigError: together they are too large, or a link leads to a folder or nowhere.
        PlatformError: they cannot be listed.
    """
    found, size = {}, 0
    for name in list_files(project, exclude):
        path = project / name
        if not path.is_file():
            raise ConfigError(
                f"{path} is a link to a folder, or to nothing: it cannot go along",
                hint="the file itself, or launch.exclude",
            )
        size += path.stat().st_size
        if size > PROJECT_MAX:
            raise ConfigError(
                f"{project} is larger than {PROJECT_MAX >> 20} MiB, and goes into a notebook",
                hint="launch.exclude; data belongs on Drive or in a data set",
            )
        found[name] = path.read_bytes()
    return found


def _store_wheel() -> bytes:
    stored = io.BytesIO()
    with tempfile.TemporaryDirectory(prefix="perdure-") as scratch:
        path = write_wheel(Path(scratch))
        with zipfile.ZipFile(path) as wheel, zipfile.ZipFile(stored, "w") as plain:
            for name in wheel.namelist():
                content = wheel.read(name)
                if name.endswith(".py") and not name.startswith(_KEPT):
                    content = strip_docstrings(content.decode()).encode()
                plain.writestr(zipfile.ZipInfo(name, _LONG_AGO), content)
    return stored.getvalue()


def strip_docstrings(source: str) -> str:
    """Return Python source without its docstrings; every other line keeps its number.

    Of a module's own nothing stays in its place: nothing may stand before `from __future__`.
    """
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    module = ast.parse(source)
    for node in ast.walk(module):
        match node:
            case ast.Expr(value=ast.Constant(value=str()), end_lineno=int(last)):
                first, last = node.lineno - 1, last - 1
                before = lines[first][: node.col_offset]
                after = lines[last][node.end_col_offset :]
                stand_in = b"" if node in module.body else b"..."
                lines[first : last + 1] = [b"\n"] * (last - first) + [before + stand_in + after]
    return b"".join(lines).decode()
