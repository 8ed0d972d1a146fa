"""The layout of an elastic pipeline by a cost profile: what the planner would choose, if it pays.

What is left of the old layout, with newcomers as copies of its busiest stages, is weighed against
the planner's best world for the members that there are: for the latter state has to move, and
nothing is trained meanwhile. All of it is a function of its arguments, and fast enough to be done
by every member while a world is formed.
"""

from collections.abc import Mapping, Sequence

import msgspec

from perdure.model.errors import ConfigError, MeasureError
from perdure.model.planning.costs import CostProfile, Place
from perdure.model.planning.world import Device, Stage, World
from perdure.plan.elastic.stages import (
    Choice,
    Layout,
    Model,
    Section,
    add_newcomers,
    cut_balanced,
    keep,
    place,
)
from perdure.plan.worlds.candidates import share_out
from perdure.plan.worlds.measures import StageTimes, refresh
from perdure.plan.worlds.planner import Option, Request, decide_change, plan_worlds
from perdure.plan.worlds.score import Scorer

FIXED_S = 0.2
"""A change without the state's way: agreement, connections, the first step's warm-up."""
DWELL_S = 600.0
_EVERYTHING = 1 << 60
_BYTES_PER_S = 1e9
"""Where no transfer was measured."""


class PlannedChoice:
    """Chooses layouts by a profile; remembers what it has searched."""

    def __init__(
        self,
        profile: CostProfile,
        global_batch: int,
        micro_batch: int,
        *,
        recompute: bool = False,
        memory_bytes: int = 0,
        dwell_s: float = DWELL_S,
    ) -> None:
        """Plan for micro-batches of one size, on devices with `memory_bytes` (0: as needed).

        `dwell_s` is the expected time until the next change.

        Raises:
            MeasureError: micro-batches of that size were not measured.
        """
        if micro_batch not in profile.micro_batches:
            have = ", ".join(map(str, profile.micro_batches))
            raise MeasureError(
                f"micro-batches of {micro_batch} were not measured",
                hint=f"the cost profile has {have}",
            )
        self.blocks = len(profile.blocks)
        self._profile, self._recompute, self._dwell_s = profile, recompute, dwell_s
        self._micro_batch, self._global_batch = micro_batch, global_batch
        self._memory_bytes = memory_bytes or _EVERYTHING
        self._count = global_batch // micro_batch
        self._request = Request(
            global_batch=global_batch,
            micro_batches=(micro_batch,),
            recompute="always" if recompute else "never",
            schedules=("1f1b", "rerouted"),
            options=1,
        )
        self._found: dict[tuple[int, ...], Option | None] = {}
        self._weights = [
            cost.forward_s + cost.backward_s
            for cost in (block.costs[micro_batch] for block in profile.blocks)
        ]
        self._sizes = [b.parameter_bytes + b.optimizer_bytes for b in profile.blocks]

    def __call__(
        self,
        members: Sequence[int],
        nodes: Mapping[int, str],
        rest: Layout | None,
        observed: Sequence[StageTimes] = (),
    ) -> Choice:
        """Return the layout for `members` on `nodes`; `rest` is what is left of the one before.

        What its stages took, `observed`, counts half against what the profile says of their blocks.
        """
        if observed:
            refreshed = refresh(self._profile, self._micro_batch, observed)
            live = PlannedChoice(
                refreshed.profile,
                self._global_batch,
                self._micro_batch,
                recompute=self._recompute,
                memory_bytes=self._memory_bytes,
                dwell_s=self._dwell_s,
            )
            return live(members, nodes, rest)
        devices = [Device(str(m), nodes[m], self._memory_bytes) for m in members]
        best = self._choose_best(devices)
        stays = None if rest is None else add_newcomers(rest, members, self._weights)
        if best is None:
            why = "the profile tells of no world that fits"
            if stays is not None:
                return keep(stays, why)
            model = Model(tuple(self._weights), tuple(self._sizes), len(self._weights))
            return cut_balanced(model, len(members))._replace(reason=why)
        choice = self._use_all(best.world, len(members))
        if rest is None or stays is None:
            return choice
        return self._weigh(devices, rest, stays, choice, best)

    def _weigh(
        self, devices: Sequence[Device], rest: Layout, stays: Layout, choice: Choice, best: Option
    ) -> Choice:
        pairs = zip(rest.sections, rest.copies, strict=True)
        held = {member: range(*section) for section, copies in pairs for member in copies}
        placed = place(choice, [int(d.name) for d in devices], held, self._sizes)
        if placed == stays:
            return keep(stays, f"{stays.shape} is the planner's best, and goes on where it is")
        scorer = Scorer(self._profile, devices)
        try:
            old = self._request.global_batch / scorer.score(self._make_world(stays)).step_s
        except ConfigError as error:
            return keep(stays, f"{stays.shape} goes on where it is: {error.message}")
        change = decide_change(
            self._make_world(rest),
            old,
            msgspec.structs.replace(best, world=self._make_world(placed)),
            profile=self._profile,
            bytes_per_s=self._estimate_bytes_per_s(devices),
            fixed_s=FIXED_S,
            dwell_s=self._dwell_s,
        )
        if change.decision == "stay":
            return keep(stays, change.reason)
        return choice._replace(reason=change.reason)

    def _choose_best(self, devices: Sequence[Device]) -> Option | None:
        names = [device.node for device in devices]
        key = tuple(names.index(name) for name in names)
        if key not in self._found:
            options = plan_worlds(self._profile, devices, self._request).options
            self._found[key] = options[0] if options else None
        return self._found[key]

    def _use_all(self, world: World, size: int) -> Choice:
        """Return the planner's world; who would be idle in it is one more copy of a busy stage."""
        sections = tuple(Section(stage.first, stage.stop) for stage in world.stages)
        copies = [len(stage.devices) for stage in world.stages]
        works = [sum(self._weights[s.first : s.stop]) for s in sections]
        for _ in range(size - sum(copies)):
            loads = [work / n for work, n in zip(works, copies, strict=True)]
            copies[loads.index(max(loads))] += 1
        return Choice(sections, tuple(copies), None, f"{world.shape} is the planner's best")

    def _make_world(self, layout: Layout) -> World:
        even, replicas = len(set(layout.sizes)) == 1, min(layout.sizes)
        return World(
            schedule="1f1b" if even else "rerouted",
            micro_batch=self._request.micro_batches[0],
            count=self._count,
            chunks=1,
            stages=tuple(
                Stage(section.first, section.stop, self._recompute, tuple(map(str, copies)))
                for section, copies in zip(layout.sections, layout.copies, strict=True)
            ),
            shares=share_out(self._count, [1.0] * replicas) if even else (),
        )

    def _estimate_bytes_per_s(self, devices: Sequence[Device]) -> float:
        where: Place = "node" if len({device.node for device in devices}) == 1 else "cluster"
        known = {t.place: t.bytes_per_s for t in self._profile.transfers}
        return known.get(where, min(known.values(), default=_BYTES_PER_S))
