"""submitit's SIGUSR2 and Lightning's SIGUSR1, sent by a real Slurm to the tasks of a step.

Each saves and puts its job back into the queue by itself. The losses of all runs equal those of a
run that nothing disturbed.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.exact import jobs_in
from tests.e2e.own_kills import read_lives
from tests.platforms.conftest import accounting, cluster, place, plain_cluster  # noqa: F401
from tests.platforms.slurm_cluster import Cluster
from tests.third_party.test_published_saves import SCRIPT, read_losses

pytest.importorskip("submitit")
pytestmark = [
    pytest.mark.slow, pytest.mark.torch, pytest.mark.long, pytest.mark.timeout(900)
]  # fmt: skip
PACE_S, NEVER = 0.5, 100_000
SUBMIT = """
import signal, subprocess, sys, time
import submitit

class Training:
    def __init__(self, words):
        self.words = words

    def __call__(self):
        self.process = subprocess.Popen(self.words)
        return self.wait()

    def wait(self):
        while self.process.poll() is None:
            time.sleep(0.1)
        return self.process.returncode

    def checkpoint(self):
        # With cgroups, Slurm sends the signal to the first process of a task alone.
        self.process.send_signal(signal.SIGUSR2)
        self.wait()
        return submitit.helpers.DelayedSubmission(Training(self.words))

