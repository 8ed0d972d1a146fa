"""Where a job keeps its files: names only; nothing here touches a disk.

    $PERDURE_HOME/jobs/NAME/
        job.json            the JobSpec                    endpoint.json   the operator's NATS user
        credentials/        of the other parts, each file readable by its owner only
        parts.json          pids of the parts              state.json      newest Snapshot
        journal.jsonl       mirror of the journal          nats/           the server's store
        snapshots/SEQ.json  what a controller knew at entry SEQ, so that the next replays less
        logs/*.log          of the parts
        logs/ranks/gN/rank-R.out|.err                      rings/gN-rR.ring
        exits/gN-rR.json    written by the keeper          errors/gN-rR.json   torch's error files
        traces/gN/BACKEND/rank_R    Flight Recorder's, for torchfrtrace
        run.lock            held while it runs
        checkpoints/        step-00000100/ ..., latest     imports.json    what ranks imported
        lighthouse.json     port and last quorum (torchft)
Unix sockets lie in a short private directory of their own (their paths are limited to 107 bytes),
snapshots of sharded elastic jobs in shared memory.
"""

from hashlib import sha256
from pathlib import PurePosixPath

import msgspec

LOCK = "run.lock"
"""Held (flock) by `perdure run` as long as it lives, so that no pid needs to be trusted."""


class JobPaths(msgspec.Struct, frozen=True):
    """Paths of one job, as strings, under `root` (its directory), `sockets` and `memory`."""

    root: str
    sockets: str
    memory: str
    """In shared memory: snapshots of shards, a folder a node. They outlive processes."""

    def _at(self, *parts: str) -> str:
        return str(PurePosixPath(self.root, *parts))

    @property
    def lock(self) -> str:
        """Locked while the job runs."""
        return self._at(LOCK)

    @property
    def spec(self) -> str:
        """The JobSpec."""
        return self._at("job.json")

    @property
    def endpoint(self) -> str:
        """NATS URL and the operator's password."""
        return self._at("endpoint.json")

    def credential(self, user: str) -> str:
        """NATS URL and password of `user`, such as `agent-0`."""
        return self._at("credentials", f"{user}.json")

    @property
    def webhook_token(self) -> str:
        """What the webhook for notices asks for, where the user named no file of his own."""
        return self._at("credentials", "webhook.token")

    @property
    def parts(self) -> str:
        """Pids of the parts."""
        return self._at("parts.json")

    @property
    def snapshot(self) -> str:
        """The newest Snapshot."""
        return self._at("state.json")

    @property
    def journal(self) -> str:
        """The mirror of the journal."""
        return self._at("journal.jsonl")

    @property
    def snapshots(self) -> str:
        """What controllers knew at some entries of the journal."""
        return self._at("snapshots")

    @property
    def imports(self) -> str:
        """Names of the modules that ranks imported."""
        return self._at("imports.json")

    @property
    def lighthouse(self) -> str:
        """Port and last quorum of the lighthouse (torchft)."""
        return self._at("lighthouse.json")

    @property
    def nats(self) -> str:
        """The NATS server's directory."""
        return self._at("nats")

    @property
    def checkpoints(self) -> str:
        """Default place of checkpoints."""
        return self._at("checkpoints")

    @property
    def logs(self) -> str:
        """Logs of the parts."""
        return self._at("logs")

    def log(self, part: str) -> str:
        """Log of a part, such as `controller` or `agent-0`."""
        return self._at("logs", f"{part}.log")

    def stream(self, generation: int, rank: int, name: str, log_dir: str = "") -> str:
        """A rank's `out` or `err`; under `log_dir` where the user named one."""
        base = log_dir or self._at("logs", "ranks")
        return str(PurePosixPath(base, f"g{generation}", f"rank-{rank}.{name}"))

    def ring(self, generation: int, rank: int) -> str:
        """The rank's progress ring."""
        return self._at("rings", f"g{generation}-r{rank}.ring")

    def traces(self, generation: int) -> str:
        """Flight Recorder's traces of a generation, written when a rank is suspected."""
        return self._at("traces", f"g{generation}")

    def exit_record(self, generation: int, rank: int) -> str:
        """The rank's `ExitRecord`."""
        return self._at("exits", f"g{generation}-r{rank}.json")

    def steering(self, generation: int, node: int) -> str:
        """What the ranks of a generation have to know of older changes, and of a pause."""
        return self._at("steering", f"g{generation}-n{node}.json")

    def error_file(self, generation: int, rank: int) -> str:
        """TORCHELASTIC_ERROR_FILE of the rank."""
        return self._at("errors", f"g{generation}-r{rank}.json")

    def keeper_socket(self, node: int) -> str:
        """Where the keeper of `node` listens for its agent."""
        return str(PurePosixPath(self.sockets, f"keeper-{node}"))

    def worker_socket(self, node: int) -> str:
        """Where the agent of `node` listens for its ranks."""
        return str(PurePosixPath(self.sockets, f"agent-{node}"))


def job_paths(home: str, job: str, uid: int) -> JobPaths:
    """Return the paths of `job` under the absolute directory `home`."""
    root = str(PurePosixPath(home, "jobs", job))
    short = sha256(root.encode()).hexdigest()[:12]
    return JobPaths(root, f"/tmp/perdure-{uid}/{short}", f"/dev/shm/perdure-{uid}/{short}")
