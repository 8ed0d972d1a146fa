"""`srun perdure run --nnodes auto`, under a real Slurm: one command is one job on its nodes."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import SCRIPTS
from tests.lab.network import Lab, why_not
from tests.platforms.slurm_cluster import Cluster, pick_ports

pytestmark = [
    pytest.mark.serial,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]
ENDS = """
import os, sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
print("I am", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
if os.environ["RANK"] == "1":
    sys.exit(7)
time.sleep(60)
"""
NAMED = """
mount --bind "$1" /etc/hosts && shift && exec "$@"
"""
"""Slurm's names of the nodes are known to what runs, as a site's DNS would have it."""
Srun = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def srun(cluster: Cluster, place: Path) -> Iterator[Srun]:
    """Return a function that types `srun perdure run`; each node has a network of its own."""
    with Lab(2) as lab:
        yield from type_in(lab, cluster, place)


def type_in(lab: Lab, cluster: Cluster, place: Path) -> Iterator[Srun]:
    hosts = place / "hosts"
    pairs = zip(lab.addresses, cluster.nodes, strict=True)
    names = "".join(f"{address} {node}\n" for address, node in pairs)
    hosts.write_text(f"127.0.0.1 localhost\n{names}")
    (port,) = pick_ports(1)
    home = place / "home"  # Both nodes see it.
    env = {**os.environ, "PERDURE_HOME": str(home), "PERDURE_RDZV_SECRET": "0123456789abcdef0"}
    words = ["srun", "--nodes=2", "--ntasks-per-node=1", "--mem=1500M", "--label"]
    space = lab.space(0).removesuffix("0")
    enter = f'exec ip netns exec {space}"$SLURM_NODEID" unshare --mount sh -c "$@"'
    words += ["sh", "-c", enter, "sh", NAMED, "sh", str(hosts)]
    words += [sys.executable, "-m", "perdure", "run", "--nnodes", "auto", "--rdzv-id", "pair"]
    words += ["--master-port", str(port)]
    typed: list[subprocess.Popen[str]] = []

    def type_command(*options: str) -> "subprocess.Popen[str]":
        typed.append(
            subprocess.Popen(
                [*words, *options], env=env, cwd=place, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
        )  # fmt: skip
        return typed[-1]

    yield type_command
    for process in typed:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=30)
    cluster.end_jobs()


def find_job(cluster: Cluster) -> str:
    """Return the id of the one job that runs."""
    (job,) = cluster.call("squeue", "-h", "-o", "%i").split()
    return job


def read_end(process: "subprocess.Popen[str]", timeout_s: float) -> str:
    """Return what a command has printed until its end."""
    try:
        return process.communicate(timeout=timeout_s)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"it goes on:\n{process.communicate()[0]}") from None


def test_one_srun_is_one_job_that_ends_with_its_script_s_code(srun: Srun, place: Path) -> None:
    (place / "ends.py").write_text(ENDS)
    process = srun("--max-restarts", "0", str(place / "ends.py"))
    out = read_end(process, 100)
    assert process.returncode == 7, out
    assert "this is the first node of pair" in out
    assert "this machine is node 1 of pair" in out
    assert "[rank 0] I am 0 of 2" in out
    assert "[rank 1] I am 1 of 2" in out


def test_what_slurm_ends_is_stopped_at_a_step_and_goes_on_by_the_same_line(
    cluster: Cluster, srun: Srun, place: Path
) -> None:
    trail = place / "trail"
    trail.mkdir()
    config = place / "job.toml"
    config.write_text(f'[checkpoint]\nevery_steps = 10\nurl = "{place / "checkpoints"}"\n')
    words = [
        "--config",
        str(config),
        str(SCRIPTS / "train_paced.py"),
        "--steps",
        "100000",
        "--trail",
        str(trail),
    ]

    def list_steps() -> list[int]:
        path = trail / "rank-0.txt"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [int(line.split()[0]) for line in lines if line.endswith("\n")]

    process = srun(*words)
    cluster.wait(lambda: len(list_steps()) > 30, "training", 120)
    cluster.call("scancel", "--signal=TERM", find_job(cluster))
    out = read_end(process, 100)
    assert process.returncode == 0, out
    made = len(list_steps())
    process = srun(*words)
    cluster.wait(lambda: len(list_steps()) > made + 20, "training again", 120)
    (trail / "hurry").touch()
    cluster.call("scancel", "--signal=TERM", find_job(cluster))
    out = read_end(process, 100)
    assert list_steps() == list(range(len(list_steps()))), "a step was lost or made twice"
