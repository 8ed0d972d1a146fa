"""The nodes of jobs elsewhere, against an ssh and a kubectl that are played."""

import json
import math
import os
import shutil
import stat
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.waiting import PATIENCE_S

from perdure.launch.catalog import load_profile
from perdure.launch.channel import Channel
from perdure.launch.exchange import UnreachedError
from perdure.launch.kubernetes.client import Client
from perdure.launch.platforms import Here
from perdure.launch.ssh import boxes
from perdure.model.codec import encode
from perdure.model.errors import ConfigError, PlatformError, SafetyError
from perdure.model.events import JobSubmitted, JournalEntry
from perdure.model.job import JobSpec
from perdure.model.platforms.kubernetes import KubernetesSection
from perdure.model.platforms.launching import LaunchRecord
from perdure.model.report import DeviceRow, Snapshot
from perdure_lab.live.driving import DriveWish, _tell
from perdure_lab.live.fleets.boxes import BoxFleet
from perdure_lab.live.fleets.elsewhere import JobElsewhere
from perdure_lab.live.fleets.local import LocalFleet
from perdure_lab.live.fleets.pods import PodFleet
from perdure_lab.live.ledger import cut_ledger
from perdure_lab.live.live import Act, Schedule, play
from perdure_lab.live.systems import Driven
from perdure_lab.traces import read_trace

HERE = Here(home="/nowhere", environ={}, tell=lambda line: None)
SPEC = JobSpec(name="gpt", script="t.py", nodes=3)
FAKE = Path(__file__).parents[1] / "launch" / "fake_kubectl.py"
Cluster = Callable[..., Callable[[], Any]]


def test_a_job_on_one_box_has_no_node_to_lose() -> None:
    for hosts in ((), ("",), ("gpu-box",)):
        with pytest.raises(ConfigError, match="is on one box"):
            BoxFleet(SPEC, hosts, HERE).list_nodes()


def test_of_boxes_that_are_to_be_launched_to_all_but_the_first_may_be_taken() -> None:
    nodes = BoxFleet(SPEC, ("a", "b", "c"), HERE).list_nodes()
    assert [(node.number, node.machine, bool(node.stays)) for node in nodes] == [
        (0, "a", True), (1, "b", False), (2, "c", False),
    ]  # fmt: skip


def test_a_job_of_this_machine_that_does_not_run_or_waits_for_others_is_refused(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="job `gpt` does not run"):
        LocalFleet(SPEC, str(tmp_path), None).list_nodes()
    remote = msgspec.structs.replace(SPEC, remote=1)
    with pytest.raises(ConfigError, match="join from elsewhere"):
        LocalFleet(remote, str(tmp_path), tmp_path).list_nodes()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Returns what sets a cluster's state up, which returns what reads it again."""
    program = tmp_path / "bin" / "kubectl"
    program.parent.mkdir()
    shutil.copy(FAKE, program)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    path = tmp_path / "cluster.json"
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_CLUSTER", str(path))

    def start(**state: Any) -> Callable[[], Any]:
        path.write_text(json.dumps({"version": "v1.31.2", **state}))
        return lambda: json.loads(path.read_text())

    return start


def make_pod(name: str, index: int) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {"job-name": "gpt"},
                     "annotations": {"batch.kubernetes.io/job-completion-index": str(index)}},
        "spec": {}, "status": {"phase": "Running", "podIP": f"10.0.0.{index}"},
    }  # fmt: skip


def make_status() -> str:
    devices = tuple(
        DeviceRow(device=f"cpu-{n}", node=n, ranks=(n,), replicas=(), state="in use",
                  host=f"10.0.0.{n}") for n in range(3)
    )  # fmt: skip
    return msgspec.json.encode(
        Snapshot(version=1, job="gpt", state="running", at_s=0.0, started_s=0.0, generation=0,
                 restarts=0, step=1, steps_per_s=1.0, world_size=3, depth="elastic", reason="",
                 devices=devices)
    ).decode()  # fmt: skip


def make_fleet(**section: Any) -> PodFleet:
    found = load_profile("kubernetes", "/nowhere").profile
    given = KubernetesSection(image="r.example/t@sha256:" + "0" * 64, **section)
    record = LaunchRecord(job="gpt", profile=msgspec.structs.replace(found, kubernetes=given),
                          place="/c/launched/gpt", id="gpt", python="python3",
                          home="/c/state")  # fmt: skip
    return PodFleet(SPEC, Client(given), HERE, record=record)


def list_calls(read: Callable[[], Any]) -> list[list[str]]:
    """Return what was done to the cluster's pods and Jobs, behind the first look into a pod."""
    calls = [[w for w in words if not w.startswith("--request")] for words, _ in read()["calls"]]
    return [words for words in calls if words[0] in ("exec", "delete", "patch")][1:]


