"""Replicas at one step have one state, whatever dies, falls silent, hangs or comes back.

The replicas are played as torchft's managers behave: they heal from those at the highest step of
the answer, take the step together, and any of them may fail to commit it.
"""

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.lighthouse import encode_request, make_member

from perdure.control.lighthouse.outputs import (
    Answered,
    Fenced,
    Formed,
    LeftOut,
    Output,
)
from perdure.control.lighthouse.patience import QuorumConfig
from perdure.control.lighthouse.quorum import Quorums
from perdure.model.bus.lighthouse import Member, parse_request
from perdure.model.orders import ReplicaGroup

GROUPS = 3
Step = tuple[int, int]
"""Quorum and step of the commit that a state came from."""


@dataclass
class Player:
    name: str
    group: int
    step: int = 0
    state: Step = (-1, -1)
    failures: int = 0
    token: int = -1
    training: int = -1
    """Quorum that it takes its step in; -1: none."""
    silent: bool = False

    @property
    def generation(self) -> int:
        return int(self.name.partition(":")[2])

    @property
    def store(self) -> str:
        return f"store:{self.group}:{self.generation}"


class World:
    def __init__(self) -> None:
        self.now, self.tokens, self.lives = 100.0, 0, GROUPS
        self.config = QuorumConfig(hung_s=1.0, startup_s=3.0, alone_s=8.0)
        self.machine = Quorums(self.config)
        self.players = {g: Player(f"t_{g}:{g}", g, state=(-1, g)) for g in range(GROUPS)}
        self.kept: Formed | None = None
        self.next_id = 1
        self.used: dict[int, tuple[str, ...]] = {}
        self.newest: tuple[str, ...] = ()
        self.asked: dict[int, tuple[Player, int, Step]] = {}
        self.regroup()

    def regroup(self) -> None:
        groups = tuple(
            ReplicaGroup(g, player.generation, player.store) for g, player in self.players.items()
        )
        self.take(self.machine.regroup(self.now, groups))

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            if isinstance(output, Formed):
                self.kept = output
                assert output.quorum_id not in self.used, "an id was used twice"
                self.used[output.quorum_id] = tuple(m.replica for m in output.members)
                self.next_id = max(self.next_id, output.quorum_id + 1)
            elif isinstance(output, Answered):
                self.answer(output)

    def answer(self, answered: Answered) -> None:
        members = {m.replica: m for m in answered.members}
        assert tuple(members) == self.used[answered.quorum_id]
        top = max(m.step for m in members.values())
        known = {p.name: (p, state) for p, _, state in self.asked.values()}
        kept = [p.step for p, _, _ in self.asked.values() if p.name in self.newest]
        assert top >= max(kept, default=0) or not set(self.newest) & set(members), "steps were lost"
        self.newest = tuple(members)
        sources = {known[n][1] for n, m in members.items() if m.step == top and n in known}
        for token in answered.tokens:
            player, _, _ = self.asked.pop(token, (None, 0, (0, 0)))
            if player is None or player.token != token:
                continue
            player.token, player.training = -1, answered.quorum_id
            if members[player.name].step != top or top == 0:
                assert sources
                player.step, player.state = top, min(sources)
        if top > 0:
            assert len(sources) <= 1, f"at step {top} of quorum {answered.quorum_id}: {sources}"

    def act(self, kind: int, group: int) -> None:
        player = self.players[group]
        match kind:
            case 0 if player.training < 0 and player.token < 0:
                self.tokens += 1
                player.token = self.tokens
                self.asked[self.tokens] = (player, player.step, player.state)
                member = make_member(
                    player.name, player.store, player.step, commit_failures=player.failures
                )
                if not player.silent:
                    self.take(self.machine.ask(self.now, self.tokens, member))
            case 1 if player.training >= 0:
                player.state, player.failures = (player.training, player.step), 0
                player.step, player.training = player.step + 1, -1
            case 2 if player.training >= 0:
                player.failures, player.training = player.failures + 1, -1
            case 3:
                self.replace(player)
                self.take(self.machine.evict(self.now, player.name, "died"))
                self.regroup()
            case 9:  # While there is no lighthouse to hear of it.
                self.replace(player)
                self.restart()
            case 4:
                player.silent = not player.silent
            case 5 | 6:
                self.wait(0.3 if kind == 5 else 1.2)
            case 7:
                self.restart()
            case 8 if player.training >= 0:
                quorum = player.training
                self.take(self.machine.wait(self.now, group, quorum, self.now - 0.6))
            case _:
                pass

    def replace(self, player: Player) -> None:
        """One dies, and another takes its place."""
        self.lives += 1
        fresh = Player(f"t_{player.group}:{self.lives}", player.group, state=(-1, self.lives))
        self.asked.pop(player.token, None)
        self.players[player.group] = fresh

    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 0.1
            for player in list(self.players.values()):
                if not player.silent:
                    self.take(self.machine.hear(self.now, player.name))
            self.take(self.machine.tick(self.now))

    def restart(self) -> None:
        """The lighthouse dies; the next one knows the last quorum, and everybody asks again."""
        waiting = [(t, p) for t, (p, _, _) in self.asked.items() if p.token == t]
        homes = self.machine.map_members()
        self.machine = Quorums(self.config)
        if self.kept is not None:
            members: tuple[Member, ...] = tuple(
                parse_request(encode_request(m)) for m in self.kept.members
            )
            self.machine.restore(self.now + 1.0, self.kept.quorum_id, members, homes)
        self.next_id += 1000
        self.machine.next_id = self.next_id
        self.regroup()
        for token, player in waiting:
            member = make_member(
                player.name, player.store, player.step, commit_failures=player.failures
            )
            if not player.silent:
                self.take(self.machine.ask(self.now, token, member))


