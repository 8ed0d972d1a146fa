"""`perdure serve --remote`: ranks of groups on other machines are heard by way of a relay.

Each machine is a network namespace with a name, a /tmp/perdure-UID and a PERDURE_HOME of its own.
The commands are those of docs/torchft.md, with addresses and ports of here.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.harness import SCRIPTS
from tests.e2e.test_serve import LINE, PAGE, SCRIPT
from tests.lab.network import Lab, sh, why_not
from tests.waiting import PATIENCE_S, wait_until

pytest.importorskip("torchft")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]
PROGRAMS = Path(sys.executable).parent


def read_commands() -> list[list[str]]:
    """Return the blocks of commands of the page's section, in order."""
    section = PAGE.read_text().split("### On other machines\n")[1].split("\n## ")[0]
    blocks: list[list[str]] = [[]]
    for line in section.splitlines():
        if line.startswith("    "):
            blocks[-1].append(line.strip().partition("  #")[0])
        elif blocks[-1]:
            blocks.append([])
    return [block for block in blocks if block]


class Machine:
    """A namespace that looks like a machine to what runs in it."""

    def __init__(self, lab: Lab, number: int, folder: Path) -> None:
        self.address, self.folder = lab.addresses[number], folder / f"machine-{number}"
        self.folder.mkdir()
        private = f"/tmp/perdure-{os.getuid()}"
        os.makedirs(private, mode=0o700, exist_ok=True)
        name, names = f"gpu{number}", folder / "hosts"
        lines = [f"{address} gpu{n}\n" for n, address in enumerate(lab.addresses)]
        names.write_text("127.0.0.1 localhost\n" + "".join(lines))
        mount = (
            f"mount -t tmpfs -o mode=700 none {private} && mount --bind {names} /etc/hosts && "
            f"mount --bind /dev/null /etc/resolv.conf && hostname {name}"
        )
        into = ["ip", "netns", "exec", lab.space(number), "unshare", "-m", "-u"]
        self.holder = subprocess.Popen([*into, "sh", "-c", f"{mount} && exec sleep 86400"])
        self.space = ["nsenter", "-t", str(self.holder.pid), "-m", "-u", "-n", "--"]
        wait_until(lambda: sh(*self.space, "hostname", check=False).strip() == name, "its name")
        self.env = dict(
            os.environ,
            PERDURE_HOME=str(self.folder / "state"),
            PATH=f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}",
            GLOO_SOCKET_IFNAME="eth0",
            RUST_LOG="warn",
            COLUMNS="120",
        )
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, command: str, **env: str) -> subprocess.Popen[bytes]:
        """Type `command` in a terminal of its own, whose output goes to a file `name`."""
        words = [*self.space, "bash", "-c", f"cd {self.folder} && {command}"]
        with open(self.folder / name, "ab") as out:
            process = subprocess.Popen(
                words,
                stdout=out,
                stderr=out,
                env={**self.env, **env},
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def text(self, name: str) -> str:
        path = self.folder / name
        return path.read_text(errors="replace") if path.exists() else ""

    def type(self, command: str, code: int = 0) -> str:
        """Return what a command prints that ends with `code`."""
        done = subprocess.run(
            [*self.space, "bash", "-c", f"cd {self.folder} && {command}"],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == code, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def find(self, part: str) -> list[psutil.Process]:
        """Return the processes below what was started here whose command line has `part`."""
        found = []
        for process in self.started:
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process(process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        if part in " ".join(child.cmdline()):
                            found.append(child)
        return found

    def end(self) -> None:
        for process in self.started:
            with contextlib.suppress(psutil.Error):
                family = psutil.Process(process.pid)
                for one in (*family.children(recursive=True), family):
                    with contextlib.suppress(psutil.Error):
                        one.kill()
            process.wait(PATIENCE_S)
        self.holder.kill()
        self.holder.wait(PATIENCE_S)


class Site:
    """Three machines, on the first of which is `perdure serve`; a group on each of the others."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.machines = lab, [Machine(lab, number, folder) for number in range(3)]
        self.log = folder / "log"
        self.log.mkdir()
        self.serving, self.typed, self.started, self.verbs = read_commands()

    def put(self, command: str, machine: int = 1) -> str:
        """Return a command of the page with addresses of here; `machine` is the other one."""
        first, other = self.machines[0].address, self.machines[machine].address
        return command.replace("10.0.0.1", first).replace("10.0.0.2", other)

    def serve(self) -> subprocess.Popen[bytes]:
        [command] = self.serving
        return self.machines[0].start("serve.out", self.put(command))

    def begin(self) -> subprocess.Popen[bytes]:
        """Serve, and have both other machines join."""
        serving, first = self.serve(), self.machines[0]
        self.wait(lambda: "TORCHFT_LIGHTHOUSE" in first.text("serve.out"), "lighthouse")
        for machine in (1, 2):
            self.invite(machine)
            self.join(machine)
            joined = self.machines[machine]
            self.wait(lambda joined=joined: "has place" in joined.text("join.out"), "place")
        return serving

    def invite(self, machine: int) -> None:
        """Type on the first machine what invites another one, and carry the file there."""
        command, _ = self.typed
        self.machines[0].type(self.put(command))
        file = self.machines[0].folder / "gpu1.json"
        assert file.stat().st_mode & 0o077 == 0
        file.rename(self.machines[machine].folder / "gpu1.json")

    def join(self, machine: int) -> subprocess.Popen[bytes]:
        return self.machines[machine].start("join.out", self.typed[1])

    def start_group(self, machine: int) -> subprocess.Popen[bytes]:
        """Start the group of a machine, with the line in its script."""
        path = str(SCRIPTS / "torchft_groups.py")
        words = {"line": LINE, "steps": 10_000_000, "log": str(self.log), "path": path}
        self.machines[machine].folder.joinpath("train_ddp.py").write_text(SCRIPT.format(**words))
        text = "\n".join(self.put(line, machine) for line in self.started)
        text = text.replace("REPLICA_GROUP_ID=0", f"REPLICA_GROUP_ID={machine - 1}")
        env = {"LIVE_LR": "1", "STEP_PAUSE_S": "0.1", "MANAGER_HOST": f"gpu{machine}"}
        env["PG_TIMEOUT_S"] = "3600"  # No group may be held up until then.
        return self.machines[machine].start("group.out", text, **env)

    def worker(self, machine: int) -> psutil.Process:
        found = self.machines[machine].find("train_ddp.py")
        return [p for p in found if p.cmdline()[-1] == "train_ddp.py"][-1]

    def verb(self, word: str) -> str:
        """Type the page's command with this verb; return what it printed."""
        [command] = [line for line in self.verbs if word in line.split()[1:3]]
        return self.machines[0].type(command)

    def look(self) -> dict[str, Any]:
        shown: dict[str, Any] = json.loads(
            self.machines[0].type("perdure status marduk --devices --json")
        )
        return shown

    def state(self, group: int) -> str:
        rows = {row["group"]: row["state"] for row in self.look()["replicas"]}
        return str(rows.get(group, ""))

    def commits(self, group: int, since: float) -> list[dict[str, Any]]:
        path, rows = self.log / f"group-{group}.jsonl", []
        for line in path.read_text().splitlines() if path.exists() else []:
            with contextlib.suppress(ValueError):  # Cut short by a kill.
                rows.append(json.loads(line))
        return [r for r in rows if r["t"] > since and "failed" not in r]

    def told(self) -> str:
        parts = [
            f"--- {machine.address} {name}\n{machine.text(name)[-1500:]}"
            for machine in self.machines
            for name in ("serve.out", "join.out", "group.out")
        ]
        logs = self.machines[0].folder.glob("state/jobs/marduk/logs/*.log")
        return "\n".join(parts + [f"--- {p.name}\n{p.read_text()[-1500:]}" for p in logs])

    def wait(self, condition: Any, what: str, within_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, f"no {what}:\n{self.told()}"
            time.sleep(0.1)

    def wait_members(self, count: int, since: float, *groups: int) -> None:
        def there() -> bool:
            return all(any(r["n"] == count for r in self.commits(g, since)) for g in groups)

        self.wait(there, f"{count} members on groups {groups}")

    def wait_state(self, group: int, state: str) -> None:
        self.wait(lambda: self.state(group) == state, f"group {group} {state}")

    def set(self, value: float) -> None:
        """Change the rate, as the page does, and see it on both groups."""
        changed = time.time()
        [command] = [line for line in self.verbs if line.split()[1] == "set"]
        self.machines[0].type(command.replace("0.002", str(value)))
        for group in (0, 1):
            self.wait(
                lambda group=group: any(r["lr"] == value for r in self.commits(group, changed)),
                f"the new rate on group {group}",
            )


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with Lab(3) as lab:
        made = Site(lab, tmp_path)
        yield made
        for machine in made.machines[::-1]:
            machine.end()


@pytest.mark.serial
@pytest.mark.long
def test_groups_on_other_machines_are_steered_as_those_here_are(site: Site) -> None:
    first, one, other = site.machines
    serving = site.begin()
    refused = first.type(
        f"PERDURE_HOME={first.folder}/other perdure node join {one.folder}/gpu1.json", 4
    )
    assert "is spent" in refused

    site.start_group(1)
    site.wait_state(0, "training")
    site.start_group(2)
    site.wait_members(2, 0.0, 0, 1)
    site.wait_state(1, "training")
    shown = site.look()
    assert [row["ranks"] for row in shown["devices"]] == [[0], [1]]
    assert [row["manager"].split(":")[1] for row in shown["replicas"]] == [
        "//gpu1",
        "//gpu2",
    ]
    site.set(0.002)
    lose_a_process_and_a_relay(site)
    steer(site)
    check_alike(site)

    first.type("perdure stop marduk")
    assert serving.wait(PATIENCE_S) == 0
    site.serve()
    for machine in (one, other):
        site.wait(
            lambda machine=machine: machine.text("join.out").count("has place") == 2,
            "relays that come back by their invitations",
        )


@pytest.mark.serial
@pytest.mark.long
def test_neither_an_eviction_nor_a_cut_network_nor_an_ended_login_stops_the_others(
    site: Site,
) -> None:
    site.begin()
    for machine, members in ((1, 1), (2, 2)):
        site.start_group(machine)
        site.wait_members(members, 0.0, machine - 1)
        site.wait_state(machine - 1, "training")
    evict_and_restore(site)
    cut_and_mend(site)
    end_login(site)
    check_alike(site)


def evict_and_restore(site: Site) -> None:
    """The manager of group 1, on its own machine, ends its process; its next life is held."""
    first, evicted = site.machines[0], time.time()
    answer = first.type("perdure node evict marduk train_1")
    assert "replica 1 left" in answer
    site.wait_members(1, evicted, 0)
    site.wait(lambda: not site.machines[2].find("train_ddp.py"), "end of its process")
    site.start_group(2)
    site.wait_state(1, "drained")
    restored = time.time()
    first.type("perdure node restore marduk replica:1")
    site.wait_members(2, restored, 0, 1)


def cut_and_mend(site: Site) -> None:
    """Group 1 is left out and comes back; group 0 waits for no time-out of gloo."""
    cut = time.time()
    site.lab.cut(2)
    site.wait_members(1, cut, 0)
    site.wait(lambda: len(site.commits(0, cut)) > 60, "steps without it")
    site.lab.heal()
    mended = time.time()
    site.wait_members(2, mended, 0, 1)
    before = [row["t"] for row in site.commits(0, 0.0) if row["n"] == 2 and row["t"] < cut]
    alone_s = next(row["t"] for row in site.commits(0, cut) if row["n"] == 1)
    report = json.loads(site.machines[0].type("perdure report marduk --json"))
    lost = [r for r in report["recoveries"] if "no heartbeat" in r["cause"]]
    assert lost
    assert all(r["culprit"].startswith("group 1, train_1:") for r in lost)
    assert before[-20] < lost[0]["at_s"] < alone_s
    site.set(0.004)


def end_login(site: Site) -> None:
    """The second machine's relay is cut off; its group trains on, as one without the line."""
    first, other = site.machines[0], site.machines[2]
    invited = json.loads(first.type("perdure node invite marduk --list --json"))["invitations"]
    first.type(f"perdure node invite marduk --revoke {invited[-1]['id']} --end-login")
    ended = time.time()
    site.wait(lambda: "was revoked" in other.text("join.out"), "end of the relay")
    assert other.find("perdure relay marduk") == []
    site.wait(lambda: len(site.commits(1, ended)) > 20, "steps of its group")
    site.wait_members(2, ended, 0, 1)
    site.wait_state(1, "training")
    refused = first.type("perdure set marduk lr=0.005", 4)
    assert "rank 1: it has no line to the lighthouse any more" in refused
    refused_s = time.time()
    site.wait_members(2, refused_s, 0, 1)
    assert {r["lr"] for r in site.commits(0, refused_s)} == {0.004}


def lose_a_process_and_a_relay(site: Site) -> None:
    """Both come back; a death is heard of by the end of the line, and not by silence."""
    pid = site.worker(2).pid
    os.kill(pid, signal.SIGKILL)
    killed = time.time()
    site.wait_members(1, killed, 0)
    site.wait_state(1, "gone")
    report = json.loads(site.machines[0].type("perdure report marduk --json"))
    assert not [r for r in report["recoveries"] if "no heartbeat" in r["cause"]]
    site.start_group(2)
    site.wait_members(2, killed, 0, 1)

    one = site.machines[1]
    [relay] = one.find("perdure relay marduk")
    relay.kill()
    site.wait(lambda: len(one.find("perdure relay marduk")) == 1, "another relay")
    site.wait_state(1, "training")
    site.set(0.003)


def steer(site: Site) -> None:
    """Group 0 is held and let in again, and group 1 ended by a command."""
    drained = time.time()
    site.verb("drain")
    site.wait_members(1, drained, 1)
    site.wait_state(0, "drained")
    restored = time.time()
    site.verb("restore")
    site.wait_members(2, restored, 0, 1)
    crashed = time.time()
    site.verb("inject")
    site.wait_members(1, crashed, 0)
    site.wait_state(1, "gone")


def check_alike(site: Site) -> None:
    """Wherever both groups hashed one step, parameters and moments were the same."""
    hashes: dict[int, set[str]] = {}
    for group in (0, 1):
        for row in site.commits(group, 0.0):
            if "hash" in row and row["n"] == 2:
                hashes.setdefault(row["step"], set()).add(row["hash"])
    assert hashes
    assert all(len(found) == 1 for found in hashes.values())
