"""Who writes the communicator slots of a rank's ring, without a line in the script.

The default asks Flight Recorder, which PyTorch fills in C++ for every gloo and NCCL collective
(DDP's buckets, FSDP2, functional and compiled ones, subgroups), for its *status*: per process
group the number of the last collective that was entered and of the last that ended. That costs
3 µs ten times a second and nothing per collective, and is what "who did not arrive" needs. What
it leaves out is looked up in a full dump (up to 65 ms with 2,000 entries), and only then: the
name of a group that is new, and more about a collective that seems to stay pending.

Deliberately not seen this way: send and recv, which Flight Recorder does not record for gloo,
and instants finer than the poll. The compiled recorder sees both, and a rank gets it if it is built
(`make_recorder`).

Flight Recorder's whole trace of this rank is written down when somebody is suspected
(`TraceWriter`). The recorder polls only a status; what every collective of the last minutes was,
with sizes and stacks, is in Flight Recorder and dies with the process that a restart ends. So each
living rank writes it, by a thread of its own: first without stacks, which takes milliseconds, then
once more with them (symbols are looked up the first time, up to two seconds, mostly without the
GIL). Both are whole files at any moment. For the symbols torch would import Inductor, to look for
code that it has compiled: seconds of work in a process that may be healthy, so that is kept away.
PyTorch's own analyzer reads the files:

    torchfrtrace JOB_DIRECTORY/traces/gN/gloo

gloo leaves out which ranks a group has, without which the analyzer refuses; that is filled in.
Deliberately not done by a signal's handler: a rank that is stopped, or that holds the GIL in
native code, writes nothing, and its file is missing. Its peers' tell what they wait for.
"""

import contextlib
import os
import pickle
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import msgspec

from perdure.model.orders import TakeStacks
from perdure.worker.native.build import build_command, explain_missing, read_mode
from perdure.worker.recording.groups import read_group_timeout_s
from perdure.worker.ring import RingWriter
from perdure.worker.steering.harm import Faults
from perdure.worker.system.stderr import say

POLL_S = 0.1
POLL_START_S = 0.02
"""Until the first collective of the rank: its end is the end of a recovery."""
POLL_QUIET_S = 0.25
QUIET_AFTER_S = 2.0
PENDING_S = 0.5
"""A collective that stays pending this long is worth a dump that names its operation."""
DUMP_SHARE = 200
"""A dump is followed by this many times its duration without another: at most 0.5 %."""

Dump = Callable[[bool, bool], bytes]
"""(with collectives, with stacks) -> Flight Recorder's document, JSON or a pickle."""
Members = Callable[[str], tuple[int, tuple[int, ...]]]


class _Status(msgspec.Struct):
    last_enqueued_collective: str = "-1"
    last_completed_collective: str = "-1"


class _Entry(msgspec.Struct):
    pg_id: int = -1
    process_group: tuple[str, ...] = ()
    collective_seq_id: int = -1
    profiling_name: str = ""
    time_created_ns: int = 0
    is_p2p: bool = False
    retired: bool = False


class _Trace(msgspec.Struct):
    pg_status: dict[str, _Status] = {}
    entries: list[_Entry] = []


_decoder = msgspec.json.Decoder(_Trace)


class Comm(msgspec.Struct, eq=False):
    """A communicator, and what was last written into its slot."""

    name: str
    source: str = ""
    """Backend of the Flight Recorder that tells of it."""
    slot: int = -1
    started: int = 0
    ended: int = 0
    since: int = 0
    looked_at: int = 0
    """The collective that a dump was asked about."""
    done: set[int] = msgspec.field(default_factory=set)
    """Ended before an earlier one did; gloo ends DDP's buckets in any order."""


