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

QUIET_S = 5.0
"""Seconds without a change after which a file counts as written."""
_NAMES = re.compile(
    r"checkpoint|ckpt|global_step|\.(pt|pth|bin|safetensors|distcp|pkl|pickle|np[yz]|h5|hdf5|tar|zip"
    r"|msgpack|gguf|params|states|weights|nemo|metadata)(\.|$)"
)
_LOGS = re.compile(r"tfevents|wandb|mlruns|\.(log|txt|out|err|csv|tsv|jsonl?|ya?ml|db|sqlite3?)$")
_OWN = re.compile(r"/step-\d+\.[^/]*\.tmp(/|$)")
"""perdure's own checkpoints, before they are whole."""
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


def is_checkpoint(path: str) -> bool:
    """Return whether a path is that of a script's checkpoint, by its name alone."""
    text = path.lower()
    if not text.startswith("/") or text.startswith(("/dev/", "/proc/")) or _OWN.search(text):
        return False
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
