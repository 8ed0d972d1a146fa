"""docs/c4d.md: its commands, typed as they stand there, at pods of a real Kubernetes.

Failures are made as C4D's user makes them: by `tc` and signals in a pod, and by deleting one.
"""

import contextlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from perdure.worker.native.build import build
from tests.platforms.k8s.cluster import REPOSITORY, Kubernetes, list_mounts
from tests.platforms.k8s.tenant import Tenant

pytestmark = [pytest.mark.serial, pytest.mark.timeout(1200)]
PAGE = REPOSITORY / "docs" / "c4d.md"
TRAIN = REPOSITORY / "tests" / "lab" / "train.py"


def read_section(title: str) -> list[str]:
    """Return the commands of a section, in order."""
    section = PAGE.read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    lines = re.findall(r"^    (.*)$", section, re.MULTILINE)
    return [line for line in lines if line.startswith(("perdure ", "kubectl "))]


def find_lack_of_netem() -> str:
    """Return why `tc` can neither delay nor lose packets on this kernel; empty where it can."""
    words = ["unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    done = subprocess.run(words, capture_output=True, text=True)
    return done.stderr.strip() if done.returncode else ""


class User:
    """Who types what the page says; what is in capitals there is a name of the moment."""

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.names: dict[str, str] = {}
        self.generation = -1
        """Of the world that trained last."""

    def type(self, line: str) -> str:
        """Run a line of the page; return what it printed."""
        for known, now in self.names.items():
            line = line.replace(known, now)
        line = re.sub("^perdure ", f"{sys.executable} -m perdure ", line)
        done = subprocess.run(
            ["bash", "-c", line], env=self.tenant.env, cwd=self.tenant.folder, text=True,
            capture_output=True, timeout=150, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def ask(self, *words: str) -> Any:
        """Return a command's answer as JSON."""
        return json.loads(self.tenant.cli(*words, "--json").stdout)

    def find_device(self, *, node: int = -1, rank: int = -1) -> dict[str, Any]:
        """Return what `status --devices` has of a node, or of the one that has a rank now."""
        devices = self.ask("status", "gpt", "--devices")["devices"]
        return next(d for d in devices if d["node"] == node or rank in d["ranks"])

    def find_pod(self, *, rank: int) -> dict[str, Any]:
        """Return the pod that has a rank now, by its address."""
        host = self.find_device(rank=rank)["host"]
        pods = self.tenant.find_pods("gpt")
        return next(pod for pod in pods if pod["status"].get("podIP") == host)

    def name_pod(self, *, rank: int) -> str:
        """Have GPT-POD be the pod of a rank; return its name."""
        self.names["GPT-POD"] = str(self.find_pod(rank=rank)["metadata"]["name"])
        return self.names["GPT-POD"]

    def choose_link(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Have GPT-POD send much to PEER-IP, neither the first pod; return link and node of it."""
        self.tenant.cluster.wait(lambda: self.list_links(), "links between two other pods", 120)
        src, dst = self.list_links()[0]
        self.name_pod(rank=src)
        self.names["PEER-IP"] = self.find_device(rank=dst)["host"]
        return {"link": [src, dst]}, {"node": self.find_device(rank=src)["node"]}

    def list_links(self) -> list[tuple[int, int]]:
        """Return the pairs of ranks that send to each other, none in the first pod, busiest first.

        They are noted a while after a world has begun to train.
        """
        links = self.ask("status", "gpt", "--links")["links"]
        first = self.find_device(node=0)["ranks"]
        busy = sorted(links, key=lambda link: -link[3])  # src, dst, comm, bytes, ...
        return [(src, dst) for src, dst, *_ in busy if not {src, dst} & {*first}]

    def count(self, kind: str, *culprits: dict[str, Any]) -> int:
        """Return how many verdicts of a kind were about one of some culprits, withdrawn or not."""
        verdicts = self.ask("diagnose", "gpt")["verdicts"]
        return sum(v["kind"] == kind and v["culprit"] in culprits for v in verdicts)

    def wait_more(self, before: int, kind: str, *culprits: dict[str, Any]) -> None:
        """Wait for one more such verdict."""
        self.tenant.cluster.wait(
            lambda: self.count(kind, *culprits) > before, f"{kind} of {culprits}", 120
        )

    def wait_training(self) -> None:
        """Wait until a generation after the last one has exchanged gradients for a while."""

        def trains() -> bool:
            take_precedence()
            told = self.ask("status", "gpt")
            done = [int(row["collective"].partition("#")[2].split()[0]) for row in told["ranks"]]
            if told["generation"] <= self.generation or min(done) < 60:
                return False
            self.generation = told["generation"]
            return True

        self.tenant.cluster.wait(trains, f"training after generation {self.generation}", 400)


def take_precedence() -> None:
    """Have the pods' processes go before whatever else runs here, as the laboratory's do."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get("PERDURE_POD_NAME"):
                process.nice(-15)


@pytest.fixture
def user(kubernetes: Kubernetes, tmp_path: Path) -> Iterator[User]:
    """Return someone whose profile and job are the page's, with the tests' image and script."""
    tenant = Tenant(
        kubernetes, tmp_path, access_mode="ReadWriteMany", memory="2Gi", net_admin=True, grace_s=30,
        host_paths=[*list_mounts(), str(build().parent)],  # The recorder, as an image has it.
    )  # fmt: skip
    shutil.copy(TRAIN, tenant.project)
    _, _, text = PAGE.read_text().partition("    $ cat job.toml\n")
    shown = "".join(line[4:] + "\n" for line in text.split("\n\n")[0].splitlines())
    more = 'args = ["--step-s", "0.3"]\n[launch]'
    (tenant.folder / "job.toml").write_text(shown.replace("[launch]", more))
    yield User(tenant)
    kubernetes.clear()


def test_what_a_user_of_c4d_does_to_its_pods_is_named_by_perdure(user: User) -> None:
    launch, *looks = read_section("Deploy")
    user.type(launch)
    user.wait_training()
    pods, status, topology, links, doctor, logs = (user.type(line) for line in looks)
    assert "running" in status
    assert pods.count("gpt-nodes-") == 3
    assert topology.count('"host"') == 4
    assert "Delay matrix" in links
    assert "recorder compiled" in doctor
    assert "Traceback" not in logs

    slow_a_network(user)
    break_a_link(user)
    user.wait_training()
    user.name_pod(rank=2)
    stop, diagnose = read_section("A process that stands still")
    user.type(stop)
    user.wait_more(0, "ComputeHang", {"rank": 2})
    assert "is stopped (state T)" in user.type(diagnose)
    user.wait_training()

    slow, diagnose = read_section("A slow process")
    user.type(slow)
    user.wait_more(0, "Straggler", {"rank": 2})
    assert "backward" in user.type(diagnose)

    victim = user.name_pod(rank=2)
    delete, diagnose, report = read_section("A pod that is gone")
    user.type(delete)
    user.tenant.cluster.wait(
        lambda: "preemption (SIGTERM" in user.type(report) or "NodeLost" in user.type(diagnose),
        "the end of a pod", 120,
    )  # fmt: skip
    user.wait_training()
    assert victim not in user.type(looks[0])
    user.tenant.cli("stop", "gpt", "--now")


def slow_a_network(user: User) -> None:
    """Slow what a pod sends, and have it named; where the kernel can, delay and lose it too."""
    link, sending = user.choose_link()
    slow, diagnose, matrix, heal = read_section("The network of one pod")
    before = user.count("CommSlow", link, sending)
    user.type(slow)
    user.wait_more(before, "CommSlow", link, sending)
    assert "CommSlow" in user.type(diagnose)
    assert "*" in user.type(matrix)
    user.type(heal)

    delay, diagnose, lose, _, heal = read_section("Delay and loss")
    if not find_lack_of_netem():
        before = user.count("CommSlow", link, sending)
        user.type(delay)
        user.wait_more(before, "CommSlow", link, sending)
        user.type(lose)
        user.type(diagnose)
        user.type(heal)


def break_a_link(user: User) -> None:
    """Have a link lose all, be named, and its job go on elsewhere."""
    link, sending = user.choose_link()
    *shape, diagnose = read_section("One link")
    blackhole, _, report, heal = read_section("A dead link")
    for line in shape:
        user.type(line)
    assert "Delay matrix" in user.type(diagnose)
    user.type(blackhole)
    user.wait_more(0, "CommHang", link, sending)
    user.tenant.cluster.wait(lambda: "-> restart" in user.type(report), "a restart", 120)
    user.type(heal)
