"""The program of a pod, with a stand-in for perdure: who invites, who joins, who comes again."""

import fcntl
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from tests.waiting import PATIENCE_S, wait_until

from perdure.launch import runs
from perdure.launch.kubernetes import pod as program
from perdure.launch.kubernetes.pod import Pod
from perdure.model.job import JobSpec

# `run` leaves with a code once it is told to; `invite` writes; `join` stays until it is told to.
STAND_IN = """\
import pathlib, signal, sys, time
place = pathlib.Path(sys.argv[1])
words = sys.argv[2:]
with open(place / "calls", "a") as file:
    file.write(" ".join(words) + "\\n")
words = words[words[0] == "node":]
if words[0] == "invite":
    pathlib.Path(words[3]).write_text("invitation")
    sys.exit(0)
told = []
signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
(place / f"{words[0]}-ready").touch()
until = time.monotonic() + 900
while time.monotonic() < until and not told:
    if (place / f"{words[0]}-ends").exists():
        sys.exit(int((place / f"{words[0]}-ends").read_text()))
    time.sleep(0.02)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_POLL_S", 0.02)
    monkeypatch.setattr(runs, "_POLL_S", 0.02)


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between the looks of the pod's program, as they end."""
    made: list[float] = []

    def sleep(seconds: float) -> None:
        time.sleep(seconds)
        made.append(seconds)

    monkeypatch.setattr(program, "time", SimpleNamespace(**vars(time) | {"sleep": sleep}))
    return made


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Pod]:
    (tmp_path / "stand_in.py").write_text(STAND_IN)

    def build(index: int, nodes: int = 2) -> Pod:
        spec = JobSpec(name="gpt", script="t.py", nodes=nodes, remote=nodes - 1, cwd="/w")
        config = tmp_path / "config" / "job.json"
        config.parent.mkdir(exist_ok=True)
        config.write_bytes(msgspec.json.encode(spec))
        environ = {**os.environ, "PERDURE_DURABLE_DIR": str(tmp_path / "durable"),
                   "JOB_COMPLETION_INDEX": str(index), "PERDURE_POD_NAME": f"gpt-{index}",
                   "PERDURE_POD_IP": "10.1.2.3", "PERDURE_POD_GRACE_S": "100"}  # fmt: skip
        pod = Pod(spec, environ, config)
        pod.perdure = [sys.executable, str(tmp_path / "stand_in.py"), str(tmp_path)]
        pod.settle_s = 0.3
        return pod

    return build


class Running:
    """A pod's program in a thread, and what it left with."""

    def __init__(self, pod: Pod) -> None:
        self.codes: list[int] = []
        self._thread = threading.Thread(target=lambda: self.codes.append(pod.run()), daemon=True)
        self._thread.start()

    def end(self) -> int:
        self._thread.join(PATIENCE_S)
        assert self.codes, "the pod has not ended"
        return self.codes[0]


def test_the_first_pod_invites_and_says_how_the_job_ended(
    make: Callable[..., Pod], tmp_path: Path
) -> None:
    pod = make(0)
    running = Running(pod)
    wait_until(pod.invitation.exists)
    placement = msgspec.json.decode((pod.place / "placement.json").read_bytes())
    assert placement == {"bind": "10.1.2.3", "addresses": ["10.1.2.3"]}
    (tmp_path / "run-ends").write_text("7")
    assert running.end() == 7
    assert pod.ended.read_text() == "7\n"
    assert not pod.invitation.exists()


def test_nobody_is_invited_to_where_the_pod_before_was(
    make: Callable[..., Pod], tmp_path: Path
) -> None:
    pod = make(0)
    job = Path(pod.home, "jobs", "gpt")
    stale = [job / "endpoint.json", job / "credentials" / "joiner.json"]
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    running = Running(pod)
    wait_until(pod.invitation.exists)
    assert not any(path.exists() for path in stale)
    (tmp_path / "run-ends").write_text("0")
    assert running.end() == 0


@pytest.mark.parametrize("code", [3, 137])
def test_a_first_pod_that_is_tried_again_has_not_ended_the_job(
    make: Callable[..., Pod], tmp_path: Path, code: int
) -> None:
    pod = make(0, nodes=1)
    (tmp_path / "run-ends").write_text(str(code))
    assert Running(pod).end() == code
    assert not pod.ended.exists()
    assert "invite" not in (tmp_path / "calls").read_text()


