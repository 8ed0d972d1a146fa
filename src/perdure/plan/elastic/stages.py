"""Pipeline stages of an elastic world: how the model is cut, and who holds which part of it.

A *section* is a run of neighbouring blocks. A *layout* cuts the model into sections and gives
each to some members, its copies; numbers of copies may differ, so that no member is left over.
Interleaved, a member has several of them: of P places, place p has sections p, p + P, and so on.
What is left of a layout after a loss goes on as it is while every section has a living copy and
no other cut would be much faster: the micro-batches of the lost member pass through the other
copies of its section, and no state moves. Otherwise the model is cut anew, and members are placed
so that the fewest bytes move.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import msgspec

from perdure.plan.worlds.chain import Cutter
from perdure.plan.worlds.measures import StageTimes

TOLERANCE = 1.5
"""How many times as long as in the best layout the busiest stage may work before state moves."""


class Section(NamedTuple):
    """Blocks `first` up to `stop`, which is not among them."""

    first: int
    stop: int


Runs = tuple[Section, ...]
"""What one member has: a section, or every P-th of them."""


class Layout(msgspec.Struct, frozen=True):
    """Which members hold which sections."""

    sections: tuple[Section, ...]
    copies: tuple[tuple[int, ...], ...]
    """The members of each place."""

    @property
    def runs(self) -> tuple[Runs, ...]:
        """The sections of each place."""
        return list_runs(self.sections, len(self.copies))

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many members each place has."""
        return tuple(map(len, self.copies))

    @property
    def shape(self) -> str:
        """`2x3` is two copies of three places; `(3,2)` the copies of each where they differ."""
        sizes = self.sizes
        interleaved = " interleaved" if len(self.sections) > len(self.copies) else ""
        if len(set(sizes)) == 1:
            return f"{sizes[0]}x{len(sizes)}{interleaved}"
        return f"({','.join(map(str, sizes))}){interleaved}"

    @property
    def members(self) -> tuple[int, ...]:
        """All members, place by place."""
        return tuple(m for members in self.copies for m in members)

    def place_of(self, member: int) -> int:
        """Return the number of the place that `member` has."""
        return next(i for i, members in enumerate(self.copies) if member in members)

    def place_of_block(self, block: int) -> int:
        """Return the number of the place that has `block`."""
        stage = next(i for i, (_, stop) in enumerate(self.sections) if block < stop)
        return stage % len(self.copies)


class Model(msgspec.Struct, frozen=True):
    """What a layout is made from."""

    weights: tuple[float, ...]
    """Work of each block, in any unit."""
    sizes: tuple[int, ...]
    """Bytes of each block's state."""
    stages: int
    """How many members one copy of the model is spread over, where there are so many."""
    runs: int = 1
    """How many sections each of them has, where there are blocks enough."""


class Choice(NamedTuple):
    """A choice of sections, and of how many members share each place."""

    sections: tuple[Section, ...]
    copies: tuple[int, ...]
    stays: Layout | None
    """The layout that stays as it is; None where members are to be placed anew."""
    reason: str


Choose = Callable[[Sequence[int], Mapping[int, str], Layout | None, Sequence[StageTimes]], Choice]
"""(members, their nodes, what is left of the layout before, how long its stages took) -> the layout
that they get."""


def remaining_layout(
    blocks: int, members: Collection[int], runs: Mapping[int, Runs]
) -> Layout | None:
    """Return what is left of a layout, given the sections of each member that had some.

    None where a section has no living copy, or members know of different cuts: of a change that
    was not finished.
    """
    found: dict[Runs, list[int]] = {}
    for member in sorted(set(members) & set(runs)):
        found.setdefault(runs[member], []).append(member)
    places = sorted(found)
    if len({len(place) for place in places}) != 1:
        return None
    cuts = tuple(section for turn in zip(*places, strict=True) for section in turn)
    if [s.first for s in cuts] != [0, *(s.stop for s in cuts[:-1])] or cuts[-1].stop != blocks:
        return None
    return Layout(cuts, tuple(tuple(found[place]) for place in places))


def choose_balanced(
    model: Model,
    members: Sequence[int],
    nodes: Mapping[int, str],
    rest: Layout | None,
    observed: Sequence[StageTimes] = (),
) -> Choice:
    """Return what is left, with newcomers at its busiest stages; or the best cut by weight.

    The latter where nothing whole is left, where it has too few stages, or where its busiest
    stage has more than `TOLERANCE` times the work of the best cut's.
    """
    best = cut_balanced(model, len(members))
    if rest is None:
        return best
    stays = add_newcomers(rest, members, model.weights)
    busiest = compute_largest_work(model.weights, stays.sections, stays.sizes)
    least = compute_largest_work(model.weights, best.sections, best.copies)
    if len(stays.copies) < len(best.copies):
        return best._replace(reason=f"{rest.shape} has too few stages")
    if busiest > TOLERANCE * least:
        more = f"the busiest stage of {stays.shape} has {busiest / least:.1f} times the work"
        return best._replace(reason=f"{more} of {_shape(best)}'s")
    return keep(stays, f"{stays.shape} goes on where it is")


def keep(layout: Layout, reason: str) -> Choice:
    """Return the choice of a layout that stays as it is."""
    return Choice(layout.sections, layout.sizes, layout, reason)


