"""A real elastic job, as benches see it: what its ranks have committed, its journal, kills."""

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

PACED = Path(__file__).resolve().parent / "scripts" / "elastic_paced.py"
Row = dict[str, Any]


class Tail:
    """The lines of a file that grows, each read once: reading is not to disturb what is timed."""

    def __init__(self, path: Path) -> None:
        self.rows: list[Row] = []
        self._path, self._at = path, 0

    def read(self) -> list[Row]:
        """Return all rows so far."""
        if self._path.exists():
            with open(self._path, "rb") as file:
                file.seek(self._at)
                text = file.read()
            whole = text.rfind(b"\n") + 1
            self._at += whole
            self.rows += [json.loads(line) for line in text[:whole].splitlines()]
        return self.rows


class Job:
    """`perdure run` of the paced training; a context, at whose end it is stopped."""

    def __init__(self, ranks: int, *, spares: int = 0, state_mb: float = 0.0) -> None:
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        self._trail, self._home = folder / "trail", folder / "state" / "jobs" / "el"
        config = folder / "job.toml"
        config.write_text("[restart]\nwindow_max = 100000\n")
        command = [sys.executable, "-m", "perdure", "run", "--name", "el", "-n", str(ranks)]
        command += ["-c", str(config), *(["--spares", str(spares)] if spares else [])]
        self._out = open(folder / "out", "wb")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*command, str(PACED), str(self._trail), str(state_mb)],
            env=dict(os.environ, PERDURE_HOME=str(folder / "state")),
            stdout=self._out,
            stderr=self._out,
        )
        self._tails: dict[int, Tail] = {}
        self._journal = Tail(self._home / "journal.jsonl")
        self.world = list(range(ranks))

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        self._out.close()
        self._folder.cleanup()

    def rows(self, rank: int) -> list[Row]:
        """Return what a member has committed."""
        path = self._trail / f"rank-{rank}.jsonl"
        return self._tails.setdefault(rank, Tail(path)).read()

    def journal(self) -> list[Row]:
        """Return the journal's entries so far."""
        return self._journal.read()

    def clock_offset_s(self) -> float:
        """Return job time less CLOCK_MONOTONIC."""
        document = json.loads((self._home / "endpoint.json").read_text())
        return float(document["clock_offset_s"])

    def wait(self, condition: Callable[[], Any], what: str, timeout_s: float = 120.0) -> None:
        """Wait until `condition()` holds."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"no {what}: {Path(self._folder.name, 'out').read_text()[-2000:]}")
            time.sleep(0.02)

    def ready_spares(self) -> set[int]:
        """Return members that are up and in no world yet."""
        joined = {e["body"]["rank"] for e in self.journal() if e["body"]["type"] == "RankJoined"}
        gone = {
            e["body"]["record"]["rank"] for e in self.journal() if e["body"]["type"] == "RankExited"
        }
        return joined - gone - set(self.world)

    def kill(self, victim: int) -> float:
        """Kill a member; return when, in CLOCK_MONOTONIC."""
        title = f"perdure rank el g0 r{victim}:"
        children = psutil.Process(self.process.pid).children(recursive=True)
        pid = next(c.pid for c in children if title in " ".join(c.cmdline()))
        os.kill(pid, signal.SIGKILL)
        return time.monotonic()

    def kill_one(self, victim: int) -> dict[str, float]:
        """Kill a member; return its figures once the world is at full strength again."""
        left = [rank for rank in self.world if rank != victim]
        size, killed = len(self.world), self.kill(victim)

        def first(rank: int, full: bool) -> Row | None:
            found = None
            for row in reversed(self.rows(rank)):
                if row["at"] < killed:
                    break
                if victim not in row["world"] and (len(row["world"]) == size or not full):
                    found = row
            return found

        self.wait(lambda: all(first(rank, True) for rank in left), "full strength")
        ats = [row["at"] for row in self.rows(left[0])]
        usual = [b - a for a, b in itertools.pairwise(ats) if b < killed][-20:]
        nexts = [row for rank in left if (row := first(rank, False)) is not None]
        fulls = [row for rank in left if (row := first(rank, True)) is not None]
        full_at = max(row["at"] for row in fulls)
        beside = [b - a for a, b in itertools.pairwise(ats) if killed < a and b <= full_at]
        self.world = list(fulls[0]["world"])
        found = {
            "victim": victim,
            "total_s": max(row["at"] for row in nexts) - killed,
            "full_s": full_at - killed,
            "step_s": statistics.median(usual),
            "slowest_s": max(beside, default=0.0),
        }
        entries = self.journal()
        add_phases(found, entries, killed + self.clock_offset_s())
        add_join(found, entries, killed + self.clock_offset_s())
        return found


def add_phases(found: dict[str, float], entries: list[Row], killed_s: float) -> None:
    """Add where the time of a kill went, by the journal and the members' own stamps."""
    for index, entry in enumerate(entries):
        body = entry["body"]
        if body["type"] != "RankExited" or body["record"]["rank"] != found["victim"]:
            continue
        decided_s = entry["at_s"]
        after = [e["body"] for e in entries[index:] if e["body"]["type"] == "WorldReformed"]
        epoch = [
            e for e in after if e["epoch"] == after[0]["epoch"] and e["began_s"] < e["ordered_s"]
        ]
        found["die_s"] = body["record"]["at_s"] - killed_s
        found["reap_s"] = body["detected_s"] - body["record"]["at_s"]
        found["decide_s"] = decided_s - body["detected_s"]
        found["abort_s"] = max(e["ordered_s"] for e in epoch) - decided_s
        found["communicator_s"] = max(e["connected_s"] - e["ordered_s"] for e in epoch)
        found["state_s"] = max(e["formed_s"] - e["connected_s"] for e in epoch)
        formed_s = max(e["formed_s"] for e in epoch)
        found["commit_s"] = found["total_s"] - (formed_s - killed_s)
        found["redone"] = sum(e.get("redo", 0) for e in epoch)
        return


def add_join(found: dict[str, float], entries: list[Row], killed_s: float) -> None:
    """Add what the journal says of a rank that followed before it joined."""
    later = [e["body"] for e in entries if e["at_s"] >= killed_s]
    ready = next((e for e in later if e["type"] == "MemberReady"), None)
    if ready is None:
        return
    reforms = [e for e in later if e["type"] == "WorldReformed" and e["formed_s"] > ready["at_s"]]
    epoch = min((e["epoch"] for e in reforms), default=-1)
    members = [e for e in reforms if e["epoch"] == epoch and e["rank"] != ready["rank"]]
    if members:
        found["stall_s"] = max(e["formed_s"] - e["began_s"] for e in members)
    found["follow_s"], found["bytes"] = ready["took_s"], float(ready["bytes"])
    found["fresh"] = float(ready["step"] < 0)