def test_a_first_pod_that_is_told_to_go_comes_again(
    make: Callable[..., Pod], tmp_path: Path
) -> None:
    pod = make(0)
    running = Running(pod)
    wait_until((tmp_path / "run-ready").exists)
    pod.told.append(signal.SIGTERM)
    assert running.end() == 143
    assert not pod.ended.exists()


def test_a_first_pod_waits_until_the_one_before_has_saved(
    make: Callable[..., Pod], tmp_path: Path, sleeps: list[float]
) -> None:
    pod = make(0, nodes=1)
    pod.place.mkdir(parents=True)
    with open(pod.place.parent / "first.lock", "w") as before:
        fcntl.flock(before, fcntl.LOCK_EX)
        running = Running(pod)
        wait_until(lambda: len(sleeps) >= 5, "looks at the lock")
        assert not (tmp_path / "calls").exists()
    (tmp_path / "run-ends").write_text("0")
    assert running.end() == 0


def test_a_first_pod_that_is_told_to_go_while_it_waits_comes_again(
    make: Callable[..., Pod],
) -> None:
    pod = make(0, nodes=1)
    pod.place.mkdir(parents=True)
    with open(pod.place.parent / "first.lock", "w") as before:
        fcntl.flock(before, fcntl.LOCK_EX)
        running = Running(pod)
        pod.told.append(signal.SIGTERM)
        assert running.end() == 143


def test_a_node_joins_until_the_job_has_ended(make: Callable[..., Pod], tmp_path: Path) -> None:
    pod = make(1)
    running = Running(pod)
    wait_until(pod.place.exists)
    pod.invitation.write_text("one")
    wait_until((tmp_path / "join-ready").exists)
    assert (tmp_path / "calls").read_text().split() == [
        "node", "join", str(pod.invitation), "--address", "10.1.2.3", "--grace", "100",
        "--wait", "60", "--cwd", "/w",
    ]  # fmt: skip
    pod.ended.write_text("0\n")
    (tmp_path / "join-ends").write_text("0")
    assert running.end() == 0


def test_a_node_joins_the_first_pod_that_has_come_after(
    make: Callable[..., Pod], tmp_path: Path
) -> None:
    pod = make(1)
    running = Running(pod)
    wait_until(pod.place.exists)
    pod.invitation.write_text("one")
    wait_until((tmp_path / "join-ready").exists)
    (tmp_path / "join-ready").unlink()
    pod.invitation.write_text("two")
    wait_until((tmp_path / "join-ready").exists)
    assert (tmp_path / "calls").read_text().count("join ") == 2
    pod.told.append(signal.SIGTERM)
    assert running.end() == 143


def test_a_node_waits_where_the_first_pod_has_only_moved(
    make: Callable[..., Pod], tmp_path: Path, sleeps: list[float]
) -> None:
    pod = make(1)
    pod.settle_s = 3600.0
    running = Running(pod)
    wait_until(pod.place.exists)
    pod.invitation.write_text("one")
    wait_until((tmp_path / "join-ready").exists)
    pod.invitation.unlink()  # As the first pod does on a notice; its job has stopped.
    (tmp_path / "join-ends").write_text("0")
    (tmp_path / "join-ready").unlink()
    sleeps.clear()
    wait_until(lambda: len(sleeps) >= 5, "looks since it was left")
    assert running.codes == []
    (tmp_path / "join-ends").unlink()
    pod.invitation.write_text("two")
    wait_until((tmp_path / "join-ready").exists)
    pod.told.append(signal.SIGTERM)
    assert running.end() == 143


def test_a_node_that_was_left_alone_is_done(make: Callable[..., Pod], tmp_path: Path) -> None:
    pod = make(1)
    running = Running(pod)
    wait_until(pod.place.exists)
    pod.invitation.write_text("one")
    (tmp_path / "join-ends").write_text("0")  # Drained by a person: the job goes on.
    assert running.end() == 0


def test_the_probe_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_PROBE", "import sys; sys.exit('0 GPUs are visible of ' "
                        "+ sys.argv[1])")  # fmt: skip
    assert program.check_gpus("4") == "0 GPUs are visible of 4"
    monkeypatch.setattr(program, "_PROBE", "pass")
    assert program.check_gpus("4") == ""
