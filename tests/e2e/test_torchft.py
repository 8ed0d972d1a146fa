"""Three torchft replica groups and everything that can die beside them, really killed."""

import json
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.harness import SCRIPTS, Job
from tests.waiting import PATIENCE_S

pytest.importorskip("torchft")
pytestmark = [pytest.mark.torch, pytest.mark.slow]
Start = Callable[..., Job]


class Training:
    """What the groups of a job write."""

    def __init__(
        self,
        start: Start,
        home: Path,
        *options: str,
        steps: int = 10_000_000,
        log: str = "log",
        name: str = "torchft_groups.py",
    ) -> None:
        self.log = home / log
        self.log.mkdir()
        script = (str(SCRIPTS / name), str(steps), str(self.log))
        words = ("--torchft", "--replicas", "3", "-n", "1", *options)
        self.job = start("ft", *words, *script)

    def rows(self, group: int) -> list[dict[str, Any]]:
        path, rows = self.log / f"group-{group}.jsonl", []
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue  # Cut short by a kill.
        return rows

    def commits(self, group: int, since: float) -> list[dict[str, Any]]:
        return [r for r in self.rows(group) if r["t"] > since and "failed" not in r]

    def wait_members(self, count: int, since: float, *groups: int) -> None:
        def all_there() -> bool:
            return all(any(r["n"] == count for r in self.commits(g, since)) for g in groups)

        self.job.wait_until(all_there, f"{count} members on groups {groups}")

    def wait_trusted(self) -> None:
        """Wait until all have made the first steps, which are given more time than later ones."""
        self.job.wait_until(lambda: all(len(self.rows(g)) > 20 for g in range(3)), "20 steps")

    def pid(self, group: int) -> int:
        return int(self.rows(group)[-1]["pid"])

    def check(self, since: float = 0.0, until: float = math.inf) -> None:
        """Wherever several groups hashed one step, parameters and moments were the same."""
        hashes: dict[int, set[str]] = {}
        for group in range(4):
            for row in self.rows(group):
                if "hash" in row and since < row["t"] <= until:
                    hashes.setdefault(row["step"], set()).add(row["hash"])
        assert hashes
        assert {step: found for step, found in hashes.items() if len(found) > 1} == {}

    def check_settings(self) -> set[float]:
        """Return the learning rates; at each step it was the same in all groups."""
        rates: dict[int, set[float]] = {}
        for group in range(4):
            for row in self.rows(group):
                if "failed" not in row:
                    rates.setdefault(row["step"], set()).add(row["lr"])
        assert {step: found for step, found in rates.items() if len(found) > 1} == {}
        return set().union(*rates.values())

    def lighthouse_log(self) -> str:
        return (self.job.folder / "logs" / "lighthouse.log").read_text()


def test_a_killed_group_a_stopped_one_and_each_of_perdures_parts(
    start: Start, tmp_path: Path
) -> None:
    training = Training(start, tmp_path, "--env", "STEP_PAUSE_S=0.15")
    job = training.job
    training.wait_trusted()

    os.kill(training.pid(1), signal.SIGKILL)
    killed = time.time()  # Behind it, so that no row of the life before counts.
    training.wait_members(2, killed, 0, 2)
    training.wait_members(3, killed, 0, 1, 2)
    rows = {row["group"]: row for row in job.state()["replicas"]}
    assert set(rows) == {0, 1, 2}
    assert job.state()["depth"] == "torchft"

    for part in ("perdure lighthouse ft: serving", "perdure controller", "nats-server"):
        before, survivors = time.time(), [training.pid(g) for g in range(3)]
        job.kill(part)
        training.wait_members(3, before + 2.0, 0, 1, 2)
        assert [training.pid(g) for g in range(3)] == survivors, f"{part} cost a group"

    drain_and_restore(training)
    os.kill(training.pid(2), signal.SIGSTOP)
    stopped = time.time()
    training.wait_members(2, stopped, 0, 1)
    training.wait_members(3, stopped, 0, 1, 2)  # It is ended and started again.
    assert "is left out: its process is stopped" in training.lighthouse_log()
    training.check()
    job.process.send_signal(signal.SIGTERM)
    job.wait()
    check_ledger(job.report())