ACTS = st.lists(
    st.tuples(st.sampled_from([0, 0, 0, 0, 1, 1, 1, 2, 3, 4, 5, 6, 7, 8, 9]), st.integers(0, 2)),
    max_size=120,
)

ASK = [(0, 0), (0, 1), (0, 2)]
ROUND = [*ASK, (1, 0), (1, 1), (1, 2)]


@settings(max_examples=examples(60), deadline=None)
@given(ACTS)
@example(
    [
        *ROUND,
        *ASK,
        (1, 0),
        (2, 1),
        (2, 2),
        (4, 0),
        (6, 0),
        (0, 1),
        (0, 2),
        (1, 1),
        (1, 2),
        (4, 1),
        (4, 2),
        (6, 0),
        (4, 0),
        (4, 1),
        (4, 2),
        (5, 0),
        *ASK,
    ]
)
@example(
    [
        *ROUND,
        *ROUND,
        *ASK,
        (1, 0),
        (1, 1),
        (3, 2),
        (4, 0),
        (4, 1),
        (6, 0),
        (4, 0),
        (4, 1),
        (0, 2),
        (0, 0),
        (0, 1),
        (6, 0),
    ]
)
def test_replicas_at_one_step_have_one_state(acts: list[tuple[int, int]]) -> None:
    world = World()
    for kind, group in acts:
        world.act(kind, group)


@settings(max_examples=examples(40), deadline=None)
@given(ACTS)
def test_training_goes_on_once_all_is_well(acts: list[tuple[int, int]]) -> None:
    world = World()
    for kind, group in acts:
        world.act(kind, group)
    for player in world.players.values():
        player.silent = False
    world.restart()
    for _ in range(30):
        for group in range(GROUPS):
            world.act(2, group)
            world.act(0, group)
        world.wait(1.0)
    states = {player.training for player in world.players.values()}
    assert len(states) == 1
    assert states != {-1}


class Pausing:
    """Healthy groups under the default patience: each makes steps and pauses, none dies."""

    def __init__(self) -> None:
        self.now, self.tokens = 100.0, 0
        self.machine = Quorums(QuorumConfig())
        self.out: list[Output] = []
        self.done = [0] * GROUPS
        """Committed steps."""
        self.asks = [False] * GROUPS
        groups = tuple(ReplicaGroup(g, g, f"store:{g}") for g in range(GROUPS))
        self.take(self.machine.regroup(self.now, groups))
        for _ in range(4):  # The first steps are given more time than later ones.
            self.step({})

    def take(self, outputs: list[Output]) -> None:
        self.out += outputs

    def step(self, pauses: dict[int, tuple[float, bool, bool]]) -> None:
        """Make one step; `pauses` are seconds, whether in a collective, whether declared."""
        arrive_s = {g: self.now + pauses.get(g, (0.0, False, False))[0] for g in range(GROUPS)}
        inside = {g for g, (_, within, _) in pauses.items() if within}
        for group in sorted(inside):
            self.ask(group)
        waiting: set[int] = set()
        while len(self.done) != sum(self.asks) or any(arrive_s[g] > self.now for g in inside):
            for group in range(GROUPS):
                pause = pauses.get(group, (0.0, False, False))
                until_s = arrive_s[group] if pause[2] and arrive_s[group] > self.now else 0.0
                if self.now % 0.2 < 0.1:
                    self.take(
                        self.machine.note_process(
                            self.now, group, stopped=False, busy_until_s=until_s
                        )
                    )
                if not self.asks[group] and self.now >= arrive_s[group]:
                    self.ask(group)
            if all(self.asks) and inside:  # The quorum is there, and those inside do not come.
                for group in set(range(GROUPS)) - inside - waiting:
                    waiting.add(group)
                    self.take(self.machine.wait(self.now, group, 1, self.now, timeout_s=60.0))
            self.now = round(self.now + 0.1, 3)
            for group in range(GROUPS):
                self.take(self.machine.hear(self.now, f"t_{group}"))
            self.take(self.machine.tick(self.now))
        for group in sorted(waiting):
            self.take(self.machine.wait(self.now, group, 1, self.now, over=True))
        self.asks = [False] * GROUPS
        self.done = [step + 1 for step in self.done]

    def ask(self, group: int) -> None:
        self.tokens += 1
        self.asks[group] = True
        member = make_member(f"t_{group}", f"store:{group}", self.done[group])
        self.take(self.machine.ask(self.now, self.tokens, member))


PAUSE = st.one_of(
    st.tuples(st.floats(0.0, 55.0), st.booleans(), st.booleans()),
    st.tuples(st.floats(55.0, 200.0), st.just(False), st.just(True)),
)


@settings(max_examples=12, deadline=None)
@given(st.lists(st.dictionaries(st.integers(0, GROUPS - 1), PAUSE, max_size=GROUPS), max_size=6))
@pytest.mark.long
def test_healthy_groups_that_pause_stay_together(plan: list[dict[int, Any]]) -> None:
    """Row T9: any pauses below torchft's own patience, or declared, in a step or between two."""
    world = Pausing()
    for pauses in plan:
        world.step(pauses)
        world.step({})
    assert not [o for o in world.out if isinstance(o, LeftOut | Fenced)]
    assert sum(isinstance(o, Formed) for o in world.out) == 1
