"""A run says how it differs from the last one of the job."""

import os
from pathlib import Path

import pytest
from msgspec import structs

from perdure.model.input.raw import carry_job
from perdure.model.job import JobSpec
from perdure.model.paths import JobPaths
from perdure.service.jobfiles import read_document, write_document
from perdure.service.jobfolders import paths_of
from perdure.service.starts import FileWatch, Start, compare_start, record_start

ENVIRON = {"HF_HOME": "/a", "TOKEN": "hunter2", "PWD": "/here", "ODD": os.fsdecode(b"caf\xe9")}


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    (tmp_path / "train.py").write_text("import model\n")
    (tmp_path / "model.py").write_text("width = 1\n")
    return JobSpec(name="h", script="train.py", args=("1",), cwd=str(tmp_path))


@pytest.fixture
def paths(tmp_path: Path, spec: JobSpec) -> JobPaths:
    """The files of a job that has run once."""
    paths = paths_of(str(tmp_path / "home"), "h")
    assert compare_start(spec, paths, ENVIRON) == [], "there was none"
    drawn = structs.replace(spec, env={"PYTHONHASHSEED": "5"})
    write_document(paths.spec, carry_job(drawn))
    record_start(carry_job(drawn), paths, "", ENVIRON)
    return paths


def test_the_same_command_says_nothing(spec: JobSpec, paths: JobPaths) -> None:
    other = ENVIRON | {"PWD": "/there", "SHLVL": "2", "TORCHELASTIC_RUN_ID": "1234"}
    assert compare_start(spec, paths, other) == []


def test_each_difference_is_in_one_line(spec: JobSpec, paths: JobPaths) -> None:
    Path(spec.cwd, "model.py").write_text("width = 2\n")
    Path(spec.cwd, "tqdm.py").touch()
    environ = ENVIRON | {"HF_HOME": "/b", "TOKEN": "other", "PYTHONHASHSEED": "7"}
    del environ["ODD"]
    (line,) = compare_start(structs.replace(spec, args=("2",)), paths, environ)
    for part in (
        "the arguments changed from `1` to `2`",
        f"{spec.cwd}/model.py was edited at 2",
        f"{spec.cwd}/tqdm.py is new at 2",
        "HF_HOME changed from `/a` to `/b`",
        "PYTHONHASHSEED changed from `5` to `7`",
        "TOKEN changed",
        "ODD is not set any more",
    ):
        assert part in line
    assert "train.py" not in line


def test_values_that_may_be_secret_are_not_written_down(spec: JobSpec, paths: JobPaths) -> None:
    text = Path(paths.start).read_text()
    assert "hunter2" not in text
    assert os.stat(paths.start).st_mode & 0o77 == 0


def test_many_variables_are_counted(spec: JobSpec, paths: JobPaths) -> None:
    more = {f"NEW_{number:02d}": "" for number in range(20)}
    (line,) = compare_start(spec, paths, ENVIRON | more)
    assert "NEW_05 is new; 14 more variables changed" in line


def test_the_next_run_can_be_compared_with_this_one(spec: JobSpec, paths: JobPaths) -> None:
    """Its hashes have the same key."""
    drawn = carry_job(structs.replace(spec, env={"PYTHONHASHSEED": "5"}))
    previous = Path(paths.root, "previous/1")
    previous.mkdir(parents=True)
    os.rename(paths.start, previous / "start.json")
    record_start(drawn, paths, str(previous), ENVIRON)
    before, now = (read_document(path, Start) for path in (f"{previous}/start.json", paths.start))
    assert before == now


@pytest.mark.parametrize("module", [True, False])
def test_an_edited_file_is_named_once_at_the_next_restart(spec: JobSpec, module: bool) -> None:
    if module:
        spec = structs.replace(spec, module=True, script="train")
    watch = FileWatch(carry_job(spec))
    assert watch.tell(0) == ""
    Path(spec.cwd, "train.py").write_text("import model, os\n")
    Path(spec.cwd, "model.py").unlink()
    assert watch.tell(0) == "", "its ranks have read the file before"
    line = watch.tell(1)
    assert f"{spec.cwd}/train.py was edited at 2" in line
    assert f"{spec.cwd}/model.py is gone" in line
    assert [watch.tell(1), watch.tell(2)] == ["", ""]
