"""Settings of a torchft job: whatever dies, joins or comes late, groups in a step are alike.

Controller and ranks are the real ones; torchft is played: who is in a quorum makes a step
together, a newcomer heals from a member at some moment of that step, though the step may fail,
and every message takes its time, the answer of the lighthouse too.
"""

import random
from collections import deque
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.unit.control.groups_lab import Lab

from perdure.model.events import BoundaryAnswered, QuorumFormed
from perdure.model.orders import AnyAction, AssignNodes, SendBoundary
from perdure.model.steering import Pace, Steering
from perdure.worker.torchft.settings import STATE_KEY, ReplicaConfig

GROUPS = 4
VALUES = (0.1, 0.2, 0.3, 0.4)


class Rank:
    """One life of a group of one."""

    def __init__(self, world: "World", group: int, generation: int, steering: Steering) -> None:
        self.world, self.group, self.generation = world, group, generation
        self.step, self.quorum, self.fresh = 0, -1, True
        self.ready = False
        """It asks for a quorum."""
        self.healed: Any = None
        self.states: dict[str, Any] = {}
        self.settings = ReplicaConfig()
        self.settings.join(
            rank=group, generation=generation, nproc=1, emit=world.out[group].append,
            now=lambda: 0.0, quorum_id=lambda: self.quorum,
            steering=steering,
        )  # fmt: skip
        self.settings.config.declare("lr", float, default=VALUES[0], min=0)

    def current_step(self) -> int:
        return self.step

    def register_state_dict_fn(self, key: str, load: Any, save: Any) -> None:
        self.states[key] = (load, save)

    @property
    def blocked(self) -> bool:
        gate = self.settings._executor.gate
        assert gate is not None
        return any(not done and agreed.step <= self.step for agreed, done in gate.promises())

    def ask(self) -> None:
        known = self.group not in self.world.unlearned
        if not self.ready and not self.blocked and known:
            self.settings.begin_step(self, committed=not self.fresh)
            self.ready = True


