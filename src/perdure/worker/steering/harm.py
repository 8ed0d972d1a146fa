"""Harm done on purpose, inside the rank that was asked for, at a step or now.

crash and stop are real signals to the own process. exit, spin, sleep, gil, slow, oom and wrong
collectives happen in the training thread, where a bug of the user's would; in a script that
declares no steps they strike at its next collective (compiled recorder) or its next forward pass.
oom is a kill by the kernel, wherever a cgroup with a limit can be made for this one process.
`for_s` ends a fault, so does heal.
That a fault is about to happen is told, and the agent's receipt awaited, before it happens.

Network faults strike from inside a node of the laboratory, at its own interface, only where
`perdure run --placement` said that every node has a network namespace of its own: anywhere else
these commands would change the machine's own network, and are refused.

Slow stages (`Slowdown`) are extra time inside forward, backward or the data loader of every step.
It is spent where a slow kernel or disk would spend it, so that whoever measures stages measures it
in the right one: before the first module's forward of a step, inside the autograd engine at the
root of a backward pass, and where a DataLoader's iterator makes its batch. Nothing is patched until
a fault is asked for, and everything is put back when it ends.
"""

import ctypes
import json
import mmap
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from perdure.model.events import AnyEvent, FaultInjected
from perdure.model.faults import FAULTS, NETWORK_FAULTS
from perdure.model.orders import InjectFault
from perdure.worker.steering.boundary import NEVER
from perdure.worker.system import cgroups
from perdure.worker.system.forking import free_in_child
from perdure.worker.system.stderr import say

STAGES = {"slow-forward": "forward", "slow-backward": "backward", "slow-data": "data"}


def arm_forward(before: Callable[[], None]) -> bool:
    """Have `before` called once, in the thread of the next forward pass; False without torch."""
    if "torch" not in sys.modules:
        return False
    from torch.nn.modules.module import register_module_forward_pre_hook

    lock = free_in_child(threading.Lock())
    handles: list[Any] = []

    def strike(module: Any, args: Any) -> None:
        with lock:
            mine = handles.pop() if handles else None
        if mine is not None:
            mine.remove()
            before()

    with lock:
        handles.append(register_module_forward_pre_hook(strike))
    return True


class Slowdown:
    """One stage of this process made slower, until `end`."""

    def __init__(self, stage: str, *, extra_s: float = 0.0, factor: float = 0.0) -> None:
        """Add `extra_s` a step to `stage`, or (`factor` - 1) times the usual step."""
        self._stage, self._extra_s, self._factor = stage, extra_s, factor
        self._undo: list[Callable[[], None]] = []
        self._slept = False
        self._slept_s = 0.0
        self._step_began = 0.0
        self.over = False

    def begin(self) -> None:
        """Take effect from the next step on.

        Raises:
            ImportError: there is no torch in this process.
        """
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._undo.append(register_optimizer_step_post_hook(lambda *_: self._end_step()).remove)
        slow = {"forward": self._slow_forward, "backward": self._slow_backward}
        slow.get(self._stage, self._slow_data)()

    def end(self) -> None:
        """Put everything back."""
        self.over = True
        while self._undo:
            self._undo.pop()()

    def _end_step(self) -> None:
        now = time.monotonic()
        if self._step_began and self._factor:
            usual_s = now - self._step_began - self._slept_s
            extra_s = (self._factor - 1) * usual_s
            self._extra_s = 0.5 * (self._extra_s + extra_s) if self._extra_s else extra_s
        self._step_began, self._slept_s, self._slept = now, 0.0, False

    def _wait(self) -> None:
        """Spend the extra time, once a step."""
        if not self._slept and not self.over:
            self._slept = True
            self._slept_s += self._extra_s
            time.sleep(self._extra_s)

    def _slow_forward(self) -> None:
        from torch.nn.modules.module import register_module_forward_pre_hook

        self._undo.append(register_module_forward_pre_hook(lambda *_: self._wait()).remove)

    def _slow_backward(self) -> None:
        import torch.autograd

        module: Any = torch.autograd
        original = module._engine_run_backward

        def run(roots: Any, *args: Any, **kwargs: Any) -> Any:
            root = next((r for r in roots if hasattr(r, "register_hook") and r.requires_grad), None)
            if root is None:
                self._wait()
                return original(roots, *args, **kwargs)
            handle = root.register_hook(lambda _: self._wait())
            try:
                return original(roots, *args, **kwargs)
            finally:
                handle.remove()

        module._engine_run_backward = run
        self._undo.append(lambda: setattr(module, "_engine_run_backward", original))

    def _slow_data(self) -> None:
        from torch.utils.data import dataloader

        names = ("_SingleProcessDataLoaderIter", "_MultiProcessingDataLoaderIter")
        for kind in (vars(dataloader)[name] for name in names):
            original = kind._next_data

            def next_data(loader: Any, original: Any = original) -> Any:
                self._wait()
                return original(loader)

            kind._next_data = next_data
            self._undo.append(lambda k=kind, o=original: setattr(k, "_next_data", o))  # type: ignore[misc]