def check_ledger(report: dict[str, Any]) -> None:
    """Nearly all time is in an account; each loss is told of."""
    ledger = {name: account["fraction"] for name, account in report["ledger"].items()}
    assert ledger["unattributed"] < 0.02, ledger
    for name in ("useful", "startup", "lost_work", "reconfiguration.state", "idle"):
        assert ledger[name] > 0, ledger
    lost = {r["culprit"] for r in report["recoveries"] if r["rung"] == "restart"}
    assert {"group 1, rank 1", "group 2"} <= lost


def drain_and_restore(training: Training) -> None:
    """Group 1 leaves and comes back; nobody makes a step again, and nobody else ends."""
    job, survivors = training.job, [training.pid(g) for g in (0, 2)]
    refused = job.cli("node", "drain", "ft", "replica:0", "1", "rank:2", check=False)
    assert refused.returncode != 0
    assert "it would be lost" in refused.stdout + refused.stderr
    failed = sum("failed" in row for g in (0, 2) for row in training.rows(g))
    drained = time.time()
    answer = json.loads(
        job.cli("node", "drain", "ft", "replica:1", "--json", "--why", "test").stdout
    )
    assert (answer["replicas"], answer["steps_lost"]) == ([1], 0)
    training.wait_members(2, drained, 0, 2)
    assert not any(training.pid(1) == p.pid for p in job.find("perdure rank"))
    assert sum("failed" in row for g in (0, 2) for row in training.rows(g)) == failed
    job.wait_until(lambda: job.state()["replicas"][1]["state"] == "left", "a picture without it")
    assert job.state()["cordoned"] == [1]
    back = time.time()
    job.cli("node", "restore", "ft", "replica:1")
    training.wait_members(3, back, 0, 1, 2)
    assert [training.pid(g) for g in (0, 2)] == survivors


def test_a_hung_trainer_is_left_out_and_a_spare_stands_in(start: Start, tmp_path: Path) -> None:
    # The one that hangs is not to come back as the spare before the test is through.
    patience = "[torchft]\nhung_s = 4.0\n[detect]\nquiet_action_s = 600.0\n"
    (tmp_path / "job.toml").write_text(patience)
    env = ("--env", "LIVE_LR=1", "--env", "STEP_PAUSE_S=0.15", "-c", str(tmp_path / "job.toml"))
    training = Training(start, tmp_path, "--spares", "1", *env)
    training.wait_trusted()
    asks = "of group 3, generation 3 asks"
    training.job.wait_until(lambda: asks in training.lighthouse_log(), "the spare")
    assert not training.rows(3)

    changed = json.loads(training.job.cli("set", "ft", "lr=0.002", "--json").stdout)
    assert changed["ranks"] == [0, 1, 2]

    hung = time.time()
    (training.log / "hang-1").touch()
    training.wait_members(3, hung, 3)
    training.wait_members(3, hung, 0, 2)
    assert "train_1" in training.lighthouse_log().split("is left out")[0].splitlines()[-1]

    def is_away() -> bool:
        rows = {row["group"]: row["state"] for row in training.job.state()["replicas"]}
        return rows[1] in ("evicted", "failed", "starting", "spare")

    training.job.wait_until(is_away, "a picture without the hung group")

    answer = json.loads(training.job.cli("pause", "ft", "--json").stdout)
    steps = {training.rows(g)[-1]["step"] for g in (0, 2, 3)}
    assert steps == {answer["step"]}, "answered once all of them stood"
    assert "paused" in training.job.cli("status", "ft").stdout  # It takes as long as many steps.
    assert {training.rows(g)[-1]["step"] for g in (0, 2, 3)} == steps
    training.job.cli("resume", "ft")
    training.job.cli("set", "ft", "lr=0.003")
    os.kill(training.pid(0), signal.SIGKILL)
    again = time.time()
    training.wait_members(2, again, 2, 3)
    training.wait_members(3, again, 0, 2, 3)  # Healed, settings too.
    training.check()
    assert training.check_settings() == {0.001, 0.002, 0.003}
    training.job.process.send_signal(signal.SIGTERM)
    training.job.wait()


