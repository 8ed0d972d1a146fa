"""The matrix: every fault x world size x severity, many times over in running jobs.

    bench_matrix.py --world 4 --out matrix.jsonl [--minutes 30] [--repeat 10] [--only slow-link]
    bench_matrix.py --healthy 60 --world 4 --out healthy.jsonl
    bench_matrix.py --table matrix.jsonl [...]

Each repetition harms a rank picked at random (by seed) in a job that trains across network
namespaces, reads the journal, heals, and waits until nothing is blamed. Verdicts are only
reported, so that one job holds many faults; deaths and wrong calls restart its world. OUT gets a
line a repetition and is resumed: what is in it is not done again. Needs root (docs/lab.md).
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sweep import sweep_after_me

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.lab import network  # noqa: E402
from tests.lab.episode import (  # noqa: E402
    HANGS,
    LINKS,
    SLOW_STAGES,
    Fault,
    name_culprit,
    run_episode,
    wait_quiet,
)
from tests.lab.job import LabJob  # noqa: E402

STEP_S = 0.06
SHAPES = {2: (2, 1), 4: (4, 1), 8: (4, 2)}
"""World size -> nodes and ranks on each."""
SEVERITIES: dict[str, tuple[str, tuple[float, ...], str]] = {
    **{kind: ("for_s", (2.5, 4.0, 8.0), " s") for kind in HANGS},
    **{kind: ("factor", (1.2, 1.5, 2.0), "x") for kind in SLOW_STAGES},
    "slow-link": ("mbit", (200.0, 100.0, 40.0), " Mbit/s"),
    "drop-link": ("for_s", (4.0, 8.0, 12.0), " s"),
    "link-down": ("for_s", (4.0, 8.0, 20.0), " s"),
    "memory": ("mb", (64.0, 256.0, 1024.0), " MB"),
    "crash": ("", (0.0,), ""),
    "exit": ("", (0.0,), ""),
    "wrong-op": ("", (0.0,), ""),
    "wrong-size": ("", (0.0,), ""),
}
LEARN_S = 9.0
"""Training before the first fault of a generation."""
JOB_EPISODES = 40
"""Then a new job: what a healed hang teaches the detector shall not pile up."""


def make_fault(kind: str, severity: float, rng: random.Random, job: LabJob) -> Fault | None:
    """Return the fault, with a victim picked by `rng`; None where it cannot be yet."""
    name, _, _ = SEVERITIES[kind]
    per_node = job.world // job.lab.nodes
    rank = rng.randrange(job.world)
    args = {name: severity} if name else {}
    link = None
    if kind in LINKS:
        links = job.find_busy_links()
        if not links:
            return None
        link = rng.choice(links)
        rank, args["to"] = link[0], link[1] // per_node
    patience_s = 8.0
    if kind in SLOW_STAGES:
        patience_s = 30.0 if severity < 1.5 else 12.0
        args["for_s"] = patience_s + 10
    elif kind == "slow-link":
        patience_s = 15.0
        args["for_s"] = patience_s + 10
    elif kind in ("spin", "sleep"):
        patience_s = severity
    elif kind in ("drop-link", "link-down", "stop", "gil"):
        patience_s = severity + 0.5
    elif kind == "memory":
        args["for_s"] = patience_s = 6.0
    elif kind in ("wrong-op", "wrong-size", "crash", "exit"):
        patience_s = 20.0
    return Fault(kind, rank, args, link, patience_s)


def plan(args: argparse.Namespace, done: set[tuple[Any, ...]]) -> Iterator[tuple[str, float, int]]:
    """Yield kind, severity and repetition: all of one repetition before the next."""
    only = set(args.only.split(",")) if args.only else set(SEVERITIES)
    for rep in range(args.repeat):
        cells = [(k, s) for k, (_, severities, _) in SEVERITIES.items() for s in severities]
        random.Random(f"{args.seed} {rep} {args.world}").shuffle(cells)
        # Deaths last: each begins a new generation, which learns anew.
        cells.sort(key=lambda cell: cell[0] in ("crash", "exit", "wrong-op", "wrong-size"))
        for kind, severity in cells:
            if kind in only and (kind, severity, args.world, rep) not in done:
                yield kind, severity, rep


class Bench:
    """The job under test, begun anew where it has ended."""

    def __init__(self, args: argparse.Namespace, home: Path) -> None:
        self.args, self.home = args, home
        nodes, self.nproc = SHAPES[args.world]
        self.lab = network.Lab(nodes)
        self.job: LabJob | None = None
        self.started = self.episodes = 0
        self.generation = -1

    def get_job(self) -> LabJob:
        """Return a job that trains and has learned what is usual."""
        if self.job is not None and (
            self.job.process.poll() is not None or self.episodes >= JOB_EPISODES
        ):
            self.end()
        if self.job is None:
            self.started += 1
            self.episodes, self.generation = 0, -1
            script = ["--step-s", str(STEP_S), *self.args.script]
            name = f"m{self.started}"
            self.job = LabJob(self.lab, self.home, name, *script, nproc=self.nproc)
            self.job.wait_training()
        stepping = self.job.journal.find("GenerationStepping")
        generation = max(b["generation"] for b in stepping)
        if generation != self.generation:
            self.generation = generation
            self.job.take_precedence()
            self.job.wait(lambda: False, LEARN_S)
        return self.job

    def end(self) -> None:
        """End the job, and undo what may be left of its faults."""
        if self.job is not None:
            self.job.end()
            shutil.rmtree(self.job.journal.path.parent, ignore_errors=True)
        self.job = None
        self.lab.heal()


def run_matrix(args: argparse.Namespace) -> None:
    """Do what the plan says until the time is over."""
    out = Path(args.out)
    rows = read_rows([out]) if out.exists() else []
    done = {(r["fault"], r["severity"], r["world"], r["rep"]) for r in rows}
    deadline = time.monotonic() + args.minutes * 60
    home = Path(tempfile.mkdtemp(prefix="perdure-matrix-"))
    bench = Bench(args, home)
    try:
        for kind, severity, rep in plan(args, done):
            if time.monotonic() > deadline:
                break
            row = {"fault": kind, "severity": severity, "world": args.world, "rep": rep}
            rng = random.Random(f"{args.seed} {kind} {severity} {args.world} {rep}")
            try:
                job = bench.get_job()
                before = len(job.journal.entries)
                wait_quiet(job)
                fault = make_fault(kind, severity, rng, job)
                if fault is None:
                    continue
                row |= {"idle": say(job, before), "rank": fault.rank, "link": fault.link}
                row |= {"load": round(os.getloadavg()[0], 1)}
                row |= run_episode(job, fault).as_row()
                bench.episodes += 1
                if job.journal.open:
                    bench.end()
            except (AssertionError, OSError, subprocess.SubprocessError) as error:
                row["error"] = str(error)[:400]
                bench.end()
            with open(out, "a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)
    finally:
        bench.end()
        bench.lab.close()
        shutil.rmtree(home, ignore_errors=True)


def say(job: LabJob, since: int) -> list[str]:
    """Return the new verdicts since an entry, in words."""
    found = [b["verdict"] for b in job.journal.find("VerdictReached", since)]
    found = [v for v in found if not v["actionable"]]
    return [f"{v['kind']} of {name_culprit(v['culprit'])}" for v in found]


def run_healthy(args: argparse.Namespace) -> None:
    """Train with noise beside and inside, harm nothing, and count verdicts."""
    home = Path(tempfile.mkdtemp(prefix="perdure-healthy-"))
    args.script = [*args.script, "--noise"]
    bench = Bench(args, home)
    rng = random.Random(args.seed)
    deadline = time.monotonic() + args.healthy * 60
    hog: subprocess.Popen[bytes] | None = None
    try:
        job = bench.get_job()
        began = time.monotonic()
        verdicts: list[dict[str, Any]] = []
        while time.monotonic() < deadline and job.process.poll() is None:
            # A neighbour that takes a whole core for 5 to 20 s, a third of the time.
            hog = subprocess.Popen(
                [sys.executable, "-c", "while True: sum(i * i for i in range(10000))"]
            )
            job.wait(lambda: False, rng.uniform(5, 20))
            hog.kill()
            hog.wait()
            job.wait(lambda: False, rng.uniform(20, 40))
            row = {"healthy_s": round(time.monotonic() - began, 1), "world": args.world}
            row["load"] = round(os.getloadavg()[0], 1)
            verdicts = [b["verdict"] for b in job.journal.find("VerdictReached")]
            row["verdicts"] = [
                {k: v[k] for k in ("kind", "culprit", "confirmed_s", "reason", "confidence")}
                for v in verdicts
                if not v["actionable"]
            ]
            row["actionable"] = sum(v["actionable"] for v in verdicts)
            row["restarts"] = max(b["generation"] for b in job.journal.find("RanksStarted"))
            with open(args.out, "a") as file:
                file.write(json.dumps(row) + "\n")
        if job.process.poll() is not None:
            print(f"the job ended: {job.text()}")
    finally:
        if hog is not None:
            hog.kill()
        bench.end()
        bench.lab.close()
        shutil.rmtree(home, ignore_errors=True)


def read_rows(paths: list[Path]) -> list[dict[str, Any]]:
    """Return the repetitions in the files."""
    lines = [line for path in paths for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines if line.strip()]


def percentile(values: list[float], share: float) -> str:
    """Return a percentile in words; a dash for nothing."""
    if not values:
        return "-"
    ordered = sorted(values)
    return f"{ordered[min(len(ordered) - 1, int(share * len(ordered)))]:.2f}"


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print a line for each fault, severity and world; then who was taken for what."""
    cells: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    errors = [r for r in rows if "error" in r]
    rows = [r for r in rows if "error" not in r]
    for row in rows:
        cells[row["fault"], row["severity"], row["world"]].append(row)
    print("| fault | severity | ranks | n | verdict | culprit | median s | p95 s | wrong besides |")
    print("|---|---|---|---|---|---|---|---|---|")
    for kind, (_, severities, unit) in SEVERITIES.items():
        for severity in severities:
            for world in SHAPES:
                cell = cells.get((kind, severity, world), [])
                if cell:
                    print(render_cell(kind, f"{severity:g}{unit}" if unit else "", world, cell))
    print(f"\n{len(rows)} repetitions, {len(errors)} that the laboratory itself failed.\n")
    print_confusion(rows)


