"""Ranks never part over a decision, whichever ranks hear it and whichever reach the cells.

The gates are the real ones, in one thread and a played time. The controller dies and returns at any
moment. Each of its messages may be lost. Each question to the cells may fail, before or after it
took effect. The world may move to another store in between.
"""

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.model.errors import ProtocolError
from perdure.model.events import BoundaryAnswered, BoundaryReached
from perdure.model.orders import SendBoundary
from perdure.worker.steering.boundary import DROP_S, BoundaryGate
from perdure.worker.steering.cells import Away, Cells

STEP, END, STORES = 2, 4, 3
ACTS = ("train", "look", "wait", "tell", "decide", "way")


class View:
    """One rank's way to the cells, which fails by chance."""

    def __init__(self, world: "World") -> None:
        self.world, self.loss, self.at = world, 0.0, 0
        self.store = world.stores[0]

    def open(self) -> str:
        self.store = self.world.stores[self.at]
        return self._do(lambda: f"store-{self.at}")

    def _do(self, act: Any) -> Any:
        if self.world.random.random() < self.loss:
            raise Away
        done = act()
        if self.world.random.random() < self.loss:
            raise Away
        return done

    def settle(self, id_: str, fate: Any) -> Any:
        return self._do(lambda: self.store.settle(id_, fate))

    def read(self, id_: str) -> Any:
        return self._do(lambda: self.store.read(id_))

    def vote(self, id_: str, rank: int, voters: Any) -> Any:
        return self._do(lambda: self.store.vote(id_, rank, voters))

    def ask(self, id_: str) -> None:
        self._do(lambda: self.store.ask(id_))

    def asked(self) -> Any:
        return self._do(lambda: self.store.asked())


class World:
    """All ranks, what the controller has decided, and what they have done."""

    def __init__(self, random: Random, size: int, kind: Any, orphan_s: float = 1e9) -> None:
        self.random, self.size, self.kind, self.now = random, size, kind, 0.0
        self.stores = [Cells() for _ in range(STORES)]
        self.cells = [View(self) for _ in range(size)]
        self.said: list[list[Any]] = [[] for _ in range(size)]
        self.gates = [
            BoundaryGate(
                rank=rank, emit=self.said[rank].append, ask=lambda id_: None,
                now=lambda: self.now, cells=self.cells[rank], orphan_s=orphan_s,
            )
            for rank in range(size)
        ]  # fmt: skip
        self.weights = [2.0, 2.0, *(random.random() ** 2 for _ in ACTS[2:])]
        self.steps = [0] * size
        self.decided = ""
        self.did: set[int] = set()
        """Ranks that have carried it out."""
        self.passed: set[int] = set()
        """Ranks that have passed its step."""
        self.given_up: set[int] = set()

    def tell(self, rank: int, move: Any) -> None:
        """Let one message of the controller reach a rank."""
        self.gates[rank].handle(
            SendBoundary(
                id="b1.1", move=move, kind=self.kind, step=STEP,
                ranks=tuple(range(self.size)), generation=0, reason="test",
            )
        )  # fmt: skip

    def decide(self) -> None:
        """Let the controller decide once it has heard enough."""
        told = [one for said in self.said for one in said]
        if any(isinstance(one, BoundaryReached) and one.dropped for one in told):
            self.decided = "abort"  # What the ranks did is the truth.
        elif not self.decided:
            answers = [o for o in told if isinstance(o, BoundaryAnswered) and not o.planned]
            vetoed = any(not answer.ok for answer in answers)
            if len({one.rank for one in answers if one.ok}) == self.size:
                self.decided = "commit"
            elif vetoed or self.random.random() < 0.1:
                self.decided = "abort"

    def train(self, rank: int) -> None:
        """Let a rank make a step, which it makes with all others, unless it waits at the gate."""
        gate, step = self.gates[rank], self.steps[rank]
        if rank in self.given_up:
            return
        if gate.advance(step):
            try:
                due = gate.poll(step)
            except ProtocolError:
                self.given_up.add(rank)
                return
            if due is None:
                return
            if due:
                assert step == STEP
                self.did.add(rank)
                gate.drop_hold("b1.1")
        if step < END and min(self.steps) >= step:
            self.steps[rank] = step + 1
            if step == STEP:
                self.passed.add(rank)
        self.check()

    def check(self) -> None:
        """No rank goes on without what another one has done."""
        assert not self.did or not self.passed - self.did, (self.did, self.passed)

    def act(self, plane: bool) -> None:
        """Let something happen; the controller is there if `plane`."""
        random, rank = self.random, self.random.randrange(self.size)
        (what,) = random.choices(ACTS, self.weights)
        if what == "train":
            self.train(rank)
        elif what == "look":
            self.gates[rank].look()
        elif what == "wait":
            self.now += random.choice((0.3, 1.0, DROP_S))
        elif what == "way":
            cells = self.cells[rank]
            cells.loss = random.choice((0.0, 0.0, 0.3, 1.0))
            cells.at = min(STORES - 1, cells.at + (random.random() < 0.1))
        elif plane and what == "tell":
            self.tell(rank, self.decided or "prepare")
        elif plane and what == "decide":
            self.decide()

    def play(self, *, returns: bool) -> None:
        """Let anything happen, then let the controller return or not."""
        random, plane = self.random, True
        for rank in range(self.size):
            if random.random() < 0.95:
                self.tell(rank, "prepare")
        for _ in range(random.randrange(150)):
            plane = random.random() < 0.5 if random.random() < 0.1 else plane
            self.act(plane)
        self.settle(plane=returns)

    def settle(self, plane: bool) -> None:
        """Let all ranks reach the newest store, and time pass."""
        at = max(cells.at for cells in self.cells)
        for cells in self.cells:
            cells.loss, cells.at = 0.0, at
        for _ in range(20 * END):
            self.now += DROP_S / 3
            for rank in self.random.sample(range(self.size), self.size):
                if plane:
                    self.decide()
                    if self.decided:
                        self.tell(rank, self.decided)
                self.train(rank)
                self.gates[rank].look()


