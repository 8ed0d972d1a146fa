"""Worlds formed again in place: incidents that ended no generation, joins, what they cost, shapes.

Wall time on the critical path, as for a restart: a phase ends when the last member has passed it.

What it cost each rank is told by its own stamps. A rank notes itself since when it waited for the
collective that broke, when it had left the old world, had the order, was connected, and had its
state. What lies before it left is a part of its step by its own account, and what lies after of its
overhead: both are taken off there and put down to the phases, so that nothing is counted twice.
"""

from dataclasses import dataclass, field

import msgspec

from perdure.model.events import Event, FailureDecided, WorldReformed
from perdure.model.failures import BROKEN
from perdure.model.report import Recovery, StageRow, WorldShape
from perdure.telemetry.accounting.segments import RECONFIGURATION


@dataclass(slots=True)
class Reform:
    """One epoch, and the failure that it followed upon, if there was one."""

    epoch: int
    generation: int
    step: int
    """Applied when it was formed."""
    failure: FailureDecided | None = None
    began_s: float = 0.0
    """Where nothing had failed: since when members stood still for it."""
    ordered_s: float = 0.0
    formed_s: float = 0.0
    redone: int = 0
    connected_s: float = 0.0
    back: int = 0
    morphed: bool = False
    how: str = ""
    new: list[int] = field(default_factory=list)
    """Members that have come in with it, and were in no world before."""
    members: set[int] = field(default_factory=set)
    """Those that are known to be in it."""

    @property
    def cause(self) -> str:
        """Return what had failed; empty where nothing had."""
        return self.failure.cause if self.failure is not None else ""

    @property
    def told(self) -> bool:
        """Return whether anything of note has happened."""
        return bool(self.cause or self.new)

    @property
    def failed(self) -> bool:
        """Return whether it is an incident: a join is none."""
        return self.told and self.rung != "join"

    @property
    def rung(self) -> str:
        """Return what was done, in a word."""
        if self.back:
            return "morph"
        if not self.cause:
            return "join"
        if self.morphed:
            return "morph"
        return "retry" if self.cause == BROKEN else "replace" if self.new else "shrink"

    def take(self, event: WorldReformed, *, new: bool = False) -> None:
        """Take one member's word; `new` ones stood still for nothing."""
        self.members.add(event.rank)
        if new:
            self.new.append(event.rank)
        elif not self.cause:
            self.began_s = min(self.began_s, event.began_s)
        self.ordered_s = max(self.ordered_s, event.ordered_s)
        self.formed_s = max(self.formed_s, event.formed_s)
        self.redone += event.redo
        self.connected_s = max(self.connected_s, event.connected_s)
        self.morphed |= event.morphed
        if event.back >= self.back:
            self.back, self.how = event.back, event.reason

    def describe(self) -> Recovery:
        """Return the line of the report."""
        ordered_s, formed_s = self.ordered_s, self.formed_s
        connected_s = self.connected_s or formed_s
        failure, names = self.failure, ", ".join(map(str, self.new))
        why = {
            "morph": self.how,
            "join": f"rank {names} came in",
            "retry": "the same members went on",
            "replace": f"rank {names} stood in at once",
            "shrink": "the others went on in place",
        }[self.rung]
        failure_s = failure.failure_s if failure is not None else self.began_s
        detected_s = failure.detected_s if failure is not None else failure_s
        decided_s = (failure.at_s if failure is not None else 0.0) or detected_s
        known = failure.at_step if failure is not None else -1
        return Recovery(
            cause=self.cause or "join",
            culprit=failure.culprit if failure is not None else f"rank {names}",
            at_step=known if known >= 0 else self.step,
            at_s=failure_s,
            detect_s=max(0.0, detected_s - failure_s),
            decide_s=max(0.0, decided_s - detected_s),
            abort_s=max(0.0, ordered_s - decided_s),
            communicator_s=max(0.0, connected_s - ordered_s),
            state_s=max(0.0, formed_s - connected_s),
            warmup_s=0.0,
            total_s=max(0.0, formed_s - failure_s),
            lost_steps=self.back,
            lost_microbatches=self.redone,
            rung=self.rung,
            reason=f"epoch {self.epoch}: {why}",
        )


