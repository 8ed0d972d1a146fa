"""Where a job keeps its files: names only; nothing here touches a disk.

    $PERDURE_HOME/jobs/NAME/
        job.json            the JobSpec                    endpoint.json   the operator's NATS user
        start.json          program, script, and environment that ranks start from
        credentials/        of the other parts, each file readable by its owner only
        parts.json          pids of the parts              state.json      newest Snapshot
        invited.json        who may join from the start
        journal.jsonl       mirror of the journal          nats/           the server's store
        snapshots/SEQ.json  what a controller knew at entry SEQ, so that the next replays less
        rendezvous/         what the first of several nodes starts its server with (secret)
        ended.json          the job's exit code, on a machine that joined
        newest.json         how far all ranks are, and the links between them
        curves/             values of `run.log`, coarser with age
        tracking/           what experiment trackers were told, and what their libraries keep
        logs/*.log          of the parts
        logs/ranks/gN/rank-R.out|.err
        exits/gN-rR.json    written by the keeper          errors/gN-rR.json   torch's error files
        traces/gN/BACKEND/rank_R    Flight Recorder's, for torchfrtrace
        run.lock            held while it runs         away/node-N     locked: the node is kept away
        checkpoints/        step-00000100/ ..., latest     imports.json    what ranks imported
        why-cold            why no rank of the job is forked from the warm image any more
        compile-cache/      inductor/, triton/, cuda/: what torch has compiled for the ranks
        lighthouse.json     port and last quorum (torchft)
Unix sockets lie in a short private directory of their own (their paths are limited to 107 bytes),
with rings/gN-rR.ring, the memory that each rank shares with its agent,
snapshots of sharded elastic jobs in shared memory.
"""

from hashlib import sha256
from pathlib import PurePosixPath

import msgspec

LOCK = "run.lock"
"""Held (flock) by `perdure run` as long as it lives, so that no pid needs to be trusted."""


class _Below:
    """A place in the job's own directory, by its name there."""

    def __init__(self, *parts: str) -> None:
        self.parts = parts

    def __get__(self, paths: "JobPaths", kind: type) -> str:
        return str(PurePosixPath(paths.root, *self.parts))


class JobPaths(msgspec.Struct, frozen=True):
    """Paths of one job, as strings, under `root` (its directory), `sockets` and `memory`."""

    root: str
    sockets: str
    memory: str
    """In shared memory: snapshots of shards, a folder a node. They outlive processes."""

    def _at(self, *parts: str) -> str:
        return str(PurePosixPath(self.root, *parts))

    lock = _Below(LOCK)
    """Locked while the job runs."""

    spec = _Below("job.json")
    """The JobSpec."""

    start = _Below("start.json")
    """What the ranks start from, to compare with the next run."""

    endpoint = _Below("endpoint.json")
    """NATS URL and the operator's password."""

    def credential(self, user: str) -> str:
        """NATS URL and password of `user`, such as `agent-0`."""
        return self._at("credentials", f"{user}.json")

    webhook_token = _Below("credentials", "webhook.token")
    """What the webhook for notices asks for, where the user named no file of his own."""

    parts = _Below("parts.json")
    """Pids of the parts."""

    invited = _Below("invited.json")
    """Invitations that the controller knows of before anybody can ask it for a place."""

    snapshot = _Below("state.json")
    """The newest Snapshot."""

    journal = _Below("journal.jsonl")
    """The mirror of the journal."""

    ended = _Below("ended.json")
    """The exit code that the job ended with, as a machine from elsewhere was told it."""

    newest = _Below("newest.json")
    """What the journal is told seldom, as it was a moment ago."""

    curves = _Below("curves")
    """Values of `run.log`."""

    tracking = _Below("tracking")
    """What experiment trackers were told."""

    snapshots = _Below("snapshots")
    """What controllers knew at some entries of the journal."""

    imports = _Below("imports.json")
    why_cold = _Below("why-cold")
    """Names of the modules that ranks imported."""

    lighthouse = _Below("lighthouse.json")
    """Port and last quorum of the lighthouse (torchft)."""

    nats = _Below("nats")
    """The NATS server's directory."""

    checkpoints = _Below("checkpoints")
    """Default place of checkpoints."""

    compile_cache = _Below("compile-cache")
    """What torch has compiled, where the job's directory is on a disk of the node's own."""

    @property
    def local_compile_cache(self) -> str:
        """What torch has compiled, where it is not; it outlives runs, as the other does."""
        sockets = PurePosixPath(self.sockets)
        return str(sockets.parent / "compile-cache" / sockets.name)

    logs = _Below("logs")
    """Logs of the parts."""

    def log(self, part: str) -> str:
        """Log of a part, such as `controller` or `agent-0`."""
        return self._at("logs", f"{part}.log")

    def stream(self, generation: int, rank: int, name: str, log_dir: str = "") -> str:
        """A rank's `out` or `err`; under `log_dir` where the user named one."""
        base = log_dir or self._at("logs", "ranks")
        return str(PurePosixPath(base, f"g{generation}", f"rank-{rank}.{name}"))

    def ring(self, generation: int, rank: int) -> str:
        """The rank's progress ring: beside the sockets, on a disk of this machine.

        A rank's store into a file of a disk that hangs would stop the training.
        """
        return str(PurePosixPath(self.sockets, "rings", f"g{generation}-r{rank}.ring"))

    def traces(self, generation: int) -> str:
        """Flight Recorder's traces of a generation, written when a rank is suspected."""
        return self._at("traces", f"g{generation}")

    def exit_record(self, generation: int, rank: int) -> str:
        """The rank's `ExitRecord`."""
        return self._at("exits", f"g{generation}-r{rank}.json")

    def steering(self, generation: int, node: int) -> str:
        """What the ranks of a generation have to know of older changes, and of a pause."""
        return self._at("steering", f"g{generation}-n{node}.json")

    away = _Below("away")
    """Files of nodes that are kept away."""

    def kept_away(self, node: int) -> str:
        """A file; while it is locked, nothing of `node` that has died is started again."""
        return self._at("away", f"node-{node}")

    def error_file(self, generation: int, rank: int) -> str:
        """TORCHELASTIC_ERROR_FILE of the rank."""
        return self._at("errors", f"g{generation}-r{rank}.json")

    def keeper_socket(self, node: int) -> str:
        """Where the keeper of `node` listens for its agent."""
        return str(PurePosixPath(self.sockets, f"keeper-{node}"))

    def worker_socket(self, node: int) -> str:
        """Where the agent of `node` listens for its ranks."""
        return str(PurePosixPath(self.sockets, f"agent-{node}"))


def lighthouse_door(private: str, port: int, address: str = "") -> str:
    """Return where ranks that others have started are heard, for the lighthouse on `port`.

    `private` is this user's folder for sockets.

    It is this machine's lighthouse; one at `address` is heard for by the relay that has joined it.
    """
    at = f"{address}-" if address else ""
    return f"{private}/lighthouse-{at}{port}"


def job_paths(home: str, job: str, private: str, shared: str) -> JobPaths:
    """Return the paths of `job` under the absolute directory `home`.

    `private` is this user's folder for sockets, and `shared` the one in shared memory.
    """
    root = str(PurePosixPath(home, "jobs", job))
    short = sha256(root.encode()).hexdigest()[:12]
    return JobPaths(root, f"{private}/{short}", f"{shared}/{short}")
