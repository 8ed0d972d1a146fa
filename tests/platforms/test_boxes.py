"""Several boxes as one job: each in a network namespace with an sshd and a home of its own.

Their links are real veth pairs that can be cut; a box is lost with everything on it.
"""

import json
import shlex
import shutil
import subprocess
import tempfile
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.box import Box, Laptop, needs_sshd, read_json
from tests.e2e.exact import check_equal
from tests.e2e.harness import SCRIPTS
from tests.e2e.test_elastic_nodes import read
from tests.lab.network import Lab, sh, why_not
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.serial,
    needs_sshd,
    pytest.mark.skipif(bool(why_not()), reason=f"no network namespaces: {why_not()}"),
]
STEPS = 60
EXACT = f"""\
name = "exact"
script = "train_exact.py"
args = ["--trail", "trail", "--steps", "{STEPS}", "--pace-s", "0.15"]
nodes = 2
[checkpoint]
every_steps = 10
url = "@shared@"
[launch]
project = "project"
outputs = ["trail"]
"""
ELASTIC = """\
name = "elastic"
script = "elastic.py"
args = ["--trail", "trail", "--steps", "100000"]
nodes = 2
[launch]
project = "project"
outputs = ["trail"]
"""

SERVER = """\
name = "server"
script = "python3"
args = ["-m", "http.server", "6006", "--bind", "127.0.0.1", "--directory", "page"]
no_python = true
nodes = 2
[launch]
project = "project"
"""


class Boxes:
    """A laptop with a box for each node of `lab`; `set_link` takes one's link away."""

    def __init__(self, lab: Lab, folder: Path, **profile: Any) -> None:
        self.lab = lab
        self.boxes = []
        for node in range(lab.nodes):
            box = Box(folder / f"box{node + 1}", name=f"box{node + 1}",
                      address=lab.addresses[node], space=lab.space(node))  # fmt: skip
            self.boxes.append(box)
            box.start(boot_id=str(uuid.uuid4()))
        (folder / "laptop").mkdir()
        self.laptop = Laptop(folder / "laptop", self.boxes[0], others=self.boxes[1:], **profile)

    def set_link(self, node: int, state: str) -> None:
        sh("ip", "link", "set", self.lab.port(node), state)

    def write_job(self, text: str, script: str) -> None:
        project = self.laptop.folder / "project"
        (project / "trail").mkdir(parents=True)
        shutil.copy(SCRIPTS / script, project / script)
        (self.laptop.folder / "job.toml").write_text(text)

    def find_trail(self, node: int, job: str, rank: int) -> Path:
        folder = job if node == 0 else f"{job}+box{node + 1}"
        place = self.boxes[node].home / "perdure" / folder / "project" / "trail"
        return place / f"rank-{rank}.jsonl"

    def find_events(self, job: str, kind: str) -> list[dict[str, Any]]:
        told = self.laptop.cli("events", job, "--json").stdout.splitlines()
        return [row for line in told if (row := json.loads(line))["kind"] == kind]


@pytest.fixture
def boxes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Boxes]:
    with Lab(2) as lab:
        made = Boxes(lab, tmp_path, **getattr(request, "param", {}))
        try:
            yield made
        finally:
            made.laptop.disconnect()
            for box in made.boxes:
                box.power_off()


@pytest.fixture
def shared() -> Iterator[Path]:
    """Return a disk that all boxes see, outside /tmp, which is refused as a durable place."""
    folder = Path(tempfile.mkdtemp(prefix=".perdure-platforms-", dir=Path.home()))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.timeout(600)
