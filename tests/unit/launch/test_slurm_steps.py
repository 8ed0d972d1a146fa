"""The step that puts an agent on each node of an allocation."""

import json
from pathlib import Path

import pytest

from perdure.launch.slurm.batch import place_nodes
from perdure.launch.slurm.chain import Chain
from perdure.model.job import JobSpec


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
