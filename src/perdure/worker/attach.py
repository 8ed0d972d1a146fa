"""perdure's way into a rank: ring, recorder and control line, before the script's first line.

`attach_rank` is called once in each rank: by the keeper's warm image in the child that it has
forked, by the import hook of a cold start once torch.distributed is there, or else by
`perdure.init`. Where it cannot attach it says so in one line and the script runs on without:
watching must never be what breaks a training. Data loaders and other children share the
environment but not the pid that the ring belongs to, so they never attach.
"""

import atexit
import contextlib
import ctypes
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Literal

from perdure.files.private import locate_job
from perdure.model.bus.wire import WorkerHello
from perdure.model.errors import ProtocolError
from perdure.model.events import AnyEvent
from perdure.model.nccl import explain_shared_gpus
from perdure.model.orders import InjectFault, InterruptCollectives, Order, TakeStacks
from perdure.model.ring import RING_BYTES
from perdure.model.signals.progress import Phase
from perdure.worker.control import Control
from perdure.worker.interrupt import Interrupter
from perdure.worker.recording.groups import list_process_groups, note_groups, read_members
from perdure.worker.recording.recorder import TraceWriter, list_dumps, make_recorder
from perdure.worker.recording.stages import StepStamps, install_stages
from perdure.worker.ring import RingWriter
from perdure.worker.steering.harm import Faults, arm_forward
from perdure.worker.system.stderr import say

_PR_SET_PTRACER = 0x59616D61
_DRAIN_AT_EXIT_S = 3.0
_END_S = 2.0
"""Seconds after the end of the script before perdure looks at what the process waits for."""
_NATIVE = ("perdure-store", "perdure-compare")
"""Threads in torch's own code. One that comes back from it while Python ends aborts the process."""
_HOLD_S = 3600.0
"""Seconds that a thread which is no daemon may hold a rank that has ended well."""


