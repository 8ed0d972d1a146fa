"""The nodes of a job of this machine: the processes below `perdure run --nodes`.

A node that is taken has all its processes killed, the agent first, which would tell of its keeper.
Its supervisor would start the agent again at once; it does not while the node's file is locked
(`JobPaths.kept_away`). The kernel gives the lock back with whoever holds it, so that no node stays
away because a play was killed.
"""

import contextlib
import fcntl
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from secrets import token_hex

import msgspec

from perdure.adapters.host import read_environ
from perdure_lab.live.fleets.fleet import Fleet, Node
from perdure.launch.local import render
from perdure.model.bus.wire import Command
from perdure.model.errors import ConfigError, PerdureError
from perdure.model.events import JournalEntry
from perdure.model.job import JobSpec
from perdure.model.paths import JobPaths
from perdure.model.report import Snapshot
from perdure.service.commands import ask_controller
from perdure.service.controller.journal import read_journal
from perdure.service.jobfiles import load_endpoint, load_parts, load_snapshot, on_disk
from perdure.service.jobfolders import is_alive, paths_of
from perdure.service.processes import find_by_title, list_living_descendants

_DRIVEN = "driven"
"""A file beside those of nodes: locked while a trace is played."""


class Gates:
    """Which nodes of a job are kept away; none at first."""

    def __init__(self, paths: JobPaths) -> None:
        """Keep none away yet."""
        self._paths = paths
        self._held: dict[str, int] = {}

    def claim(self) -> None:
        """Be the only one who takes this job's nodes.

        Raises:
            ConfigError: another play does.
        """
        path = os.path.join(self._paths.away, _DRIVEN)
        if path in self._held:
            return
        try:
            self._lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            name = os.path.basename(self._paths.root)
            raise ConfigError(
                f"a trace is being played against job `{name}`", hint="wait, or end it by Ctrl-C"
            ) from None

    def shut(self, nodes: Iterable[int]) -> None:
        """Let nothing of these nodes start. What runs is not stopped."""
        for node in nodes:
            path = self._paths.kept_away(node)
            if path not in self._held:
                self._lock(path, fcntl.LOCK_EX)

    def open(self, nodes: Iterable[int]) -> None:
        """Let these nodes start."""
        for node in nodes:
            self._free(self._paths.kept_away(node))

    def free(self) -> None:
        """Keep no node away any more, and leave nothing behind."""
        for path in list(self._held):
            self._free(path)
        with contextlib.suppress(OSError):
            os.rmdir(self._paths.away)

    def _lock(self, path: str, how: int) -> None:
        with on_disk(f"keep nodes away by {path}"):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, how)
        except BaseException:
            os.close(fd)
            raise
        self._held[path] = fd

    def _free(self, path: str) -> None:
        if path in self._held:
            with contextlib.suppress(OSError):
                os.unlink(path)
            os.close(self._held.pop(path))


def kill_nodes(job: str, home: str, nodes: Sequence[int]) -> int:
    """Kill all that these nodes have, agents first; return how many processes that were."""
    parts = load_parts(paths_of(home, job))
    agents = [parts.agents[node] for node in nodes if parts and node in parts.agents]
    keepers = [pid for node in nodes for pid in find_by_title(f"perdure keeper {job} {node}")]
    agents, keepers = (
        [pid for pid in pids if _is_of(pid, job, home)] for pids in (agents, keepers)
    )
    ranks = [pid for root in (*agents, *keepers) for pid in list_living_descendants(root)]
    # An agent would tell of its keeper.
    return _kill(dict.fromkeys((*agents, *keepers, *ranks)))


def _is_of(pid: int, job: str, home: str) -> bool:
    """Return whether a process is this job's: below another home a job may have the same name.

    An agent that was killed before may have left its number to a stranger.
    """
    marks = read_environ(pid)
    same_home = os.path.realpath(marks.get("PERDURE_HOME", "")) == os.path.realpath(home)
    return marks.get("PERDURE_JOB") == job and same_home


def kill_tree(pid: int) -> None:
    """Kill a process and all of its descendants."""
    _kill((pid, *list_living_descendants(pid)))


def _kill(pids: Iterable[int]) -> int:
    """Kill processes in this order; return how many were there."""
    killed = 0
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed += 1
    return killed


