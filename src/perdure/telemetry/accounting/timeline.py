"""One rank's time, from the order to start it to its end, through all generations.

    start-up --first step--> training --it fails--> detect, decide, abort
    --its processes are gone--> communicator, state, warm-up --first step--> training ...

Where training went each rank has stamped itself (`RankAccount`). What torch compiled for in the
first steps goes to what came before them: start-up, or warm-up. Of a replica group committed
steps are useful, and steps that were not committed are lost work; waiting for a changed quorum and
forming its process group is `communicator`; the first step, or one in which it healed, is `state`
or start-up. A spare that is held at the lighthouse is idle, and so is a group that stands in a
pause or that has left. A group that is left out while it lives is being detected until it is left
out. While a rank of a group runs its account is in its ring and not in the journal: until it has
ended, its time since its first quorum counts as useful.
"""

from dataclasses import dataclass
from itertools import pairwise, zip_longest

from perdure.model.events import FailureDecided
from perdure.model.signals.progress import RankAccount
from perdure.telemetry.accounting.history import Generation, History, RankHistory
from perdure.telemetry.accounting.lives import Life
from perdure.telemetry.accounting.reforms import take_stalls
from perdure.telemetry.accounting.segments import RECONFIGURATION as _RE
from perdure.telemetry.accounting.segments import Segment, Timeline

Stage = tuple[str, float | None, float | None]
"""Account, begin and end of a stage before training; an absent stamp is None."""


@dataclass(slots=True)
class World:
    """A generation, and what all of its slots ask of it: found once, and not once a slot."""

    generation: Generation
    incident: FailureDecided | None
    """What ended it, or the hang in which it is."""
    resumable: bool
    kept: int | None
    """Up to which step its work was kept; None keeps all."""
    started_s: dict[int, float]
    """Rank -> when the processes of its node were started."""
    stopped_s: float | None
    """When the last of its processes was gone."""
    joined: dict[int, list[int]]
    """Slot -> the members that were started in it later, in their order."""
    failures: dict[int, FailureDecided | None]
    """Epoch -> the failure that it was formed after."""
    saved_s: list[float]
    """When the state at step `kept` was taken, of checkpoints that it has made of that step."""


def list_worlds(history: History, kept: dict[int, int | None]) -> list[World]:
    """Return the generations that a slot can be walked through; `kept` is each one's last step."""
    spec, found = history.spec, list[World]()
    assert spec is not None
    for generation in history.ordered():
        if not (generation.started or generation.ranks):
            continue
        number, limit = generation.number, kept[generation.number]
        started_s: dict[int, float] = {}
        for event in generation.started.values():
            for rank in event.pids:
                started_s.setdefault(rank, event.at_s)
        joined: dict[int, list[int]] = {}
        for member in sorted(generation.joined):
            joined.setdefault(spec.slot_of(member), []).append(member)
        found.append(
            World(
                generation,
                incident=history.explain(generation),
                resumable=generation.resumable,
                kept=limit,
                started_s=started_s,
                stopped_s=max(generation.stopped.values(), default=None),
                joined=joined,
                failures={r.epoch: r.failure for r in history.reforms if r.generation == number},
                saved_s=[
                    saved.at_s - saved.save_s
                    for saved in history.checkpoints
                    if saved.generation == number and saved.step == limit
                ],
            )
        )
    return found