def call_wrongly(kind: str) -> None:
    """Call a collective that no other rank calls now: `wrong-op`, or else `wrong-size`."""
    import torch
    import torch.distributed as dist

    if kind == "wrong-op":
        parts = [torch.zeros(1) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, torch.ones(1))
    else:
        dist.all_reduce(torch.ones(3))


_COMMAND_S = 10
_UNLIMITED = "40gbit"


class NetworkFaults:
    """The node's interface; `objection` says why it may not be touched."""

    def __init__(self, environ: dict[str, str] | None = None) -> None:
        """Read where this is from the environment."""
        text = (os.environ if environ is None else environ).get("PERDURE_LAB", "")
        lab = json.loads(text) if text else {}
        self._interface = str(lab.get("interface", ""))
        self._addresses = tuple(lab.get("addresses", ()))

    def find_objection(self, args: dict[str, Any]) -> str:
        """Return why such a fault cannot be; empty where it can."""
        if not self._interface:
            return "network faults need nodes with networks of their own: see docs/lab.md"
        if not -1 <= int(args.get("to", -1)) < len(self._addresses):
            return f"there is no node {args['to']}"
        return ""

    def strike(self, kind: str, args: dict[str, Any]) -> None:
        """Carry it out.

        Raises:
            OSError, subprocess.SubprocessError: `ip` or `tc` is missing or failed.
        """
        if kind == "link-down":
            self._run("ip", "link", "set", self._interface, "down")
            return
        self._tc("qdisc", "replace", "root", "handle", "1:", "htb", "default", "10")
        to = int(args.get("to", -1))
        rate = f"{float(args.get('mbit', 100.0)):g}mbit" if kind == "slow-link" else _UNLIMITED
        handle = "1:10"
        if to >= 0:
            handle = "1:20"
            self._tc("class", "replace", *_class("1:10", _UNLIMITED))
            match = ("u32", "match", "ip", "dst", f"{self._addresses[to]}/32", "flowid", handle)
            self._tc("filter", "replace", "parent", "1:", "protocol", "ip", "prio", "1", *match)
        self._tc("class", "replace", *_class(handle, rate))
        queue = ("pfifo", "limit", "1000") if kind == "slow-link" else ("blackhole",)
        self._tc("qdisc", "replace", "parent", handle, *queue)

    def heal(self) -> None:
        """Undo all of them, whoever made them."""
        if self._interface:
            self._run("ip", "link", "set", self._interface, "up")
            self._tc("qdisc", "del", "root", check=False)

    def _tc(self, what: str, verb: str, *words: str, check: bool = True) -> None:
        self._run("tc", what, verb, "dev", self._interface, *words, check=check)

    def _run(self, *words: str, check: bool = True) -> None:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_COMMAND_S)
        if check and done.returncode:
            raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")


def _class(handle: str, rate: str) -> tuple[str, ...]:
    return ("parent", "1:", "classid", handle, "htb", "rate", rate, "quantum", "60000")


