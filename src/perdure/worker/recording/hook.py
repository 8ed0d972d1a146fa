"""Every collective seen at the dispatcher, by a kernel in Python: `PERDURE_RECORDER=python`.

A kernel on dispatch key `BackendSelect` for each `c10d::` operator notes the collective and
passes it on below that key, so process groups keep their types. It knows begin and end of each
one exactly and the begin of each send and recv, and is where a fault can be injected into a
script that declares no steps. It costs 30 to 65 µs a collective, so it is not the default: it is
for a machine where the compiled recorder (`perdure.worker.native`), which writes the same slots
and spans and more, cannot be built.
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import ProcessGroup, Work

from perdure.model import ring as layout
from perdure.worker.forking import free_in_child
from perdure.worker.native.recorder import list_operators
from perdure.worker.recording.groups import read_group_timeout_s
from perdure.worker.recording.recorder import Comm, Dump, Members, Recorder, is_idle
from perdure.worker.ring import RingWriter

_POLL_S = 0.1
_NO_COMM = 0xFFFF
"""Slot of a span whose communicator has none."""


class _Span(NamedTuple):
    """One collective that was begun."""

    comm: Comm
    seq: int
    number: int


class HookRecorder(Recorder):
    """Writes the communicator slots from inside the dispatcher.

    Its kernels stay when it is stopped: another thread may be inside one.
    """

    kind = "python"

    def __init__(self, ring: RingWriter, members: Members, dumps: Mapping[str, Dump]) -> None:
        """Write to `ring`.

        `dumps` are Flight Recorder's, where it is on: the works of gloo's reduce_scatter and
        send never say that they ended, not even after `wait`.
        """
        super().__init__(ring, members)
        self._dumps = dumps
        self._lock = free_in_child(threading.Lock())
        self._comms: dict[str, Comm] = {}
        self._library: torch.library.Library | None = None
        self._without_future: set[str] = set()
        self._pending: list[tuple[_Span, Any]] = []
        """Works whose end nobody calls back about; asked by the thread."""
        self.before: Callable[[], None] | None = None
        """Called in the training thread before each collective; for injected faults."""

    def start(self) -> None:
        """Register the kernels, and a thread for works that cannot call back."""
        below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
        library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
        for name in list_operators():
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
        super().start()

    def _make_kernel(self, name: str, operator: Any, where: int, below: Any) -> Callable[..., Any]:
        op = name.strip("_")
        code = layout.OP_INDEX.get(op, layout.OP_INDEX["other"])
        p2p = op in layout.POINT_TO_POINT
        suffix = layout.P2P_SUFFIX if p2p else ""
        sized = find_sized_argument(operator._schema)
        names = [argument.name for argument in operator._schema.arguments]
        peer_at = next((names.index(n) for n in ("dst", "src") if p2p and n in names), -1)

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            if self.before is not None:
                self.before()
            group = ProcessGroup.unbox(args[where]).group_name
            nbytes, dtype = _measure(args[sized]) if sized >= 0 else (0, 0)
            kind = code | dtype << 8 | (args[peer_at] + 1 if peer_at >= 0 else 0) << 32
            on_device = sized >= 0 and _is_on_device(args[sized])
            span = self._begin(group + suffix, kind, nbytes, p2p, on_device=on_device)
            result = operator.redispatch(keyset & below, *args, **kwargs)
            work = result[-1] if isinstance(result, (tuple, list)) else result
            if p2p:
                return result  # A receive says nothing about its end; -1 in its slot says so.
            if work is None:
                self._end(span)
            else:
                self._watch(span, name, Work.unbox(work))
            return result

        return kernel

    def _begin(
        self, name: str, kind: int, nbytes: int, p2p: bool, *, on_device: bool = False
    ) -> _Span:
        now = time.monotonic_ns()
        state = layout.UNSEEN if p2p else layout.UNDER_WAY
        with self._lock:
            comm = self._comms.get(name)
            if comm is None:
                comm = self._comms[name] = self._make_comm(name, p2p)
            comm.started += 1
            comm.since = now
            self._ring.beat(now)
            if comm.slot >= 0:
                if on_device:
                    self._ring.set_comm_enqueued(comm.slot)
                self._ring.set_comm_kind(comm.slot, nbytes, kind)
                self._ring.set_comm(comm.slot, comm.started, comm.ended, now)
            kind |= (comm.slot if comm.slot >= 0 else _NO_COMM) << 16
            state |= threading.get_native_id() << 32
            return _Span(
                comm,
                comm.started,
                self._ring.begin_span(comm.started, kind, nbytes, now, state),
            )

    def _make_comm(self, name: str, p2p: bool) -> Comm:
        # Two ranks' counts of sends and receives need not agree: nobody may compare them.
        size, ranks = self._members(name.removesuffix(layout.P2P_SUFFIX) if p2p else name)
        comm = Comm(name, slot=self._ring.add_comm(name, 1 if p2p else size, ranks))
        comm.ended = -1 if p2p else 0
        if comm.slot >= 0:
            self._ring.set_comm_timeout(comm.slot, read_group_timeout_s(name))
        return comm

    def _end(self, span: _Span) -> None:
        now = time.monotonic_ns()
        comm = span.comm
        with self._lock:
            self._ring.end_span(span.number, now)
            if span.seq <= comm.ended:
                return
            comm.done.add(span.seq)
            while comm.ended + 1 in comm.done:
                comm.ended += 1
                comm.done.remove(comm.ended)
            self._ring.beat(now)
            if comm.slot >= 0:
                self._ring.set_comm(comm.slot, comm.started, comm.ended, comm.since)

    def _watch(self, span: _Span, name: str, work: Any) -> None:
        """Have `_end` called when `work` ends, by its future or else by the thread."""
        if name not in self._without_future:
            try:
                work.get_future().add_done_callback(lambda _: self._end(span))
                return
            except RuntimeError:
                self._without_future.add(name)
        with self._lock:
            self._pending.append((span, work))

    def _run(self) -> None:
        while not self._stop.wait(_POLL_S):
            if not self._ring.attached:
                return
            with self._lock:
                pending, self._pending = self._pending, []
            idle = bool(pending) and bool(self._dumps) and all(map(is_idle, self._dumps.values()))
            left = []
            for span, work in pending:
                if idle or _is_over(work):
                    self._end(span)
                else:
                    left.append((span, work))
            if left:
                with self._lock:
                    self._pending = left + self._pending


def _is_on_device(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_is_on_device, value))
    return isinstance(value, torch.Tensor) and not value.is_cpu


def _is_over(work: Any) -> bool:
    try:
        return bool(work.is_completed())
    except RuntimeError:
        return True  # It ended by an exception, which its own waiter will get.


def _measure(argument: Any) -> tuple[int, int]:
    """Return bytes and number of the dtype of a tensor or a list of them."""
    tensors = argument if isinstance(argument, (list, tuple)) else (argument,)
    dtype = _DTYPES.get(tensors[0].dtype, 0) if tensors else 0
    return sum(tensor.nbytes for tensor in tensors), dtype


_DTYPES = {
    getattr(torch, name): index
    for index, name in enumerate(layout.DTYPES)
    if isinstance(getattr(torch, name, None), torch.dtype)
}


def find_sized_argument(schema: Any) -> int:
    """Return which argument's size is the operation's on every rank alike; -1 for none.

    A rank's input, where there is one that is a tensor or a list of them: the output of a gather
    is empty on all ranks but one. Else the first such argument.
    """
    found = [
        (not argument.name.startswith("input"), index)
        for index, argument in enumerate(schema.arguments)
        if str(argument.type) in ("Tensor", "List[Tensor]")
    ]
    return min(found)[1] if found else -1
