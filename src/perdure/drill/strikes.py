"""The faults, really made to a job that runs: by the harm that ranks can do themselves, or a kill.

Only processes below the drill's own `perdure run` are touched, by the pids that its own files tell.
This runs where that run is: on this machine, or on a box (`onbox.py`).
"""

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any, Generic, TypeVar

from perdure.drill.copies import RunFiles
from perdure.drill.gates import Gates, kill_nodes
from perdure.drill.grading import Strike
from perdure.drill.place import NotMadeError
from perdure.drill.planning import Act
from perdure.failpoints import SWITCH
from perdure.model.bus.wire import Command
from perdure.model.errors import PlatformError
from perdure.model.events import CheckpointSaved, FaultInjected, JournalEntry
from perdure.model.report import Snapshot
from perdure.service.commands import ask_controller
from perdure.service.jobfiles import load_endpoint, load_parts, read_mirror
from perdure.service.processes import list_living_descendants

R = TypeVar("R", bound=RunFiles)
INJECTED = {"crash": "crash", "stop": "stop", "hang": "spin", "slow": "slow-forward"}
"""What ranks do to themselves, as by `perdure inject`."""
SIGNALS = {"crash": signal.SIGKILL, "stop": signal.SIGSTOP}
_ANSWER_S = 20.0
_SLOW_MS_MIN = 20.0