@settings(max_examples=400)
@given(st.integers(0, 1 << 32), st.integers(2, 4), st.booleans())
def test_ranks_never_part_and_none_waits_for_ever(seed: int, size: int, returns: bool) -> None:
    random = Random(seed)
    world = World(random, size, random.choice(("set", "checkpoint", "stop", "pause", "drain")))
    world.play(returns=returns)
    assert world.steps == [END] * size, "a rank waits for ever"
    assert world.did in (set(), set(range(size)))


@pytest.mark.parametrize("heard", range(1, 8))
@pytest.mark.parametrize("reach", range(8))
@pytest.mark.parametrize("returns", [None, 0.5 * DROP_S, 2 * DROP_S])
def test_any_ranks_hear_the_commit_and_any_reach_the_cells(
    heard: int, reach: int, returns: float | None
) -> None:
    """All cases of three ranks that have promised, and a controller that returns, or never."""
    world = World(Random(1), 3, "set", orphan_s=1800.0)
    for rank in range(3):
        world.tell(rank, "prepare")
    world.decide()
    assert world.decided == "commit"
    for rank in range(3):
        if heard >> rank & 1:
            world.tell(rank, "commit")
        world.cells[rank].loss = float(not reach >> rank & 1)
    for _ in range(400):
        world.now += 5.0
        for rank in range(3):
            if returns and world.now >= returns:
                world.tell(rank, world.decided)
            world.train(rank)
            world.gates[rank].look()
            world.decide()
    deaf = {rank for rank in range(3) if not heard >> rank & 1}
    unreached = {rank for rank in deaf if not reach >> rank & 1}
    if not deaf or returns or (heard & reach and not unreached):
        assert world.did == {0, 1, 2}, "all of them apply it"
    else:  # Ranks that have heard nothing end, and the world starts again.
        assert world.given_up
        assert world.given_up <= deaf
        assert not world.passed - world.did
