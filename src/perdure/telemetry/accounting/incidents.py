"""Incidents: what stopped training, who caused it, and how long each phase of the recovery took.

The ledger counts slot-seconds over all ranks; here it is wall time on the critical path, so a
phase ends when the last rank has passed it.

A ledger needs every stamp of every generation; a screen needs a line of the last few incidents,
told while they last and kept once they are over. What `RecentFold` keeps is that line, so that the
picture's cost does not grow with the length of the past.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec import structs

from perdure.model.events import (
    ControllerLost,
    FailureDecided,
    GenerationStepping,
    JobEnded,
    JournalEntry,
    RanksStarted,
)
from perdure.model.report import IncidentRow, Recovery
from perdure.telemetry.accounting.history import Generation, History
from perdure.telemetry.accounting.lives import Eviction, Life, LifeFold
from perdure.telemetry.accounting.reforms import Reform


def name_state(history: History) -> str:
    """Return the job's state in a word (`Snapshot.state`)."""
    if history.ended is not None:
        return history.ended.status
    newest = history.newest
    if newest is None:
        return "pending"
    if newest.incident is not None:
        return "recovering"
    if newest.stepping is None:
        return "recovering" if history.num_generations > 1 else "forming"
    return "running"


def list_recoveries(history: History, end_s: float) -> tuple[Recovery, ...]:
    """Return all incidents by time: failures of ranks and nodes, and of perdure's own parts."""
    found = list_part_deaths(history)
    found += [_describe_reform(history, reform) for reform in history.reforms if reform.told]
    found += _find_recoveries(history, history.generations, end_s)
    told = (history.machines.explain(r) for r in found)
    return tuple(sorted(told, key=lambda r: (r.at_s, r.culprit)))


def _describe_reform(history: History, reform: Reform) -> Recovery:
    """Return an epoch as an incident, with what its new members' starts had waited for."""
    told, generation = reform.describe(), history.generations.get(reform.generation)
    awaited = generation.awaited if generation is not None else {}
    said = [f"rank {rank} {awaited[rank]}" for rank in reform.new if rank in awaited]
    return structs.replace(told, reason="; ".join([told.reason, *said]))


def _find_recoveries(history: History, numbers: Iterable[int], end_s: float) -> list[Recovery]:
    """Return the incidents of those generations that something ended, the oldest first."""
    chosen = [history.generations[number] for number in sorted(numbers)]
    return [
        _build_recovery(history, generation, incident, end_s)
        for generation in chosen
        if (incident := history.find_incident(generation)) is not None
    ]


def list_part_deaths(history: History) -> list[Recovery]:
    """Return the deaths of perdure's own parts: nothing stopped, so every phase is zero."""
    return [
        Recovery(
            cause=lost.cause,
            culprit=lost.part,
            at_step=-1,
            at_s=lost.at_s,
            detect_s=0.0,
            decide_s=0.0,
            abort_s=0.0,
            communicator_s=0.0,
            state_s=0.0,
            warmup_s=0.0,
            total_s=0.0,
            lost_steps=0,
            lost_microbatches=0,
            rung="none",
            reason=f"back after {lost.restarted_s - lost.at_s:.2f} s; training did not stop",
        )
        for lost in sorted(history.lost_parts, key=lambda one: (one.at_s, one.part))
    ]


def list_group_recoveries(lives: LifeFold, end_s: float) -> list[Recovery]:
    """Return what became of each group that was lost, or was left out while it lived."""
    found = []
    for life in lives.lives.values():
        after = lives.list_next(life) if life.elsewhere else []
        found += [_describe_eviction(life, one, after, end_s) for one in life.alive_evictions]
        failure = life.failure or life.left_out
        if failure is not None:
            found.append(_describe_life(life, failure, lives.list_next(life), end_s))
    return sorted(found, key=lambda r: (r.at_s, r.culprit))


