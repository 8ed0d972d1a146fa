"""Snapshots of a controller's memory, so that its successor replays thousands of entries, not all.

They are files of the job's directory, not messages: a snapshot is worth nothing without its
journal and can always be made again from it, so it need not be synced. Each says of itself which
entry it stands at, what the journal's group there was, which code wrote it, and the hash of its own
bytes. One that does not fit in every one of these is passed over, with a line that says why, for an
older one, and in the end for the journal from its first entry on.

The journal itself is never cut: it is what `report`, `events` and `diagnose` are made from.
"""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import xxhash

import perdure
from perdure.control.memory import Memory, decode_memory, encode_memory
from perdure.failpoints import failpoint
from perdure.files.regular import read_file
from perdure.model.errors import PlatformError, ProtocolError
from perdure.model.job import JobSpec
from perdure.model.records import decode_record, encode_record
from perdure.service.controller.journal import Position
from perdure.service.jobfiles import write_atomic

log = logging.getLogger("perdure.controller")

EVERY = 10_000
"""Entries between two snapshots."""
KEPT = 2
_FOLDERS = ("model", "control", "telemetry", "policy", "plan")
"""What decides how an entry changes a memory."""


class _Header(msgspec.Struct, frozen=True):
    """The first line of a snapshot's file; its body is the second."""

    seq: int
    position: Position
    code: str
    digest: str
    """xxh3_128 of the body."""


def compute_code_digest() -> str:
    """Return what tells this code from any other that might fold a journal differently."""
    root = Path(perdure.__file__).parent
    digest = xxhash.xxh3_128(perdure.__version__.encode())
    for folder in _FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


class SnapshotFiles:
    """The snapshots of one job, in its directory."""

    def __init__(self, folder: str) -> None:
        """Use `folder`; it is made with the first snapshot."""
        self._folder = folder
        self._code = compute_code_digest()

    def render(self, memory: Memory, position: Position) -> tuple[int, bytes]:
        """Return the number and the file of a snapshot of `memory`, which stands at `position`."""
        body = encode_memory(memory)
        header = _Header(memory.seq, position, self._code, xxhash.xxh3_128_hexdigest(body))
        return memory.seq, encode_record(header) + b"\n" + body

    def write(self, seq: int, data: bytes) -> None:
        """Write a rendered snapshot, and drop the oldest of more than `KEPT`."""
        try:
            write_atomic(os.path.join(self._folder, f"{seq:012d}.json"), data)
            failpoint("snapshot/written")
            for path in self._list()[KEPT:]:
                path.unlink(missing_ok=True)
        except (PlatformError, OSError) as error:
            log.warning("snapshot: %s", error)

    def read(self, spec: JobSpec) -> Iterator[tuple[Memory, Position]]:
        """Yield what can be used, newest first; say of the others why not."""
        for path in self._list():
            try:
                yield self._read(path, spec)
            except (OSError, ProtocolError) as error:
                log.warning("snapshot %s is not used: %s", path.name, error)

    def _list(self) -> list[Path]:
        return sorted(Path(self._folder).glob("[0-9]*.json"), reverse=True)

    def _read(self, path: Path, spec: JobSpec) -> tuple[Memory, Position]:
        first, _, body = read_file(path).partition(b"\n")
        header: _Header = decode_record(first, _Header)
        if header.code != self._code:
            raise ProtocolError("other code of perdure wrote it")
        if xxhash.xxh3_128_hexdigest(body) != header.digest:
            raise ProtocolError("its content does not have the hash that it had")
        return decode_memory(body, spec), header.position