class Attachment:
    """Holds all that perdure has inside one rank."""

    def __init__(self, ring: RingWriter) -> None:
        """Attach to `ring`; `start_control` and `start_recorder` add the rest."""
        self.ring = ring
        self.pid = os.getpid()
        self.job = os.environ.get("PERDURE_JOB", "")
        self.clock_offset_s = float(os.environ.get("PERDURE_CLOCK_OFFSET_S", "0") or 0)
        self.place = -1
        """Of its machine, where a relay hears it (`service/lighthouse/replica_relay.py`)."""
        self.control: Control | None = None
        self.recorder: Any = None
        self.stages: StepStamps | None = None
        """Where steps go, where that is stamped."""
        self._entered: set[Phase] = set()
        """Phases of the start-up that were stamped."""
        self._ended = threading.Event()
        self.started = False
        """The phase is the loop's from now on."""
        self._compiles = False
        """Compilations are declared."""
        self.faults = Faults(
            rank=ring.rank,
            generation=ring.generation,
            emit=self.emit,
            drain=self.drain,
            now=self.now,
        )
        self.faults.arm_forward = arm_forward
        self.interrupter = Interrupter(
            rank=ring.rank, generation=ring.generation, emit=self.emit, now=self.now
        )

    def now(self) -> float:
        """Return job time."""
        return time.monotonic() + self.clock_offset_s

    def emit(self, event: AnyEvent) -> int:
        """Send `event` to the journal, by way of the agent, as soon as there is one."""
        return self.control.emit(event) if self.control is not None else 0

    def drain(self, timeout_s: float) -> bool:
        """Wait until the agent has every event."""
        return self.control is None or self.control.drain(timeout_s)

    def obey(self, handler: Callable[[Any], None], *kinds: type[Order]) -> None:
        """Have `handler` carry out orders of these kinds, where there is an agent to send them."""
        if self.control is not None:
            self.control.obey(handler, *kinds)

    def enter(self, phase: Literal["script", "init", "group"]) -> None:
        """Stamp a phase of the start-up, once; show it unless the rank is already beyond it."""
        order = ("script", "init", "group")
        beyond = self.started or not self._entered.isdisjoint(order[order.index(phase) :])
        if phase not in self._entered:
            self._entered.add(phase)
            self.ring.stamp(phase)
        if not beyond:
            self.ring.set_phase(phase)

    def start_control(self) -> None:
        """Open the line to the agent, where there is one."""
        path = os.environ.get("PERDURE_SOCKET", "")
        if not path or self.control is not None:
            return
        name = WorkerHello(self.job, self.ring.rank, self.ring.generation, self.pid)
        self.open_control(Control(path, name))
        control = self.control
        assert control is not None
        control.start()

    def open_control(self, control: Control) -> None:
        """Speak by `control`, which its caller starts once all its handlers are there."""
        self.control = control
        self.obey(self.faults.handle, InjectFault)
        self.obey(self.interrupter.handle, InterruptCollectives)

    def start_recorder(self) -> None:
        """Watch collectives, by the means that `PERDURE_RECORDER` names (default `auto`)."""
        if self.recorder is not None or "torch" not in sys.modules:
            return
        import torch.distributed

        if not torch.distributed.is_available():
            return
        home = os.environ.get("PERDURE_HOME", "")
        if home:
            traces = TraceWriter(
                rank=self.ring.rank,
                generation=self.ring.generation,
                directory=locate_job(home, self.job).traces(self.ring.generation),
                dumps=list_dumps(),
                groups=list_process_groups,
            )
            self.obey(traces.handle, TakeStacks)
        self.recorder = make_recorder(self.ring, read_members, list_dumps("_json"), self.faults)
        if self.recorder is not None:
            self.recorder.start()
            self.stages = install_stages(self.ring, self.recorder.library)
            _note_group(self)
            note_groups(os.environ["PERDURE_RING"])

    def start_replica(self) -> None:
        """Repair torchft as soon as the script has imported it (see `worker.torchft.manager`)."""
        from perdure.worker.start.cold import after_import
        from perdure.worker.torchft.listening import listen_at_node
        from perdure.worker.torchft.manager import install, is_replica, join_replica

        if is_replica() and self.control is not None:
            join_replica(self)
            after_import("torchft", install)
            after_import("torchft", listen_at_node)

    def declare_compilations(self) -> None:
        """Show compilations by torch as busy phases, as soon as it is ready to compile."""
        if self._compiles:
            return
        self._compiles = True
        from perdure.worker.compiling import watch_compilations

        watch_compilations()

    def begin_end(self) -> None:
        """Note that the script has ended, before Python waits for its threads.

        Unless an exception ends it, the rank has finished, and may take seconds for what its
        libraries do then.
        """
        if os.getpid() != self.pid:
            return
        if getattr(sys, "last_value", None) is None and not list_holding_threads():
            self.ring.set_phase("finished")
        with contextlib.suppress(RuntimeError):  # No thread can be started any more.
            threading.Thread(target=self._name_hold, name="perdure-end", daemon=True).start()

    def _name_hold(self) -> None:
        """Say what the process waits for, if it does not end. A thread that trains is no wait."""
        moved, names = -1, ""
        while not self._ended.wait(_END_S):
            before, moved = moved, self.ring.num_moves
            if moved != before and (threads := list_holding_threads()):
                names = ", ".join(one.name for one in threads)
                continue
            say(f"rank {self.ring.rank} {describe_hold()}")
            if getattr(sys, "last_value", None) is None:
                self.ring.set_phase("finished")
                if names:
                    now = time.monotonic_ns()
                    until = now + int(_HOLD_S * 1e9)
                    self.ring.set_busy(f"end, waits for thread {names}".encode(), now, until)
            return

    def stop(self) -> None:
        """End the threads and hand over what is left; the ring stays."""
        if os.getpid() != self.pid:
            return
        self._ended.set()
        if getattr(sys, "last_value", None) is None:
            self.ring.set_phase("finished")
        if self.recorder is not None:
            self.recorder.stop()
        if self.control is not None:
            self.control.close(_DRAIN_AT_EXIT_S)
        until_s = time.monotonic() + _END_S
        for thread in threading.enumerate():
            if thread.name in _NATIVE:
                thread.join(max(0.0, until_s - time.monotonic()))


def describe_hold() -> str:
    """Return in words why this process, whose script has ended, lives on."""
    error = getattr(sys, "last_value", None)
    ended = "has ended" if error is None else f"has raised {type(error).__name__}"
    frames, main = sys._current_frames(), threading.main_thread()
    if others := list_holding_threads():
        names = ", ".join(f"{one.name} ({_locate(frames.get(one.ident or 0))})" for one in others)
        return f"{ended} and waits for threads that are no daemons: {names}"
    return f"{ended} and does not exit: it is in {_locate(frames.get(main.ident or 0))}"


