"""The nodes of a job on several boxes behind ssh: each further box is one.

A box that is taken has all of the job's processes killed at once, its supervisor first, so that
nobody there writes down or tells anything; the box itself lives on. It is given back as after a
reboot: its part is started again, and asks for its place by the invitation that it has. The first
box has controller and bus, and stays.
"""

import shlex
import threading
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from perdure.launch.channel import Channel
from perdure.launch.platforms import Here
from perdure.launch.ssh import boxes
from perdure.launch.ssh.ask import ask_state, run_beside
from perdure.model.errors import ConfigError, PlatformError
from perdure.model.job import JobSpec
from perdure.model.platforms.launching import LaunchRecord
from perdure_lab.live.fleets.elsewhere import FleetElsewhere, JobElsewhere, at_once, run_aside, wait
from perdure_lab.live.fleets.fleet import Node

_LEAVE_S = 15.0
"""Given to a box to leave by itself when the job has ended."""
_FIRST = "it has the job's controller and bus"


class BoxFleet(FleetElsewhere):
    """A job on several boxes; `launch` starts it, or `record` says where it runs."""

    def __init__(
        self,
        spec: JobSpec,
        hosts: Sequence[str],
        here: Here,
        *,
        record: LaunchRecord | None = None,
        launch: Callable[[], LaunchRecord] | None = None,
    ) -> None:
        """Touch nothing yet."""
        super().__init__(spec, here, record)
        self._hosts, self._launch = hosts, launch
        self._boxes: dict[int, LaunchRecord] = {}
        """Node -> its box, of those that may be taken."""
        self._away: set[int] = set()
        self._locks: dict[int, threading.Lock] = {}
        """Held while a node is being started: it is not taken before."""

    def list_nodes(self) -> list[Node]:
        """Return a node for each box, as they are launched or as they are."""
        if len(self._hosts) < 2:
            raise ConfigError(
                f"job `{self.spec.name}` is on one box: without it there is no job",
                hint="launch.hosts or --host with several; or trace drive on the box itself",
            )
        numbers = dict(enumerate(self._hosts))
        if self._record is not None:
            self._find_boxes(self._record)
            numbers = {0: self._hosts[0], **{n: b.box for n, b in self._boxes.items()}}
        return [Node(n, host, "" if n else _FIRST) for n, host in sorted(numbers.items())]

    def _find_boxes(self, record: LaunchRecord) -> None:
        """Find out which box is which node.

        Raises:
            PlatformError: a box does not answer, or is no node of the job.
        """
        if self._boxes:
            return
        states = at_once(lambda box: ask_state(Channel(box.profile.launch), box), record.boxes)
        if states[0].over:
            raise ConfigError(
                f"job `{record.job}` does not run on {record.box}: {states[0].reason}",
                hint="perdure launch starts it again; a job file is started by the drive itself",
            )
        others = record.boxes[1:]
        places = at_once(boxes.find_place, others)
        for box, place, state in zip(others, places, states[1:], strict=True):
            if place is None or state.over:
                raise PlatformError(
                    f"{box.box} is no node of {record.job} now: {state.reason}",
                    hint="the same `perdure launch` brings it back",
                )
            self._boxes[place] = box
        self._locks = {node: threading.Lock() for node in self._boxes}

    def locate(self, node: int) -> LaunchRecord:
        """Return the box that is a node, once the job was launched."""
        return self._boxes[node] if node else self._of()

    def start(self) -> None:
        """Launch the job where it is to be, and follow what it tells."""
        if self._launch is not None:
            self._record = self._launch()
            self._launch = None
        assert self._record is not None
        first = Channel(self._record.profile.launch)
        self._job = JobElsewhere(self._record, first, run_beside)
        self._find_boxes(self._record)
        self._job.begin()

    def warn(self, nodes: Sequence[int], notice_s: float) -> None:
        """Announce the end of these nodes to the job, as a monitor of the platform would."""
        assert self._job is not None
        for node in nodes:
            run_aside(
                partial(self._job.notify, node, notice_s), lambda e: self._here.tell(e.message)
            )

    def take(self, nodes: Sequence[int]) -> None:
        """Kill all that the job has on these boxes, on all of them at once."""

        def take_one(node: int) -> None:
            with self._locks[node]:  # Once a start that is under way is through.
                self._away.add(node)
                boxes.take(self._boxes[node])

        at_once(take_one, nodes)

    def give(self, nodes: Sequence[int]) -> None:
        """Start these boxes' parts again."""
        for node in nodes:
            run_aside(partial(self._give_one, node), self._troubles.append)

    def _give_one(self, node: int) -> None:
        with self._locks[node]:
            boxes.give(self._boxes[node], self._here)
            self._away.discard(node)

    def end(self, *, stop: bool) -> None:
        """Stop the job on all boxes, or start the parts of those that are away."""
        record, job = self._record, self._job
        if record is None or job is None:
            return
        if stop:
            first = Channel(record.profile.launch)
            job.stop(lambda: ask_state(first, record).over)
            for node in self._boxes:  # What has just been given back may look for the job yet.
                self._end_one(node)
            return
        failed = []
        for node in sorted(self._away):
            try:
                self._give_one(node)
            except PlatformError as error:
                failed.append(f"{self._boxes[node].box}: {error.message}")
        if failed:
            self._here.tell(f"not given back: {'; '.join(failed)}; perdure launch does it")

    def _end_one(self, node: int) -> None:
        try:
            with self._locks[node]:
                box = self._boxes[node]
                if not wait(lambda: ask_state(Channel(box.profile.launch), box).over, _LEAVE_S):
                    boxes.end(box)
        except PlatformError as error:
            self._here.tell(error.message)


def read_spec(record: LaunchRecord) -> JobSpec:
    """Return the job's document, as it is on its first box.

    Raises:
        PlatformError: the box does not answer, or has none.
    """
    path = shlex.quote(f"{record.place}/launch/job.json")
    hint = f"perdure status {record.job}"
    text = Channel(record.profile.launch).must(f"cat {path}", hint=hint)
    return msgspec.json.decode(text, type=JobSpec)
