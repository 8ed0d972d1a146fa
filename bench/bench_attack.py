"""How long steps take while a stranger attacks each socket that the job listens on.

    python bench/bench_attack.py [--kinds plain elastic] [--blocks 20] [--block-s 4]

The job has the first core of this process. The attacker (`tests/attacker.py`) has the last one. If
root runs this, the attacker is another user. Blocks without and with an attack take turns in one
job. The output has the median, the p99, and the longest step of both. It also has the share of
attacked steps that exceed the p99 without an attack, and the number of ranks that died.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import psutil
from stamp import stamp
from sweep import sweep_after_me

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.attacker import JOB, PROTOCOLS, Attacker, find_places  # noqa: E402

SCRIPTS = Path(__file__).resolve().parent / "scripts"
KINDS = {
    "plain": (str(SCRIPTS / "plain.py"), "--trail", "{folder}/trail", "--dir", "{folder}",
              "--steps", "100000000", "--save-every", "100000000", "--pace-s", "0.005"),
    "elastic": (str(SCRIPTS / "elastic_paced.py"), "{folder}", "4"),
}  # fmt: skip
LIMIT_S = 120.0
SETTLE_S = 1.0
"""Seconds for an attack to begin or to end, which count for neither."""


def read_times(kind: str, folder: Path) -> list[float]:
    """Return when rank 0 has ended each step, by CLOCK_MONOTONIC."""
    if kind == "plain":
        rows = (line.split() for line in (folder / "trail").read_text().splitlines()[:-1])
        return [float(row[2]) for row in rows if row[:2] == ["step", "0"]]
    lines = (folder / "rank-0.jsonl").read_text().splitlines()[:-1]
    return [json.loads(line)["at"] for line in lines]


def percentile(values: list[float], share: float) -> float:
    """Return the value that `share` of `values` do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@contextlib.contextmanager
def run_job(kind: str, folder: Path) -> Iterator[psutil.Process]:
    """Run a job of a kind of two ranks on this process's cores."""
    words = [word.format(folder=folder) for word in KINDS[kind]]
    with open(folder / "out", "wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "perdure", "run", "--name", JOB, "-n", "2", *words],
            env=dict(os.environ, PERDURE_HOME=str(folder / "state")), stdout=out, stderr=out,
        )  # fmt: skip
    try:
        yield psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(LIMIT_S)


def list_pids(job: psutil.Process) -> list[int]:
    """Return the job's processes."""
    return [job.pid, *(child.pid for child in job.children(recursive=True))]


def find_ranks(job: psutil.Process) -> set[int]:
    """Return the pids of the job's ranks."""
    return {
        child.pid
        for child in job.children(recursive=True)
        if f"perdure rank {JOB}" in " ".join(child.cmdline())
    }


def measure(kind: str, blocks: int, block_s: float, core: int) -> dict[str, object]:
    """Return the figures of one job."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spans: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        with run_job(kind, folder) as job:
            deadline = time.monotonic() + LIMIT_S
            while len(begun(kind, folder)) < 50:
                if time.monotonic() > deadline:
                    raise SystemExit(f"no steps: {(folder / 'out').read_text()[-2000:]}")
                time.sleep(0.1)
            before = find_ranks(job)
            places = find_places(list_pids(job))
            with Attacker("--core", str(core)) as attacker:
                for block in range(2 * blocks):
                    attacked = block % 2 == 1
                    attacker.aim(places if attacked else [])
                    time.sleep(SETTLE_S)
                    began_s = time.monotonic()
                    while time.monotonic() < began_s + block_s:
                        time.sleep(0.2)
                        attacker.look()
                    spans[attacked].append((began_s, time.monotonic()))
                complete = attacker.has_attacked(places, tuple(PROTOCOLS))
            died = before - find_ranks(job)
            times = read_times(kind, folder)
        found = {
            attacked: [
                b - a for a, b in pairwise(times) if any(x <= a and b <= y for x, y in those)
            ]
            for attacked, those in spans.items()
        }
        return describe(found) | {
            "places": len(places), "complete": complete, "ranks_died": len(died),
        }  # fmt: skip


def begun(kind: str, folder: Path) -> list[float]:
    """Return the steps so far; none before the first."""
    with contextlib.suppress(OSError):
        return read_times(kind, folder)
    return []


def describe(found: dict[bool, list[float]]) -> dict[str, object]:
    """Return what is printed of the steps without and with an attack."""
    p99_s = percentile(found[False], 0.99)
    told: dict[str, object] = {"steps": [len(found[False]), len(found[True])]}
    for name, share in (("median_ms", 0.5), ("p99_ms", 0.99), ("longest_ms", 1.0)):
        told[name] = [round(1e3 * percentile(found[key], share), 2) for key in (False, True)]
    beyond = sum(step > p99_s for step in found[True]) / len(found[True])
    return told | {"beyond_p99_without": round(beyond, 4)}


def main() -> None:
    """Measure each kind, and print a line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--block-s", type=float, default=4.0)
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("the job and the attacker need a core each")
    sweep_after_me()
    os.sched_setaffinity(0, {cores[0]})
    for kind in args.kinds:
        found = measure(kind, args.blocks, args.block_s, cores[-1])
        print(json.dumps({"kind": kind, "root": os.geteuid() == 0} | stamp() | found), flush=True)


if __name__ == "__main__":
    main()
