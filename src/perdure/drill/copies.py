"""A job in a copy of its project's folder, with a PERDURE_HOME of its own.

What the user has is read, and links that lead out of the folder are followed; a `Confinement` holds
back what a script would write elsewhere.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from perdure.adapters.confinement import Confinement
from perdure.launch.notebook.runner import end_with_parent
from perdure.launch.ssh.results import is_environment
from perdure.model.codec import encode
from perdure.model.errors import SafetyError
from perdure.model.job import JobSpec
from perdure.model.report import Snapshot
from perdure.service.curves import read_curves
from perdure.service.jobfiles import load_snapshot
from perdure.service.jobfolders import paths_of
from perdure.service.restarts import read_began
from perdure.telemetry.restarts import Began

COPY_BYTES_MAX = 256 << 20
COPY_FILES_MAX = 20_000
LEFT_OUT = frozenset({".git", ".venv", "venv", "__pycache__", "node_modules", ".mypy_cache"})
"""Folders that are not copied, nor are environments of Python's of any name."""
_STOP_S = 20.0
"""A job that was asked to stop is ended after this long."""
_LOSS = re.compile(
    r"^(.*?\bloss\b['\"]?\s*[=:]?\s*)([-+]?(?:\d[\d.]*(?:e[-+]?\d+)?|nan|inf))", re.I
)
_LINES_MAX = 1 << 20


