"""Someone who launches jobs to the cluster, with a profile and a volume of their own."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.e2e.box import read_json
from tests.e2e.harness import SCRIPTS, read_trail
from tests.platforms.k8s.cluster import Kubernetes, list_mounts

EXACT = SCRIPTS / "train_exact.py"


class Tenant:
    """`folder` is the laptop; `durable` is what pods have at /checkpoints."""

    def __init__(
        self, cluster: Kubernetes, folder: Path, *, python: str = sys.executable, **section: Any
    ) -> None:
        self.cluster, self.folder, self.durable = cluster, folder, folder / "durable"
        self.home, self.project = folder / "home", folder / "project"
        (self.home / "profiles").mkdir(parents=True)
        self.project.mkdir()
        cluster.make_volume(f"v{os.urandom(4).hex()}", self.durable)
        settings = {
            "server": "1.20", "image": cluster.image, "host_paths": list_mounts(), "cpu": "100m",
            "grace_s": 60, "checkpoint_s": 5, "shared_memory": "1Gi",
            "security": "image",  # The Python of these tests may be root's own.
            **section,
        }  # fmt: skip
        lines = ['base = "kubernetes"', "[launch]", f'python = "{python}"', "[kubernetes]"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
        (self.home / "profiles" / "cluster.toml").write_text("\n".join(lines) + "\n")
        self.env = dict(os.environ, PERDURE_HOME=str(self.home), COLUMNS="120", **cluster.env)

    def write_job(self, script: Path, *args: str, name: str = "job", **fields: Any) -> None:
        """Write job.json, with the script in the project."""
        shutil.copy(script, self.project)
        document = {"name": name, "script": script.name, "nproc": 2, "args": list(args),
                    "checkpoint": {"every_steps": 20},
                    "launch": {"project": "project", "outputs": ["trail"]}, **fields}  # fmt: skip
        (self.folder / "job.json").write_text(json.dumps(document))

    def write_exact(self, steps: int, pace_s: float, script: Path = EXACT, **fields: Any) -> None:
        """Write a job whose losses are comparable to the bit."""
        (self.project / "trail").mkdir()
        (self.project / "trail" / "here").touch()
        words = ["--trail", "trail", "--steps", str(steps), "--pace-s", str(pace_s)]
        self.write_job(script, *words, **fields)

    def launch(self) -> "subprocess.CompletedProcess[str]":
        return self.cli("launch", "job.json", "--on", "cluster")

    def cli(self, *args: str, code: int | None = 0, home: Path | None = None,
            timeout_s: float = 150) -> "subprocess.CompletedProcess[str]":  # fmt: skip
        """Run a perdure command to its end, which has to be `code`, if that is given."""
        env = self.env | ({"PERDURE_HOME": str(home)} if home else {})
        done = subprocess.run(
            [sys.executable, "-m", "perdure", *args], env=env, cwd=self.folder, text=True,
            capture_output=True, timeout=timeout_s, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert code is None or done.returncode == code, (
            f"{args}: {done.returncode}\n{done.stdout}{done.stderr}"
        )
        return done

    def trail(self, name: str = "job") -> Path:
        return self.durable / "launched" / name / "project" / "trail"

    def find_step(self, name: str = "job") -> int:
        """Return the newest step that rank 0 has made."""
        try:
            line = (self.trail(name) / "rank-0.jsonl").read_text().splitlines()[-1]
            return int(json.loads(line)["step"])
        except (OSError, ValueError, IndexError):
            return -1

    def wait_step(self, step: int, name: str = "job") -> None:
        self.cluster.wait(lambda: self.find_step(name) >= step, f"step {step}", 120)

    def wait_end(self, name: str = "job", timeout_s: float = 180) -> None:
        """Wait until the job is done by its own files."""
        state = self.durable / "state" / "jobs" / name / "state.json"
        self.cluster.wait(lambda: read_json(state).get("state") == "done", "end", timeout_s)

    def find_pods(self, name: str = "job") -> list[Any]:
        """Return the job's pods, the oldest first."""
        found = self.cluster.get("pods", "-l", f"perdure.dev/job={name}")["items"]
        return sorted(found, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))

    def find_running(self, name: str = "job") -> str:
        """Return the newest pod that runs and is not told to go."""
        running = [
            pod for pod in self.find_pods(name)
            if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
        ]  # fmt: skip
        return str(running[-1]["metadata"]["name"])

    def check_equal(self, steps: int, ranks: int = 2, name: str = "job") -> None:
        """Compare the losses with those of a run on this machine that nothing interrupted."""
        plain = self.folder / "plain"
        plain.mkdir()
        self.cli("run", "--name", "plain", "-n", str(ranks), str(EXACT), "--trail", str(plain),
                 "--steps", str(steps), home=plain)  # fmt: skip
        expected, found = read_trail(plain), read_trail(self.trail(name))
        assert set(found) == {(rank, step) for rank in range(ranks) for step in range(steps)}
        different = [key for key, tries in found.items() if
                     {loss for loss, _ in tries} != {expected[key][0][0]}]  # fmt: skip
        assert different == []
