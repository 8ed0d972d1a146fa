"""The peer checkpoint: each member's shard of a recent step, in its node's shared memory.

It outlives the process that wrote it: where the last living copy of a shard is lost, all go back
to the newest step of which every shard is still somewhere. A member has two snapshots, the newest
and the one before, because the newest may not be whole yet. The copying runs beside the next
forward and backward pass, which alter nothing of a shard; before the next step's counts are sent
it has ended, so that counts that have come prove that everyone's snapshot is there.

Where there are several nodes, a neighbour on another one keeps a second copy, sent after that
beside training, so that the loss of a node costs no more than that of a process.

A snapshot is a file of raw tensors, and a header that is renamed into place when they are written
and hashed, and removed before they are overwritten: a header that is there is true.
"""

import contextlib
import math
import mmap
import os
import threading
import time
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import torch
import xxhash
from torch import Tensor

from perdure.files import replace_file
from perdure.model.errors import PlatformError, ProtocolError
from perdure.model.paths import job_paths
from perdure.plan.elastic.shards import Snapshot
from perdure.plan.elastic.stage_commit import StageSnapshot
from perdure.worker.elastic.group import Broken
from perdure.worker.elastic.moving.packing import Place, open_state, pack_state
from perdure.worker.elastic.saving.mirror import Mirror

_ALIGN = 64
_LEAVE_S = 5.0
_LOOK_S = 0.05


AnySnapshot = TypeVar("AnySnapshot", Snapshot, StageSnapshot)


class _Header(msgspec.Struct, Generic[AnySnapshot], frozen=True):
    snapshot: AnySnapshot
    skeleton: bytes
    size: int
    digest: str


