"""One job in a laboratory: started, harmed and read by the real commands."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.lab.network import Lab, sh
from tests.waiting import PATIENCE_S

SCRIPT = Path(__file__).parent / "train.py"
_POLL_S = 0.05
_COMMAND_S = PATIENCE_S
_NICE = -15
_PRECEDENCE_S = 1.5
_KEYS = ("comm_hang", "compute_hang", "comm_slow", "straggler", "unhealthy_device")

Row = dict[str, Any]


@dataclass
class Journal:
    """`journal.jsonl` while it grows: entries so far, and the verdicts that are open."""

    path: Path
    entries: list[Row] = field(default_factory=list)
    open: dict[str, Row] = field(default_factory=dict)
    _at: int = 0

    def read(self) -> list[Row]:
        """Take what was written since; return it."""
        fresh: list[Row] = []
        with contextlib.suppress(FileNotFoundError), open(self.path, "rb") as file:
            file.seek(self._at)
            whole, newline, _ = file.read().rpartition(b"\n")
            if newline:
                self._at += len(whole) + 1
                fresh = [json.loads(line) for line in whole.splitlines()]
        for entry in fresh:
            self._take(entry["body"])
        self.entries += fresh
        return fresh

    def _take(self, body: Row) -> None:
        if body["type"] == "RanksStarted":
            old = [k for k, v in self.open.items() if v["generation"] < body["generation"]]
            for key in old:
                del self.open[key]
        if body["type"] in ("VerdictReached", "VerdictWithdrawn"):
            verdict = body["verdict"]
            key = f"{verdict['kind']} {verdict['culprit']}"
            if body["type"] == "VerdictReached":
                self.open[key] = verdict
            else:
                self.open.pop(key, None)

    def find(self, kind: str, since: int = 0) -> list[Row]:
        """Return the bodies of a kind among the entries from index `since` on."""
        return [e["body"] for e in self.entries[since:] if e["body"]["type"] == kind]


class LabJob:
    """`perdure run --placement`: `nodes` of the lab, `nproc` ranks on each."""

    def __init__(
        self,
        lab: Lab,
        home: Path,
        name: str,
        *options: str,
        nproc: int = 1,
        policy: str = "report",
        detect: str = "",
    ) -> None:
        """Start it; `policy` answers every verdict but a desync, `detect` is TOML."""
        self.lab, self.home, self.name = lab, home, name
        self.world = lab.nodes * nproc
        self.output = home / f"{name}.out"
        self.env = dict(os.environ, PERDURE_HOME=str(home / "state"), COLUMNS="140")
        self.journal = Journal(home / "state" / "jobs" / name / "journal.jsonl")
        answers = "\n".join(f'{key} = "{policy}"' for key in _KEYS)
        config = home / f"{name}.toml"
        config.write_text(
            f'script = "{SCRIPT}"\nargs = {json.dumps(options)}\nnodes = {lab.nodes}\n'
            f'nproc = {nproc}\ntee = "none"\n[restart]\nmax_restarts = 1000\n'
            f"same_fault_max = 1000\nwindow_max = 1000\ngrace_s = 0.2\n"
            f'[policy]\n{answers}\ndesync = "restart"\ncordon_after = 0\n[detect]\n{detect}\n'
        )
        placement = lab.write_placement(home)
        command = [sys.executable, "-m", "perdure", "run", "--name", name, "-c", str(config)]
        with open(self.output, "ab") as out:
            self.process = subprocess.Popen(
                [*command, "--placement", str(placement)],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self.env,
                cwd=home,
            )

    def text(self) -> str:
        """Return the end of what the command has printed so far."""
        return self.output.read_text(errors="replace")[-4000:]

    def cli(self, *words: str) -> str:
        """Run another perdure command against the same state; return its output."""
        done = subprocess.run(
            [sys.executable, "-m", "perdure", *words],
            env=self.env, cwd=self.home, capture_output=True, text=True, timeout=_COMMAND_S,
        )  # fmt: skip
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}{self.text()}"
        return done.stdout

    def wait(self, condition: Callable[[], Any], timeout_s: float) -> Any:
        """Return what `condition()` returns once that is true, or is at the deadline."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.journal.read()
            result = condition()
            if result or time.monotonic() >= deadline or self.process.poll() is not None:
                return result
            time.sleep(_POLL_S)

    def wait_training(self, generation: int = 0, timeout_s: float = PATIENCE_S) -> None:
        """Wait until a generation takes steps."""

        def steps() -> bool:
            found = self.journal.find("GenerationStepping")
            return any(body["generation"] >= generation for body in found)

        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not self.wait(steps, _PRECEDENCE_S):
            self.take_precedence()  # Of those that were not there before, too.
        self.take_precedence()
        assert steps(), f"no training in {timeout_s:g} s:\n{self.text()}"

    def take_precedence(self) -> None:
        """Let its processes, and this one, run before whatever else runs on the machine.

        A laboratory on a busy machine would measure the machine. Linux groups processes by
        session (autogroup), and between those only the group's own nice value counts.
        """
        own = psutil.Process()
        for process in (own, *own.children(recursive=True)):
            with contextlib.suppress(OSError, psutil.Error):
                process.nice(_NICE)
                Path(f"/proc/{process.pid}/autogroup").write_text(str(_NICE))

    def inject(self, kind: str, rank: int, **args: float) -> Row:
        """Harm a rank; return the journal's entry of it."""
        since = len(self.journal.entries)
        pairs = [word for k, v in args.items() for word in ("--arg", f"{k}={v:g}")]
        self.cli("inject", self.name, kind, "--rank", str(rank), *pairs)

        def told() -> Row | None:
            found = self.journal.find("FaultInjected", since)
            return next((b for b in found if b["kind"] == kind and b["rank"] == rank), None)

        body: Row | None = self.wait(told, PATIENCE_S)
        assert body is not None, f"{kind} was not told of:\n{self.text()}"
        assert not body.get("error"), body["error"]
        return body

    def heal_link(self, rank: int) -> None:
        """Bring the interface of a rank's node up again, which no order can reach."""
        node = rank * self.lab.nodes // self.world
        sh("ip", "-n", self.lab.space(node), "link", "set", "eth0", "up")

    def find_busy_links(self) -> list[tuple[int, int]]:
        """Return the directed links between nodes that carry much, as pairs of ranks."""
        moved: dict[tuple[int, int], int] = {}
        per_node = self.world // self.lab.nodes
        for body in self.journal.find("LinksNoted")[-3:]:
            for src, dst, _, count, *_ in body["links"]:
                if src // per_node != dst // per_node:
                    moved[src, dst] = moved.get((src, dst), 0) + count
        most = max(moved.values(), default=0)
        return sorted(link for link, count in moved.items() if count >= most / 3)

    def end(self) -> None:
        """End it, however."""
        try:
            family = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.Error:
            family = []
        for _ in range(2):
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(6)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()