def test_a_box_lost_whole_comes_back_and_no_loss_differs(boxes: Boxes, shared: Path) -> None:
    laptop, second = boxes.laptop, boxes.boxes[1]
    boxes.write_job(EXACT.replace("@shared@", str(shared)), "train_exact.py")
    told = laptop.cli("launch", "job.toml", "--on", "box").stderr
    assert f"box2 is {boxes.lab.addresses[1]} to the others" in told
    assert "box2 is node 1 of exact" in told
    laptop.wait_step("exact", 15)
    out = laptop.cli("logs", "exact")
    assert "did not answer" not in out.stderr

    second.power_off()
    boxes.set_link(1, "down")
    wait_until(lambda: boxes.find_events("exact", "NodeLost"), "loss of the node")
    (lost,) = boxes.find_events("exact", "NodeLost")
    assert lost["node"] == 1
    status = laptop.cli("status", "exact").stderr
    assert "box1: running" in status
    assert "box2 did not answer" in status
    assert "; last seen " in status
    one, gone = laptop.ask("status", "exact")["boxes"]
    assert (one["host"], one["state"], gone["host"], gone["state"]) == (
        "box1", "running", "box2", "unreached"
    )  # fmt: skip
    boot_id = (second.folder / "boot_id").read_text().strip()
    assert gone["boot_id"] == boot_id
    assert gone["seen_s"] < one["seen_s"]
    boxes.set_link(1, "up")
    second.start(boot_id=str(uuid.uuid4()))
    assert "box2: rebooted" in laptop.cli("status", "exact").stderr
    assert laptop.ask("status", "exact")["boxes"][1]["boot_id"] != boot_id
    again = laptop.cli("launch", "job.toml", "--on", "box").stderr
    assert "the job runs; it is joined by box2" in again
    assert "to box2:" in again
    assert "to box1:" not in again, "nothing is changed under what runs"
    laptop.cli("attach", "exact")

    laptop.cli("pull", "exact", "pulled")
    assert laptop.ask("verify", "pulled")["ok"]
    killed = laptop.folder / "killed"
    killed.mkdir()
    for node, label in enumerate(("outputs/trail", "boxes/box2/outputs/trail")):
        shutil.copy(laptop.folder / "pulled" / label / f"rank-{node}.jsonl", killed)
    laptop.train_reference(STEPS)
    check_equal(laptop.folder, STEPS, 2)
    laptop.cli("teardown", "exact", "--confirm", "exact", "--others-agree")
    for host in ("box1", "box2"):
        assert Path(f"{laptop.stopped}-exact-{host}").exists()
    assert read_json(laptop.home / "launches" / "exact.json")["torn_down_s"] > 0


@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("cron") is None, reason="no cron")
@pytest.mark.parametrize("boxes", [{"relaunch": "cron"}], indirect=True)
def test_the_first_box_and_then_all_reboot_and_nobody_does_anything(
    boxes: Boxes, shared: Path
) -> None:
    laptop, (first, second) = boxes.laptop, boxes.boxes
    boxes.write_job(EXACT.replace("@shared@", str(shared)), "train_exact.py")
    for box in boxes.boxes:
        laptop.ssh("crontab -", stdin=f"HOME={box.home}\n", box=box)  # cron's own is /root.
        laptop.ssh("cron", box=box)
    laptop.cli("launch", "job.toml", "--on", "box")
    laptop.wait_step("exact", 12)

    first.reboot()
    laptop.ssh("cron", box=first)
    laptop.wait_step("exact", 25)
    launch = second.home / "perdure" / "exact+box2" / "launch"
    assert read_json(launch / "start.json")["attempt"] == 1, "it was there all the time"
    assert "exact was started anew" in (launch / "run.out").read_text()

    for box in boxes.boxes:
        box.power_off()
    for box in reversed(boxes.boxes):  # Who comes up first waits for the job's own machine.
        box.start(boot_id=str(uuid.uuid4()))
        laptop.ssh("cron", box=box)
    laptop.wait_step("exact", 40)
    laptop.cli("attach", "exact")

    (laptop.folder / "killed").mkdir()
    for node in range(2):
        trail = boxes.find_trail(node, "exact", node)
        shutil.copy(trail, laptop.folder / "killed" / trail.name)
    laptop.train_reference(STEPS)
    check_equal(laptop.folder, STEPS, 2)


