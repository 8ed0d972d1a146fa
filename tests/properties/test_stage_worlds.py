"""Pipelined worlds under random losses and joins: every micro-batch of every block counts once.

Members are what the worker makes of `decide_stages`, without tensors: a block's content is the
list of lines in which its steps were applied. Anything that may happen in any order does: passes,
reductions, applied steps, deaths in the middle of a formation.
"""

from dataclasses import dataclass, field
from functools import partial
from random import Random

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.examples import examples

from perdure.plan.elastic.commit import FRESH
from perdure.plan.elastic.shards import NO_LINE
from perdure.plan.elastic.stage_commit import (
    Holder,
    StageProgress,
    StageReformation,
    StageSnapshot,
    decide_stages,
)
from perdure.plan.elastic.stage_orders import StageSchedule, plan_passes
from perdure.plan.elastic.stages import Layout, Model, Runs, choose_balanced, list_blocks

COUNT, EVERY = 4, 2
MODEL = Model((1.0, 3.0, 1.0, 2.0, 1.0), (5, 7, 5, 1, 9), 2)
BLOCKS = len(MODEL.sizes)
Content = tuple[int, ...]
"""Whose initial model it was, as -1 - number; then the lines."""
INTERLEAVED = msgspec.structs.replace(MODEL, runs=2)


@dataclass
class Member:
    """One rank; `blocks` and `old` are live, at `applied` and `line`."""

    number: int
    applied: int = FRESH
    line: int = NO_LINE
    runs: Runs = ()
    blocks: dict[int, Content] = field(default_factory=dict)
    old: dict[int, Content] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    ready: int = NO_LINE
    epoch: int = -1
    """Of the world that it has formed."""
    todo: set[int] = field(default_factory=set)

    def stand(self, memory: dict[StageSnapshot, dict[int, Content]]) -> StageProgress:
        return StageProgress(
            node="a",
            applied=self.applied,
            line=self.line,
            runs=self.runs,
            held=tuple(sorted(self.blocks | self.old)),
            done=tuple(sorted(self.done)),
            ready=self.ready,
            snapshots=tuple(sorted(memory)),
        )