def list_dumps(form: Literal["", "_json"] = "") -> dict[str, Dump]:
    """Return Flight Recorder's sources of this torch by backend, that give pickles or `_json`.

    There are none where it was turned off.
    """
    sizes = [os.environ.get(f"TORCH_{name}_BUFFER_SIZE") for name in ("FR", "NCCL_TRACE")]
    if next((size for size in sizes if size is not None), "1").strip() == "0":
        return {}
    import torch

    functions = {"gloo": f"_dump_fr_trace{form}", "nccl": f"_dump_nccl_trace{form}"}
    there = vars(torch._C._distributed_c10d)
    return {backend: there[name] for backend, name in functions.items() if name in there}


class Recorder(ABC):
    """What every recorder has: a rank's ring, and a thread of its own."""

    kind = "off"
    library: Any = None
    """What is compiled of it, and knows for how long the training was blocked."""

    def __init__(self, ring: RingWriter, members: Members) -> None:
        """Write to `ring`; `members` returns size and global ranks of a group by its name."""
        self._ring, self._members = ring, members
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        ring.set_recorder(self.kind)

    def start(self) -> None:
        """Begin to record."""
        self._thread = threading.Thread(target=self._run, name="perdure-recorder", daemon=True)
        self._thread.start()

    def stop(self) -> bool:
        """End the thread; return whether it has ended, or never begun."""
        self._stop.set()
        if self._thread is None:
            return True
        self._thread.join(timeout=1.0)
        return not self._thread.is_alive()

    @abstractmethod
    def _run(self) -> None:
        """Record until `_stop` is set."""


