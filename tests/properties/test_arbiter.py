"""Two controllers and a shared folder, under calls that are late, lost, given up and still made.

Real are `control/lease.py` and what `adapters/shared_folder.py` makes of numbers that can be
claimed; the folder is a model of one, whose looks may be of some time ago, as over NFS.
"""

from collections.abc import Callable, Coroutine, Generator, Iterable
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.leases import FAULTS_S, TIMEOUT_S, Process, World, check, simulate

from perdure.adapters.shared_folder import FolderLease, FolderStream
from perdure.control.lease import JournalRefused, LeaseRead, LeaseRefused, LeaseUnanswered
from perdure.control.lease import LeaseWritten as Written
from perdure.model.errors import FencedError, PlatformError

KEPT = 3
"""Revisions: few enough for late calls to find their number free again."""
STALE_S = 3.0


class Shelf:
    """A folder's numbers, and what they were at each moment."""

    def __init__(self, world: "Site") -> None:
        self.world = world
        self.held: dict[int, bytes] = {}
        self.past: list[tuple[float, list[int]]] = [(0.0, [])]

    def note(self) -> None:
        self.past.append((self.world.now, sorted(self.held)))

    def look(self, since_s: float) -> list[int]:
        """Return the numbers as of now, or of some time not before `since_s`."""
        world = self.world
        if world.is_quiet() or world.random.random() < 0.8:
            return sorted(self.held)
        at_s = max(since_s, world.now - world.random.uniform(0, STALE_S))
        return next(numbers for time_s, numbers in reversed(self.past) if time_s <= at_s)


