"""A rendered notebook: its cells are run as they are, in folders that stand for a service's."""

import ast
import functools
import inspect
import io
import json
import os
import subprocess
import sys
import time
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs
from tests.waiting import PATIENCE_S

from perdure.launch.catalog import load_profile
from perdure.launch.notebook import cells, render
from perdure.launch.notebook.runner import (
    compute_time_left,
    keep,
    read_newest_step,
    read_stamps,
    record,
)
from perdure.launch.runs import SESSION_WORDS, STUCK_RUNS, Run, decide
from perdure.model.checkpoints import Manifest
from perdure.model.errors import ConfigError
from perdure.model.job import CheckpointConfig, JobSpec, LaunchConfig
from perdure.model.platforms.profile import Profile
from perdure.model.report import Snapshot
from perdure.worker.checkpoint.files import open_place

GOOD = "print('cuda:0: a product of matrices is right')"
BAD = "import sys; sys.exit('torch 2.13.0 sees no GPU: this session runs on the CPU')"


def profile(name: str, **changes: Any) -> Profile:
    found = load_profile(name, "/nowhere").profile
    return structs.replace(found, notebook=structs.replace(found.notebook, **changes))


@pytest.fixture(scope="module", autouse=True)
def one_wheel() -> Iterator[None]:
    """To store the wheel takes seconds, and it is the same for every notebook."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cells, "_store_wheel", functools.cache(cells._store_wheel))
        yield


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "train.py").write_text("print('trains')\n")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "train.pyc").write_text("left behind")
    return folder


def spec(project: Path, **changes: Any) -> JobSpec:
    launch = LaunchConfig(project=str(project), **changes.pop("launch", {}))
    return JobSpec(name="gpt", script="train.py", launch=launch, **changes)


@pytest.fixture(scope="module")
def notebook(project: Path) -> dict[str, Any]:
    plan = render(spec(project), profile("kaggle", owner="ada"))
    assert not [f for f in plan.findings if f.level in ("error", "warning")]
    return dict(json.loads(plan.files["gpt.ipynb"]))


class Service:
    """A notebook's cells in a place of their own; `kaggle` or `colab`."""

    def __init__(self, notebook: dict[str, Any], root: Path, name: str) -> None:
        self.root = root
        self.space: dict[str, Any] = {"__name__": "__main__"}
        self.cells = {c["id"]: "".join(c["source"]) for c in notebook["cells"]}
        places = {"durable_dir": "durable", "data_dir": "data", "input_dir": "input",
                  "mount": "drive"}  # fmt: skip
        self.run("settings", "session")
        self.settings: dict[str, Any] = self.space["settings"]
        self.settings |= {key: str(root / place) for key, place in places.items()}
        self.settings |= {"service": name, "internet_url": (root / "web").as_uri()}
        (root / "web").touch()
        self.space["PROBE"] = GOOD
        self.space["read_session_start_s"] = lambda ceiling: 0.0
        self.durable = root / "durable" / "gpt"

    def run(self, *cells: str) -> None:
        for name in cells:
            exec(compile(self.cells[name], name, "exec"), self.space)

    def status(self) -> dict[str, Any]:
        return dict(json.loads((self.durable / "status.json").read_text()))


@pytest.fixture
def kaggle(notebook: dict[str, Any], tmp_path: Path) -> Service:
    return Service(notebook, tmp_path, "kaggle")


@pytest.fixture
def colab(notebook: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Service:
    """Return a session of Colab whose Drive is a folder that is taken for a mount."""
    drive = types.ModuleType("google.colab.drive")
    drive.mount = lambda path: None  # type: ignore[attr-defined]
    drive.flush_and_unmount = lambda: None  # type: ignore[attr-defined]
    for name in ("google", "google.colab"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "google.colab.drive", drive)
    monkeypatch.setattr(os.path, "ismount", lambda path: path.endswith("drive"))
    return Service(notebook, tmp_path, "colab")


def make_checkpoint(job: Path, step: int, content: str = "weights") -> None:
    folder = job / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "data.pt").write_text(content)
    (folder / "manifest.json").write_text("{}")


def test_the_document_keeps_to_its_format_and_every_cell_compiles(notebook: dict[str, Any]) -> None:
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    names = [cell["id"] for cell in notebook["cells"]]
    assert len(names) == len(set(names))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert set(cell) == {
                "cell_type", "id", "metadata", "source", "execution_count", "outputs"
            }  # fmt: skip
            compile("".join(cell["source"]), cell["id"], "exec")
        else:
            assert set(cell) == {"cell_type", "id", "metadata", "source"}