@pytest.mark.timeout(600)
def test_boxes_without_a_shared_disk_go_on_without_the_one_whose_link_is_cut(boxes: Boxes) -> None:
    laptop = boxes.laptop
    boxes.write_job(ELASTIC, "elastic.py")
    told = laptop.cli("launch", "job.toml", "--on", "box").stderr
    assert "the boxes share no disk" in told
    mine = boxes.find_trail(0, "elastic", 0)
    wait_until(lambda: len(read(mine.parent, 0)) >= 10, "training on both")
    assert read(mine.parent, 0)[-1]["world"] == [0, 1]

    boxes.set_link(1, "down")
    wait_until(lambda: read(mine.parent, 0)[-1]["world"] == [0], "the other one going on")
    boxes.boxes[1].power_off()
    refused = laptop.cli("pull", "elastic", "pulled", "--gone", "box2", code=4)
    assert "is running on box1" in refused.stderr
    boxes.set_link(1, "up")
    boxes.boxes[1].start(boot_id=str(uuid.uuid4()))
    assert "box2 is node 1" in laptop.cli("launch", "job.toml", "--on", "box").stderr
    wait_until(lambda: len(read(mine.parent, 0)[-1]["world"]) == 2, "both again")
    laptop.cli("stop", "elastic")
    laptop.cli("attach", "elastic")
    steps = [row["step"] for row in read(mine.parent, 0)]
    assert steps == list(range(len(steps))), "a step was lost or made twice"

    boxes.boxes[1].power_off()
    assert "box2 did not answer" in laptop.cli("pull", "elastic", "pulled", code=3).stderr
    laptop.cli("pull", "elastic", "pulled", "--gone", "box2")
    assert laptop.ask("verify", "pulled")["ok"]
    assert not (laptop.folder / "pulled" / "boxes").exists()
    laptop.cli("teardown", "elastic", "--confirm", "elastic", "--others-agree")
    assert Path(f"{laptop.stopped}-elastic-box2").exists(), "what is gone may still cost"


def fetch(port: int) -> str:
    """Return what is served there on this machine's loopback; empty while nobody serves."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


@pytest.mark.timeout(300)
def test_a_page_of_any_box_is_seen_by_the_line_that_status_prints(boxes: Boxes) -> None:
    laptop = boxes.laptop

    def look(*words: str) -> str:
        """Return the page while the printed command runs."""
        line = laptop.cli("status", "server", "--port", "6006", *words).stdout
        with subprocess.Popen(shlex.split(line), env=laptop.env, cwd=laptop.folder) as forwarding:
            try:
                wait_until(lambda: bool(fetch(6006)), "the page")
                return fetch(6006)
            finally:
                forwarding.terminate()

    boxes.write_job(SERVER, "elastic.py")
    (laptop.folder / "project" / "page").mkdir()
    (laptop.folder / "project" / "page" / "index.html").write_text("from the box")
    laptop.cli("launch", "job.toml", "--on", "box")
    assert not fetch(6006), "something of this machine serves there"
    assert look() == "from the box"
    page = boxes.boxes[1].home / "perdure" / "server+box2" / "project" / "page" / "index.html"
    page.write_text("from the second")
    assert look("--host", "box2") == "from the second"
    assert not fetch(6006)
    refused = laptop.cli("status", "server", "--port", "6006", "--host", "box3", code=2).stderr
    assert "--host box3: not a box of server" in refused
    assert "box1, box2" in refused


@pytest.mark.timeout(300)
def test_boxes_that_do_not_reach_one_another_are_refused_by_name(boxes: Boxes) -> None:
    boxes.write_job(ELASTIC, "elastic.py")
    sh("bridge", "link", "set", "dev", boxes.lab.port(0), "isolated", "on")
    sh("bridge", "link", "set", "dev", boxes.lab.port(1), "isolated", "on")
    told = boxes.laptop.cli("launch", "job.toml", "--on", "box", code=3).stderr
    assert f"box2 cannot reach box1 ({boxes.lab.addresses[0]})" in told
    assert not (boxes.boxes[0].home / "perdure").exists(), "nothing was sent"
