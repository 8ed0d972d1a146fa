"""Inside a rank of a torchft job: what its Manager does not do by itself.

Installed after `import torchft`, by perdure in an unmodified script, or by `perdure.torchft`:

- 0.2.0's DistributedDataParallel fails an assertion when an all-reduce was broken, which kills
  the survivors of every death; the gradient is handed on instead, and the step not committed;
- who meets an error breaks its own connections of that quorum, so that peers who wait on it get
  one as well instead of waiting for the time-out: everyone who waits, waits in the end on the dead;
- a fence from the lighthouse does the same where no connection breaks by itself (a stopped or a
  hung peer);
- a collective that takes far too long is reported, so that the lighthouse can tell who never came;
  so is a quorum, where the lighthouse is torchft's own and tells nobody who asks;
- what the first optimizer step costs (it imports torch._dynamo) is paid before the first quorum,
  and not while others wait; committed steps are shown in the ring.

In a job that is only observed no connection is ever broken: torchft's own time-outs decide.

Versions are told apart by what they have, since nightly builds have no number of their own.

Where a rank's time goes is stamped at torchft's own step boundaries (`ReplicaAccount`). An attempt
at a step ends with `should_commit`. From the first quorum on every moment belongs to one attempt,
and every attempt to one account: committed (useful), not committed (lost), or the first and those
made while healing, which add nothing to the gradient. Taken out of it are the wait for a decision
about settings and, where the quorum has other members than before, what the training thread waited
for it and its process group. A steady quorum's round trip is part of a step.
"""

import functools
import os
import statistics
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from types import ModuleType
from typing import Any

import msgspec

from perdure.model.errors import ProtocolError
from perdure.model.events import AnyEvent, ReplicaWaiting
from perdure.model.job import JobSpec
from perdure.model.orders import FenceAbort, ResumeRanks, SendBoundary
from perdure.model.ring import PHASE_INDEX, RING_BYTES
from perdure.worker.interrupt import Fences
from perdure.worker.ring import RingWriter
from perdure.worker.settings import read_spec, read_steering
from perdure.worker.system.stderr import say
from perdure.worker.torchft.settings import settings


class ReplicaAccount:
    """The sums of one rank; the training thread's, but for `note_quorum`."""

    def __init__(self) -> None:
        """Count nothing before the first quorum."""
        self._ring = RingWriter(bytearray(RING_BYTES), "")
        self._end_ns = 0
        """Up to here time is accounted for; 0 before the first quorum."""
        self._gate_ns = self._wait_ns = 0
        """Within the attempt."""
        self._lost = self._reform = self._heal = 0
        self._quorum_id = -1
        self._depth = 0

    def begin(self, ring: RingWriter, step: int) -> None:
        """The manager is there."""
        self._ring = ring
        ring.stamp("init")
        ring.start_steps(step)

    def note_quorum(self) -> None:
        """Note that a quorum with other members was answered; called in the quorum's thread."""
        if not self._end_ns:
            self._end_ns = time.monotonic_ns()
            self._ring.stamp("first_step", self._end_ns)

    def add_gate(self, ns: int) -> None:
        """Add the time that the thread has waited for a decision."""
        self._gate_ns += ns if self._end_ns else 0

    def begin_wait(self) -> int:
        """Note that the calling thread is about to wait for the quorum."""
        if threading.current_thread() is not threading.main_thread():
            return 0
        self._depth += 1
        return time.monotonic_ns()

    def end_wait(self, begin: int) -> None:
        """Count the wait for the quorum that began at `begin`."""
        if not begin:
            return
        self._depth -= 1
        if self._end_ns and not self._depth:
            self._wait_ns += time.monotonic_ns() - max(begin, self._end_ns)

    def end_attempt(self, manager: Any, *, committed: bool, healing: bool) -> None:
        """Close the attempt at a step: `should_commit` has returned."""
        self.note_quorum()  # Its process group is of a kind that was not watched.
        begin, now = self._end_ns, time.monotonic_ns()
        gate = min(self._gate_ns, now - begin)
        spent = now - begin - gate
        quorum_id = int(manager._quorum_id)
        reform = min(self._wait_ns, spent) if quorum_id != self._quorum_id else 0
        quorum_first, self._quorum_id = self._quorum_id < 0, quorum_id
        useful = 0
        if healing or quorum_first:
            self._heal += spent
        else:
            self._reform += reform
            useful = spent - reform if committed else 0
            self._lost += 0 if committed else spent - reform
        self._gate_ns = self._wait_ns = 0
        self._end_ns = now
        ring, step = self._ring, int(manager.current_step())
        ring.set_group_accounts((self._lost, self._reform, self._heal))
        ring.commit(step, begin, now, (useful, 0, gate, 0), phase=PHASE_INDEX["step"])