class Stall(msgspec.Struct, frozen=True):
    """One rank's stamps of one re-formation."""

    epoch: int
    waited_s: float
    began_s: float
    ordered_s: float
    connected_s: float
    formed_s: float


def make_stall(event: WorldReformed) -> Stall:
    """Return the stamps of `event`; one that it lacks is the next one."""
    connected_s = event.connected_s or event.formed_s
    waited_s = event.waited_s or event.began_s
    return Stall(event.epoch, waited_s, event.began_s, event.ordered_s, connected_s, event.formed_s)


def split_stall(
    stall: Stall, failure: FailureDecided | None
) -> tuple[dict[str, float], float, float]:
    """Return (phase account -> seconds, seconds within the step, seconds of overhead).

    `failure` is the incident behind it: a wait for a peer that still lived was no stall. Without
    one, a join or a second try, only what came after the old world was left counts.
    """
    begin_s, moments = stall.began_s, [("abort", stall.ordered_s)]
    if failure is not None:
        begin_s = min(stall.began_s, max(stall.waited_s, failure.failure_s))
        moments = [
            ("detect", failure.detected_s),
            ("decide", failure.at_s or failure.detected_s),
            *moments,
        ]
    moments += [("communicator", stall.connected_s), ("state", stall.formed_s)]
    phases, at_s = dict[str, float](), begin_s
    for name, until_s in moments:
        end_s = min(max(until_s, at_s), stall.formed_s)
        phases[RECONFIGURATION + name] = end_s - at_s
        at_s = end_s
    return phases, stall.began_s - begin_s, max(0.0, stall.formed_s - stall.began_s)


def take_stalls(
    pieces: dict[str, float], stalls: list[tuple[Stall, FailureDecided | None]]
) -> dict[str, float]:
    """Return `pieces` with what `stalls` cost in accounts of its own.

    No more than what a rank has counted as step and overhead is moved.
    """
    moved = dict(pieces)
    for stall, failure in stalls:
        phases, in_step_s, in_overhead_s = split_stall(stall, failure)
        wanted_s = sum(phases.values())
        if wanted_s <= 0:
            continue
        taken_s = 0.0
        for account, seconds in (("useful", in_step_s), ("steady_overhead", in_overhead_s)):
            part_s = min(seconds, moved.get(account, 0.0))
            moved[account] = moved.get(account, 0.0) - part_s
            taken_s += part_s
        for name, seconds in phases.items():
            moved[name] = moved.get(name, 0.0) + seconds * taken_s / wanted_s
    return moved


@dataclass(slots=True)
class ShapeFold:
    """What the members of the newest epoch have said of it."""

    generation: int = -1
    epoch: int = -1
    shape: str = ""
    micro_batches: int = 0
    sections: dict[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """Rank -> the runs of blocks that it holds."""

    def add(self, event: Event) -> None:
        """Take the next event of the journal."""
        if not isinstance(event, WorldReformed) or not event.shape:
            return
        number, newest = (event.generation, event.epoch), (self.generation, self.epoch)
        if number < newest:
            return
        if number > newest:
            self.generation, self.epoch, self.sections = event.generation, event.epoch, {}
        self.shape, self.micro_batches = event.shape, event.micro_batches
        self.sections[event.rank] = (event.section, *event.more_sections)

    def find_shape_of(self, generation: int) -> WorldShape | None:
        """Return the shape of `generation`'s world; None where it has no stages."""
        if generation != self.generation or not self.sections:
            return None
        stages = tuple(
            StageRow(blocks, tuple(sorted(r for r, b in self.sections.items() if blocks in b)))
            for blocks in sorted({one for runs in self.sections.values() for one in runs})
        )
        return WorldShape(self.epoch, self.shape, self.micro_batches, stages)