executor = submitit.SlurmExecutor(folder="submitit", max_num_timeout=9)
executor.update_parameters(time=10, mem="3000M", signal_delay_s=60, cpus_per_task=2)
print(executor.submit(Training(sys.argv[1:])).job_id)
"""


class SlurmRun:
    """A job of one rank or two in a folder, whose script saves by a library."""

    def __init__(self, cluster: Cluster, place: Path, form: str, pattern: str, ranks: int) -> None:  # noqa: F811
        """Write the job file."""
        self.cluster, self.place, self.form, self.ranks = cluster, place, form, ranks
        args = json.dumps([form, str(NEVER), str(PACE_S)])
        (place / "job.toml").write_text(
            f"script = {json.dumps(str(SCRIPT))}\nargs = {args}\nnproc = {ranks}\n"
            f"[checkpoint]\nown = {json.dumps([pattern])}\n"
        )
        self.words = [sys.executable, "-m", "perdure", "run", "--name", "own", "-c", "job.toml"]
        self.env = {"PERDURE_HOME": str(place / "home"), "OMP_NUM_THREADS": "1"}

    def wait(self, condition: Callable[[], object], what: str) -> None:
        """Wait for a fact; a failure shows what the job has printed."""
        try:
            self.cluster.wait(condition, what, 100)
        except AssertionError:
            logs = [*self.place.glob("submitit/*_log.*"), *self.place.glob("slurm.out")]
            texts = [f"{path.name}:\n{path.read_text(errors='replace')[-4000:]}" for path in logs]
            raise AssertionError(f"no {what}\n" + "\n".join(texts)) from None

    def wait_steps(self, life: int, count: int = 4) -> int:
        """Wait until a life has made some steps; return where it began."""
        self.wait(
            lambda: len(lives := read_lives(self.place)) > life
            and max([*self.find_losses(), 0]) >= lives[life][0][1] + count,
            f"{count} steps of life {life}",
        )  # fmt: skip
        return read_lives(self.place)[life][0][1]

    def find_losses(self) -> dict[int, set[str]]:
        return read_losses(self.place) if (self.place / "losses").exists() else {}

    def wait_back(self, job: str, restarts: int) -> None:
        self.wait(
            lambda: (found := self.cluster.job(job))["Restarts"] == str(restarts)
            and found["JobState"] == "PENDING",
            f"{job} put back",
        )  # fmt: skip
        before = self.find_losses()
        self.cluster.start_now(job)
        assert before == self.find_losses(), "it went on after it was put back"

    def finish(self, job: str) -> None:
        (self.place / "enough").touch()
        self.wait(
            lambda: self.cluster.job(job)["JobState"] == "COMPLETED", "the end"
        )  # fmt: skip

    def check_equal(self) -> None:
        """Compare the losses of all lives with those of a run outside Slurm."""
        found, home = self.find_losses(), self.place / "reference"
        home.mkdir()
        (home / "job.toml").write_text((self.place / "job.toml").read_text())
        with jobs_in(home) as begin:
            job = begin("own", "-c", "job.toml")
            path = home / "losses"
            job.wait_until(
                lambda: path.exists() and max(read_losses(home)) >= max(found), "as many steps"
            )
            (home / "enough").touch()
            assert job.wait() == 0, job.text()[-4000:]
        expected = read_losses(home)
        unequal = {step: (losses, expected[step]) for step, losses in found.items()
                   if losses != expected[step]}  # fmt: skip
        assert not unequal, unequal


def cut(path: Path) -> None:
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size // 2)


def test_submitit_puts_its_job_back_after_the_ranks_have_saved(
    cluster: Cluster,  # noqa: F811
    place: Path,  # noqa: F811
) -> None:
    pytest.importorskip("accelerate")
    run = SlurmRun(cluster, place, "accelerate", "out/checkpoint-*", 2)
    (place / "submit.py").write_text(SUBMIT)
    done = subprocess.run(
        [sys.executable, "submit.py", *run.words], cwd=place, env={**os.environ, **run.env},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    job, saved = done.stdout.split()[-1], list[int]()
    for life in range(2):
        began = run.wait_steps(life)
        assert began == (saved or [0])[-1], read_lives(place)
        cluster.call("scancel", "--signal=USR2", job)
        run.wait(
            lambda life=life: read_lives(place)[life][-1][0] == "saved", "a save at the signal"
        )
        saved.append(read_lives(place)[life][-1][1])
        if life == 1:
            cut(place / "out" / f"checkpoint-{saved[1]}" / "model.safetensors")
        run.wait_back(job, life + 1)
    assert run.wait_steps(2) == saved[0]
    assert (place / "out.torn" / f"checkpoint-{saved[1]}").exists()
    run.finish(job)
    run.check_equal()


def test_lightning_saves_and_puts_its_job_back_once(
    cluster: Cluster,  # noqa: F811
    place: Path,  # noqa: F811
) -> None:
    """It has one rank: with several, its handlers may wait for one another at unequal steps."""
    pytest.importorskip("lightning")
    torch = pytest.importorskip("torch")
    run = SlurmRun(cluster, place, "lightning", "out/hpc_ckpt_*.ckpt", 1)
    (place / "train.sh").write_text(f"#!/bin/sh\nexec srun --unbuffered {' '.join(run.words)}\n")
    words = ["--mem=3000M", "-c", "2", "-t", "10", "--chdir", str(place), "-o", "slurm.out"]
    done = subprocess.run(
        ["sbatch", "--parsable", *words, str(place / "train.sh")], env={**os.environ, **run.env},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    job = done.stdout.strip()
    saved: list[int] = []
    for life in range(2):
        assert run.wait_steps(life) == (saved or [0])[-1], read_lives(place)
        cluster.call("scancel", "--signal=USR1", job)
        path = place / "out" / f"hpc_ckpt_{life + 1}.ckpt"
        run.wait(lambda life=life: cluster.job(job)["Restarts"] == str(life + 1), "once more")
        saved.append(int(torch.load(path, weights_only=False)["global_step"]))
        if life == 1:
            cut(path)
        run.wait_back(job, life + 1)
        assert len(list(path.parent.glob("hpc_ckpt_*"))) == life + 1, "a signal came twice"
    assert run.wait_steps(2) == saved[0]
    assert (place / "out.torn" / "hpc_ckpt_2.ckpt").exists()
    run.finish(job)
    run.check_equal()