class StatusRecorder(Recorder):
    """Polls Flight Recorder's status in a daemon thread of its own."""

    kind = "status"

    def __init__(self, ring: RingWriter, dumps: dict[str, Dump], members: Members) -> None:
        """Write to `ring` what `dumps` (by backend) say."""
        super().__init__(ring, members)
        self._dumps = dumps
        self._raw: dict[str, bytes] = {}
        self._comms: dict[tuple[str, str], Comm] = {}
        self._moved_ns = 0
        self._dump_after_ns = 0

    def stop(self) -> bool:
        """Look once more and end: no thread may be in torch while the interpreter goes down."""
        ended = super().stop()
        if ended and self._thread is not None:
            self._poll_safely()
        return ended

    def poll(self, now: int) -> None:
        """Bring the slots up to `now` (monotonic ns)."""
        for source, dump in self._dumps.items():
            raw = dump(False, False)
            if raw == self._raw.get(source):
                continue
            status = _decoder.decode(raw).pg_status
            if any((source, key) not in self._comms for key in status):
                self._learn_names(source, now)
            for key, state in status.items():
                comm = self._comms.get((source, key))
                if comm is not None:
                    self._update(comm, state, now)
            if all((source, key) in self._comms for key in status):
                self._raw[source] = raw  # Else they are looked for again at the next poll.
        for comm in self._comms.values():
            if comm.started > comm.ended and comm.looked_at != comm.started:
                self._look_closer(comm, now)

    def next_delay_s(self, now: int) -> float:
        """Return how long to sleep: short at the start, longer while nothing moves."""
        if not self._moved_ns:
            return POLL_START_S
        return POLL_QUIET_S if now - self._moved_ns > QUIET_AFTER_S * 1e9 else POLL_S

    def _run(self) -> None:
        while not self._stop.wait(self.next_delay_s(time.monotonic_ns())):
            if not self._poll_safely():
                return

    def _poll_safely(self) -> bool:
        """Poll; False where there is nothing to write to, or nothing that can be read."""
        if not self._ring.attached:
            return False
        try:
            self.poll(time.monotonic_ns())
        except (msgspec.MsgspecError, RuntimeError, ValueError):
            # Flight Recorder of a torch that speaks otherwise: no slots rather than wrong ones.
            self._ring.set_recorder("off")
            return False
        return True

    def _update(self, comm: Comm, state: _Status, now: int) -> None:
        started, ended = int(state.last_enqueued_collective), int(state.last_completed_collective)
        if (started, ended) == (comm.started, comm.ended):
            return
        if started != comm.started:
            comm.since = now
        comm.started, comm.ended = started, ended
        self._moved_ns = now
        if comm.slot < 0:
            comm.slot = self._slot_for(comm)
        if comm.slot >= 0:
            self._ring.set_comm(comm.slot, started, ended, comm.since)
        self._ring.beat(now)

    def _learn_names(self, source: str, now: int) -> None:
        """Learn the names of new groups from a dump, where one is affordable."""
        for entry in self._dump(source, now) or ():
            key = (source, str(entry.pg_id))
            if key not in self._comms and entry.process_group:
                self._comms[key] = Comm(entry.process_group[0], source)

    def _slot_for(self, comm: Comm) -> int:
        """Return a slot for a communicator: a free one, or that of the longest idle; or -1."""
        name = comm.name
        size, ranks = self._members(name)
        slot = self._ring.add_comm(name, size, ranks)
        if slot < 0:
            idle = [c for c in self._comms.values() if c.slot >= 0 and c.started <= c.ended]
            if idle:
                oldest = min(idle, key=lambda comm: comm.since)
                slot, oldest.slot = oldest.slot, -1
                self._ring.replace_comm(slot, name, size, ranks)
        if slot >= 0:
            self._ring.set_comm_timeout(slot, read_group_timeout_s(name))
            if comm.source == "nccl":
                self._ring.set_comm_enqueued(slot)
        return slot

    def _look_closer(self, comm: Comm, now: int) -> None:
        """Learn about a collective that seems to stay pending: its operation, when it was entered.

        And whether it really is pending: gloo ends the buckets of DDP in any order and the status
        names the one that ended last, so 11 of 12 may mean that 12 ended before it.
        """
        if comm.slot < 0 or now - comm.since < PENDING_S * 1e9:
            return
        entries = self._dump(comm.source, now)
        if entries is None:
            return
        comm.looked_at = comm.started
        mine = [e for e in entries if e.process_group[:1] == (comm.name,) and not e.is_p2p]
        newest = next((e for e in reversed(mine) if e.collective_seq_id == comm.started), None)
        if newest is None:
            return
        self._ring.set_comm_op(comm.slot, newest.profiling_name.rpartition(":")[2].encode())
        age = time.time_ns() - newest.time_created_ns
        if 0 <= age < 3600 * 10**9:
            comm.since = now - age
        over = all(entry.retired for entry in mine if entry.collective_seq_id >= comm.ended)
        ended = comm.started if over else comm.ended
        self._ring.set_comm(comm.slot, comm.started, ended, comm.since)

    def _dump(self, source: str, now: int) -> list[_Entry] | None:
        """Return the entries, or None where the last dump was too recent for its cost."""
        if now < self._dump_after_ns:
            return None
        began = time.monotonic_ns()
        entries = _decoder.decode(self._dumps[source](True, False)).entries
        self._dump_after_ns = now + DUMP_SHARE * (time.monotonic_ns() - began)
        return entries


def make_recorder(
    ring: RingWriter, members: Members, dumps: Mapping[str, Dump], faults: Faults
) -> Any:
    """Return the recorder that `PERDURE_RECORDER` asks for, or the best there is; None for `off`.

    `faults` learn how to act in front of a collective, where the recorder can do that.
    """
    mode, wrong = read_mode()
    if wrong:
        say(f"{wrong}; taken as auto")
    if mode == "off":
        return None
    if mode in ("auto", "compiled"):
        from perdure.worker.native.recorder import CompiledRecorder, load_library, why_not_loaded

        library = load_library()
        with contextlib.suppress(OSError):
            if library is not None:
                recorder = CompiledRecorder(ring, members, library)
                faults.arm_collectives = library.set_before
                return recorder
        if mode == "compiled":
            why = why_not_loaded() or f"{explain_missing()}; {build_command()} builds it"
            say(f"the compiled recorder is not used: {why}")
    if not dumps:
        say("Flight Recorder is off, so no collective is seen; unset TORCH_FR_BUFFER_SIZE")
        return None
    return StatusRecorder(ring, dict(dumps), members)


