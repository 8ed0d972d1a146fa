"""A walltime under Slurm: perdure, submitit and a plain sbatch script, on one real cluster.

Each trains the same model on two ranks, is warned at the same step as Slurm warns before a walltime
(the signal is sent by scancel, so that no run waits for a clock of whole minutes), is put back into
the queue under its own id, and goes on. The time that Slurm makes a job wait for its credential is
skipped for all. Prints one JSON document; needs root and what scripts/setup_platforms.sh installs.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.scripts.slurm_train import AGAIN, Submitted  # noqa: E402
from tests.platforms.slurm_cluster import Cluster, find_lack  # noqa: E402
from tests.platforms.slurm_site import EXACT, Site, make_words  # noqa: E402

EVERY = 20
WARN_AT = 70
STEPS = 110
PACE_S = 0.1
PLAIN = """\
#!/bin/bash
#SBATCH --ntasks=2
#SBATCH --mem=1500M
#SBATCH --time=00:10:00
#SBATCH --signal=B:USR1@70
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output={folder}/out
export PYTHONPATH={root}
trap 'kill -USR1 $child' USR1
srun --ntasks=2 {python} {root}/bench/scripts/slurm_train.py {folder} {steps} {every} {pace} &
child=$!
while :; do
    wait $child
    code=$?
    kill -0 $child 2>/dev/null || break
done
[ $code = {again} ] && exec scontrol requeue $SLURM_JOB_ID
exit $code
"""


def start_plain(cluster: Cluster, folder: Path) -> tuple[str, list[str]]:
    """Submit the plain script; return the job's id and how it is warned."""
    script = PLAIN.format(
        folder=folder, root=ROOT, python=sys.executable, steps=STEPS, every=EVERY, pace=PACE_S,
        again=AGAIN,
    )  # fmt: skip
    (folder / "job.sbatch").write_text(script)
    job = cluster.call("sbatch", "--parsable", str(folder / "job.sbatch")).strip()
    return job, ["--signal=USR1", "--batch"]


def start_submitit(cluster: Cluster, folder: Path) -> tuple[str, list[str]]:
    """Submit by submitit; return the job's id and how it is warned."""
    import submitit

    executor = submitit.SlurmExecutor(folder=folder / "submitit", python=sys.executable)
    executor.update_parameters(
        ntasks_per_node=2, mem="1500M", time=10, signal_delay_s=70,
        setup=[f"export PYTHONPATH={ROOT}"],
    )  # fmt: skip
    job = executor.submit(Submitted(str(folder), STEPS, EVERY, PACE_S))
    return job.job_id, ["--signal=USR2"]


def start_perdure(cluster: Cluster, folder: Path) -> tuple[str, list[str]]:
    """Launch by perdure; return the job's id and how it is warned."""
    (folder / "site").mkdir()
    site = Site(cluster, folder / "site")
    words = make_words(folder / "site", STEPS, PACE_S)
    words[1] = str(folder)
    job = site.launch(EXACT, *words, checkpoint={"every_steps": EVERY})
    return job, ["--signal=USR1", "--batch"]


START = {"perdure": start_perdure, "submitit": start_submitit, "plain": start_plain}


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the whole lines of rank 0's trail."""
    path = folder / "rank-0.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def run(cluster: Cluster, system: str, *, warned: bool) -> dict[str, Any]:
    """Run a job to its end; return its losses, and what a warning cost."""
    with tempfile.TemporaryDirectory(prefix=".perdure-bench-", dir=Path.home()) as name:
        folder = Path(name)
        began = time.monotonic()
        job, signal = START[system](cluster, folder)
        submitted_s = time.monotonic() - began
        cluster.wait(lambda: read(folder), f"first step of {system}", 240)
        told = {"submit_s": submitted_s, "first_step_s": time.monotonic() - began - submitted_s}
        if warned:
            cluster.wait(lambda: read(folder)[-1]["step"] >= WARN_AT, "step to warn at", 240)
            told |= measure(cluster, job, folder, signal)
        cluster.wait(lambda: cluster.job(job)["JobState"] == "COMPLETED", f"end of {system}", 240)
        losses: dict[str, set[str]] = {}
        for path in folder.glob("rank-*.jsonl"):
            for line in path.read_text().splitlines():
                row = json.loads(line)
                losses.setdefault(f"{row['rank']}/{row['step']}", set()).add(row["loss"])
        return {**told, "losses": losses}


def measure(cluster: Cluster, job: str, folder: Path, signal: list[str]) -> dict[str, Any]:
    """Warn a job; return what it took until its first new step, and the steps done twice."""
    began = time.monotonic()
    cluster.call("scancel", *signal, job)

    def is_back() -> bool:
        found = cluster.job(job)
        return found["Restarts"] == "1" and found["JobState"] == "PENDING"

    cluster.wait(is_back, "a job put back", 120)
    queued = time.monotonic()
    before = read(folder)
    cluster.start_now(job)
    cluster.wait(lambda: cluster.job(job)["JobState"] == "RUNNING", "a job started again", 60)
    started = time.monotonic()
    cluster.wait(lambda: len(read(folder)) > len(before), "a new step", 240)
    first = read(folder)[len(before)]["step"]
    return {
        "leave_s": queued - began,
        "new_step_s": time.monotonic() - started,
        "both_s": queued - began + time.monotonic() - started,
        "steps_lost": before[-1]["step"] + 1 - first,
    }


def main() -> None:
    """Run all systems in turn, several times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--systems", nargs="+", default=list(START), choices=list(START))
    args = parser.parse_args()
    if lack := find_lack():
        sys.exit(lack)
    results: dict[str, list[dict[str, Any]]] = {system: [] for system in args.systems}
    with tempfile.TemporaryDirectory(prefix="perdure-slurm-") as name:
        cluster = Cluster(Path(name))
        try:
            cluster.start()
            os.environ.update(cluster.env)
            expected = {s: run(cluster, s, warned=False)["losses"] for s in args.systems}
            for number in range(args.runs):
                for system in args.systems:
                    found = run(cluster, system, warned=True)
                    losses = found.pop("losses")
                    wrong = [key for key in losses if losses[key] != expected[system][key]]
                    found["steps_inexact"] = len(wrong)
                    results[system].append(found)
                    print(f"{number + 1}: {system}: {found}", file=sys.stderr, flush=True)
        finally:
            cluster.stop()
    medians = {
        system: {key: round(statistics.median(row[key] for row in rows), 2) for key in rows[0]}
        for system, rows in results.items()
    }
    load = os.getloadavg()[0]
    print(json.dumps({"runs": args.runs, "load": load, "median": medians}, indent=1))


if __name__ == "__main__":
    main()