def cut_balanced(model: Model, size: int) -> Choice:
    """Return the cut for `size` members whose busiest stage has least work.

    Interleaved, sections are of about equal work, since a place that had more of it than another
    would hold up the pipeline in each of its turns; copies left over go to the busiest places.
    """
    blocks = len(model.weights)
    places = max(1, min(model.stages, size, blocks))
    copies, extra = divmod(size, places)
    interleaved = places > 1 and model.runs > 1 and places * model.runs <= blocks
    loads = (1.0, 1.0) if interleaved else (1 / copies, 1 / (copies + 1))
    sums = [0.0, *accumulate(model.weights)]
    cutter = Cutter(blocks, lambda first, stop, place: sums[stop] - sums[first], loads)
    found = cutter.cut(places * model.runs) if interleaved else cutter.cut(places, extra)
    assert found is not None
    _, cuts, extras = found
    sections = tuple(Section(a, b) for a, b in pairwise(cuts))
    if interleaved:
        works = _compute_works(model.weights, sections, places)
        busiest = sorted(range(places), key=lambda place: -works[place])[:extra]
        extras = tuple(place in busiest for place in range(places))
    return Choice(sections, tuple(copies + more for more in extras), None, "the model is cut anew")


def list_runs(sections: Sequence[Section], places: int) -> tuple[Runs, ...]:
    """Return the sections of each of so many places."""
    return tuple(tuple(sections[place::places]) for place in range(places))


def list_blocks(runs: Runs) -> list[int]:
    """Return the numbers of the blocks of `runs`, in order."""
    return [block for run in runs for block in range(*run)]


def _compute_works(
    weights: Sequence[float], sections: Sequence[Section], places: int
) -> list[float]:
    return [sum(weights[b] for b in list_blocks(runs)) for runs in list_runs(sections, places)]


def add_newcomers(rest: Layout, members: Sequence[int], weights: Sequence[float]) -> Layout:
    """Return `rest` with those of `members` that are not in it, each at the busiest stage."""
    copies = [list(c) for c in rest.copies]
    works = _compute_works(weights, rest.sections, len(copies))
    for member in members:
        if member not in rest.members:
            stage = max(range(len(copies)), key=lambda i: works[i] / len(copies[i]))
            copies[stage].append(member)
    return Layout(rest.sections, tuple(tuple(sorted(c)) for c in copies))


def compute_largest_work(
    weights: Sequence[float], sections: Sequence[Section], copies: Sequence[int]
) -> float:
    """Return the work of the busiest stage's members."""
    works = _compute_works(weights, sections, len(copies))
    return max(work / c for work, c in zip(works, copies, strict=True))


# --- placement ----------------------------------------------------------------------------------


def place(
    choice: Choice,
    members: Sequence[int],
    held: Mapping[int, Collection[int]],
    sizes: Sequence[int],
) -> Layout:
    """Return who gets which section, so that members hold as many bytes of theirs as can be.

    Members who hold nothing are placed one pipeline after another, in order: neighbours then pass
    on to neighbours, and copies of a section are on different nodes.
    """
    gains = [
        [
            sum(sizes[b] for b in list_blocks(runs) if b in held.get(member, ()))
            for runs in list_runs(choice.sections, len(choice.copies))
        ]
        for member in members
    ]
    stages = _exchange(_deal(choice.copies), gains)
    return Layout(
        choice.sections,
        tuple(
            tuple(m for m, at in zip(members, stages, strict=True) if at == stage)
            for stage in range(len(choice.copies))
        ),
    )


def _deal(copies: Sequence[int]) -> list[int]:
    """Return stages in turn, until each was named as often as it has copies."""
    turns = range(max(copies))
    return [stage for turn in turns for stage, n in enumerate(copies) if turn < n]


def _exchange(stages: list[int], gains: Sequence[Sequence[int]]) -> list[int]:
    """Return the assignment of members to stages that has the greatest sum of gains.

    As long as members of some stages can change places in a circle and gain by it, they do;
    where none can, nothing better exists (it is a transport problem without negative cycles:
    M. Klein, Management Science 14(3), 1967).
    """
    count = max(stages) + 1
    while True:
        best: dict[tuple[int, int], tuple[int, int]] = {}
        for member, here in enumerate(stages):
            for there in range(count):
                if there != here:
                    gain = gains[member][there] - gains[member][here]
                    key = (here, there)
                    if key not in best or gain > best[key][0]:
                        best[key] = (gain, member)
        circle = _find_circle(count, best)
        if not circle:
            return stages
        movers = [(best[edge][1], edge[1]) for edge in circle]
        for member, there in movers:
            stages[member] = there


def _find_circle(
    count: int, best: Mapping[tuple[int, int], tuple[int, int]]
) -> list[tuple[int, int]]:
    """Return edges of a circle whose gains add up to more than 0; none where there is no such."""
    reach = [0] * count
    before = [-1] * count
    last = -1
    for _ in range(count):
        last = -1
        for (here, there), (gain, _member) in sorted(best.items()):
            if reach[here] + gain > reach[there]:
                reach[there], before[there], last = reach[here] + gain, here, there
        if last < 0:
            return []
    for _ in range(count):
        last = before[last]
    circle: list[tuple[int, int]] = []
    at = last
    while not circle or at != last:
        circle.append((before[at], at))
        at = before[at]
    return circle


def _shape(choice: Choice) -> str:
    return Layout(choice.sections, tuple((0,) * n for n in choice.copies)).shape
