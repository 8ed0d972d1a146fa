"""A rank's side of the boundary agreement: prepare at step S, acknowledge while before S, wait.

The control thread prepares and decides, the training thread arrives; one lock lies between
them. A rank acknowledges only while fewer than S steps are committed, and then does not pass S
without a decision: that gate, and nothing else, is what keeps ranks from acting at different
steps. The training thread pays one comparison of integers at a boundary where nothing is open.

If the control plane is away, the ranks settle among themselves what is open (`worker.cells`): a
commit that has reached one of them holds for all. After `DROP_S` without any, all of them drop it.
"""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import msgspec

from perdure.model.errors import ProtocolError
from perdure.model.events import AnyEvent, BoundaryAnswered, BoundaryReached
from perdure.model.orders import ResumeRanks, SendBoundary
from perdure.model.steering import RESUMED, Change
from perdure.worker.cells import Cells, NoCells

NEVER = 1 << 62
DROP_S = 30.0
"""Seconds without a decision after which ranks that wait for it drop what was to be decided."""
ORPHAN_S = 1800.0
ASK_FIRST_S = 0.25
ASK_EVERY_S = 1.0
_HOLDS = ("pause", "drain")
"""After these a rank makes no step until it is resumed."""
PLANS = ("set", "pause")
"""A rank says that it has heard the decision, so that others may be agreed on meanwhile."""


class Interrupted(Exception):
    """Raised where a rank has to stop waiting; nothing that was agreed is forgotten."""


class Agreed(msgspec.Struct, frozen=True):
    """What all ranks do at this step."""

    id: str
    kind: Literal["checkpoint", "stop", "set", "pause", "drain"]
    step: int
    change: Change | None = None
    leaves: tuple[int, ...] = ()
    """Of `drain` in an elastic world: who leaves it."""


class _Open(msgspec.Struct):
    agreed: Agreed
    decision: Literal["", "commit", "abort", "drop"] = ""
    unwritten: bool = False
    """A commit that was heard while no cell answered: it is written before it is carried out."""


