"""P2: replica groups of torchft on one machine divide its GPUs (NVML is played, none is here)."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from tests.unit.adapters.fake_nvml import FakeNvml

from perdure.adapters import devices
from perdure.adapters.devices import choose_group_devices
from perdure.cli.app import run_command
from perdure.cli.running import jobspec
from perdure.launch import lint
from perdure.launch.catalog import load_profile
from perdure.launch.environment import GROUP_DEVICES, rank_environment
from perdure.launch.slurm.render import list_directives
from perdure.launch.ssh.render import _render_settings
from perdure.model.errors import ConfigError
from perdure.model.job import JobSpec, LaunchConfig, TorchftConfig
from perdure.model.orders import Assignment
from perdure.model.paths import job_paths
from perdure.model.platforms.kubernetes import KubernetesSection
from perdure.model.platforms.profile import LaunchSection
from perdure.model.signals.devices import share_devices


def make(
    replicas: int = 3, nproc: int = 2, spares: int = 0, gpus: int = 0, **more: object
) -> JobSpec:
    return JobSpec(
        name="ft", script="t.py", nproc=nproc, nodes=replicas, spares=spares,
        torchft=TorchftConfig(replicas=replicas), launch=LaunchConfig(gpus=gpus), **more,  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight GPUs."""
    fake = FakeNvml(*({"uuid": f"GPU-{x}", "name": "H200"} for x in "abcdefgh"))
    fake.nvmlInit = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setattr(devices, "load_nvml", lambda: fake)


@given(st.integers(1, 16), st.integers(1, 6), st.integers(1, 4))
def test_p2_no_two_groups_have_a_device_in_common_where_there_are_enough(
    count: int, groups: int, nproc: int
) -> None:
    visible = [str(number) for number in range(count)]
    shares = [share_devices(visible, group, groups, nproc) for group in range(groups)]
    assert len({len(share) for share in shares}) == 1
    assert all(len(set(share)) == len(share) >= min(nproc, count) for share in shares)
    if count >= groups * nproc:
        assert len({device for share in shares for device in share}) == sum(map(len, shares))
    else:  # Each device has a group, and none many more than another.
        uses = [sum(device in share for share in shares) for device in visible]
        assert max(uses) - min(uses) <= nproc


