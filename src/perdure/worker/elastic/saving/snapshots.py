"""When each member's part of the state is copied to memory, and to a neighbour's.

All members take a snapshot at the same step: every so many, and sooner where it costs no member
anything, which each says with the counts of the step. A state that everyone has whole needs none.
"""

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

from perdure.model.errors import ProtocolError
from perdure.plan.elastic.shards import NO_LINE, plan_mirrors
from perdure.worker.elastic.group import Broken, Group
from perdure.worker.elastic.saving.mirror import Mirror
from perdure.worker.elastic.saving.peers import Peers

_SOON_S, _SHARE = 1.0, 0.02
"""Steps that take long have a snapshot each, as far as that takes this share of the time."""
_VETO = -1e9
"""More than there are members."""


class Snapshots:
    """One member's snapshots, as the steps of its world ask for them."""

    def __init__(self, peers: Peers[Any], every: int) -> None:
        """Have `peers` keep one every `every` steps (0: never).

        It is taken earlier, after a second at the earliest, where it costs no member anything.
        """
        self.peers, self.every = peers, every
        self._newest = (0, NO_LINE)
        """Step and line of the newest one."""
        self._taken_s = time.monotonic()

    def vote(self) -> float:
        """Wait until the last one is copied; return this member's vote for another one.

        The sum of all votes is positive where nobody is against it.
        """
        self.peers.wait()
        since_s = time.monotonic() - self._taken_s
        dear = self.peers.busy or since_s < max(_SOON_S, self.peers.newest_s / _SHARE)
        return _VETO if dear else 1.0

    def is_due(self, applied: int, votes: float) -> bool:
        """Return whether all take one now that `applied` steps are applied."""
        return bool(self.every) and (votes > 0.0 or applied % self.every == 0)

    def take(self, snapshot: Any, content: Any, members: tuple[int, ...]) -> None:
        """Begin to copy `content`; the snapshot before, of the same world, is whole by now."""
        step, line = self._newest
        if line == snapshot.line:
            self.peers.sweep(members, step)
        self._newest = snapshot.step, snapshot.line
        self._taken_s = time.monotonic()
        self.peers.begin(snapshot, content)

    def has(self, step: int, line: int) -> bool:
        """Return whether the newest one is of this state."""
        return self._newest == (step, line)

    def enter(self, group: Group, nodes: Mapping[int, str]) -> None:
        """Connect to who keeps this member's snapshots, where members are on several `nodes`.

        Raises:
            Broken: a member was lost.
        """
        mirrors = plan_mirrors(nodes)
        self.peers.enter(Mirror(group.open(Group, "mirror"), mirrors) if mirrors else None)

    def make_reader(self) -> Callable[[Any], Any]:
        """Return what reads snapshots, each once.

        It raises `Broken` where one is gone or damaged: all decide anew without it.
        """

        @functools.cache
        def read(snapshot: Any) -> Any:
            try:
                return self.peers.read(snapshot)
            except ProtocolError as error:
                raise Broken(error.message) from None

        return read
