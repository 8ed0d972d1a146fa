"""The supervisor with a real nats-server and controller, and a stand-in for agent and ranks."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from perdure.adapters.host import read_state
from perdure.model.checkpoints import FileEntry, Manifest, name_checkpoint
from perdure.model.codec import encode
from perdure.model.events import ControllerLost, JobEnded, JobSubmitted, RanksStarted, RoomNoted
from perdure.service.controller.journal import read_journal
from perdure.service.jobfiles import load_parts, load_snapshot, read_mirror
from perdure.service.jobfolders import is_alive, paths_of
from perdure.service.processes import find_marked
from tests.waiting import PATIENCE_S, wait_until

One = TypeVar("One")
STUB = Path(__file__).with_name("stub_run.py")


class Run:
    """One `perdure run`, given `args` for its ranks (see `stub_agent.py`)."""

    def __init__(self, home: Path, *args: str, name: str = "job", **environ: str) -> None:
        self.home, self.name, self.paths = home, name, paths_of(str(home), name)
        self.output = home / f"{time.monotonic_ns()}.out"
        with open(self.output, "wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(STUB), str(home), name, *args],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(os.environ, PYTHONWARNINGS="ignore", **environ),
            )

    def text(self) -> str:
        return self.output.read_text()

    def wait(self) -> int:
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            pytest.fail(f"did not end:\n{self.text()}")

    def until(self, condition: Callable[[], object]) -> None:
        def look() -> bool:
            met = bool(condition())
            assert met or self.process.poll() is None, self.text()
            return met

        wait_until(look, f"such fact; its output is in {self.output}")

    def until_running(self) -> None:
        self.until(lambda: "[rank 1] hello" in self.text())
        self.until(lambda: self.read(RanksStarted))  # An agent may have printed and not told yet.

    def pid(self, part: str) -> int:
        parts = load_parts(self.paths)
        assert parts is not None
        return {"controller": parts.controller, "nats": parts.nats, "agent": parts.agents[0]}[part]

    def read(self, kind: type[One]) -> list[One]:
        """Return the events of a kind that the journal has."""
        return [e.body for e in read_journal(self.paths) if isinstance(e.body, kind)]

    def lost(self) -> list[ControllerLost]:
        return self.read(ControllerLost)

    def assert_clean(self) -> None:
        assert find_marked(self.name, str(self.home)) == []
        assert not is_alive(self.paths)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(*args: str, name: str = "job", **environ: str) -> Run:
        runs.append(Run(tmp_path, *args, name=name, **environ))
        return runs[-1]

    yield start
    for one in runs:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()
        for pid in find_marked(one.name, str(one.home)):
            os.kill(pid, signal.SIGKILL)


def check_whole(job: Run) -> None:
    """A run shows its ranks, returns their status, and leaves nothing."""
    assert job.wait() == 0
    assert "[rank 0] hello from 0 of generation 0" in job.text()
    entries = list(read_mirror(job.paths) or ())
    assert isinstance(entries[0].body, JobSubmitted)
    assert isinstance(entries[-1].body, JobEnded)
    assert [entry.seq for entry in entries] == list(range(1, len(entries) + 1))
    snapshot = load_snapshot(job.paths)
    assert snapshot is not None
    assert snapshot.state == "done"
    job.assert_clean()


def test_scarce_room_for_checkpoints_is_an_event_of_the_job(
    run: Callable[..., Run], tmp_path: Path
) -> None:
    folder = Path(paths_of(str(tmp_path), "job").checkpoints) / name_checkpoint(10)
    folder.mkdir(parents=True)
    file = folder / "__0_0.distcp"
    file.touch()
    os.truncate(file, 1 << 43)  # Nothing is written: no disk has room for the three to come.
    manifest = Manifest(step=10, world_size=1, files=(FileEntry(file.name, 1 << 43, "x"),))
    (folder / "manifest.json").write_bytes(encode(manifest))
    over = tmp_path / "over"
    job = run(str(over))

    def read_notes() -> list[RoomNoted]:
        bodies = [entry.body for entry in read_mirror(job.paths) or ()]
        return [body for body in bodies if isinstance(body, RoomNoted)]

    job.until(lambda: "[perdure] storage is" in job.text())
    job.until(lambda: bool(read_notes()))  # A job that ends just then is told on the terminal only.
    over.touch()
    assert job.wait() == 0
    (noted,) = read_notes()
    assert noted.grade in ("low", "short")
    assert f"[perdure] storage is {noted.grade}" in job.text()


def test_a_failing_job_passes_its_exit_code_on(run: Callable[..., Run]) -> None:
    job = run("0", "7")
    assert job.wait() == 7
    assert "generation 1" in job.text()
    job.assert_clean()


@pytest.mark.parametrize("part", ["controller", pytest.param("nats", marks=pytest.mark.long)])
def test_a_killed_part_is_started_again_and_nothing_is_lost(
    run: Callable[..., Run], tmp_path: Path, part: str
) -> None:
    over = tmp_path / "over"
    job = run(str(over))
    job.until_running()
    killed = [job.pid(part)]
    os.kill(killed[0], signal.SIGKILL)
    job.until(lambda: job.pid(part) != killed[0])
    job.until(lambda: len(job.lost()) == 1)
    over.touch()
    assert job.wait() == 0
    assert job.lost()[0].pid == killed[0]
    assert job.lost()[0].cause == "signal 9 (SIGKILL)"
    assert "started again" in job.text()
    seqs = [entry.seq for entry in read_journal(job.paths)]
    assert seqs == list(range(1, len(seqs) + 1))
    assert "generation 1" not in job.text()  # training never stopped
    job.assert_clean()


def test_nothing_of_a_node_that_is_kept_away_is_started_again_until_its_lock_is_free(
    run: Callable[..., Run], tmp_path: Path
) -> None:
    """Who kept it away has died: the kernel gives the lock back."""
    over = tmp_path / "over"
    job = run(str(over))
    job.until_running()
    path = Path(job.paths.kept_away(0))
    path.parent.mkdir()
    hold = (
        "import fcntl, sys, time; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX)\n"
        "print('held', flush=True); time.sleep(3600)"
    )
    words = [sys.executable, "-c", hold, str(path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as keeper:
        assert keeper.stdout is not None
        assert keeper.stdout.readline() == b"held\n"
        killed = job.pid("agent")
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: read_state(killed) == "X", "end of the agent that the supervisor saw")
        os.kill(job.pid("controller"), signal.SIGKILL)  # It died later, and is back earlier.
        job.until(job.lost)
        assert [lost.part for lost in job.lost()] == ["controller"]
        assert job.pid("agent") == killed
        keeper.kill()
    job.until(lambda: job.pid("agent") != killed)
    job.until(lambda: len(job.lost()) == 2)
    over.touch()
    assert job.wait() == 0, job.text()
    assert [lost.part for lost in job.lost()] == ["controller", "agent 0"]
    job.assert_clean()


def test_an_agent_that_leaves_in_good_order_is_missed_after_a_while(
    run: Callable[..., Run], tmp_path: Path
) -> None:
    over = tmp_path / "over"
    job = run(str(over), STUB_LEFT_S="0.7")
    job.until_running()
    os.kill(job.pid("agent"), signal.SIGUSR1)
    job.until(job.lost)
    job.until(lambda: "[rank 1] hello from 1 of generation 1" in job.text())
    over.touch()
    assert job.wait() == 0, job.text()
    (lost,) = job.lost()
    assert (lost.part, lost.cause) == ("agent 0", "exit code 0")
    assert lost.restarted_s - lost.at_s >= 0.7
    job.assert_clean()


def test_an_agent_that_leaves_before_another_ones_end_is_not_missed(
    run: Callable[..., Run],
) -> None:
    job = run("0.1", STUB_NODES="2", STUB_LEAVE_S="1.5", STUB_LEFT_S="3600")
    assert job.wait() == 0, job.text()
    assert "started again" not in job.text()
    assert job.lost() == []
    job.assert_clean()


def test_sigterm_stops_the_job(run: Callable[..., Run]) -> None:
    job = run("3600")
    job.until_running()
    job.process.send_signal(signal.SIGTERM)
    job.wait()
    ended = list(read_mirror(job.paths) or ())[-1].body
    assert isinstance(ended, JobEnded)
    assert ended.status == "stopped"
    job.assert_clean()


def test_a_name_that_runs_is_refused_and_the_whole_run_after_it_sets_its_journal_aside(
    run: Callable[..., Run], tmp_path: Path
) -> None:
    over = tmp_path / "over"
    job = run(str(over))
    job.until_running()
    second = run("0")
    assert second.wait() == 2
    assert "JobRunsError: job `job` is running" in second.text()
    (Path(job.paths.root) / "checkpoints").mkdir()
    over.touch()
    assert job.wait() == 0
    third = run("0.1")
    check_whole(third)
    root = Path(job.paths.root)
    assert (root / "previous/1/journal.jsonl").exists()
    assert (root / "checkpoints").exists()
    assert len([e for e in read_journal(job.paths) if isinstance(e.body, JobSubmitted)]) == 1


def test_the_death_of_the_run_itself_leaves_nothing(run: Callable[..., Run]) -> None:
    job = run("3600")
    job.until_running()
    job.process.kill()
    job.process.wait()
    wait_until(lambda: not find_marked(job.name, str(job.home)), "end of all that it had started")
    job.assert_clean()
    assert run("0").wait() == 0


def test_ctrl_c_is_no_success_for_whoever_waits(run: Callable[..., Run]) -> None:
    """`perdure run train.py && python eval.py` does not go on with half a training."""
    job = run("3600")
    job.until_running()
    job.process.send_signal(signal.SIGINT)
    assert job.wait() == 128 + signal.SIGINT
    snapshot = load_snapshot(job.paths)
    assert snapshot is not None
    assert snapshot.state == "stopped"


def test_a_second_signal_ends_the_job_also_when_nothing_answers(run: Callable[..., Run]) -> None:
    job = run("3600", STUB_STOPPED_S="3600")  # The server is not started again before the end.
    job.until_running()
    os.kill(job.pid("nats"), signal.SIGSTOP)
    job.process.send_signal(signal.SIGINT)
    job.until(lambda: "SIGINT: stopping" in job.text())
    job.process.send_signal(signal.SIGINT)
    assert job.wait() == 128 + signal.SIGINT
    snapshot = load_snapshot(job.paths)
    assert snapshot is not None
    assert (snapshot.state, snapshot.reason) == ("stopped", "ended by force")
    job.assert_clean()
