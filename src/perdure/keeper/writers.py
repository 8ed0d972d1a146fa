"""Which file of a checkpoint a rank is writing, by what the kernel says of its open files.

If a rank is killed during a save, its file cannot be loaded. A file counts if its name is
that of a checkpoint, if it is open for writing but not for appending, and if it grows. Logs,
TensorBoard's events, and perdure's own checkpoints do not count: none of them is harmed.

Nothing here waits for a disk: positions are the kernel's, and times of files are asked for without
a word to their server.
"""

import contextlib
import ctypes
import os
import re
import time

from perdure.adapters.host import read_text
from perdure.files.own import CHECKPOINT

QUIET_S = 5.0
"""Seconds without a change after which a file counts as written."""
_NAMES = re.compile(
    r"checkpoint|ckpt|global_step|\.(pt|pth|bin|safetensors|distcp|pkl|pickle|np[yz]|h5|hdf5|tar|zip"
    r"|msgpack|gguf|params|states|weights|nemo|metadata)(\.|$)"
)
_LOGS = re.compile(r"tfevents|wandb|mlruns|\.(log|txt|out|err|csv|tsv|jsonl?|ya?ml|db|sqlite3?)$")
_OWN = re.compile(r"/step-\d+\.[^/]*\.tmp(/|$)")
"""perdure's own checkpoints, before they are whole."""
_LATER_S = 0.2
"""Seconds for files of a folder that come after the last one that counts, such as JSON."""
_AT_FDCWD, _DONT_SYNC, _MTIME = -100, 0x4000, 0x40
_MTIME_AT = 112
_libc = ctypes.CDLL(None)


def list_written(pid: int) -> dict[str, int]:
    """Return the files of checkpoints that `pid` has open for writing -> where it writes."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError, ValueError):
                path = os.readlink(f"/proc/{pid}/fd/{fd}")
                if not is_checkpoint(path):
                    continue
                info = dict(
                    line.split(":", 1)
                    for line in read_text(f"/proc/{pid}/fdinfo/{fd}").splitlines()[:2]
                )
                flags = int(info["flags"], 8)
                if flags & os.O_ACCMODE == os.O_RDONLY or flags & os.O_APPEND:
                    continue
                if _age_s(f"/proc/{pid}/fd/{fd}") < QUIET_S:
                    found[path] = int(info["pos"])
    return found


class Save:
    """The save that a rank was seen in.

    A rank may save again at once, and is never quiet then. Its next save shows which file is the
    last one: after that file, the rank is done.
    """

    def __init__(self) -> None:
        """Know of no file yet."""
        self._files: dict[str, tuple[str, int]] = {}
        """Kind -> path and position, of this save."""
        self._newest = self._last = self._folder = ""
        self._closed_s = -1.0

    def take(self, files: dict[str, int], now: float) -> bool:
        """Take what `list_written` says; return whether the rank has finished a save."""
        kinds = set()
        for path, at in files.items():
            folder, kind = _split(path)
            known = self._files.get(kind)
            again = known is not None and (known[0] != path or at < known[1])
            if again or (folder and self._folder not in ("", folder)):  # The next save.
                if folder and self._last in self._files:
                    return True  # The folder before has all its files.
                self._last, self._closed_s = self._newest, -1.0
                self._files.clear()
            self._files[kind] = path, at
            self._newest, self._folder = kind, folder or self._folder
            kinds.add(kind)
        if self._last not in self._files or self._last in kinds:
            return False
        self._closed_s = now if self._closed_s < 0 else self._closed_s
        return now >= self._closed_s + (_LATER_S if self._folder else 0.0)


def _split(path: str) -> tuple[str, str]:
    """Return the folder of a save, if it has one, and a file's name without the save's number.

    >>> _split("/run/checkpoint-20/model-00001-of-00002.safetensors")
    ('/run/checkpoint-20', 'model-00001-of-00002.safetensors')
    >>> _split("/run/ckpt-20.pt")
    ('', 'ckpt-#.pt')
    """
    parts = path.split("/")
    for at in range(len(parts) - 2, 0, -1):
        if CHECKPOINT.fullmatch(parts[at]):
            return "/".join(parts[: at + 1]), "/".join(parts[at + 1 :])
    name = parts[-1]
    return "", name if "-of-" in name else re.sub(r"\d+", "#", name)


def is_checkpoint(path: str) -> bool:
    """Return whether a path is that of a script's checkpoint, by its name alone."""
    text = path.lower()
    if not text.startswith("/") or text.startswith(("/dev/", "/proc/")) or _OWN.search(text):
        return False
    if text.endswith(".json") and _split(text)[0]:
        return True  # Such as trainer_state.json, which comes last.
    return bool(_NAMES.search(text)) and not _LOGS.search(text)


def _age_s(path: str) -> float:
    """Return how long ago a file was changed, as far as this machine knows; 0 if it does not."""
    found = ctypes.create_string_buffer(256)
    try:
        failed = _libc.statx(_AT_FDCWD, path.encode(), _DONT_SYNC, _MTIME, found)
    except AttributeError:  # musl
        return 0.0
    changed_s = int.from_bytes(found.raw[_MTIME_AT : _MTIME_AT + 8], "little", signed=True)
    return 0.0 if failed else time.time() - changed_s
