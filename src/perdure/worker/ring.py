"""The rank's side of its ring: a few stores into mapped memory at each step, no system call.

The keeper creates the ring, so that a rank that dies in its first instruction has one too; the
rank claims it by its pid. A forked child inherits the mapping and must never write it: after a
fork every writer of the child points at private memory instead.
"""

import mmap
import os
import struct
import sys
import time
import weakref
from collections.abc import Iterable
from typing import Literal, Self

from perdure.model import ring as layout
from perdure.model.errors import ProtocolError
from perdure.model.signals.progress import Phase

Stamp = Literal[
    "spawned", "script", "init", "group", "restored", "first_step", "last_step", "finished"
]

_RECORD = struct.Struct("@8q")
_COMM_HEAD = struct.Struct("@8q")
_STAGES = struct.Struct("@10qd")


class RingWriter:
    """One mapped ring. The training thread and the recorder write disjoint parts of it."""

    def __init__(self, memory: mmap.mmap | bytearray, path: str) -> None:
        """Wrap `memory`, laid out as `perdure.model.ring` says. Use `create` or `open`."""
        self.path = path
        self._memory = memory
        self._words = memoryview(memory).cast("q")
        _live.add(self)

    @classmethod
    def create(cls, path: str, *, rank: int, generation: int, pid: int = 0) -> Self:
        """Make a ring at `path`, replacing any older one, and stamp `spawned`.

        Its blocks are reserved, because a store into a hole of a full disk would kill the rank.

        Raises:
            OSError: there is no room, or no permission.
        """
        temporary = f"{path}.{os.getpid()}.tmp"
        fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, layout.RING_BYTES)
            writer = cls(mmap.mmap(fd, layout.RING_BYTES), path)
        except OSError as error:
            os.unlink(temporary)
            raise OSError(error.errno, error.strerror, path) from None
        finally:
            os.close(fd)
        writer._begin(rank, generation, pid)
        os.rename(temporary, path)
        return writer

    @classmethod
    def in_memory(cls, *, rank: int, generation: int) -> "RingWriter":
        """Make a ring that nobody reads, of a rank whose node has no agent."""
        writer = cls(bytearray(layout.RING_BYTES), "")
        writer._begin(rank, generation, os.getpid())
        return writer

    def _begin(self, rank: int, generation: int, pid: int) -> None:
        now = time.monotonic_ns()
        first = {
            layout.W_VERSION: layout.VERSION,
            layout.W_RANK: rank,
            layout.W_GENERATION: generation,
            layout.W_PID: pid,
            layout.W_STEP: -1,
            layout.W_SPAWNED: now,
            layout.W_PHASE_SINCE: now,
            layout.W_MAGIC: layout.MAGIC,
        }
        for word, value in first.items():  # The magic last: it makes a ring of it.
            self._words[word] = value

    @classmethod
    def open(cls, path: str) -> "RingWriter":
        """Map the ring at `path` for writing.

        Raises:
            OSError: it is not there.
            ProtocolError: it is no ring of this version.
        """
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size != layout.RING_BYTES:
                raise ProtocolError(f"{path} is no ring: {os.fstat(fd).st_size} bytes")
            writer = cls(mmap.mmap(fd, layout.RING_BYTES), path)
        finally:
            os.close(fd)
        words = writer._words
        if words[layout.W_MAGIC] != layout.MAGIC or words[layout.W_VERSION] != layout.VERSION:
            writer.close()
            raise ProtocolError(f"{path} is no ring of version {layout.VERSION}")
        return writer

    def claim(self, pid: int) -> bool:
        """Make `pid` the ring's only writer; False where it is another process's already."""
        if self._words[layout.W_PID] == 0:
            self._words[layout.W_PID] = pid
        return self._words[layout.W_PID] == pid

    def close(self) -> None:
        """Unmap it. Later writes go to private memory."""
        memory = self._memory
        self.detach()
        if isinstance(memory, mmap.mmap):
            memory.close()

    def detach(self) -> None:
        """Let later writes go to private memory; what is in the ring stays as it is."""
        self._words.release()
        self._memory = bytearray(layout.RING_BYTES)
        self._words = memoryview(self._memory).cast("q")

    @property
    def attached(self) -> bool:
        """Whether writes reach the file."""
        return isinstance(self._memory, mmap.mmap)

    @property
    def rank(self) -> int:
        """The global rank it belongs to."""
        return self._words[layout.W_RANK]

    @property
    def generation(self) -> int:
        """The generation of the world it belongs to."""
        return self._words[layout.W_GENERATION]

    # --- training thread ----------------------------------------------------------------------

    def stamp(self, name: Stamp, ns: int = 0) -> None:
        """Note when a phase was reached: `ns`, or now. A later stamp replaces an earlier one."""
        self._words[layout.STAMP_WORDS[name]] = self._words[layout.W_BEAT] = (
            ns or time.monotonic_ns()
        )

    def set_phase(self, phase: Phase, ns: int = 0) -> None:
        """Say where the rank is, since `ns` or now."""
        words = self._words
        words[layout.W_PROGRESS_SEQ] += 1
        words[layout.W_PHASE] = layout.PHASE_INDEX[phase]
        words[layout.W_PHASE_SINCE] = words[layout.W_BEAT] = ns or time.monotonic_ns()
        words[layout.W_PROGRESS_SEQ] += 1

    def start_steps(self, step: int) -> None:
        """Say at which committed step the generation's loop begins."""
        words = self._words
        words[layout.W_PROGRESS_SEQ] += 1
        words[layout.W_START_STEP] = words[layout.W_STEP] = step
        words[layout.W_PROGRESS_SEQ] += 1

    def commit(
        self,
        step: int,
        begin: int,
        end: int,
        spent: tuple[int, int, int, int],
        *,
        phase: int,
        paused: int = 0,
    ) -> None:
        """Account up to `end`, at which `step` steps are committed.

        `spent` is what this record adds to step, checkpoint, boundary and overhead: their sum
        and `paused` are the time since the previous record, which is what lets the ledger check
        itself.
        """
        words = self._words
        seq = words[layout.W_PROGRESS_SEQ] + 1
        words[layout.W_PROGRESS_SEQ] = seq
        words[layout.W_STEP] = step
        words[layout.W_STEP_NS] += spent[0]
        words[layout.W_CHECKPOINT_NS] += spent[1]
        words[layout.W_BOUNDARY_NS] += spent[2]
        words[layout.W_OVERHEAD_NS] += spent[3]
        words[layout.W_PAUSED_NS] += paused
        words[layout.W_LAST_STEP] = words[layout.W_BEAT] = words[layout.W_PHASE_SINCE] = end
        words[layout.W_PHASE] = phase
        number = words[layout.W_NUM_RECORDS]
        at = layout.RECORDS_AT + (number % layout.RECORDS_MAX) * layout.RECORD_BYTES
        _RECORD.pack_into(self._memory, at, number, step, begin, end, *spent)
        words[layout.W_NUM_RECORDS] = number + 1
        words[layout.W_PROGRESS_SEQ] = seq + 1

    def add_mark(self, step: int) -> None:
        """Note that a snapshot of `step` was taken, with the useful seconds spent up to it."""
        words = self._words
        words[layout.W_PROGRESS_SEQ] += 1
        number = words[layout.W_NUM_MARKS]
        at = layout.W_MARKS + 2 * (number % layout.MARKS_MAX)
        words[at], words[at + 1] = step, words[layout.W_STEP_NS]
        words[layout.W_NUM_MARKS] = number + 1
        words[layout.W_PROGRESS_SEQ] += 1

    def aim(self, num_steps: int) -> None:
        """Say how many steps the loop is to make; 0: not known."""
        words = self._words
        words[layout.W_PROGRESS_SEQ] += 1
        words[layout.NUM_STEPS_WORD] = num_steps
        words[layout.W_PROGRESS_SEQ] += 1

    def set_alone(self, numbers: Iterable[int]) -> None:
        """Note the signals that perdure alone handles here, and neither script nor library."""
        self._words[layout.ALONE_WORD] = sum(1 << number for number in numbers)

    def add_compilation(self, ns: int) -> None:
        """Note what torch took to compile within a first step; `commit` counts it as well."""
        words = self._words
        words[layout.W_PROGRESS_SEQ] += 1
        words[layout.COMPILE_WORD] += ns
        words[layout.W_PROGRESS_SEQ] += 1

    def set_group_accounts(self, sums: tuple[int, int, int]) -> None:
        """Show what a rank of a replica group has lost, spent on quorums, and on healing (ns)."""
        words = self._words
        words[layout.W_PROGRESS_SEQ] += 1
        for number, (mark, ns) in enumerate(zip(layout.GROUP_MARKS, sums, strict=True)):
            at = layout.W_MARKS + 2 * number
            words[at], words[at + 1] = mark, ns
        words[layout.W_NUM_MARKS] = len(sums)
        words[layout.W_PROGRESS_SEQ] += 1

    def set_busy(self, name: bytes, since: int, until: int) -> None:
        """Show a busy phase, or with 0 for `until` none. Any thread may, one at a time.

        The end is cleared first and written last, so that no reader meets a name with another's
        end. A phase that begins or ends is something that the script has done: a beat.
        """
        words = self._words
        words[layout.W_BUSY_UNTIL] = 0
        at = 8 * layout.W_BUSY_NAME
        self._memory[at : at + layout.BUSY_NAME_BYTES] = name[: layout.BUSY_NAME_BYTES - 1].ljust(
            layout.BUSY_NAME_BYTES, b"\0"
        )
        words[layout.W_BUSY_SINCE] = since
        words[layout.W_BEAT] = time.monotonic_ns()
        words[layout.W_BUSY_UNTIL] = until

    def add_stages(
        self, step: int, begin: int, end: int, parts: tuple[int, ...], work: float = 0.0
    ) -> None:
        """Record where a step went: ns of data, forward, backward, optimizer, wait, other.

        `work` is what was declared for it; 0 where nothing was.
        """
        words = self._words
        number = words[layout.W_NUM_STAGES]
        at = layout.stages_at(number)
        words[at // 8] = 0
        _STAGES.pack_into(self._memory, at, 0, step, begin, end, *parts, work)
        words[at // 8] = number + 1
        words[layout.W_NUM_STAGES] = number + 1

    # --- recorder -----------------------------------------------------------------------------

    def set_recorder(self, kind: str) -> None:
        """Say who writes the communicator slots, one of `RECORDERS`."""
        self._words[layout.W_RECORDER] = layout.RECORDERS.index(kind)

    def add_comm(self, name: str, size: int, ranks: Iterable[int]) -> int:
        """Make a slot for a communicator and return its number; -1 where all are taken."""
        words = self._words
        slot = int(words[layout.W_NUM_COMMS])
        if slot >= layout.COMMS_MAX:
            return -1
        self.replace_comm(slot, name, size, ranks)
        words[layout.W_NUM_COMMS] = slot + 1
        return slot

    def replace_comm(self, slot: int, name: str, size: int, ranks: Iterable[int]) -> None:
        """Give `slot` to a communicator, at its beginning."""
        words = self._words
        text = name.encode()[:63]
        at = layout.comm_at(slot)
        words[layout.W_COMM_SEQ] += 1
        _COMM_HEAD.pack_into(self._memory, at, size, 0, 0, 0, 0, 0, 0, 0)
        layout.COMM_TEXT.pack_into(self._memory, at + layout.COMM_TEXT_AT, b"", text)
        packed, ranks_at = pack_ranks(tuple(ranks)), at + layout.COMM_RANKS_AT
        self._memory[ranks_at : ranks_at + len(packed)] = packed
        words[layout.W_COMM_SEQ] += 1

    def set_comm_timeout(self, slot: int, timeout_s: float) -> None:
        """Say what the process group's own time-out is; 0 where it is not known."""
        self._words[layout.comm_at(slot) // 8 + layout.C_TIMEOUT] = int(timeout_s * 1e9)

    def set_comm_enqueued(self, slot: int) -> None:
        """Say that its collectives run on a device, so that the host's stamps are not theirs."""
        enqueued = layout.STAMPS.index("enqueued")
        self._words[layout.comm_at(slot) // 8 + layout.C_STAMPS] = enqueued

    def list_unnamed_communicators(self) -> list[tuple[int, str]]:
        """Return slot and name of each communicator whose ranks are not said yet."""
        found = []
        for slot in range(min(int(self._words[layout.W_NUM_COMMS]), layout.COMMS_MAX)):
            at = layout.comm_at(slot)
            if self._memory[at + layout.COMM_RANKS_AT : at + layout.COMM_RANKS_AT + 2] == b"\0\0":
                raw = self._memory[at + layout.COMM_TEXT_AT + 32 : at + layout.COMM_RANKS_AT]
                found.append((slot, bytes(raw).split(b"\0", 1)[0].decode("utf-8", "replace")))
        return found

    @property
    def num_moves(self) -> int:
        """Number that grows with each change of a communicator."""
        return int(self._words[layout.W_COMM_SEQ])

    def set_comm(self, slot: int, started: int, ended: int, since: int) -> None:
        """Note a communicator's last collectives, and since when the newest is under way."""
        words = self._words
        words[layout.W_COMM_SEQ] += 1
        at = layout.comm_at(slot) // 8
        words[at + 1], words[at + 2], words[at + 3] = started, ended, since
        words[layout.W_COMM_SEQ] += 1

    def set_comm_op(self, slot: int, op: bytes) -> None:
        """Name the operation of a communicator's last collective."""
        words = self._words
        words[layout.W_COMM_SEQ] += 1
        at = layout.comm_at(slot) + layout.COMM_TEXT_AT
        self._memory[at : at + 32] = op[:31].ljust(32, b"\0")
        words[layout.W_COMM_SEQ] += 1

    def beat(self, now: int) -> None:
        """Note that a collective began or ended at `now`: never merely that a thread lives."""
        self._words[layout.W_COMM_BEAT] = now


def pack_ranks(ranks: tuple[int, ...]) -> bytes:
    """Return `ranks` as a slot holds them: a list, a range where they are too many, or unknown."""
    count, numbers = len(ranks), ranks
    if count > layout.COMM_RANKS_MAX:
        first, step = ranks[0], ranks[1] - ranks[0]
        regular = step > 0 and ranks == tuple(range(first, first + step * count, step))
        count, numbers = (layout.COMM_RANGE, (first, step, count)) if regular else (0, ())
    if any(not 0 <= number < 1 << 16 for number in numbers):
        count, numbers = 0, ()
    padding = (0,) * (layout.COMM_RANKS_MAX - len(numbers))
    return layout.COMM_RANKS.pack(count, *numbers, *padding)


_live: "weakref.WeakSet[RingWriter]" = weakref.WeakSet()


def _detach_all() -> None:
    for writer in list(_live):
        writer.detach()


os.register_at_fork(after_in_child=_detach_all)


def is_alone(path: str, number: int) -> bool:
    """Return whether the rank of the ring at `path` leaves signal `number` to perdure."""
    try:
        with open(path, "rb") as file:
            word = os.pread(file.fileno(), 8, 8 * layout.ALONE_WORD)
    except OSError:
        return False
    return bool(int.from_bytes(word, sys.byteorder) >> number & 1)
