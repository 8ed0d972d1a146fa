"""One rank of an elastic world of which nobody needs to have the whole state.

What shards and pipeline stages have in common:

- The counts are reduced last. A member that has applied a step knows from them that every other
  has the step's reduced gradients, of its own part at least, and can apply them by itself.
- A new world may have other parts. A member keeps those that it had until all have reduced a step
  in the new world: who is lost before that takes nothing along that others have given up.
- Where the last living copy of a part is lost, all go back to the newest step that is whole in
  the peer checkpoint, else to the checkpoint on disk.
- Votes on what all do together after a step ride along with its counts, in two last rows: for a
  checkpoint on disk, where one is enough, and for a snapshot, where one against it is.
"""

import gc
import time
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor

from perdure.plan.elastic.shards import NO_LINE, plan_mirrors
from perdure.worker.elastic.group import Group
from perdure.worker.elastic.saving.mirror import Mirror
from perdure.worker.elastic.saving.part_checkpoints import PartSaving
from perdure.worker.elastic.saving.peers import Peers
from perdure.worker.elastic.state.fsdp import Parts
from perdure.worker.elastic.trainer import Trainer

_HashStore: Any = vars(dist)["HashStore"]
_PrefixStore: Any = vars(dist)["PrefixStore"]
_LINES = 1_000_000
"""Epochs that a generation may have, for lines to be told apart."""
_SOON_S, _SHARE = 1.0, 0.02
"""Steps that take long have a snapshot each, as far as that takes this share of the time."""
_VETO = -1e9
"""More than there are members."""


class PartTrainer(Trainer):
    """Trains a replica of which this member has a part."""

    def __init__(self, *args: Any, peers: Peers[Any], snapshot_every: int, **more: Any) -> None:
        """Take a snapshot of the part every `snapshot_every` steps (0: never), by `peers`.

        It is taken earlier, after a second at the earliest, where it costs no member anything.
        """
        self._peers = peers
        super().__init__(*args, **more)
        cast(PartSaving, self._saving).on_hand_over = self._hand_over
        self._line = self._ready = NO_LINE
        self._rebuilt = False
        """The part is another one than in the world before."""
        self._every = snapshot_every
        self._furthest = 0
        """The most steps that were ever applied."""
        self._newest = (0, NO_LINE)
        """Step and line of the newest snapshot."""
        self._snapped_s = time.monotonic()

    @property
    def snapshot_stall_s(self) -> float:
        """Return for how long training has waited for snapshots so far, in seconds."""
        return self._peers.stall_s

    @property
    def snapshot_copied_s(self) -> float:
        """Return for how long snapshots were copied and hashed so far, beside training."""
        return self._peers.copied_s

    @abstractmethod
    def _tell_parts(self) -> tuple[Any, Parts]:
        """Return what a snapshot of this member's part is called, and its tensors."""

    @abstractmethod
    def _tell_plain(self) -> dict[str, Any]:
        """Return what all members have alike, settings included."""

    @abstractmethod
    def _let_go(self) -> None:
        """All have reduced a step in this world: give up what the world before had."""

    # --- one step -----------------------------------------------------------------------------

    def _announce(self) -> None:
        gc.collect()
        gc.freeze()  # Who looks for the remains of a world need not look at all of torch.
        self._membership.announce(*self._offer())

    def _offer(self) -> tuple[str, int]:
        """Return where others may follow this member, and the bytes of a state; here nowhere."""
        return "", 0

    def _note_followed(self) -> None:
        super()._note_followed()
        self._line = self._catching.epoch

    def _find_line(self, *, sent: bool = False) -> int:
        return self._ready if sent else self._line

    def _prove(self, group: Group) -> None:
        """Reduce the counts, which say that each member has reduced its part."""
        self._ready = self._make_line()
        self._peers.wait()
        self._tally[-1, 0] = _VETO if self._is_snapshot_dear() else 1.0
        self._send_tally(group)
        group.wait()
        self._let_go()

    def _apply(self, group: Group, *, sent: bool = False) -> None:
        if self._applied < self._furthest:
            self._progress.repeat()
        cheap = bool(self._view_tally()[-1].sum() > 0.0)
        super()._apply(group)
        self._furthest = max(self._furthest, self._applied)
        self._line, self._ready = self._ready, NO_LINE
        if self._rebuilt:
            self._rebuilt = False
            gc.collect()  # The model of the world before refers to itself, and to its parts.
        if self._every and (cheap or self._applied % self._every == 0):
            self._take_snapshot(group.members)

    def _view_tally(self) -> Tensor:
        """Return what was reduced of all members' counts and votes in the step under way."""
        return self._sums[self._applied % 2]

    def _is_snapshot_dear(self) -> bool:
        since_s = time.monotonic() - self._snapped_s
        return self._peers.busy or since_s < max(_SOON_S, self._peers.newest_s / _SHARE)

    def _take_snapshot(self, members: tuple[int, ...]) -> None:
        """Begin this step's snapshot; the one before, of the same world, is whole by now."""
        step, line = self._newest
        if line == self._line:
            self._peers.sweep(members, step)
        self._newest = self._applied, self._line
        self._snapped_s = time.monotonic()
        snapshot, parts = self._tell_parts()
        self._peers.begin(snapshot, parts, self._tell_plain())

    def _hand_over(self, members: tuple[int, ...]) -> None:
        """Take a snapshot of this step, and go on when it is wherever it is kept."""
        if self._every:
            if self._newest != (self._applied, self._line):
                self._take_snapshot(members)
            self._peers.finish()

    # --- the world ----------------------------------------------------------------------------

    def _make_line(self) -> int:
        return self._membership.generation * _LINES + self._membership.epoch

    def _abandon(self) -> None:
        self._peers.abandon()
        super()._abandon()

    def _leave(self) -> None:
        self._peers.leave()
        super()._leave()

    def _open_store(self, members: tuple[int, ...]) -> Any:
        if len(members) > 1:
            return self._membership.store()
        return _HashStore()

    def _make_mirror(self, nodes: Mapping[int, str], store: Any) -> Mirror | None:
        """Return connections to who keeps this member's snapshots, where that is on another node.

        `nodes` are those of all members.

        Raises:
            Broken: a member was lost.
        """
        mirrors = plan_mirrors(nodes)
        if not mirrors or not self._every:
            return None
        me, members = self._membership.me, tuple(sorted(nodes))
        prefix, overtaken = open_prefix("mirror", store), self._membership.overtaken
        return Mirror(Group(members, me, prefix, self._device, overtaken), me, mirrors)

    def _roll_forward(self, step: int, holder: int, forward: tuple[int, ...], group: Group) -> None:
        """Members of `forward` apply what they have reduced, to be at `step`.

        `holder` has applied it, and tells the losses.

        Raises:
            Broken: a member was lost.
        """
        me, tally = self._membership.me, self._sums[(step - 1) % 2]
        if me == holder:
            for member in forward:
                group.send(tally, member, 0)
        elif me in forward:
            group.receive(tally, holder, 0)
        group.wait()
        if me in forward:
            self._apply(group)

    def _begin_at(self, step: int, line: int, plain: dict[str, Any]) -> None:
        """The part is that of `step`, and what this member had of later ones is undone."""
        self._steering.load(plain)
        self._feed.cut()
        self._applied, self._line = step, line
        self._holds = False
        self._buckets.drop()
        self._forget()
        self._peers.forget(step)


def open_prefix(name: str, store: Any) -> Any:
    """Return a part of `store` of its own, for another group of its members."""
    return _PrefixStore(name, store)
