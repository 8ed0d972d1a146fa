"""A file that somebody writes: a batch system's hook, an operator, a test."""

import os

from perdure.adapters.notices.http import Source
from perdure.model.errors import PlatformError
from perdure.model.events import Announced

_BYTES_MAX = 64


class FileNotices(Source):
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

        It is read anew only once it has changed.
        """
        try:
            seen = os.stat(self._path)
            change = (seen.st_mtime_ns, seen.st_ino)
            if self._last is None or self._last[0] != change:
                self._last = change, (self._tell(seen.st_mtime),)
        except FileNotFoundError:
            self._last = None
            return ()
        except OSError as error:
            raise PlatformError(f"{self._path}: {error.strerror}") from None
        return self._last[1]

    def _tell(self, changed_s: float) -> Announced:
        with open(self._path, errors="replace") as file:
            words = file.read(_BYTES_MAX).split()
        id_ = f"{self._path} {changed_s:.3f}"
        try:
            grace_s = float(words[0])
        except (ValueError, IndexError):
            grace_s = -1.0
        reason = " ".join(words[1:]) or self._path
        if not 0 <= grace_s < float("inf"):
            return Announced(id=id_, reason=reason)
        return Announced(id=id_, reason=reason, gone_s=changed_s + grace_s)