def render_cell(kind: str, severity: str, world: int, cell: list[dict[str, Any]]) -> str:
    """Return one line of the table."""
    if kind == "memory":
        right = both = sum(r["kind"] in ("none", "Straggler") for r in cell)
    else:
        right = sum(r["kind_right"] for r in cell)
        both = sum(r["kind_right"] and r["culprit_right"] for r in cell)
    times = [r["confirm_s"] for r in cell if r["confirm_s"] >= 0]
    wrong = sum(len(r["passing"]) + len(r["after"]) + len(r["idle"]) for r in cell)
    n = len(cell)
    middle = f"{statistics.median(times):.2f}" if times else "-"
    return (
        f"| {kind} | {severity} | {world} | {n} | {right / n:.0%} | {both / n:.0%} "
        f"| {middle} | {percentile(times, 0.95)} | {wrong} |"
    )


def print_brief(rows: list[dict[str, Any]]) -> None:
    """Print a line for each fault (slow ones: and severity): right of all, median, p95 seconds."""
    rows = [r for r in rows if "error" not in r]
    worlds = sorted({r["world"] for r in rows})
    print("| fault | " + " | ".join(f"{w} ranks" for w in worlds) + " | wrong besides |")
    print("|---" * (len(worlds) + 2) + "|")
    for kind, (_, severities, unit) in SEVERITIES.items():
        graded = kind in SLOW_STAGES or kind == "slow-link"
        for some in [(s,) for s in severities] if graded else [severities]:
            cells = []
            mine = [r for r in rows if r["fault"] == kind and r["severity"] in some]
            for world in worlds:
                cell = [r for r in mine if r["world"] == world]
                times = [r["confirm_s"] for r in cell if r["confirm_s"] >= 0]
                right = sum(is_right(r) for r in cell)
                said = f"{right}/{len(cell)}" if cell else "-"
                if times:
                    said += f", {statistics.median(times):.2f} ({percentile(times, 0.95)})"
                cells.append(said)
            wrong = sum(len(r["passing"]) + len(r["after"]) + len(r["idle"]) for r in mine)
            name = f"{kind} {some[0]:g}{unit}" if graded else kind
            if mine:
                print(f"| {name} | " + " | ".join(cells) + f" | {wrong} |")
    loads = sorted(r["load"] for r in rows)
    print(f"\n{len(rows)} repetitions at a load of {loads[0]} to {loads[-1]}.\n")
    print_confusion(rows)


