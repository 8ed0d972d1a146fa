"""A rank's side of the boundary agreement: prepare at step S, acknowledge while before S, wait.

The control thread prepares and decides, the training thread arrives; one lock lies between
them. A rank acknowledges only while fewer than S steps are committed, and then does not pass S
without a decision: that gate, and nothing else, is what keeps ranks from acting at different
steps. The training thread pays one comparison of integers at a boundary where nothing is open.

If the control plane is away, the ranks settle among themselves what is open
(`worker.steering.cells`). A rank that waits asks the others there. A commit that has reached one of
them holds for all. After `DROP_S` without any, each rank votes for a drop, and it is dropped once
all ranks have voted.

A rank carries out a commit at once, unless it has voted: then the cell decides which came first. So
ranks never part, whichever of them reach the cells, and no rank needs the cells if perdure
decides. A rank that can learn neither ends after `orphan_s`. Only the thread of `look` uses cells.
"""

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import msgspec

from perdure.model.errors import ProtocolError
from perdure.model.events import AnyEvent, BoundaryAnswered, BoundaryReached
from perdure.model.orders import ResumeRanks, SendBoundary
from perdure.model.steering import RESUMED, Change
from perdure.worker.steering.cells import TIMEOUT_S, Away, Cells, Fate
from perdure.worker.system.forking import free_in_child