@dataclass(slots=True)
class Target(Generic[R]):
    """A job that faults are made to."""

    run: R
    full: Path
    """While this file is there, no checkpoint can be written."""
    gates: Gates

    def switches(self) -> dict[str, str]:
        """Return the variable by which the job's disk can be made full."""
        return {SWITCH: f"checkpoint/written=error(ENOSPC),file={self.full}"}

    def now(self) -> float:
        """Return job time."""
        return time.monotonic() + load_endpoint(self.run.paths).clock_offset_s

    def read(self) -> list[JournalEntry]:
        """Return the journal so far."""
        return list(read_mirror(self.run.paths) or ())

    def ask(self, verb: str, args: dict[str, Any], timeout_s: float = _ANSWER_S) -> dict[str, Any]:
        """Return what the controller answers, with the command's `id`.

        Raises:
            NotMadeError: it refuses, or does not answer.
        """
        id_ = f"drill-{token_hex(6)}"
        command = Command(id_, verb, args, "drill")  # type: ignore[arg-type]
        try:
            reply = ask_controller(self.run.name, self.run.paths, command, timeout_s=timeout_s)
        except PlatformError as error:
            raise NotMadeError(error.message) from error
        if not reply.ok:
            raise NotMadeError(reply.reason)
        return {**reply.result, "id": id_}

    def strike(self, act: Act, seen: Snapshot, at_step: int) -> Strike:
        """Make a fault: those of ranks that declare steps at `at_step`, all others now.

        Raises:
            NotMadeError: it cannot be.
        """
        if act.fault in SIGNALS and at_step < 0:  # A program of its own has nobody inside.
            return self._signal(act, seen)
        if act.fault in INJECTED:
            return self._inject(act, seen, at_step)
        make = {
            "node": self._take_node, "torn": self._tear, "disk": self._fill,
            "controller": self._kill_part, "bus": self._kill_part,
        }[act.fault]  # fmt: skip
        return make(act, seen)

    def heal(self, act: Act) -> None:
        """End what can end."""
        if act.fault == "slow":
            with suppress(NotMadeError):
                self.ask("inject", {"rank": act.rank, "kind": "heal"})
        elif act.fault == "node":
            self.gates.open([act.node])
        elif act.fault == "disk":
            self.full.unlink(missing_ok=True)

    def _signal(self, act: Act, seen: Snapshot) -> Strike:
        number, pid = SIGNALS[act.fault], self._find_pid(act, seen)
        at_s = self.now()
        _kill(pid, number)
        return self._note(act, seen, f"rank {act.rank}: {number.name}", at_s, seen.step)

    def _inject(self, act: Act, seen: Snapshot, at_step: int) -> Strike:
        args: dict[str, Any] = {"rank": act.rank, "kind": INJECTED[act.fault]}
        what = {"crash": "SIGKILL", "stop": "SIGSTOP", "hang": "spins without progress"}
        text = f"rank {act.rank}: {what.get(act.fault, '')}"
        if act.fault == "slow":
            pace_s = 1.0 / seen.steps_per_s if seen.steps_per_s > 0 else 0.0
            args["ms"] = round(max(_SLOW_MS_MIN, 1000.0 * min(pace_s, 5.0)), 1)
            text = f"rank {act.rank}: every forward pass takes {args['ms']:g} ms more"
        if at_step >= 0:
            args["at_step"] = at_step
        id_ = self.ask("inject", args)["id"]
        deadline = time.monotonic() + _ANSWER_S + (at_step >= 0) * self._time_of(at_step, seen)
        while time.monotonic() < deadline:
            made = (e.body for e in self.read() if isinstance(e.body, FaultInjected))
            event = next((body for body in made if body.id == id_), None)
            if event is not None and event.error:
                raise NotMadeError(event.error)
            if event is not None:
                step = at_step if at_step >= 0 else seen.step
                return self._note(act, seen, text, event.at_s, step)
            if self.run.over:
                break
            time.sleep(0.05)
        raise NotMadeError(f"step {at_step} did not come" if at_step >= 0 else "no rank took it")

    def _time_of(self, step: int, seen: Snapshot) -> float:
        return 3.0 * max(0, step - seen.step) / max(seen.steps_per_s, 0.01)

    def _note(
        self, act: Act, seen: Snapshot, what: str, at_s: float, step: int, torn: str = ""
    ) -> Strike:
        saved = [e.body.step for e in self.read()
                 if isinstance(e.body, CheckpointSaved) and e.body.path != torn]  # fmt: skip
        return Strike(
            act.fault, at_s, step, act.rank, act.node, what, seen.generation,
            saved=max(saved, default=-1), torn=torn,
        )  # fmt: skip

    def _take_node(self, act: Act, seen: Snapshot) -> Strike:
        at_s = self.now()
        self.gates.shut([act.node])
        killed = kill_nodes(self.run.name, str(self.run.home), [act.node])
        text = (
            f"node {act.node}: {killed} processes killed, and none starts there until it is found"
        )
        return self._note(act, seen, text, at_s, seen.step)

    def _tear(self, act: Act, seen: Snapshot) -> Strike:
        """Cut the newest checkpoint, and kill a rank at once: no newer one shall take its place."""
        saved = [e.body for e in self.read() if isinstance(e.body, CheckpointSaved)]
        if len(saved) < 2:
            raise NotMadeError("there is no second checkpoint to go back to")
        newest = Path(saved[-1].path)
        if not newest.resolve().is_relative_to(self.run.own.resolve()):
            raise NotMadeError(f"{newest} is not the drill's own")
        files = [path for path in newest.rglob("*") if path.is_file() and not path.is_symlink()]
        files = [path for path in files if path.stat().st_nlink == 1]  # Else another's as well.
        if not files:
            raise NotMadeError(f"no files are in {newest} alone")
        largest = max(files, key=lambda path: path.stat().st_size)
        pid = self._find_pid(act, seen)
        os.truncate(largest, largest.stat().st_size // 2)
        at_s = self.now()
        _kill(pid)
        text = f"checkpoint of step {saved[-1].step}: {largest.name} cut in half; SIGKILL of rank "
        strike = self._note(act, seen, f"{text}{act.rank}", at_s, seen.step, str(newest))
        return strike

    def _fill(self, act: Act, seen: Snapshot) -> Strike:
        at_s = self.now()
        self.full.touch()
        with suppress(NotMadeError):  # It is refused by the disk, which is what is asked for.
            self.ask("checkpoint", {}, 60.0)
        return self._note(act, seen, "checkpoints: no space left on device", at_s, seen.step)

    def _kill_part(self, act: Act, seen: Snapshot) -> Strike:
        parts = load_parts(self.run.paths)
        pid = 0 if parts is None else parts.controller if act.fault == "controller" else parts.nats
        if not self._is_own(pid):
            raise NotMadeError("it has no process of its own here")
        at_s = self.now()
        _kill(pid)
        name = "the controller" if act.fault == "controller" else "nats-server"
        return self._note(act, seen, f"{name}: SIGKILL", at_s, seen.step)

    def _find_pid(self, act: Act, seen: Snapshot) -> int:
        """Return the process of the rank that is harmed.

        Raises:
            NotMadeError: it has none.
        """
        pid = next((row.pid for row in seen.ranks if row.rank == act.rank), 0)
        if not self._is_own(pid):
            raise NotMadeError(f"rank {act.rank} has no process")
        return pid

    def _is_own(self, pid: int) -> bool:
        """Return whether a process is below the drill's run; a number may be a stranger's now."""
        root = self.run.root
        return root > 0 and pid in list_living_descendants(root)


def _kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to a process.

    Raises:
        NotMadeError: it is gone.
    """
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        raise NotMadeError("it ended at that very moment") from None
