"""The matrix: every fault x world size x severity, ten times over in running jobs.

    bench_matrix.py --out matrix.jsonl [--minutes 30] [--worlds 2,4,8] [--repeat 10]
        [--only slow-link] [--frozen COMMIT]
    bench_matrix.py --table matrix.jsonl [...]
    bench_matrix.py --healthy 60 --worlds 4 --out healthy.jsonl

One call is one piece of at most `--minutes`; call it until it says that nothing is left (each of
the ten repetitions of three worlds takes about 35 minutes). OUT gets a line a repetition with seed,
commit, the commit of the thresholds, piece and load; what is in it is not done again, but where the
laboratory itself had failed, which is tried twice. A repetition is done in all worlds before the
next begins, so that a matrix that ends early is even. Thresholds are those of `src/perdure/detect`
and of what decides what is done: a piece refuses an OUT that was begun with others, and with
`--frozen` a tree in which they are not as in that commit.

Each repetition harms a rank picked at random (by seed) in a job that trains across network
namespaces, reads the journal, heals, and waits until nothing is blamed. Verdicts are only
reported, so that one job holds many faults; deaths and wrong calls restart its world. Needs root
(docs/lab.md).
"""

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matrix_table import STEP_S, name_end, render_tables, split_rows
from stamp import ROOT, name_commit, stamp, take_load
from sweep import sweep_after_me

sys.path.insert(0, str(ROOT))

from tests.lab import network
from tests.lab.episode import (
    HANGS,
    LINKS,
    SLOW_STAGES,
    Fault,
    name_culprit,
    run_episode,
    wait_quiet,
)
from tests.lab.job import LabJob

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
"""Then a new job. A hang that is healed, and slowness that ends by itself, teach the detector that
the job has such: in a job that holds many, later ones are told later, or not. `--episodes 1` shows
the first ones alone."""
THRESHOLDS = ("src/perdure/detect", "src/perdure/policy", "src/perdure/model/job.py")
"""What says when a verdict is reached, and what is done about it."""
TRIES = 2
"""Of a repetition that the laboratory itself fails."""
_LONGEST_S = 150.0
"""A job's start, and the longest repetition: a piece begins none that would pass its end."""


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


Cell = tuple[str, float, int, int]
"""Fault, severity, world, repetition."""


def plan(args: argparse.Namespace, rows: list[dict[str, Any]]) -> Iterator[Cell]:
    """Yield what `rows` do not hold yet: all of one repetition, in all worlds, before the next."""
    only = set(args.only.split(",")) if args.only else set(SEVERITIES)
    good, failed = split_rows(rows)
    done = {_name_cell(row) for row in good}
    tries = Counter(_name_cell(row) for row in failed)
    for rep in range(args.repeat):
        for world in args.worlds:
            cells = [(k, s) for k, (_, severities, _) in SEVERITIES.items() for s in severities]
            random.Random(f"{args.seed} {rep} {world}").shuffle(cells)
            # Deaths last: each begins a new generation, which learns anew.
            cells.sort(key=lambda cell: cell[0] in ("crash", "exit", "wrong-op", "wrong-size"))
            for kind, severity in cells:
                cell = (kind, severity, world, rep)
                if kind in only and cell not in done and tries[cell] < TRIES:
                    yield cell


def _name_cell(row: dict[str, Any]) -> Cell:
    return row["fault"], row["severity"], row["world"], row["rep"]


def check_thresholds(rows: list[dict[str, Any]], frozen: str) -> str:
    """Return the commit of the thresholds.

    Raises:
        SystemExit: they are not those that `rows` were measured with, or not those of `frozen`.
    """
    now = name_commit(*THRESHOLDS)
    if frozen:
        words = ["git", "diff", "--quiet", frozen, "--", *THRESHOLDS]
        if subprocess.run(words, cwd=ROOT, check=False).returncode:
            sys.exit(f"the thresholds are not those of {frozen}: git diff {frozen} -- detect")
        now = frozen
    others = {str(row.get("thresholds")) for row in rows} - {now}
    if others:
        sys.exit(f"OUT was begun with thresholds of {', '.join(others)}, and these are of {now}")
    return now


class Bench:
    """The job under test in a world, begun anew where it has ended."""

    def __init__(self, args: argparse.Namespace, home: Path, world: int) -> None:
        self.args, self.home, self.world = args, home, world
        nodes, self.nproc = SHAPES[world]
        self.lab = network.Lab(nodes)
        self.job: LabJob | None = None
        self.started = self.episodes = 0
        self.generation = -1

    def get_job(self) -> LabJob:
        """Return a job that trains and has learned what is usual."""
        if self.job is not None and (
            self.job.process.poll() is not None or self.episodes >= self.args.episodes
        ):
            self.end()
        if self.job is None:
            self.started += 1
            self.episodes, self.generation = 0, -1
            script = ["--step-s", str(STEP_S), *self.args.script]
            name = f"m{self.world}-{self.started}"
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

    def close(self) -> None:
        """End the job, and remove the laboratory."""
        self.end()
        self.lab.close()


