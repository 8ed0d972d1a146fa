"""A drill on this machine: the job in a copy of its project, in a folder of the drill's own."""

import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex

import msgspec

from perdure.adapters.confinement import Confinement
from perdure.drill.card import Card
from perdure.drill.copies import CopiedRun
from perdure.drill.gates import Gates
from perdure.drill.isolation import clean_environ, isolate, list_changes, list_writable
from perdure.drill.place import Place
from perdure.drill.planning import DrillWish
from perdure.drill.rehearsal import Say, rehearse
from perdure.drill.strikes import Target
from perdure.files.private import find_private, make_private
from perdure.model.errors import PlatformError
from perdure.service.jobfiles import remove_folders
from perdure.service.jobfolders import paths_of
from perdure.service.processes import guarded


def drill(wish: DrillWish, say: Say) -> Card:
    """Drill a job, and return its card. Ctrl-C ends it, and nothing of it is left.

    Raises:
        PlatformError: the folder cannot be copied.
    """
    with make_scratch(wish.home) as (scratch, temporary):
        return rehearse(wish, _ThisMachine(wish, scratch, temporary), say)


@contextmanager
def make_scratch(home: str) -> Iterator[tuple[Path, Path]]:
    """Give a folder for a drill, and a short one for what is passing; both are gone afterwards.

    What drills that were killed have left is removed first.

    Raises:
        PlatformError: no folder can be made there.
    """
    folders, short = Path(home, "drill"), Path(find_private("/tmp"))
    try:
        folders.mkdir(parents=True, exist_ok=True)
        make_private(str(short))
        sweep(folders, f"drill-{platform.node()}-")
        sweep(short, "drill-")
        prefix = f"drill-{platform.node()}-{os.getpid()}-"
        scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=folders)).resolve()
        temporary = Path(tempfile.mkdtemp(prefix=f"drill-{os.getpid()}-", dir=short))
    except OSError as error:
        raise PlatformError(
            f"cannot make a folder for the drill: {error}", hint="another PERDURE_HOME"
        ) from error
    try:
        with guarded("PERDURE_DRILL"):
            yield scratch, temporary
    finally:
        remove_drill(scratch)
        shutil.rmtree(temporary, ignore_errors=True)
        with suppress(OSError):
            folders.rmdir()


def sweep(folder: Path, begin: str) -> None:
    """Remove folders named `begin`, a pid, and a word, if the process is gone.

    `begin` names this machine if the folder may be on a disk that other machines share.
    """
    for path in folder.iterdir():
        name = re.fullmatch(rf"{re.escape(begin)}(\d+)-[^-]+", path.name)
        if name is not None and not os.path.exists(f"/proc/{name[1]}"):
            remove_drill(path)


def remove_drill(scratch: Path) -> None:
    """Remove a drill's folder, and what its jobs have outside it."""
    home = str(scratch / "home")
    for job in (scratch / "home" / "jobs").glob("*"):
        remove_folders(paths_of(home, job.name))
    shutil.rmtree(scratch, ignore_errors=True)


class _ThisMachine(Place):
    """Copies of the project, one after another."""

    stays = frozenset()

    def __init__(self, wish: DrillWish, scratch: Path, temporary: Path) -> None:
        self.wish, self._scratch, self._temporary = wish, scratch, temporary

    def describe(self) -> str:
        """Return nothing: it is this machine."""
        return ""

    def list_changes(self) -> list[str]:
        """Return what is otherwise than in the user's job."""
        return list_changes(self.wish.spec)

    def list_notes(self) -> Sequence[str]:
        """Return nothing."""
        return ()

    @contextmanager
    def open(self, *, switches: bool) -> Iterator[Target[CopiedRun]]:
        """Give a job that was started in a copy; it is ended, and has nothing outside any more."""
        name = f"{self.wish.spec.name[:40]}-drill-{token_hex(3)}"
        folder = self._scratch / name
        spec = isolate(self.wish.spec, name, self.wish.project, folder, self._scratch)
        try:
            run = CopiedRun(
                self._scratch, self.wish.project, name, msgspec.to_builtins(spec),
                without=(Path(self.wish.home).resolve(),),
            )  # fmt: skip
            for path, text in self.wish.changed.items():
                (run.folder / path).unlink(missing_ok=True)  # A link leads to the user's.
                (run.folder / path).write_bytes(text.encode())
        except OSError as error:
            raise PlatformError(
                f"cannot copy {self.wish.project}: {error.strerror or error}",
                hint=f"make room in {self._scratch.parent}",
            ) from error
        run.home.mkdir(exist_ok=True)
        Path(run.paths.away).mkdir(parents=True, exist_ok=True)
        target = Target(run, self._scratch / f"{name}.full", Gates(run.paths))
        environ = clean_environ(self.wish.environ, self._temporary)
        environ |= target.switches() if switches else {}
        confinement = self._confine() if self.wish.confined else None
        try:
            run.start(environ, confinement)
            yield target
        finally:
            target.gates.free()
            run.end(first_s=0.5)
            remove_folders(run.paths)
            shutil.rmtree(folder, ignore_errors=True)
            if confinement is not None:
                confinement.close()

    def _confine(self) -> Confinement:
        wish = self.wish
        short = str(self._temporary.parent)
        folders = [str(self._scratch), short, *list_writable(wish.environ, wish.spec)]
        return Confinement([*folders, *wish.writable])
