"""Where a drill's job runs, as the rehearsal sees it: starts of the job, and faults made to them.

`here.py` is this machine; perdure-lab has boxes behind ssh.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from perdure.drill.grading import Strike
from perdure.drill.planning import Act
from perdure.model.events import JournalEntry
from perdure.model.job import JobSpec
from perdure.model.report import Snapshot
from perdure.telemetry.restarts import Began


class NotMadeError(Exception):
    """A fault could not be made, and why."""


class Run(Protocol):
    """One start of the job."""

    @property
    def over(self) -> bool:
        """Return whether it has ended."""

    @property
    def code(self) -> int:
        """Return its exit code; 0 while it runs."""

    def look(self) -> Snapshot | None:
        """Return its newest snapshot; None before there is one."""

    def end(self, *, first_s: float) -> None:
        """Have it stop at an agreed step, within `first_s`; where it does not, end it."""

    def read_losses(self) -> tuple[str, dict[Any, str]]:
        """Return what was compared by, and what was logged, or else printed, at each step."""

    def read_began(self, spec: JobSpec, generation: int) -> Began | None:
        """Return where a script without steps began in a generation; None: not known yet."""

    def tail(self) -> str:
        """Return the last line of what went wrong."""

    def was_refused(self) -> bool:
        """Return whether something that it wanted to do was not permitted."""


class Victim(Protocol):
    """A job that faults are made to."""

    @property
    def run(self) -> Run:
        """Return its start."""

    def now(self) -> float:
        """Return job time."""

    def read(self) -> list[JournalEntry]:
        """Return the journal so far."""

    def ask(self, verb: str, args: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Return what the controller answers, with the command's `id`.

        Raises:
            NotMadeError: it refuses, or does not answer.
        """

    def strike(self, act: Act, seen: Snapshot, at_step: int) -> Strike:
        """Make a fault: those of ranks that declare steps at `at_step`, all others now.

        Raises:
            NotMadeError: it cannot be.
        """

    def heal(self, act: Act) -> None:
        """End what can end."""


class Place(Protocol):
    """Where the job is started, as often as it takes."""

    stays: frozenset[int]
    """Nodes that cannot be taken away."""

    def open(self, *, switches: bool) -> AbstractContextManager[Victim]:
        """Start the job in a copy; afterwards nothing is left of it.

        With `switches` its checkpoints can be refused.

        Raises:
            PlatformError: it cannot be started.
        """

    def describe(self) -> str:
        """Return where that is, for the card; empty: on this machine."""

    def list_changes(self) -> list[str]:
        """Return what is otherwise there than in the user's job, a sentence each."""

    def list_notes(self) -> Sequence[str]:
        """Return what else is to be told, such as a node that could not be given back."""
