"""What is refused before anything starts."""

import json
import os
import py_compile
import shutil
import subprocess
import sys
import zipfile
from collections import namedtuple
from pathlib import Path
from typing import Any

import msgspec
import pytest

from perdure.cli.platforms.launch import make_launch_spec
from perdure.cli.running import jobspec
from perdure.cli.running.run import recall_end
from perdure.model.errors import ConfigError, PlatformError
from perdure.model.job import JobSpec, TorchftConfig
from perdure.model.report import Snapshot
from perdure.service.jobfiles import JobLock, write_document
from perdure.service.jobfolders import paths_of


def job(folder: Path, script: str, **more: object) -> JobSpec:
    return JobSpec(script=script, cwd=str(folder), **more)  # type: ignore[arg-type]


def test_a_good_script_passes_and_is_not_executed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('executed')\n")
    assert jobspec.check_job(job(tmp_path, "train.py"), str(tmp_path / "home"), {}) == []


def test_a_missing_script_names_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    with pytest.raises(ConfigError) as caught:
        jobspec.check_script(job(tmp_path, "trian.py"))
    assert caught.value.message == "no such script: trian.py"
    assert caught.value.hint == "did you mean train.py?"


def test_a_syntax_error_is_shown_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("x = 1\nfor x in\n")
    with pytest.raises(ConfigError, match=r"bad\.py, line 2: .*: for x in"):
        jobspec.check_script(job(tmp_path, "bad.py"))


@pytest.mark.parametrize("content", [b"\0\0", b"\xff\xfe\x00"])
def test_what_is_no_source_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(ConfigError, match=r"x\.bin"):
        jobspec.check_script(job(tmp_path, "x.bin"))


def test_a_directory_is_no_script(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a directory"):
        jobspec.check_script(job(tmp_path, "."))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("import torch.multiprocessing as mp\nmp.spawn(main, nprocs=2)\n", "line 2"),
        ("from accelerate import notebook_launcher\nnotebook_launcher(f)\n", "line 2"),
        ("# mp.spawn(main)\nimport torch\n", None),
        ("os.spawn(x)\n", None),
    ],
)
def test_a_script_that_makes_its_own_processes_is_told(
    tmp_path: Path, text: str, line: str | None
) -> None:
    (tmp_path / "own.py").write_text(text)
    notes = jobspec.check_script(job(tmp_path, "own.py"))
    assert [line in note for note in notes] == ([True] if line else [])


def test_programs(tmp_path: Path) -> None:
    jobspec.check_program(job(tmp_path, "sh", no_python=True))
    program = tmp_path / "p"
    program.write_text("#!/bin/sh\n")
    with pytest.raises(ConfigError, match="no such program"):
        jobspec.check_program(job(tmp_path, "./p", no_python=True))
    program.chmod(0o755)
    jobspec.check_program(job(tmp_path, "./p", no_python=True))


def test_modules_are_found_without_importing_their_packages(tmp_path: Path) -> None:
    package = tmp_path / "a_package_of_ours"
    (package / "sub").mkdir(parents=True)
    for name in ("__init__.py", "one.py", "sub/__init__.py", "sub/__main__.py"):
        (package / name).write_text("raise SystemExit('imported')\n")
    for module in ("a_package_of_ours.one", "a_package_of_ours.sub", "json.tool"):
        jobspec.check_module(job(tmp_path, module, module=True))
    assert "a_package_of_ours" not in sys.modules
    for module, part in (
        ("a_package_of_ours.two", r"a_package_of_ours\.two$"),
        ("nowhere_at_all.x", "nowhere_at_all$"),
        ("a_package_of_ours", "__main__"),
        ("json..tool", r"json\.$"),
    ):
        with pytest.raises(ConfigError, match=part):
            jobspec.check_module(job(tmp_path, module, module=True))


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlatformError, match="cannot write to"):
        jobspec.check_folder(str(tmp_path / "file" / "home"))


def test_no_space_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10 << 30, 10 << 30, 5 << 20))
    with pytest.raises(PlatformError, match="no space left: 5 MiB free"):
        jobspec.check_folder(str(tmp_path))


def run_with(spec: JobSpec, environ: dict[str, str]) -> None:
    """Have this machine execute a program with a job's variables and arguments."""
    subprocess.run(["/bin/true", *spec.args], env={**environ, **spec.env}, check=True)


@pytest.mark.parametrize(
    ("env", "args", "named"),
    [
        ({"BIG": "x" * (128 << 10)}, (), r"env\.BIG: 131,077 bytes"),
        ({"BIG": "\u20ac" * (44 << 10)}, (), r"env\.BIG: 135,173 bytes"),
        ({}, ("a", "x" * (128 << 10)), r"args\[1\]: 131,073 bytes"),
        ({f"V{n:02}": "x" * 100_000 for n in range(21)}, (), r"2,1.* largest is env\.V00, 100,005"),
        ({}, ("x" * 1000,) * 2200, r"2,2.* largest is HOST, 9,005 bytes"),
    ],
)
def test_what_linux_hands_to_no_program_is_named_before_anything_starts(
    tmp_path: Path, env: dict[str, str], args: tuple[str, ...], named: str
) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "job.toml").write_text(
        f'name = "gpt"\nscript = "train.py"\nargs = {json.dumps(args)}\n[env]\n'
        + "".join(f"{name} = {json.dumps(value)}\n" for name, value in env.items())
    )
    spec, around = job(tmp_path, "train.py", env=env, args=args), {"HOST": "y" * 8_999}
    with pytest.raises(OSError, match="Argument list too long"):
        run_with(spec, around)
    with pytest.raises(ConfigError, match=named) as caught:
        jobspec.check_job(spec, str(tmp_path / "home"), around)
    assert "file" in caught.value.hint
    with pytest.raises(ConfigError, match=named.partition("largest")[0]):
        make_launch_spec(str(tmp_path / "job.toml"), str(tmp_path / "home"))


