"""`perdure serve` in the background, killed as a whole; groups ask it as torchft's managers do."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from perdure.model.bus.lighthouse import ENDED_KEPT
from tests.waiting import PATIENCE_S

torchft = pytest.importorskip("torchft.coordination")
pytestmark = [pytest.mark.torch, pytest.mark.slow]


class Group:
    """A manager that asks for one quorum after another, from its own thread."""

    def __init__(self, name: str, url: str) -> None:
        self.name, self.url, self.step = name, url, 0
        self.errors: list[str] = []
        self.calls: list[tuple[float, float]] = [(0.0, 0.0)]
        """When each was begun and answered."""
        self.over = threading.Event()
        self.threads = [threading.Thread(target=run) for run in (self._ask, self._beat)]
        for thread in self.threads:
            thread.start()

    def _client(self) -> "torchft.LighthouseClient":
        return torchft.LighthouseClient(self.url, connect_timeout=timedelta(seconds=2))

    def _ask(self) -> None:
        client = None
        while not self.over.is_set():
            try:
                client = client or self._client()
                asked_s = time.time()
                # Nobody listens at the address that it names as its manager's.
                client.quorum(
                    self.name,
                    timedelta(seconds=8),
                    address="http://127.0.0.1:1",
                    store_address=self.name,
                    step=self.step,
                    world_size=1,
                )
                self.calls.append((asked_s, time.time()))
                self.step += 1
            except Exception as error:
                self.errors.append(str(error))
                client = None
            self.over.wait(0.05)

    def _beat(self) -> None:
        client = None
        while not self.over.wait(0.1):
            try:
                client = client or self._client()
                asked_s = time.time()
                client.heartbeat(self.name)
                self.calls.append((asked_s, time.time()))
            except Exception:
                client = None

    def end(self) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join(PATIENCE_S)


class Background:
    """`perdure serve --detach` and what is asked of it."""

    def __init__(self, home: Path) -> None:
        self.env = os.environ | {"PERDURE_HOME": str(home), "COLUMNS": "200"}
        self.home, self.port, self.pid, self.said = home, 0, 0, ""
        self.groups: list[Group] = []

    def cli(self, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "perdure", *words],
            env=self.env, cwd=self.home, capture_output=True, text=True, timeout=PATIENCE_S,
        )  # fmt: skip
        assert done.returncode == code, done
        return done

    def serve(self) -> None:
        port = ("--lighthouse-port", str(self.port))
        done = self.cli("serve", "kept", *port, "--detach", "--json")
        told = json.loads(done.stdout)
        self.pid, self.url, self.said = told["pid"], told["lighthouse"], done.stderr
        self.port = int(self.url.rpartition(":")[2])

    def start(self, name: str) -> Group:
        self.groups.append(Group(name, self.url))
        return self.groups[-1]

    def kill(self) -> None:
        """SIGKILL to all of it at once."""
        family = [psutil.Process(self.pid), *psutil.Process(self.pid).children(recursive=True)]
        for process in family:
            process.kill()
        psutil.wait_procs(family, PATIENCE_S)

    def wait(self, what: str, seen: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not seen():
            assert time.monotonic() < deadline, f"no {what}; {self.states()}"
            time.sleep(0.1)

    def states(self) -> dict[str, str]:
        rows = json.loads(self.cli("status", "kept", "--json").stdout)["replicas"]
        return {row["replica"]: row["state"] for row in rows}


@pytest.fixture
def background(tmp_path: Path) -> Iterator[Background]:
    serving = Background(tmp_path)
    yield serving
    for group in serving.groups:
        group.over.set()
    if serving.pid and psutil.pid_exists(serving.pid):
        serving.kill()
    for group in serving.groups:
        group.end()


@pytest.mark.long
def test_in_the_background_an_evicted_group_that_lives_is_told_what_is_to_be_done(
    background: Background,
) -> None:
    background.serve()
    first, second = background.start("a_0:x"), background.start("b_1:y")
    background.wait("step of both", lambda: first.step > 3 and second.step > 3)
    background.wait("sight of both", lambda: len(background.states()) == 2)
    answer = background.cli("node", "evict", "kept", "b_1", "--json")
    assert "heartbeats go on" in answer.stdout
    background.wait("refusal", lambda: any("End its process" in e for e in second.errors))
    told = background.cli("logs", "kept")
    assert "terminals in which others have started them" in told.stderr
    assert "listening on port" in background.cli("logs", "kept", "--part", "lighthouse").stdout
    background.cli("stop", "kept")
    background.wait("end", lambda: not psutil.pid_exists(background.pid))


def test_a_group_that_is_back_at_once_was_lost_and_one_with_its_name_is_another(
    background: Background,
) -> None:
    background.serve()
    first = background.start("a_0:x")
    background.wait("step", lambda: first.step > 3)
    first.end()
    again = background.start("a_0:y")
    background.wait("step of its next life", lambda: again.step > 3)
    alike = background.start("a_0:z")
    background.wait("step of another one", lambda: alike.step > 3)
    background.wait("both", lambda: set(background.states()) == {"a_0:y", "a_0:z"})
    report = json.loads(background.cli("report", "kept", "--json").stdout)
    (lost,) = report["recoveries"]
    assert (lost["culprit"], lost["rung"]) == ("group 0, a_0:x", "restart")
    assert "its group was started again" in lost["cause"]
    asked_s, answered_s = map(max, zip(*first.calls, strict=True))
    assert asked_s <= lost["at_s"] <= answered_s, "when it was heard last"
    assert lost["total_s"] >= lost["detect_s"] >= 1.0, "until then it might have been heard"
    assert report["ledger"]["reconfiguration.detect"]["s"] == pytest.approx(lost["detect_s"])
    background.cli("stop", "kept")
    background.wait("end", lambda: not psutil.pid_exists(background.pid))


@pytest.mark.long
def test_of_many_groups_that_have_ended_the_last_few_are_shown(background: Background) -> None:
    background.serve()
    stays = background.start("stays_0:x")
    background.wait("step", lambda: stays.step > 3)
    many = [background.start(f"spot-{number}x:u") for number in range(ENDED_KEPT + 8)]
    background.wait("step of all", lambda: all(group.step > 0 for group in many))
    for group in many:
        group.over.set()
    background.wait("end of all", lambda: list(background.states().values()).count("gone") >= 40)
    background.start("late_1:y")

    def few() -> bool:
        return len(background.states()) == ENDED_KEPT + 2

    background.wait("end of what is shown of the first", few)
    assert background.states()["late_1:y"] in ("training", "healing")
    lines = background.cli("status", "kept", "--devices").stdout.splitlines()
    assert sum("spot-" in line and "gone" in line for line in lines) == 8
    assert f"{ENDED_KEPT} more have ended before: perdure report kept" in lines
    report = json.loads(background.cli("report", "kept", "--json").stdout)
    assert sum("spot-" in one["culprit"] for one in report["recoveries"]) == len(many)
    background.cli("stop", "kept")
    background.wait("end", lambda: not psutil.pid_exists(background.pid))


@pytest.mark.long
def test_holds_outlive_a_serve_that_was_killed(background: Background) -> None:
    background.serve()
    first, second = background.start("a_0:x"), background.start("b_1:y")
    third, nameless = background.start("c_2:z"), background.start("uuid-of-one-without-a-name")
    everybody = (first, second, third, nameless)
    background.wait("step of all", lambda: all(group.step > 3 for group in everybody))
    background.cli("node", "drain", "kept", "b_1")
    background.cli("node", "drain", "kept", nameless.name)
    background.cli("node", "evict", "kept", "c_2")
    background.kill()

    held_at, went_on = (second.step, third.step), first.step
    background.serve()
    assert "group 1 (b_1) is held, as before: perdure node restore kept b_1" in background.said
    assert "group 2 (c_2) is held, as before" in background.said
    assert "(uuid-of-one-without-a-name) was held, and cannot be known again" in background.said
    background.wait("step of the first", lambda: first.step > went_on + 5)
    background.wait("hold", lambda: background.states().get("b_1:y") == "drained")
    assert (second.step, third.step) == held_at
    background.cli("node", "restore", "kept", "b_1")
    background.wait("step of the second", lambda: second.step > held_at[0] + 2)
    background.cli("stop", "kept")
    background.wait("end", lambda: not psutil.pid_exists(background.pid))