@pytest.mark.parametrize(
    ("environ", "own", "shares"),
    [
        ({}, {}, ["0,1", "2,3", "4,5", "6,7"]),
        ({"CUDA_VISIBLE_DEVICES": "7,6,5,4,3,2,1,0"}, {}, ["7,6", "5,4", "3,2", "1,0"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c,1"}, {}, ["GPU-a", "GPU-b", "GPU-c", "1"]),
        ({"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, ["4", "5", "6", "7"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, {}, ["", "", "", ""]),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("gpus")
def test_p2_groups_divide_what_is_visible(
    environ: dict[str, str], own: dict[str, str], shares: list[str]
) -> None:
    spec = make(3, nproc=1, spares=1, env=own)
    assert [choose_group_devices(spec, node, environ) for node in range(4)] == shares


@pytest.mark.usefixtures("gpus")
def test_p2_other_jobs_keep_what_they_see() -> None:
    assert choose_group_devices(JobSpec(script="t.py", nodes=2), 0, {}) == ""


def test_p2_without_a_gpu_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "load_nvml", lambda: None)
    monkeypatch.setattr(devices, "_list_nodes", lambda: [])
    assert choose_group_devices(make(), 0, {}) == ""


def test_p2_the_ranks_of_a_group_find_its_devices_whatever_the_job_says() -> None:
    spec = make(2, env={"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    paths = job_paths("/h", "ft", "/tmp/perdure-1000", "/dev/shm/perdure-1000")
    for group, share in enumerate(("0,1", "2,3")):
        run = Assignment(number=1, generation=1, phase="run", replica=group)
        for local in range(2):
            env = rank_environment(
                spec, 2 * group + local, run, paths, node=group, base={GROUP_DEVICES: share},
                home="/h", clock_offset_s=0.0,
            )  # fmt: skip
            assert (env["CUDA_VISIBLE_DEVICES"], env["LOCAL_RANK"]) == (share, str(local))
            assert GROUP_DEVICES not in env


def test_p2_a_machine_is_rendered_with_devices_for_all_groups_and_spares() -> None:
    spec = make(1, nproc=2, spares=2)
    spec = structs.replace(spec, torchft=TorchftConfig(replicas=3))
    profile = load_profile("vastai", "/nonexistent").profile
    assert json.loads(_render_settings(spec, profile, []))["gpus"] == 8
    slurm = list_directives(structs.replace(spec, launch=LaunchConfig(gpus=8)), profile.slurm)
    assert {"--nodes=1", "--gres=gpu:8", "--cpus-per-task=8"} <= set(slurm)


@pytest.mark.parametrize("name", ["vastai", "slurm", "kubernetes"])
def test_p2_too_few_devices_are_an_error_before_anything_is_sent(name: str) -> None:
    profile = load_profile(name, "/nonexistent").profile
    spec = structs.replace(make(gpus=1), nodes=1)
    found = [f for f in lint.check_plan(spec, profile) if "launch.gpus = 1" in f.text]
    assert [(f.level, "launch.gpus = 6" in f.hint) for f in found] == [("error", True)]
    enough = structs.replace(spec, launch=LaunchConfig(gpus=6))
    assert not [f for f in lint.check_plan(enough, profile) if "ranks on one machine" in f.text]


def test_p2_sharing_is_said_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobspec, "list_visible_gpus", lambda env: ("a", "b"))
    notes = jobspec.check_devices(make(3, nproc=1), {})
    threads = "OMP_NUM_THREADS=1 for each of the 3 ranks of a machine, as torchrun does"
    assert notes == [
        f"{threads}; set it yourself for more", "3 replica groups of 1 share 2 visible GPUs",
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "nodes"), [("slurm", 2), ("slurm", 3), ("kubernetes", 3)])
def test_p3_torchft_over_several_machines_is_refused_with_its_reason(name: str, nodes: int) -> None:
    profile = load_profile(name, "/nonexistent").profile
    if name == "kubernetes":
        profile = structs.replace(profile, kubernetes=KubernetesSection(image="x@sha256:0"))
    spec = structs.replace(make(), nodes=nodes)
    (found,) = [f for f in lint.check_plan(spec, profile) if "torchft on" in f.text]
    assert found.level == "error"
    assert "lighthouse" in found.text
    one = structs.replace(spec, nodes=1)
    assert not [f for f in lint.check_plan(one, profile) if "torchft on" in f.text]


def test_p3_boxes_of_one_job_are_refused() -> None:
    from perdure.launch.ssh.render import render

    profile = load_profile("generic-ssh", "/nonexistent").profile
    profile = structs.replace(profile, launch=LaunchSection(hosts=("a", "b")))
    with pytest.raises(ConfigError, match="on one box only"):
        render(structs.replace(make(2), launch=LaunchConfig(project="/p")), profile)


@pytest.mark.parametrize("option", [["--remote", "1"], ["--placement", "PLACE"]])
def test_p3_perdure_run_refuses_other_machines_for_groups(
    option: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "home"))
    (tmp_path / "t.py").write_text("")
    (tmp_path / "place").write_text('{"bind":"10.0.0.1","addresses":["10.0.0.1","10.0.0.2"]}')
    words = [str(tmp_path / "place") if word == "PLACE" else word for word in option]
    code = run_command(["run", "--torchft", *words, str(tmp_path / "t.py")])
    said = capsys.readouterr().err.splitlines()
    assert code == 2
    assert len([line for line in said if "error" in line]) == 1
    assert "replica groups" in said[0]