def start_process(
    out: Path, command: Sequence[str], env: Mapping[str, str], cwd: str | None = None
) -> "subprocess.Popen[bytes]":
    """Start a process in a session of its own, which writes to the end of `out`."""
    with open(out, "ab") as file:
        return subprocess.Popen(
            command,
            env=os.environ | env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


class LocalFleet(Fleet):
    """A job under `perdure run --nodes`: a keeper, an agent and ranks for each node.

    With a folder it is started there, and ends with this object; without one it runs already.
    """

    def __init__(
        self, spec: JobSpec, home: str, folder: Path | None, *, stop_s: float = 60.0
    ) -> None:
        """Touch nothing yet. Each of three signals to end it has `stop_s`, then it is killed."""
        self.spec, self.job, self._home = spec, spec.name, home
        self.paths = paths_of(home, spec.name)
        self._folder, self._stop_s = folder, stop_s
        self._gates = Gates(self.paths)
        self._told: set[int] = set()
        """Nodes whose leaving was announced."""
        self.process: subprocess.Popen[bytes] | None = None

    def list_nodes(self) -> list[Node]:
        """Return the nodes of this machine, and those that joined it from elsewhere."""
        spec = self.spec
        if self._folder is None:
            if not is_alive(self.paths):
                raise ConfigError(
                    f"job `{self.job}` does not run",
                    hint="perdure status; a job file is started by the drive itself",
                )
        elif spec.remote or spec.growth:
            raise ConfigError(
                "nodes that join from elsewhere cannot be taken away from here",
                hint="leave `remote` and `nodes_max` out: all nodes are then of this machine",
            )
        here, joined = "this machine", "it joined from another machine"
        there = range(spec.local_nodes, spec.first_nodes)
        own = range(min(spec.local_nodes, spec.first_nodes))
        return [*(Node(n, here) for n in own), *(Node(n, "elsewhere", joined) for n in there)]

    def start(self) -> None:
        """Start the job, where there is a folder to do so."""
        if self._folder is None:
            self._gates.claim()
            return
        plan = render(self.spec, self._home)
        for path, content in plan.files.items():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(content)
        out = self._folder / "perdure.out"
        self.process = start_process(out, plan.command, plan.env, plan.cwd)

    def warn(self, nodes: Sequence[int], notice_s: float) -> None:
        """Announce the end of these nodes, as a monitor of the platform would."""
        self._told |= set(nodes)
        self._notify("preemption", nodes, notice_s)

    def take(self, nodes: Sequence[int]) -> None:
        """Kill all processes of these nodes, and let none start there."""
        self._gates.shut(nodes)
        kill_nodes(self.job, self._home, nodes)

    def give(self, nodes: Sequence[int]) -> None:
        """Let the nodes start.

        What was announced is over: a machine that comes is another one, but its boot id, by which
        the controller would know, is that of this machine.
        """
        self._gates.open(nodes)
        self._notify("preemption-withdrawn", [n for n in nodes if n in self._told])
        self._told -= set(nodes)

    def find_trouble(self) -> PerdureError | None:
        """Return nothing: to let a node start is to free a lock."""
        return None

    def _notify(self, kind: str, nodes: Sequence[int], grace_s: float = 0.0) -> None:
        said = {"kind": kind, "source": "trace", "grace_s": grace_s}
        self.ask_aside([("notify", said | {"node": node}, 5.0) for node in nodes])

    def ask_aside(self, asked: list[tuple[str, dict[str, object], float]]) -> None:
        """Ask the controller while the trace goes on, each thing once the one before is done."""

        def ask() -> None:
            for verb, args, deadline_s in asked:
                with contextlib.suppress(PerdureError):
                    self.ask(verb, args, deadline_s)

        threading.Thread(target=ask, daemon=True).start()

    def ask(self, verb: str, args: dict[str, object], deadline_s: float) -> None:
        """Ask the controller for something that takes so long at most.

        Raises:
            PlatformError: it does not answer.
        """
        document = {"id": f"replay-{token_hex(6)}", "kind": verb, "args": args, "who": "replay"}
        command = msgspec.convert(document, Command)
        ask_controller(self.job, self.paths, command, timeout_s=deadline_s + 15.0)

    def read_snapshot(self) -> Snapshot | None:
        """Return the newest status that a controller wrote."""
        return load_snapshot(self.paths)

    def compute_offset_s(self) -> float:
        """Return job time less CLOCK_MONOTONIC."""
        return load_endpoint(self.paths).clock_offset_s

    def read_entries(self) -> list[JournalEntry]:
        """Return the job's journal."""
        return list(read_journal(self.paths))

    def over(self) -> bool:
        """Return whether the job has ended."""
        if self.process is not None:
            return self.process.poll() is not None
        return self._folder is None and not is_alive(self.paths)

    def end(self, *, stop: bool = True) -> None:
        """Stop the job; by force if it takes long, since nodes that are away do not answer.

        One that ran already is only asked to, and waited for; or it goes on with all its nodes.
        """
        if self._folder is None:
            self._leave(stop=stop)
        elif self.process is not None:
            process, self.process = self.process, None
            self._stop(process)
        self._gates.free()

    def _leave(self, *, stop: bool) -> None:
        """Let a job that ran already go on, or ask it to stop."""
        parts = load_parts(self.paths)
        withdrawn = [("notify", {"kind": "preemption-withdrawn", "source": "trace", "grace_s": 0.0,
                                 "node": node}, 5.0) for node in sorted(self._told)]  # fmt: skip
        self._gates.free()  # A node that is away promises no step at which all save.
        if not stop or parts is None or not is_alive(self.paths):
            for verb, args, deadline_s in withdrawn if not stop else ():
                with contextlib.suppress(PerdureError):
                    self.ask(verb, args, deadline_s)
            return
        for number in range(3):
            with contextlib.suppress(ProcessLookupError):
                os.kill(parts.run, signal.SIGTERM)
            deadline = time.monotonic() + (self._stop_s if number < 2 else 10.0)
            while is_alive(self.paths) and time.monotonic() < deadline:
                time.sleep(0.1)
            if not is_alive(self.paths):
                return

    def _stop(self, process: "subprocess.Popen[bytes]") -> None:
        for _ in range(3):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(self._stop_s)
                return
            except subprocess.TimeoutExpired:
                continue
            except KeyboardInterrupt:  # Once more: it is not waited for.
                break
        kill_tree(process.pid)
        process.wait()
