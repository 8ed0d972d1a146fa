"""When a verdict is reported, and when it is acted upon, beside torchrun: fault x depth.

    bench_certainty.py --out certainty.jsonl [--only NAME ...] [--repeat 1]
    bench_certainty.py --table certainty.jsonl

Each piece is one job of two ranks that harms itself (`scripts/harmed.py`) under `perdure run`, or
under torchrun with one restart. OUT gets a line a piece and is resumed: what is in it is not done
again. The process group's own time-out is 60 s where a piece waits for it, so that it can be
waited for; torch's default is 1800 s for gloo and 600 s for NCCL. A dead link needs root and
network namespaces (docs/lab.md); without them its piece says so.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil
from sweep import sweep_after_me

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.lab import network  # noqa: E402
from tests.lab.job import LabJob  # noqa: E402

SCRIPT = Path(__file__).parent / "scripts" / "harmed.py"
TIMEOUT_S = 60.0
FOR_S = 40.0
LIMIT_S = 150.0
WAITS = ("sleep", "spin", "SIGSTOP", "desync", "circle")
"""Faults at which torchrun, or perdure, waits for the process group's time-out."""
FAULTS = ("SIGKILL", "SIGSTOP", "desync", "circle", "exit", "sleep", "spin", "silent", "evaluate")
DEPTHS = ("supervised", "resumable")
PIECES = [
    *(f"{fault} / {depth}" for fault in FAULTS for depth in DEPTHS),
    "agent gap / supervised",
    "dead link / supervised",
    *(f"{fault} / torchrun" for fault in FAULTS),
]

Row = dict[str, Any]


def read_log(path: Path) -> list[tuple[str, int, float, int]]:
    """Return (kind, rank, monotonic, step) of all lines that are whole."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        kind, rank, at_s, step = line.split()
        rows.append((kind, int(rank), float(at_s), int(step)))
    return rows


def make_command(launcher: str, fault: str, log: Path, *, declare: bool) -> list[str]:
    """Return the command line of one piece."""
    words = [str(SCRIPT), "--fault", fault, "--trail", str(log), "--for-s", str(FOR_S)]
    words += ["--timeout-s", str(TIMEOUT_S)] if fault in WAITS else []
    words += ["--declare"] if declare else []
    if launcher == "torchrun":
        more = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
        return [sys.executable, "-m", "torch.distributed.run", *more, *words]
    return [sys.executable, "-m", "perdure", "run", "--name", "job", "-n", "2", *words]


def run_piece(name: str) -> Row:
    """Run one piece; return its figures, in seconds after the fault, None for what was not."""
    fault, _, depth = name.partition(" / ")
    if fault == "dead link":
        return run_dead_link()
    with tempfile.TemporaryDirectory(prefix="certainty-") as folder:
        log = Path(folder) / "log"
        launcher = "torchrun" if depth == "torchrun" else "perdure"
        harm = "SIGKILL" if fault == "agent gap" else fault
        command = make_command(launcher, harm, log, declare=depth == "resumable")
        if fault == "agent gap":
            command += ["--at", "100000", "--steps", "400"]
        env = dict(os.environ, PERDURE_HOME=f"{folder}/state", OMP_NUM_THREADS="1", COLUMNS="140")
        code = None
        with open(Path(folder) / "out", "wb") as out:
            process = subprocess.Popen(command, env=env, cwd=folder, stdout=out, stderr=out)
            try:
                if fault == "agent gap":
                    stop_agent(log, process)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(LIMIT_S)
            finally:
                end(process)
        return fold(fault, launcher, code, read_log(log), Path(folder) / "state" / "jobs" / "job")


def end(process: subprocess.Popen[bytes]) -> None:
    """End a launcher and all that is below it."""
    with_children = [process]
    if process.poll() is None:
        root = psutil.Process(process.pid)
        with_children = [*root.children(recursive=True), root]
        process.send_signal(signal.SIGTERM)
        psutil.wait_procs(with_children, timeout=15)
        for each in with_children:
            if each.is_running():
                each.kill()
    process.wait()


def stop_agent(log: Path, process: subprocess.Popen[bytes]) -> None:
    """Stop the agent for two seconds, as a swapping host would; the supervisor gives it three."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        if sum(row[0] == "step" for row in read_log(log)) > 200:
            break
        time.sleep(0.1)
    for each in psutil.Process(process.pid).children(recursive=True):
        if "perdure agent" in " ".join(each.cmdline()):
            with open(log, "a", encoding="utf-8") as file:
                file.write(f"fault 0 {time.monotonic():.6f} -1\n")
            each.suspend()
            time.sleep(2.0)
            each.resume()
            return
    raise RuntimeError("no agent was found")