def _describe_life(
    life: Life, failure: FailureDecided, after: list[Life], end_s: float
) -> Recovery:
    at_s, step = failure.failure_s, failure.at_step
    if life.away_s is not None and life.ends:  # It stood still before it was left out.
        accounts = [end.account for end in life.ends.values()]
        at_s = max((a.last_step_s for a in accounts if a.last_step_s), default=at_s)
        step = max(a.step for a in accounts)
    stopped_s = life.stopped_s or failure.at_s
    begun = next((new.joined_step for new in after), None)
    undone = 0 if begun is None else max(0, step - begun)
    others = f"all had to go back to step {begun}" if undone else "the others trained on"
    back_s, heal_s, spare = None, 0.0, False
    for new in after:
        back_s = new.joined_s or new.held_s
        heal_s = max((e.account.heal_s for e in new.ends.values()), default=0.0)
        spare = new.held_s is not None and back_s == new.held_s
    return Recovery(
        cause=failure.cause,
        culprit=failure.culprit,
        at_step=step,
        at_s=at_s,
        detect_s=max(0.0, failure.detected_s - at_s),
        decide_s=max(0.0, failure.at_s - failure.detected_s),
        abort_s=max(0.0, stopped_s - failure.at_s),
        communicator_s=max(0.0, (back_s or stopped_s) - stopped_s),
        state_s=heal_s,
        warmup_s=0.0,
        total_s=max(0.0, (back_s or end_s) - at_s),
        lost_steps=undone or int(life.away_s is not None),
        lost_microbatches=None,
        rung="restart" if after else failure.rung,
        reason=others + ("; it stands by as a spare" if spare else ""),
    )


def _describe_eviction(life: Life, eviction: Eviction, after: list[Life], end_s: float) -> Recovery:
    """Return it as an incident: the step that the group was in is void, and it heals.

    It may come back as another life, of a group that others start.
    """
    back_s, back_step, how = eviction.back_s, eviction.back_step, "it came back by itself"
    for new in after if back_s is None else []:
        back_s, back_step = new.joined_s, new.joined_step or 0
        how = f"others started it again, {max(0.0, new.started_s - eviction.at_s):.2f} s later"
    over_s = end_s if back_s is None else back_s
    reason = "it lives, and has not come back"
    if life.elsewhere:
        reason = "who has started it has not started it again"
        reason = f"{how}; it is in no quorum yet" if after else reason
    if back_s is not None:
        without = max(0, back_step - max(0, eviction.step))
        reason = f"{how} and healed; {without} steps were made without it"
    return Recovery(
        cause=eviction.why,
        culprit=f"group {life.group}" + (f", {life.replica}" if life.elsewhere else ""),
        at_step=eviction.step,
        at_s=eviction.at_s,
        detect_s=eviction.told_s - eviction.at_s,
        decide_s=0.0,
        abort_s=0.0,
        communicator_s=max(0.0, over_s - eviction.told_s),
        state_s=0.0,
        warmup_s=0.0,
        total_s=max(0.0, over_s - eviction.at_s),
        lost_steps=1,
        lost_microbatches=None,
        rung="restart" if after and eviction.back_s is None else "left out",
        reason=reason,
    )


def _find_resumed_step(history: History, generation: Generation) -> int | None:
    """Return the step that the next generation resumed from that came so far."""
    later = history.find_next(generation.number)
    while later is not None:
        step = later.start_step
        if step is not None:
            return step
        later = history.find_next(later.number)
    return None


def _build_recovery(
    history: History,
    generation: Generation,
    incident: FailureDecided,
    end_s: float,
) -> Recovery:
    after, ended = history.find_next(generation.number), history.ended is not None
    stopped_s = _latest(generation.stopped.values())
    group_s = restored_s = first_s = None
    over_s = end_s
    if after is not None:
        group_s, restored_s, first_s = _newest_stamps(after)
        if first_s is not None:
            over_s = first_s
        elif (later := history.explain(after)) is not None:
            over_s = later.failure_s
    elif ended:
        over_s = stopped_s or end_s
    moments = [
        incident.failure_s,
        incident.detected_s,
        incident.at_s or None,
        stopped_s,
        group_s,
        restored_s,
        first_s,
    ]
    phases_s = _measure_phases(moments, over_s)
    resumed = _find_resumed_step(history, generation)
    if resumed is None and ended and history.checkpoints:
        resumed = history.checkpoints[-1].step  # From there the next run of this name goes on.
    lost: int | None = None
    if generation.resumable and generation.step >= 0 and resumed is not None:
        lost = max(0, generation.step - resumed)
    rung = "give up" if after is None and ended else "restart"
    rung = "stop" if incident.rung == "stop" else rung
    return Recovery(
        cause=incident.cause,
        culprit=incident.culprit,
        at_step=incident.at_step,
        at_s=incident.failure_s,
        detect_s=phases_s[0],
        decide_s=phases_s[1],
        abort_s=phases_s[2],
        communicator_s=phases_s[3],
        state_s=phases_s[4],
        warmup_s=phases_s[5],
        total_s=max(0.0, over_s - incident.failure_s),
        lost_steps=lost,
        lost_microbatches=None,
        rung=rung,
        reason="; ".join([incident.reason, *_list_awaited(after)]),
        generation=generation.number,
    )


