"""How a model is cut into stages, who holds which, and what has to move for it."""

import itertools
import random
from collections.abc import Mapping, Sequence
from functools import partial

import pytest
from tests.profiles import make_profile

from perdure.plan.elastic.commit import FRESH
from perdure.plan.elastic.stage_choice import PlannedChoice
from perdure.plan.elastic.stage_commit import Holder, StageProgress, StageSnapshot, decide_stages
from perdure.plan.elastic.stage_orders import plan_passes
from perdure.plan.elastic.stages import (
    Choice,
    Layout,
    Model,
    Section,
    choose_balanced,
    cut_balanced,
    place,
    remaining_layout,
)
from perdure.plan.pipeline.orders import order_interleaved
from perdure.plan.pipeline.simulate import FREE, Pipe, simulate
from perdure.plan.worlds.chain import StageCost
from perdure.plan.worlds.measures import StageTimes

BLOCKS = 6
MODEL = Model((1.0,) * BLOCKS, (100,) * BLOCKS, 2)
FIRST, SECOND = Section(0, 3), Section(3, 6)


def choose(
    members: Sequence[int], nodes: Mapping[int, str], rest: Layout | None, observed: object = ()
) -> Choice:
    return choose_balanced(MODEL, members, nodes, rest)


def stand(section: Section, applied: int = 5, **more: object) -> StageProgress:
    fields = {"line": 0, "runs": (section,), "held": tuple(range(*section)), **more}
    return StageProgress("a", applied, **fields)  # type: ignore[arg-type]


def test_members_are_placed_so_that_they_hold_most() -> None:
    """Against every assignment there is."""
    chance = random.Random(1)
    for _ in range(60):
        copies = [chance.randint(1, 2) for _ in range(chance.randint(1, 3))]
        cuts = [Section(i, i + 1) for i in range(len(copies))]
        members = range(sum(copies))
        sizes = [chance.choice([1, 5, 9]) for _ in copies]
        held = {m: {s for s in range(len(copies)) if chance.random() < 0.5} for m in members}
        choice = Choice(tuple(cuts), tuple(copies), None, "")
        layout = place(choice, members, held, sizes)
        assert [len(c) for c in layout.copies] == copies
        deal = [stage for stage, n in enumerate(copies) for _ in range(n)]

        def gain(stages: object, held: object = held, sizes: object = sizes) -> int:
            return sum(sizes[s] for m, s in enumerate(stages) if s in held[m])  # type: ignore

        best = max(gain(order) for order in itertools.permutations(deal))
        assert gain([layout.place_of(m) for m in members]) == best