@pytest.mark.long
@pytest.mark.parametrize("declared", [False, True])
def test_groups_that_pause_lose_nothing_and_a_death_meanwhile_is_handled_at_once(
    start: Start, tmp_path: Path, declared: bool
) -> None:
    """Row T9: a validation of 3 s cost both groups their commits, and the report was silent."""
    patience = "hung_s = 1.0" if declared else ""
    (tmp_path / "job.toml").write_text(f"[torchft]\n{patience}\n")
    pauses = ("--env", "PAUSES=1:25:3,2:45:10", "--env", "PAUSES_INSIDE=0:35:3")
    busy = ("--env", "BUSY=1") if declared else ()
    training = Training(start, tmp_path, *pauses, *busy, "-c", str(tmp_path / "job.toml"))
    job = training.job
    if declared:
        job.wait_until((training.log / "pause-2-45").exists, "the pause of 10 s")
        job.wait_until(
            lambda: "is busy: evaluate, at most 60 s" in job.cli("status", "ft").stdout,
            "a picture with the busy phase",
        )
    (training.log / "hold-1-50").touch()
    job.wait_until((training.log / "pause-1-50").exists, "a third pause")
    assert not [row for g in range(3) for row in training.rows(g) if "failed" in row]
    assert "left out" not in training.lighthouse_log()
    assert ("is late: the others have waited" in training.lighthouse_log()) is not declared
    sizes = [row["n"] for row in training.rows(0)]  # The first quorum may wait for no late starter.
    assert set(sizes[sizes.index(3) :]) == {3}

    killed = time.time()
    os.kill(training.pid(2), signal.SIGKILL)
    # The pause of group 1 does not end before.
    job.wait_until(lambda: "of group 2 is left out: rank 2" in training.lighthouse_log(), "word")
    (training.log / "hold-1-50").unlink()
    training.wait_members(2, killed, 0, 1)
    training.wait_members(3, killed, 0, 1, 2)
    assert not [row for g in (0, 1) for row in training.rows(g) if "failed" in row]
    training.check()
    job.process.send_signal(signal.SIGTERM)
    job.wait()
    told = [(r["culprit"], r["rung"]) for r in job.report()["recoveries"]]
    assert told == [("group 2, rank 2", "restart")]


@pytest.mark.long
def test_a_group_that_was_left_out_and_came_back_is_an_incident(
    start: Start, tmp_path: Path
) -> None:
    """Row T9: with a patience of a second, which the job file may ask for, both are told of."""
    (tmp_path / "job.toml").write_text("[torchft]\nhung_s = 1.0\n")
    config = ("--env", "PAUSES=1:25:4", "-c", str(tmp_path / "job.toml"))
    training = Training(start, tmp_path, *config)
    job = training.job
    job.wait_until((training.log / "pause-1-25").exists, "a pause")
    paused = time.time()
    training.wait_members(2, paused, 0, 2)
    training.wait_members(3, paused, 0, 1, 2)
    job.process.send_signal(signal.SIGTERM)
    job.wait()
    (told,) = job.report()["recoveries"]
    assert (told["culprit"], told["rung"], told["lost_steps"]) == ("group 1", "left out", 1)
    assert told["at_step"] == 25
    assert "the others have waited for it" in told["cause"]
    assert "came back by itself and healed" in told["reason"]
    assert told["total_s"] > 2.0