def _list_awaited(after: Generation | None) -> list[str]:
    """Return what the start of the next generation had waited for on its nodes."""
    started = after.started if after is not None else {}
    return [f"node {n} {e.awaited}" for n, e in sorted(started.items()) if e.awaited]


def _newest_stamps(after: Generation) -> tuple[float | None, float | None, float | None]:
    """Return when the last rank had its process group, its state, and its first step."""
    accounts = [h.account for h in after.ranks.values()]
    stepping_s = after.stepping.at_s if after.stepping else None
    if not after.resumable:
        started_s = _latest(e.at_s for e in after.started.values())
        return started_s, started_s, stepping_s
    first_s = None
    if accounts and all(a.first_step_s > 0 for a in accounts):
        first_s = _latest(a.first_step_s for a in accounts)
    return (
        _latest(a.group_s or a.init_s for a in accounts),
        _latest(a.restored_s for a in accounts),
        first_s or stepping_s,
    )


def _measure_phases(moments: list[float | None], over_s: float) -> list[float]:
    """Return the length of each phase; one whose stamps are missing is 0.

    The last phase that began ends at `over_s`, when the recovery itself failed or still runs.
    """
    lengths: list[float] = []
    for begin_s, end_s, rest in zip(moments, moments[1:], range(len(moments)), strict=False):
        if begin_s is None:
            lengths.append(0.0)
            continue
        if end_s is None and all(m is None for m in moments[rest + 1 :]):
            end_s = over_s
        lengths.append(max(0.0, min(end_s, over_s) - begin_s) if end_s is not None else 0.0)
    return lengths


def _latest(stamps: Iterable[float]) -> float | None:
    return max((s for s in stamps if s > 0), default=None)


KEPT = 20


def _shorten(r: Recovery, total_s: float | None) -> IncidentRow:
    return IncidentRow(r.at_s, r.cause, r.culprit, r.rung, total_s, r.at_step, r.lost_steps)


@dataclass(slots=True)
class RecentFold:
    """The newest incidents that are over, oldest first."""

    closed: list[IncidentRow] = field(default_factory=list)
    told: int = -1
    """The newest generation whose incident is among `closed`, or had none."""

    def add(self, entry: JournalEntry, history: History) -> None:
        """Take an entry that `history` has just taken."""
        match entry.body:
            case ControllerLost() as lost:
                row = IncidentRow(lost.at_s, lost.cause, lost.part, "none", 0.0)
                self.closed.append(row)
            case GenerationStepping() as event:
                self._close(history, event.generation, entry.at_s)
            case RanksStarted() as event:  # The one before it has failed as well.
                self._close(history, event.generation - 1, entry.at_s)
            case JobEnded() as ended:
                newest = history.newest
                if newest is not None:
                    self._close(history, newest.number + 1, ended.at_s)
            case _:
                return
        del self.closed[:-KEPT]

    def _close(self, history: History, before: int, now: float) -> None:
        """Put down the incidents of the generations before `before`: they are over."""
        numbers = [number for number in history.generations if self.told < number < before]
        over = _find_recoveries(history, numbers, now)
        self.closed += [_shorten(r, r.total_s) for r in over]
        self.told = max([self.told, *numbers])

    def list_incident_rows(self, history: History, now: float) -> tuple[IncidentRow, ...]:
        """Return the newest incidents, those that are not over last."""
        numbers = [number for number in history.generations if number > self.told]
        rows = [_shorten(r, None) for r in _find_recoveries(history, numbers, now)]
        formed = [reform.describe() for reform in history.reforms[-KEPT:] if reform.told]
        rows += [_shorten(r, r.total_s) for r in formed]
        return tuple(sorted([*self.closed, *rows], key=lambda row: row.at_s)[-KEPT:])
