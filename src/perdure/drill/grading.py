"""What the job's journal says of a fault: when it was found, who was blamed, when all was well.

Nothing here looks at a process: a fault that the journal does not know of was not found.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from perdure.drill.card import FaultRow, Losses
from perdure.model.events import (
    CheckpointFailed,
    CheckpointRestored,
    CheckpointSaved,
    ControllerLost,
    FailureDecided,
    GenerationStepping,
    JobEnded,
    JournalEntry,
    VerdictReached,
    VerdictWithdrawn,
    WorldReformed,
)
from perdure.model.report import Recovery
from perdure.telemetry.accounting.history import History
from perdure.telemetry.accounting.incidents import list_recoveries

_PARTS = {"controller": "controller", "bus": "nats-server"}
_EARLY_S = 0.05
"""A fault is stamped by who makes it: what it causes may bear a stamp that is as much older."""


class Strike(NamedTuple):
    """A fault that was made."""

    fault: str
    at_s: float
    """Job time."""
    step: int
    """Committed steps, as far as was known; -1: none."""
    rank: int
    node: int
    what: str
    """What was done, in words."""
    generation: int
    """That lived then."""
    saved: int = -1
    """The step of the newest checkpoint that is whole; -1: there is none."""
    torn: str = ""
    """The path of the checkpoint that was cut."""
    healed_s: float | None = None
    """Job time at which it was ended; None: not yet, or it cannot end."""


class Outcome(NamedTuple):
    """What became of a fault, as far as a journal goes."""

    found_s: float | None = None
    """Seconds after it, as all here."""
    found_as: str = ""
    right: bool | None = None
    back_s: float | None = None
    redone: int | None = None
    resumed: int = -1
    """The step that the world went on from; -1: it did not stop, or has not gone on."""
    in_place: bool = False
    """The others went on, and nothing started again."""
    over: bool = False
    """Nothing more is to be waited for."""
    ended: str = ""
    """Why the job ended, where it did."""
    more: str = ""
    """What else is to be known."""
    busy: str = ""
    """What was said of other work on the machine, in which a slow rank cannot be told."""


def read_outcome(strike: Strike, entries: Sequence[JournalEntry]) -> Outcome:
    """Return what `entries`, the job's journal so far, say of a fault."""
    later = [e for e in entries if e.at_s >= strike.at_s - _EARLY_S]
    match strike.fault:
        case "controller" | "bus":
            outcome = _read_part(strike, later)
        case "slow":
            outcome = _read_slowness(strike, later)
        case "disk":
            outcome = _read_disk(strike, later)
        case _:
            outcome = _read_stop(strike, entries, later)
    ended = next((e.body for e in later if isinstance(e.body, JobEnded)), None)
    if ended is not None:
        outcome = outcome._replace(over=True, ended=f"{ended.status}: {ended.reason}")
    return outcome


def _read_part(strike: Strike, later: Sequence[JournalEntry]) -> Outcome:
    """Return what became of a part of perdure's own: training does not stop for it."""
    part = _PARTS[strike.fault]
    lost = next(
        (e.body for e in later if isinstance(e.body, ControllerLost) and e.body.part == part), None
    )
    failed = _list_failures(later)
    wrong = f"{failed[0].cause} of {failed[0].culprit}" if failed else ""
    if lost is None:
        return Outcome(more=wrong)
    return Outcome(
        found_s=max(0.0, lost.at_s - strike.at_s),
        found_as=f"{lost.part}: {lost.cause}",
        right=not failed,
        back_s=max(0.0, lost.restarted_s - strike.at_s),
        redone=None if failed else 0,
        over=True,
        more=f"the world was restarted meanwhile: {wrong}" if failed else "training did not stop",
    )


