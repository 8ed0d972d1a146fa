"""A file that somebody writes: a batch system's hook, an operator, a test."""

import os

from perdure.model.errors import PlatformError
from perdure.model.events import Announced

_BYTES_MAX = 64


def _read_begin(path: str) -> str:
    with open(path, errors="replace") as file:
        return file.read(_BYTES_MAX)


class FileNotices:
    """A notice as long as the file is there; its first word is the grace, from its last change."""

    name = "file"
    pause_s = 0.2

    def __init__(self, path: str) -> None:
        """Watch `path`."""
        self._path = path
        self._last: tuple[tuple[int, int], tuple[Announced, ...]] | None = None

    async def read(self) -> tuple[Announced, ...]:
        """Return what the file says.

        An empty file, or one that does not begin with seconds, is a notice of the configured
        grace: whoever has written it meant something.

        Raises:
            PlatformError: it cannot be looked at.
        """
        try:
            seen = os.stat(self._path)
            change = (seen.st_mtime_ns, seen.st_ino)
            if self._last is None or self._last[0] != change:
                self._last = change, (self._tell(_read_begin(self._path), seen.st_mtime),)
        except FileNotFoundError:
            self._last = None
            return ()
        except OSError as error:
            raise PlatformError(f"{self._path}: {error.strerror}") from None
        return self._last[1]

    async def acknowledge(self, id_: str) -> None:
        """Do nothing: nobody asks."""

    def _tell(self, text: str, changed_s: float) -> Announced:
        words, id_ = text.split(), f"{self._path} {changed_s:.3f}"
        try:
            grace_s = float(words[0])
        except (ValueError, IndexError):
            grace_s = -1.0
        reason = " ".join(words[1:]) or self._path
        if not 0 <= grace_s < float("inf"):
            return Announced(id=id_, reason=reason)
        return Announced(id=id_, reason=reason, gone_s=changed_s + grace_s)
