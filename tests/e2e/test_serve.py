"""`perdure serve` and groups that torchrun starts, by the very commands of docs/torchft.md."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.box import find_port
from tests.e2e.harness import SCRIPTS, Job
from tests.waiting import PATIENCE_S

pytest.importorskip("torchft")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

STOCK_SILENT_S = 5.0
"""Seconds without a heartbeat after which a group without perdure's line counts as lost."""
PAGE = Path(__file__).resolve().parents[2] / "docs" / "torchft.md"
LINE = "import perdure.torchft"
SCRIPT = """{line}
import os
import sys
os._exit = sys.exit  # So that the interpreter ends as it does of most scripts.
sys.argv = ["torchft_groups.py", "{steps}", {log!r}]
exec(compile(open({path!r}).read(), {path!r}, "exec"))
"""


def read_commands() -> list[list[str]]:
    """Return the blocks of commands of the section, in order."""
    section = PAGE.read_text().split("## As in Marduk, with perdure\n")[1].split("\n##")[0]
    blocks = re.findall(r"(?:^    .+\n)+", section, re.MULTILINE)
    return [[line.strip() for line in block.splitlines()] for block in blocks]


class Serving(Job):
    """`perdure serve`, and the groups beside it."""

    def __init__(self, home: Path, command: str) -> None:
        self.home, self.timeout_s = home, PATIENCE_S
        self.output, self.log = home / "serve.out", home / "log"
        self.log.mkdir()
        programs = Path(sys.executable).parent
        self.env = dict(
            os.environ,
            PERDURE_HOME=str(home / "state"),
            PATH=f"{programs}{os.pathsep}{os.environ['PATH']}",
            COLUMNS="120",
        )
        self.port, *self.masters = (find_port() for _ in range(3))
        words = self.put_ports(command).split()
        assert words[0] == "perdure"
        self.name = words[2]
        self.groups: dict[int, subprocess.Popen[bytes]] = {}
        with open(self.output, "ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *words],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self.env,
                cwd=home,
            )

    def put_ports(self, command: str) -> str:
        """Return `command` with ports that are free here."""
        for known, free in zip((29510, 29600, 29601), (self.port, *self.masters), strict=True):
            command = command.replace(str(known), str(free))
        return command

    def start_group(
        self, group: int, block: list[str], *, line: bool, steps: int = 10_000_000
    ) -> None:
        """Type the page's lines in another terminal; `line` is the one in the script."""
        folder = self.home / f"group-{group}-{time.monotonic_ns()}"
        folder.mkdir()
        path = str(SCRIPTS / "torchft_groups.py")
        words = {"line": LINE if line else "", "steps": steps, "log": str(self.log), "path": path}
        (folder / "train_ddp.py").write_text(SCRIPT.format(**words))
        text = "\n".join(block).replace("REPLICA_GROUP_ID=0", f"REPLICA_GROUP_ID={group}")
        text = self.put_ports(text.replace("29600", str(29600 + group)))
        # A stock group is mended of torchft 0.2.0's fault with gloo, and of nothing else.
        own = {"LIVE_LR": "1"} if line else {"MEND_HOOK": "1"}
        own["STEP_PAUSE_S"] = "0.2"
        with open(self.home / f"group-{group}.out", "ab") as out:
            self.groups[group] = subprocess.Popen(
                ["bash", "-c", text],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**self.env, **own, "RUST_LOG": "warn"},
                cwd=folder,
                start_new_session=True,
            )

    def worker(self, group: int) -> psutil.Process:
        """Return the training process of a group."""
        torchrun = psutil.Process(self.groups[group].pid)
        found = [p for p in torchrun.children(recursive=True) if "train_ddp.py" in p.cmdline()[-1]]
        return found[-1]

    def kill_group(self, group: int) -> float:
        """Kill the training process of a group amid its steps; return when it made its last one."""
        pid = self.worker(group).pid
        self.wait_until(
            lambda: sum(r["pid"] == pid for r in self.commits(group, 0.0)) > 20, "twenty steps"
        )
        os.kill(pid, signal.SIGKILL)
        return self.wait_ended(group)

    def wait_ended(self, group: int) -> float:
        """Wait until torchrun has ended, and its script; return when that made its last step."""
        assert self.groups[group].wait(PATIENCE_S) != 0
        last_s: float = self.commits(group, 0.0)[-1]["t"]
        return last_s

    def row(self, group: int) -> dict[str, Any]:
        """Return a group as the picture has it."""
        rows = {row["group"]: row for row in self.state().get("replicas", [])}
        found: dict[str, Any] = rows.get(group, {})
        return found

    def wait_group(self, group: int, state: str) -> None:
        self.wait_until(lambda: self.row(group).get("state") == state, f"group {group} {state}")

    def commits(self, group: int, since: float) -> list[dict[str, Any]]:
        path, rows = self.log / f"group-{group}.jsonl", []
        for line in path.read_text().splitlines() if path.exists() else []:
            with contextlib.suppress(ValueError):  # Cut short by a kill.
                rows.append(json.loads(line))
        return [r for r in rows if r["t"] > since and "failed" not in r]

    def wait_members(self, count: int, since: float, *groups: int) -> None:
        def all_there() -> bool:
            return all(any(r["n"] == count for r in self.commits(g, since)) for g in groups)

        self.wait_until(all_there, f"{count} members on groups {groups}")

    def type(self, command: str) -> str:
        """Run a line of the page; return what it printed."""
        words = command.split()
        assert words[0] == "perdure"
        return self.cli(*words[1:]).stdout

    def end_groups(self) -> None:
        for process in self.groups.values():
            with contextlib.suppress(psutil.Error):
                family = psutil.Process(process.pid)
                for one in (*family.children(recursive=True), family):
                    with contextlib.suppress(psutil.Error):
                        one.kill()
            process.wait(PATIENCE_S)


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    """Serve as the page says; afterwards nothing of it may be left."""
    served = Serving(tmp_path, read_commands()[0][0])
    yield served
    served.end_groups()
    served.end()
    assert served.leftovers() == []