class Peers(Generic[AnySnapshot]):
    """One member's snapshots, and what it can read of the others' on its node."""

    def __init__(self, folder: Path | None, me: int, kind: type[AnySnapshot]) -> None:
        """Keep snapshots of a `kind` in `folder`, in memory; without a folder, keep none."""
        self._folder, self._me = folder, me
        self._kind: Any = _Header[kind]  # type: ignore[valid-type]
        self._maps: dict[str, tuple[int, Any]] = {}
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()
        self._copied.set()
        self._mirror: Mirror | None = None
        self.stall_s = 0.0
        """Seconds that training has waited so far."""
        self.copied_s = 0.0
        """Seconds that copying and hashing has taken so far, beside training."""
        self.newest_s = 0.0
        """Seconds until the last one was wherever it is kept."""
        self.error = ""
        """Why the last snapshot came to nothing."""
        if folder is not None:
            _make_private(folder)

    # --- writing ------------------------------------------------------------------------------

    def begin(self, snapshot: AnySnapshot, content: Any) -> None:
        """Begin to copy `content`, which may not change before `wait` has returned."""
        if self._folder is None:
            return
        began = time.monotonic()
        self.finish()
        skeleton, tensors = pack_state(content)
        header = _Header(snapshot, skeleton, sum(_round_up(t.nbytes) for t in tensors), "")
        self._copied.clear()
        self._thread = threading.Thread(
            target=self._write, args=(header, tensors), name="perdure-peers", daemon=True
        )
        self._thread.start()
        self.stall_s += time.monotonic() - began

    def wait(self) -> None:
        """Wait until what was begun is copied; a neighbour may not have it yet."""
        if not self._copied.is_set():
            began = time.monotonic()
            self._copied.wait()
            self.stall_s += time.monotonic() - began

    @property
    def busy(self) -> bool:
        """Return whether what was begun is not yet wherever it is kept."""
        return self._thread is not None and self._thread.is_alive()

    def finish(self) -> None:
        """Wait until what was begun is copied, and a neighbour has it, or has been lost."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def enter(self, mirror: Mirror | None) -> None:
        """A world is formed: send snapshots over `mirror` from now on."""
        self._mirror = mirror

    def abandon(self) -> None:
        """End what is still being sent although its connections are shut; by any thread."""
        mirror = self._mirror
        if mirror is not None:
            mirror.group.abandon()

    def leave(self) -> None:
        """The world is left: nothing is sent any more."""
        mirror, self._mirror = self._mirror, None
        if mirror is not None:
            deadline = time.monotonic() + _LEAVE_S
            while self._thread is not None and self._thread.is_alive():
                mirror.group.abandon()
                self._thread.join(_LOOK_S)
                if time.monotonic() > deadline:
                    break
            mirror.group.give_up()

    def forget(self, step: int) -> None:
        """Drop snapshots of later steps: they are of a past that was undone."""
        self.wait()
        for name, header in self._headers():
            if header.snapshot.step > step:
                self._remove(name + ".head")

    def sweep(self, members: tuple[int, ...], step: int) -> None:
        """Drop snapshots of who is no member any more; of `step` all members have one."""
        for name, header in self._headers():
            if header.snapshot.owner not in members and header.snapshot.step < step:
                self._remove(name + ".head")
                self._remove(name)

    def close(self) -> None:
        """Drop this member's snapshots, and those that it keeps: training has ended well."""
        if self._folder is None:
            return
        owners = (self._me, *(self._mirror.owners if self._mirror is not None else ()))
        self.finish()
        for owner in owners:
            for slot in "ab":
                self._remove(f"m{owner}-{slot}.head")
                self._remove(f"m{owner}-{slot}")

    def _write(self, header: _Header[AnySnapshot], tensors: list[Tensor]) -> None:
        mirror, data = self._mirror, torch.empty(0, dtype=torch.uint8)
        began = time.monotonic()
        try:
            slot, data = self._make_room(self._me, header.size)
            place = _make_places(data)
            for tensor in tensors:
                place(list(tensor.shape), tensor.dtype).copy_(tensor)
            header = msgspec.structs.replace(header, digest=_hash(data))
            self._publish(slot, header)
            self.error = ""
        except OSError as error:
            self.error = f"no snapshot of step {header.snapshot.step}: {error}"
        finally:
            self.copied_s += time.monotonic() - began
            self._copied.set()
        if mirror is not None:
            with contextlib.suppress(Broken, OSError):  # Then the neighbour has the one before.
                self._exchange(mirror, header, data)
        self.newest_s = time.monotonic() - began

    def _exchange(self, mirror: Mirror, mine: _Header[AnySnapshot], data: Tensor) -> None:
        """Send this member's snapshot to who keeps it, and take those that this one keeps.

        Raises:
            Broken: a member was lost, or the world is left.
        """
        got = mirror.swap_headers(msgspec.msgpack.encode(mine) if not self.error else b"")
        headers = {m: msgspec.msgpack.decode(h, type=self._kind) for m, h in got.items() if h}
        rooms: dict[int, tuple[str, Tensor]] = {}
        for owner, header in headers.items():
            with contextlib.suppress(OSError):
                rooms[owner] = self._make_room(owner, header.size)
        sizes = {owner: header.size for owner, header in headers.items()}
        mirror.swap_data(
            data if not self.error else data[:0], sizes, {m: d for m, (_, d) in rooms.items()}
        )
        for owner, (slot, memory) in rooms.items():
            if _hash(memory) == headers[owner].digest:
                self._publish(slot, headers[owner])

    def _make_room(self, owner: int, size: int) -> tuple[str, Tensor]:
        """Return the name and the memory of the slot that `owner`'s next snapshot goes to.

        Raises:
            OSError: there is no room.
        """
        slot = self._choose_slot(owner)
        self._remove(slot + ".head")
        try:
            return slot, self._open(slot, size)
        except OSError:
            self._remove(slot)
            raise

    def _publish(self, slot: str, header: _Header[AnySnapshot]) -> None:
        assert self._folder is not None
        replace_file(self._folder / (slot + ".head"), msgspec.msgpack.encode(header))

    def _choose_slot(self, owner: int) -> str:
        """Return the slot that has not the newest of `owner`'s snapshots."""
        names = [f"m{owner}-{slot}" for slot in "ab"]
        steps = {n: h.snapshot.step for n, h in self._headers() if n in names}
        return min(names, key=lambda name: steps.get(name, -1))

    def _open(self, slot: str, size: int) -> Tensor:
        """Return the slot's memory, which stays mapped; it is all there before it is written.

        Raises:
            OSError: there is no room. Writing would be a SIGBUS.
        """
        assert self._folder is not None
        known = self._maps.get(slot)
        if known is None or known[0] != size:
            path = self._folder / slot
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, max(size, 1))
                known = (size, mmap.mmap(descriptor, max(size, 1)))
            finally:
                os.close(descriptor)
            self._maps[slot] = known
        return torch.frombuffer(known[1], dtype=torch.uint8)[:size]

    # --- reading ------------------------------------------------------------------------------

    def list_all(self) -> tuple[AnySnapshot, ...]:
        """Return what there is on this node."""
        self.wait()
        return tuple(sorted(header.snapshot for _, header in self._headers()))

    def read(self, wanted: AnySnapshot) -> Any:
        """Return what a snapshot is of; its tensors are where they lie.

        Raises:
            ProtocolError: it is gone or damaged. It is not found again.
        """
        assert self._folder is not None
        for name, header in self._headers():
            if header.snapshot == wanted:
                with open(self._folder / name, "rb") as file:
                    size = max(header.size, 1)
                    memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
                data = torch.frombuffer(memory, dtype=torch.uint8)[: header.size]
                if _hash(data) != header.digest:
                    self._remove(name + ".head")
                    break
                return open_state(header.skeleton, _make_places(data))[0]
        raise ProtocolError(f"the snapshot of step {wanted.step} by rank {wanted.owner} is damaged")

    def _headers(self) -> list[tuple[str, _Header[AnySnapshot]]]:
        found = []
        for path in sorted(self._folder.glob("m*.head")) if self._folder is not None else ():
            with contextlib.suppress(OSError, msgspec.DecodeError):
                header = msgspec.msgpack.decode(path.read_bytes(), type=self._kind)
                found.append((path.stem, header))
        return found

    def _remove(self, name: str) -> None:
        assert self._folder is not None
        if not name.endswith(".head"):
            self._maps.pop(name, None)
        (self._folder / name).unlink(missing_ok=True)


