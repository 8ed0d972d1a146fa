"""Real hours: healthy jobs under `perdure run`, in pieces of minutes, and what was said of them.

What was said is in the journal, and whether it was true is judged by the machine itself: `HostBusy`
is right where others' processes took the cores at the time, as this process has measured it.
"""

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from perdure.model.codec import decode
from perdure.model.events import JournalEntry

from .record import list_step_times, record_beats

Row = dict[str, Any]
SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "healthy.py"
KINDS = (
    "ddp", "accumulate", "fsdp2", "experts", "packed", "evaluate", "save", "compile", "collect",
    "storage", "neighbours", "pause", "pipeline",
)  # fmt: skip
STEPS_KEPT = 2000
END_S = 120.0
FULL, OTHERS = 0.8, 0.1
"""Shares of the cores, by all and by others, from which a machine is busy with others' work."""
SLACK_S, LATE_S = 12.0, 1.0
"""For so long before it a load explains a `HostBusy`; so long after it a silence is told of."""


def run_piece(kind: str, seconds: float, seed: int, ranks: int = 2) -> Row:
    """Return what was said of one real job of about so many seconds."""
    chance = random.Random(f"{seed} {kind}")
    step_s = chance.choice((0.05, 0.2, 0.5))
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="perdure-healthy-") as home:
        command = [sys.executable, "-m", "perdure", "run", "--name", "job", "-n", "1"]
        command += ["--nodes", str(ranks), "--spares", "1", str(SCRIPT), kind]
        command += ["--seconds", f"{seconds:g}", "--step-s", f"{step_s:g}", "--seed", str(seed)]
        trail = Path(home) / "trail"
        command += ["--trail", str(trail)]
        env = dict(os.environ, PERDURE_HOME=home, OMP_NUM_THREADS="1")
        with open(Path(home) / "out", "wb") as out:
            job = subprocess.Popen(command, env=env, stdout=out, stderr=out, cwd=home)
        watch = MachineWatch(job.pid, chance if kind == "neighbours" else None)
        watch.start()
        try:
            beats = asyncio.run(record_beats(home, "job", seconds + 20.0))
            code = job.wait(END_S)
        except (TimeoutError, subprocess.TimeoutExpired):
            code, beats = None, []
        finally:
            watch.end()
            if job.poll() is None:
                job.send_signal(signal.SIGINT)
                job.wait(END_S)
        journal = Path(home) / "jobs" / "job" / "journal.jsonl"
        entries = [decode(line, JournalEntry) for line in journal.read_bytes().splitlines()]
        text = (Path(home) / "out").read_text(errors="replace")
        alone = read_trail(trail)
    own = list_step_times(beats)
    return {
        "real": kind, "seed": seed, "ranks": ranks, "step_s": step_s, "seconds": seconds,
        "code": code, "load": round(load, 1), "load_end": round(os.getloadavg()[0], 1),
        "at": time.strftime("%FT%TZ", time.gmtime()),
        "said": judge_entries(entries, watch, alone),
        "own": {str(rank): shorten(times) for rank, times in own.items()},
        **({} if code == 0 else {"output": text[-800:]}),
    }  # fmt: skip


def shorten(times: list[float]) -> list[float]:
    """Return step times to 0.1 ms, as many as are kept."""
    return [round(each, 4) for each in times[-STEPS_KEPT:]]


def read_trail(trail: Path) -> list[tuple[int, float, float]]:
    """Return which rank was alone, from when until when."""
    lines = trail.read_text().splitlines() if trail.exists() else []
    return [(int(rank), float(a), float(b)) for rank, a, b in (line.split() for line in lines)]


def judge_entries(
    entries: list[JournalEntry], watch: "MachineWatch", alone: list[tuple[int, float, float]]
) -> list[Row]:
    """Return the verdicts and actions of a journal, each with whether it was true.

    `alone` says which rank was alone when: a hang that names it is counted apart.
    """
    said: dict[tuple[str, str], Row] = {}
    rows: list[Row] = []
    formed = -1
    for entry in entries:
        body: Any = entry.body
        match type(body).__name__:
            case "VerdictReached":
                key = (body.verdict.kind, str(body.verdict.culprit))
                if key not in said:
                    right = key[0] == "HostBusy" and watch.was_busy(entry.at_s)
                    hangs = key[0] in ("ComputeHang", "CommHang")
                    silent = hangs and any(
                        body.verdict.culprit.rank == rank and a <= entry.at_s <= b + LATE_S
                        for rank, a, b in alone
                    )
                    said[key] = row = {
                        "at_s": entry.at_s, "kind": key[0], "culprit": key[1], "right": right,
                        "silent": silent, "reason": body.verdict.reason[:200], "lasted_s": None,
                    }  # fmt: skip
                    rows.append(row)
            case "VerdictWithdrawn":
                row = said.pop((body.verdict.kind, str(body.verdict.culprit)), {})
                row["lasted_s"] = round(entry.at_s - row.get("at_s", entry.at_s), 2)
            case "NodeLost":
                rows.append({"at_s": entry.at_s, "kind": "NodeLost", "reason": body.reason})
            case "Decision" if body.action == "AssignNodes":
                words = body.summary.split()
                if words[1] == "store" and int(words[3].rstrip(",")) > formed:
                    formed = int(words[3].rstrip(","))
                    if formed:
                        rows.append({"at_s": entry.at_s, "kind": "restart", "reason": body.reason})
            case _:
                pass
    return rows


class MachineWatch(threading.Thread):
    """Notes what others use of the cores; makes them busy itself, as a neighbour would."""

    def __init__(self, pid: int, chance: random.Random | None) -> None:
        """Watch beside the job that `pid` runs; with `chance` burn CPU now and then."""
        super().__init__(daemon=True)
        self._pid, self._chance = pid, chance
        self._over = threading.Event()
        self._busy: list[tuple[float, bool]] = []
        self._burners: list[subprocess.Popen[bytes]] = []

    def was_busy(self, at_s: float) -> bool:
        """Return whether others kept the cores busy shortly before `at_s`."""
        return any(busy for t, busy in self._busy if at_s - SLACK_S <= t <= at_s + 1.0)

    def run(self) -> None:
        """Look once a second."""
        cores = psutil.cpu_count() or 1
        used = self._measure_own()
        psutil.cpu_percent()
        due_s = time.time() + 30.0
        while not self._over.wait(1.0):
            all_ = psutil.cpu_percent() / 100.0
            now = self._measure_own()
            own = sum(now[pid] - used.get(pid, now[pid]) for pid in now) / cores
            used = now
            self._busy.append((time.time(), all_ >= FULL and all_ - own >= OTHERS))
            if self._chance is not None and time.time() >= due_s:
                self._burn(self._chance.uniform(5.0, 40.0))
                due_s = time.time() + self._chance.uniform(60.0, 180.0)

    def _measure_own(self) -> dict[int, float]:
        found = {}
        try:
            processes = psutil.Process(self._pid).children(recursive=True)
        except psutil.Error:
            return {}
        for each in processes:
            try:
                times = each.cpu_times()
                found[each.pid] = times.user + times.system
            except psutil.Error:
                continue
        return found

    def _burn(self, seconds: float) -> None:
        code = f"import time\nend = time.time() + {seconds}\nwhile time.time() < end: pass"
        for _ in range(psutil.cpu_count() or 1):
            self._burners.append(subprocess.Popen([sys.executable, "-c", code]))

    def end(self) -> None:
        """Stop, and end what burns."""
        self._over.set()
        self.join(10.0)
        for each in self._burners:
            each.kill()
            each.wait(10.0)
