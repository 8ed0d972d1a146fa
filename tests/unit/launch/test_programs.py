"""P5: a box is asked whatever its Python is, and what a job needs is known before it is sent."""

import ast
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from tests.waiting import PATIENCE_S

from perdure.launch.catalog import load_profile
from perdure.launch.ssh.check import check_torch
from perdure.launch.ssh.render import _render_setup
from perdure.launch.wheel import ASK, OLDEST, choose_extras, read_program
from perdure.model.job import (
    CheckpointConfig,
    JobSpec,
    LaunchConfig,
    MetricsConfig,
    TorchftConfig,
    TrackingConfig,
)
from perdure_lab.drill.boxes import GUARD

PROGRAMS = ("box.py", "results.py", GUARD)


def find_python(version: str) -> str:
    """Return an old Python of this machine; empty where there is none that runs."""
    homes = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}*/bin/python"))
    for path in (*map(str, homes), shutil.which(f"python{version}")):
        if path and not subprocess.run([path, "-c", ""], capture_output=True).returncode:
            return path
    return ""


@pytest.mark.parametrize("name", PROGRAMS)
def test_p5_python_3_6_can_read_what_runs_on_a_box(name: str) -> None:
    tree = ast.parse(read_program(name), feature_version=OLDEST)
    assert not [n for n in ast.walk(tree) if isinstance(n, ast.AnnAssign | ast.NamedExpr)]
    imported = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    assert "perdure" not in imported


@pytest.mark.parametrize("version", ["3.6", "3.7"])
def test_p5_an_old_python_answers_with_its_version(version: str, tmp_path: Path) -> None:
    python = find_python(version)
    if not python:
        pytest.skip(f"no Python {version} here")
    wanted = {"places": {"DATA_DIR": str(tmp_path)}, "python": python, "mirror": "",
              "folder": str(tmp_path / "job")}  # fmt: skip
    done = subprocess.run([python, "-", "probe", json.dumps(wanted)], capture_output=True,
                          input=read_program("box.py").encode(), timeout=PATIENCE_S)  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.decode().partition("@@perdure-json ")[2])
    assert told["python_version"].startswith(version)
    (tmp_path / "a.pt").write_text("x")
    asked = json.dumps({"roots": {"job": str(tmp_path)}, "skip": {}, "exclude": [], "hash": True})
    done = subprocess.run([python, "-", "manifest", asked], capture_output=True,
                          input=read_program("results.py").encode(),
                          timeout=PATIENCE_S)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert b'"job/a.pt"' in done.stdout


@pytest.mark.parametrize(
    ("program", "words"),
    [("", "there is no python3 on the box"),
     ('case "$1" in -V) echo Python 2.7.18;; *) exit 1;; esac', "Python 2.7.18: 3.6 or newer")],
)  # fmt: skip
def test_p5_a_box_without_a_python_is_one_clear_line(
    program: str, words: str, tmp_path: Path
) -> None:
    if program:
        (tmp_path / "python3").write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / "python3").chmod(0o755)
    done = subprocess.run(["/bin/sh", "-c", f"{ASK}echo on"], capture_output=True, text=True,
                          env={"PATH": str(tmp_path)})  # fmt: skip
    assert done.returncode in (69, 127)
    assert (done.stdout, words in done.stderr) == ("", True)
    assert len(done.stderr.splitlines()) == 1
    fine = subprocess.run(["/bin/sh", "-c", f"{ASK}echo on"], capture_output=True, text=True,
                          env=dict(os.environ))  # fmt: skip
    assert fine.stdout == "on\n"


@pytest.mark.parametrize(
    ("version", "mode", "packages", "level"),
    [("2.13.0+cu130", "auto", (), ""), ("2.13.1", "use", (), ""), ("2.4.1", "auto", (), "error"),
     ("1.13.1", "use", (), "error"), ("2.14.0", "auto", (), "warning"),
     ("2.9.1", "use", (), ""), ("2.8.0", "use", (), "error"), ("", "auto", (), ""),
     ("", "use", (), "error"), ("2.4.1", "create", ("torch==2.13.0",), ""),
     ("2.4.1", "create", ("torch-geometric",), "error")],
)  # fmt: skip
def test_p5_a_torch_that_is_too_old_is_said_before_anything_is_sent(
    version: str, mode: Any, packages: tuple[str, ...], level: str
) -> None:
    profile = load_profile("vastai", "/nonexistent").profile
    launch = structs.replace(profile.launch, environment=mode, packages=packages)
    found = check_torch(structs.replace(profile, launch=launch), version)
    assert [f.level for f in found] == ([level] if level else [])
    assert all("torch" in f.text for f in found)


@pytest.mark.parametrize(
    ("text", "fields", "extras"),
    [
        ("import torch\n", {}, ()),
        ("import perdure.huggingface\n", {}, ("huggingface",)),
        ("from perdure.lightning import attach\n", {}, ("lightning",)),
        ("    from perdure import huggingface\n", {}, ("huggingface",)),
        ("import perdure.torchft\n", {"metrics": MetricsConfig(prometheus_port=9)},
         ("metrics", "torchft")),
        ("", {"torchft": TorchftConfig(replicas=2)}, ("torchft",)),
        ("", {"tracking": TrackingConfig(wandb="p"), "checkpoint": CheckpointConfig(url="s3://b")},
         ("s3", "wandb")),
    ],
)  # fmt: skip
def test_p5_extras_are_those_that_the_job_needs(
    text: str, fields: dict[str, Any], extras: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "t.py").write_text(text)
    spec = JobSpec(name="j", script="t.py", launch=LaunchConfig(project=str(tmp_path)), **fields)
    assert choose_extras(spec) == extras
    setup = _render_setup(spec, load_profile("vastai", "/nonexistent").profile)
    assert f'extra="{",".join(extras)}"' in setup
    assert ("grpc" in setup) == ("torchft" in extras)


def test_p5_a_script_that_is_not_there_needs_nothing(tmp_path: Path) -> None:
    launch = LaunchConfig(project=str(tmp_path))
    assert choose_extras(JobSpec(name="j", script="\0/no.py", launch=launch)) == ()
