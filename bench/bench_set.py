"""Live configuration on a running job: latency of a change, its rate, and kills in between.

usage: bench_set.py [CHANGES] [KILL_EVERY]

Changes are sent over one connection, as a program would (a start of the CLI costs more than the
change). Latency is from the request to the acknowledgement that all ranks run with it; every
KILL_EVERY-th change is preceded by a SIGKILL of a rank, every other time of the controller. At the
end the ranks' own trails are compared: a step on which two ranks, or two runs of it, differ counts.
Where the time of a first try goes is read off the journal: all stamps are of one clock.
"""

import asyncio
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from sweep import sweep_after_me

from perdure.adapters.nats import NatsBus
from perdure.model.bus.wire import Command, CommandReply, subject_commands
from perdure.model.codec import decode, encode
from perdure.model.errors import PerdureError
from perdure.model.events import BoundaryAnswered, BoundaryReached, CommandReceived, JournalEntry
from perdure.service.jobfiles import load_endpoint, read_mirror
from perdure.service.jobfolders import paths_of
from perdure.worker.steering.config import Config

SCRIPT = Path(__file__).resolve().parent.parent / "tests/e2e/scripts/train_settings.py"
JOB, RANKS = "set", 2


def find_pid(parent: int, title: str) -> int:
    for process in psutil.Process(parent).children(recursive=True):
        if title in " ".join(process.cmdline()):
            return process.pid
    return 0


async def change(bus: NatsBus, id_: str, value: float) -> CommandReply:
    """Ask until there is an answer: the controller may just be dead."""
    command = Command(id=id_, kind="set", args={"changes": {"lr": value}}, who="bench")
    deadline = time.monotonic() + 120
    while True:
        try:
            data = await bus.request(subject_commands(JOB), encode(command), timeout_s=5.0)
            return decode(data, CommandReply)
        except PerdureError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.1)


def find_phases(home: str, spans: dict[str, tuple[float, float]]) -> dict[str, float]:
    """Return the median ms of each phase of the changes whose first try succeeded.

    `spans` has (sent, answered) in job time, by the command's id.
    """
    phases: dict[str, list[float]] = {}
    windows: dict[str, list[JournalEntry]] = {}
    window: list[JournalEntry] = []
    for entry in read_mirror(paths_of(home, JOB)) or ():
        if isinstance(entry.body, CommandReceived):
            window = windows[entry.body.id] = []
        window.append(entry)
    for id_, entries in windows.items():
        answers = [
            e for e in entries if isinstance(e.body, BoundaryAnswered) and not e.body.planned
        ]
        ends = [e for e in entries if isinstance(e.body, BoundaryReached)]
        both = len(answers) == len(ends) == RANKS
        if id_ not in spans or not both or not all(e.body.ok for e in answers):
            continue
        sent, answered = spans[id_]
        stamps = {
            "begin": sent,
            "command to controller": entries[0].at_s,
            "synced, asked, all have answered": answers[-1].at_s,
            "synced, told, all ranks at the step": max(e.body.at_s for e in ends),
            "their reports at the controller": ends[-1].at_s,
            "synced, reply": answered,
        }
        for (_, before), (name, after) in itertools.pairwise(stamps.items()):
            phases.setdefault(name, []).append(1e3 * (after - before))
    return {name: round(statistics.median(ms), 1) for name, ms in phases.items()}


async def measure(home: str, pid: int, changes: int, kill_every: int) -> dict[str, object]:
    endpoint = load_endpoint(paths_of(home, JOB))
    bus = await NatsBus.connect(endpoint, name="bench", timeout_s=30)
    spans: dict[str, tuple[float, float]] = {}
    calm, kills, after, refused = [], 0, [], dict[str, int]()
    epochs = [0]
    began = time.monotonic()
    for number in range(changes):
        killed = bool(kill_every) and number % kill_every == kill_every - 1
        if killed:
            kills += 1
            victim = find_pid(pid, "perdure controller" if kills % 2 else "perdure rank")
            if victim:
                os.kill(victim, signal.SIGKILL)
        sent = time.monotonic()
        reply = await change(bus, f"c{number}", (number % 9 + 1) / 10)
        took = time.monotonic() - sent
        (after if killed else calm).append(took)
        if not killed:
            begun = sent + endpoint.clock_offset_s
            spans[f"c{number}"] = (begun, begun + took)
        epochs.append(int(reply.result.get("epoch", epochs[-1])))
        if not reply.ok:
            refused[reply.reason] = refused.get(reply.reason, 0) + 1
    wall = time.monotonic() - began
    await bus.close()
    return {
        "tries_a_change": round(epochs[-1] / changes, 2),
        "first_try": round(sum(b - a == 1 for a, b in itertools.pairwise(epochs)) / changes, 2),
        "changes": changes, "refused": refused, "kills": kills, "wall_s": round(wall, 1),
        "changes_per_s": round(changes / wall, 2),
        "latency_ms_median": round(1e3 * statistics.median(calm), 1),
        "latency_ms_p90": round(1e3 * sorted(calm)[int(0.9 * len(calm))], 1),
        "phases_ms_median": find_phases(home, spans),
        "latency_after_kill_s": [round(s, 2) for s in after],
    }  # fmt: skip


def count_differences(folder: Path) -> tuple[int, int]:
    """Return (steps seen, steps on which any two runs of it differ)."""
    values: dict[int, set[tuple[float, float, str]]] = {}
    for path in folder.glob("rank-*.jsonl"):
        rows = []
        for line in path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue  # Cut short by a kill.
        for row, later in itertools.pairwise(rows):
            # The step under way at a kill was never committed: it may be made with a new value.
            if row["generation"] == later["generation"]:
                values.setdefault(row["step"], set()).add((row["lr"], row["applied"], row["mode"]))
    return len(values), sum(len(v) > 1 for v in values.values())


def measure_read() -> float:
    """Return the cost of one read of `run.config.lr`, in ns."""
    config, count = Config().declare("lr", float, default=0.1), 200_000
    best = 1e9
    for _ in range(5):
        began = time.perf_counter_ns()
        for _ in range(count):
            _ = config.lr
        best = min(best, (time.perf_counter_ns() - began) / count)
    return best


def main() -> None:
    changes = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    kill_every = int(sys.argv[2]) if len(sys.argv) > 2 else 20
    with tempfile.TemporaryDirectory() as folder:
        home, trail = str(Path(folder) / "state"), Path(folder) / "trail"
        trail.mkdir()
        env = {**os.environ, "PERDURE_HOME": home}
        run = subprocess.Popen(
            [sys.executable, "-m", "perdure", "run", "-n", str(RANKS), "--name", JOB,
             "--max-restarts", "100", str(SCRIPT), "--steps", "1000000", "--pace-s", "0.005",
             "--trail", str(trail)],
            env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            deadline = time.monotonic() + 120
            while not list(trail.glob("rank-*.jsonl")) and time.monotonic() < deadline:
                time.sleep(0.5)
            time.sleep(3)
            result = asyncio.run(measure(home, run.pid, changes, kill_every))
        finally:
            run.send_signal(signal.SIGTERM)
            try:
                run.wait(60)
            except subprocess.TimeoutExpired:
                for process in psutil.Process(run.pid).children(recursive=True):
                    process.kill()
                run.kill()
        result["steps"], result["steps_that_differ"] = count_differences(trail)
    result["read_ns"] = round(measure_read(), 1)
    result["load"] = round(os.getloadavg()[0], 1)
    print(json.dumps(result))


if __name__ == "__main__":
    sweep_after_me()
    main()
