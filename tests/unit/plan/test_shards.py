"""Who holds which part of a sharded state, and where the members go on after a loss."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, combinations

import pytest

from perdure.plan.elastic.commit import FRESH
from perdure.plan.elastic.shards import (
    NO_LINE,
    Shard,
    ShardProgress,
    ShardReformation,
    Snapshot,
    Source,
    decide_shards,
    plan_copies,
    plan_mirrors,
    plan_transfers,
)

LENGTHS = (1, 2, 5, 7, 12)


def stand(shard: Shard, applied: int = 7, **more: object) -> ShardProgress:
    standing = ShardProgress(node="a", applied=applied, line=0, shards=(shard,))
    return msgspec_replace(standing, **more)


def msgspec_replace(standing: ShardProgress, **more: object) -> ShardProgress:
    fields = {name: getattr(standing, name) for name in standing.__struct_fields__}
    return ShardProgress(**(fields | more))


def lay_out(members: list[int], minimum: int) -> dict[int, Shard]:
    copies = plan_copies(members, minimum)
    return {m: Shard(i, len(copy)) for copy in copies for i, m in enumerate(copy)}


@pytest.mark.parametrize("minimum", [0, 1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6])
def test_every_copy_is_whole_and_has_its_minimum(size: int, minimum: int) -> None:
    copies = plan_copies(range(size), minimum)
    assert list(chain(*copies)) == list(range(size))
    assert len(copies) == (max(1, size // minimum) if minimum else 1)
    assert all(len(copy) >= min(minimum, size) for copy in copies)
    for length in LENGTHS:
        for copy in copies:
            rows = [Shard(i, len(copy)).rows(length) for i in range(len(copy))]
            assert list(chain(*rows)) == list(range(length))


@pytest.mark.parametrize("minimum", [0, 1, 2, 3])
@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_whoever_dies_the_others_go_on_unless_a_row_is_lost(size: int, minimum: int) -> None:
    """Every set of deaths: what survives is found, and every row goes where it is needed."""
    before = lay_out(list(range(size)), minimum)
    for dead in chain.from_iterable(combinations(range(size), n) for n in range(size)):
        left = {m: stand(shard) for m, shard in before.items() if m not in dead}
        held = {length: set(chain(*(before[m].rows(length) for m in left))) for length in LENGTHS}
        plan = decide_shards(4, LENGTHS, minimum, left)
        assert (plan is None) == any(held[n] != set(range(n)) for n in LENGTHS)
        if plan is not None:
            assert (plan.step, plan.back) == (7, 0)
            check_transfers(plan, before)


def check_transfers(plan: ShardReformation, before: dict[int, Shard]) -> None:
    for length in LENGTHS:
        moved = plan_transfers(plan, length)
        for member, shard in plan.layout.items():
            mine = [t for t in moved if t.to == member]
            rows = chain(*(range(t.first, t.end) for t in mine))
            assert list(rows) == list(shard.rows(length))
        for one in moved:
            has = before[one.source.member].rows(length)
            assert one.source.shard == before[one.source.member]
            assert one.first in has
            assert one.end - 1 in has


def test_a_lost_sole_shard_takes_all_back_to_the_newest_whole_snapshot() -> None:
    halves = Shard(0, 2), Shard(1, 2)
    old = tuple(Snapshot(4, 0, half, m) for m, half in enumerate(halves))
    torn = (Snapshot(6, 0, halves[0], 0),)
    plan = decide_shards(4, LENGTHS, 0, {0: stand(halves[0], snapshots=old + torn)})
    assert plan is not None
    assert (plan.step, plan.line, plan.back, plan.redone) == (4, 0, 3, 0)
    assert {(s.member, s.owner) for s in plan.sources} == {(0, 0), (0, 1)}
    assert "3 steps back" in plan.reason


def test_a_snapshot_of_the_very_step_costs_nothing() -> None:
    halves = Shard(0, 2), Shard(1, 2)
    kept = (Snapshot(7, 0, halves[1], 1),)
    plan = decide_shards(4, LENGTHS, 0, {0: stand(halves[0], snapshots=kept, done=(0, 1))})
    assert plan is not None
    assert (plan.step, plan.back) == (7, 0)
    assert plan.todo == {0: (2, 3)}


def test_versions_of_one_step_are_not_mixed() -> None:
    halves = Shard(0, 2), Shard(1, 2)
    mixed = (Snapshot(4, 0, halves[0], 0), Snapshot(4, 3, halves[1], 1))
    assert decide_shards(4, LENGTHS, 0, {0: stand(halves[0], snapshots=mixed)}) is None


def test_shards_of_the_world_before_are_not_of_the_step_that_a_member_rolls_forward_to() -> None:
    """It applies the step to its newest shard alone: the others are what they were."""
    halves = Shard(0, 2), Shard(1, 2)
    behind = stand(halves[0], shards=halves[::-1], ready=1)
    plan = decide_shards(4, LENGTHS, 0, {0: behind, 1: stand(halves[1], applied=8, line=1)})
    assert plan is not None
    assert (plan.step, plan.forward) == (8, (0,))
    assert set(plan.sources) == {Source(0, halves[0]), Source(1, halves[1])}


@pytest.mark.parametrize(
    ("nodes", "mirrors"),
    [
        ({0: "a", 1: "a"}, {}),
        ({0: "a", 1: "b"}, {0: 1, 1: 0}),
        ({0: "a", 1: "a", 2: "b", 3: "b"}, {0: 2, 1: 3, 2: 0, 3: 1}),
        ({0: "a", 1: "b", 2: "c"}, {0: 1, 1: 2, 2: 0}),
    ],
)
def test_a_mirror_is_on_another_node(nodes: dict[int, str], mirrors: dict[int, int]) -> None:
    assert plan_mirrors(nodes) == mirrors
    assert all(nodes[m] != nodes[k] for m, k in mirrors.items())


# --- the model -----------------------------------------------------------------------------------

EVERY = 2
"""Steps from one snapshot to the next."""


@dataclass(frozen=True)
class Member:
    """`content`: the epoch in which each step was applied: equal for shards of one state."""

    content: tuple[int, ...] = ()
    shards: tuple[Shard, ...] = ()
    fresh: bool = True
    ready: int = NO_LINE
    phase: str = "form"

    @property
    def line(self) -> int:
        return self.content[-1] if self.content else NO_LINE


@dataclass(frozen=True)
class World:
    alive: tuple[tuple[int, Member], ...]
    epoch: int = 0
    members: tuple[int, ...] = ()
    sent: frozenset[tuple[int, int]] = frozenset()
    """(member, step): its part of the step's gradients, the dead ones' among them."""
    told: frozenset[tuple[int, int]] = frozenset()
    """(member, step): it has reduced, and says so."""
    snapshots: tuple[tuple[Snapshot, tuple[int, ...]], ...] = ()
    plan: ShardReformation | None = field(default=None, compare=False)
    planned: str = ""
    plan_content: tuple[int, ...] = ()
    kills: int = 0
    gone_back: int = 0

    def put(self, member: int, new: Member | None, **changes: object) -> "World":
        alive = dict(self.alive)
        alive.pop(member, None)
        if new is not None:
            alive[member] = new
        return replace(self, alive=tuple(sorted(alive.items())), **changes)  # type: ignore[arg-type]


class Model:
    def __init__(self, minimum: int, steps: int, snapshots: bool) -> None:
        self.minimum, self.steps, self.snapshots = minimum, steps, snapshots

    def moves(self, world: World) -> Iterator[World]:
        alive = dict(world.alive)
        left = any(me.phase == "form" for me in alive.values())
        broken = left or set(world.members) != set(alive)
        for member, me in world.alive:
            if broken and me.phase != "form":
                yield world.put(member, replace(me, phase="form"))
            if me.phase == "adopt":
                yield self.adopt(world, member, me)
            if me.phase == "train" and len(me.content) < self.steps:
                yield from self.work(world, member, me)
        if alive and broken and all(me.phase == "form" for me in alive.values()):
            yield self.reform(world, alive)

    def work(self, world: World, member: int, me: Member) -> Iterator[World]:
        step, everyone = len(me.content), set(world.members)
        if me.ready == NO_LINE and {m for m, s in world.sent if s == step} == everyone:
            told = world.told | {(member, step)}
            yield world.put(member, replace(me, ready=world.epoch), told=told)
        if me.ready != NO_LINE and {m for m, s in world.told if s == step} == everyone:
            yield self.apply(world, member, me)

    def apply(self, world: World, member: int, me: Member) -> World:
        content = (*me.content, me.ready)
        new = replace(me, content=content, ready=NO_LINE, shards=me.shards[-1:])
        snapshots = world.snapshots
        if self.snapshots and len(content) % EVERY == 0:
            one = Snapshot(len(content), content[-1], new.shards[0], member)
            mine = [s for s in snapshots if s[0].owner == member][-1:]
            others = [s for s in snapshots if s[0].owner != member]
            snapshots = tuple(sorted([*others, *mine, (one, content)]))
        sent = world.sent | {(member, len(content))}
        return world.put(member, new, sent=sent, snapshots=snapshots)

    def reform(self, world: World, alive: dict[int, Member]) -> World:
        standings = {
            m: ShardProgress(
                node="a",
                applied=FRESH if me.fresh else len(me.content),
                line=me.line,
                shards=() if me.fresh else me.shards,
                ready=me.ready,
                snapshots=tuple(s for s, _ in world.snapshots),
            )
            for m, me in alive.items()
        }
        plan = decide_shards(2, LENGTHS, self.minimum, standings)
        assert plan is not None, f"lost: {world}"
        contents = {self.content_of(world, alive, plan, s.member, s.owner) for s in plan.sources}
        assert len(contents) <= 1, "all sources are of one state"
        for source in plan.sources:  # Of the shards that it had before, it applies nothing.
            if source.owner < 0 and source.member in plan.forward:
                assert source.shard == alive[source.member].shards[-1]
        content = contents.pop() if contents else ()
        assert len(content) == plan.step
        for me in alive.values():
            assert plan.back >= len(me.content) - plan.step
        new = tuple((m, replace(me, phase="adopt")) for m, me in sorted(alive.items()))
        return World(
            alive=new, epoch=world.epoch + 1, members=tuple(sorted(alive)), plan=plan,
            planned=f"{plan.layout} {plan.forward} {plan.line}",
            plan_content=content, snapshots=world.snapshots, kills=world.kills,
            gone_back=max(world.gone_back, plan.back),
        )  # fmt: skip

    def content_of(
        self, world: World, alive: dict[int, Member], plan: ShardReformation, m: int, owner: int
    ) -> tuple[int, ...]:
        if owner >= 0:
            key = (plan.step, plan.line, owner)
            return next(c for s, c in world.snapshots if (s.step, s.line, s.owner) == key)
        me = alive[m]
        return (*me.content, me.ready) if m in plan.forward else me.content

    def adopt(self, world: World, member: int, me: Member) -> World:
        plan = world.plan
        assert plan is not None
        if member in plan.forward:
            world = self.apply(world, member, me)
            me = dict(world.alive)[member]
        kept = me.shards if not me.fresh and me.content == world.plan_content else ()
        mine = plan.layout[member]
        shards = (*(s for s in kept if s != mine), mine)
        new = Member(world.plan_content, shards, False, NO_LINE, "train")
        snapshots = tuple(
            s for s in world.snapshots if s[0].owner != member or s[0].step <= plan.step
        )
        sent = world.sent | {(member, plan.step)}
        return world.put(member, new, sent=sent, snapshots=snapshots)


def explore(ranks: int, minimum: int, steps: int, kills: int, snapshots: bool) -> tuple[int, int]:
    """Visit every state; return how many there are, and the most steps that were gone back."""
    model = Model(minimum, steps, snapshots)
    start = World(tuple((r, Member()) for r in range(ranks)))
    seen, front, back = {start}, [start], 0
    while front:
        world = front.pop()
        back = max(back, world.gone_back)
        after = list(model.moves(world))
        if not all(len(me.content) == steps for _, me in world.alive):
            assert after, f"stuck: {world}"
        begun = all(len(me.content) >= (EVERY if snapshots else 1) for _, me in world.alive)
        if world.kills < kills and begun and len(world.alive) > 1:
            after += [world.put(m, None, kills=world.kills + 1) for m, _ in world.alive]
        for new in after:
            if new not in seen:
                seen.add(new)
                front.append(new)
    return len(seen), back


@pytest.mark.parametrize(("ranks", "minimum", "kills"), [(2, 1, 1), (3, 1, 2), (4, 2, 1)])
def test_copies_lose_nothing_in_any_interleaving(ranks: int, minimum: int, kills: int) -> None:
    states, back = explore(ranks, minimum, steps=3, kills=kills, snapshots=False)
    assert states > 100
    assert back == 0


@pytest.mark.parametrize(("ranks", "kills"), [(2, 1), (3, 1), (3, 2)])
def test_a_sole_shard_loses_at_most_an_interval(ranks: int, kills: int) -> None:
    """Deaths begin after the first snapshot is whole; before that, the job begins again."""
    model_steps = 2 * EVERY + 1
    states, back = explore(ranks, 0, steps=model_steps, kills=kills, snapshots=True)
    assert states > 100
    assert 0 < back <= EVERY