_BESIDE = ("crash", "stop", "exit", "memory", "heal", *STAGES, *NETWORK_FAULTS)
"""Done by any thread, whatever the training thread is doing."""
_TOLD_TIMEOUT_S = 1.0
_MIB = 1 << 20
_PAST_THE_AGENT_S = 0.3
"""For the news to leave the node before its network does."""
_GIL_S_MAX = 4000.0
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
        self._lock = free_in_child(threading.Lock())
        self._waiting: list[tuple[int, InjectFault]] = []
        self._early: set[str] = set()
        """Those for a step that were asked for before there were steps."""
        self._slow_s = 0.0
        self._slow_left = 0
        self.step = -1
        """Committed steps; -1 while no loop of `run.steps` runs."""
        self.next_step = NEVER
        """The earliest step before which the training thread has to call `act`."""
        self.arm_collectives: Callable[[Callable[[], None] | None], None] | None = None
        """Set with the compiled recorder: calls the given before each collective."""
        self.arm_forward: Callable[[Callable[[], None]], bool] | None = None
        """Set where torch may come: calls the given once, in the next forward pass."""
        self._network = NetworkFaults()
        self._slowdowns: list[Slowdown] = []
        self._healed = threading.Event()
        """What runs now shall end."""

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
                if self.step < 0 <= order.at_step:
                    self._early.add(order.id)
            if self.step >= 0 or order.at_step >= 0:
                return
            if self.arm_collectives is not None:
                self.arm_collectives(self._before_collective)
            elif self.arm_forward is not None:
                self.arm_forward(self._before_forward)

    def act(self, step: int) -> None:
        """Do what is due before step `step` begins. Called by the training thread."""
        self._strike(step, lambda order: order.at_step <= step)

    def _strike(self, step: int, is_due: Callable[[InjectFault], bool]) -> None:
        with self._lock:
            due = [order for _, order in self._waiting if is_due(order)]
            self._waiting = [item for item in self._waiting if not is_due(item[1])]
        for order in due:
            if order.id in self._early and order.at_step < step:
                self._tell(order, f"already at step {step}")
            else:
                self._harm(order, False)
        if self._slow_left:
            self._slow_left -= 1
            time.sleep(self._slow_s)
        with self._lock:
            waiting = min((at for at, _ in self._waiting), default=NEVER)
            self.next_step = 0 if self._slow_left else waiting

    def _find_objection(self, order: InjectFault) -> str:
        if order.kind not in FAULTS:
            return f"unknown fault {order.kind!r}: one of {', '.join(FAULTS)}"
        if order.kind in NETWORK_FAULTS and (why := self._network.find_objection(order.args)):
            return why
        if self.step < 0 and order.at_step < 0:
            places = (self.arm_collectives, self.arm_forward)
            if not self._can_strike_beside(order.kind) and places == (None, None):
                return (
                    f"{order.kind} needs run.steps() in the script, or the compiled recorder "
                    "to act at its next collective (perdure doctor says what it lacks)"
                )
        elif 0 <= order.at_step < self.step:
            return f"already at step {self.step}"
        return ""

    def _can_strike_beside(self, kind: str) -> bool:
        """Whether any thread can do it now, whatever the training thread is doing."""
        if kind == "oom":
            return self.step < 0 and bool(cgroups.list_parent_cgroups())
        return kind in _BESIDE

    def _before_collective(self) -> None:
        if not self._strike_without_steps() and self.arm_collectives is not None:
            self.arm_collectives(None)

    def _before_forward(self) -> None:
        if self._strike_without_steps() and self.arm_forward is not None:
            self.arm_forward(self._before_forward)

    def _strike_without_steps(self) -> bool:
        """Do what waits for no step; return whether there is more to come of it."""
        self._strike(NEVER - 1, lambda order: order.at_step < 0)
        with self._lock:
            return self._slow_left > 0 or any(order.at_step < 0 for _, order in self._waiting)

    def _tell(
        self, order: InjectFault, error: str = "", note: str = "", *, first: bool = False
    ) -> None:
        """Tell of a fault; what comes `first` is awaited, as the fault may end this process."""
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
        if first:
            self._drain(_TOLD_TIMEOUT_S)

    def _harm(self, order: InjectFault, beside: bool) -> None:
        """Do it; `beside` the training thread, where an exception would reach nobody."""
        if order.kind == "oom":
            self._run_out_of_memory(order, beside)
            return
        if order.kind in (*STAGES, *NETWORK_FAULTS, "heal"):
            self._begin(order)
            return
        self._tell(order, first=True)
        for_s = float(order.args.get("for_s", order.args.get("s", float("inf"))))
        match order.kind:
            case "crash":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                stop_self(for_s)
            case "exit":
                code = int(order.args.get("code", 1))
                if beside:
                    os._exit(code)
                sys.exit(code)
            case "spin":
                self._healed.clear()
                spin(for_s, self._healed)
            case "sleep":
                self._healed.clear()
                self._healed.wait(min(for_s, threading.TIMEOUT_MAX))
            case "gil":
                hold_interpreter(for_s)
            case "memory":
                self._healed.clear()
                press_memory(int(order.args.get("mb", _OOM_MB)), for_s, self._healed)
            case "wrong-op" | "wrong-size":
                call_wrongly(order.kind)
            case "slow":
                self._slow_s = float(order.args.get("s", 0.1))
                self._slow_left = int(order.args.get("steps", NEVER))

    def _begin(self, order: InjectFault) -> None:
        """Begin what goes on beside the training, and end it after `for_s`; or end it all."""
        args, undo = order.args, self.heal
        try:
            if order.kind == "heal":
                self.heal()
            elif order.kind in STAGES:
                extra_s = float(args.get("ms", 0.0)) / 1000
                factor = float(args.get("factor", 0.0 if extra_s else 1.5))
                slowdown = Slowdown(STAGES[order.kind], extra_s=extra_s, factor=factor)
                slowdown.begin()
                self._slowdowns.append(slowdown)
                undo = slowdown.end
            elif order.kind == "link-down":
                self._tell(order, first=True)
                time.sleep(_PAST_THE_AGENT_S)
            if order.kind in NETWORK_FAULTS:
                self._network.strike(order.kind, args)
                undo = self._network.heal
        except (ImportError, OSError, subprocess.SubprocessError) as error:
            self._tell(order, error=str(error))
            return
        if order.kind != "link-down":
            self._tell(order)
        if "for_s" in args and order.kind != "heal":
            timer = threading.Timer(float(args["for_s"]), undo)
            timer.daemon = True
            timer.start()

    def heal(self) -> None:
        """End every fault of this process that can end."""
        self._healed.set()
        self._slow_left = 0
        while self._slowdowns:
            self._slowdowns.pop().end()
        self._network.heal()

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
            note = f"a MemoryError at an address-space limit: {why}"
            self._tell(order, note=note, first=True)
            exhaust_memory(limit_mb)
        note = f"killed by the kernel at {limit_mb} MiB in cgroup {place}"
        self._tell(order, note=note, first=True)
        touch_memory(limit_mb + _OOM_SLACK_MB)
        say(f"the kernel did not enforce the limit of {place}")


