"""The commit rule, on every interleaving of small worlds with a kill at every instant."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from perdure.plan.elastic.commit import FRESH, MemberProgress, decide_reformation
from perdure.plan.elastic.microbatches import assign

Content = frozenset[int]
"""What a reduced result was made of."""


def test_survivors_before_the_same_step_redo_only_what_is_missing() -> None:
    plan = decide_reformation(4, {0: MemberProgress(7, (0,)), 2: MemberProgress(7, (3,), True)})
    assert (plan.step, plan.forward, plan.fresh) == (7, (), ())
    assert plan.todo == {0: (1,), 2: (2,)}
    assert plan.redone == 2


def test_whoever_is_behind_rolls_forward() -> None:
    plan = decide_reformation(
        4, {0: MemberProgress(7, (0, 1), True), 2: MemberProgress(8, (2,), True)}
    )
    assert (plan.step, plan.donors, plan.forward, plan.holder) == (8, (2,), (0,), 2)
    assert plan.todo == {0: (0, 1), 2: (3,)}


def test_who_has_only_just_joined_gives_its_state_instead() -> None:
    plan = decide_reformation(2, {0: MemberProgress(7, (0,), True), 5: MemberProgress(8)})
    assert (plan.step, plan.donors, plan.forward, plan.fresh) == (8, (5,), (), (0,))


def test_a_new_world_takes_the_state_of_its_first_rank() -> None:
    plan = decide_reformation(4, {r: MemberProgress(FRESH) for r in (0, 1, 2)})
    assert (plan.step, plan.donors, plan.fresh) == (0, (0,), (1, 2))
    assert plan.todo == assign(4, [0, 1, 2])


# --- the model -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rank:
    """`phase`: compute, reduce (its part is sent), have (all parts are in), form, wait."""

    history: tuple[Content, ...] | None
    done: tuple[int, ...] = ()
    todo: tuple[int, ...] = ()
    phase: str = "form"
    result: Content | None = None
    """Of the step under way."""
    kept: Content | None = None
    """Of the step before."""
    source: int = -1


@dataclass(frozen=True)
class World:
    alive: tuple[tuple[int, Rank], ...]
    members: tuple[int, ...]
    sent: tuple[tuple[int, int, Content], ...] = ()
    """(step, member, its part) of this epoch, the dead ones' among them."""
    kills: int = 0
    joins: int = 0

    def put(self, rank: int, new: Rank | None, **changes: object) -> "World":
        alive = dict(self.alive)
        alive.pop(rank, None)
        if new is not None:
            alive[rank] = new
        return replace(self, alive=tuple(sorted(alive.items())), **changes)  # type: ignore[arg-type]