def test_groups_that_torchrun_starts_are_seen_steered_and_reported(serving: Serving) -> None:
    _, block, verbs, line_block = read_commands()
    assert line_block == [LINE]
    typed = {
        line.removeprefix("perdure node ").removeprefix("perdure ").split()[0]: line
        for line in verbs
    }
    url = f"export TORCHFT_LIGHTHOUSE=http://127.0.0.1:{serving.port}"
    serving.wait_until(lambda: url in serving.text(), "the line that says where to point")

    serving.start_group(1, block, line=False)
    serving.wait_group(1, "training")
    alone, again_s = kill_and_start_again(serving, block)
    serving.start_group(0, block, line=True)  # It heals from one that has no settings.
    serving.wait_group(0, "training")
    serving.wait_members(2, 0.0, 0, 1)
    check_picture(serving, typed)

    killed = serving.kill_group(1)
    os.kill(serving.pid_of("perdure controller"), signal.SIGKILL)
    serving.start_group(1, block, line=True)
    serving.wait_members(1, killed, 0)
    serving.wait_members(2, killed, 0, 1)
    serving.wait_group(1, "training")

    drain_and_set(serving, typed)
    check_alike(serving)
    evicted = evict_and_restore(serving, block)
    check_report(serving, typed["report"], again_s, alone, killed, evicted)

    serving.type(typed["inject"])
    crashed = serving.wait_ended(1)
    serving.wait_members(1, crashed, 0)
    serving.wait_group(1, "gone")
    serving.cli("stop", serving.name)
    assert serving.wait() == 0, serving.text()[-4000:]
    assert serving.groups[0].poll() is None


@pytest.mark.serial
@pytest.mark.long
def test_a_group_that_ends_well_is_finished_though_the_lighthouse_was_killed(
    serving: Serving,
) -> None:
    block = read_commands()[1]
    serving.start_group(0, block, line=True, steps=800)
    serving.wait_group(0, "training")
    before = len(serving.commits(0, 0.0))
    serving.kill(f"perdure lighthouse {serving.name}: serving")
    serving.wait_until(lambda: len(serving.commits(0, 0.0)) > before + 20, "steps after it")
    serving.wait_group(0, "finished")
    assert serving.groups[0].wait(PATIENCE_S) == 0
    serving.process.send_signal(signal.SIGTERM)
    assert serving.wait() == 0
    report = serving.report()
    assert report["recoveries"] == []
    assert report["steps_committed"] > before


def kill_and_start_again(serving: Serving, block: list[str]) -> tuple[float, float]:
    """Start group 1 again as soon as it has ended; return when it was killed and started.

    Nobody else trains, so that its next life is all that tells of its end.
    """
    killed = serving.kill_group(1)
    again_s = time.time()
    serving.start_group(1, block, line=False)
    serving.wait_members(1, killed, 1)
    return killed, again_s


def check_picture(serving: Serving, typed: dict[str, str]) -> None:
    """Group 0 has the line and group 1 has not: what is seen of each, and refused."""
    shown = json.loads(serving.cli("status", serving.name, "--devices", "--json").stdout)
    assert [row["group"] for row in shown["replicas"]] == [0, 1]
    assert all(row["replica"].startswith(f"train_{row['group']}:") for row in shown["replicas"])
    assert all(row["manager"].startswith("http://127.0.0.1:") for row in shown["replicas"])
    assert {row["quorum_id"] for row in shown["replicas"]} == {shown["replicas"][0]["quorum_id"]}
    assert [(row["ranks"], row["replicas"]) for row in shown["devices"]] == [([0], [0])]
    assert serving.state()["ranks"][0]["pid"] == serving.worker(0).pid
    assert "train_1:" in serving.type(typed["status"])
    told = serving.cli(*typed["set"].split()[1:], check=False)
    assert told.returncode == 4
    assert "group 1 (train_1:" in told.stderr
    told = serving.cli("inject", serving.name, "sleep", "--rank", "1", check=False)
    assert told.returncode == 4
    assert "only crash, now" in told.stderr