class Job:
    """All members, and what their node's memory has."""

    def __init__(self, size: int, model: Model) -> None:
        self.choose = partial(choose_balanced, model)
        self.schedule: StageSchedule = "interleaved" if model.runs > 1 else "1f1b"
        self.alive = {m: Member(m) for m in range(size)}
        self.born = size
        self.epoch = -1
        self.members: tuple[int, ...] = ()
        self.plan: StageReformation | None = None
        self.layout = Layout((), ())
        self.memory: dict[StageSnapshot, dict[int, Content]] = {}
        self.sent: set[tuple[int, int]] = set()
        """(member, step): its counts of the step were sent in this epoch."""
        self.reduced: dict[tuple[int, int], set[int]] = {}
        """(place, step) -> who has sent its part of the gradients."""
        self.over = False

    def order(self) -> None:
        """A new epoch: all tell their standings, and decide."""
        if not self.alive:
            self.over = True
            return
        self.epoch += 1
        self.members = tuple(sorted(self.alive))
        standings = {m: one.stand(self.memory) for m, one in self.alive.items()}
        self.plan = decide_stages(
            COUNT, MODEL.sizes, self.choose, standings, self.epoch, self.schedule
        )
        self.sent.clear()
        self.reduced.clear()
        if self.plan is None:
            self.over = True
            assert max(s.applied for s in standings.values()) > 0 or all(
                s.runs for s in standings.values()
            )
            return
        self.check_newest(standings)
        self.layout = self.plan.layout
        assert sorted(self.layout.members) == list(self.members)
        assert [b for s in self.layout.sections for b in range(*s)] == list(range(BLOCKS))
        self.copies = {m: (dict(o.blocks | o.old), o.applied, o.line, o.ready)
                       for m, o in self.alive.items()}  # fmt: skip
        self.whole = {m for m, o in self.alive.items() if not o.runs}

    def check_newest(self, standings: dict[int, StageProgress]) -> None:
        """No state that somebody lives to tell of is left for an older one."""
        assert self.plan is not None
        for step, line in {(s.applied, s.line) for s in standings.values() if s.held}:
            held = {
                b for s in standings.values() if (s.applied, s.line) == (step, line) for b in s.held
            }
            if len(held) == BLOCKS:
                assert (self.plan.step, self.plan.line) >= (step, line)

    def read(self, holder: Holder, block: int) -> Content:
        """Return what a holder sends of a block; it has to have it, in the plan's state."""
        plan = self.plan
        assert plan is not None
        if holder.owner >= 0:
            (found,) = (
                s for s in self.memory
                if (s.step, s.line, s.owner) == (plan.step, plan.line, holder.owner)
            )  # fmt: skip
            return self.memory[found][block]
        if plan.fresh:
            assert holder.member in self.whole
            return (-1 - holder.member,)
        blocks, applied, line, ready = self.copies[holder.member]
        if (applied, line) != (plan.step, plan.line):
            assert (applied + 1, ready) == (plan.step, plan.line)
            return (*blocks[block], ready)
        return blocks[block]

    def form(self, member: Member) -> None:
        """Come into the newest world; those who are asked for blocks have them still."""
        plan = self.plan
        assert plan is not None
        if member.epoch == self.epoch or self.over or member.number not in self.members:
            return
        if {h.member for move in plan.moves for h in move.holders} - set(self.alive):
            return  # It waits for a dead one, until the next epoch.
        if member.number in plan.forward:
            self.apply(member)
        at_step = bool(member.blocks) and not plan.fresh
        at_step = at_step and (member.applied, member.line) == (plan.step, plan.line)
        runs = self.layout.runs[self.layout.place_of(member.number)]
        mine = list_blocks(runs)
        held = member.blocks | member.old if at_step else {}
        if plan.fresh and member.number == plan.plain.member:
            held = dict.fromkeys(range(BLOCKS), (-1 - member.number,))
        moved = {m.block: self.read(m.holders[0], m.block)
                 for m in plan.moves if m.to == member.number}  # fmt: skip
        assert not set(moved) & set(held)
        for move in plan.moves:
            if move.to == member.number:
                assert len({self.read(h, move.block) for h in move.holders}) == 1
        have = held | moved
        member.blocks = {b: have[b] for b in mine}
        member.old = {b: c for b, c in held.items() if b not in mine}
        assert len({*member.blocks.values()}) == 1
        assert len(member.blocks[mine[0]]) == 1 + plan.step
        member.applied, member.line, member.runs = plan.step, plan.line, runs
        if member.number not in plan.kept:
            member.done = set()
        assert member.done == set(plan.kept.get(member.number, ()))
        member.ready, member.epoch = NO_LINE, self.epoch
        member.todo = set(plan.todo[member.number])

    def pass_one(self, member: Member) -> None:
        if member.epoch == self.epoch and member.todo:
            member.done.add(member.todo.pop())

    def reduce(self, member: Member) -> None:
        """Send its gradients; it has the sum once all copies of its place have."""
        if member.epoch != self.epoch or member.todo or member.ready != NO_LINE:
            return
        place = self.layout.place_of(member.number)
        sent = self.reduced.setdefault((place, member.applied), set())
        sent.add(member.number)
        if sent < set(self.layout.copies[place]):
            return
        copies = [self.alive[m] for m in self.layout.copies[place] if m in self.alive]
        if len(copies) == len(sent) and all(c.applied == member.applied for c in copies):
            counted = sorted(m for copy in copies for m in copy.done)
            tasks = list(range(COUNT * len(self.layout.runs[place])))
            assert counted == tasks, "each once, in each stage of this place"
        member.ready = self.epoch
        self.sent.add((member.number, member.applied))

    def prove(self, member: Member) -> None:
        """All counts have come: it applies the step."""
        step = member.applied
        if member.ready == self.epoch and all((m, step) in self.sent for m in self.members):
            member.old = {}
            self.apply(member)
            member.epoch = self.epoch
            passes = plan_passes(self.layout, COUNT, {}, schedule=self.schedule)
            member.todo = set(passes.list_todo(member.number))

    def apply(self, member: Member) -> None:
        member.blocks = {b: (*c, member.ready) for b, c in member.blocks.items()}
        member.old = {}
        member.applied, member.line = member.applied + 1, member.ready
        member.done, member.ready = set(), NO_LINE
        if member.applied % EVERY == 0:
            mine = [s for s in self.memory if s.owner == member.number]
            for one in sorted(mine)[: len(mine) - 1]:
                del self.memory[one]
            name = StageSnapshot(member.applied, member.line, member.runs, member.number)
            self.memory[name] = dict(member.blocks)

    def kill(self, member: Member) -> None:
        del self.alive[member.number]


KINDS = ("form", "pass_one", "pass_one", "reduce", "prove", "prove")
RARE = 0.02
"""How likely a loss, a join, or a new epoch without one is before each action."""


@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    size=st.integers(1, 5),
    model=st.sampled_from([MODEL, INTERLEAVED]),
    chance=st.randoms(use_true_random=False),
)
def test_each_block_takes_each_step_once_whoever_dies(
    size: int, model: Model, chance: Random
) -> None:
    job = Job(size, model)
    job.order()
    broken = False
    for _ in range(600):
        if job.over or not job.alive:
            return
        kind = chance.choice(KINDS)
        if chance.random() < RARE:
            kind = chance.choice(("kill", "join", "order"))
        elif broken and chance.random() < 0.2:
            kind = "order"
        member = job.alive[chance.choice(sorted(job.alive))]
        if kind == "kill":
            job.kill(member)
            broken = True
        elif kind == "join":
            job.alive[job.born] = Member(job.born)
            job.born += 1
            broken = True
        elif kind == "order":
            job.order()
            broken = False
        else:
            getattr(job, kind)(member)
        states: dict[tuple[int, int], set[Content]] = {}
        for one in job.alive.values():
            for content in (one.blocks | one.old).values():
                states.setdefault((one.applied, one.line), set()).add(content)
        assert all(len(found) == 1 for found in states.values()), "histories are not mixed"
