"""A job on several nodes of which each can be lost with all that it has: server, controller,
agent, keeper and ranks; with two of them there is an arbiter, which each reaches by a way of its
own."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil

from perdure.lab.live.fleets.local import Gates, kill_nodes
from perdure.service.jobfolders import paths_of
from perdure.service.placement import Placement
from tests.e2e.harness import SCRIPTS, Job
from tests.waiting import PATIENCE_S

NAME = "fo"
MOUNT = "FAILOVER_MOUNT"
"""Environment variable with a node's way to the arbiter's folder."""


class Arbiter:
    """A folder that nodes share, and the link by which each of them finds it."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.shared, self._folder = folder / "shared", folder
        self.shared.mkdir()
        for node in range(nodes):
            self.join(node)

    @staticmethod
    def environment(folder: Path) -> tuple[str, ...]:
        """Return what stands before the command of a node's part."""
        return ("env", f"{MOUNT}={folder}/mount{{node}}")

    def join(self, node: int) -> None:
        (self._folder / f"mount{node}").symlink_to(self.shared)

    def cut(self, node: int) -> None:
        (self._folder / f"mount{node}").unlink()

    def take_away(self) -> None:
        self.shared.rename(self._folder / "away")

    def bring_back(self) -> None:
        (self._folder / "away").rename(self.shared)


class Site:
    """The job, and the places of its nodes: a lost node comes back when it is let."""

    def __init__(
        self,
        start: Callable[..., Job],
        folder: Path,
        *,
        elastic: bool,
        nodes: int = 3,
        node_lost_s: float = 2.0,
    ) -> None:
        """Train, or (cheaper by the import of torch on each node) only sleep.

        A test asks for more seconds until a node counts as lost: its machine may have other work.
        Two nodes have an arbiter; `FAILOVER_MOUNT` has to be `folder / "shared"` here.
        """
        self.trail, self.nodes = folder / "trail", nodes
        (folder / "sleep.py").write_text("import time\ntime.sleep(86_400)\n")
        script = (str(SCRIPTS / "elastic.py"), "--trail", str(self.trail), "--steps", "100000")
        self.arbiter = Arbiter(folder, nodes) if nodes == 2 else None
        place = Placement(command=self.arbiter.environment(folder) if self.arbiter else ())
        placement = folder / "placement.json"
        placement.write_bytes(msgspec.json.encode(place))
        config = folder / "job.toml"
        config.write_text(f"[detect]\nnode_lost_s = {node_lost_s}\n")
        self.job = start(
            NAME, "-c", str(config), "-n", "1", "--nodes", str(nodes), "--replicate", str(nodes),
            "--placement", str(placement), *(("--arbiter", f"${MOUNT}") if self.arbiter else ()),
            *(script if elastic else ("--cold", str(folder / "sleep.py"))),
            timeout_s=PATIENCE_S,
        )  # fmt: skip
        self.gates = Gates(paths_of(self.job.env["PERDURE_HOME"], NAME))

    def journal(self) -> list[dict[str, Any]]:
        """Return the entries of the journal, which are numbered without a gap."""
        try:
            lines = (self.job.folder / "journal.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        entries = [json.loads(line) for line in lines if line.endswith("}")]
        assert [entry["seq"] for entry in entries] == list(range(1, len(entries) + 1))
        return entries

    def terms(self) -> list[tuple[int, int]]:
        """Return (term, node) of each controller that has begun, in the journal's order."""
        began = self.bodies("ControllerStarted")
        return [(body["term"], int(body["incarnation"][1])) for body in began]

    def bodies(self, kind: str) -> list[dict[str, Any]]:
        """Return the journal's events of one kind."""
        bodies = [entry["body"] for entry in self.journal()]
        return [body for body in bodies if body["type"] == kind]

    def rows(self, rank: int) -> list[dict[str, Any]]:
        """Return the steps that `rank` has committed."""
        path = self.trail / f"rank-{rank}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def kill_node(self, node: int) -> float:
        """SIGKILL all that a node has; return when, by the monotonic clock."""
        self.gates.shut([node])
        at_s = time.monotonic()
        pids = [p.pid for p in self.job.find(f"perdure controller {NAME} {node}")]
        config = str(self.job.folder / "nats" / str(node) / "nats-server.conf")
        pids += [p.pid for p in self.job.find(config) if p.name() == "nats-server"]
        assert len(pids) == 2, [" ".join(p.cmdline()) for p in psutil.Process().children(True)]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert kill_nodes(NAME, self.job.env["PERDURE_HOME"], [node]) >= 3
        return at_s

    def check_steps(self) -> None:
        """Every step was committed, by all with the same parameters."""
        agreed: dict[int, set[str]] = {}
        for row in (row for rank in range(12) for row in self.rows(rank)):
            agreed.setdefault(row["step"], set()).add(row["hash"])
        assert sorted(agreed) == list(range(max(agreed) + 1))
        assert all(len(hashes) == 1 for hashes in agreed.values())