def _read_slowness(strike: Strike, later: Sequence[JournalEntry]) -> Outcome:
    """Return what was said of a slow rank: the first right verdict, or else the first wrong one."""
    told = [e.body.verdict for e in later if isinstance(e.body, VerdictReached)]
    slow = [v for v in told if v.kind in ("Straggler", "CommSlow")]
    right = [v for v in slow if v.culprit.rank == strike.rank or v.culprit.node == strike.node]
    busy = next((v for v in told if v.kind == "HostBusy"), None)
    chosen = next(iter(right or slow), None)
    failed = _list_failures(later)
    if chosen is None:
        return Outcome(busy=busy.reason if busy is not None else "")
    gone = [e.body for e in later if isinstance(e.body, VerdictWithdrawn)]
    over = [
        w.at_s for w in gone
        if (w.verdict.kind, w.verdict.culprit) == (chosen.kind, chosen.culprit)
    ]  # fmt: skip
    healed = strike.healed_s is not None
    more = f"restarted for it: {failed[0].reason}" if failed else "training did not stop"
    if healed and over and strike.healed_s is not None:
        more += f"; withdrawn {max(0.0, over[-1] - strike.healed_s):.1f} s after it was over"
    return Outcome(
        found_s=max(0.0, chosen.confirmed_s - strike.at_s),
        found_as=f"{chosen.kind} of {chosen.culprit}",
        right=bool(right),
        redone=None if failed else 0,
        over=bool(right) and healed and bool(over),
        more=more,
    )


def _read_disk(strike: Strike, later: Sequence[JournalEntry]) -> Outcome:
    """Return what became of checkpoints that could not be written."""
    refused = [(e.at_s, e.body) for e in later if isinstance(e.body, CheckpointFailed)]
    failed = _list_failures(later)
    if not refused:
        return Outcome()
    found_s, first = refused[0]
    saved = [e.at_s for e in later if isinstance(e.body, CheckpointSaved) and e.at_s > found_s]
    healed = strike.healed_s is not None
    return Outcome(
        found_s=max(0.0, first.at_s - strike.at_s),
        found_as=first.error,
        right="No space left" in first.error,
        back_s=max(0.0, saved[0] - strike.at_s) if saved and healed else None,
        redone=None if failed else 0,
        over=bool(saved) and healed,
        more=f"restarted for it: {failed[0].reason}" if failed else "training did not stop",
    )


def _read_stop(
    strike: Strike, entries: Sequence[JournalEntry], later: Sequence[JournalEntry]
) -> Outcome:
    """Return what became of a fault for which the world stops."""
    failures = _list_failures(later)
    if not failures:
        return _read_verdict(strike, later)
    first, history = failures[0], History()
    for entry in entries:
        history.add(entry)
    end_s = entries[-1].at_s
    recovery = _find_recovery(first, list_recoveries(history, end_s))
    outcome = Outcome(
        found_s=max(0.0, _find_detected(strike, first, later) - strike.at_s),
        found_as=f"{first.cause} of {first.culprit}",
        right=_is_blamed(strike, first, failures),
        more=f"{len(failures)} failures until it was back" if len(failures) > 1 else "",
    )
    skipped = _find_skipped(strike, later)
    if strike.torn:
        why = skipped.partition(": ")[2] if skipped else ""
        outcome = outcome._replace(
            right=bool(skipped),
            found_as=f"the checkpoint cannot be used: {why}" if skipped else outcome.found_as,
        )
    back_s = _find_back(first, later)
    if back_s is None:
        return outcome
    resumed = _find_resumed(first, later)
    again = [f for f in failures[1:] if f.at_s > back_s]
    return outcome._replace(
        back_s=max(0.0, back_s - strike.at_s),
        redone=recovery.lost_steps if recovery is not None else None,
        resumed=resumed,
        in_place=first.epoch >= 0,
        over=True,
        more=f"and failed again: {again[0].cause} of {again[0].culprit}" if again else outcome.more,
    )