class World:
    def __init__(self, chance: random.Random) -> None:
        self.chance, self.lab, self.quorum, self.changes = chance, Lab(spares=1), 5, 0
        self.out = [deque[Any]() for _ in range(GROUPS)]
        """From the ranks to the controller."""
        self.orders = [deque[SendBoundary]() for _ in range(GROUPS)]
        self.formed = deque[QuorumFormed]()
        self.ranks = [Rank(self, g, g, Steering()) for g in range(GROUPS)]
        self.members: list[int] = []
        """Of the step that is being made."""
        self.last: list[int] = []
        self.sources: dict[int, int] = {}
        self.unlearned: dict[int, int] = {}
        """Rank -> the quorum that it is in, and does not know of."""
        self.held = {3}
        self.seen: dict[int, dict[int, float]] = {}
        self.answers = 0

    def do(self, actions: list[AnyAction]) -> None:
        for action in actions:
            if isinstance(action, SendBoundary):
                self.orders[action.ranks[0]].append(action)
            elif isinstance(action, AssignNodes) and action.assignment.phase == "run":
                group = action.nodes[0]
                steering = action.assignment.steering
                self.ranks[group] = Rank(self, group, self.lab.generation(group), steering)

    # --- what may happen ----------------------------------------------------------------------

    def hear(self) -> None:
        """The controller gets one message."""
        queues = [q for q in [*self.out, self.formed] if q]
        if not queues:
            return
        event = self.chance.choice(queues).popleft()
        self.do(self.lab.add(event))

    def tell(self) -> None:
        """A rank gets one order."""
        queues = [q for q in self.orders if q]
        if queues:
            order = self.chance.choice(queues).popleft()
            rank = self.ranks[order.ranks[0]]
            if rank.generation == order.generation:
                rank.settings.take(order)

    def form(self) -> None:
        if self.members:
            return
        joining = [r for r in self.ranks if r.group not in self.held and r.group not in self.last]
        for rank in [self.ranks[g] for g in self.last]:
            rank.ask()
        for rank in joining:
            if self.chance.random() < 0.5:
                rank.ask()
        asking = [r for r in self.ranks if r.ready and r.group not in self.held]
        if not asking or any(not self.ranks[g].ready for g in self.last):
            return
        believed = [r for r in asking if r.group in self.last] or asking
        top = max(r.step for r in believed)
        self.members = [r.group for r in asking]
        if self.members != self.last:
            self.quorum += 1
            names = tuple(self.lab.name(g) for g in self.members)
            self.formed.append(QuorumFormed(quorum_id=self.quorum, step=top, members=names))
        source = self.chance.choice([r.group for r in believed if r.step == top])
        for rank in asking:
            self.unlearned[rank.group], rank.ready = self.quorum, False
            heals = rank not in believed or rank.step < top or (top == 0 and rank.group != source)
            if heals and rank.group != source:
                self.sources[rank.group] = source

    def learn(self) -> None:
        """A rank gets the lighthouse's answer."""
        if self.unlearned:
            group = self.chance.choice(sorted(self.unlearned))
            self.ranks[group].quorum = self.unlearned.pop(group)

    def hand_over(self) -> None:
        """A source makes the state for one who heals: at some moment of its step."""
        for group, source in list(self.sources.items()):
            rank = self.ranks[group]
            known = source not in self.unlearned and group not in self.unlearned
            if rank.healed is None and known and self.chance.random() < 0.5:
                peer = self.ranks[source]
                rank.healed = (peer.step, peer.states[STATE_KEY][1]())
                del self.sources[group]

    def commit(self) -> None:
        if not self.members or self.sources or self.unlearned:
            return
        self.heal()
        for rank in [self.ranks[g] for g in self.members]:
            self.seen.setdefault(rank.step, {})[rank.group] = rank.settings.config.lr
        steps = {self.ranks[g].step for g in self.members}
        assert len(steps) == 1
        values = {self.ranks[g].settings.config.lr for g in self.members}
        assert len(values) == 1, f"step {steps}: {self.seen[steps.pop()]}"
        for rank in [self.ranks[g] for g in self.members]:
            rank.step, rank.fresh = rank.step + 1, False
        self.last, self.members = self.members, []

    def heal(self) -> None:
        for rank in self.ranks:
            if rank.healed is not None:
                step, state = rank.healed
                rank.states[STATE_KEY][0](state)
                rank.step, rank.healed = step, None

    def die(self) -> None:
        alive = [g for g in self.members or self.last if g not in self.held]
        if len(alive) < 2 or (self.members and len(self.members) < 2):
            return
        group, top = self.chance.choice(alive), max(self.ranks[g].step for g in alive)
        if all(self.ranks[g].step < top for g in alive if g != group):
            return  # Nobody else has the state.
        self.heal()  # The step is made again, but who has the state has it.
        self.last = [g for g in self.members or self.last if g != group]
        self.members, self.sources = [], {}
        self.unlearned.pop(group, None)
        self.orders[group].clear()
        self.out[group].clear()
        self.held = {group}  # The spare stands in, and the dead one becomes the spare.
        self.do(self.lab.exit(group, signal=9))
        self.do(self.lab.start(group))
        self.do(self.lab.see(group))

    def change(self) -> None:
        self.changes += 1
        value = self.chance.choice(VALUES)
        step = max(rank.step for rank in self.ranks) + self.chance.choice((-3, 0, 1, 40))
        step_s = self.chance.choice((0.001, 0.01, 5.0))
        told = Pace(generation=-1, step=max(0, step), at_s=self.lab.now, step_s=step_s)
        pace = self.chance.choice((None, told, told))
        self.lab.ask("set", id_=f"s{self.changes}", changes={"lr": value}, pace=pace)
        self.do(self.lab.actions)


def play(seed: int, moves: int, world: World | None = None) -> World:
    world = world or World(random.Random(seed))
    kinds = [world.hear] * 4 + [world.tell] * 4 + [world.learn] * 4
    kinds += [world.form, world.hand_over, world.commit] * 3
    for _ in range(moves):
        world.chance.choice(kinds)()
        if world.chance.random() < 0.02:
            world.die()
        if world.chance.random() < 0.02:
            world.change()
    return world


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(min_value=0, max_value=2**32))
def test_no_two_groups_make_a_step_with_different_settings(seed: int) -> None:
    play(seed, 400)


def test_the_play_is_not_empty() -> None:
    """Changes come into force in it, with deaths and healing in between."""
    worlds = [play(seed, 3000) for seed in range(3)]
    assert all(max(world.seen) > 5 for world in worlds)
    values = [{v for row in world.seen.values() for v in row.values()} for world in worlds]
    assert any(len(found) > 2 for found in values)
    assert any(len(world.lab.machine.state.steering.changes) > 2 for world in worlds)
    assert any(world.lab.generation(0) > 3 for world in worlds)


def test_the_play_sees_a_wrong_agreement() -> None:
    """Were promises believed whatever quorum they were made in, groups would differ."""
    seed = 2942  # One in which it shows; when the play is changed, look for another.
    world = World(random.Random(seed))
    real = world.lab.add

    def add(event: Any) -> list[AnyAction]:
        if isinstance(event, BoundaryAnswered):
            event = msgspec.structs.replace(event, quorum_id=-1)
        return real(event)

    world.lab.add = add  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="step"):
        play(seed, 600, world)
