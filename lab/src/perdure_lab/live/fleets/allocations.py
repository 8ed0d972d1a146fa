"""The nodes of a job on Slurm: each further node is a one-node Slurm job of its own, which joins.

A node of an allocation is the administrator's to drain, and what was killed in it does not come
back; one's own Slurm jobs may be cancelled and submitted by anybody. A node that is taken has all
its processes killed by Slurm (`scancel --signal=KILL`), at once and without a word. With notice
its script is sent what Slurm sends before a walltime, and it leaves at an agreed step. It is given
back by submitting it again: for as long as it waits in the queue the trace has it, and the job does
not. The first node has controller and bus, and stays.
"""

import math
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from msgspec.structs import replace

from perdure.launch.channel import Channel
from perdure.launch.platforms import Here
from perdure.launch.slurm.client import (
    Slurm,
    carry,
    locate_launch_folder,
    render_hook,
    render_step,
)
from perdure.model.errors import PlatformError
from perdure.model.job import JobSpec
from perdure.model.platforms.launching import LaunchRecord
from perdure_lab.live.fleets.elsewhere import FleetElsewhere, JobElsewhere, run_aside, wait
from perdure_lab.live.fleets.fleet import Node
from perdure_lab.live.fleets.leftovers import note_submitted, tell_left

_FIRST = "it has the job's controller and bus"
_QUEUE_S = 86_400.0
"""A job waits so long for nodes in the queue."""
_POLL_S = 0.5
_JOIN_S = 120.0
"""Given to a node whose Slurm job runs to ask for its place."""
_LEAVE_S = 20.0
"""Given to a node to leave by itself when the job has ended."""


def separate(spec: JobSpec) -> JobSpec:
    """Return a job whose further nodes come from allocations of their own, however late."""
    restart = replace(spec.restart, node_wait_s=max(spec.restart.node_wait_s, _QUEUE_S))
    return replace(spec, remote=spec.num_nodes - 1, restart=restart)