class RunFiles:
    """One `perdure run` by what it leaves on this machine's disk."""

    def __init__(self, name: str, home: Path, log: Path) -> None:
        """Read nothing yet; `log` is where it writes."""
        self.name, self.home, self.log = name, home, log
        self.paths = paths_of(str(home), name)
        self.own: Path = home
        """A folder in which everything is the drill's."""

    @property
    def root(self) -> int:
        """Return the process below which all of the job is; 0 where there is none."""
        return 0

    @property
    def over(self) -> bool:
        """Return whether it has ended."""
        return self.root == 0

    def look(self) -> Snapshot | None:
        """Return its newest snapshot; None before there is one."""
        return load_snapshot(self.paths)

    def read_losses(self) -> tuple[str, dict[Any, str]]:
        """Return what was compared by, and what was logged, or else printed, at each step."""
        curves = read_curves(self.paths.curves).curves
        names = sorted(curves, key=lambda name: ("loss" not in name, name))
        if names and "loss" in names[0]:
            found = {int(bucket.step): bucket.last.hex() for bucket in curves[names[0]]}
            return names[0], found
        lines: dict[Any, str] = {}
        for line in self.read_lines():
            if match := _LOSS.match(line):
                lines[match[1]] = match[2]  # The newest of a step that was made twice.
        return "lines", {key: value for key, value in lines.items() if re.search(r"\d", key)}

    def read_lines(self) -> list[str]:
        """Return what rank 0 has written."""
        with open(self.log, "rb") as file:
            text = file.read(_LINES_MAX).decode(errors="replace")
        return [
            line.removeprefix("[rank 0] ")
            for line in text.splitlines()
            if line.startswith("[rank 0] ")
        ]

    def read_began(self, spec: JobSpec, generation: int) -> Began | None:
        """Return where a script without steps began in a generation; None: not known yet."""
        return read_began(self.paths, structs.replace(spec, log_dir=""), generation)

    def tail(self) -> str:
        """Return the last line of what went wrong."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        wrong = [line for line in lines if re.search(r"\b\w*(Error|Exception)\b|error:", line)]
        return (wrong or lines or ["it wrote nothing"])[-1][:300]

    def was_refused(self) -> bool:
        """Return whether something that it wanted to do was not permitted."""
        return "Permission denied" in self.log.read_text(errors="replace")


class CopiedRun(RunFiles):
    """One `perdure run` in a copy of a project."""

    def __init__(
        self,
        scratch: Path,
        project: Path,
        name: str,
        document: Mapping[str, Any],
        without: Sequence[Path] = (),
    ) -> None:
        """Copy the project below `scratch`, but for some folders; `document` is the job file's.

        Raises:
            OSError: it cannot be copied.
        """
        super().__init__(name, scratch / "home", scratch / f"{name}.out")
        self.folder = scratch / name
        copy_project(project, self.folder, (scratch, *without))
        (scratch / f"{name}.json").write_bytes(encode(document))
        self._document = scratch / f"{name}.json"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, environ: Mapping[str, str], confinement: Confinement | None = None) -> None:
        """Start it, so that it does not outlive this process."""

        def begin() -> None:
            end_with_parent()
            if confinement is not None:
                confinement.enter()

        words = ["run", "--name", self.name, "-c", str(self._document)]
        with open(self.log, "wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "perdure", *words],
                cwd=self.folder,
                env={**environ, "PERDURE_HOME": str(self.home), "WANDB_MODE": "disabled"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=begin,
            )

    @property
    def root(self) -> int:
        """Return its process; 0 before it was started."""
        return self.process.pid if self.process is not None else 0

    @property
    def over(self) -> bool:
        """Return whether it has ended."""
        return self.process is None or self.process.poll() is not None

    @property
    def code(self) -> int:
        """Return its exit code; 0 while it runs."""
        return (self.process.poll() or 0) if self.process is not None else 0

    def end(self, *, first_s: float = _STOP_S) -> None:
        """Have it stop at an agreed step, within `first_s`; where it does not, end it."""
        process = self.process
        if process is None:
            return
        for number, wait_s in (
            (signal.SIGTERM, first_s), (signal.SIGTERM, _STOP_S), (signal.SIGKILL, _STOP_S),
        ):  # fmt: skip
            if process.poll() is None:
                process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(wait_s)


def list_links(project: Path) -> list[str]:
    """Return the links of a folder that lead out of it, by their names."""
    found = []
    for folder, names, files in os.walk(project):
        names[:] = _list_copied(folder, names, ())
        for name in (*names, *files):
            path = Path(folder, name)
            if path.is_symlink() and not path.resolve().is_relative_to(project):
                found.append(str(path.relative_to(project)))
    return sorted(found)


def check_size(
    project: Path, what: str = "--try copies the script's folder", without: Sequence[Path] = ()
) -> int:
    """Return the bytes of a folder that is to be copied, for `what`, but for some folders in it.

    Raises:
        SafetyError: it is too large; the largest files are named.
    """
    sizes: list[tuple[int, str]] = []
    total = 0
    for folder, names, files in os.walk(project):
        names[:] = _list_copied(folder, names, without)
        for name in files:
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):
                size = os.lstat(path).st_size
                total += size
                sizes.append((size, os.path.relpath(path, project)))
        if total > COPY_BYTES_MAX or len(sizes) > COPY_FILES_MAX:
            largest = ", ".join(f"{name} ({size >> 20} MiB)" for size, name in
                                sorted(sizes, reverse=True)[:3])  # fmt: skip
            raise SafetyError(
                f"{what}, and {project} is too large: {largest}",
                hint="keep data and checkpoints elsewhere, with a link in their place",
            )
    return total


def copy_project(project: Path, target: Path, without: Sequence[Path] = ()) -> None:
    """Copy a folder. A link within it leads into the copy, any other to where it led.

    The target may lie in the folder, if it lies in one of those `without` which it is copied.
    """
    for folder, names, files in os.walk(project):
        names[:] = _list_copied(folder, names, without)
        there = target / os.path.relpath(folder, project)
        there.mkdir(parents=True, exist_ok=True)
        for name in [*files, *names]:
            path = Path(folder, name)
            if path.is_symlink():
                end = path.resolve()
                inside = end.is_relative_to(project)
                os.symlink(target / end.relative_to(project) if inside else end, there / name)
            elif path.is_file():
                shutil.copy2(path, there / name)


def _list_copied(folder: str, names: Sequence[str], without: Sequence[Path]) -> list[str]:
    """Return those of a folder's folders that are copied."""
    return [
        name
        for name in names
        if name not in LEFT_OUT
        and Path(folder, name) not in without
        and not is_environment(os.path.join(folder, name))
    ]