@dataclass(slots=True, kw_only=True)
class WorldTimeline(Timeline):
    """Walks one slot through the generations of the world."""

    history: History
    worlds: list[World]
    _before: World | None = None

    def build(self) -> list[Segment]:
        """Return the slot's time, piece by piece."""
        if not self.worlds:
            self.take(-1, "startup", self.history.start_s, self.end_s)
        for world in self.worlds:
            self._walk(world, last=world is self.worlds[-1])
            self._before = world
        return self.found

    def _walk(self, world: World, last: bool) -> None:
        """Walk who has had this slot, one after another: one, but in an elastic world."""
        spec, generation = self.history.spec, world.generation
        assert spec is not None
        numbers = world.joined.get(self.rank, [])
        if self.rank < spec.world_size:
            numbers = [self.rank, *numbers]
        else:
            until_s = generation.joined[numbers[0]] if numbers else self.end_s if last else None
            self.take(generation.number, "idle", self.cursor, until_s)
        for number, successor in pairwise([*numbers, None]):
            assert number is not None
            self.member = number if number != self.rank else None
            history = generation.ranks.get(number) or RankHistory()
            until_s = generation.joined[successor] if successor is not None else None
            if number < spec.world_size:
                stages = self._list_start_stages(world, history.account, history)
            else:
                stages = self._list_late_stages(generation, number, history.account)
            self._walk_one(world, number, stages, last, until_s)

    def _list_late_stages(
        self, generation: Generation, number: int, account: RankAccount
    ) -> list[Stage]:
        """Return the stages of a member that came later: it may be held as a spare at first."""
        ready_s, called_s = generation.ready.get(number), generation.formed.get(number)
        first_s, over_s = account.first_step_s or None, called_s or self.end_s
        return [
            (_RE + "warmup", generation.joined[number], ready_s or account.first_step_s or None),
            ("idle", ready_s, over_s),
            (_RE + "state", called_s, first_s),
        ]

    def _walk_one(
        self,
        world: World,
        number: int,
        stages: list[Stage],
        last: bool,
        until_s: float | None,
    ) -> None:
        """Account for one process; `until_s` is when its successor in the slot was started."""
        generation = world.generation
        history = generation.ranks.get(number) or RankHistory()
        account, incident = history.account, world.incident
        first_s = stages[-1][2]
        fail_s = incident.failure_s if incident else None
        if first_s and (fail_s is None or first_s <= fail_s):
            for name, begin_s, end_s in stages:
                self.take(generation.number, name, begin_s, end_s)
            warmup = stages[-1][0] if stages[-1][0] == "startup" else _RE + "warmup"
            worked_s = self._work(world, history, first_s, fail_s, warmup)
        else:
            worked_s = None
            cut_s = fail_s or self._until(history, last)
            if cut_s and not account.last_step_s:
                # It never trained: stages as far as it came, the last of them cut off. Else it
                # trained, and when it began to is not known.
                for name, begin_s, end_s in stages:
                    if begin_s and begin_s < cut_s:
                        self.take(generation.number, name, begin_s, min(end_s or cut_s, cut_s))
        ended_s = self._compute_good_end(history, worked_s)
        if history.exit is not None and (until_s is not None or number in generation.left):
            # The others went on without it.
            spent_on = "lost_work" if history.exit.failed else "idle"
            self.take(generation.number, spent_on, worked_s, history.exit.at_s)
            away_s = until_s or fail_s or self.end_s
            self.take(generation.number, "idle", history.exit.at_s, away_s)
            if until_s is None and incident is not None:
                self._recover(world, incident, last)
        elif incident is not None:
            if ended_s is not None and ended_s <= incident.failure_s:
                self.take(generation.number, "idle", ended_s, incident.failure_s)
            elif worked_s is not None:
                self._take_unseen(world, account)
                spent_on = "checkpoint" if incident.saved else "lost_work"
                self.take(generation.number, spent_on, worked_s, incident.failure_s)
            self._recover(world, incident, last)
        elif ended_s is not None:
            self.take(generation.number, "idle", ended_s, self.end_s if last else None)
        elif history.exit is not None:
            # Ended by an operator in the middle of a step.
            self.take(generation.number, "lost_work", worked_s, history.exit.at_s)
            self.take(generation.number, "idle", history.exit.at_s, self.end_s)

    def _until(self, history: RankHistory, last: bool) -> float | None:
        if history.exit is not None:
            return history.exit.at_s
        return self.end_s if last else None

    def _list_start_stages(
        self, world: World, account: RankAccount, history: RankHistory
    ) -> list[Stage]:
        """Return (account, begin, end) of the stages before training; an absent stamp is None."""
        generation = world.generation
        first_s: float | None = account.first_step_s or None
        started_s = world.started_s.get(self.rank)
        if not world.resumable:
            first_s = generation.stepping.at_s if generation.stepping else None
            if first_s is None and history.exit is not None and not history.exit.failed:
                first_s = account.script_s or started_s
        if self._before is None:
            return [("startup", self.history.start_s, first_s)]
        stopped_s = self._before.stopped_s
        if not world.resumable:
            return [
                (_RE + "communicator", stopped_s, started_s),
                (_RE + "state", None, None),
                (_RE + "warmup", started_s, first_s),
            ]
        group_s = account.group_s or account.init_s or None
        restored_s = account.restored_s or None
        return [
            (_RE + "communicator", stopped_s, group_s),
            (_RE + "state", group_s, restored_s),
            (_RE + "warmup", restored_s, first_s),
        ]

    def _work(
        self,
        world: World,
        history: RankHistory,
        first_s: float,
        fail_s: float | None,
        warmup: str,
    ) -> float:
        """Attribute training; return up to when it is accounted for.

        What torch compiled for in the first steps is `warmup`'s: they were made before any that
        was lost, so that only where none was kept it is taken from what was lost.
        """
        account, generation = history.account, world.generation
        if not world.resumable:
            exit_s = history.exit.at_s if history.exit else None
            until_s = min(t for t in (fail_s, exit_s, self.end_s) if t is not None)
            self.take(generation.number, "useful", first_s, until_s)
            return until_s
        last_s = min(account.last_step_s, self.end_s)
        begin_s = max(first_s, self.cursor)
        if last_s <= begin_s:
            return max(first_s, last_s)
        useful_s, lost_s = self._split(world.kept, account)
        compile_s = max(0.0, account.compile_s)
        of_useful_s = min(compile_s, useful_s)
        of_lost_s = min(compile_s - of_useful_s, lost_s)
        pieces = {  # In the order in which they are drawn.
            warmup: of_useful_s + of_lost_s,
            "useful": useful_s - of_useful_s,
            "lost_work": lost_s - of_lost_s,
            "checkpoint": account.checkpoint_s,
            "steady_overhead": account.boundary_s + account.overhead_s,
            "idle": account.paused_s,
        }
        stalls = [
            (stall, world.failures.get(stall.epoch))
            for stall in history.stalls
            if begin_s <= stall.began_s and stall.formed_s <= last_s
        ]
        self.spend(generation.number, take_stalls(pieces, stalls), begin_s, last_s)
        return last_s

    def _take_unseen(self, world: World, account: RankAccount) -> None:
        """Steps after its last account (its ring was lost) that a checkpoint proves were done."""
        if world.kept is None or not 0 <= account.step < world.kept:
            return
        for saved_s in world.saved_s:
            self.take(world.generation.number, "useful", account.last_step_s, saved_s)

    def _split(self, limit: int | None, account: RankAccount) -> tuple[float, float]:
        """Return the seconds of steps up to `limit`, which were kept, and of those lost."""
        steps = account.step - account.start_step
        if limit is None or limit >= account.step or steps <= 0:
            return account.step_s, 0.0
        if limit <= account.start_step:
            return 0.0, account.step_s
        marks = [(account.start_step, 0.0), *account.marks, (account.step, account.step_s)]
        (low, low_s) = max(m for m in marks if m[0] <= limit)
        (high, high_s) = min(m for m in marks if m[0] >= limit)
        share = (limit - low) / (high - low) if high > low else 0.0
        kept_s = low_s + share * (high_s - low_s)
        return kept_s, max(0.0, account.step_s - kept_s)

    def _compute_good_end(self, history: RankHistory, worked_s: float | None) -> float | None:
        """Return since when the rank had nothing left to do; None if it was cut off."""
        finished = history.account.finished_s > 0
        left = history.exit is not None and not history.exit.failed and not history.exit.asked
        if not finished and not left:
            return None
        if worked_s is not None:
            return worked_s
        return history.exit.at_s if history.exit is not None else history.account.finished_s

    def _recover(self, world: World, incident: FailureDecided, last: bool) -> None:
        number, stopped_s = world.generation.number, world.stopped_s
        self.recover(number, incident, incident.failure_s, stopped_s)
        if not last:
            return
        if self.history.ended is not None:
            self.take(number, "idle", stopped_s, self.end_s)
            return
        # Still at it: the phase that has begun last is the one that runs.
        running = (
            ("communicator", stopped_s),
            ("abort", incident.at_s),
            ("decide", incident.detected_s),
        )
        name, since_s = next((p for p in running if p[1]), ("detect", incident.failure_s))
        self.take(number, _RE + name, since_s, self.end_s)