PODS = [make_pod("gpt-0-aaa", 0), make_pod("gpt-1-bbb", 1), make_pod("gpt-2-ccc", 2)]
JOB = {"metadata": {"name": "gpt"}, "spec": {"parallelism": 3}, "status": {}}


def test_a_pod_is_killed_deleted_and_held_and_let_come_again(cluster: Cluster) -> None:
    read = cluster(job=JOB, jobs=[JOB], pods=PODS, says=make_status(), may="yes")
    fleet = make_fleet()
    nodes = fleet.list_nodes()
    assert [(node.machine, bool(node.stays)) for node in nodes] == [
        ("gpt-0-aaa", True), ("gpt-1-bbb", False), ("gpt-2-ccc", False),
    ]  # fmt: skip
    fleet.know_jobs()

    def list_acts() -> list[list[str]]:
        return list_calls(read)

    fleet.take([1])
    kill, delete, hold = list_acts()
    assert kill[:3] == ["exec", "-i", "gpt-1-bbb"]
    assert "PERDURE_POD_NAME" in " ".join(kill)
    assert delete[:3] == ["delete", "pod", "gpt-1-bbb"]
    assert {"--grace-period=0", "--force"} <= set(delete)
    assert hold == ["patch", "job", "gpt", "-p", '{"spec": {"parallelism": 2}}']
    fleet.take([1])
    assert len(list_acts()) == 3, "what is away is not taken again"

    fleet.give_now(1)
    assert list_acts()[3:] == [["patch", "job", "gpt", "-p", '{"spec": {"parallelism": 3}}']]
    fleet.take([2])
    fleet.end(stop=False)
    assert list_acts()[-1][-1] == '{"spec": {"parallelism": 3}}', "as many as before"


def test_a_jobs_last_pod_is_held_before_it_is_deleted(cluster: Cluster) -> None:
    """Nothing comes in between then; of several the Job would choose which one it ends."""
    nodes = {"metadata": {"name": "gpt-nodes"}, "spec": {"parallelism": 1}, "status": {}}
    further = make_pod("gpt-1-bbb", 1)
    further["metadata"]["labels"]["job-name"] = "gpt-nodes"
    read = cluster(job=JOB, jobs=[JOB, nodes], pods=[PODS[0], further], says=make_status(),
                   may="yes")  # fmt: skip
    fleet = make_fleet()
    fleet.list_nodes()
    fleet.know_jobs()
    fleet.take([1])
    assert [words[0] for words in list_calls(read)] == ["exec", "patch", "delete"]


def test_a_user_who_may_not_do_it_is_told_what_is_missing_and_nothing_is_done(
    cluster: Cluster,
) -> None:
    read = cluster(job=JOB, jobs=[JOB], pods=PODS, says=make_status(), may="no")
    with pytest.raises(SafetyError, match="may not get pods, delete pods, create pods/exec"):
        make_fleet().list_nodes()
    assert not [words for words, _ in read()["calls"] if words[0] in ("delete", "patch")]


def test_pods_whose_jobs_another_controller_sets_are_refused(cluster: Cluster) -> None:
    cluster(may="yes")
    with pytest.raises(ConfigError, match="pods of a jobset are not driven"):
        make_fleet(shape="jobset", server="1.31").list_nodes()


def test_a_job_without_a_pod_is_not_driven(cluster: Cluster) -> None:
    cluster(job=None, pods=[], may="yes")
    with pytest.raises(ConfigError, match="job `gpt` is"):
        make_fleet().list_nodes()


class Unreached(BoxFleet):
    """Boxes of which none can be reached any more."""

    def take(self, nodes: Sequence[int]) -> None:
        raise UnreachedError("b did not answer")

    def read_entries(self) -> list[JournalEntry]:
        raise PlatformError("a did not answer")


def test_a_node_that_is_not_reached_ends_the_play_and_what_was_seen_is_told() -> None:
    told: list[str] = []
    fleet = Unreached(SPEC, ("a", "b", "c"), HERE)
    system = Driven(fleet, stop=True, ending=lambda: told.append("ends"))
    schedule = Schedule((0, 1), (Act(0.0, "leave", (1,)), Act(60.0, "come", (1,))))
    played = play(system, schedule, 90.0, {}, lambda *_: None)
    assert (played.over, played.complete, told) == (True, False, ["ends"])
    assert str(system.trouble) == "b did not answer", "the first that was wrong"
    assert played.run.end_s < 30
    trace = read_trace("0,add,a\n0,add,b\n1,remove,b\n", "t.csv", duration_s=90.0)
    wish = DriveWish(trace, "/nowhere", 1.0, 0.0, None, 1.0)
    answer = _tell(wish, played, {3: 3.0}, system)
    assert (answer.trouble, answer.ended) == ("b did not answer", "")
    assert answer.systems[0].losses == 1