class BoundaryGate:
    """The open agreements of one rank."""

    def __init__(
        self,
        *,
        rank: int,
        emit: Callable[[AnyEvent], object],
        ask: Callable[[str], object],
        check: Callable[[Change], str] = lambda change: "",
        now: Callable[[], float] = time.monotonic,
        plans: tuple[str, ...] = PLANS,
        interrupted: Callable[[], bool] = lambda: False,
        cells: Cells | None = None,
        orphan_s: float = ORPHAN_S,
        excuse: Callable[[float], AbstractContextManager[None]] = lambda most_s: nullcontext(),
    ) -> None:
        """Answer through `emit`; ask about a missing decision through `ask`.

        Ranks settle by `cells` what perdure does not decide. Without cells they wait for it, for
        `orphan_s`. `excuse` declares a wait of at most so many seconds. `check` returns why a
        change cannot be made here; `now` is job time. Of a decision about one of `plans` the rank
        says that it has heard it. Where `interrupted` becomes true (say so by `wake`) the training
        thread leaves whatever it waits for.
        """
        self._plans = plans
        self._rank = rank
        self._emit = emit
        self._ask = ask
        self._check = check
        self._now = now
        self._interrupted = interrupted
        self._cells = cells or NoCells()
        self._orphan_s, self._excuse = max(orphan_s, DROP_S), excuse
        self._changed = threading.Condition()
        self._open: dict[str, _Open] = {}
        self._answers: dict[str, BoundaryAnswered] = {}
        self._resumed: set[str] = set()
        self.missed: list[Agreed] = []
        """Decided upon for steps that this rank did not come to: it has healed past them."""
        self.holds: dict[str, Agreed] = {}
        """Agreements in which the training thread stands still, by id."""
        self.committed = 0
        """Steps that this rank has committed."""
        self._closed = ""
        self.next_step = NEVER
        """The earliest step at which the training thread has to call `arrive`."""

    def handle(self, order: SendBoundary | ResumeRanks) -> None:
        """Take one move of the agreement. The control thread calls it; it waits for a cell only."""
        if isinstance(order, ResumeRanks):
            self._resume(order.id)
            self._cells.settle(order.id + RESUMED, "commit")
            return
        answer: BoundaryAnswered | BoundaryReached | None = None
        move = self._settle(order)
        with self._changed:
            if order.move == "prepare":
                answer = self._prepare(order)
            else:
                entry = self._open.get(order.id)
                if entry is not None and not entry.decision:
                    entry.decision, entry.unwritten = move or "commit", not move
                    if move == "drop":
                        answer = self._drop(entry)
                    elif move == "abort" or order.id in self._resumed:
                        self._remove(order.id)
                    elif order.kind in self._plans:
                        answer = BoundaryAnswered(
                            id=order.id, rank=self._rank, ok=True, step=self.committed,
                            planned=True,
                        )  # fmt: skip
                self._changed.notify_all()
        if answer is not None:
            self._emit(answer)

    def _settle(self, order: SendBoundary) -> Literal["", "commit", "abort", "drop"]:
        """Make a decision that was heard hold for all ranks; return what holds.

        Return an empty string for a commit if no cell answers.
        """
        if order.move == "prepare":
            return ""
        with self._changed:
            entry = self._open.get(order.id)
            known = entry is None or bool(entry.decision)
        if known:
            return order.move
        if order.move == "abort":
            self._cells.settle(order.id, "drop")
            return "abort"
        return self._cells.settle(order.id, "commit")

    def _drop(self, entry: _Open) -> BoundaryReached:
        """Forget what the ranks have dropped; return what is to be told of it."""
        agreed = entry.agreed
        why = f"perdure was away: the ranks have dropped it at step {agreed.step}"
        self._remove(agreed.id)
        self._answers[agreed.id] = BoundaryAnswered(
            id=agreed.id, rank=self._rank, ok=False, step=self.committed, reason=why
        )
        return BoundaryReached(
            id=agreed.id, rank=self._rank, step=self.committed, at_s=self._now(), error=why,
            dropped=True,
        )  # fmt: skip

    def _resume(self, id_: str) -> None:
        """End a wait, or one that is yet to come, and say so once.

        What is resumed was decided, so a rank that has missed the decision waits for none.
        """
        with self._changed:
            if id_ in self._resumed:
                return
            self._resumed.add(id_)
            self.holds.pop(id_, None)
            entry = self._open.get(id_)
            if entry is not None:
                entry.decision = entry.decision or "abort"
                self._remove(id_)
            step = self.committed
            self._changed.notify_all()
        self._emit(BoundaryReached(id=id_ + RESUMED, rank=self._rank, step=step, at_s=self._now()))

    def drop_hold(self, id_: str) -> None:
        """Stop standing still for this agreement."""
        with self._changed:
            self.holds.pop(id_, None)

    def wake(self) -> None:
        """Have the training thread look at `interrupted`."""
        with self._changed:
            self._changed.notify_all()

    def plan(self, agreed: Agreed, *, decided: bool = True) -> None:
        """Take what others have agreed: older generations, or a peer that may only have promised.

        What is not `decided` binds this rank all the same, and the decision is to come.
        """
        with self._changed:
            self._open[agreed.id] = _Open(agreed, "commit" if decided else "")
            self._set_next()

    def knows(self, id_: str) -> bool:
        """Return whether this rank was asked about an agreement, or has it planned or promised."""
        with self._changed:
            return id_ in self._answers or id_ in self._open

    def promises(self) -> tuple[tuple[Agreed, bool], ...]:
        """Return what waits for its step, and whether it is decided to be done."""
        with self._changed:
            open_ = self._open.values()
            return tuple((e.agreed, e.decision == "commit") for e in open_ if e.decision != "abort")

    def advance(self, committed: int) -> bool:
        """Note that `committed` steps are; True where something is agreed for this step."""
        with self._changed:
            self.committed = committed
            return committed >= self.next_step

    def arrive(self, committed: int) -> list[Agreed]:
        """Return what was agreed for the step `committed`, waiting for open decisions.

        Raises:
            ProtocolError: the ranks have no store in common, and no decision came for `orphan_s`.
            Interrupted: it has to leave; it comes again.
        """
        due = []
        with self._changed:
            entries = [e for e in self._open.values() if e.agreed.step <= committed]
        for entry in entries:
            self._wait(entry)
            if entry.unwritten and (fate := self._cells.settle(entry.agreed.id, "commit")):
                entry.decision, entry.unwritten = fate, False
        with self._changed:
            for entry in entries:
                if entry.decision == "drop" and entry.agreed.id in self._open:
                    self._emit(self._drop(entry))
                self._remove(entry.agreed.id)
                if entry.decision == "commit" and entry.agreed.step < committed:
                    self.missed.append(entry.agreed)
                elif entry.decision == "commit":
                    due.append(entry.agreed)
                    if entry.agreed.kind in _HOLDS and entry.agreed.id not in self._resumed:
                        self.holds[entry.agreed.id] = entry.agreed
        return due

    def hold(self, committed: int, account: Callable[[], object] = lambda: None) -> list[Agreed]:
        """Wait until all holds are over (then nothing is returned), or something is agreed here.

        A resume may come before the rank does, and may get lost: so it is asked for. `account` is
        called meanwhile, every second, so that the time is not lost with a rank that is killed.

        Raises:
            Interrupted: it has to leave; it comes again.
        """
        ask_s = ASK_FIRST_S
        while True:
            with self._changed:
                if self._changed.wait_for(
                    lambda: self._interrupted() or not self.holds or committed >= self.next_step,
                    timeout=ask_s,
                ):
                    break
                holds = list(self.holds)
            for id_ in holds:
                self._ask(id_)
                if self._cells.read(id_ + RESUMED):
                    self._resume(id_)
            account()
            ask_s = ASK_EVERY_S
        if self._interrupted():
            raise Interrupted
        return self.arrive(committed) if committed >= self.next_step else []

    def close(self, why: str) -> list[Agreed]:
        """Veto everything from now on; return what was promised and cannot be kept."""
        with self._changed:
            self._closed = why
            broken = [entry.agreed for entry in self._open.values()]
            self._open.clear()
            self.next_step = NEVER
            return broken

    def reopen(self) -> None:
        """Agree again: another loop begins."""
        with self._changed:
            self._closed = ""

    def _prepare(self, order: SendBoundary) -> BoundaryAnswered:
        known = self._answers.get(order.id)
        if known is not None:
            return known  # Asked again: the promise stands.
        reason = self._closed
        if not reason:
            # The gate is set before the step is read: whoever passed it is seen here.
            self.next_step = min(self.next_step, order.step)
            if self.committed > order.step or (self.committed == order.step and not self._stands()):
                reason = f"already at step {self.committed}"
        refused = ""
        if not reason and order.change is not None:
            reason = refused = self._check(order.change)
        if reason:
            self._set_next()
        else:
            self._open[order.id] = _Open(
                Agreed(order.id, order.kind, order.step, order.change, order.leaves)
            )
            self._changed.notify_all()
        answer = self._answers[order.id] = BoundaryAnswered(
            id=order.id, rank=self._rank, ok=not reason, step=self.committed, reason=reason,
            refused=bool(refused),
        )  # fmt: skip
        return answer

    def _stands(self) -> bool:
        """Whether no step begins before a resume: now, or because of what lies right ahead."""
        return bool(self.holds) or any(
            e.agreed.kind in _HOLDS and e.agreed.step == self.committed and e.decision == "commit"
            for e in self._open.values()
        )

    def _wait(self, entry: _Open) -> None:
        if self._is_decided(entry, ASK_FIRST_S):
            return
        began = time.monotonic()
        with self._excuse(self._orphan_s + DROP_S):
            while True:
                self._ask(entry.agreed.id)
                self._look(entry, time.monotonic() - began)
                if self._is_decided(entry, ASK_EVERY_S):
                    return

    def _is_decided(self, entry: _Open, wait_s: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: entry.decision or self._interrupted(), timeout=wait_s)
            if not entry.decision and self._interrupted():
                raise Interrupted
            return bool(entry.decision)

    def _look(self, entry: _Open, waited_s: float) -> None:
        """Look at what other ranks have heard; drop it with them if that is nothing."""
        id_ = entry.agreed.id
        fate = self._cells.read(id_)
        if not fate and waited_s >= DROP_S:
            fate = self._cells.settle(id_, "drop")
        with self._changed:
            entry.decision = entry.decision or fate
        if not fate and waited_s >= self._orphan_s:
            raise ProtocolError(
                f"no decision on {entry.agreed.kind} {id_} at step "
                f"{entry.agreed.step} within {waited_s:.0f} s",
                hint="perdure's controller or agent is gone: see `perdure ps`",
            )

    def _remove(self, boundary_id: str) -> None:
        self._open.pop(boundary_id, None)
        self._set_next()

    def _set_next(self) -> None:
        self.next_step = min((e.agreed.step for e in self._open.values()), default=NEVER)
