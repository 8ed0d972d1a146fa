"""When a verdict may be acted upon, and why: a fact, patience that has run out, or the job file.

A false restart costs more trust than ten right ones earn, so silence alone is acted upon no sooner
than torch itself would give up: after the time-out of the process group that waits. What cannot be
undone by waiting (a stopped process, a process that has ended, two collectives that differ, a link
that the kernel gets no answer on, ranks blocked in a circle) is acted upon at once. Between the
two lies what the job itself has taught: where its steps are known, ten times its longest silence is
enough, though never less than `SOONEST_S`, for storage that fails over takes minutes. A number in
the job file stands above all of it.

What collectives and sockets alone could not settle (one end of a link, a card, or a slow machine)
an active probe may: it is judged elsewhere (`plan.probe`), outside the training and from other
evidence.
"""

from collections.abc import Mapping, Sequence

import msgspec

from perdure.detect.cadence import Habits
from perdure.detect.watch import LONG_PHASES, RankWatch
from perdure.model.job import DetectConfig
from perdure.model.signals.links import ProbeFinding
from perdure.model.verdicts import EXIT_SKEW_S, Activity, Culprit, Ground, Verdict

SURE = 0.7
"""Confidence from which a verdict may be acted upon by what the job has taught."""
STOPPED_S = 0.5
"""Seconds after its verdict at which a rank in state T (stopped) is acted upon."""
LINK_S = 10.0
"""A dead link is acted upon after so long, once the kernel has tried again in vain: a switch that
restarts takes no longer."""
TIMEOUT_S = 1800.0
"""torch's own time-out of a process group, where the rank could not tell it: the longest default
(gloo's; NCCL's is 600 s)."""
LONGEST_S = 10 * 365 * 86400.0
"""No time-out is longer, whatever a rank tells: a time without end cannot be journaled."""
SOONEST_S = 600.0
"""Silence is never acted upon sooner by what the job has taught: a first download, a failover of
Lustre or NFS and a first evaluation are quiet, healthy, and end within this time."""
LEARNED_STEPS = 20
LEARNED_FACTOR = 10.0

AGAIN = (
    "the same verdict at the same place came back after a restart: it is part of the job, or the "
    "script's own"
)


class Grounds(msgspec.Struct, frozen=True):
    """The ground on which, and the earliest time when, a verdict may be acted upon."""

    ground: Ground
    acts_s: float
    """Job time."""
    why: str
    certain: bool = False


class Stillness(msgspec.Struct, frozen=True):
    """The time since when nothing has changed about a verdict's suspects, and its bounds."""

    since_s: float
    """Neither progress, CPU, I/O nor state D has been seen since, nor another stack."""
    timeout_s: float
    """Of the process group in which they are waited for."""
    told: bool
    """The rank could tell it."""
    endless: bool = False
    """The collectives are an elastic world's own: nobody else ends the wait, whatever changes."""


def measure_stillness(
    suspects: Sequence[RankWatch],
    communicator: str,
    stack_changed_s: float,
    *,
    endless: bool = False,
) -> Stillness:
    """Return since when nothing has changed about `suspects`, and how long it may be so.

    `communicator` is the one in which others wait for them; where it is not known, the longest
    time-out of theirs counts, and no short one.
    """
    comms = [c for w in suspects for c in w.comms if c.size > 1 and c.timeout_s > 0]
    named = [c.timeout_s for c in comms if c.name == communicator]
    others = [max(c.timeout_s, SOONEST_S) for c in comms]  # Nobody is seen to wait in them.
    timeout_s = min(max(named or others, default=0.0), LONGEST_S)
    since_s = max(stack_changed_s, *(w.changed_s for w in suspects))
    return Stillness(since_s, timeout_s or TIMEOUT_S, timeout_s > 0, endless)


def decide_grounds(
    verdict: Verdict,
    suspects: Sequence[RankWatch],
    activity: Activity,
    still: Stillness,
    config: DetectConfig,
    habits: Habits,
    *,
    fact: Ground,
    again: bool,
) -> Grounds | None:
    """Return on what `verdict` is to be acted upon; None where nothing ever allows it.

    `fact` is what the records prove beyond its kind: `link`, `circle`, `ended` or nothing.
    `again` says that this verdict has restarted the world at this place before.
    """
    since_s, who = verdict.confirmed_s, str(verdict.culprit)
    if activity == "stopped":
        return Grounds("stopped", since_s + STOPPED_S, f"{who} is stopped", True)
    if verdict.kind == "Desync":
        if verdict.confidence < SURE:
            return None
        why = "the ranks' records show different collectives"
        return Grounds("desync", since_s + EXIT_SKEW_S, why, True)
    if fact in ("link", "circle"):
        wait_s = config.comm_action_s or LINK_S
        why = "nobody answers on it" if fact == "link" else "ranks are blocked in a circle"
        return Grounds(fact, since_s + wait_s, why, True)
    patient = _wait_for_timeout(verdict, activity, still)
    if again:
        return patient
    if fact == "ended":
        acts_s = max(since_s, verdict.first_seen_s + EXIT_SKEW_S)
        return Grounds("ended", acts_s, f"{who} has ended, and others wait for it", True)
    told = _decide_by_settings(verdict, suspects, activity, config)
    if told is not None:
        return told
    learned = _decide_by_habits(verdict, suspects, activity, still, habits)
    return min((g for g in (patient, learned) if g is not None), key=lambda g: g.acts_s)