class AllocationFleet(FleetElsewhere):
    """A job on Slurm whose further nodes are Slurm jobs of their own; `launch` starts the first."""

    def __init__(
        self, spec: JobSpec, notice_s: float, here: Here, launch: Callable[[], LaunchRecord]
    ) -> None:
        """Touch nothing yet."""
        super().__init__(spec, here)
        self._notice_s, self._launch = notice_s, launch
        self._slurm = Slurm()
        self._machines: dict[int, str] = {}
        """Node -> the name under which its machine has joined."""
        self._jobs: dict[str, str] = {}
        """Machine -> its newest Slurm job."""
        self._queued: list[tuple[int, float, float]] = []
        """Of each node that was given back: which, and from when to when it waited; until inf where
        it waits yet."""
        self._lock = threading.Lock()
        self._ending = threading.Event()

    def list_nodes(self) -> list[Node]:
        """Return a node for each Slurm job that is to be."""
        others = range(1, self.spec.num_nodes)
        return [
            Node(0, f"Slurm job of {self.spec.name}", _FIRST),
            *(Node(n, f"Slurm job of its own, {self.spec.name}-node {n}") for n in others),
        ]

    def start(self) -> None:
        """Submit all nodes, wait until they are in, and follow what the job tells."""
        record = self._record = self._launch()
        self._slurm = Slurm(record.profile)
        self._note_submitted(record.id)
        tell_left(self._here.home, record.profile.launch.host, self._lives, self._here.tell)
        names = [str(number) for number in range(1, self.spec.num_nodes)]
        for name in names:
            self._submit(name)
        node = self._wait_begun(record.id, self.spec.name)
        for name in names:
            self._wait_begun(self._jobs[name], f"{self.spec.name}-node {name}")
        self._wait_places(names)
        self._job = JobElsewhere(
            record,
            Channel(record.profile.launch),
            lambda record, argv: carry(record, argv, node),
            lambda script: (
                render_hook(record.profile) + render_step(record, node, ["sh", "-c", script])
            ),
        )
        self._job.begin()

    def _submit(self, name: str) -> None:
        folder = locate_launch_folder(self._of())
        self._jobs[name] = self._slurm.submit_join(folder, name, self._notice_s, self._of().id)
        self._note_submitted(self._of().id, *self._jobs.values())

    def _note_submitted(self, *jobs: str) -> None:
        host = self._of().profile.launch.host
        note_submitted(self._here.home, self.spec.name, host, jobs)

    def _wait_begun(self, job: str, what: str) -> str:
        """Wait until a Slurm job runs, however long its queue is; return its first node.

        Raises:
            PlatformError: it ended before.
        """
        told = set[str]()
        while not self._ending.is_set():
            end, row = self._slurm.look(job)
            if row is not None and row.state == "RUNNING":
                return row.nodes
            if end.over:
                raise PlatformError(
                    f"{what} (Slurm job {job}) is over: {end.state} {end.reason}",
                    hint=f"scontrol show job {job}, and its output",
                )
            if row is not None and row.reason not in (*told, "Dependency", ""):
                told.add(row.reason)
                self._here.tell(f"{what} waits: {end.reason}")
            time.sleep(_POLL_S)
        return ""

    def _wait_places(self, names: Sequence[str]) -> None:
        """Find out which node of the job each machine is.

        Raises:
            PlatformError: one of them does not join.
        """
        record, deadline = self._of(), time.monotonic() + _JOIN_S
        while True:
            found = self._slurm.find_machines(record.home, record.job)
            lacking = [name for name in names if name not in found]
            if not lacking:
                self._machines = {found[name]: name for name in names}
                return
            if time.monotonic() > deadline:
                jobs = ", ".join(self._jobs[name] for name in lacking)
                raise PlatformError(
                    f"Slurm jobs {jobs} run, and have not joined {record.job}",
                    hint="their output, slurm-JOB-ID.out, says why",
                )
            time.sleep(_POLL_S)

    def warn(self, nodes: Sequence[int], notice_s: float) -> None:
        """Send these nodes' scripts what Slurm sends before a walltime."""
        for node in nodes:
            run_aside(
                partial(self._slurm.warn, self._jobs[self._machines[node]]),
                lambda error: self._here.tell(error.message),
            )

    def take(self, nodes: Sequence[int]) -> None:
        """Have Slurm kill all that runs on these nodes, and cancel what waits."""
        with self._lock:
            self._slurm.kill([self._jobs[self._machines[node]] for node in nodes])

    def give(self, nodes: Sequence[int]) -> None:
        """Submit these nodes again; they come when Slurm has room for them."""
        for node in nodes:
            run_aside(partial(self._give_one, node), self._troubles.append)

    def _give_one(self, node: int) -> None:
        name, begun_s = self._machines[node], time.monotonic()
        with self._lock:
            if self._ending.is_set():
                return
            self._submit(name)
            job, number = self._jobs[name], len(self._queued)
            self._queued.append((node, begun_s, math.inf))
        while not self._ending.is_set():
            end, row = self._slurm.look(job)
            if end.over or (row is not None and row.state == "RUNNING"):
                break
            time.sleep(_POLL_S)
        self._queued[number] = (node, begun_s, time.monotonic())

    def list_waits(self) -> Sequence[tuple[int, float, float]]:
        """Return which nodes have waited in Slurm's queue, after they were given back."""
        return tuple(self._queued)

    def end(self, *, stop: bool) -> None:
        """Stop the job, and cancel what is left of its nodes."""
        assert stop, "all of it was started for the play"
        self._ending.set()
        if self._record is None:
            return
        if self._job is not None:
            self._job.stop(lambda: not self._lives(self._of().id))
            wait(lambda: not any(map(self._lives, self._jobs.values())), _LEAVE_S)
        with self._lock:
            jobs = [self._of().id, *self._jobs.values()]
        try:
            left = [job for job in jobs if self._lives(job)]
            if left:
                self._slurm.cancel(*left)
            self._note_submitted()
        except PlatformError as error:
            self._here.tell(f"{error.message}; scancel {shlex.join(jobs)} ends what is left")
        if self._queued:
            now_s = time.monotonic()
            waited = [min(to_s, now_s) - from_s for _, from_s, to_s in self._queued]
            self._here.tell(
                f"nodes that were given back waited {sum(waited):.0f} s in Slurm's queue "
                f"({len(waited)} submissions, {max(waited):.0f} s at most)"
            )

    def _lives(self, job: str) -> bool:
        """Return whether a Slurm job waits or runs; Slurm forgets those that are over."""
        return self._slurm.look(job)[0].state in ("waiting", "running")
