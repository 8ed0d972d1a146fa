"""`perdure metrics JOB --tensorboard`: what was told once is not told again, whoever dies."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.journals import Story, render_journal, tell
from tests.trackers import read_tensorboard
from tests.waiting import PATIENCE_S, wait_until

from perdure.adapters.trackers import Row
from perdure.cli.app import run_command
from perdure.cli.jobs import find_job
from perdure.cli.looking import tracking
from perdure.cli.looking.tracking import JobTracking
from perdure.model.codec import encode
from perdure.model.errors import PlatformError
from perdure.model.events import JournalEntry
from perdure.service.controller.tracking import CONTROLLER_PID
from perdure.service.jobfiles import LOCK

pytest.importorskip("tensorboard")
pytestmark = pytest.mark.filterwarnings("ignore")  # The library's own.


@pytest.fixture
def story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Story:
    """A job of 0.1 that has ended, with crashes, and with curves in its journal."""
    story = tell(Story(now=1_700_000_000.0))
    folder = tmp_path / "jobs" / "job"
    folder.mkdir(parents=True)
    (folder / "job.json").write_bytes(encode(story.spec))
    (folder / "endpoint.json").write_text(
        '{"url":"nats://127.0.0.1:1","token":"","clock_offset_s":0}'
    )
    write(tmp_path, story.entries)
    story.lay_curves(folder)
    monkeypatch.setenv("PERDURE_HOME", str(tmp_path))
    return story


def write(home: Path, entries: list[JournalEntry]) -> None:
    path = home / "jobs" / "job" / "journal.jsonl"
    path.write_bytes(render_journal(entries))


def ask(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert run_command(["metrics", "job", *words, "--json"]) == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def list_texts(folder: Path) -> list[str]:
    return [value for _, _, value in read_tensorboard(folder) if isinstance(value, str)]


def test_a_second_call_tells_nothing_and_a_new_folder_all(
    story: Story, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = ask(capsys, "--tensorboard", str(tmp_path / "a"))
    assert first["tensorboard_rows"] > 0
    texts = list_texts(tmp_path / "a" / "perdure-job")
    assert len(texts) == first["tensorboard_marks"] > 2
    assert any("signal 9" in text and "s lost" in text for text in texts)
    again = ask(capsys, "--tensorboard", str(tmp_path / "a"))
    assert (again["tensorboard_rows"], again["tensorboard_marks"]) == (0, 0)
    assert list_texts(tmp_path / "a" / "perdure-job") == texts
    elsewhere = ask(capsys, "--tensorboard", str(tmp_path / "b"), "--no-run-log")
    assert elsewhere["tensorboard_marks"] == len(texts)
    assert elsewhere["tensorboard_rows"] == 0


def test_what_comes_later_is_told_once_wherever_the_one_before_stopped(
    story: Story, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(capsys, "--tensorboard", str(tmp_path / "whole"))
    whole = list_texts(tmp_path / "whole" / "perdure-job")
    for cut in range(1, len(story.entries), max(1, len(story.entries) // 8)):
        folder = tmp_path / f"cut-{cut}"
        write(tmp_path, story.entries[:cut])
        ask(capsys, "--tensorboard", str(folder))
        write(tmp_path, story.entries)
        ask(capsys, "--tensorboard", str(folder))
        assert sorted(list_texts(folder / "perdure-job")) == sorted(whole), cut


def test_a_death_before_it_is_written_down_tells_the_same_numbers_again(
    story: Story,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At least once: this is the moment in which it is twice."""
    written: list[str] = []

    def die(path: str, value: Any) -> None:
        written.append(path)
        if len(written) > 1:  # The first says that it was opened.
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(tracking, "write_document", die)
        with pytest.raises(KeyboardInterrupt):
            JobTracking(find_job("job"), "tensorboard", str(tmp_path / "a"), run_log=False).tell()
    once = list_texts(tmp_path / "a" / "perdure-job")
    assert once
    ask(capsys, "--tensorboard", str(tmp_path / "a"))
    texts = list_texts(tmp_path / "a" / "perdure-job")
    assert sorted(texts) == sorted(once * 2)