def list_holding_threads() -> list[threading.Thread]:
    """Return the threads for which Python waits before this process exits."""
    main = threading.main_thread()
    return [one for one in threading.enumerate() if not one.daemon and one is not main]


def _locate(frame: FrameType | None) -> str:
    """Return the innermost place of the script's own, or else the innermost one."""
    at = frame
    while at is not None and "/lib/python" in at.f_code.co_filename:
        at = at.f_back
    at = at or frame
    return "native code" if at is None else f"{at.f_code.co_filename}:{at.f_lineno}"


def _before_threads_end(call: Callable[[], None]) -> None:
    """Have `call` called when the script has ended, before Python joins its threads."""
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(call)
    else:
        atexit.register(call)


def stand_alone() -> Attachment:
    """Return what a rank has in a process that perdure does not watch: a ring that nobody reads."""
    return Attachment(RingWriter(bytearray(RING_BYTES), ""))


_attachment: Attachment | None = None


def attach_ring() -> Attachment | None:
    """Open this process's ring and stamp the script's first line. Imports no torch.

    Returns None where there is no ring, it cannot be opened (said on standard error), or it
    belongs to another process.
    """
    global _attachment
    if _attachment is not None:
        return _attachment
    path = os.environ.get("PERDURE_RING", "")
    if not path:
        return None
    try:
        ring = RingWriter.open(path)
    except (OSError, ProtocolError) as error:
        say(f"not watching this rank: {error}")
        return None
    if not ring.claim(os.getpid()):
        ring.close()
        return None
    _attachment = Attachment(ring)
    _attachment.enter("script")
    _allow_stacks()
    atexit.register(_attachment.stop)
    _before_threads_end(_attachment.begin_end)
    return _attachment


def attach_rank() -> Attachment | None:
    """Attach everything to this rank: ring, control line, recorder. Harmless when repeated.

    Never raises: what perdure cannot watch, it leaves alone.
    """
    try:
        attachment = attach_ring()
        if attachment is not None:
            attachment.start_control()
            attachment.start_recorder()
            attachment.start_replica()
            attachment.declare_compilations()
    except Exception as error:
        say(f"cannot watch this rank: {error!r}")
        return _attachment
    return attachment


def _forget() -> None:
    """A forked child is nobody's rank: ring and control line have let go of it, too."""
    global _attachment
    _attachment = None


os.register_at_fork(after_in_child=_forget)


def _note_group(attachment: Attachment) -> None:
    """Stamp the moment at which the default process group is there.

    `init_process_group` itself stays untouched (people pickle, patch and import it early): what
    is wrapped is the private function by which it publishes the finished group.
    """
    from torch.distributed import distributed_c10d as c10d

    publish = c10d._update_default_pg
    if c10d.is_initialized():
        attachment.enter("group")

    @functools.wraps(publish)
    def update(group: Any) -> None:
        publish(group)
        if group is None and attachment.recorder.library is not None:
            attachment.recorder.library.forget_groups()
        if group is not None and attachment.pid == os.getpid():
            attachment.enter("group")
            with contextlib.suppress(Exception):
                _warn_shared_gpus(group)

    c10d._update_default_pg = update  # type: ignore[assignment]


def _warn_shared_gpus(group: Any) -> None:
    """Say, once a node, that NCCL will refuse a default group with more ranks than GPUs.

    It does so itself at the first collective, in many lines; what it then accepts all the same is
    nobody's to forbid. A backend that is not NCCL alone may train on the CPU.
    """
    import torch
    import torch.distributed as dist

    env = os.environ
    if dist.get_backend(group) != "nccl" or env.get("LOCAL_RANK", "0") != "0":
        return
    ranks = min(group.size(), int(env.get("LOCAL_WORLD_SIZE", "1")))
    why = explain_shared_gpus(ranks, torch.cuda.device_count(), env)
    if why:
        say(why)


def _allow_stacks() -> None:
    """Let the agent's py-spy read this process where Yama restricts ptrace to parents."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1).value, 0, 0, 0)