class Ended(Unreached):
    """Boxes that are told to end."""

    stopped: bool | None = None

    def end(self, *, stop: bool) -> None:
        self.stopped = stop


def test_a_job_is_stopped_though_nobody_reads_that_it_is() -> None:
    """`2>&1 | tee log`, where Ctrl-C ends the one who reads first."""

    def tell() -> None:
        raise BrokenPipeError

    fleet = Ended(SPEC, ("a", "b", "c"), HERE)
    with pytest.raises(BrokenPipeError):
        Driven(fleet, stop=True, ending=tell).end()
    assert fleet.stopped


class Door:
    """A lock that tells of who comes to it."""

    def __init__(self) -> None:
        self.lock, self.came = threading.Lock(), threading.Semaphore(0)

    def __enter__(self) -> None:
        self.came.release()
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def test_a_node_that_is_taken_while_it_starts_is_given_back_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The end of the start was taken for the newest word: the user's job went on without it."""
    go_on, taken, door = threading.Event(), list[object](), Door()

    def give(box: object, here: object) -> None:
        assert go_on.wait(PATIENCE_S)

    monkeypatch.setattr(boxes, "give", give)
    monkeypatch.setattr(boxes, "take", taken.append)
    fleet = BoxFleet(SPEC, ("a", "b", "c"), HERE)
    box: Any = object()
    fleet._boxes, fleet._locks = {1: box}, {1: door}  # type: ignore[dict-item]
    fleet.take([1])
    assert door.came.acquire(timeout=PATIENCE_S)
    fleet.give([1])
    assert door.came.acquire(timeout=PATIENCE_S)
    second = threading.Thread(target=fleet.take, args=([1],))
    second.start()
    assert door.came.acquire(timeout=PATIENCE_S), "it waits for the start"
    go_on.set()
    second.join(PATIENCE_S)
    assert taken == [box, box]
    assert fleet._away == {1}


class Lost(BoxFleet):
    """Boxes of which one does not start again."""

    def take(self, nodes: Sequence[int]) -> None:
        pass

    def _give_one(self, node: int) -> None:
        raise PlatformError(f"node {node} did not start")

    def read_entries(self) -> list[JournalEntry]:
        return []


def test_a_node_that_does_not_come_back_ends_the_play_and_is_named() -> None:
    system = Driven(Lost(SPEC, ("a", "b", "c"), HERE), stop=True, ending=lambda: None)
    acts = (Act(0.0, "leave", (1,)), Act(0.1, "come", (1,)))
    played = play(system, Schedule((0, 1), acts), 90.0, {}, lambda *_: None)
    assert (played.over, str(system.trouble)) == (True, "node 1 did not start")
    assert played.run.end_s < 30


def test_what_a_node_waits_in_the_queue_is_idle_in_the_ledger() -> None:
    """The trace has node 1 from 10 s on, Slurm from 40 s on; the job knows nothing of it."""
    spec = msgspec.structs.replace(SPEC, nodes=2, nproc=4)
    alone_told = msgspec.structs.replace(spec, nodes=1)
    begun = [JournalEntry(1, 990.0, JobSubmitted(spec=alone_told, at_s=990.0))]
    both, alone = frozenset({0, 1}), frozenset({0})
    present = [(0.0, both), (5.0, alone), (10.0, both)]
    shares = cut_ledger(begun, spec, present, 1000.0, 50.0, [(1, 10.0, 40.0), (1, 49.0, math.inf)])
    paid_s = 4 * (50.0 + 45.0)
    assert shares["idle"] == pytest.approx(4 * (30.0 + 1.0) / paid_s)
    assert sum(shares.values()) == pytest.approx(1.0)
    early = cut_ledger(begun, spec, present, 1000.0, 50.0, [(1, 6.0, 12.0)])
    assert early["idle"] == pytest.approx(4 * 2.0 / paid_s), "paid for from 10 s on only"


def test_a_status_with_a_loss_that_is_not_finite_is_heard() -> None:
    profile = load_profile("generic-ssh", "/nonexistent").profile
    record = LaunchRecord(job="gpt", profile=profile, place="/p", home="/h", python="python3")
    job = JobElsewhere(record, Channel(profile.launch), lambda record, argv: "")
    job._hear_clock("7.0")
    seen = Snapshot(
        version=1, job="gpt", state="running", at_s=1.0, started_s=0.0, generation=0, restarts=0,
        step=9, steps_per_s=1.0, world_size=1, depth="resumable", reason="", ranks=(),
    )  # fmt: skip
    job._hear(encode(seen).decode())
    job._hear(encode(msgspec.structs.replace(seen, step=10, metrics={"loss": math.nan})).decode())
    job._hear("not a status")
    found = job.newest
    assert found is not None
    assert found.step == 10