def spin(duration_s: float, over: threading.Event) -> None:
    """Burn CPU in this thread for `duration_s`, or until `over`."""
    end = time.monotonic() + duration_s
    while time.monotonic() < end and not over.is_set():
        pass


def stop_self(duration_s: float) -> None:
    """SIGSTOP this process; a small one of its own wakes it after `duration_s`."""
    if duration_s < float("inf"):
        wake = f"sleep {duration_s:.3f}; kill -CONT {os.getpid()}"
        subprocess.Popen(("sh", "-c", wake), start_new_session=True)
    os.kill(os.getpid(), signal.SIGSTOP)


def hold_interpreter(duration_s: float) -> None:
    """Hold the interpreter's lock in native code, as an extension that does not release it."""
    us = int(min(duration_s, _GIL_S_MAX) * 1e6)
    ctypes.PyDLL(None).usleep(ctypes.c_uint(us))


def press_memory(size_mb: int, duration_s: float, over: threading.Event) -> None:
    """Take `size_mb` and write to all of it again and again, without the interpreter's lock."""
    end = time.monotonic() + duration_s
    with mmap.mmap(-1, size_mb * _MIB) as block:
        first = ctypes.c_char.from_buffer(block)
        while time.monotonic() < end and not over.is_set():
            ctypes.memset(ctypes.addressof(first), 1, len(block))
        del first  # A map that is still pointed into cannot be closed.


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
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
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
