"""A job rendered for a box: files that a person can read, the same for the same job."""

import os
import subprocess
from pathlib import Path

import msgspec
import pytest
from tests.waiting import PATIENCE_S

from perdure.launch.catalog import load_profile, overlay
from perdure.launch.platforms import load_platform
from perdure.launch.ssh.check import check_free_space, measure_project
from perdure.model.errors import ConfigError
from perdure.model.job import CheckpointConfig, JobSpec, LaunchConfig
from perdure.model.platforms.launching import Plan


def render(spec: JobSpec, **values: object) -> Plan:
    profile = overlay(load_profile("generic-ssh", "/nonexistent"), values, "test").profile
    return load_platform("ssh").render(spec, profile)


def make(**fields: object) -> JobSpec:
    launch = LaunchConfig(project="/p", outputs=("runs",), secrets=("HF_TOKEN",))
    return JobSpec(**{"name": "gpt", "script": "train.py", "nproc": 2, "launch": launch, **fields})  # type: ignore[arg-type]


def test_the_same_job_gives_the_same_files_and_shells_can_read_them(tmp_path: Path) -> None:
    values = {"launch.host": "gpu-box", "launch.packages": ("einops>=0.8",),
              "interruption.relaunch": "cron", "mirror": "https://mirror.example"}  # fmt: skip
    plan = render(make(), **values)
    assert plan == render(make(), **values)
    for name, content in plan.files.items():
        (tmp_path / name).write_text(content)
        assert "@job@" not in content
        if name.endswith(".sh"):
            subprocess.run(["sh", "-n", str(tmp_path / name)], check=True, timeout=PATIENCE_S)
        if name.endswith(".py"):
            compile(content, name, "exec")
    assert 'export HF_ENDPOINT="https://mirror.example"' in plan.files["env.sh"]
    assert "'einops>=0.8'" in plan.files["setup.sh"]
    assert [step.command[0] for step in plan.steps].count("rsync") == 1
    assert plan.steps[4].stdin == "values of HF_TOKEN"


def test_env_sh_says_where_things_are() -> None:
    plan = render(make(), **{"overrides.DATA_DIR": "~/data", "overrides.PROXY_HOOK": "module x"})
    assert plan.files["env.sh"] == (
        "# Where things are on this box: read by this job's scripts and by perdure's commands.\n"
        "module x\n"
        'export DATA_DIR="$HOME/data"\n'
        'export DURABLE_DIR="$HOME/perdure"\n'
        'export HF_HOME="$DATA_DIR/.hf"\n'
        'export CRED_FILE="$HOME/.perdure-credentials-gpt"\n'
        'export JOB_DIR="$DATA_DIR/gpt"\n'
        'export PERDURE_HOME="$DURABLE_DIR/state"\n'
        'export PERDURE_PYTHON="$(cat "$JOB_DIR/launch/python" 2>/dev/null)"\n'
    )


def test_the_job_on_the_box_is_the_job_here() -> None:
    spec = make(cwd="sub", script="../train.py", args=("--lr", "1"))
    placed = msgspec.json.decode(render(spec).files["job.json"], type=JobSpec)
    assert (placed.script, placed.cwd, placed.args) == ("../train.py", "sub", ("--lr", "1"))
    settings = msgspec.json.decode(render(make(nproc=4)).files["settings.json"])
    assert settings["gpus"] == 4


@pytest.mark.parametrize("fields", [{"script": "/elsewhere/t.py"}, {"cwd": "../other"}])
def test_what_is_outside_the_project_would_not_be_there(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="outside the project"):
        render(make(**fields))


def test_the_linter_of_a_box() -> None:
    words = [f.text for f in render(make(nodes=2), **{"overrides.CRED_FILE": ""}).findings]
    assert any("emulated on the one box" in text for text in words)
    assert any("keeps no secrets in files" in text for text in words)
    fleeting = make(checkpoint=CheckpointConfig(url="/tmp/ckpt"))
    assert [f.trap for f in render(fleeting).findings if f.level == "error"] == ["SLURM5"]


def test_the_ways_to_detach_are_tried_in_the_profile_s_order() -> None:
    start = render(make(), **{"daemon.tools": ("setsid",), "overrides.DETACH": "setsid"})
    assert "tmux" not in start.files["start.sh"]
    both = render(make()).files["start.sh"]
    assert both.index("tmux -S") < both.index("setsid nohup")


def test_a_project_that_does_not_fit_is_not_sent(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "big.bin").write_bytes(b"x" * 5_000)
    (tmp_path / "train.py").write_text("pass\n")
    launch = LaunchConfig(project=str(tmp_path))
    whole = measure_project(render(make(launch=launch)))
    assert whole == (5_005, 4), "two files, their folder and the project's own"
    without = msgspec.structs.replace(launch, exclude=("data",))
    assert measure_project(render(make(launch=without))) == (5, 2)

    def judge(**free: int) -> list[str]:
        room = {"path": "/d", "free_bytes": 10_000, "inodes": 100, "free_inodes": 50, **free}
        return [f.trap for f in check_free_space(room, whole) if f.level == "error"]

    assert judge() == []
    assert judge(free_bytes=5_004) == ["U6"]
    assert judge(free_inodes=3) == ["U7"]
    assert judge(inodes=0, free_inodes=0) == [], "a file system that counts no inodes"


def test_a_tilde_is_the_home_wherever_the_shell_has_it_in_quotes() -> None:
    assert render(make(), **{"overrides.DATA_DIR": "~/data"}).place == "$HOME/data/gpt"


def test_a_job_leaves_another_s_entry_in_the_crontab(tmp_path: Path) -> None:
    table, launch = tmp_path / "table", tmp_path / "launch"
    launch.mkdir()
    (launch / "env.sh").write_text(f"JOB_DIR={tmp_path}\n")
    (tmp_path / "crontab").write_text(
        f'#!/bin/sh\nif [ "$1" = -l ]; then cat {table}; else cat > {table}.new; '
        f"mv {table}.new {table}; fi\n"
    )
    (tmp_path / "crontab").chmod(0o755)
    table.touch()
    jobs = ("gpt2", "gpt", "gpt.b")
    for job in jobs:
        spec = make(name=job)
        script = render(spec, **{"interruption.relaunch": "cron"}).files["relaunch.sh"]
        (launch / f"{job}.sh").write_text(script)
        for word in ("on", "on"):  # A launch may be repeated.
            path = f"{tmp_path}:{os.environ['PATH']}"
            command = ["sh", str(launch / f"{job}.sh"), word]
            subprocess.run(command, check=True, timeout=PATIENCE_S, env={"PATH": path})
    assert [line.split()[-1] for line in table.read_text().splitlines()] == [
        f"[{job}]" for job in jobs
    ]
    subprocess.run(["sh", str(launch / "gpt.sh"), "off"], check=True, timeout=PATIENCE_S,
                   env={"PATH": path})  # fmt: skip
    assert [line.split()[-1] for line in table.read_text().splitlines()] == ["[gpt2]", "[gpt.b]"]