def test_a_session_begins_and_has_what_it_needs(
    kaggle: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    kaggle.run("durable", "checks", "payload")
    text = capsys.readouterr().out
    assert "this job begins" in text
    assert "a product of matrices is right" in text
    session: Any = kaggle.space["session"]
    session.unpack(kaggle.space["PAYLOAD"])
    data = kaggle.root / "data" / "gpt"
    assert sorted(p.name for p in (data / "project").iterdir()) == ["train.py"]
    assert (data / kaggle.settings["wheel"]).stat().st_size > 100_000
    job = json.loads((data / "job.json").read_text())
    assert job["checkpoint"] == {"url": "/kaggle/working/gpt/checkpoints", "every_steps": 100}
    assert not list(kaggle.durable.glob(".probe*"))


def test_checkpoints_reach_drive_by_way_of_the_own_disk(project: Path, tmp_path: Path) -> None:
    found = profile("colab")
    places = structs.replace(found.overrides, DURABLE_DIR=str(tmp_path / "drive"))
    job = cells.place(spec(project), structs.replace(found, overrides=places))
    staging, remote = open_place(job.checkpoint.url)
    assert remote is not None
    assert remote.list_names() == []
    local = tmp_path / staging.name / "step-00000100"
    local.mkdir(parents=True)
    (local / "manifest.json").write_text("{}")
    remote.upload(local, Manifest(step=100, world_size=1, files=()))
    assert remote.list_names() == ["step-00000100"]
    there = tmp_path / "drive" / "gpt" / "checkpoints"  # Where the session looks for them.
    assert sorted(p.name for p in there.iterdir()) == ["latest", "step-00000100"]
    assert read_newest_step(there.parent) == 100


def test_kaggle_goes_on_from_what_the_version_before_left(
    kaggle: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    older, newer = (kaggle.root / "input" / place / "gpt" for place in ("perdure-gpt", "n/ada/x"))
    make_checkpoint(older, 100)
    make_checkpoint(newer, 200)
    (older / "status.json").write_text('{"ended_s": 1, "checkpoint": 100}')
    (newer / "status.json").write_text('{"ended_s": 2, "checkpoint": 200}')
    kaggle.run("durable")
    assert "1 checkpoints, the newest is step-00000200" in capsys.readouterr().out
    make_checkpoint(kaggle.durable, 300)
    (newer / "status.json").write_text('{"ended_s": 3}')
    kaggle.run("durable")  # All cells once more, in the same session: its own work stays.
    assert "step-00000300" in capsys.readouterr().out
    assert kaggle.status()["checkpoint"] == 200


def test_a_copy_that_broke_off_is_begun_again_and_never_taken_for_whole(kaggle: Service) -> None:
    source, coming = kaggle.root / "input" / "perdure-gpt" / "gpt", kaggle.root / "durable"
    make_checkpoint(source, 100)
    make_checkpoint(coming / "gpt.coming", 50)  # A kernel was killed in the middle.
    (source / "checkpoints" / "lost").symlink_to("nowhere")
    kaggle.run("durable")
    assert kaggle.status()["state"] == "refused"
    assert not (kaggle.durable / "checkpoints").exists()
    assert not (coming / "gpt.coming").exists(), "what was half copied would be part of the output"

    (source / "checkpoints" / "lost").unlink()
    kaggle.run("durable")
    assert [p.name for p in (kaggle.durable / "checkpoints").iterdir()] == ["step-00000100"]


def test_a_wrong_accelerator_ends_a_kaggle_session_and_keeps_what_was_carried_over(
    kaggle: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint(kaggle.root / "input" / "perdure-gpt" / "gpt", 100)
    kaggle.space["PROBE"] = BAD
    kaggle.run("durable", "checks", "payload", "install", "train", "after")
    status = kaggle.status()
    assert status["state"] == "refused"
    assert "sees no GPU" in status["reason"]
    assert (kaggle.durable / "checkpoints" / "step-00000100" / "data.pt").exists()
    assert "training: not done: accelerator: torch 2.13.0 sees no GPU" in capsys.readouterr().out


def test_on_colab_the_cell_itself_fails(colab: Service) -> None:
    colab.space["PROBE"] = BAD
    colab.run("durable")
    with pytest.raises(colab.space["SessionError"], match="sees no GPU"):
        colab.run("checks")


def test_without_internet(kaggle: Service) -> None:
    kaggle.settings["internet_url"] = "http://127.0.0.1:1/"
    kaggle.run("durable", "checks")
    assert "is not reached" in kaggle.status()["reason"]
    assert "phone number" in kaggle.status()["reason"]


def test_a_drive_that_is_no_mount_is_not_trusted(
    colab: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os.path, "ismount", lambda path: False)
    with pytest.raises(Exception, match="is not mounted"):
        colab.run("durable")
    assert not colab.durable.exists()  # Drive is not mounted over files.


def test_a_drive_that_loses_a_file_is_found_out(colab: Service) -> None:
    colab.run("durable")
    make_checkpoint(colab.durable, 100)
    session: Any = colab.space["session"]
    session.settle()
    drive: Any = sys.modules["google.colab.drive"]
    weights = colab.durable / "checkpoints" / "step-00000100" / "data.pt"
    drive.flush_and_unmount = lambda: weights.write_text("WEIGHTS")  # As long as before.
    with pytest.raises(Exception, match=r"lacks .*data\.pt"):
        session.settle()


def test_the_sitting_is_run_and_shown(
    kaggle: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kaggle.run("durable")
    fake = kaggle.root / "python"
    line = '{"state": "stopped", "reason": "goes on", "next": "requeue", "checkpoint": 40}'
    fake.write_text(f"#!/bin/sh\necho step 40\necho '{line}' > {kaggle.durable}/status.json\n")
    fake.chmod(0o755)
    (kaggle.root / "data" / "gpt").mkdir(parents=True)
    monkeypatch.setattr(sys, "executable", str(fake))
    kaggle.run("train", "after")
    text = capsys.readouterr().out
    assert "step 40" in text
    assert "training: stopped: goes on" in text
    assert "checkpoint at step 40; run all cells in another session" in text
    fake.write_text("#!/bin/sh\nexit 9\n")
    kaggle.run("train")
    assert "ended with 9" in kaggle.status()["reason"]


def test_what_a_sitting_leaves(tmp_path: Path) -> None:
    assert (
        compute_time_left({"began_s": 50.0, "session_max_s": 100, "stop_before_s": 30}, 60.0) == 60
    )
    run = Run(job="gpt", restart=0, state="stopped", code=0, checkpoint=40, warned=True)
    record(tmp_path, run, 1, *decide(run, [], 9))
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["next"], status["session"], status["checkpoint"]) == ("requeue", 1, 40)
    assert len((tmp_path / "runs.jsonl").read_bytes().splitlines()) == 1


@pytest.mark.parametrize(
    ("platform", "changes", "job", "trap"),
    [
        ("colab", {"stop_before_s": 43_000}, {}, "NB5"),
        ("kaggle", {"accelerator": "NvidiaTeslaP100"}, {}, "NB3"),
        ("colab", {}, {"checkpoint": CheckpointConfig(url="/content/ckpt")}, "NB4"),
        ("kaggle", {}, {"launch": {"secrets": ("HF_TOKEN",)}}, "U34"),
    ],
)
def test_traps_before_a_session_is_spent(
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    platform: str,
    changes: Any,
    job: Any,
    trap: str,
) -> None:
    monkeypatch.setattr(cells, "pack", lambda project, exclude, job: "")  # It takes seconds.
    found = render(spec(project, **job), profile(platform, owner="ada", **changes)).findings
    assert [f.trap for f in found if f.level == "error"] == [trap]


def test_a_project_too_large_is_refused(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "PROJECT_MAX", 5)
    with pytest.raises(ConfigError, match="larger than"):
        cells.read_project(project, ())


def test_docstrings_stay_behind_and_every_line_keeps_its_number() -> None:
    source = inspect.getsource(cells)
    stripped = cells.strip_docstrings(source)
    assert "which is JSON with four keys" not in stripped
    assert len(stripped.splitlines()) == len(source.splitlines())
    for node in ast.walk(ast.parse(stripped)):
        if isinstance(node, ast.FunctionDef):
            assert f"def {node.name}(" in source.splitlines()[node.lineno - 1]
    one_line = (
        'class A:\n    """Some text — of two lines,\n\n    and a third."""\n\nb = "kept"  # so\n'
    )
    assert cells.strip_docstrings(one_line) == 'class A:\n\n\n    ...\n\nb = "kept"  # so\n'


def test_what_is_excluded_as_rsync_reads_it_does_not_go_along(tmp_path: Path) -> None:
    for name in ("train.py", "private/key", "lib/data/a.bin", "lib/data.py", "data/b.bin"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "again.py").symlink_to("train.py")
    found = cells.read_project(tmp_path, ("private/", "lib/data", "/data"))
    assert found == {
        "train.py": b"train.py",
        "again.py": b"train.py",
        "lib/data.py": b"lib/data.py",
    }
    (tmp_path / "linked").symlink_to("lib")
    with pytest.raises(ConfigError, match="linked is a link"):
        cells.read_project(tmp_path, ())


# In place of Python with perdure: trains until it is told to leave, then says so as a job does.
FAKE = """\
#!/bin/sh
trap 'mkdir -p "$PERDURE_HOME/jobs/gpt"; cp state.json "$PERDURE_HOME/jobs/gpt/"; exit 0' TERM
mkdir -p "$PERDURE_HOME"; : > "$PERDURE_HOME/ready"
while :; do sleep 0.05; done
"""
STOPPED = Snapshot(
    version=1, job="gpt", state="stopped", at_s=0.0, started_s=0.0, generation=1, restarts=0,
    step=40, steps_per_s=0.0, world_size=1, depth="resumable", reason="",
)  # fmt: skip


def test_a_sitting_warns_itself_before_the_ceiling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    home, durable, data = tmp_path / "home", tmp_path / "durable", tmp_path / "data"
    make_checkpoint(durable, 40)
    (data / "project" / "plots").mkdir(parents=True)
    (data / "project" / "plots" / "loss.svg").write_text("<svg/>")
    (data / "project" / "state.json").write_bytes(msgspec.json.encode(STOPPED))
    (data / "job.json").write_text('{"name": "gpt", "script": "train.py"}')
    python = tmp_path / "python"
    python.write_text(FAKE)
    python.chmod(0o755)
    settings = {
        "job": "gpt", "durable": str(durable), "data": str(data), "outputs": ["plots"],
        "began_s": time.time() - 1000.0, "session_max_s": 5000.0, "stop_before_s": 400,
        "sessions_max": 9,
    }  # fmt: skip
    (tmp_path / "session.json").write_text(json.dumps(settings))
    monkeypatch.setenv("PERDURE_HOME", str(home))
    # The alarm rings once the job hears signals; how long it was set for is printed.
    script = f"""
import os, signal, sys, threading, time
from perdure.launch.notebook.runner import main

def ring():
    while not os.path.exists({str(home / "ready")!r}):
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGALRM)

def set_alarm(which, left_s):
    print("alarm in", left_s, flush=True)
    threading.Thread(target=ring, daemon=True).start()

signal.setitimer = set_alarm
sys.executable = {str(python)!r}
sys.exit(main({str(tmp_path / "session.json")!r}))
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=PATIENCE_S).returncode == 0
    told = capfd.readouterr().out
    assert "the session's ceiling is near: stops at an agreed step" in told
    assert 3000.0 < float(told.partition("alarm in ")[2].split()[0]) <= 3600.0
    status = json.loads((durable / "status.json").read_text())
    assert (status["state"], status["next"], status["checkpoint"]) == ("stopped", "requeue", 40)
    kept = durable / "session-1"
    assert (kept / "outputs" / "plots" / "loss.svg").exists()
    assert (kept / "state.json").exists()


def test_sessions_that_get_nowhere_are_given_up() -> None:
    def run(number: int, step: int) -> Run:
        return Run(job="gpt", restart=number, state="stopped", code=0, checkpoint=step, warned=True)

    runs = [run(number, 40) for number in range(STUCK_RUNS)]
    assert decide(runs[-1], runs[:-1], 98, SESSION_WORDS) == (
        "give up", f"{STUCK_RUNS} sessions ended without a checkpoint after step 40"
    )  # fmt: skip
    assert decide(run(4, 90), runs, 98, SESSION_WORDS)[0] == "requeue"
    often = ("give up", "5 sessions; notebook.sessions_max")
    assert decide(run(4, 90), runs, 4, SESSION_WORDS) == often


def test_what_a_script_writes_into_its_project_outlives_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P1: a notebook's project is gone with its session; only named outputs were kept."""
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "home"))
    project, folder = tmp_path / "data" / "project", tmp_path / "durable" / "session-1"
    for name in ("train.py", "notes.txt", "runs/old.log"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("sent")
    sent = read_stamps(project)
    for name in ("checkpoints/best.pth", "notes.txt", "runs/new.log", "__pycache__/train.pyc"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("written by the script")
    (project / "latest").symlink_to("nowhere")
    keep("gpt", folder, ["runs"], tmp_path / "data", sent)
    kept = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert kept == {
        "project/checkpoints/best.pth", "project/notes.txt",
        "outputs/runs/old.log", "outputs/runs/new.log",
    }  # fmt: skip


def test_every_module_of_the_wheel_that_goes_along_compiles() -> None:
    """A docstring's stand-in in front of `from __future__` broke each notebook at its start."""
    with zipfile.ZipFile(io.BytesIO(cells._store_wheel())) as wheel:
        names = [name for name in wheel.namelist() if name.endswith(".py")]
        assert len(names) > 100
        for name in names:
            compile(wheel.read(name), name, "exec", dont_inherit=True)


def test_what_goes_along_needs_nothing_that_stays_at_home() -> None:
    """A function may import what stays at home, for a platform that no session has."""
    with zipfile.ZipFile(io.BytesIO(cells._store_wheel())) as wheel:
        files = [name for name in wheel.namelist() if name.endswith(".py")]
        known = {name[:-3].removesuffix("/__init__").replace("/", ".") for name in files}
        missing = {
            f"{name}: {node.module}"
            for name in files
            for node in ast.parse(wheel.read(name)).body
            if isinstance(node, ast.ImportFrom)
            and str(node.module).startswith("perdure")
            and node.module not in known
        }
    assert missing == set()