def fold(
    fault: str, launcher: str, code: int | None, rows: list[tuple[str, int, float, int]], job: Path
) -> Row:
    """Return the figures of a piece from its log and, under perdure, its journal."""
    fault_s = next((at for kind, _, at, _ in rows if kind == "fault"), None)
    if fault_s is None:
        return {"error": "the fault never took place", "code": code}
    begins = [at for kind, _, at, _ in rows if kind == "begin" and at > fault_s]
    steps = [at for kind, _, at, _ in rows if kind == "step" and begins and at > min(begins)]
    row: Row = {
        "code": code,
        "restarted_s": round(min(begins) - fault_s, 2) if begins else None,
        "stepping_s": round(min(steps) - fault_s, 2) if steps else None,
    }
    if launcher == "torchrun":
        return row
    endpoint = json.loads((job / "endpoint.json").read_text())
    fault_s += endpoint["clock_offset_s"]
    entries = [json.loads(line) for line in (job / "journal.jsonl").read_text().splitlines()]
    return row | fold_journal(entries, fault_s)


def fold_journal(entries: list[Row], fault_s: float) -> Row:
    """Return when the fault was reported and acted upon, by what, and on which ground."""
    row: Row = {"kind": None, "reported_s": None, "acted_s": None, "ground": "", "actions": 0}
    later = [e for e in entries if e["at_s"] >= fault_s - 0.5]
    for entry in later:
        body = entry["body"]
        if body["type"] == "VerdictReached":
            verdict = body["verdict"]
            if row["reported_s"] is None:
                row["reported_s"] = round(verdict["confirmed_s"] - fault_s, 2)
                row["kind"], row["acts_why"] = verdict["kind"], verdict.get("acts_why", "")
                row["acts_at_s"] = round(verdict.get("acts_s", 0.0) - fault_s, 1)
            if verdict.get("actionable") and row["acted_s"] is None:
                row["acted_s"] = round(entry["at_s"] - fault_s, 2)
                row["ground"] = verdict.get("ground", "")
        record = body.get("record", {})
        failed = (record.get("code") or record.get("signal")) and not record.get("asked")
        if body["type"] == "RankExited" and failed and row["acted_s"] is None:
            row["acted_s"] = round(entry["at_s"] - fault_s, 2)
            row["kind"], row["ground"] = row["kind"] or "Crash", "ended"
            row["reported_s"] = row["reported_s"] or row["acted_s"]
        if body["type"] == "NodeLost":
            row["actions"] += 1
    started = {e["body"]["generation"] for e in later if e["body"]["type"] == "RanksStarted"}
    row["actions"] += len(started)
    return row


def run_dead_link() -> Row:
    """Drop all that one node sends another, across network namespaces."""
    why = network.why_not()
    if why:
        return {"error": f"not measured: {why}"}
    with tempfile.TemporaryDirectory(prefix="certainty-") as folder, network.Lab(4) as lab:
        job = LabJob(lab, Path(folder), "job", policy="restart")
        try:
            job.wait_training()
            job.wait(lambda: False, 10.0)
            src, dst = job.find_busy_links()[0]
            told = job.inject("drop-link", src, to=float(dst), for_s=60.0)
            job.wait(lambda: any(v["actionable"] for v in job.journal.open.values()), 45.0)
            job.wait(lambda: False, 3.0)
            return {"code": None, **fold_journal(job.journal.entries, told["at_s"])}
        finally:
            job.end()


def render_table(rows: list[Row]) -> str:
    """Return docs/verdicts.md's table: medians where there are several."""
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[row["name"]].append(row)

    def show(name: str, key: str) -> str:
        values = [row.get(key) for row in found.get(name, ())]
        numbers = [value for value in values if value is not None]
        if not found.get(name):
            return "not measured"
        return f"{statistics.median(numbers):.1f} s" if numbers else "never"

    lines = [
        "| fault | depth | reported after | acted upon after | ground | torchrun restarts after |",
        "|---|---|---|---|---|---|",
    ]
    for name in (n for n in PIECES if not n.endswith("torchrun")):
        fault, _, depth = name.partition(" / ")
        grounds = sorted({str(r.get("ground") or "") for r in found.get(name, ())} - {""})
        other = f"{fault} / torchrun"
        cells = [fault, depth, show(name, "reported_s"), show(name, "acted_s")]
        theirs = show(other, "restarted_s") if other in PIECES else "not measured"
        lines.append(f"| {' | '.join([*cells, ', '.join(grounds), theirs])} |")
    return "\n".join(lines)


def main() -> None:
    """Run what is missing, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--only", nargs="*", default=[], help="words that a piece's name has")
    parser.add_argument("--repeat", type=int, default=1)
    args = parser.parse_args()
    if args.table is not None:
        print(render_table([json.loads(line) for line in args.table.read_text().splitlines()]))
        return
    sweep_after_me()
    done = [json.loads(line) for line in args.out.read_text().splitlines()] if (
        args.out is not None and args.out.exists()
    ) else []  # fmt: skip
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT
    ).stdout.strip()
    for repetition in range(args.repeat):
        for name in PIECES:
            wanted = not args.only or any(word in name for word in args.only)
            if not wanted or any((r["name"], r["n"]) == (name, repetition) for r in done):
                continue
            load = os.getloadavg()[0]
            row = {"name": name, "n": repetition, "commit": commit, "load": round(load, 1)}
            row |= run_piece(name)
            print(json.dumps(row), flush=True)
            if args.out is not None:
                with open(args.out, "a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
