"""Kaggle's command line: a fake one that answers in the words of the real one (kaggle 2.2.4)."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from perdure.launch.catalog import load_profile
from perdure.launch.notebook import cells, fetch, query_state, render, run, submit
from perdure.launch.platforms import Here
from perdure.launch.records import read_record
from perdure.model.errors import ConfigError, PlatformError
from perdure.model.job import JobSpec, LaunchConfig
from perdure.model.platforms.launching import LaunchRecord, Plan

# Its state is a folder: `status` is what the server says, `answers` what a push is told beside.
FAKE = """\
import json, pathlib, re, sys
here = pathlib.Path(__file__).parent
words = sys.argv[2:]
with open(here / "calls", "a") as file:
    print(json.dumps(words), file=file)
status = (here / "status").read_text()
if words[0] == "status":
    if not status:
        print("404 Client Error: Not Found for url: https://api.kaggle.com/v1/kernels")
        sys.exit(1)
    word, _, message = status.partition(":")
    print(f'{words[1]} has status "KernelWorkerStatus.{word}"')
    if message:
        print(f'Failure message: "{message}"')
elif words[0] == "push":
    told = (here / "answers").read_text()
    print(told or "Kernel version 3 successfully pushed.  Please check progress at https://k/3")
elif words[0] == "output":
    target = pathlib.Path(words[words.index("-p") + 1])
    wanted = words[words.index("--file-pattern") + 1] if "--file-pattern" in words else ""
    for path in (here / "output").rglob("*"):
        name = str(path.relative_to(here / "output"))
        if path.is_file() and re.search(wanted, name):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes(path.read_bytes())