_LOOK_S = 0.1
_WAITS = 15
_LATE_S = 0.5
"""A wait so much longer than those before is told of."""
_LONG_KEPT = 64
_SLACK = 1.5
_MARK = "_perdure_wrapped"


class Replica:
    """This process as a rank of a replica group; one for all its managers."""

    def __init__(self) -> None:
        """Know nothing of perdure yet: `join` brings ring and line."""
        self.fences = Fences()
        self._manager: Callable[[], Any] = lambda: None
        self._emit: Callable[[AnyEvent], object] | None = None
        self._now: Callable[[], float] = time.monotonic
        self._ring: RingWriter | None = None
        self._waits: deque[float] = deque(maxlen=_WAITS)
        self._long: deque[float] = deque(maxlen=_LONG_KEPT)
        """Long waits that ended well: a group that validates lets the others wait again."""
        self._since: dict[int, float] = {}
        """Thread -> since when it waits in a collective."""
        self._told: tuple[int, int] = (-1, -1)
        """Quorum and step of the wait that was told of last."""
        self._open: ReplicaWaiting | None = None
        """What was told of a wait that goes on."""
        self.account = ReplicaAccount()
        self._watching = False
        self._observed = self._tells_quorums = False
        self._commits = 0
        self.attachment: Any = None
        """What perdure holds inside this rank, where it has a line."""
        self.on_first_commit: Callable[[], object] = lambda: None

    def join(
        self,
        ring: RingWriter,
        emit: Callable[[AnyEvent], object],
        now: Callable[[], float],
        *,
        observed: bool = False,
        tells_quorums: bool = False,
    ) -> None:
        """Report by `emit` in job time `now`, and show steps in `ring`.

        Nothing is broken where the job is only `observed`. With `tells_quorums` a wait for a
        quorum is reported as one in a collective is.
        """
        self._ring, self._emit, self._now = ring, emit, now
        self._observed, self._tells_quorums = observed, tells_quorums

    # --- what the manager does ----------------------------------------------------------------

    def adopt(self, manager: Any) -> None:
        """Take `manager` for the one in use, and pay for the first step now."""
        self._manager = weakref.ref(manager)
        warm_up()
        if self._ring is not None:
            self.account.begin(self._ring, manager.current_step())
        if self._emit is not None and not self._watching:
            self._watching = True
            threading.Thread(target=self._watch, name="perdure-replica", daemon=True).start()

    def break_up(self, quorum_id: int) -> int:
        """Break the process groups of a quorum; nothing where the job is only observed."""
        return 0 if self._observed else self.fences.break_up(quorum_id)

    def begin_wait(self) -> float:
        """Note that the calling thread is about to wait for a collective; return when."""
        now = self._now()
        self._since[threading.get_ident()] = now
        return now

    def end_wait(self, since_s: float, *, well: bool) -> None:
        """Note that the collective's wait has ended, `well` if with a result."""
        waited_s = self._now() - since_s
        self._waits.append(waited_s)
        if well and waited_s >= _LATE_S:
            self._long.append(waited_s)
        self.end_quorum_wait(well=well)

    def begin_quorum_wait(self) -> bool:
        """Note that the calling thread begins to wait for a quorum; return whether that is told."""
        thread = threading.get_ident()
        if not self._tells_quorums or thread in self._since:
            return False
        self._since[thread] = self._now()
        return True

    def end_quorum_wait(self, *, well: bool) -> None:
        """Note that a wait that was told has ended, `well` if with a quorum."""
        self._since.pop(threading.get_ident(), None)
        told, self._open = self._open, None
        if well and told is not None and self._emit is not None:
            self._emit(msgspec.structs.replace(told, over=True))

    def read_quorum_id(self) -> int:
        """Return the id of the quorum that this rank is in; -1 before the first."""
        manager = self._manager()
        return -1 if manager is None else int(manager._quorum_id)

    def begin_step(self, manager: Any) -> None:
        """Come to a step, before its quorum is asked for. May wait for a decision about it."""
        begin = time.monotonic_ns()
        settings.begin_step(manager, committed=self._commits > 0)
        self.account.add_gate(time.monotonic_ns() - begin)

    def end_step(self, manager: Any, *, committed: bool, healing: bool) -> None:
        """An attempt at a step is over."""
        if committed and not self._commits:
            self.on_first_commit()
        self._commits += committed
        self.account.end_attempt(manager, committed=committed, healing=healing)

    # --- who does not come --------------------------------------------------------------------

    def _watch(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            self._look()

    def _look(self) -> None:
        """Tell of a wait that is far too long, once a step."""
        since = min(list(self._since.values()), default=None)
        manager = self._manager()
        if since is None or manager is None or self._emit is None or self._ring is None:
            return
        usual_s = 2 * statistics.median(self._waits) if self._waits else 0.0
        usual_s = max(usual_s, _SLACK * max(self._long, default=0.0))
        if self._now() - since < _LATE_S + usual_s:
            return
        quorum_id, step = int(manager._quorum_id), int(manager.current_step())
        if (quorum_id, step) != self._told:
            self._told = (quorum_id, step)
            ring = self._ring
            self._open = ReplicaWaiting(
                generation=ring.generation,
                rank=ring.rank,
                quorum_id=quorum_id,
                step=step,
                since_s=since,
                timeout_s=_read_timeout(manager),
            )
            self._emit(self._open)


replica = Replica()
"""The one of this process."""


def install(torchft: ModuleType) -> None:
    """Put the repairs into `torchft`, which has been imported. Harmless when repeated."""
    manager, groups = sys.modules["torchft.manager"], sys.modules["torchft.process_group"]
    mend_hook(torchft)
    for name in ("ProcessGroupGloo", "ProcessGroupNCCL", "ProcessGroupXCCL"):
        found = vars(groups).get(name)
        if found is not None:
            _wrap(found, "_create_pg", _create_pg)
    if hasattr(groups, "ProcessGroupWrapper"):
        _wrap(groups.ProcessGroupWrapper, "configure", _configure)
    for name, around in _AROUND.items():
        _wrap(manager.Manager, name, around)
    if hasattr(manager, "_ManagedWork"):
        _wrap(manager._ManagedWork, "wait", _wait)


def warm_up() -> None:
    """Do one optimizer step of nothing: the first one of a process imports torch._dynamo."""
    import torch

    if "torch._dynamo" in sys.modules:
        return
    nothing = torch.zeros(1, requires_grad=True)
    nothing.grad = torch.zeros(1)
    torch.optim.AdamW([nothing]).step()


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Have calls of a method go through `around`, which is given the method itself first."""
    original = vars(owner).get(name)
    if original is None or hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, self, *args, **kwargs)

    setattr(wrapped, _MARK, True)
    setattr(owner, name, wrapped)


def _init(original: Callable[..., None], manager: Any, *args: Any, **kwargs: Any) -> None:
    from perdure.worker.torchft.elsewhere import prepare_elsewhere

    if replica.attachment is None:
        prepare_elsewhere(os.environ)
    original(manager, *args, **kwargs)
    attach_elsewhere(manager)
    replica.adopt(manager)


def _report_error(original: Callable[..., None], manager: Any, *args: Any, **kwargs: Any) -> None:
    original(manager, *args, **kwargs)
    replica.break_up(int(getattr(manager, "_quorum_id", -1)))


def _start_quorum(original: Callable[..., None], manager: Any, *args: Any, **kwargs: Any) -> None:
    replica.begin_step(manager)
    original(manager, *args, **kwargs)


def _should_commit(original: Callable[..., bool], manager: Any, *args: Any, **kwargs: Any) -> bool:
    healing = bool(getattr(manager, "_healing", False))
    committed = original(manager, *args, **kwargs)
    replica.end_step(manager, committed=committed, healing=healing)
    return committed


def _apply_state(original: Callable[..., None], manager: Any, *args: Any, **kwargs: Any) -> None:
    pending = getattr(manager, "_pending_state_dict", None)
    user = pending.get("user") if isinstance(pending, dict) else None
    if isinstance(user, dict):
        settings.complete(user)
    original(manager, *args, **kwargs)


def _wait_quorum(original: Callable[..., None], manager: Any, *args: Any, **kwargs: Any) -> None:
    begin, noted, well = replica.account.begin_wait(), replica.begin_quorum_wait(), False
    try:
        original(manager, *args, **kwargs)
        well = True
    finally:
        replica.account.end_wait(begin)
        if noted:
            replica.end_quorum_wait(well=well)


_AROUND: dict[str, Callable[..., Any]] = {
    "__init__": _init,
    "report_error": _report_error,
    "start_quorum": _start_quorum,
    "wait_quorum": _wait_quorum,
    "should_commit": _should_commit,
    "_apply_pending_state_dict": _apply_state,
}
"""Methods of a Manager, and what is called in their place."""


def _wait(original: Callable[..., bool], work: Any, *args: Any, **kwargs: Any) -> bool:
    since_s, ended = replica.begin_wait(), False
    try:
        if replica.fences.outlast(work._manager._pg, work._work):
            ended = original(work, *args, **kwargs)
            return ended
        work._manager.report_error(RuntimeError("a collective of a void quorum was given up"))
        return False
    finally:
        replica.end_wait(since_s, well=bool(ended) and work._manager.errored() is None)


def _configure(original: Callable[..., None], group: Any, *args: Any, **kwargs: Any) -> None:
    replica.fences.prepare(group)
    original(group, *args, **kwargs)


def _create_pg(original: Callable[..., Any], group: Any, store: Any, *args: Any, **kw: Any) -> Any:
    replica.account.note_quorum()
    replica.fences.begin(group, _read_quorum(group), _read_store_port(store))
    try:
        return original(group, store, *args, **kw)
    finally:
        replica.fences.end(group)


def _read_timeout(manager: Any) -> float:
    """Return how long a collective of `manager` may take before it gives it up; 0 if unknown."""
    times = [getattr(owner, "_timeout", None) for owner in (manager, manager._pg)]
    return min((t.total_seconds() for t in times if isinstance(t, timedelta)), default=0.0)


def _read_quorum(group: Any) -> int:
    """Return the quorum of a process group: nightly builds call it by another name."""
    found = [getattr(group, name, None) for name in ("_quorum_id", "_uuid")]
    return next((one for one in found if isinstance(one, int)), -1)


def _read_store_port(store: Any) -> int:
    """Return the port of a rendezvous store; 0 where it has none."""
    inner = getattr(store, "underlying_store", store)
    try:
        return int(inner.port)
    except (AttributeError, RuntimeError):
        return 0


def mend_hook(torchft: ModuleType) -> None:
    """Replace the communication hook of 0.2.0, which takes it that every all-reduce succeeds."""
    import torch

    wrapper, manager = torchft.DistributedDataParallel, sys.modules["torchft.manager"]
    hook = vars(wrapper).get("_comm_hook")
    if hook is None or hasattr(hook.__func__, _MARK) or not hasattr(manager, "_ManagedFuture"):
        return
    managed = manager._ManagedFuture

    @functools.wraps(hook.__func__)  # Its annotations are checked.
    def _comm_hook(state: Any, bucket: Any) -> Any:
        buffer = bucket.buffer()
        work = state.allreduce(buffer)
        ended = work.wait()
        future = work.get_future()
        inner = future._fut if isinstance(future, managed) else future
        if ended is False or inner is None:
            inner = torch.futures.Future()
            inner.set_result(buffer)  # The error is with the manager: no commit.
        return inner

    setattr(_comm_hook, _MARK, True)
    wrapper._comm_hook = staticmethod(_comm_hook)


# --- perdure's own wiring -----------------------------------------------------------------------


def join_replica(attachment: Any) -> None:
    """Connect this process's replica with what perdure holds inside the rank."""
    try:
        spec = read_spec()
    except (OSError, ProtocolError):  # The defaults: torchft goes on.
        spec = JobSpec(script="")
    ring, nproc = attachment.ring, int(os.environ["WORLD_SIZE"])
    replica.join(
        ring,
        attachment.emit,
        attachment.now,
        observed=spec.observe,
        tells_quorums=spec.torchft.lighthouse != "perdure",
    )
    attachment.obey(lambda order: replica.break_up(order.quorum_id), FenceAbort)
    replica.attachment = attachment
    settings.join(
        rank=ring.rank,
        generation=ring.generation,
        nproc=nproc,
        emit=attachment.emit,
        line=attachment.control,
        now=attachment.now,
        quorum_id=replica.read_quorum_id,
        steering=read_steering(),
        checkpoint=spec.checkpoint,
        orphan_s=spec.bus.orphan_s,
    )
    attachment.obey(settings.take, SendBoundary, ResumeRanks)


def attach_elsewhere(manager: Any) -> None:
    """Connect this process with the lighthouse of `perdure serve`, where there is one here.

    Whatever is in the way, the script runs on without.
    """
    from perdure.worker.torchft.elsewhere import find_door, open_line, tell_devices

    try:
        door = find_door(os.environ) if replica.attachment is None else ""
        attachment = open_line(manager, door) if door else None
        if attachment is not None and attachment.control is not None:
            join_replica(attachment)
            replica.on_first_commit = functools.partial(tell_devices, attachment)
            attachment.control.start()
    except Exception as error:
        say(f"this rank is seen from outside only: {error!r}")


def is_replica(environ: Any = os.environ) -> bool:
    """Return whether this rank belongs to a replica group that perdure has started."""
    return bool(environ.get("TORCHFT_LIGHTHOUSE") and environ.get("REPLICA_GROUP_ID"))
