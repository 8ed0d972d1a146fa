"""The step that puts an agent on each node of an allocation, and where nodes reach one another."""

import json
import signal
import subprocess
from pathlib import Path

import pytest

from perdure.launch.runs import follow
from perdure.launch.slurm import batch
from perdure.launch.slurm.batch import WORDS, Chain, place_nodes
from perdure.model.errors import PlatformError
from perdure.model.job import JobSpec
from perdure.service import placement


def test_a_step_asks_for_its_cores_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho localhost\necho localhost\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    chain = Chain(requeue_max=1, cpus=12, gres="gpu:2")
    _, path = place_nodes(JobSpec(script="train.py", nodes=2), tmp_path, chain, tmp_path / "notice")
    command = json.loads(Path(path).read_text())["command"]
    assert {"--cpus-per-task=12", "--gres=gpu:2"} <= set(command)
    assert place_nodes(JobSpec(script="train.py"), tmp_path, chain, tmp_path / "notice") == []


@pytest.fixture
def debian(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """A cluster of Debian machines: n1, which runs this, is 127.0.1.1 to itself."""
    known = {"n1": ["127.0.1.1"], "n2": ["10.0.0.2"], "n1.lan": ["10.0.0.1"], "n3": ["127.0.1.1"]}
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        "#!/bin/sh\n"
        'case "$*" in *hostnames*) echo n1; echo n2;;\n'
        f'*n1) cat {tmp_path}/n1;; *) echo "NodeName=n3 NodeAddr=n3 State=UP";; esac\n'
    )
    scontrol.chmod(0o755)
    (tmp_path / "n1").write_text("NodeName=n1 Arch=x86_64 NodeAddr=n1.lan NodeHostName=n1\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setattr(batch, "resolve", lambda name: list(known.get(name, [])))
    monkeypatch.setattr(batch, "read_route_address", lambda other: f"to {other}")
    return known


def test_p4_a_loopback_name_is_skipped_for_slurms_own_address(
    debian: dict[str, list[str]], tmp_path: Path
) -> None:
    chain = Chain(requeue_max=1, cpus=1, gres="")
    _, path = place_nodes(JobSpec(script="t.py", nodes=2), tmp_path, chain, tmp_path / "notice")
    found = json.loads(Path(path).read_text())
    assert (found["bind"], found["addresses"]) == ("10.0.0.1", ["10.0.0.1", "10.0.0.2"])


def test_p4_else_the_interface_is_taken_that_leads_to_the_others(
    debian: dict[str, list[str]], tmp_path: Path
) -> None:
    (tmp_path / "n1").write_text("NodeName=n1 NodeAddr=n1\n")
    assert batch.resolve_addresses(["n1", "n2"]) == ["to 10.0.0.2", "10.0.0.2"]


def test_p4_a_node_that_nobody_can_reach_is_one_clear_line(debian: dict[str, list[str]]) -> None:
    with pytest.raises(PlatformError, match=r"node n3 has no address for the others.*127\.0\.1\.1"):
        batch.resolve_addresses(["n2", "n3"])
    with pytest.raises(PlatformError, match="node n9 has no address"):
        batch.resolve_addresses(["n2", "n9"])


def test_p4_nodes_that_are_all_here_stay_on_loopback(debian: dict[str, list[str]]) -> None:
    debian["n2"] = ["127.0.1.1"]
    debian["n1.lan"] = ["127.0.0.1"]
    assert all(one.startswith("127.") for one in batch.resolve_addresses(["n1", "n3"]))


def test_p4_a_route_is_found_without_sending_anything() -> None:
    assert batch.read_route_address("127.0.0.1") == "127.0.0.1"


def test_p4_gloo_is_told_the_interface_where_a_name_may_be_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Left alone, gloo listens at the address of the host's own name."""
    monkeypatch.setattr(
        placement, "list_interfaces", lambda: [("lo", "127.0.0.1"), ("eth1", "10.0.0.1")]
    )
    spec = JobSpec(script="t.py")
    find = placement.choose_gloo_interface
    assert find(spec, {"PERDURE_NODE_ADDRESS": "10.0.0.1"}) == "eth1"
    assert find(spec, {"PERDURE_NODE_ADDRESS": "10.0.0.9"}) == ""
    assert find(spec, {"PERDURE_NODE_ADDRESS": "127.0.0.1"}) == find(spec, {}) == "lo"
    chosen = {"PERDURE_NODE_ADDRESS": "10.0.0.1", "GLOO_SOCKET_IFNAME": "ib0"}
    assert find(spec, chosen) == ""


@pytest.mark.parametrize(("observed", "code"), [(False, 15), (True, 0)])
def test_a_job_that_is_only_observed_is_not_stopped_for_a_warning(
    observed: bool, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    leaves = JobSpec(script="t.py", observe=observed).unordered.leaves
    program = "trap 'exit 15' TERM; echo ready; for i in 1 2 3 4 5 6 7 8; do sleep 0.1; done"
    with subprocess.Popen(["sh", "-c", program], stdout=subprocess.PIPE) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == b"ready\n"
        assert follow(job, [signal.SIGUSR1], WORDS, leaves=leaves) == code
    assert ("would have stopped" in capfd.readouterr().out) is observed