class Model:
    def __init__(self, micro_batches: int, steps: int) -> None:
        self.count, self.steps = micro_batches, steps

    def moves(self, world: World) -> Iterator[World]:
        """Yield what may happen next, but for kills and joins."""
        alive = dict(world.alive)
        left = any(me.phase == "form" for me in alive.values())
        broken = left or set(world.members) != set(alive)
        for rank, me in world.alive:
            if broken and me.phase != "form":
                yield world.put(rank, replace(me, phase="form", result=None, todo=(), source=-1))
            if not broken or me.phase in ("compute", "reduce", "have"):
                yield from self.work(world, alive, rank, me)
        if alive and broken and all(me.phase == "form" for me in alive.values()):
            yield self.reform(world, alive)

    def work(self, world: World, alive: dict[int, Rank], rank: int, me: Rank) -> Iterator[World]:
        step = len(me.history or ())
        match me.phase:
            case "compute" if me.todo and step < self.steps:
                first, *rest = me.todo
                yield world.put(rank, replace(me, done=(*me.done, first), todo=tuple(rest)))
            case "compute" if step < self.steps:
                assert len(me.done) == len(set(me.done))
                sent = (*world.sent, (step, rank, frozenset(me.done)))
                yield world.put(rank, replace(me, phase="reduce"), sent=tuple(sorted(sent)))
            case "reduce" if {m for s, m, _ in world.sent if s == step} == set(world.members):
                parts = [part for s, _, part in world.sent if s == step]
                result: Content = frozenset().union(*parts)
                assert sum(map(len, parts)) == len(result) == self.count, "each exactly once"
                yield world.put(rank, replace(me, phase="have", result=result))
            case "have":
                history = (*(me.history or ()), me.result or frozenset())
                todo = assign(self.count, world.members)[rank]
                new = Rank(history, (), todo, "compute", None, me.result)
                yield world.put(rank, new)
            case "wait" if me.source in alive:
                yield world.put(rank, self.receive(me, alive[me.source]))

    def receive(self, me: Rank, source: Rank) -> Rank:
        """Take the result that the others have applied, or the whole state."""
        if me.result is None:
            return replace(me, history=source.history, phase="compute", kept=None)
        history = (*(me.history or ()), me.result)
        return replace(me, history=history, result=None, kept=me.result, phase="compute")

    def reform(self, world: World, alive: dict[int, Rank]) -> World:
        standings = {
            rank: MemberProgress(FRESH)
            if me.history is None
            else MemberProgress(len(me.history), me.done, me.kept is not None)
            for rank, me in alive.items()
        }
        plan = decide_reformation(self.count, standings)
        new = {}
        for rank, me in alive.items():
            todo = plan.todo[rank]
            if rank in plan.donors:
                history = me.history if me.history is not None else ()
                new[rank] = replace(me, history=history, todo=todo, phase="compute")
            elif rank in plan.forward:
                result = alive[plan.holder].kept
                assert result is not None, "the holder holds"
                new[rank] = replace(
                    me, done=(), todo=todo, phase="wait", result=result, source=plan.holder
                )
            else:
                new[rank] = replace(
                    me, done=(), todo=todo, phase="wait", result=None, source=plan.donors[0]
                )
        members = tuple(sorted(new))
        return replace(world, alive=tuple(sorted(new.items())), members=members, sent=())

    def check(self, world: World) -> None:
        """Replicas that have applied as many steps are equal.

        And those that train are never more than one apart.
        """
        histories = [me.history for _, me in world.alive if me.history is not None]
        training = [me for _, me in world.alive if me.phase not in ("form", "wait")]
        lengths = {len(me.history) for me in training if me.history is not None}
        assert not lengths or max(lengths) - min(lengths) <= 1
        longest = max(histories, key=len, default=())
        assert all(h == longest[: len(h)] for h in histories)
        assert all(len(content) == self.count for content in longest)


def join(world: World, number: int, follows: bool) -> Iterator[World]:
    """Yield how a rank may come: without a state or, if it has followed, with any older one."""
    histories = [me.history for _, me in world.alive if me.history is not None]
    longest = max(histories, key=len, default=())
    states = [longest[:length] for length in range(len(longest) + 1)] if follows else []
    for history in (None, *states):
        yield world.put(number, Rank(history), joins=world.joins + 1)


def explore(
    ranks: int, micro_batches: int, steps: int, kills: int, joins: int, *, follows: bool = False
) -> tuple[int, int]:
    """Visit every state; return how many there are and in how many everything is done."""
    model = Model(micro_batches, steps)
    start = World(tuple((r, Rank(None)) for r in range(ranks)), members=())
    seen, front, ends = {start}, [start], 0
    while front:
        world = front.pop()
        model.check(world)
        after = list(model.moves(world))
        finished = all(len(me.history or ()) == steps for _, me in world.alive)
        if finished:
            ends += 1
        else:
            assert after, f"stuck: {world}"
        if world.kills < kills:
            after += [world.put(r, None, kills=world.kills + 1) for r, _ in world.alive]
        if world.joins < joins and world.alive and not finished:
            after += join(world, ranks + world.joins, follows)
        for new in after:
            if new not in seen:
                seen.add(new)
                front.append(new)
    return len(seen), ends


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "steps", "kills", "joins"),
    [
        (1, 2, 2, 0, 1),
        (2, 2, 3, 1, 1),
        (2, 3, 2, 2, 1),
        (3, 3, 2, 2, 0),
        (4, 4, 1, 2, 0),
        (3, 3, 1, 1, 1),
        pytest.param(3, 3, 2, 1, 1, marks=pytest.mark.long),
    ],
)
def test_every_interleaving_of_a_small_world(
    ranks: int, micro_batches: int, steps: int, kills: int, joins: int
) -> None:
    states, ends = explore(ranks, micro_batches, steps, kills, joins)
    assert states > 50
    assert ends > 0


@pytest.mark.parametrize(("ranks", "steps", "kills", "joins"), [(2, 3, 1, 1), (3, 1, 1, 1)])
def test_a_rank_that_has_followed_may_be_as_far_behind_as_it_likes(
    ranks: int, steps: int, kills: int, joins: int
) -> None:
    states, ends = explore(ranks, ranks, steps, kills, joins, follows=True)
    assert states > 50
    assert ends > 0