def test_each_run_of_a_job_has_an_id_of_its_own_and_is_told_whole(
    story: Story, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = ask(capsys, "--tensorboard", str(tmp_path / "a"))
    key = json.loads((tmp_path / "a" / "perdure-job" / "perdure.json").read_text())["job"]
    later = [msgspec.structs.replace(e, at_s=e.at_s + 1000.0) for e in story.entries]
    write(tmp_path, later)  # The same name was run again.
    second = ask(capsys, "--tensorboard", str(tmp_path / "a"))
    assert second["tensorboard_marks"] == first["tensorboard_marks"]
    assert json.loads((tmp_path / "a" / "perdure-job" / "perdure.json").read_text())["job"] != key


def test_two_processes_do_not_tell_the_same(
    story: Story, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a" / "perdure-job"
    folder.mkdir(parents=True)
    with open(folder / "perdure.json.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run_command(["metrics", "job", "--tensorboard", str(tmp_path / "a")]) != 0
    assert "another process tells tensorboard" in capsys.readouterr().err
    assert not list(folder.glob("events*"))


def test_a_tracker_that_takes_nothing_is_left(
    story: Story, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stuck:
        run = ""

        def put(self, rows: object, marks: object) -> None:
            threading.Event().wait(3600)

        def close(self, status: str) -> None:
            """Nothing was told."""

    monkeypatch.setattr(tracking, "open_tracker", lambda kind, place: Stuck())
    told = JobTracking(find_job("job"), "wandb", "p", run_log=False)
    told._config = type(told._config)(timeout_s=0.2)
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(PlatformError, match=r"wandb took nothing for 0\.2 s"):
        told.tell()
    assert signal.getsignal(signal.SIGALRM) is before


def test_a_library_that_holds_the_alarm_for_an_error_of_its_own_is_left_too(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Deaf:
        run = ""

        def put(self, rows: object, marks: object) -> None:
            with contextlib.suppress(Exception):
                threading.Event().wait(3600)
            threading.Event().wait(3600)

    monkeypatch.setattr(tracking, "open_tracker", lambda kind, place: Deaf())
    monkeypatch.setattr(tracking, "_RING_S", 0.1)
    told = JobTracking(find_job("job"), "wandb", "p", run_log=False)
    told._config = type(told._config)(timeout_s=0.1)
    with pytest.raises(PlatformError, match="wandb took nothing"):
        told.tell()


def test_a_slow_tracker_gets_on_with_each_try_however_much_it_has_missed(
    story: Story, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within its time it takes some thousands of values: of more it began anew for ever."""
    names = [f"m{i}" for i in range(1000)]
    for step in range(200, 210):
        row = dict.fromkeys(names, float(step))
        story.now += 1.0
        story.step = step
        story.log(row)
    story.lay_curves(tmp_path / "jobs/job")
    taken: list[tuple[int, str]] = []

    class Slow:
        run, room = "", 3 * tracking._VALUES

        def put(self, rows: list[Row], marks: object) -> None:
            self.room -= sum(len(values) for _, values, _ in rows)
            if self.room < 0:
                raise PlatformError("took nothing", hint="")
            taken.extend((step, name) for step, values, _ in rows for name in values)

        def close(self, status: str) -> None:
            """All was told."""

    monkeypatch.setattr(tracking, "open_tracker", lambda kind, place: Slow())
    for _ in range(4):
        with contextlib.suppress(PlatformError):
            JobTracking(find_job("job"), "wandb", "p", run_log=True).tell()
            break
    told = sorted(pair for pair in taken if pair[1] in set(names))
    assert told == sorted((step, name) for step in range(200, 210) for name in names)


def test_who_is_asked_to_leave_has_not_told_all(story: Story, tmp_path: Path) -> None:
    """The controller took it for done, and told that tracker nothing any more."""
    write(tmp_path, story.entries[:-1])  # It has not ended.
    folder = tmp_path / "jobs" / "job"
    with open(folder / LOCK, "w+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        words = ("metrics", "job", "--tensorboard", str(tmp_path / "a"), "--follow")
        env = os.environ | {CONTROLLER_PID: str(os.getpid())}
        with subprocess.Popen([sys.executable, "-m", "perdure", *words], env=env) as process:
            try:
                wait_until((tmp_path / "a/perdure-job/perdure.json").exists, "begin")
                # What memory and time there is, is the ranks'.
                known = Path(f"/proc/{process.pid}")
                assert int((known / "oom_score_adj").read_text()) >= 800
                assert os.getpriority(os.PRIO_PROCESS, process.pid) >= 10
                process.terminate()
                assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM
            finally:
                process.kill()


def test_trackers_are_not_imported_before_they_are_asked_for() -> None:
    code = (
        "import sys, perdure.cli.looking.metrics, perdure.cli.looking.tracking, "
        "perdure.adapters.trackers, perdure.service.controller.process; "
        "print([m for m in ('tensorboard', 'wandb', 'mlflow', 'torch') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=os.environ,
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_one_tracker_is_followed_at_a_time(
    story: Story, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["metrics", "job", "--wandb", "p", "--tensorboard", "d", "--follow"]) == 2
    assert "one tracker at a time" in capsys.readouterr().err