def _wait_for_timeout(verdict: Verdict, activity: Activity, still: Stillness) -> Grounds:
    """Return the ground that is left when there is no other: as patient as torch itself."""
    if still.endless:
        why = (
            "others wait for longer than the time-out of a process group, "
            f"{still.timeout_s:g} s, in an elastic world's collectives, which have none"
        )
        return Grounds("timeout", verdict.first_seen_s + still.timeout_s, why)
    known = "" if still.told else ", torch's default"
    why = (
        "nothing may have changed for longer than the time-out of the process group, "
        f"{still.timeout_s:g} s{known}{_describe_changes(activity)}"
    )
    return Grounds("timeout", still.since_s + still.timeout_s, why)


def _describe_changes(activity: Activity) -> str:
    """Return what changes now, so that the time has not even begun."""
    changes = {"busy": "CPU or I/O moves", "blocked": "it waits in the kernel (state D)"}
    return f"; now {changes[activity]}" if activity in changes else ""


def _decide_by_settings(
    verdict: Verdict, suspects: Sequence[RankWatch], activity: Activity, config: DetectConfig
) -> Grounds | None:
    """Return what the job file's own numbers say; None where it leaves that to certainty."""
    since_s = verdict.confirmed_s
    found: list[tuple[float, str]] = []
    if verdict.kind == "CommHang" and verdict.confidence >= SURE and config.comm_action_s:
        found.append((since_s + config.comm_action_s, "detect.comm_action_s"))
    if config.quiet_action_s and activity == "quiet" and all(w.instrumented for w in suspects):
        quiet_s = max(since_s, max(w.busy_s for w in suspects))
        found.append((quiet_s + config.quiet_action_s, "detect.quiet_action_s"))
    if config.hang_action_s:
        found.append((since_s + config.hang_action_s, "detect.hang_action_s"))
    if not found:
        return None
    acts_s, name = min(found)
    value = getattr(config, name.partition(".")[2])
    return Grounds("job file", acts_s, f"{name} = {value:g}")


def _decide_by_habits(
    verdict: Verdict,
    suspects: Sequence[RankWatch],
    activity: Activity,
    still: Stillness,
    habits: Habits,
) -> Grounds | None:
    """Return what the job's own longest silence says, where its steps have taught enough."""
    if verdict.confidence < SURE or not suspects:
        return None
    if any(w.newest.phase in LONG_PHASES or not w.learned(LEARNED_STEPS) for w in suspects):
        return None
    longest_s = max(habits.longest_s(w.newest.phase) for w in suspects)
    if longest_s <= 0:
        return None
    wait_s = max(SOONEST_S, LEARNED_FACTOR * longest_s)
    why = (
        f"nothing may have changed for {wait_s:.0f} s, where the job's own longest silence "
        f"was {longest_s:.1f} s{_describe_changes(activity)}"
    )
    return Grounds("habit", still.since_s + wait_s, why)


def settle_verdict(
    verdict: Verdict, finding: ProbeFinding, nodes: Mapping[int, int]
) -> Verdict | None:
    """Return the better verdict, where `verdict` asked for a probe and it found something.

    `nodes` says where each rank runs.
    """
    if "probe" not in verdict.evidence or finding.kind == "nothing":
        return None
    kind, culprit = verdict.kind, verdict.culprit
    if finding.kind == "slow link" and finding.link is not None:
        culprit = Culprit(link=_choose_link_ranks(verdict, finding.link, nodes))
    elif finding.kind == "slow host" and verdict.kind == "CommSlow":
        kind, culprit = "Straggler", Culprit(node=finding.node)
    else:
        culprit = Culprit(node=finding.node)
    evidence = {name: value for name, value in verdict.evidence.items() if name != "probe"}
    return msgspec.structs.replace(
        verdict,
        kind=kind,
        culprit=culprit,
        confidence=max(verdict.confidence, finding.confidence),
        reason=f"probe: {finding.reason}; {verdict.reason}",
        evidence={**evidence, "probed": finding.evidence},
    )


def _choose_link_ranks(
    verdict: Verdict, link: tuple[int, int], nodes: Mapping[int, int]
) -> tuple[int, int]:
    """Return the verdict's own ranks where they lie at the link's ends, else each node's first."""
    known = verdict.culprit.link
    if known is not None and (nodes.get(known[0]), nodes.get(known[1])) == link:
        return known
    first = {node: rank for rank, node in sorted(nodes.items(), reverse=True)}
    return first.get(link[0], -1), first.get(link[1], -1)
