"""Several boxes as one job: what each is sent, who is reached where, names of pulled files."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from tests.waiting import PATIENCE_S

from perdure.launch.catalog import load_profile, overlay
from perdure.launch.platforms import place_job
from perdure.launch.results.pulling import map_owners
from perdure.launch.ssh import box, boxes, render
from perdure.launch.ssh.submit import list_roots
from perdure.model.errors import ConfigError, PlatformError
from perdure.model.job import JobSpec, LaunchConfig
from perdure.model.platforms.launching import LaunchRecord, Plan
from perdure.model.platforms.profile import Profile

HOSTS = ("gpu-a", "me@gpu-b")


def make_profile(**values: Any) -> Profile:
    named = {f"launch.{key}": value for key, value in {"hosts": HOSTS, **values}.items()}
    return overlay(load_profile("generic-ssh", "/nonexistent"), named, "test").profile


def make_plan(nodes: int = 2, *, shared: bool = False, **values: Any) -> Plan:
    spec = JobSpec(
        name="gpt", script="train.py", nodes=nodes, launch=LaunchConfig(project="/srv/proj")
    )
    profile = msgspec.structs.replace(make_profile(**values), shared_fs=shared)
    return render(spec, profile)


def test_the_first_box_runs_the_job_and_the_others_join_it() -> None:
    plan = make_plan()
    (other,) = plan.others
    assert (plan.profile.launch.host, other.profile.launch.host) == HOSTS
    first, second = (json.loads(each.files["settings.json"]) for each in (plan, other))
    assert first["command"][-2:] == ["--placement", "$JOB_DIR/launch/placement.json"]
    assert second["command"][5:7] == ["join", "$JOB_DIR/launch/credentials/invitation.json"]
    assert json.loads(plan.files["job.json"])["remote"] == 1
    assert (plan.place, other.place) == ("$HOME/perdure/gpt", "$HOME/perdure/gpt+me-gpu-b")
    homes = [
        each.files["env.sh"].split('PERDURE_HOME="')[1].split('"')[0] for each in (plan, other)
    ]
    assert len(set(homes)) == 2, "two machines with one home directory would take one another's job"


def test_one_disk_of_all_boxes_takes_the_checkpoints() -> None:
    plan = make_plan(shared=True)
    url = json.loads(plan.files["job.json"])["checkpoint"]["url"]
    assert url == "$DURABLE_DIR/checkpoints/gpt"
    roots = list_roots(plan, "/h/perdure/gpt", "/h/perdure/state", "/mnt/nfs")
    assert roots["checkpoints"] == "/mnt/nfs/checkpoints/gpt"
    assert "share no disk" in " ".join(f.text for f in make_plan().findings)


@pytest.mark.parametrize(
    ("nodes", "values", "word"),
    [
        (3, {}, "names 2 boxes, and the job has 3 nodes"),
        (2, {"host": "gpu-b"}, "is not the first"),
        (2, {"hosts": ("a", "a")}, "names a box twice"),
        (2, {"addresses": ("10.0.0.1",)}, "1 for 2 boxes"),
    ],
)
def test_boxes_that_are_no_job_are_refused(nodes: int, values: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        make_plan(nodes, **values)


def test_one_host_in_the_list_is_one_box() -> None:
    plan = make_plan(1, hosts=("gpu-a",))
    assert (plan.profile.launch.host, plan.others) == ("gpu-a", ())
    assert "join" not in plan.files["settings.json"]
    assert place_job(JobSpec(script="t.py", launch=LaunchConfig(project="/srv/proj"))).remote == 0


class Door:
    """A box of the network below, instead of a connection to one."""

    reach: ClassVar[dict[str, set[str]]] = {}
    """Host -> the addresses that it can connect to."""
    interfaces: ClassVar[dict[str, list[tuple[str, str]]]] = {
        "gpu-a": [("lo", "127.0.0.1"), ("eth0", "93.184.216.34"), ("eth1", "10.0.0.1")],
        "me@gpu-b": [("lo", "127.0.0.1"), ("wg0", "10.9.0.2"), ("eth1", "10.0.0.2")],
    }

    def __init__(self, section: Any) -> None:
        self.name = section.host

    def query(self, script: str, type_: Any, **_: Any) -> Any:
        port = 1000 + len(self.name)
        if " reach " not in script:
            return boxes.Listening(port, self.interfaces[self.name])
        wanted = json.loads(script.split(" reach ", 1)[1].strip("'"))
        return {
            listener: listener.rsplit(":", 1)[0] in self.reach[self.name] for listener in wanted
        }


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> type[Door]:
    monkeypatch.setattr(boxes, "Channel", Door)
    return Door


def test_boxes_are_reached_where_all_others_reach_them(network: type[Door]) -> None:
    everything = {"10.0.0.1", "10.0.0.2", "93.184.216.34"}
    network.reach = {"gpu-a": everything, "me@gpu-b": everything | {"10.9.0.2"}}
    plan = make_plan()
    found = boxes.meet((plan, *plan.others))
    assert [(n.address, n.interface) for n in found] == [("10.0.0.1", "eth1"), ("10.0.0.2", "eth1")]


def test_who_does_not_reach_whom_is_told(network: type[Door]) -> None:
    network.reach = {"gpu-a": {"10.0.0.1"}, "me@gpu-b": {"10.0.0.1", "10.0.0.2", "10.9.0.2"}}
    plan = make_plan()
    with pytest.raises(PlatformError, match=r"gpu-a cannot reach me@gpu-b \(10.9.0.2, 10.0.0.2\)"):
        boxes.meet((plan, *plan.others))
    network.reach["gpu-a"].add("100.64.0.7")
    network.reach["me@gpu-b"].add("100.64.0.7")
    plan = make_plan(addresses=("10.0.0.1", "100.64.0.7"))
    assert boxes.meet((plan, *plan.others))[1] == boxes.Network("100.64.0.7", "")


def test_files_of_a_further_box_are_pulled_under_its_name() -> None:
    def make(host: str, place: str, **more: Any) -> LaunchRecord:
        roots = {"launch": f"{place}/launch"}
        return LaunchRecord(
            job="gpt", profile=make_profile(hosts=(), host=host), place=place, home="/h/state",
            python="/p", roots=roots, **more,
        )  # fmt: skip

    others = (make("b", "/d/gpt+b"), make("c", "/d/gpt+c", gone=True))
    record = make("a", "/d/gpt", others=others)
    assert [box.box for box in record.boxes] == ["a", "b"]
    assert {label: (owner.box, name) for label, (owner, name) in map_owners(record).items()} == {
        "launch": ("a", "launch"),
        "project": ("a", "project"),
        "data": ("a", "data"),
        "durable": ("a", "durable"),
        "elsewhere": ("a", "elsewhere"),
        "boxes/b/launch": ("b", "launch"),
        "boxes/b/project": ("b", "project"),
        "boxes/b/data": ("b", "data"),
        "boxes/b/durable": ("b", "durable"),
        "boxes/b/elsewhere": ("b", "elsewhere"),
    }
    decoded = msgspec.json.decode(msgspec.json.encode(record), type=LaunchRecord)
    assert decoded == record


def test_a_box_listens_for_a_while_and_is_reached() -> None:
    command = [sys.executable, str(Path(box.__file__)), "listen", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    told = json.loads(done.stdout.removeprefix(box.ANSWER))
    assert ["lo", "127.0.0.1"] in told["interfaces"]
    assert box.reach(f"127.0.0.1:{told['port']}")