def find_memory() -> Path | None:
    """Return where this node's ranks keep snapshots; None outside a job."""
    home, job = os.environ.get("PERDURE_HOME", ""), os.environ.get("PERDURE_JOB", "")
    if not home or not job or not os.path.isdir("/dev/shm"):
        return None
    return Path(job_paths(home, job, os.getuid()).memory, "n" + os.environ.get("PERDURE_NODE", "0"))


def _make_private(folder: Path) -> None:
    """Make `folder`, which nobody else may read.

    Raises:
        PlatformError: it, or one that it is in, is somebody else's.
    """
    try:
        for one in (folder.parent.parent, folder.parent, folder):
            one.mkdir(mode=0o700, exist_ok=True)
            if one.stat().st_uid not in (os.getuid(), 0):
                raise PlatformError(f"{one} belongs to somebody else")
    except OSError as error:
        raise PlatformError(f"no place for snapshots in memory: {error}") from error


def _make_places(memory: Tensor) -> Place:
    """Return what gives a place in `memory` to one tensor after another."""
    at = 0

    def place(shape: list[int], dtype: torch.dtype) -> Tensor:
        nonlocal at
        size = math.prod(shape) * dtype.itemsize
        part = memory[at : at + size]
        at += _round_up(size)
        return part.view(dtype).view(shape)

    return place


def _round_up(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _hash(memory: Tensor) -> str:
    data: Any = memory.numpy()
    return xxhash.xxh3_128(data).hexdigest()
