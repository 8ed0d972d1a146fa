"""Files to and from a box by rsync, over a connection of their own; broken ones go on.

`--partial-dir` and never `--partial`: what a broken transfer leaves must not lie under its final
name, where a cut-off checkpoint looks whole. A transfer that stands still is ended and begun
again, from what has arrived; it is given up only when attempts bring nothing more.
"""

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from perdure.failpoints import failpoint
from perdure.launch.channel import Channel
from perdure.launch.exchange import read_lines
from perdure.model.errors import PlatformError

PARTIAL = ".rsync-partial"
STALL_S = 30
"""Without a byte for so long, a transfer is ended and tried again."""
FRUITLESS_MAX = 5
"""Attempts in a row that brought nothing."""
_AGAIN = {10, 12, 20, 24, 30, 35, 255}
"""rsync's codes of broken connections, stalls and files that vanished meanwhile."""
_CHANGED = re.compile(r"failed verification|link_stat .* failed|has vanished")
"""What rsync says of a file that is another while it is read."""
_CHANGED_MAX = 2
"""The most times that a transfer in which files change is tried."""
_TEMPORARY = re.compile(r"^\.(.+)\.[A-Za-z0-9]{6}$")
_PROGRESS = re.compile(r"([\d,]+)\s+(\d+)%")
_TELL_S = 5.0
_HINTS = {
    11: "make room there",
    23: "what has arrived is kept: the same command goes on from there",
}
_INSTALL = "apt-get install rsync"


def push(
    channel: Channel,
    source: Path,
    target: str,
    *,
    exclude: Sequence[str] = (),
    tell: Callable[[str], None],
    shared: bool = False,
) -> None:
    """Make the absolute folder `target` on the box hold what `source` holds; delete nothing there.

    What is small may take the `shared` connection.

    Raises:
        PlatformError: it cannot be done, or attempts bring nothing more.
    """
    options = [f"--exclude={pattern}" for pattern in (*exclude, PARTIAL)]
    places = (f"{source}/", channel.locate(target))
    _repeat(channel, [*options, *places], f"{source} to {channel.name}", tell, shared=shared)


def pull(
    channel: Channel,
    source: str,
    target: Path,
    names: Sequence[str],
    *,
    tell: Callable[[str], None],
) -> None:
    """Bring the files `names` (relative) of the absolute folder `source` into `target`.

    One that is not there any more, or changes for as long as it is read, does not come: the caller
    compares what has arrived.

    Raises:
        PlatformError: it cannot be done, or attempts bring nothing more.
    """
    target.mkdir(parents=True, exist_ok=True)
    listed = "\0".join(f"./{name}" for name in names).encode()  # `#` begins a comment there.
    # A link, a pipe or a device that has taken a file's place there meanwhile does not come here.
    options = [
        "--ignore-missing-args",
        "--no-links",
        "--no-D",
        "--from0",
        "--files-from=-",
        channel.locate(source),
        f"{target}/",
    ]

    def prepare() -> None:
        salvage(target, set(names))

    _repeat(channel, options, f"{source} from {channel.name}", tell, listed, prepare)


def list_files(project: Path, exclude: Sequence[str]) -> list[str]:
    """Return what rsync would send, sorted: names of files and links, relative.

    Raises:
        PlatformError: there is no rsync, whose patterns `exclude` are, or it cannot read all.
    """
    excludes = [f"--exclude={pattern}" for pattern in exclude]
    command = ["rsync", "-a", "-n", "-s", "-8", "--out-format=%n", *excludes]
    with tempfile.TemporaryDirectory(prefix="perdure-") as empty:
        try:
            done = subprocess.run([*command, f"{project}/", f"{empty}/"], capture_output=True)
        except FileNotFoundError:
            raise PlatformError("rsync is not installed here", hint=_INSTALL) from None
    if done.returncode:
        raise PlatformError(
            f"cannot read {project}: {done.stderr.decode(errors='replace').strip()}"
        )
    names = os.fsdecode(done.stdout).splitlines()
    return sorted(name.partition(" -> ")[0] for name in names if not name.endswith("/"))


def locate_final(path: Path) -> Path:
    """Return the file that a transfer makes of what lies at `path`: itself, or a part of it."""
    if path.parent.name == PARTIAL:
        return path.parent.parent / path.name
    match = _TEMPORARY.match(path.name)
    return path.parent / match[1] if match else path


def salvage(target: Path, names: set[str]) -> None:
    """Have the next attempt begin with what a killed rsync left under a temporary name."""
    for path in target.rglob(".*"):
        final = locate_final(path)
        if final == path or not path.is_file() or path.parent.name == PARTIAL:
            continue
        if str(final.relative_to(target)) in names:
            kept = path.parent / PARTIAL / final.name
            kept.parent.mkdir(exist_ok=True)
            if not kept.exists() or kept.stat().st_size < path.stat().st_size:
                path.replace(kept)
            else:
                path.unlink()


def _repeat(
    channel: Channel,
    options: Sequence[str],
    what: str,
    tell: Callable[[str], None],
    stdin: bytes = b"",
    prepare: Callable[[], None] | None = None,
    *,
    shared: bool = False,
) -> None:
    command = [
        *("rsync", "-a", "-s", f"--partial-dir={PARTIAL}", f"--timeout={STALL_S}"),
        *("--info=progress2", "--no-human-readable", "--outbuf=L"),
        *channel.carry_rsync(shared=shared),
    ]
    fruitless = changed = 0
    while True:
        if prepare is not None:
            prepare()
        began = time.monotonic()
        failpoint("box/transfer")
        code, moved, last = _transfer([*command, *options], stdin, what, tell)
        changing = code == 23 and _CHANGED.search(last) is not None
        changed += changing
        if code == 0 or changed == _CHANGED_MAX:
            return
        if code not in _AGAIN and not changing:
            raise PlatformError(
                f"{what}: rsync ended with {code}: {last}",
                hint=_HINTS.get(code, "rsync has to be on both machines"),
            )
        fruitless = 0 if moved else fruitless + 1
        if fruitless == FRUITLESS_MAX:
            raise PlatformError(
                f"{what}: nothing more arrives: {last}",
                hint="what has arrived is kept: the same command goes on from there",
            )
        tell(f"{what}: broke after {time.monotonic() - began:.0f} s ({last}); going on")
        time.sleep(min(2.0**fruitless / 2, 10.0))


def _transfer(
    command: Sequence[str], stdin: bytes, what: str, tell: Callable[[str], None]
) -> tuple[int, int, str]:
    """Run rsync once; return its exit code, the bytes that moved and its last words."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except FileNotFoundError:
        raise PlatformError("rsync is not installed here", hint=_INSTALL) from None
    assert process.stdin is not None
    assert process.stdout is not None
    moved, last, told = 0, "", time.monotonic()
    try:
        try:
            process.stdin.write(stdin.decode())
            process.stdin.close()
        except BrokenPipeError:
            pass  # It ended before it had read the list; its exit code says why.
        for line in read_lines(process.stdout):
            progress = _PROGRESS.search(line)
            if progress is None:
                if line.strip() and not (last and line.startswith("rsync")):
                    last = line.strip()  # Of ssh, or the box: rsync's own come after it.
                continue
            moved = int(progress[1].replace(",", ""))
            if time.monotonic() - told > _TELL_S:
                told = time.monotonic()
                tell(f"{what}: {moved / 1e6:.1f} MB, {progress[2]}%")
    finally:
        if process.poll() is None:
            process.terminate()
        code = process.wait()
        process.stdout.close()
    return code, moved, last or f"rsync ended with {code}"
