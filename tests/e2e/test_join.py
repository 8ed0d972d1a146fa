"""`perdure node join`: a machine from elsewhere trains, vanishes, comes back, and is told to go."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.harness import SCRIPTS, Job
from tests.e2e.test_elastic_nodes import read
from tests.waiting import PATIENCE_S


class Machine:
    """Another state directory and process group, as another machine would be."""

    def __init__(self, folder: Path, invitation: str) -> None:
        self.home, self.output = str(folder / "elsewhere"), folder / "join.out"
        with open(self.output, "ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "perdure", "node", "join", "-", "--wait", "300"],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=dict(os.environ, PERDURE_HOME=self.home),
                start_new_session=True,
            )
        assert self.process.stdin is not None
        self.process.stdin.write(invitation.encode())
        self.process.stdin.close()

    def vanish(self) -> None:
        """SIGKILL all that it runs, at once."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("PERDURE_HOME") == self.home:
                    process.kill()
        self.process.wait(PATIENCE_S)


@pytest.fixture
def join(tmp_path: Path) -> Iterator[Callable[[str], Machine]]:
    machines: list[Machine] = []

    def begin(invitation: str) -> Machine:
        machines.append(Machine(tmp_path, invitation))
        return machines[-1]

    yield begin
    for machine in machines:
        machine.vanish()


def events(job: Job, kind: str) -> list[dict[str, Any]]:
    lines = (job.folder / "journal.jsonl").read_text().splitlines()
    bodies = [json.loads(line)["body"] for line in lines if line.endswith("}")]
    return [body for body in bodies if body["type"] == kind]


@pytest.mark.slow
@pytest.mark.long
def test_a_machine_whose_agent_is_silent_for_seconds_trains_on(
    start: Callable[..., Job], join: Callable[[str], Machine], tmp_path: Path
) -> None:
    """T4: steps of 3 s, so that the peers' collectives say nothing of it for as long."""
    trail = tmp_path / "trail"
    job = start(
        "far", "-n", "1", "--nodes", "2", "--remote", "1",
        str(SCRIPTS / "elastic.py"), "--trail", str(trail), "--steps", "100000", "--pace-s", "3",
    )  # fmt: skip
    job.wait_until((job.folder / "credentials" / "joiner.json").exists, "credentials")
    machine = join(job.cli("node", "invite", "far").stdout)
    job.wait_until(lambda: len(read(trail, 1)) >= 2, "training on both")
    (agent,) = (
        process
        for process in psutil.Process(machine.process.pid).children(recursive=True)
        if "perdure agent" in " ".join(process.cmdline())
    )
    for gap_s in (1.5, 2.5):
        before = len(read(trail, 1))
        agent.suspend()
        time.sleep(gap_s)
        agent.resume()
        job.wait_until(lambda before=before: len(read(trail, 1)) > before, "the next step")
    assert events(job, "NodeLost") == []
    assert read(trail, 0)[-1]["world"] == [0, 1]
    assert len(events(job, "WorldReformed")) == 2, "of both ranks, and no other epoch"
    job.cli("stop", "far", "--now")
    job.wait()


@pytest.mark.slow
def test_a_machine_from_elsewhere_comes_vanishes_comes_back_and_leaves(
    start: Callable[..., Job], join: Callable[[str], Machine], tmp_path: Path
) -> None:
    trail = tmp_path / "trail"
    # Silence alone would tell of no loss within the test's own time.
    (tmp_path / "far.toml").write_text("cold = true\n[detect]\nnode_lost_s = 3600.0\n")
    job = start(
        "far", "-n", "1", "--nodes", "2", "--remote", "1", "-c", str(tmp_path / "far.toml"),
        str(SCRIPTS / "elastic.py"), "--trail", str(trail), "--steps", "100000", "--pace-s", "0.2",
    )  # fmt: skip
    secret = job.folder / "credentials" / "joiner.json"
    job.wait_until(secret.exists, "credentials")
    invitation = job.cli("node", "invite", "far").stdout
    first = join(invitation)
    job.wait_until(lambda: len(read(trail, 0)) >= 10, "training on both")
    assert read(trail, 0)[-1]["world"] == [0, 1]
    command = " ".join(psutil.Process(first.process.pid).cmdline())
    assert json.loads(invitation)["endpoint"]["token"] not in command

    first.vanish()
    job.wait_until(lambda: read(trail, 0)[-1]["world"] == [0], "the other one going on")
    (lost,) = events(job, "NodeLost")
    assert lost["node"] == 1

    second = join(invitation)
    job.wait_until(lambda: read(trail, 0)[-1]["world"] == [0, 3], "it is back")
    second.process.send_signal(signal.SIGTERM)
    job.wait_until(lambda: read(trail, 0)[-1]["world"] == [0], "it was left")
    assert second.process.wait(PATIENCE_S) == 0
    began = [sorted(e["pids"]) for e in events(job, "RanksStarted") if e["node"] == 1]
    assert began == [["1"], ["3"]], "who was lost is not started again on the machine in its place"
    (noticed,) = events(job, "PreemptionNoticed")
    assert (noticed["node"], noticed["source"]) == (1, "SIGTERM")
    formed = [e for e in events(job, "WorldReformed") if e["epoch"] > 0]
    assert formed[-1].get("redo", 0) == 0, "nothing of the step was under way"
    job.cli("stop", "far", "--now")
    job.wait()
    steps = [row["step"] for row in read(trail, 0)]
    assert steps == list(range(len(steps))), "a step was lost or made twice"
    verdicts = json.loads(job.cli("diagnose", "far", "--json").stdout)["verdicts"]
    # On a busy machine a rank may be slow, or stand still for a second; that is right to be told.
    kinds = [v["kind"] for v in verdicts if "withdrawn" not in v["evidence"]]
    assert [k for k in kinds if k not in ("Straggler", "HostBusy")] == ["NodeLost", "Preemption"]