def is_right(row: dict[str, Any]) -> bool:
    """Return whether verdict and culprit are right; memory is harmless, or that rank's doing."""
    if row["fault"] == "memory":
        return row["kind"] in ("none", "Straggler")
    return bool(row["kind_right"] and row["culprit_right"])


def print_confusion(rows: list[dict[str, Any]]) -> None:
    """Print fault against the verdict that stood."""
    kinds = [k for k in SEVERITIES if any(r["fault"] == k for r in rows)]
    counts = Counter((r["fault"], r["kind"]) for r in rows)
    columns = sorted({kind for _, kind in counts} - {"none"}) + ["none"]
    print("| fault \\ verdict | " + " | ".join(columns) + " | right culprit |")
    print("|---" * (len(columns) + 2) + "|")
    for fault in kinds:
        mine = [r for r in rows if r["fault"] == fault]
        right = sum(is_right(r) for r in mine)
        numbers = " | ".join(str(counts[fault, kind] or "") for kind in columns)
        print(f"| {fault} | {numbers} | {right} of {len(mine)} |")


def main() -> None:
    """Run the matrix, a healthy training, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, default=4, choices=sorted(SHAPES))
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="faults, separated by commas")
    parser.add_argument("--out", default="matrix.jsonl")
    parser.add_argument("--healthy", type=float, default=0.0, metavar="MINUTES")
    parser.add_argument("--table", nargs="+", metavar="JSONL")
    parser.add_argument("--brief", action="store_true", help="of --table: a line a fault")
    parser.add_argument("script", nargs="*", help="more arguments of tests/lab/train.py")
    args = parser.parse_args()
    if args.table:
        rows = read_rows([Path(path) for path in args.table])
        print_brief(rows) if args.brief else print_table(rows)
        return
    if why := network.why_not():
        sys.exit(f"no laboratory here: {why}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # So that the lab is removed.
    run_healthy(args) if args.healthy else run_matrix(args)


if __name__ == "__main__":
    sweep_after_me()
    main()
