"""What a box says that it has, looked at before a byte of it is written here.

The names in it become paths on this machine. A box that is broken or hostile could name a file
anywhere, or have one written through a link that lies here already; either is refused for the
whole pull, on every platform, since a box that does so is not to be believed in the rest.
"""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from perdure.model.errors import SafetyError
from perdure.model.input.relative import explain_unsafe
from perdure.model.platforms.launching import PulledFile

_HINT = "nothing was written; look at that machine before anything of it is used"


class Roster(msgspec.Struct, frozen=True):
    """The answer of `ssh/results.py manifest`."""

    files: tuple[PulledFile, ...]
    links: tuple[str, ...]
    roots: dict[str, str]
    left: tuple[PulledFile, ...] = ()
    """Files that a person leaves there; they have no hash."""
    excluded: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    """What could not be looked at, and why."""
    others: tuple[str, ...] = ()
    """Folders of other jobs."""


def check_roster(roster: Roster, wanted: Mapping[str, str], name: str) -> None:
    """Refuse what the place called `name` answered when it was asked for the labels of `wanted`.

    Raises:
        SafetyError: a file is not below one of them, or stands twice.
    """
    if not set(roster.roots) <= set(wanted):
        raise SafetyError(f"{name} answers for other folders than it was asked for", hint=_HINT)
    check_names((file.path for file in roster.files), name)
    seen: set[str] = set()
    for file in roster.files:
        if not any(file.path.startswith(f"{label}/") for label in roster.roots):
            raise SafetyError(f"{name} names {show(file.path)}, which nobody asked for", hint=_HINT)
        if file.path in seen or file.bytes < 0:
            raise SafetyError(f"{name} names {show(file.path)} wrongly or twice", hint=_HINT)
        seen.add(file.path)


def check_names(names: Iterable[str], name: str) -> None:
    """Refuse names that lead out of the folder that they are joined to; `name` has said them.

    Raises:
        SafetyError: there is one.
    """
    for path in names:
        why = explain_unsafe(path)
        if why:
            raise SafetyError(
                f"{name} names the file {show(path)}, which {why}: it would lie elsewhere",
                hint=_HINT,
            )


def check_target(target: Path, names: Iterable[str]) -> None:
    """Refuse to write through links: none of `names` may lie on or behind one below `target`.

    Raises:
        SafetyError: there is a link.
    """
    checked: set[Path] = {target}
    for name in names:
        path = target / name
        while path not in checked:
            checked.add(path)
            if path.is_symlink():
                raise SafetyError(
                    f"{path} is a link: nothing is written through it",
                    hint="remove it, or pull to another directory",
                )
            path = path.parent


def show(path: str) -> str:
    """Return a name that somebody else gave, fit for one line of a message."""
    return f"{path!r}" if len(path) <= 120 else f"{path[:100]!r}..."


def has_size(path: Path, file: PulledFile) -> bool:
    """Return whether a file of the roster's size lies at `path`, and no link."""
    return not path.is_symlink() and path.is_file() and path.stat().st_size == file.bytes


def is_whole(path: Path, file: PulledFile) -> bool:
    """Return whether what lies at `path` is the file of the roster."""
    return has_size(path, file) and hash_file(path) == file.sha256


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
