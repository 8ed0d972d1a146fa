"""Files out of a pod, with nothing there but Python: what has arrived stays, and is not sent again.

`kubectl cp` needs tar in the image, begins anew when it breaks, and says nothing of a file that was
cut off. Here every byte that arrives is kept under a name that is not the file's own; the file gets
it once its SHA-256 is that of the roster.
"""

import contextlib
import json
import os
import select
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from perdure.launch.kubernetes.client import PodChannel
from perdure.launch.roster import check_names, check_target, is_whole
from perdure.launch.transfer import FRUITLESS_MAX, PARTIAL, STALL_S
from perdure.model.errors import PlatformError
from perdure.model.platforms.launching import PulledFile

_SENDER = """\
import json, sys
for path, begin, end in json.load(sys.stdin):
    try:
        with open(path, "rb") as file:
            file.seek(begin)
            while begin < end:
                chunk = file.read(min(1 << 20, end - begin))
                if not chunk:
                    sys.exit("changed: " + json.dumps(path) + ": it has become shorter")
                sys.stdout.buffer.write(chunk)
                begin += len(chunk)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        sys.exit("changed: " + json.dumps(path) + ": it is no file any more")
sys.stdout.buffer.flush()
"""
_CHANGED = "changed: "
"""Begins the last words of a sender whose file is not as it is asked for, and never will be."""
_SHORTER = "it has become shorter"
_LAST_WORDS_S = 5.0
_CHUNK = 1 << 20


def fetch(
    channel: PodChannel,
    source: str,
    target: Path,
    files: Sequence[PulledFile],
    *,
    tell: Callable[[str], None],
) -> None:
    """Bring `files`, named relative to the absolute folder `source` in the pod, into `target`.

    One that is another than the roster says comes as it is now, or not at all where it is gone.

    Raises:
        PlatformError: attempts bring nothing more.
        SafetyError: a file would lie elsewhere.
    """
    check_names((file.path for file in files), channel.name)
    check_target(target, (file.path for file in files))
    missing = [file for file in files if not is_whole(target / file.path, file)]
    changed: Counter[str] = Counter()
    fruitless = 0
    while missing:
        counted = changed.total()
        moved, last = _receive(channel, source, target, missing, changed)
        missing = [
            file
            for file in missing
            if changed[file.path] < 2 and not is_whole(target / file.path, file)
        ]
        if not missing:
            break
        fruitless = 0 if moved or changed.total() > counted else fruitless + 1
        if fruitless == FRUITLESS_MAX:
            raise PlatformError(
                f"{source} from {channel.name}: nothing more arrives: {last}",
                hint="what has arrived is kept: the same command goes on from there",
            )
        if changed.total() > counted:
            continue
        tell(f"{source} from {channel.name}: broke ({last}); going on")
        time.sleep(min(2.0**fruitless / 2, 10.0))


def _receive(
    channel: PodChannel,
    source: str,
    target: Path,
    files: Sequence[PulledFile],
    changed: Counter[str],
) -> tuple[int, str]:
    """Receive once; return the bytes that have arrived, and the last words.

    `changed` counts how often a file was another than the roster says, to the end: the first time
    its beginning may be an older one's.
    """
    parts = [_prepare_part(target / file.path, file) for file in files]
    wanted = [
        (f"{source}/{file.path}", part.stat().st_size if part.exists() else 0, file.bytes)
        for file, part in zip(files, parts, strict=True)
    ]
    process = subprocess.Popen(
        channel.enter(channel.python, "-c", _SENDER),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    moved, lacking = 0, False
    try:
        try:
            process.stdin.write(json.dumps(wanted).encode())
            process.stdin.close()
        except BrokenPipeError:
            pass  # It ended before it had read the list, and says why.
        process.stdin = None
        for file, part, (_, begin, end) in zip(files, parts, wanted, strict=True):
            arrived = _receive_file(process.stdout.fileno(), part, end - begin)
            moved += arrived
            if arrived < end - begin:
                lacking = True
                break
            whole = is_whole(part, file)
            changed[file.path] += not whole
            _keep(part, target / file.path, whole or changed[file.path] > 1)
        if lacking:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LAST_WORDS_S)
    finally:
        process.kill()
        _, err = process.communicate()
    lines = err.decode(errors="replace").strip().splitlines()
    why = next((line for line in lines if line.startswith(_CHANGED)), "")
    for file, part, (path, *_) in zip(files, parts, wanted, strict=True):
        if why.startswith(f"{_CHANGED}{json.dumps(path)}: "):  # It need not be the one that lacks.
            changed[file.path] += 1 if why.endswith(_SHORTER) else 2
            _keep(part, target / file.path, why.endswith(_SHORTER) and changed[file.path] > 1)
    last = lines[-1] if lines else f"nothing for {STALL_S} s, or the connection ended"
    return moved, why or last


def _keep(part: Path, path: Path, wanted: bool) -> None:
    """Give what has arrived its name, or begin anew with it."""
    if wanted and part.exists():
        os.replace(part, path)
    else:
        part.unlink(missing_ok=True)


def _prepare_part(path: Path, file: PulledFile) -> Path:
    """Return where a file lies until it is whole; one that is too long is none of it."""
    part = path.parent / PARTIAL / path.name
    part.parent.mkdir(parents=True, exist_ok=True)
    if part.exists() and part.stat().st_size > file.bytes:
        part.unlink()
    return part


def _receive_file(stream: int, part: Path, expected: int) -> int:
    """Append up to `expected` bytes to `part`; return how many came before a stall or the end."""
    arrived = 0
    with open(part, "ab") as out:
        while arrived < expected:
            if not select.select([stream], [], [], STALL_S)[0]:
                return arrived
            chunk = os.read(stream, min(_CHUNK, expected - arrived))
            if not chunk:
                return arrived
            out.write(chunk)
            arrived += len(chunk)
    return arrived
