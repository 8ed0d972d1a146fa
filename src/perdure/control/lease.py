"""Who of several controllers may act: a lease in a register that can compare and swap.

Facts in, requests out; time is an argument and always this process's own monotonic clock. No two
hosts' clocks are compared: a holder counts from before it asked for a write, a rival from after it
has read one, so that the holder's time is over first however long the messages took. What clocks
may differ in is their rate, for which `LeaseTimes.margin_s` is kept.

The lease says when to begin and when to stop. That no two act is not left to it: the term, which
is the register's revision at the acquisition, goes into the journal and into every order, and the
journal's appends name the entry that they follow (`docs/failover.md` has the proof).
"""

from dataclasses import dataclass
from typing import Literal, assert_never

import msgspec


class LeaseTimes(msgspec.Struct, frozen=True, kw_only=True):
    """How long a lease holds, in seconds of each process's own clock."""

    ttl_s: float = 1.5
    """A holder acts for so long after it asked for the newest write that was confirmed."""
    renew_s: float = 0.4
    """Between two writes of a holder, or two reads of a rival."""
    margin_s: float = 0.3
    """A rival waits so much longer than the holder may act."""


class LeaseRead(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The register's content; `revision` is 0 where nothing was ever written."""

    revision: int
    holder: str
    """Incarnation; empty where the last holder gave the lease back."""


class LeaseWritten(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Our write was taken, as `revision`."""

    revision: int


class LeaseRefused(msgspec.Struct, frozen=True, tag=True):
    """Our write was not taken: the register holds another revision than the one we named."""


class LeaseUnanswered(msgspec.Struct, frozen=True, tag=True):
    """Nobody answered; a write may have been taken all the same."""


class JournalRefused(msgspec.Struct, frozen=True, tag=True):
    """The journal has an entry of somebody later."""


class LeaseDue(msgspec.Struct, frozen=True, tag=True):
    """The deadline has passed."""


Fact = LeaseRead | LeaseWritten | LeaseRefused | LeaseUnanswered | JournalRefused | LeaseDue


class ReadLease(msgspec.Struct, frozen=True, tag=True):
    """Read the register."""


class WriteLease(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Write our name, if the register still holds `expected`."""

    expected: int


class TakeOver(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Replay the journal and begin, with this fencing token."""

    term: int


class StandDown(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Stop at once; this process acts no more."""

    reason: str


Request = ReadLease | WriteLease | TakeOver | StandDown
State = Literal["follower", "candidate", "holder", "fenced"]


@dataclass(slots=True)
class Lease:
    """One controller's side of it. At most one request is under way at a time."""

    me: str
    """Incarnation: no other process ever has the same."""
    times: LeaseTimes
    state: State = "follower"
    term: int = 0
    """Of a holder: the revision at which it became one."""
    revision: int = -1
    """The newest that is known; -1 before the first read."""
    seen_s: float = 0.0
    """When it was first known."""
    holder: str = ""
    unsure: bool = False
    """The newest request was not answered, or refused."""
    asked_s: float | None = None
    """When the request that is under way was sent."""
    due_s: float = 0.0
    """When the next one is."""
    until_s: float = 0.0
    """A holder may act before this."""

    def may_act(self, now: float) -> bool:
        """Return whether this process holds the lease at this moment."""
        return self.state == "holder" and now < self.until_s

    def next_deadline(self) -> float | None:
        """Return when `LeaseDue` is wanted; None where it never is."""
        if self.state == "fenced":
            return None
        due = [self.due_s] if self.asked_s is None else []
        if self.state == "holder":
            due.append(self.until_s)
        return min(due, default=None)

    def handle(self, now: float, fact: Fact) -> list[Request]:
        """Return what to do about `fact`."""
        if self.state == "fenced":
            return []
        asked_s, answered = self.asked_s, not isinstance(fact, LeaseDue | JournalRefused)
        if answered:
            self.asked_s = None
        if self.state == "holder" and now >= self.until_s:
            return self._stand_down("the lease was not renewed in time")
        match fact:
            case JournalRefused():
                return self._stand_down("the journal has an entry of a later controller")
            case LeaseDue():
                return self._ask(now) if self.asked_s is None and now >= self.due_s else []
            case LeaseWritten(revision=revision):
                assert asked_s is not None
                return self._note_written(now, asked_s, revision)
            case LeaseRead():
                return self._note_read(now, fact)
            case LeaseRefused() | LeaseUnanswered():
                # What the register holds has to be read before anything else is written. If it is
                # what it was, nobody has written meanwhile: its age goes on.
                self.unsure = True
                self.state = self._or_holder("follower")
                self.due_s = now if isinstance(fact, LeaseRefused) else now + self.times.renew_s / 4
                return self._ask(now) if now >= self.due_s else []
            case _:
                assert_never(fact)

    def _ask(self, now: float) -> list[Request]:
        self.asked_s = now
        if self.state == "holder" and not self.unsure:
            return [WriteLease(expected=self.revision)]
        return [ReadLease()]

    def _note_written(self, now: float, asked_s: float, revision: int) -> list[Request]:
        self._see(now, revision, self.me)
        self.until_s = asked_s + self.times.ttl_s
        self.due_s = asked_s + self.times.renew_s
        if self.state == "holder":
            return []
        if now >= self.until_s:  # Too late to be used; ours all the same, so once more at once.
            self.state, self.asked_s = "follower", now
            return [WriteLease(expected=revision)]
        self.state, self.term = "holder", revision
        return [TakeOver(term=revision)]

    def _note_read(self, now: float, read: LeaseRead) -> list[Request]:
        if self.state == "holder" and read.holder != self.me:
            return self._stand_down(f"{read.holder or 'nobody'} holds the lease")
        self._see(now, read.revision, read.holder)
        if self.state == "holder" or self._is_free(now):
            self.state = self._or_holder("candidate")
            self.asked_s = now
            return [WriteLease(expected=self.revision)]
        self.state = "follower"
        self.due_s = now + self.times.renew_s
        return []

    def _or_holder(self, state: State) -> State:
        return "holder" if self.state == "holder" else state

    def _see(self, now: float, revision: int, holder: str) -> None:
        """A read that is behind an earlier one proves nothing: its age starts anew."""
        self.unsure = False
        if revision != self.revision or holder != self.holder:
            self.revision, self.seen_s, self.holder = revision, now, holder

    def _is_free(self, now: float) -> bool:
        """Return whether no holder can be acting any more."""
        if self.holder in ("", self.me):
            return True
        return now - self.seen_s >= self.times.ttl_s + self.times.margin_s

    def _stand_down(self, reason: str) -> list[Request]:
        self.state, self.asked_s = "fenced", None
        return [StandDown(reason=reason)]
