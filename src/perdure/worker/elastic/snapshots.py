"""The peer checkpoint: each member's shard of a recent step, in its node's shared memory.

It outlives the process that wrote it: where the last living copy of a shard is lost, all go back
to the newest step of which every shard is still somewhere. A member has two snapshots, the newest
and the one before, because the newest may not be whole yet. The copying runs beside the next
forward and backward pass, which alter nothing of a shard; before the next step's counts are sent
it has ended, so that counts that have come prove that everyone's snapshot is there.

Where there are several nodes, a neighbour on another one keeps a second copy, sent after that
beside training over connections of its own (`Mirror`), so that the loss of a node costs no more
than that of a process. A world that breaks ends it: the snapshot before is still there. If these
connections break alone, the world takes no more second copies, which each member says once.

A snapshot is a file of raw tensors, and a header that is renamed into place when they are written
and hashed, and removed before they are overwritten: a header that is there is true. The first
headers come once a gate has compared the copy with the state (`checkpoint.copying`). Later ones
come at once, since a member may die before the gate. If the gate finds a difference, the header is
removed.

All members take a snapshot at the same step (`Snapshots`): every so many, and sooner where it
costs no member anything, which each says with the counts of the step. A state that everyone has
whole needs none.
"""

import contextlib
import functools
import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import torch
from torch import Tensor

from perdure.files import replace_file
from perdure.files.private import locate_job, make_private
from perdure.model.errors import PlatformError
from perdure.plan.elastic.commit import NO_LINE
from perdure.plan.elastic.shards import Snapshot, plan_mirrors
from perdure.plan.elastic.stage_commit import StageSnapshot
from perdure.worker.checkpoint.copying import COMPARED_WHOLE, Copier, Copy
from perdure.worker.checkpoint.device_copies import DeviceCopies
from perdure.worker.elastic.group import Broken, Group
from perdure.worker.elastic.mapped import MappedFile
from perdure.worker.elastic.moving import (
    hash_tensors,
    lay_out,
    make_places,
    measure_blob,
    name_tensors,
    open_state,
    pack_state,
)
from perdure.worker.system.stderr import say

_SOON_S, _SHARE = 1.0, 0.02
"""Steps that take long have a snapshot each, as far as that takes this share of the time."""
_VETO = -1e9
"""More than there are members."""
_CHUNK_BYTES = 16 << 20


class Mirror:
    """One member's part: `keeper` keeps its snapshots, and it keeps those of `owners`."""

    def __init__(self, group: Group, mirrors: Mapping[int, int]) -> None:
        """Use `group` for what `mirrors` says, member -> keeper, and for nothing else."""
        self.group = group
        self._keeper = mirrors[group.me]
        self.owners = tuple(sorted(m for m, keeper in mirrors.items() if keeper == group.me))
        self.error = self.room = ""
        """Why it has ended; why it could not keep an owner's last snapshot."""

    def swap_headers(self, mine: bytes) -> dict[int, bytes]:
        """Send `mine` to the keeper; return the owners' headers.

        Raises:
            Broken: a member was lost, or the world is left.
        """
        lengths = {owner: torch.zeros(1, dtype=torch.int64) for owner in self.owners}
        self.swap(torch.tensor([len(mine)]), lengths)
        found = {o: torch.empty(int(n), dtype=torch.uint8) for o, n in lengths.items()}
        nothing = torch.empty(0, dtype=torch.uint8)
        self.swap(torch.frombuffer(bytearray(mine), dtype=torch.uint8) if mine else nothing, found)
        return {owner: header.numpy().tobytes() for owner, header in found.items()}

    def swap(self, mine: Tensor, into: Mapping[int, Tensor]) -> None:
        """Send `mine` to the keeper, and fill `into` with what the owners send, all in chunks.

        Raises:
            Broken: a member was lost, or the world is left.
        """
        for at in range(0, max(one.numel() for one in (mine, *into.values())), _CHUNK_BYTES):
            tag, end = at // _CHUNK_BYTES, at + _CHUNK_BYTES
            if at < mine.numel():
                self.group.send(mine[at:end], self._keeper, tag)
            for owner, place in into.items():
                if at < place.numel():
                    self.group.receive(place[at:end], owner, tag)
            self.group.wait()


