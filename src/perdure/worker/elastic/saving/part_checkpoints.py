"""Checkpoints of a state that lies in parts, for the day on which memory has lost one as well.

Members who together have everything save it together, in a format that is read into any number of
parts. When one is due is the first member's to say; it says so with the counts of the step, so
that all save the same one. What is saved after step *s* was reduced and before it is applied is
the state before it, as with a replicated one.
"""

import time
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, cast

from perdure.worker.checkpoint import Checkpointer
from perdure.worker.elastic.group import Broken
from perdure.worker.elastic.membership import Membership
from perdure.worker.elastic.saving.checkpoints import Saving
from perdure.worker.elastic.saving.peers import Peers


class PartSaving(Saving):
    """One member's share; without perdure, nothing."""

    def __init__(self, membership: Membership, replica: Any, peers: Peers[Any]) -> None:
        """Save nothing yet."""
        super().__init__(membership, cast(Any, replica))
        self._peers = peers
        self._first = False
        """This member's part is the one of its kind that is saved."""
        self.agreed = False
        """The first member has said, with the newest counts, that one is due."""
        self.on_hand_over: Callable[[tuple[int, ...]], object] = lambda members: None

    def hand_over(self, members: tuple[int, ...]) -> None:
        """Have this very step in memory, also on a neighbour's node, before anyone leaves."""
        self.on_hand_over(members)

    def leave(self) -> None:
        """Leave, and leave the snapshots behind."""
        super().close()

    @abstractmethod
    def _open_part(self, number: int, count: int) -> Checkpointer:
        """Return what saves part `number` of `count`."""

    def enter(self, first: bool, number: int, count: int) -> None:
        """A world is formed, and this member has part `number` of `count`, the `first` to do so."""
        if not self._wanted:
            return
        if self._saver is not None:
            self._saver.settle()
        self._first, self.agreed = first, False
        self._saver = self._open_part(number, count)

    def restore(self, extra: dict[str, Any]) -> int:
        """Return 0: there is no world to restore a part in, yet."""
        return 0

    def restore_part(self, extra: dict[str, Any]) -> int:
        """Load the newest checkpoint with the others, fill `extra`; return its step, or 0.

        Raises:
            Broken: a member was lost.
        """
        if self._saver is None:
            return 0
        try:
            step = self._saver.restore(extra)
        except RuntimeError as error:
            raise Broken(str(error).splitlines()[0]) from None
        self._saved = (step, time.monotonic())
        return step

    def wants(self, applied: int, members: tuple[int, ...]) -> bool:
        """Return whether this is the first member, and a checkpoint is due."""
        return super().is_due(applied, members)

    def is_due(self, applied: int, members: tuple[int, ...]) -> bool:
        """Return whether all have heard that `applied` steps are to be saved."""
        return self.agreed and applied > 0

    def save(
        self, applied: int, members: tuple[int, ...], reason: str, extra: dict[str, Any]
    ) -> None:
        """Begin to save this member's part, if it was not done.

        Raises:
            OSError, PerdureError: it cannot be begun.
        """
        if self._saver is None or self._saved[0] == applied:
            return
        self._saved = (applied, time.monotonic())
        if self._first:
            self._saver.save(applied, reason=reason, extra=extra)

    def close(self) -> None:
        """Wait until what was begun is written."""
        super().close()
        self._peers.close()
