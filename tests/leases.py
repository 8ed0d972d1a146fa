"""A world of controllers with a lease: delays, losses, cuts, pauses, kills, clocks of unlike rates.

Nothing here is real but `control/lease.py` and the rules of `docs/failover.md`: a register and a
journal that can compare and swap, and an agent that knows the newest term.
"""

import heapq
import random
from collections.abc import Callable
from itertools import count

from perdure.control.lease import (
    Fact,
    JournalRefused,
    Lease,
    LeaseDue,
    LeaseRead,
    LeaseRefused,
    LeaseTimes,
    LeaseUnanswered,
    LeaseWritten,
    ReadLease,
    StandDown,
    TakeOver,
    WriteLease,
)

TIMES = LeaseTimes()
RATE = 0.03
"""Clocks run up to this much too fast or too slow."""
TIMEOUT_S = 0.5
FAULTS_S, QUIET_S = 30.0, 8.0


class World:
    """Virtual time, one register, one journal, one agent."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.number = count()
        self.revision, self.holder = 0, ""
        self.journal: list[tuple[int, str]] = []
        """(term, incarnation) of each entry."""
        self.obeyed: list[int] = []
        """Terms of the orders that the agent has carried out."""
        self.floor = 0
        """The newest term that the agent knows."""
        self.processes: list[Process] = []
        self.born = count()

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + delay_s, next(self.number), call))

    def run(self, until_s: float) -> None:
        while self.events and self.events[0][0] <= until_s:
            self.now, _, call = heapq.heappop(self.events)
            call()
            acting = [p.lease.me for p in self.processes if p.may_act()]
            assert len(acting) <= 1, f"{acting} act at {self.now:.3f}"
        self.now = until_s

    def is_quiet(self) -> bool:
        return self.now > FAULTS_S

    def trip(self) -> float | None:
        """Return how long a message travels; None where it is lost."""
        if self.is_quiet():
            return self.random.uniform(0.0005, 0.02)
        if self.random.random() < 0.05:
            return None
        late = self.random.random() < 0.05
        return self.random.uniform(0.2, 4.0) if late else self.random.uniform(0.0005, 0.1)

    def obey(self, term: int) -> None:
        """Take an order at the agent."""
        if term >= self.floor:
            assert any(entry[0] == term for entry in self.journal)
            self.floor = term
            self.obeyed.append(term)


class Process:
    """One controller's process."""

    def __init__(self, world: World, slot: int) -> None:
        self.world, self.slot = world, slot
        self.lease = Lease(me=f"c{slot}-{next(world.born)}", times=TIMES)
        self.offset = world.random.uniform(0, 1e6)
        self.rate = world.random.uniform(1 - RATE, 1 + RATE)
        self.alive, self.cut, self.paused_until = True, False, 0.0
        self.asked, self.ends_at = 0, 0
        world.after(world.random.uniform(0, 0.5), self.tick)
        world.after(world.random.uniform(0, 0.1), self.act)

    def clock(self) -> float:
        return self.offset + self.rate * self.world.now

    def may_act(self) -> bool:
        return self.alive and self.lease.may_act(self.clock())

    def is_paused(self) -> bool:
        return self.world.now < self.paused_until

    def take(self, fact: Fact) -> None:
        if not self.alive:
            return
        if self.is_paused():
            self.world.after(self.paused_until - self.world.now, lambda: self.take(fact))
            return
        for request in self.lease.handle(self.clock(), fact):
            match request:
                case ReadLease():
                    self.ask_read()
                case WriteLease(expected=expected):
                    self.ask_write(expected)
                case TakeOver(term=term):
                    self.take_over(term)
                case StandDown():
                    self.die()

    def ask_read(self) -> None:
        world = self.world
        self.ask(lambda: LeaseRead(revision=world.revision, holder=world.holder))

    def ask_write(self, expected: int) -> None:
        self.ask(lambda: self.write(expected))

    def write(self, expected: int) -> Fact:
        world = self.world
        if world.revision != expected:
            return LeaseRefused()
        world.revision, world.holder = world.revision + 1, self.lease.me
        return LeaseWritten(revision=world.revision)

    def ask(self, apply: Callable[[], Fact]) -> None:
        """Send a request: it is applied after one trip, answered after another, or never."""
        self.asked += 1
        number = self.asked
        there, back = self.world.trip(), self.world.trip()

        def answer(fact: Fact) -> None:
            if number == self.asked and not self.cut:
                self.asked += 1
                self.take(fact)

        def arrive() -> None:
            if not self.cut:
                fact = apply()
                if back is not None:
                    self.world.after(back, lambda: answer(fact))

        if there is not None:
            self.world.after(there, arrive)
        self.world.after(TIMEOUT_S, lambda: self.give_up(number))

    def give_up(self, number: int) -> None:
        if number == self.asked:
            self.asked += 1
            self.take(LeaseUnanswered())

    def take_over(self, term: int) -> None:
        """Replay, and append `ControllerStarted`: unless somebody later was there."""
        journal = self.world.journal
        if journal and journal[-1][0] >= term:
            self.take(JournalRefused())
            return
        journal.append((term, self.lease.me))
        self.ends_at = len(journal)

    def act(self) -> None:
        """Decide something: into the journal, and then to the agent, perhaps much later."""
        world = self.world
        if not self.alive:
            return
        if self.may_act() and not self.is_paused() and not self.cut:
            self.append(self.lease.term)
        elif self.alive and self.lease.term and self.is_paused() and world.random.random() < 0.3:
            self.append(self.lease.term)  # Looked at the lease, was stopped, goes on: too late.
        world.after(world.random.uniform(0.01, 0.3), self.act)

    def append(self, term: int) -> None:
        journal = self.world.journal
        if self.ends_at != len(journal):
            self.take(JournalRefused())
            return
        journal.append((term, self.lease.me))
        self.ends_at = len(journal)
        trip = self.world.trip()
        if trip is not None:
            self.world.after(trip, lambda: self.world.obey(term))

    def tick(self) -> None:
        if not self.alive:
            return
        if not self.is_paused():
            deadline = self.lease.next_deadline()
            if deadline is not None and deadline <= self.clock():
                self.take(LeaseDue())
        self.world.after(0.02, self.tick)

    def die(self) -> None:
        """End; the host starts another one, with another name."""
        if self.alive:
            self.alive = False
            world, slot = self.world, self.slot
            world.processes.remove(self)
            delay_s = 0.5 if world.is_quiet() else world.random.uniform(0.1, 5.0)
            world.after(delay_s, lambda: world.processes.append(type(self)(world, slot)))

    def disturb(self) -> None:
        match self.world.random.choice("kpc."):
            case "k":
                self.die()
            case "p":
                self.paused_until = self.world.now + self.world.random.uniform(0.1, 5.0)
            case "c":
                self.cut = True
                self.world.after(self.world.random.uniform(0.1, 8.0), self.mend)

    def mend(self) -> None:
        self.cut = False


def simulate(world: World, count: int, kind: type[Process] = Process) -> World:
    world.processes = [kind(world, slot) for slot in range(count)]

    def disturb() -> None:
        if world.processes:
            world.random.choice(world.processes).disturb()
        if not world.is_quiet():
            world.after(world.random.uniform(0.1, 3.0), disturb)

    world.after(3.0, disturb)
    world.run(FAULTS_S)
    for process in world.processes:
        process.mend()
    world.run(FAULTS_S + QUIET_S)
    return world


def check(world: World) -> None:
    terms = [term for term, _ in world.journal]
    assert terms == sorted(terms)
    assert all(len({who for t, who in world.journal if t == term}) == 1 for term in set(terms))
    assert world.obeyed == sorted(world.obeyed)
    assert any(process.may_act() for process in world.processes)
