"""`perdure queue` as it is typed: what is added, kept, refused; nothing is run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perdure.cli.app import run_command
from perdure.model.queue import Started
from perdure.service.queue.store import QueueStore, RunnerLock

Call = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Call:
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)

    def run(verb: str, *words: str) -> tuple[int, dict[str, Any]]:
        code = run_command(["queue", verb, "--json", *words])
        return code, json.loads(capsys.readouterr().out)

    return run


def test_a_file_is_read_again_and_what_is_done_stays(call: Call, tmp_path: Path) -> None:
    text = """
        [[item]]
        name = "a"
        command = ["true"]
        [[item]]
        name = "b"
        command = ["true"]
        after = ["a"]
        grid = { s = [1, 2] }
    """
    (tmp_path / "q.toml").write_text(text)
    assert call("add", "q.toml")[1]["added"] == ["a", "b-1", "b-2"]
    assert call("add", "q.toml")[1]["kept"] == ["a", "b-1", "b-2"]
    (tmp_path / "q.toml").write_text(text.replace("[1, 2]", "[2, 3]"))
    answer = call("add", "--prune", "q.toml")[1]
    assert (answer["added"], answer["removed"]) == (["b-3"], ["b-1"])
    (row, *_) = call("ls")[1]["items"]
    assert (row["name"], row["state"], row["log"]) == ("a", "waiting", "")


def test_words_are_taken_as_they_are(call: Call, tmp_path: Path) -> None:
    assert call("add", "--name", "c", "--priority", "3", "echo", "{x}", "{{y}}")[0] == 0
    item = QueueStore(str(tmp_path / "home"), "default").read().lines["c"].item
    assert (item.command, item.priority, item.cwd) == (("echo", "{x}", "{{y}}"), 3, str(tmp_path))


def test_a_job_file_is_kept_as_it_was(call: Call, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text('script = "train.py"\nnproc = 2\n')
    (tmp_path / "sweep.toml").write_text(
        '[[item]]\nname = "t-{lr}"\njob = "job.toml"\ngrid = { lr = [0.1] }\n'
        'set = { args = ["--lr", "{lr}"], "checkpoint.keep_last" = 1 }\n'
    )
    assert call("add", "sweep.toml")[1]["added"] == ["t-0.1"]
    job = QueueStore(str(tmp_path / "home"), "default").read().lines["t-0.1"].item.job
    assert job == {"script": "train.py", "nproc": 2, "name": "t-0.1", "args": ["--lr", "0.1"],
                   "checkpoint": {"keep_last": 1}}  # fmt: skip


def test_what_would_lose_or_cannot_be_is_refused(call: Call, tmp_path: Path) -> None:
    call("add", "--name", "a", "true")
    call("add", "--name", "b", "--after", "a", "true")
    assert call("rm", "a")[0] == 4
    assert call("rm", "a", "b")[1]["removed"] == ["a", "b"]
    assert call("rm", "a")[0] == 2
    assert call("add", "--name", "d", "--after", "nobody", "true")[0] == 2
    assert call("add", "--name", "d", "--after", "d", "true")[0] == 2
    assert call("add", "true")[0] == 2
    lock = RunnerLock(QueueStore(str(tmp_path / "home"), "default"))
    assert "is being run by pid" in call("run")[1]["error"]
    lock.release()


def test_what_is_being_stopped_is_not_added_to_be_lost_with_it(call: Call, tmp_path: Path) -> None:
    call("add", "--name", "a", "true")
    store = QueueStore(str(tmp_path / "home"), "default")
    with store.writing() as writer:
        writer.append(Started(1.0, "a", 1, ()))
    assert call("rm", "--stop", "a")[1]["stopping"] == ["a"]
    code, answer = call("add", "--name", "a", "false")
    assert code == 4
    assert "is being stopped" in answer["error"]


def test_a_mistake_names_its_place(call: Call, tmp_path: Path) -> None:
    (tmp_path / "q.toml").write_text('[[item]]\nname = "a"\ncomand = ["true"]\n')
    assert call("add", "q.toml")[1]["error"] == (
        "q.toml: item[0]: Object contains unknown field `comand`"
    )
