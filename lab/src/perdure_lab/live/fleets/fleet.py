"""What a trace is played against: the nodes of one job, wherever it runs.

Whoever plays sees nothing else of the place. A node that is taken is gone as a lost machine is: all
of the job's processes there at once, without a word, and nothing of it starts again until the node
is given back. What the job tells of itself is read here as well, its time as that of this machine.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from perdure.model.errors import PerdureError
from perdure.model.events import JournalEntry
from perdure.model.job import JobSpec
from perdure.model.report import Snapshot


class Node(NamedTuple):
    """One node of a job."""

    number: int
    machine: str
    """What it is called to a person."""
    stays: str = ""
    """Why it cannot be taken; empty where it can."""


class Fleet(Protocol):
    """The nodes of one job, each of which may be taken away and given back."""

    spec: JobSpec

    def list_nodes(self) -> Sequence[Node]:
        """Return all nodes that the job is to have, by number; nothing need run yet.

        Raises:
            ConfigError: there are none, or the job cannot be driven here.
            PlatformError: the place cannot be reached.
        """

    def start(self) -> None:
        """Have the job run with all its nodes; one that runs already is left as it is.

        Raises:
            PlatformError: it cannot be started.
        """

    def warn(self, nodes: Sequence[int], notice_s: float) -> None:
        """Announce, aside, that these nodes go away after so many seconds, as the place would."""

    def take(self, nodes: Sequence[int]) -> None:
        """Take nodes away; they stay away.

        Raises:
            PlatformError: one of them cannot be reached.
        """

    def give(self, nodes: Sequence[int]) -> None:
        """Let nodes come back, aside, and take back what was announced of them."""

    def find_trouble(self) -> PerdureError | None:
        """Return why a node could not be given back, or the job is no longer heard; else None."""
        return None

    def read_snapshot(self) -> Snapshot | None:
        """Return the newest status of the job that is known."""

    def compute_offset_s(self) -> float:
        """Return job time less this machine's CLOCK_MONOTONIC."""

    def read_entries(self) -> list[JournalEntry]:
        """Return the job's journal.

        Raises:
            PlatformError: it cannot be read.
        """

    def list_waits(self) -> Sequence[tuple[int, float, float]]:
        """Return which nodes have waited for a machine, from when to when, by CLOCK_MONOTONIC."""
        return ()

    def over(self) -> bool:
        """Return whether the job has ended, as far as is known, or is not heard any more."""

    def end(self, *, stop: bool) -> None:
        """Stop the job, with a checkpoint where it can make one; or else give all nodes back."""