BYTES_MAX = 32 << 20
"""Of one file; one that would be larger with stacks is left without."""
GENERATIONS_KEPT = 4
"""Of this rank's traces, those of the newest generations."""

Groups = Callable[[], Mapping[str, tuple[str, tuple[int, ...]]]]
"""Name of each process group -> its description and global ranks."""


class _Refusal(MetaPathFinder):
    """Refuses one thread the import of one module; others find it as ever.

    torch asks whether it has an attribute of that name. Python 3.13 prints any other error than
    that of a missing attribute as one that nobody has caught.
    """

    def __init__(self, name: str) -> None:
        self._name, self._thread = name, threading.get_ident()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == self._name and threading.get_ident() == self._thread:
            raise AttributeError(f"{fullname} is not needed here")
        return None


@contextlib.contextmanager
def _keep_out(name: str) -> Iterator[None]:
    """Have this thread import no module of that name, unless it is imported already."""
    refusal = _Refusal(name)
    sys.meta_path.insert(0, refusal)
    try:
        yield
    finally:
        sys.meta_path.remove(refusal)


class TraceWriter:
    """Writes `DIRECTORY/BACKEND/rank_R`, one order at a time; those that come meanwhile are lost.

    They are repeats: the controller asks until the stacks have come.
    """

    def __init__(
        self,
        *,
        rank: int,
        generation: int,
        directory: str,
        dumps: Mapping[str, Dump],
        groups: Groups,
    ) -> None:
        """Write what `dumps` (by backend) say, with `groups` filled in where they are missing."""
        self._rank, self._generation = rank, generation
        self._directory, self._dumps, self._groups = directory, dumps, groups
        self._busy = threading.Lock()

    def handle(self, order: TakeStacks) -> None:
        """Begin to write, in a thread, if the order is for this generation."""
        if order.generation == self._generation and self._dumps and self._busy.acquire(False):
            threading.Thread(target=self._run, name="perdure-traces", daemon=True).start()

    def _run(self) -> None:
        try:
            self.write()
        except Exception as error:
            say(f"no Flight Recorder trace: {error!r}")
        finally:
            self._busy.release()

    def write(self) -> None:
        """Write every backend's trace; none of a backend that recorded nothing.

        Raises:
            OSError: there is no room, or no permission.
        """
        with _keep_out("torch._inductor"):
            for stacks in (False, True):
                for backend, dump in self._dumps.items():
                    trace = pickle.loads(dump(True, stacks))
                    if trace.get("entries"):
                        self._put(backend, trace)
        self._forget_old()

    def _put(self, backend: str, trace: dict[str, Any]) -> None:
        known = trace.setdefault("pg_config", {})
        for name, (description, ranks) in self._groups().items():
            known.setdefault(name, {"name": name, "desc": description, "ranks": str(list(ranks))})
        data = pickle.dumps(trace)
        if len(data) > BYTES_MAX:
            return
        directory = os.path.join(self._directory, backend)
        os.makedirs(directory, exist_ok=True)
        path = os.path.join(directory, f"rank_{self._rank}")
        # Outside the directory that the analyzer walks through.
        temporary = os.path.join(self._directory, f".{backend}-{self._rank}.tmp")
        try:
            Path(temporary).write_bytes(data)
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _forget_old(self) -> None:
        """Remove this rank's traces of generations long past."""
        base = os.path.dirname(self._directory)
        if not os.path.isdir(base):
            return  # No backend has recorded anything yet.
        for name in os.listdir(base):
            number = name[1:]
            if number.isdigit() and int(number) <= self._generation - GENERATIONS_KEPT:
                for backend in self._dumps:
                    with contextlib.suppress(OSError):
                        os.unlink(os.path.join(base, name, backend, f"rank_{self._rank}"))
                        os.rmdir(os.path.join(base, name, backend))  # By its last rank.
                        os.rmdir(os.path.join(base, name))