def run_matrix(args: argparse.Namespace) -> None:
    """Do what the plan says until the piece is over."""
    out = Path(args.out)
    rows = read_rows([out]) if out.exists() else []
    thresholds = check_thresholds(rows, args.frozen)
    piece = 1 + max((int(row["piece"]) for row in rows), default=0)
    known = {"seed": args.seed, "piece": piece}
    deadline = time.monotonic() + args.minutes * 60 - _LONGEST_S
    home = Path(tempfile.mkdtemp(prefix="perdure-matrix-"))
    bench: Bench | None = None
    try:
        for kind, severity, world, rep in plan(args, rows):
            if time.monotonic() > deadline:
                break
            if bench is None or bench.world != world:
                if bench is not None:
                    bench.close()
                bench = Bench(args, home, world)
            cell = {"fault": kind, "severity": severity, "world": world, "rep": rep}
            row = cell | known | stamp() | {"thresholds": thresholds}
            row |= run_one(bench, kind, severity, random.Random(f"{args.seed} {[*cell.values()]}"))
            with open(out, "a") as file:
                file.write(json.dumps(row) + "\n")
            rows.append(row)
            end = row["error"] if "error" in row else name_end(row)
            print(f"piece {piece}, {kind} {severity:g} of {world}, {rep}: {end}", flush=True)
    finally:
        if bench is not None:
            bench.close()
        shutil.rmtree(home, ignore_errors=True)
    left = sum(1 for _ in plan(args, rows))
    print(f"{left} repetitions are left" if left else "nothing is left", flush=True)


def run_one(bench: Bench, kind: str, severity: float, rng: random.Random) -> dict[str, Any]:
    """Return what came of one fault, or the laboratory's own error."""
    try:
        job = bench.get_job()
        before = len(job.journal.entries)
        wait_quiet(job)
        fault = make_fault(kind, severity, rng, job)
        if fault is None:
            return {"error": "no link was busy"}
        row = {"idle": say(job, before), "rank": fault.rank, "link": fault.link}
        row |= {"load": take_load(), **run_episode(job, fault).as_row()}
        bench.episodes += 1
        if job.journal.open:
            bench.end()
        return row
    except (AssertionError, OSError, subprocess.SubprocessError) as error:
        bench.end()
        return {"error": str(error)[:400]}


def say(job: LabJob, since: int) -> list[str]:
    """Return the new verdicts since an entry, in words."""
    found = [b["verdict"] for b in job.journal.find("VerdictReached", since)]
    found = [v for v in found if not v["actionable"]]
    return [f"{v['kind']} of {name_culprit(v['culprit'])}" for v in found]


def run_healthy(args: argparse.Namespace) -> None:
    """Train with noise beside and inside, harm nothing, and count verdicts."""
    home = Path(tempfile.mkdtemp(prefix="perdure-healthy-"))
    args.script = [*args.script, "--noise"]
    bench = Bench(args, home, args.worlds[0])
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
            row = {"healthy_s": round(time.monotonic() - began, 1), "world": bench.world}
            row |= stamp(*THRESHOLDS)
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
        bench.close()
        shutil.rmtree(home, ignore_errors=True)


def read_rows(paths: list[Path]) -> list[dict[str, Any]]:
    """Return the repetitions in the files."""
    lines = [line for path in paths for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines if line.strip()]


def print_confusion(rows: list[dict[str, Any]]) -> None:
    """Print fault against the verdict that stood."""
    kinds = [k for k in SEVERITIES if any(r["fault"] == k for r in rows)]
    counts = Counter((r["fault"], r["kind"]) for r in rows)
    columns = sorted({kind for _, kind in counts} - {"none"}) + ["none"]
    print("| fault \\ verdict | " + " | ".join(columns) + " | right culprit |")
    print("|---" * (len(columns) + 2) + "|")
    for fault in kinds:
        mine = [r for r in rows if r["fault"] == fault]
        right = sum(name_end(r) in ("found", "late") for r in mine)
        numbers = " | ".join(str(counts[fault, kind] or "") for kind in columns)
        print(f"| {fault} | {numbers} | {right} of {len(mine)} |")


def main() -> None:
    """Run the matrix, a healthy training, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", default="2,4,8", help="of " + ", ".join(map(str, SHAPES)))
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=30, help="of this piece")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--frozen", default="", metavar="COMMIT", help="of the thresholds")
    parser.add_argument(
        "--episodes", type=int, default=JOB_EPISODES, metavar="N",
        help="then a new job; 1: each fault is the first one of its job",
    )  # fmt: skip
    parser.add_argument("--only", default="", help="faults, separated by commas")
    parser.add_argument("--out", default="matrix.jsonl")
    parser.add_argument("--healthy", type=float, default=0.0, metavar="MINUTES")
    parser.add_argument("--table", nargs="+", metavar="JSONL")
    parser.add_argument("script", nargs="*", help="more arguments of tests/lab/train.py")
    args = parser.parse_args()
    if args.table:
        rows = read_rows([Path(path) for path in args.table])
        print(render_tables(rows) + "\n")
        print_confusion(split_rows(rows)[0])
        return
    args.worlds = [int(word) for word in args.worlds.split(",")]
    if unknown := set(args.worlds) - set(SHAPES):
        parser.error(f"no world of {unknown}: {', '.join(map(str, SHAPES))}")
    if unknown := set(filter(None, args.only.split(","))) - set(SEVERITIES):
        parser.error(f"no fault {', '.join(unknown)}: {', '.join(SEVERITIES)}")
    if why := network.why_not():
        sys.exit(f"no laboratory here: {why}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # So that the lab is removed.
    run_healthy(args) if args.healthy else run_matrix(args)


if __name__ == "__main__":
    sweep_after_me()
    main()