def _read_verdict(strike: Strike, later: Sequence[JournalEntry]) -> Outcome:
    """Return what was only told of a fault, as nothing has followed from it, or not yet."""
    all_told = [e.body.verdict for e in later if isinstance(e.body, VerdictReached)]
    told = [v for v in all_told if v.kind not in ("Straggler", "CommSlow", "HostBusy")]
    whole = strike.fault == "node"
    right = [
        v for v in told
        if (v.culprit.node == strike.node if whole else v.culprit.rank == strike.rank)
    ]  # fmt: skip
    verdict = next(iter(right or told), None)
    if verdict is None:
        return Outcome()
    return Outcome(
        found_s=max(0.0, verdict.confirmed_s - strike.at_s),
        found_as=f"{verdict.kind} of {verdict.culprit}",
        right=bool(right),
        more="it was told, and nothing was done about it",
    )


def _list_failures(later: Sequence[JournalEntry]) -> list[FailureDecided]:
    """Return the failures that something followed upon, each as it was decided last."""
    found: dict[str, FailureDecided] = {}
    for entry in later:
        if isinstance(entry.body, FailureDecided) and entry.body.rung not in ("none",):
            found[entry.body.id] = entry.body
    return list(found.values())


def _is_blamed(strike: Strike, first: FailureDecided, failures: Sequence[FailureDecided]) -> bool:
    """Return whether who was harmed is who was blamed: first, or of a node, by any of its ranks."""
    if strike.fault == "node":
        return any(f"node {strike.node}" in f.culprit for f in failures)
    return first.culprit == f"rank {strike.rank}"


def _find_detected(strike: Strike, first: FailureDecided, later: Sequence[JournalEntry]) -> float:
    """Return when it was detected; where something else was blamed at first, when that changed."""
    told = [(e.at_s, e.body) for e in later
            if isinstance(e.body, FailureDecided) and e.body.id == first.id]  # fmt: skip
    if told and told[0][1].culprit != first.culprit:
        return next(at_s for at_s, body in told if body.culprit == first.culprit)
    return first.detected_s


def _find_recovery(failure: FailureDecided, recoveries: Sequence[Recovery]) -> Recovery | None:
    mine = (r for r in recoveries if r.failed and r.at_s == failure.failure_s)
    return next((r for r in mine if failure.epoch >= 0 or r.generation == failure.world), None)


def _find_back(failure: FailureDecided, later: Sequence[JournalEntry]) -> float | None:
    """Return when the next world trained; None where none has yet."""
    for entry in later:
        match entry.body:
            case GenerationStepping(generation=number, at_s=at_s) if number > failure.world:
                return at_s
            case WorldReformed(generation=number, epoch=epoch) as formed:
                if number == failure.world and 0 <= failure.epoch <= epoch:
                    return formed.formed_s
    return None


def _find_resumed(failure: FailureDecided, later: Sequence[JournalEntry]) -> int:
    for entry in later:
        match entry.body:
            case CheckpointRestored(generation=number, step=step) if number > failure.world:
                return step
    return -1


def _find_skipped(strike: Strike, later: Sequence[JournalEntry]) -> str:
    """Return what was said of the checkpoint that was cut."""
    restored = (e.body for e in later if isinstance(e.body, CheckpointRestored))
    told = (why for event in restored for why in event.skipped)
    return next((why for why in told if strike.torn and strike.torn in why), "")


def list_unmade(
    strikes: Sequence[tuple[float, float]], entries: Sequence[JournalEntry]
) -> list[str]:
    """Return failures at which no fault was under way; `strikes` have begin and end in job time."""
    found = []
    for failure in _list_failures(entries):
        if not any(begin_s - _EARLY_S <= failure.at_s <= end_s for begin_s, end_s in strikes):
            found.append(
                f"nobody made this one: {failure.cause} of {failure.culprit} at step "
                f"{failure.at_step}: {failure.reason}"
            )
    return found