class Site(World):
    """The two folders, and the world around them."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.lease, self.lines = Shelf(self), Shelf(self)
        self.gone = False
        """Whether the file system is away."""


@dataclass
class Call:
    """Awaited by code under test; the process that drives it makes the call."""

    function: Callable[[], Any]

    def __await__(self) -> Generator["Call", Any, Any]:
        return (yield self)


@dataclass
class View:
    """`Numbers` as one process has them."""

    shelf: Shelf
    changed_s: float = 0.0
    """Its own newest change: no look of its own is older."""

    async def claim(self, number: int, data: bytes) -> bool:
        return bool(await Call(lambda: self.claim_now(number, data)))

    def claim_now(self, number: int, data: bytes) -> bool:
        if self.shelf.held.setdefault(number, data) != data:
            return False
        self.change()
        if self.shelf is self.shelf.world.lines and data.startswith(b"t"):
            term, who = data.decode().split("\n")[1].split()
            if len(self.shelf.world.journal) < number:
                self.shelf.world.journal.append((int(term), who))
        return True

    def change(self) -> None:
        self.changed_s = self.shelf.world.now
        self.shelf.note()

    async def list_taken(self) -> list[int]:
        return list(await Call(lambda: self.shelf.look(self.changed_s)))

    async def read(self, numbers: Iterable[int]) -> list[bytes]:
        wanted = list(numbers)
        found = await Call(lambda: [self.shelf.held.get(number) for number in wanted])
        if None in found:
            raise PlatformError("no such file")
        return list(found)

    async def drop(self, numbers: Iterable[int]) -> None:
        wanted = list(numbers)

        def drop_now() -> None:
            for number in wanted:
                self.shelf.held.pop(number, None)
            self.change()

        await Call(drop_now)


class Controller(Process):
    """One that has its lease and its journal in the folders."""

    def __init__(self, world: Site, slot: int) -> None:
        super().__init__(world, slot)
        self.site = world
        self.register = FolderLease(View(world.lease), kept=KEPT)
        self.stream = FolderStream(View(world.lines))
        self.writing, self.number = False, 0

    def drive(self, work: Coroutine[Any, Any, Any], done: Callable[[Any], None]) -> None:
        """Make the calls of `work`; hand over what it returns, or the PlatformError it raises."""

        def step(value: Any = None, error: PlatformError | None = None) -> None:
            if self.is_paused():
                self.world.after(self.paused_until - self.world.now, lambda: step(value, error))
                return
            if not self.alive:
                work.close()
                return
            try:
                call = work.send(value) if error is None else work.throw(error)
            except StopIteration as stop:
                done(stop.value)
            except (PlatformError, FencedError) as raised:
                done(raised)
            else:
                self.make(call, step)

        step()

    def make(self, call: Call, step: Callable[..., None]) -> None:
        """Have a call made after one trip and answered after another; or give it up meanwhile."""
        open_ = [True]
        there, back = self.world.trip(), self.world.trip()

        def settle(value: Any, error: PlatformError | None = None) -> None:
            if open_.pop() if open_ else False:
                step(value, error)

        def arrive() -> None:
            if self.cut or self.site.gone:
                self.world.after(0.5, arrive)  # Kept until there is a way, given up or not.
                return
            value = call.function()
            if back is not None:
                self.world.after(back, lambda: settle(value))

        if there is not None:
            self.world.after(there, arrive)
        self.world.after(TIMEOUT_S, lambda: settle(None, PlatformError("no answer")))

    def ask_read(self) -> None:
        def note(answer: Any) -> None:
            if isinstance(answer, PlatformError):
                self.take(LeaseUnanswered())
            else:
                self.take(LeaseRead(revision=answer[0], holder=answer[1]))

        self.drive(self.register.read(), note)

    def ask_write(self, expected: int) -> None:
        def note(answer: Any) -> None:
            if isinstance(answer, PlatformError):
                self.take(LeaseUnanswered())
            else:
                self.take(LeaseRefused() if answer is None else Written(revision=answer))

        self.drive(self.register.write(self.lease.me, expected), note)

    def take_over(self, term: int) -> None:
        def begin(lines: Any) -> None:
            if isinstance(lines, PlatformError):
                self.die()
            elif lines and int(lines[-1].split()[0]) >= term:
                self.take(JournalRefused())
            else:
                self.ends_at = len(lines)
                self.append(term)

        self.writing = True
        self.drive(self.stream.read_all(), begin)

    def act(self) -> None:
        if not self.writing:
            super().act()
        elif self.alive:
            self.world.after(self.world.random.uniform(0.01, 0.3), self.act)

    def append(self, term: int) -> None:
        """Repeat an append until it is taken or refused; then send the order."""
        self.writing, self.number = True, self.number + 1
        id_, line = f"t{self.lease.me}-{self.number}", f"{term} {self.lease.me}".encode()
        expected = self.ends_at

        def note(answer: Any) -> None:
            if isinstance(answer, FencedError):
                self.take(JournalRefused())
            elif isinstance(answer, PlatformError):
                insist()
            else:
                self.ends_at, self.writing = answer, False
                trip = self.world.trip()
                if trip is not None and self.lease.state != "fenced":
                    self.world.after(trip, lambda: self.world.obey(term))

        def insist() -> None:
            if self.alive:
                call = self.stream.append(line, expected_last=expected, message_id=id_)
                self.drive(call, note)

        insist()


@given(st.integers(min_value=0, max_value=2**32))
@settings(max_examples=examples(40), deadline=None)
def test_never_two_act_and_at_last_one_does(seed: int) -> None:
    world = Site(seed)
    check(simulate(world, 2, Controller))
    assert sorted(world.lines.held) == list(range(1, len(world.journal) + 1))
    assert len(world.lease.held) <= 2 * KEPT


@given(st.integers(min_value=0, max_value=2**32))
@settings(max_examples=10, deadline=None)
def test_nobody_acts_while_the_arbiter_is_away(seed: int) -> None:
    world = Site(seed)
    world.now = FAULTS_S + 1
    world.processes = [Controller(world, slot) for slot in range(2)]
    world.run(world.now + 4)
    assert any(process.may_act() for process in world.processes)
    known = list(world.journal)
    world.gone = True
    world.run(world.now + 2)
    for _ in range(100):
        world.run(world.now + 0.1)
        assert not any(process.may_act() for process in world.processes)
    assert world.journal == known
    world.gone = False
    world.run(world.now + 6)
    assert any(process.may_act() for process in world.processes)
    check(world)
