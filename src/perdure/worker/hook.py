"""Every collective seen at the dispatcher, by a kernel in Python: `PERDURE_RECORDER=python`.

A kernel on dispatch key `BackendSelect` for each `c10d::` operator notes the collective and
passes it on below that key, so process groups keep their types. It knows begin and end of each
one exactly and the begin of each send and recv, and is where a fault can be injected into a
script that declares no steps. It costs 30 to 65 µs a collective, so it is not the default. The
compiled recorder will take its place behind the same slots.
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroup, Work

from perdure.worker.recorder import Dump, Members, is_idle
from perdure.worker.ring import RingWriter

_POINT_TO_POINT = ("send", "recv_", "recv_any_source_")
_POLL_S = 0.1


class _Comm:
    """Counters of one communicator; guarded by the recorder's lock."""

    __slots__ = ("ended", "op", "since", "slot", "started")

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.started = self.ended = self.since = 0
        self.op = b""


class HookRecorder:
    """Writes the communicator slots from inside the dispatcher."""

    kind = "python"

    def __init__(self, ring: RingWriter, members: Members, dumps: Mapping[str, Dump]) -> None:
        """Write to `ring`; `members` returns size and ranks of a group by its name.

        `dumps` are Flight Recorder's, where it is on: the works of gloo's reduce_scatter and
        send never say that they ended, not even after `wait`.
        """
        self._ring = ring
        self._members = members
        self._dumps = dumps
        self._lock = threading.Lock()
        self._comms: dict[str, _Comm] = {}
        self._library: torch.library.Library | None = None
        self._without_future: set[str] = set()
        self._pending: list[tuple[_Comm, int, Any]] = []
        """Works whose end nobody calls back about; asked by the thread."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.before: Callable[[], None] | None = None
        """Called in the training thread before each collective; for injected faults."""
        ring.set_recorder(self.kind)

    def start(self) -> None:
        """Register the kernels, and a thread for works that cannot call back."""
        below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
        library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
        for name in _find_operators():
            operator = getattr(torch.ops.c10d, name).default
            where = [
                index
                for index, argument in enumerate(operator._schema.arguments)
                if "ProcessGroup" in str(argument.type)
            ]
            if where:
                kernel = self._make_kernel(name, operator, where[0], below)
                library.impl(  # type: ignore[no-untyped-call]
                    name, kernel, "BackendSelect", with_keyset=True
                )
        self._library = library
        self._thread = threading.Thread(target=self._run, name="perdure-recorder", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. The kernels stay: another thread may be inside one."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def _make_kernel(self, name: str, operator: Any, where: int, below: Any) -> Callable[..., Any]:
        suffix = " p2p" if name in _POINT_TO_POINT else ""
        op = name.strip("_").encode()

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            if self.before is not None:
                self.before()
            group = ProcessGroup.unbox(args[where]).group_name
            comm, seq = self._begin(group, suffix, op)
            result = operator.redispatch(keyset & below, *args, **kwargs)
            work = result[-1] if isinstance(result, (tuple, list)) else result
            if suffix:
                return result  # A receive says nothing about its end; -1 in its slot says so.
            if work is None:
                self._end(comm, seq)
            else:
                self._watch(comm, seq, name, Work.unbox(work))
            return result

        return kernel

    def _begin(self, group: str, suffix: str, op: bytes) -> tuple[_Comm, int]:
        now = time.monotonic_ns()
        with self._lock:
            comm = self._comms.get(group + suffix)
            if comm is None:
                comm = self._comms[group + suffix] = self._make_comm(group, suffix)
            comm.started += 1
            comm.since = now
            self._ring.beat(now)
            if comm.slot >= 0:
                if comm.op != op:
                    comm.op = op
                    self._ring.set_comm_op(comm.slot, op)
                self._ring.set_comm(comm.slot, comm.started, comm.ended, now)
            return comm, comm.started

    def _make_comm(self, group: str, suffix: str) -> _Comm:
        size, ranks = self._members(group)
        if suffix:
            # Two ranks' counts of sends and receives need not agree: nobody may compare them.
            size, ranks = 1, ()
        comm = _Comm(self._ring.add_comm(group + suffix, size, ranks))
        comm.ended = -1 if suffix else 0
        return comm

    def _end(self, comm: _Comm, seq: int) -> None:
        now = time.monotonic_ns()
        with self._lock:
            if seq <= comm.ended:
                return
            comm.ended = seq
            self._ring.beat(now)
            if comm.slot >= 0:
                self._ring.set_comm(comm.slot, comm.started, seq, comm.since)

    def _watch(self, comm: _Comm, seq: int, name: str, work: Any) -> None:
        """Have `_end` called when `work` ends, by its future or else by the thread."""
        if name not in self._without_future:
            try:
                work.get_future().add_done_callback(lambda _: self._end(comm, seq))
                return
            except RuntimeError:
                self._without_future.add(name)
        with self._lock:
            self._pending.append((comm, seq, work))

    def _run(self) -> None:
        while not self._stop.wait(_POLL_S):
            if not self._ring.attached:
                return
            with self._lock:
                pending, self._pending = self._pending, []
            idle = bool(pending) and bool(self._dumps) and all(map(is_idle, self._dumps.values()))
            left = []
            for comm, seq, work in pending:
                if idle or _is_over(work):
                    self._end(comm, seq)
                else:
                    left.append((comm, seq, work))
            if left:
                with self._lock:
                    self._pending = left + self._pending


def _is_over(work: Any) -> bool:
    try:
        return bool(work.is_completed())
    except RuntimeError:
        return True  # It ended by an exception, which its own waiter will get.


def _find_operators() -> list[str]:
    names = torch._C._dispatch_get_all_op_names()
    return sorted(name.removeprefix("c10d::") for name in names if name.startswith("c10d::"))