@dataclass(slots=True, kw_only=True)
class GroupTimeline(Timeline):
    """Walks one rank through the lives of its replica group, without a gap between two stamps."""

    lives: list[Life]
    generation: int = -1

    def build(self) -> list[Segment]:
        """Return the rank's time, piece by piece."""
        if self.lives and self.lives[0].elsewhere:
            return self._follow()
        if not self.lives:
            self._until("startup", self.end_s)
        for index, life in enumerate(self.lives):
            self.generation = life.generation
            self._walk(life, "startup" if not index else _RE + "communicator")
            self._leave(life, index == len(self.lives) - 1)
        return self.found

    def _follow(self) -> list[Segment]:
        """Return the time of a group that others start, as far as the lighthouse has told of it.

        Once it is left out, it is not known to be there until it is back, and nothing is paid for.
        """
        for life, after in zip_longest(self.lives, self.lives[1:]):
            self.generation, self.cursor = life.generation, life.started_s
            starting = "startup" if life is self.lives[0] else _RE + "communicator"
            end_s = self.end_s if after is None else after.started_s
            end_s = min(end_s, life.finished_s or end_s)
            self._until(starting, end_s if life.joined_s is None else life.joined_s)
            for eviction in life.evictions:
                self._until("useful", eviction.at_s)
                self._until(_RE + "detect", eviction.told_s)
                self.cursor = end_s if eviction.back_s is None else eviction.back_s
            self._until("useful", end_s)
        return self.found

    def _until(self, account: str, end_s: float | None) -> None:
        """Attribute the time up to `end_s`; without a stamp nothing."""
        if end_s is not None:
            self.put(self.generation, account, self.cursor, end_s)

    def _walk(self, life: Life, starting: str) -> None:
        """From the order to start it up to its end."""
        end = life.ends.get(self.rank)
        account = end.account if end is not None else RankAccount()
        over_s = end.record.at_s if end is not None else life.lost_s
        if over_s is None and life.stopped_s is None:
            over_s = self.end_s  # It runs.
        first_s = account.first_step_s or life.joined_s
        if life.held_s is not None:
            self._until(starting, life.held_s)
            self._until("idle", first_s or over_s)
        if first_s is None:
            self._until(starting, over_s)
            return
        self._until(starting, first_s)
        if not account.first_step_s:
            self._until("useful", life.away_s or over_s)
        else:
            self._work(life, account, starting)
        if life.away_s is not None:
            self._until(_RE + "detect", life.away_s)
            self._until(_RE + "abort", over_s)
        elif end is not None and not end.record.failed and not end.record.asked:
            self._until("idle", over_s)
        else:
            self._until("lost_work", over_s)

    def _work(self, life: Life, account: RankAccount, starting: str) -> None:
        """What the rank has stamped of its training, up to its last step's end."""
        last_s = min(account.last_step_s, self.end_s)
        if last_s <= self.cursor:
            return
        waited_s = account.reform_s
        stood_s = min(life.stood_s, waited_s + account.step_s)
        from_wait_s = min(stood_s, waited_s)
        first = starting == "startup" and life.held_s is None
        joining = "startup" if first else _RE + "state"
        useful_s = account.step_s - (stood_s - from_wait_s)
        made = max(1, account.step - account.start_step)
        undone = 0 if life.undone_from is None else max(0, account.step - life.undone_from)
        undone_s = useful_s * min(1.0, undone / made)
        pieces = {  # In the order in which they are drawn.
            joining: account.heal_s,
            "useful": useful_s - undone_s,
            "lost_work": account.lost_s + undone_s,
            _RE + "communicator": waited_s - from_wait_s,
            "steady_overhead": account.boundary_s + account.overhead_s,
            "idle": stood_s,
        }
        self.spend(self.generation, pieces, self.cursor, last_s)

    def _leave(self, life: Life, last: bool) -> None:
        """From its end up to the order to start the next."""
        failure, end = life.failure, life.ends.get(self.rank)
        left = end is not None and failure is None and life.away_s is None
        if failure is not None:
            self.recover(self.generation, failure, self.cursor, life.stopped_s)
        elif not left:
            self._until(_RE + "abort", life.stopped_s)
        if not last:
            self._until("idle", life.restored_s or (life.stopped_s if left else None))
        elif end is not None or life.stopped_s is not None:
            self._until("idle", self.end_s)