@pytest.mark.parametrize("size", range(1, 10))
@pytest.mark.parametrize("stages", [1, 2, 3, 7])
def test_every_member_has_a_stage_and_the_remainder_helps(size: int, stages: int) -> None:
    choice = cut_balanced(Model(MODEL.weights, MODEL.sizes, stages), size)
    assert [b for s in choice.sections for b in range(*s)] == list(range(BLOCKS))
    assert sum(choice.copies) == size
    assert len(choice.sections) == min(stages, size, BLOCKS)
    works = [(s.stop - s.first) / c for s, c in zip(choice.sections, choice.copies, strict=True)]
    assert max(works) <= BLOCKS / (size // len(works)) / len(works) + 1


def test_a_loss_with_a_living_copy_moves_nothing() -> None:
    """And only what the lost one had is done again: by its stage; others pass it on."""
    left = {
        0: stand(FIRST, done=(0, 1)),
        2: stand(FIRST, done=(2, 3)),
        3: stand(SECOND, done=(2, 3)),
    }
    plan = decide_stages(4, MODEL.sizes, choose, left)
    assert plan is not None
    assert (plan.step, plan.back, plan.moves, plan.changed) == (5, 0, (), False)
    assert plan.layout == Layout((FIRST, SECOND), ((0, 2), (3,)))
    assert plan.passes.numbers == (0, 1)
    assert plan.todo == {0: (), 2: (), 3: (0, 1)}


def test_a_stage_without_a_copy_is_taken_over_with_the_fewest_bytes() -> None:
    snapshot = StageSnapshot(5, 0, (SECOND,), 3)
    left = {0: stand(FIRST), 2: stand(FIRST, snapshots=(snapshot,))}
    plan = decide_stages(4, MODEL.sizes, choose, left)
    assert plan is not None
    assert plan.layout == Layout((FIRST, SECOND), ((0,), (2,)))
    assert [(m.block, m.to, m.holders) for m in plan.moves] == [
        (block, 2, (Holder(2, 3),)) for block in range(3, 6)
    ]


def test_blocks_come_from_all_who_have_them() -> None:
    left = {m: stand(FIRST) for m in (0, 1)} | {m: stand(SECOND) for m in (2, 3)}
    left[4] = StageProgress("a", FRESH)
    plan = decide_stages(4, MODEL.sizes, choose, left)
    assert plan is not None
    assert plan.layout.shape in ("(3,2)", "(2,3)")
    assert {m.to for m in plan.moves} == {4}
    assert all(len(m.holders) == 2 for m in plan.moves)
    assert len({m.holders[0] for m in plan.moves}) == 2


def test_a_lost_stage_takes_all_back_to_what_is_whole() -> None:
    kept = (StageSnapshot(4, 0, (FIRST,), 0), StageSnapshot(4, 0, (SECOND,), 1))
    plan = decide_stages(4, MODEL.sizes, choose, {0: stand(FIRST, snapshots=kept, done=(1,))})
    assert plan is not None
    assert (plan.step, plan.back, plan.kept) == (4, 1, {})
    assert "1 steps back" in plan.reason
    assert decide_stages(4, MODEL.sizes, choose, {0: stand(FIRST, snapshots=kept[:1])}) is None


def test_who_has_reduced_rolls_forward_by_itself() -> None:
    left = {0: stand(FIRST, 5, ready=1), 1: stand(SECOND, 6, line=1), 4: StageProgress("a", FRESH)}
    plan = decide_stages(4, MODEL.sizes, choose, left)
    assert plan is not None
    assert (plan.step, plan.line, plan.forward, plan.holder) == (6, 1, (0,), 1)


def test_who_joins_before_the_first_step_rolls_nothing_forward() -> None:
    left = {0: stand(FIRST, 0, line=-1), 1: stand(SECOND, 0, line=-1), 2: StageProgress("a", FRESH)}
    plan = decide_stages(4, MODEL.sizes, choose, left)
    assert plan is not None
    assert (plan.step, plan.forward, plan.fresh) == (0, (), False)


def test_a_first_world_that_broke_begins_again_with_who_is_still_whole() -> None:
    left = {1: stand(SECOND, 0, line=-1), 2: StageProgress("a", FRESH)}
    plan = decide_stages(4, MODEL.sizes, choose, left)
    assert plan is not None
    assert (plan.step, plan.fresh, plan.plain) == (0, True, Holder(2))


def test_two_who_did_the_same_do_not_both_keep_it() -> None:
    left = {0: stand(FIRST, done=(0, 1)), 1: stand(FIRST, done=(1,)), 2: stand(SECOND)}
    plan = decide_stages(2, MODEL.sizes, choose, left)
    assert plan is not None
    assert plan.kept == {0: (0, 1), 2: ()}


def test_a_much_better_cut_is_worth_a_move() -> None:
    uneven = Layout((Section(0, 1), Section(1, 6)), ((0, 1), (2,)))
    assert choose((0, 1, 2), {}, uneven).stays is None
    even = Layout((FIRST, SECOND), ((0, 1), (2,)))
    assert choose((0, 1, 2), {}, even).stays == even


def test_what_is_left_of_a_layout_must_be_whole() -> None:
    assert remaining_layout(6, [0, 1], {0: (FIRST,), 1: (SECOND,)}) == Layout(
        (FIRST, SECOND), ((0,), (1,))
    )
    assert remaining_layout(6, [0], {0: (FIRST,), 1: (SECOND,)}) is None
    assert remaining_layout(6, [0, 1], {0: (FIRST,), 1: (Section(2, 6),)}) is None


# --- interleaved ---------------------------------------------------------------------------------

TWO_RUNS = Model(MODEL.weights, MODEL.sizes, 2, runs=2)
UNIT = StageCost(1.0, 1.0, 1.0, 0, 0, 0.0)
OUTER, INNER = (Section(0, 2), Section(3, 5)), (Section(2, 3), Section(5, 6))


def test_interleaved_places_take_turns_along_the_model() -> None:
    choice = cut_balanced(TWO_RUNS, 4)
    assert [b for s in choice.sections for b in range(*s)] == list(range(BLOCKS))
    assert (len(choice.sections), choice.copies) == (4, (2, 2))
    assert sum(cut_balanced(TWO_RUNS, 5).copies) == 5
    few = cut_balanced(Model((1.0,) * 3, (1,) * 3, 2, runs=2), 2)
    assert len(few.sections) == 2, "no blocks for two runs each"


def test_what_is_left_of_an_interleaved_layout() -> None:
    layout = remaining_layout(6, [0, 1, 2], {0: OUTER, 1: INNER, 2: OUTER})
    assert layout is not None
    assert layout.sections == (OUTER[0], INNER[0], OUTER[1], INNER[1])
    assert (layout.copies, layout.runs) == (((0, 2), (1,)), (OUTER, INNER))
    assert remaining_layout(6, [0, 2], {0: OUTER, 2: OUTER}) is None
    assert remaining_layout(6, [0, 1], {0: OUTER, 1: INNER[:1]}) is None


def test_an_interleaved_ranks_blocks_come_from_copies_and_its_work_is_kept_by_stage() -> None:
    """Rank 2 is lost; rank 0 has passed micro-batch 1 through its later stage only."""
    left = {0: stand(OUTER[0], runs=OUTER, held=(0, 1, 3, 4), done=(0, 4, 5)),
            1: stand(INNER[0], runs=INNER, held=(2, 5), done=(0, 4, 1, 5))}  # fmt: skip
    balanced = partial(choose_balanced, TWO_RUNS)
    plan = decide_stages(4, MODEL.sizes, balanced, left, schedule="interleaved")
    assert plan is not None
    assert (plan.moves, plan.passes.numbers) == ((), (1, 2, 3))
    assert plan.todo == {0: (1, 2, 3, 6, 7), 1: (2, 3, 6, 7)}
    left[4] = StageProgress("a", FRESH)
    joined = decide_stages(4, MODEL.sizes, balanced, left, schedule="interleaved")
    assert joined is not None
    assert {(m.to, m.block) for m in joined.moves} == {(4, b) for b in (0, 1, 3, 4)}


@pytest.mark.parametrize("copies", [((0,), (1,)), ((0, 2), (1, 3)), ((0, 2), (1,))])
@pytest.mark.parametrize("count", range(1, 10))
def test_interleaved_steps_are_whole_for_any_number_of_micro_batches(
    copies: tuple[tuple[int, ...], ...], count: int
) -> None:
    layout = Layout((OUTER[0], INNER[0], OUTER[1], INNER[1]), copies)
    passes = plan_passes(layout, count, {}, schedule="interleaved")
    simulate(passes.orders, Pipe([UNIT] * 4, lambda *_: FREE, [0.0] * 4))  # Raises where it locks.
    done = [
        (a.kind, a.stage, a.micro_batch, member in copies[a.stage % 2])
        for member, mine in zip(passes.cells, passes.orders, strict=True)
        for a in mine
    ]
    wanted = itertools.product("BF", range(4), range(count), [True])
    assert sorted(done) == list(wanted)
    if len(copies[0]) == len(copies[1]) == 1 and count % 2 == 0:
        assert list(passes.orders) == list(map(tuple, order_interleaved(2, 2, range(count))))


def test_each_stage_of_each_micro_batch_is_counted_once() -> None:
    layout = Layout((FIRST, SECOND), ((0, 1), (2,)))
    passes = plan_passes(layout, 5, {0: (0, 3), 2: (3,)})
    assert passes.numbers == (0, 1, 2, 4)
    assert [sorted(at) for at in passes.counted] == [list(range(5))] * 2
    assert (passes.counted[0][0], passes.counted[1][3]) == (0, 2)
    done = [(a.stage, a.micro_batch) for mine in passes.orders for a in mine if a.kind == "B"]
    assert sorted(done) == [(s, m) for s in range(2) for m in passes.numbers]


# --- by a cost profile ---------------------------------------------------------------------------

PROFILE = make_profile([0.01] * BLOCKS, (2,), state=400_000_000, inputs=1000)


def plan_by(dwell_s: float, members: Sequence[int], rest: Layout | None) -> Choice:
    """With memory for four blocks a device, so that one stage does not do."""
    chosen = PlannedChoice(PROFILE, 32, 2, memory_bytes=1_700_000_000, dwell_s=dwell_s)
    return chosen(members, dict.fromkeys(members, "a"), rest)


def test_the_planner_uses_all_members_within_their_memory() -> None:
    for size in range(2, 9):
        choice = plan_by(600.0, range(size), None)
        assert sum(choice.copies) == size
        assert max(s.stop - s.first for s in choice.sections) <= 4


def test_a_better_world_waits_until_it_pays() -> None:
    """Three of four are left: one stage has one copy, and does all its work alone."""
    rest = Layout((FIRST, SECOND), ((0, 2), (3,)))
    short, long = plan_by(0.3, (0, 2, 3), rest), plan_by(600.0, (0, 2, 3), rest)
    assert short.stays == rest
    assert "expected" in short.reason
    assert long.stays is None
    assert long.sections != rest.sections


def test_what_was_not_measured_is_no_reason_to_move() -> None:
    profile = make_profile([0.01] * BLOCKS, (2,), state=400, links=False)
    rest = Layout((FIRST, SECOND), ((0, 2), (3,)))
    choice = PlannedChoice(profile, 32, 2)((0, 2, 3), dict.fromkeys((0, 2, 3), "a"), rest)
    assert choice.stays == rest


def test_what_the_stages_took_moves_the_cut() -> None:
    """The second stage takes four times as long as profiled: half of that counts."""
    rest, nodes = Layout((FIRST, SECOND), ((0,), (1,))), {0: "a", 1: "a"}
    planned = PlannedChoice(PROFILE, 32, 2, memory_bytes=1_700_000_000)
    costs = [block.costs[2] for block in PROFILE.blocks]

    def took(section: Section, factor: float) -> StageTimes:
        mine = costs[section.first : section.stop]
        forward_s, backward_s = (
            factor * sum(c.forward_s for c in mine), factor * sum(c.backward_s for c in mine),
        )  # fmt: skip
        return StageTimes("0", *section, False, (forward_s,) * 6, (backward_s,) * 6)

    assert planned((0, 1), nodes, rest, [took(FIRST, 1.0), took(SECOND, 1.0)]).stays == rest
    slow = planned((0, 1), nodes, rest, [took(FIRST, 1.0), took(SECOND, 4.0)])
    assert slow.stays is None
    assert slow.sections == (Section(0, 4), Section(4, 6))
