"""The nodes of a job of this machine: the processes below `perdure run --nodes`."""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from secrets import token_hex

import msgspec

from perdure.drill.gates import Gates, kill_all, kill_nodes
from perdure.launch.local import render
from perdure.model.bus.wire import Command
from perdure.model.errors import ConfigError, PerdureError
from perdure.model.events import JournalEntry
from perdure.model.job import JobSpec
from perdure.model.report import Snapshot
from perdure.service.commands import ask_controller
from perdure.service.controller.journal import read_journal
from perdure.service.jobfiles import load_endpoint, load_parts, load_snapshot
from perdure.service.jobfolders import is_alive, paths_of
from perdure.service.processes import list_living_descendants
from perdure_lab.live.fleets.fleet import Fleet, Node


def kill_tree(pid: int) -> None:
    """Kill a process and all of its descendants."""
    kill_all((pid, *list_living_descendants(pid)))


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