def test_what_is_just_not_too_large_is_run(tmp_path: Path) -> None:
    one = job(tmp_path, "train.py", env={"BIG": "x" * ((128 << 10) - 5)})
    many = job(tmp_path, "train.py", env={f"V{n:02}": "x" * 100_000 for n in range(20)})
    for spec in (one, many):
        jobspec.check_environment(spec, {"HOST": "y" * 8_999})
        run_with(spec, {"HOST": "y" * 8_999})


def test_a_torch_that_is_not_tested_is_said() -> None:
    for fine in ("", "2.9.1", "2.13.0+cpu"):
        assert jobspec.check_torch_version(fine) == []
    for other in ("2.8.0", "2.14.0.dev1", "3.0"):
        assert f"torch {other}: perdure is tested with" in jobspec.check_torch_version(other)[0]


def test_devices_and_default_threads_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobspec, "list_visible_gpus", lambda env: ("GPU-a",))
    threads, devices = jobspec.check_devices(JobSpec(script="x", nproc=2), {})
    assert threads.startswith("OMP_NUM_THREADS=1 for each of the 2 ranks")
    assert "2 ranks and 1 visible GPUs" in devices
    assert "so will NCCL" in devices
    assert jobspec.check_devices(JobSpec(script="x", nproc=1), {}) == []
    monkeypatch.setattr(jobspec, "list_visible_gpus", lambda env: ())
    monkeypatch.setattr(jobspec, "count_cpus", lambda: 2)
    several = {"OMP_NUM_THREADS": "2"}
    assert jobspec.check_devices(JobSpec(script="x", nproc=2), several) == []
    (shared,) = jobspec.check_devices(JobSpec(script="x", nproc=3), several)
    assert "3 ranks share 2 cores" in shared
    elsewhere = JobSpec(script="x", nproc=2, nodes=3, remote=2)
    assert jobspec.check_devices(elsewhere, several) == [], "other machines bring the others"
    (shared,) = jobspec.check_devices(JobSpec(script="x", nproc=2, nodes=3), several)
    assert "6 ranks share 2 cores" in shared


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"saved": (20, 50)}, "goes on from there if its script asks for more steps; `perdure rm"),
        ({"saved": (20,)}, "goes on from its newest checkpoint, of step 20; `perdure rm"),
        ({}, "left no checkpoint: it begins at step 0"),
        ({"state": "stopped", "saved": (50,)}, ""),
        ({"step": -1, "depth": "supervised"}, ""),
        ({"replicas": 2}, ""),
    ],
)
def test_a_job_that_is_done_is_called_to_mind(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    torchft = TorchftConfig(replicas=changes.pop("replicas", 0))
    spec, home = JobSpec(script="train.py", name="mine", torchft=torchft), str(tmp_path)
    assert recall_end(spec, home) == [], "there was none"
    document: dict[str, Any] = {
        "version": 1,
        "job": "mine",
        "state": "done",
        "at_s": 9.0,
        "started_s": 1.0,
    }
    document |= {"generation": 0, "restarts": 0, "step": 50, "steps_per_s": 0.0, "world_size": 1}
    document |= {"depth": "resumable", "reason": "done"} | changes
    saved = document.pop("saved", ())
    document["checkpoints"] = [{"step": step, "path": "p", "bytes": 1} for step in saved]
    snapshot = msgspec.convert(document, Snapshot)
    path = Path(paths_of(home, "mine").snapshot)
    path.parent.mkdir(parents=True)
    write_document(str(path), snapshot)
    assert [line.partition(", and ")[2][: len(said)] for line in recall_end(spec, home)] == (
        [said] if said else []
    )
    path.write_bytes(path.read_bytes()[:-9])
    assert recall_end(spec, home) == [], "a damaged picture says nothing"


def test_names(tmp_path: Path) -> None:
    home = str(tmp_path)
    assert jobspec.choose_name(JobSpec(script="a/My train.py"), home).name == "My-train"
    assert jobspec.choose_name(JobSpec(script="p.q.train", module=True), home).name == "train"
    assert jobspec.choose_name(JobSpec(script="..."), home).name == "job"
    lock = JobLock(paths_of(home, "train"))
    try:
        assert jobspec.choose_name(JobSpec(script="train.py"), home).name == "train-2"
    finally:
        lock.release()
    assert jobspec.choose_name(JobSpec(script="train.py"), home).name == "train"
    assert os.path.isdir(tmp_path / "jobs" / "train")


def test_whatever_python_runs_is_accepted(tmp_path: Path) -> None:
    """A directory and a zip file with a main module, and compiled code."""
    main = tmp_path / "app" / "__main__.py"
    main.parent.mkdir()
    main.write_text("pass")
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as file:
        file.write(main, "__main__.py")
    py_compile.compile(str(main), str(tmp_path / "app.pyc"))
    for name in ("app", "app.zip", "app.pyc"):
        assert jobspec.check_script(job(tmp_path, name)) == []


def test_a_script_that_comes_through_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="it is a FIFO") as caught:
        jobspec.check_script(job(tmp_path, "pipe"))
    assert "write it to a file" in str(caught.value.hint)


def test_folders_that_perdure_cannot_write_down_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"PERDURE_HOME: /caf\\udce9"):
        jobspec.check_names(job(Path("/"), "x.py"), "/caf\udce9")