NEVER = 1 << 62
DROP_S = 30.0
"""Seconds without a decision after which a rank that waits for it votes for a drop."""
ORPHAN_S = 1800.0
ASK_FIRST_S = 0.25
ASK_EVERY_S = 1.0
LOOK_S = 5.0
"""Seconds without a step after which a rank looks whether others ask for its vote."""
_REMEMBERED_MAX = 1000
"""Agreements whose answers and fates are remembered."""
_LATE = "late"
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
    ranks: tuple[int, ...] = ()
    """Who is asked for a promise."""
    decision: Literal["", "commit", "abort", "drop"] = ""
    since_s: float | None = None
    """Since when the training thread waits for the decision."""
    voted: str = ""
    """Where this rank has first voted for a drop; `_LATE` if others may have without it."""
    heard: bool = False
    """A commit was heard after the vote: the cell decides."""


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
        members: Callable[[], Sequence[int]] | None = None,
        orphan_s: float = ORPHAN_S,
        excuse: Callable[[float], AbstractContextManager[None]] = lambda most_s: nullcontext(),
    ) -> None:
        """Answer through `emit`; ask about a missing decision through `ask`.

        Ranks settle by `cells` what perdure does not decide; `members` returns who has to vote, if
        those are not the ones who were asked. A decision is waited for at most `orphan_s`. `excuse`
        declares a wait of at most so many seconds. `check` returns why a
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
        self._cells, self._members = cells, members
        self._orphan_s, self._excuse = max(orphan_s, 2 * DROP_S), excuse
        self._changed = free_in_child(threading.Condition())
        self._open: dict[str, _Open] = {}
        self._answers: dict[str, BoundaryAnswered] = {}
        self._fates: dict[str, Fate] = {}
        """What became of agreements, as far as this rank knows."""
        self._untold: deque[str] = deque(maxlen=_REMEMBERED_MAX)
        """Those whose fate this rank has heard from perdure, and that no cell has yet."""
        self._seen = -1
        """Committed steps at the last look for questions of others."""
        self._thread: threading.Thread | None = None
        self._over = False
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

    def handle(self, order: SendBoundary | ResumeRanks, *, late: bool = False) -> None:
        """Take one move of an agreement. The control thread calls it; it never waits.

        An agreement is `late` if others may have been asked for it before this rank was there.
        """
        if isinstance(order, ResumeRanks):
            self._resume(order.id)
            return
        answer: AnyEvent | None = None
        with self._changed:
            entry = self._open.get(order.id)
            if order.move == "prepare":
                answer = self._prepare(order, late=late)
            elif entry is not None and entry.voted and order.move == "commit":
                entry.heard = True
            elif entry is not None and not entry.decision:
                answer = self._decide(entry, order.move)
                self._untold.append(order.id)
            self._changed.notify_all()
        if answer is not None:
            self._emit(answer)

    def _decide(
        self, entry: _Open, decision: Literal["commit", "abort", "drop"]
    ) -> AnyEvent | None:
        """Note the decision; return what is to be told of it."""
        agreed, entry.decision = entry.agreed, decision
        self._remember(self._fates, agreed.id, "commit" if decision == "commit" else "drop")
        if decision == "drop":
            return self._drop(agreed)
        if decision == "abort" or agreed.id in self._resumed:
            self._remove(agreed.id)
        elif agreed.kind in self._plans:
            return BoundaryAnswered(
                id=agreed.id, rank=self._rank, ok=True, step=self.committed, planned=True
            )
        return None

    def _drop(self, agreed: Agreed) -> BoundaryReached:
        """Forget what the ranks have dropped; return what is to be told of it."""
        why = f"perdure was away: the ranks have dropped it at step {agreed.step}"
        self._remove(agreed.id)
        self._answers[agreed.id] = BoundaryAnswered(
            id=agreed.id, rank=self._rank, ok=False, step=self.committed, reason=why
        )
        return BoundaryReached(
            id=agreed.id, rank=self._rank, step=self.committed, at_s=self._now(), error=why,
            dropped=True,
        )  # fmt: skip

    def _remember(self, memory: dict[str, Any], id_: str, what: Any) -> None:
        memory[id_] = what
        if len(memory) > _REMEMBERED_MAX:
            del memory[next(iter(memory))]

    def _resume(self, id_: str) -> None:
        """End a wait, or one that is yet to come, and say so once.

        What is resumed was decided, so a rank that has missed the decision waits for none.
        """
        with self._changed:
            if id_ in self._resumed:
                return
            self._resumed.add(id_)
            self._remember(self._fates, id_ + RESUMED, "commit")
            self._untold.append(id_ + RESUMED)
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
            self._open[agreed.id] = _Open(agreed, decision="commit" if decided else "")
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
            ProtocolError: no decision came for `orphan_s`.
            Interrupted: it has to leave; it comes again.
        """
        if (due := self.poll(committed, ASK_FIRST_S)) is not None:
            return due
        with self._excuse(self._orphan_s + DROP_S):
            while True:
                for entry in self._list_due(committed):
                    if not entry.decision:
                        self._ask(entry.agreed.id)
                if (due := self.poll(committed, ASK_EVERY_S)) is not None:
                    return due

    def poll(self, committed: int, wait_s: float = 0.0) -> list[Agreed] | None:
        """Return what was agreed for the step `committed`; None if that is open after `wait_s`.

        Raises:
            ProtocolError, Interrupted: see `arrive`.
        """
        with self._changed:
            entries = self._list_due(committed)
            self._changed.wait_for(
                lambda: all(e.decision for e in entries) or self._interrupted(), wait_s
            )
            undecided = [e for e in entries if not e.decision]
            for entry in undecided:
                self._wait(entry)
            if undecided:
                self._changed.notify_all()
                return None
            return self._take(entries, committed)

    def _list_due(self, committed: int) -> list[_Open]:
        with self._changed:
            return [e for e in self._open.values() if e.agreed.step <= committed]

    def _wait(self, entry: _Open) -> None:
        now = self._now()
        if self._interrupted():
            entry.since_s = None
            raise Interrupted
        entry.since_s = now if entry.since_s is None else entry.since_s
        if now - entry.since_s >= self._orphan_s:
            agreed = entry.agreed
            raise ProtocolError(
                f"no decision on {agreed.kind} {agreed.id} at step {agreed.step} within "
                f"{now - entry.since_s:.0f} s",
                hint="perdure's controller or agent is gone: see `perdure status`",
            )

    def _take(self, entries: list[_Open], committed: int) -> list[Agreed]:
        due = []
        for entry in entries:
            agreed = entry.agreed
            self._remove(agreed.id)
            if entry.decision == "commit" and agreed.step < committed:
                self.missed.append(agreed)
            elif entry.decision == "commit":
                due.append(agreed)
                if agreed.kind in _HOLDS and agreed.id not in self._resumed:
                    self.holds[agreed.id] = agreed
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
        if self._cells is not None and self._thread is None:
            atexit.register(self.stop)  # A thread inside torch would abort the interpreter's end.
            self._over = False
            self._thread = threading.Thread(target=self._run, name="perdure-cells", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread that uses the cells, once it has told them what it has heard."""
        thread, self._thread = self._thread, None
        if thread is not None and thread.is_alive():
            with self._changed:
                self._over = True
                self._changed.notify_all()
            thread.join(3 * TIMEOUT_S)

    def _prepare(self, order: SendBoundary, *, late: bool) -> BoundaryAnswered:
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
            agreed = Agreed(order.id, order.kind, order.step, order.change, order.leaves)
            self._open[order.id] = _Open(agreed, order.ranks, voted=_LATE if late else "")
        answer = BoundaryAnswered(
            id=order.id, rank=self._rank, ok=not reason, step=self.committed, reason=reason,
            refused=bool(refused),
        )  # fmt: skip
        self._remember(self._answers, order.id, answer)
        return answer

    def _stands(self) -> bool:
        """Whether no step begins before a resume: now, or because of what lies right ahead."""
        return bool(self.holds) or any(
            e.agreed.kind in _HOLDS and e.agreed.step == self.committed and e.decision == "commit"
            for e in self._open.values()
        )

    # --- the cells ----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._over:
            with self._changed:
                self._changed.wait_for(lambda: self._untold or self._waits() or self._over, LOOK_S)
            self.look()
            with self._changed:
                self._changed.wait_for(lambda: self._over, ASK_EVERY_S)
        if self._untold:
            self.look()

    def _waits(self) -> list[_Open]:
        return [e for e in self._open.values() if e.since_s is not None and not e.decision]

    def look(self) -> None:
        """Settle by the cells what perdure has not decided. It may wait for them."""
        with self._changed:
            waits, holds = self._waits(), list(self.holds)
            stands, self._seen = self.committed == self._seen, self.committed
        if self._cells is None or not (self._untold or waits or holds or stands):
            return
        try:
            where = self._cells.open()
            while self._untold:
                self._cells.settle(self._untold[0], self._fates.get(self._untold[0], "drop"))
                self._untold.popleft()
            self._answer(self._cells, self._cells.asked())
            for entry in waits:
                self._settle(self._cells, where, entry)
            for id_ in holds:
                self._cells.ask(id_ + RESUMED)
                if self._cells.read(id_ + RESUMED):
                    self._resume(id_)
        except Away:
            return

    def _answer(self, cells: Cells, id_: str) -> None:
        """Say what this rank knows of an agreement that another one asks about.

        A rank that was never asked for a promise, or has refused it, votes for a drop.
        """
        with self._changed:
            fate = self._fates.get(id_, "")
            promised = not id_ or id_ in self._open or id_.endswith(RESUMED)
            if not fate and not promised and id_ not in self._answers:
                why = "perdure was away: the other ranks drop it"
                no = BoundaryAnswered(
                    id=id_, rank=self._rank, ok=False, step=self.committed, reason=why
                )
                self._remember(self._answers, id_, no)
        if fate:
            cells.settle(id_, fate)
        elif not promised:
            cells.vote(id_, self._rank, ())

    def _settle(self, cells: Cells, where: str, entry: _Open) -> None:
        """Ask what others have heard; vote for a drop if that is nothing."""
        id_ = entry.agreed.id
        fate = cells.read(id_)
        with self._changed:
            if entry.decision or entry.since_s is None:
                return
            if not fate and not entry.voted:
                if self._now() - entry.since_s < DROP_S:
                    return
                entry.voted = where
            heard = entry.heard and entry.voted == where
            voters = tuple(self._members() if self._members is not None else entry.ranks)
        if not fate:
            cells.ask(id_)
        if not fate and heard:
            fate = cells.settle(id_, "commit")
        elif not fate and cells.vote(id_, self._rank, voters):
            fate = cells.settle(id_, "drop")
        with self._changed:
            event = self._decide(entry, fate) if fate and not entry.decision else None
            self._changed.notify_all()
        if event is not None:
            self._emit(event)

    def _remove(self, boundary_id: str) -> None:
        self._open.pop(boundary_id, None)
        self._set_next()

    def _set_next(self) -> None:
        self.next_step = min((e.agreed.step for e in self._open.values()), default=NEVER)