@pytest.mark.long
def test_a_job_that_saves_by_itself_goes_on_when_all_groups_die_and_when_run_again(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "job.toml").write_text("[checkpoint]\nevery_steps = 20\n")
    first = Training(start, tmp_path, "--spares", "1", "-c", str(tmp_path / "job.toml"))
    job, places = first.job, first.job.folder / "checkpoints"

    def newest() -> int:
        return max((int(p.name[5:]) for p in places.glob("step-????????")), default=0)

    job.wait_until(lambda: newest() >= 40, "two checkpoints of its own")
    first.wait_trusted()
    known, ranks = newest(), job.find("perdure rank")
    for process in ranks:
        process.kill()
    psutil.wait_procs(ranks, timeout=PATIENCE_S)
    killed = time.time()

    def all_back() -> bool:
        return sum(bool(r := first.commits(g, killed)) and r[-1]["n"] == 3 for g in range(4)) == 3

    job.wait_until(all_back, "three groups again")
    back = [first.commits(g, killed)[0] for g in range(4) if first.commits(g, killed)]
    began = min(row["step"] for row in back)
    assert (began - 1) % 20 == 0
    assert began > known, "from a checkpoint that was there, and not from nothing"

    job.wait_until(lambda: newest() > began + 10, "one more of its own")
    asked = json.loads(job.cli("checkpoint", "ft", "--json").stdout)
    assert asked["step"] > began
    job.process.send_signal(signal.SIGTERM)
    job.wait()
    first.check(until=killed)
    first.check(since=killed)
    saved = newest()
    assert saved >= asked["step"]

    end = saved + 40
    training = Training(start, tmp_path, "--spares", "1", steps=end, log="again")
    assert training.job.wait() == 0, training.job.text()[-4000:]
    assert min(training.rows(g)[0]["step"] for g in range(3)) == saved + 1
    assert [training.rows(g)[-1]["step"] for g in range(3)] == [end] * 3
    assert not training.rows(3)
    training.check()


@pytest.mark.long
def test_at_torchfts_own_lighthouse_survivors_go_on_and_the_dead_comes_back(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "job.toml").write_text('[torchft]\nlighthouse = "stock"\n')
    training = Training(start, tmp_path, "-c", str(tmp_path / "job.toml"))
    job = training.job
    training.wait_trusted()
    job.wait_state("running")
    job.wait_until(
        lambda: [row["state"] for row in job.state()["replicas"]] == ["training"] * 3,
        "three groups",
    )
    survivors = [training.pid(g) for g in (0, 2)]
    os.kill(training.pid(1), signal.SIGKILL)
    killed = time.time()
    training.wait_members(2, killed, 0, 2)
    training.wait_members(3, killed, 0, 1, 2)
    assert [training.pid(g) for g in (0, 2)] == survivors
    last = training.rows(1)[-1]["step"]
    job.wait_until(lambda: training.rows(1)[-1]["step"] > last + 20, "hashes after healing")
    training.check()
    refused = job.cli("checkpoint", "ft", check=False)
    assert "perdure's own lighthouse" in refused.stdout + refused.stderr
    job.process.send_signal(signal.SIGTERM)
    job.wait()


@pytest.mark.long
def test_groups_that_synchronize_every_few_steps(start: Start, tmp_path: Path) -> None:
    training = Training(start, tmp_path, name="torchft_local_sgd.py")
    training.wait_trusted()
    assert training.rows(0)[-1]["inner"] == 4
    changed = json.loads(training.job.cli("set", "ft", "sync_every=2", "--json").stdout)
    step = changed["applied_at_step"] + 2
    training.job.wait_until(lambda: training.rows(0)[-1]["step"] > step, "shorter intervals")
    os.kill(training.pid(1), signal.SIGKILL)
    killed = time.time()
    training.wait_members(3, killed, 0, 1, 2)
    last = lambda: {training.rows(g)[-1]["inner"] for g in range(3)}  # noqa: E731
    training.job.wait_until(lambda: last() == {2}, "one interval, healed with the state")
    training.check()
    training.job.process.send_signal(signal.SIGTERM)
    training.job.wait()