_LEAVE_S = 5.0


AnySnapshot = TypeVar("AnySnapshot", Snapshot, StageSnapshot)


class _Header(msgspec.Struct, Generic[AnySnapshot], frozen=True):
    snapshot: AnySnapshot
    skeleton: bytes
    size: int
    digest: str


class Snapshots(Generic[AnySnapshot]):
    """One member's snapshots, and what it can read of the others' on its node."""

    def __init__(
        self,
        folder: Path | None,
        me: int,
        kind: type[AnySnapshot],
        *,
        every: int,
        device: DeviceCopies | None = None,
    ) -> None:
        """Keep snapshots of a `kind` in `folder`, in memory, one every `every` steps (0: never).

        One is taken earlier, after a second at the earliest, where it costs no member anything.
        Without a folder, none is kept. `device` is how a device's tensors are copied.
        """
        self._copier = Copier(device)
        self._copy = Copy(self._copier, {})
        self._folder, self._me = folder or Path(), me
        self._kept = folder is not None and every > 0
        self.every = every
        self.newest = (0, NO_LINE)
        """Step and line of the newest one."""
        self._taken_s = time.monotonic()
        self._kind: Any = _Header[kind]  # type: ignore[valid-type]
        self._maps: dict[str, MappedFile] = {}
        self._thread: threading.Thread | None = None
        self._copied = threading.Event()
        self._copied.set()
        self._mirror: Mirror | None = None
        self.stall_s = 0.0
        """Seconds that training has waited so far."""
        self.newest_s = 0.0
        """Seconds until the last one was wherever it is kept."""
        self.error = self._slot = ""
        """Why the last snapshot came to nothing, and where it is."""
        self._said: set[str] = set()
        """What is missing, and was said."""
        if self._kept:
            self._make_folder()

    def _make_folder(self) -> None:
        """Make the folder, also if somebody has removed it, as systemd-logind does at a logout.

        Raises:
            PlatformError: it cannot be made.
        """
        for one in (*reversed(self._folder.parents[:2]), self._folder):
            make_private(str(one))

    # --- writing ------------------------------------------------------------------------------

    def vote(self) -> float:
        """Wait until the last one is copied; return this member's vote for another one.

        The sum of all votes is positive where nobody is against it.
        """
        self.wait()
        since_s = time.monotonic() - self._taken_s
        busy = self._thread is not None and self._thread.is_alive()
        dear = busy or since_s < max(_SOON_S, self.newest_s / _SHARE)
        return _VETO if dear else 1.0

    def is_due(self, applied: int, votes: float) -> bool:
        """Return whether all take one now that `applied` steps are applied."""
        return bool(self.every) and (votes > 0.0 or applied % self.every == 0)

    def take(self, snapshot: AnySnapshot, content: Any, members: tuple[int, ...]) -> None:
        """Begin to copy `content`, which may not change before `wait` has returned.

        The snapshot before, of the same world, is whole by now.
        """
        step, line = self.newest
        for name, header in self._headers() if line == snapshot.line else ():
            # Of who is no member any more; of `step` all members have one.
            if header.snapshot.owner not in members and header.snapshot.step < step:
                self._remove(name + ".head")
                self._remove(name)
        self.newest = snapshot.step, snapshot.line
        self._taken_s = time.monotonic()
        if not self._kept:
            return
        began = time.monotonic()
        self.finish()
        self._tell()
        self.error = self._slot = ""
        skeleton, tensors = pack_state(content)
        new = _Header(snapshot, skeleton, measure_blob(tensors), "")
        self._copy = Copy(self._copier, name_tensors(tensors))
        self._copied.clear()
        self._thread = threading.Thread(
            target=self._write, args=(new, self._copy, tensors), name="perdure-peers", daemon=True
        )
        self._thread.start()
        self.stall_s += time.monotonic() - began
        if self._copier.torn:
            self.wait()

    def _tell(self) -> None:
        """Say once what was missing of the last snapshot. The world that took it goes on."""
        mirror = self._mirror
        found = {"room": self.error} if self.error else {}
        if mirror is not None and mirror.room:
            found["copy"] = f"no second copy of another node's snapshot: {mirror.room}"
        if mirror is not None and mirror.error:
            found["mirror"] = (
                "no second copies of snapshots on other nodes until the next world: the "
                f"connections for them broke ({mirror.error})"
            )
        for name in found.keys() - self._said:
            say(found[name])
        self._said = set(found)

    def wait(self) -> None:
        """Wait until what was begun is copied and compared; a neighbour may not have it yet.

        If the copy is not what the state is, its header goes away.
        """
        began, copy = time.monotonic(), self._copy
        copy.wait()
        if copy.made.is_set():
            self._copied.wait()
        if copy.problem:
            self.error = f"no snapshot of step {self.newest[0]}: {copy.problem}"
            self._remove(f"{self._slot}.head")
        self.stall_s += time.monotonic() - began

    def finish(self) -> None:
        """Wait until what was begun is copied, and a neighbour has it, or has been lost."""
        self.wait()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def enter(self, group: Group, nodes: Mapping[int, str]) -> None:
        """Connect to who keeps this member's snapshots, where members are on several `nodes`.

        Raises:
            Broken: a member was lost.
        """
        mirrors = plan_mirrors(nodes)
        self._mirror = Mirror(group.open(Group, "mirror"), mirrors) if mirrors else None

    def break_(self) -> None:
        """End what is still being sent; by any thread."""
        mirror = self._mirror
        if mirror is not None:
            mirror.group.break_()

    def leave(self) -> None:
        """The world is left: nothing is sent any more."""
        mirror, self._mirror = self._mirror, None
        if mirror is not None:
            thread = self._thread
            if thread is not None and thread.is_alive():
                mirror.group.break_()
                self.wait()
                thread.join(_LEAVE_S)
            mirror.group.give_up()

    def forget(self, step: int) -> None:
        """Drop snapshots of later steps: they are of a past that was undone."""
        self.wait()
        for name, header in self._headers():
            if header.snapshot.step > step:
                self._remove(name + ".head")

    def close(self) -> None:
        """Drop this member's snapshots, and those that it keeps: training has ended well."""
        if not self._kept:
            return
        owners = (self._me, *(self._mirror.owners if self._mirror is not None else ()))
        self.finish()
        for owner in owners:
            for slot in "ab":
                self._remove(f"m{owner}-{slot}.head")
                self._remove(f"m{owner}-{slot}")

    def _write(self, header: _Header[AnySnapshot], copy: Copy, tensors: Sequence[Tensor]) -> None:
        mirror, data = self._mirror, torch.empty(0, dtype=torch.uint8)
        began = time.monotonic()
        try:
            self._slot, data = self._make_room(self._me, header.size)
            for device in copy.marks:
                self._maps[self._slot].register(device)
            copy.targets = lay_out(data, tensors)
            copy.make()
            header = msgspec.structs.replace(header, digest=hash_tensors([data]))
            if self._copier.num_compared < COMPARED_WHOLE:
                made = time.monotonic()
                copy.confirm()
                began += time.monotonic() - made
            replace_file(self._folder / f"{self._slot}.head", msgspec.msgpack.encode(header))
        except (OSError, PlatformError) as error:
            copy.drop(str(error))
            data = data[:0]
        finally:
            copy.made.set()
            self._copied.set()
        if mirror is not None:
            try:
                self._exchange(mirror, header, data)
            except OSError as error:
                mirror.room = str(error)
            except Exception as error:  # Broken, or no memory. The neighbour has the one before.
                mirror.group.break_()  # Else other members, which train on, wait for this one.
                mirror.error = mirror.error or str(error).partition(". ")[0][-120:]
        self.newest_s = time.monotonic() - began

    def _exchange(self, mirror: Mirror, mine: _Header[AnySnapshot], data: Tensor) -> None:
        """Send this member's snapshot to who keeps it, and take those that this one keeps.

        Empty `data`: there is no snapshot.

        Raises:
            Broken: a member was lost, or the world is left.
        """
        got = mirror.swap_headers(msgspec.msgpack.encode(mine) if data.numel() else b"")
        headers = {m: msgspec.msgpack.decode(h, type=self._kind) for m, h in got.items() if h}
        rooms: dict[int, tuple[str, Tensor]] = {}
        mirror.room = ""
        for owner, header in headers.items():
            try:
                rooms[owner] = self._make_room(owner, header.size)
            except (OSError, PlatformError) as error:
                mirror.room = str(error)
        places = {
            owner: rooms[owner][1] if owner in rooms else torch.empty(h.size, dtype=torch.uint8)
            for owner, h in headers.items()
        }
        mirror.swap(data, places)
        for owner, (slot, memory) in rooms.items():
            if hash_tensors([memory]) == headers[owner].digest:
                replace_file(self._folder / (slot + ".head"), got[owner])

    def _make_room(self, owner: int, size: int) -> tuple[str, Tensor]:
        """Return the name and the memory of the slot that `owner`'s next snapshot goes to.

        That is the one that has not the newest of its snapshots.

        Raises:
            OSError: there is no room.
            PlatformError: the folder is gone, and cannot be made again.
        """
        names = [f"m{owner}-{slot}" for slot in "ab"]
        steps = {n: h.snapshot.step for n, h in self._headers() if n in names}
        slot = min(names, key=lambda name: steps.get(name, -1))
        self._make_folder()
        self._remove(slot + ".head")
        try:
            return slot, self._open(slot, size)
        except OSError:
            self._remove(slot)
            raise

    def _open(self, slot: str, size: int) -> Tensor:
        """Return the slot's memory, which stays mapped; it is all there before it is written.

        Raises:
            OSError: there is no room. Writing would be a SIGBUS.
        """
        known = self._maps.get(slot)
        if known is None or known.size != size or not (self._folder / slot).exists():
            self._unmap(slot)
            known = self._maps[slot] = MappedFile(self._folder / slot, size)
        return known.view()

    def _unmap(self, slot: str) -> None:
        known = self._maps.pop(slot, None)
        if known is not None:
            known.close()

    # --- reading ------------------------------------------------------------------------------

    def list_all(self) -> tuple[AnySnapshot, ...]:
        """Return what there is on this node."""
        self.wait()
        return tuple(sorted(header.snapshot for _, header in self._headers()))

    def make_reader(self) -> Callable[[AnySnapshot], Any]:
        """Return what reads snapshots, each once; their tensors are where they lie.

        It raises `Broken` where one is gone or damaged, which is not found again: all decide anew
        without it.
        """
        return functools.cache(self._read)

    def _read(self, wanted: AnySnapshot) -> Any:
        for name, header in self._headers():
            if header.snapshot == wanted:
                try:
                    with open(self._folder / name, "rb") as file:
                        size = max(header.size, 1)
                        memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
                except (OSError, ValueError):  # It is gone, or was cut.
                    self._remove(name + ".head")
                    break
                data = torch.frombuffer(memory, dtype=torch.uint8)[: header.size]
                if hash_tensors([data]) != header.digest:
                    self._remove(name + ".head")
                    break
                return open_state(header.skeleton, make_places(data))[0]
        raise Broken(f"the snapshot of step {wanted.step} by rank {wanted.owner} is damaged")

    def _headers(self) -> list[tuple[str, _Header[AnySnapshot]]]:
        found = []
        for path in sorted(self._folder.glob("m*.head")) if self._kept else ():
            with contextlib.suppress(OSError, msgspec.DecodeError):
                data = path.read_bytes()
                found.append((path.stem, msgspec.msgpack.decode(data, type=self._kind)))
        return found

    def _remove(self, name: str) -> None:
        if not name.endswith(".head"):
            self._unmap(name)
        (self._folder / name).unlink(missing_ok=True)


def locate_memory() -> Path | None:
    """Return where this node's ranks keep snapshots; None outside a job."""
    home, job = os.environ.get("PERDURE_HOME", ""), os.environ.get("PERDURE_JOB", "")
    if not home or not job or not os.path.isdir("/dev/shm"):
        return None
    return Path(locate_job(home, job).memory, "n" + os.environ.get("PERDURE_NODE", "0"))
