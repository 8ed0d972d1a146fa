"""A user of the cluster of the tests: a project and a profile of their own, and what they type."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from perdure.launch.platforms import Here
from perdure.launch.records import read_record
from perdure.launch.slurm import query_state
from tests.e2e.harness import SCRIPTS, read_trail
from tests.platforms.slurm_cluster import Cluster


class Site:
    """A user on the cluster, with a project and a profile of their own."""

    def __init__(self, cluster: Cluster, place: Path, **settings: Any) -> None:
        self.cluster, self.place = cluster, place
        self.env = {**os.environ, "PERDURE_HOME": str(place / "home")}
        self.settings = {
            "time_limit": "00:10:00", "warn_s": 70, "startup_s": 10, "checkpoint_s": 5,
            "mem": "1500M", **settings,
        }  # fmt: skip
        (place / "trail").mkdir()

    def launch(self, script: Path, *args: str, name: str = "job", **fields: Any) -> str:
        """Launch a job; return its Slurm id."""
        self.write(script, *args, name=name, **fields)
        done = self.perdure("launch", "job.json", "--on", "site.toml", "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        return str(json.loads(done.stdout.splitlines()[-1])["id"])

    def write(self, script: Path, *args: str, name: str, **fields: Any) -> None:
        """Write job.json with its project, and site.toml."""
        project = self.place / "project"
        project.mkdir(exist_ok=True)
        shutil.copy(script, project)
        document = {"name": name, "script": script.name, "nproc": 2, "args": list(args),
                    "checkpoint": {"every_steps": 20}, "launch": {"project": str(project)},
                    **fields}  # fmt: skip
        (self.place / "job.json").write_text(json.dumps(document))
        lines = ['base = "slurm"', "[overrides]", f'DATA_DIR = "{self.place}/durable"',
                 f'DURABLE_DIR = "{self.place}/durable"', "[slurm]"]  # fmt: skip
        lines += [f"{key} = {json.dumps(value)}" for key, value in self.settings.items()]
        (self.place / "site.toml").write_text("\n".join(lines) + "\n")

    def perdure(self, *words: str, home: str = "") -> "subprocess.CompletedProcess[str]":
        env = {**self.env, **({"PERDURE_HOME": home} if home else {})}
        return subprocess.run(
            [sys.executable, "-m", "perdure", *words],
            env=env, cwd=self.place, capture_output=True, text=True, timeout=300,
        )  # fmt: skip

    def find_step(self) -> int:
        try:
            line = (self.place / "trail" / "rank-0.jsonl").read_text().splitlines()[-1]
            return int(json.loads(line)["step"])
        except (OSError, ValueError, IndexError):
            return -1

    def wait_step(self, step: int) -> None:
        self.cluster.wait(lambda: self.find_step() >= step, f"step {step}", 120)

    def wait_state(self, job: str, state: str, timeout_s: float = 180) -> None:
        self.cluster.wait(
            lambda: self.cluster.job(job)["JobState"] == state, f"{state} of {job}", timeout_s
        )

    def wait_back(self, job: str, restarts: int, timeout_s: float = 120) -> None:
        """Wait until a job has been put back so often, and let it start at once."""
        self.cluster.wait(
            lambda: (found := self.cluster.job(job))["Restarts"] == str(restarts)
            and found["JobState"] == "PENDING",
            f"{job} put back", timeout_s,
        )  # fmt: skip
        self.cluster.start_now(job)

    def runs(self, name: str = "job") -> list[dict[str, Any]]:
        path = self.place / "durable" / "launched" / name / "runs.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def find_end(self, name: str = "job") -> Any:
        here = Here(home=self.env["PERDURE_HOME"], environ=self.env, tell=lambda text: None)
        record = read_record(here.home, name)
        assert record is not None
        return query_state(record, here)

    def check_equal(self, steps: int, ranks: int = 2) -> None:
        """Compare the trail with one of a run that nothing interrupted."""
        plain = self.place / "plain"
        (plain / "trail").mkdir(parents=True)
        done = self.perdure(
            "run", "--name", "plain", "-n", str(ranks), str(SCRIPTS / "train_exact.py"),
            "--trail", str(plain / "trail"), "--steps", str(steps), home=str(plain / "home"),
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        expected, found = read_trail(plain / "trail"), read_trail(self.place / "trail")
        assert set(found) == {(rank, step) for rank in range(ranks) for step in range(steps)}
        different = [key for key, tries in found.items() if set(
            loss for loss, _ in tries) != {expected[key][0][0]}]  # fmt: skip
        assert different == []


EXACT = SCRIPTS / "train_exact.py"


def make_words(place: Path, steps: int, pace_s: float) -> list[str]:
    return ["--trail", str(place / "trail"), "--steps", str(steps), "--pace-s", str(pace_s)]