def judge_row(
    strike: Strike, outcome: Outcome, *, waited_s: float, began: str = "", again: bool = False
) -> FaultRow:
    """Return the row of a fault whose losses are not compared yet.

    `began` says where a script that declares no steps began afterwards, and `again` that this was
    its start.
    """
    why, failed = outcome.more, True
    if outcome.busy and outcome.found_s is None:
        why = f"the machine was too busy with other work to tell: {outcome.busy}"
        return FaultRow(fault=strike.fault, verdict="not tried", why=why)
    stays = strike.fault == "slow"
    if outcome.found_s is None:
        why = f"it was not found within {waited_s:.0f} s"
    elif not outcome.right:
        whom = f"rank {strike.rank}" if strike.fault != "node" else f"node {strike.node}"
        why = f"{whom} was harmed, and blamed was: {outcome.found_as}"
        if strike.torn:
            why = "it went on without a word of the checkpoint that was cut"
        if outcome.more and not strike.torn:
            why += f"; {outcome.more}"
    elif outcome.back_s is None and not stays:
        why = f"it was not back within {waited_s:.0f} s"
        why += f": {outcome.more}" if outcome.more else ""
    elif strike.saved > 0 <= outcome.resumed < strike.saved:
        why = (
            f"it went on from step {outcome.resumed}, and not from the checkpoint of {strike.saved}"
        )
    elif again:
        why = began
    else:
        failed = False
        why = "; ".join(text for text in (outcome.more, began) if text)
    if outcome.ended and outcome.back_s is None and not stays:
        why = f"the job ended, {outcome.ended}"
        failed = True
    return FaultRow(
        fault=strike.fault,
        verdict="failed" if failed else "passed",
        why=why,
        what=strike.what,
        step=strike.step,
        found_s=_round(outcome.found_s),
        found_as=outcome.found_as,
        culprit_right=outcome.right,
        back_s=_round(outcome.back_s),
        steps_redone=outcome.redone,
    )


def _round(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


class Window(NamedTuple):
    """The steps by which a fault is judged: from where the job went on, to before the next."""

    begin: int
    end: int
    """The first step that is another's."""


def compare_losses(
    windows: Sequence[Window],
    mine: Mapping[int, str],
    theirs: Mapping[int, str],
    before: Mapping[int, str],
) -> list[tuple[Losses, str]]:
    """Return what the losses of each window say, and why; `theirs` are of an undisturbed run.

    Losses are hexadecimal floats by step. What differs before the first window, differs by itself;
    what differs since an earlier window is that one's doing. Of steps that were made again the
    newest are in `mine`, so that a window begins before its fault; `before` has what was logged
    before the first fault, since a job may log nothing before the checkpoint it goes on from.
    """
    shared = sorted(step for step in mine if step in theirs)
    wrong = [step for step in shared if mine[step] != theirs[step]]
    own = [step for step, loss in before.items() if theirs.get(step, loss) != loss]
    own += [step for step in wrong[:1] if windows and step < windows[0].begin]
    if own:
        why = (
            f"the script does not repeat itself: they differ already at step {min(own)}, before "
            "the first fault; is everything seeded?"
        )
        return [("not compared", why) for _ in windows]
    found: list[tuple[Losses, str]] = []
    blamed = False
    for begin, end in windows:
        steps = [step for step in shared if begin <= step < end]
        off = [step for step in steps if mine[step] != theirs[step]]
        if blamed:
            found.append(("not compared", "they differ since an earlier fault"))
        elif not steps:
            found.append(("not compared", "no loss was logged between this and the next"))
        elif off:
            blamed = True
            left, right = (float.fromhex(text) for text in (theirs[off[0]], mine[off[0]]))
            found.append(("differ", f"from step {off[0]} on: {left!r} undisturbed, {right!r} here"))
        else:
            found.append(("equal", f"{len(steps)} steps"))
    return found


def compare_lines(mine: Mapping[str, str], theirs: Mapping[str, str]) -> tuple[Losses, str]:
    """Return what losses say that were printed: by the words in front of them, of no known step."""
    shared = [line for line in mine if line in theirs]
    if not shared:
        return "not compared", "it prints no loss with its step"
    if any(mine[line] != theirs[line] for line in shared):
        return "not compared", "printed losses differ, and by which fault is not known"
    return "equal", f"{len(shared)} printed lines"