def drain_and_set(serving: Serving, typed: dict[str, str]) -> None:
    """Group 0 is held and let in again, and both take over a setting."""
    serving.wait_group(1, "training")
    drained = time.time()
    serving.type(typed["drain"])
    serving.wait_members(1, drained, 1)
    serving.wait_group(0, "drained")
    assert serving.groups[0].poll() is None
    restored = time.time()
    serving.type(typed["restore"])
    serving.wait_members(2, restored, 0, 1)
    serving.type(typed["set"])
    changed = time.time()
    for group in (0, 1):
        serving.wait_until(
            lambda group=group: any(r["lr"] == 0.002 for r in serving.commits(group, changed)),
            f"the new rate on group {group}",
        )


def check_report(serving: Serving, command: str, again_s: float, *ended: float) -> None:
    """The report has each end of group 1, its time, and how long the group was away."""
    assert "group 1, train_1:" in serving.type(command)

    def find_lost() -> list[dict[str, Any]]:
        recoveries = serving.report()["recoveries"]
        return [r for r in recoveries if r["culprit"].startswith("group 1, train_1:")]

    serving.wait_until(lambda: len(find_lost()) >= 3, "three ends in the report")
    report, lost = serving.report(), find_lost()
    assert [r["rung"] for r in lost] == ["restart"] * 3, lost
    assert all("others started it again" in r["reason"] for r in lost)
    for told, at_s in zip(lost, ended, strict=False):
        back_s = next(r["t"] for r in serving.commits(1, at_s))
        assert abs(told["at_s"] - at_s) < (back_s - at_s) / 2, lost
        assert told["total_s"] > (back_s - at_s) / 2, "from its end, and not from its return"
        assert told["at_s"] + told["total_s"] < back_s + 0.1
    assert report["ledger"]["reconfiguration.detect"]["s"] > lost[0]["detect_s"] - 0.01
    # If torchrun takes long to end, the silence is reported before the next life begins.
    told_s = lost[0]["at_s"] + lost[0]["detect_s"]
    assert told_s > again_s or lost[0]["detect_s"] >= STOCK_SILENT_S


def evict_and_restore(serving: Serving, block: list[str]) -> float:
    """Group 1 is ended by its manager, and its next life is held until it may train.

    Return when it made its last step.
    """
    serving.wait_group(1, "training")
    answer = json.loads(serving.cli("node", "evict", serving.name, "train_1", "--json").stdout)
    assert answer["replicas"] == [1]
    last_s = serving.wait_ended(1)
    evicted = time.time()
    serving.start_group(1, block, line=True)
    serving.wait_group(1, "drained")
    restored = time.time()
    assert not serving.commits(1, evicted)
    serving.cli("node", "restore", serving.name, "replica:1")
    serving.wait_members(2, restored, 0, 1)
    return last_s


def check_alike(serving: Serving) -> None:
    """Wherever both groups hashed one step, parameters and moments were the same."""
    hashes: dict[int, set[str]] = {}
    for group in (0, 1):
        for row in serving.commits(group, 0.0):
            if "hash" in row and row["n"] == 2:
                hashes.setdefault(row["step"], set()).add(row["hash"])
    assert hashes
    assert {step: found for step, found in hashes.items() if len(found) > 1} == {}


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("--bind", "0.0.0.0"), 2, "torchft's protocol has no credentials"),
        (("--bind", "nowhere"), 2, "no address"),
        (("--bind", "192.0.2.1", "--unprotected"), 3, "cannot listen on 192.0.2.1"),
        (("-c", "job.toml"), 2, "started by others"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    tmp_path: Path, words: tuple[str, ...], code: int, says: str
) -> None:
    (tmp_path / "job.toml").write_text('script = "x.py"\n')
    done = subprocess.run(
        [sys.executable, "-m", "perdure", "serve", "bad", *words, "--lighthouse-port", "0"],
        env={**os.environ, "PERDURE_HOME": str(tmp_path / "state")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == code, done
    error, hint = done.stderr.strip().splitlines()
    assert says in error
    assert hint.startswith("hint: ")


def test_a_port_that_is_taken_is_said_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "perdure", "serve", "bad", "--lighthouse-port", port],
            env={**os.environ, "PERDURE_HOME": str(tmp_path / "state")},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
    assert done.returncode == 3
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
