"""Harm done on purpose, inside the rank that was asked for, at a step or now.

crash and stop are real signals to the own process. exit, spin, slow and oom happen in the
training thread, where a bug of the user's would; in a script that declares no steps the Python
recorder gives them a place (the next collective), otherwise the answer says that there is none.
oom is a kill by the kernel, wherever a cgroup with a limit can be made for this one process.
That a fault is about to happen is told, and the agent's receipt awaited, before it happens.
"""

import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable

from perdure.model.actions import InjectFault
from perdure.model.events import AnyEvent, FaultInjected
from perdure.worker import cgroups

KINDS = ("crash", "stop", "spin", "exit", "oom", "slow")
NEVER = 1 << 62
_TOLD_TIMEOUT_S = 1.0
_MIB = 1 << 20
_OOM_MB = 256
_OOM_SLACK_MB = 256
"""Taken beyond the limit before it is said that the kernel does not enforce it."""


class Faults:
    """The faults that one rank was asked for."""

    def __init__(
        self,
        *,
        rank: int,
        generation: int,
        emit: Callable[[AnyEvent], object],
        drain: Callable[[float], bool],
        now: Callable[[], float],
    ) -> None:
        """Tell through `emit`; `drain` waits until it was heard; `now` is job time."""
        self._rank, self._generation = rank, generation
        self._emit, self._drain, self._now = emit, drain, now
        self._seen: set[str] = set()
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, InjectFault]] = []
        self._slow_s = 0.0
        self._slow_left = 0
        self.step = -1
        """Committed steps; -1 while no loop of `run.steps` runs."""
        self.next_step = NEVER
        """The earliest step before which the training thread has to call `act`."""
        self.arm_collectives: Callable[[Callable[[], None] | None], None] | None = None
        """Set by the Python recorder's owner: calls the given before each collective."""

    def handle(self, order: InjectFault) -> None:
        """Take an order. Called by the control thread; never waits, never harms by itself."""
        if order.id in self._seen or order.generation != self._generation:
            return
        self._seen.add(order.id)
        error = self._find_objection(order)
        if error:
            self._tell(order, error)
        elif order.at_step < 0 and self._can_strike_beside(order.kind):
            threading.Thread(target=self._harm, args=(order, True), daemon=True).start()
        else:
            with self._lock:
                self._waiting.append((max(order.at_step, 0), order))
                self.next_step = min(step for step, _ in self._waiting)
            if self.step < 0 and self.arm_collectives is not None:
                self.arm_collectives(self._before_collective)

    def act(self, step: int) -> None:
        """Do what is due before step `step` begins. Called by the training thread."""
        with self._lock:
            due = [order for at, order in self._waiting if at <= step]
            self._waiting = [item for item in self._waiting if item[0] > step]
        for order in due:
            self._harm(order, False)
        self._slow_down()
        with self._lock:
            waiting = min((at for at, _ in self._waiting), default=NEVER)
            self.next_step = 0 if self._slow_left else waiting

    def _find_objection(self, order: InjectFault) -> str:
        if order.kind not in KINDS:
            return f"unknown fault {order.kind!r}: one of {', '.join(KINDS)}"
        if self.step < 0:
            if order.at_step >= 0:
                return "the script declares no steps (run.steps), so there is none to wait for"
            if not self._can_strike_beside(order.kind) and self.arm_collectives is None:
                return (
                    f"{order.kind} needs run.steps() in the script, or PERDURE_RECORDER=python "
                    "to act at its next collective"
                )
        elif 0 <= order.at_step < self.step:
            return f"already at step {self.step}"
        return ""

    def _can_strike_beside(self, kind: str) -> bool:
        """Whether any thread can do it now, whatever the training thread is doing."""
        if kind == "oom":
            return self.step < 0 and bool(cgroups.find_parents())
        return kind in ("crash", "stop", "exit")

    def _before_collective(self) -> None:
        self.act(NEVER - 1)
        if self.next_step == NEVER and self.arm_collectives is not None:
            self.arm_collectives(None)

    def _tell(self, order: InjectFault, error: str = "", note: str = "") -> None:
        self._emit(
            FaultInjected(
                id=order.id,
                rank=self._rank,
                kind=order.kind,
                at_s=self._now(),
                error=error,
                note=note,
            )
        )

    def _harm(self, order: InjectFault, beside: bool) -> None:
        """Do it; `beside` the training thread, where an exception would reach nobody."""
        if order.kind == "oom":
            self._run_out_of_memory(order, beside)
            return
        self._tell(order)
        self._drain(_TOLD_TIMEOUT_S)
        match order.kind:
            case "crash":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "exit":
                code = int(order.args.get("code", 1))
                if beside:
                    os._exit(code)
                sys.exit(code)
            case "spin":
                spin(float(order.args.get("s", float("inf"))))
            case "slow":
                self._slow_s = float(order.args.get("s", 0.1))
                self._slow_left = int(order.args.get("steps", NEVER))

    def _run_out_of_memory(self, order: InjectFault, beside: bool) -> None:
        """Be killed by the kernel in a cgroup of this process's own; else raise a MemoryError."""
        limit_mb = int(order.args.get("mb", _OOM_MB))
        mark = os.environ.get("PERDURE_KEEPER", "")
        try:
            if not mark:
                raise OSError("no keeper that would remove it")
            name = cgroups.rank_name(mark, self._generation, self._rank)
            place = cgroups.limit_self(name, limit_mb * _MIB)
        except OSError as error:
            why = f"no cgroup with a memory limit can be made here ({error})"
            if beside:
                self._tell(order, error=why)
                return
            self._tell(order, note=f"a MemoryError at an address-space limit: {why}")
            self._drain(_TOLD_TIMEOUT_S)
            exhaust_memory(limit_mb)
        self._tell(order, note=f"killed by the kernel at {limit_mb} MiB in cgroup {place}")
        self._drain(_TOLD_TIMEOUT_S)
        touch_memory(limit_mb + _OOM_SLACK_MB)
        print(f"perdure: the kernel did not enforce the limit of {place}", file=sys.stderr)

    def _slow_down(self) -> None:
        if self._slow_left:
            self._slow_left -= 1
            time.sleep(self._slow_s)


def spin(duration_s: float) -> None:
    """Burn CPU in this thread for `duration_s`."""
    end = time.monotonic() + duration_s
    while time.monotonic() < end:
        pass


def touch_memory(size_mb: int) -> None:
    """Take `size_mb` and write to every page of it; gives it back where one comes so far."""
    chunks = []
    for _ in range(size_mb // 16):
        chunks.append(b"\x01" * (16 * _MIB))


def exhaust_memory(limit_mb: int) -> None:
    """Allocate until `limit_mb` more than now are in use, then fail as an allocation would.

    The limit is the process's own address space, so the machine and its other ranks are safe;
    what comes is a MemoryError, not the kernel's killer, and the error says so.

    Raises:
        MemoryError: always.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    limit = used + limit_mb * _MIB
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    chunks: list[bytearray] = []
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        while len(chunks) * 16 < limit_mb + 64:
            chunks.append(bytearray(16 * _MIB))
    except MemoryError:
        pass
    finally:
        taken = len(chunks) * 16
        chunks.clear()
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    raise MemoryError(f"injected by perdure: {taken} MiB taken, at an address-space limit")
