"""Incidents: what stopped training, who caused it, and how long each phase of the recovery took.

The ledger counts slot-seconds over all ranks; here it is wall time on the critical path, so a
phase ends when the last rank has passed it.
"""

from collections.abc import Iterable

from perdure.model.events import ControllerLost
from perdure.model.report import Recovery
from perdure.telemetry.history import Generation, History, Incident


def find_state(history: History) -> str:
    """Return the job's state in a word (`Snapshot.state`)."""
    if history.ended is not None:
        return history.ended.status
    newest = history.newest
    if newest is None:
        return "pending"
    if newest.incident is not None:
        return "recovering"
    if newest.stepping is None:
        return "recovering" if len(history.generations) > 1 else "forming"
    return "running"


def find_recoveries(history: History, end_s: float) -> tuple[Recovery, ...]:
    """Return all incidents by time: failures of ranks and nodes, and of perdure's own parts."""
    generations = history.ordered()
    found = [_find_part(lost) for lost in history.lost_parts]
    found += [reform.describe() for reform in history.reforms if reform.told]
    for index, generation in enumerate(generations):
        if generation.incident is not None:
            after = generations[index + 1] if index + 1 < len(generations) else None
            later = generations[index + 1 :]
            found.append(_find_one(history, generation, generation.incident, after, later, end_s))
    told = (history.machines.explain(r) for r in found)
    return tuple(sorted(told, key=lambda r: (r.at_s, r.culprit)))


def find_recovery(history: History, number: int, end_s: float) -> Recovery | None:
    """Return the incident of generation `number`; None where nothing ended it."""
    generation = history.generations.get(number)
    if generation is None or generation.incident is None:
        return None
    later = [history.generations[n] for n in sorted(history.generations) if n > number]
    after = later[0] if later else None
    return _find_one(history, generation, generation.incident, after, later, end_s)


def _find_part(lost: ControllerLost) -> Recovery:
    """A part of perdure died: nothing stopped, so every phase is zero."""
    down_s = lost.restarted_s - lost.at_s
    return Recovery(
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
        reason=f"back after {down_s:.2f} s; training did not stop",
    )


def _find_one(
    history: History,
    generation: Generation,
    incident: Incident,
    after: Generation | None,
    later: list[Generation],
    end_s: float,
) -> Recovery:
    ended = history.ended is not None
    stopped_s = _latest(generation.stopped.values())
    group_s = restored_s = first_s = None
    over_s = end_s
    if after is not None:
        group_s, restored_s, first_s = _find_stamps(after)
        if first_s is not None:
            over_s = first_s
        elif after.incident is not None:
            over_s = after.incident.failure_s
    elif ended:
        over_s = stopped_s or end_s
    moments = [
        incident.failure_s,
        incident.detected_s,
        incident.decided_s,
        stopped_s,
        group_s,
        restored_s,
        first_s,
    ]
    phases_s = _find_phases(moments, over_s)
    resumed = next((g.start_step for g in later if g.start_step is not None), None)
    if resumed is None and ended and history.checkpoints:
        resumed = history.checkpoints[-1].step  # From there the next run of this name goes on.
    lost: int | None = None
    if generation.resumable and generation.step >= 0 and resumed is not None:
        lost = max(0, generation.step - resumed)
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
        rung="give up" if after is None and ended else "restart",
        reason=incident.reason,
    )


def _find_stamps(after: Generation) -> tuple[float | None, float | None, float | None]:
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


def _find_phases(moments: list[float | None], over_s: float) -> list[float]:
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