"""


class Kaggle:
    def __init__(self, root: Path) -> None:
        self.root = root / "service"
        (self.root / "output" / "gpt").mkdir(parents=True)
        (self.root / "kaggle.py").write_text(FAKE)
        program = self.root / "kaggle"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {self.root}/kaggle.py "$@"\n')
        program.chmod(0o755)
        self.say("status", "")
        self.say("answers", "")
        path = f"{self.root}:{os.environ['PATH']}"
        self.told: list[str] = []
        self.here = Here(str(root / "home"), {"PATH": path}, self.told.append)

    def say(self, name: str, text: str) -> None:
        (self.root / name).write_text(text)

    def leave(self, **status: Any) -> None:
        path = self.root / "output" / "gpt" / "status.json"
        path.write_text(json.dumps(status))
        self.say("status", "COMPLETE")

    def calls(self) -> list[list[str]]:
        return [json.loads(line) for line in (self.root / "calls").read_text().splitlines()]


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kaggle:
    made = Kaggle(tmp_path)
    monkeypatch.setenv("PATH", made.here.environ["PATH"])
    monkeypatch.setattr(cells, "pack", lambda project, exclude, job: "")
    return made


@pytest.fixture
def plan(service: Kaggle, tmp_path: Path) -> Plan:
    found = load_profile("kaggle", "/nowhere").profile
    section = structs.replace(found.notebook, owner="ada", dataset_sources=("ada/words",))
    launch = LaunchConfig(project=str(tmp_path))
    spec = JobSpec(name="gpt", script="train.py", launch=launch)
    return render(spec, structs.replace(found, notebook=section))


def test_what_kaggle_is_asked_for(plan: Plan) -> None:
    found = json.loads(plan.files["kernel-metadata.json"])
    assert found["id"] == "ada/perdure-gpt"
    assert found["title"] == "perdure-gpt"  # Its slug has to be the id's.
    assert found["kernel_sources"] == ["ada/perdure-gpt"]
    assert found["dataset_sources"] == ["ada/words"]
    asked = [found[key] for key in ("enable_gpu", "enable_internet", "machine_shape", "is_private")]
    assert asked == [True, True, "NvidiaTeslaT4", True]
    assert found["code_file"] in plan.files


def test_the_first_session_and_the_next(plan: Plan, service: Kaggle) -> None:
    record = submit(plan, service.here)
    folder = Path(service.here.home, "notebooks", "gpt")
    assert service.calls()[-1] == ["push", "-p", str(folder), "-t", "32400"]
    assert json.loads((folder / "kernel-metadata.json").read_text())["kernel_sources"] == []
    assert record.id == "ada/perdure-gpt"
    service.say("status", "RUNNING")
    assert query_state(record, service.here).state == "running"
    with pytest.raises(ConfigError, match="is running"):
        submit(plan, service.here)
    service.leave(state="stopped", reason="the walltime is near", next="requeue", session=1)
    submit(plan, service.here)
    sources = json.loads((folder / "kernel-metadata.json").read_text())["kernel_sources"]
    assert sources == ["ada/perdure-gpt"]


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        ("Kernel push error: Maximum batch GPU session count of 2 reached.", "session count"),
        ("The following are not valid kernel sources and could not be added to the kernel: "
         "['ada/perdure-gpt']\nKernel version 3 successfully pushed.  Please check", "without"),
    ],
)  # fmt: skip
def test_a_push_that_is_refused_with_exit_code_0(
    plan: Plan, service: Kaggle, answer: str, match: str
) -> None:
    service.say("status", "COMPLETE")
    service.say("answers", answer)
    with pytest.raises(PlatformError, match=match):
        submit(plan, service.here)
    record = read_record(service.here.home, "gpt")  # A session may run: it can be asked about.
    assert record is not None
    assert record.id == "ada/perdure-gpt"


def launched(plan: Plan, service: Kaggle) -> LaunchRecord:
    record = submit(plan, service.here)
    service.leave(state="done", reason="done", next="leave", session=2)
    return record


def test_how_it_ended_is_said_by_what_it_left(plan: Plan, service: Kaggle) -> None:
    record = launched(plan, service)
    done = query_state(record, service.here)
    assert (done.state, done.code, done.attempt) == ("ended", 0, 2)
    service.leave(state="refused", reason="accelerator: sees no GPU", session=2)
    refused = query_state(record, service.here)  # Kaggle calls it complete.
    assert (refused.state, refused.code) == ("ended", 1)
    assert "sees no GPU" in refused.reason
    service.leave(state="stopped", reason="goes on from step 40", next="requeue", session=2)
    assert "perdure launch" in query_state(record, service.here).reason


def test_what_reaches_a_session(
    plan: Plan, service: Kaggle, capsys: pytest.CaptureFixture[str]
) -> None:
    record = launched(plan, service)
    assert run(record, ["status", "gpt", "--json"], service.here) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "ended"
    assert run(record, ["logs", "gpt", "-f"], service.here) == 0
    assert service.calls()[-1] == ["logs", "ada/perdure-gpt", "--follow"]
    assert run(record, ["logs", "gpt", "--follow"], service.here) == 0
    assert service.calls()[-1] == ["logs", "ada/perdure-gpt", "--follow"]
    with pytest.raises(ConfigError, match="does not reach"):
        run(record, ["stop", "gpt"], service.here)


def test_a_session_that_left_nothing(plan: Plan, service: Kaggle) -> None:
    record = launched(plan, service)
    query_state(record, service.here)
    (service.root / "output" / "gpt" / "status.json").unlink()
    service.say("status", "ERROR:Your notebook was stopped because it ran out of memory")
    state = query_state(record, service.here)
    assert state.state == "killed"
    assert "out of memory" in state.reason
    service.say("status", "")
    assert query_state(record, service.here).state == "not-started"


def test_an_answer_that_is_none_says_nothing_of_the_job(plan: Plan, service: Kaggle) -> None:
    record = launched(plan, service)
    output = FAKE.replace("target = ", "sys.exit('503 Server Error'); target = ")
    for broken in (output, "print('503 Server Error')\nraise SystemExit(1)"):
        (service.root / "kaggle.py").write_text(broken)
        with pytest.raises(PlatformError, match="503"):
            query_state(record, service.here)


def test_who_asks_how_it_is_changes_nothing_that_was_brought_home(
    plan: Plan, service: Kaggle
) -> None:
    """P6: `teardown` took that for something written after the pull, and refused each time."""
    record = launched(plan, service)
    fetch(record, service.here)
    fetched = Path(record.roots["job"], "status.json")
    before = fetched.stat()
    query_state(record, service.here)
    assert (fetched.stat().st_ino, fetched.stat().st_mtime_ns) == (
        before.st_ino,
        before.st_mtime_ns,
    )


def test_all_output_is_brought_home(plan: Plan, service: Kaggle) -> None:
    record = launched(plan, service)
    (service.root / "output" / "gpt" / "checkpoints").mkdir()
    (service.root / "output" / "gpt" / "checkpoints" / "latest").write_text("step-00000040")
    fetch(record, service.here)
    assert Path(record.roots["job"], "checkpoints", "latest").read_text() == "step-00000040"


def test_on_colab_a_person_is_told_what_to_do(service: Kaggle, tmp_path: Path) -> None:
    spec = JobSpec(name="gpt", script="train.py", launch=LaunchConfig(project=str(tmp_path)))
    record = submit(render(spec, load_profile("colab", "/nowhere").profile), service.here)
    assert Path(service.here.home, "notebooks", "gpt", "gpt.ipynb").exists()
    assert any("Run all" in line for line in service.told)
    assert not (service.root / "calls").exists()
    with pytest.raises(PlatformError, match="Colab"):
        query_state(record, service.here)
