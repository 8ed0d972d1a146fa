"""What befell a job as marks on somebody's curves: a sentence, a step, and a few numbers each.

An incident is one mark, once it is over and its cost is known; that it began is told before, as the
verdict or the failure that alerts tell of. Marks follow from the journal alone: those of its first
n entries are the same whoever asks, and however often, so that who has told them once can go on.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple, get_args

from perdure.model.events import (
    GenerationStepping,
    JobPaused,
    JobResumed,
    JournalEntry,
    OperatorNoted,
    ProgressNoted,
    RankExited,
    SettingsChanged,
)
from perdure.model.input.plain import make_plain, name_step
from perdure.model.job import AlertKind
from perdure.model.report import Recovery
from perdure.model.steering import Change
from perdure.telemetry.accounting.ledger import LedgerFold
from perdure.telemetry.alerts import AlertFold

_TOLD_AS_INCIDENT = {"recovered", "part"}
TEXT_MAX = 500
_VALUES_MAX = 20
"""Settings of one change that are told."""


class Mark(NamedTuple):
    """One thing that befell the job."""

    seq: int
    """Of the journal's entry from which it follows."""
    kind: str
    """`incident`, `part` (one of perdure's own died), `join`, `setting`, `pause`, `remark`, or what
    an alert is of."""
    at_s: float
    step: int
    """How far the job was; -1 where that is not known."""
    text: str
    """One sentence, on one line."""
    values: dict[str, float]
    """Of an incident: `seconds_lost` (wall time) and `steps_lost`, where that is known."""


@dataclass(slots=True)
class MarkFold:
    """Finds marks beside a ledger that takes each entry first."""

    job: str
    ledger: LedgerFold
    step: int = -1
    """How far the job is, as far as is known; whoever knows better may set it."""
    _alerts: AlertFold = field(init=False)
    _over: set[tuple[float, str, int]] = field(default_factory=set)
    """Incidents whose end was found."""

    def __post_init__(self) -> None:
        """Want all alerts that are not told as an incident."""
        kinds = frozenset(get_args(AlertKind)) - _TOLD_AS_INCIDENT
        self._alerts = AlertFold(self.job, kinds)

    def add(self, entry: JournalEntry) -> Mark | None:
        """Return the mark of `entry`, if it is one by itself."""
        step = self.step
        match entry.body:
            case ProgressNoted() | GenerationStepping() as event:
                self.step = event.step if event.step >= 0 else step
                return None
            case SettingsChanged() as event:
                change = event.change
                return _make(entry, "setting", change.step, describe_change(change))
            case JobPaused() | JobResumed() as event:
                what = "paused before" if isinstance(event, JobPaused) else "goes on at"
                return _make(
                    entry, "pause", event.step, f"{what} step {event.step}{_by(event.who)}"
                )
            case OperatorNoted() as event:
                step = event.step if event.step >= 0 else step
                return _make(entry, "remark", step, f"{event.who or 'an operator'}: {event.text}")
            case RankExited() as event:
                step = event.account.step if event.account.step >= 0 else step
        alert = self._alerts.add(entry)
        return None if alert is None else _make(entry, alert.kind, step, alert.summary)

    def list_over(self, seq: int) -> list[Mark]:
        """Return the incidents that are over since the last call, as of entry `seq`."""
        ended = self.ledger.history.ended
        found = []
        for r in self.ledger.list_recoveries(ended.at_s if ended is not None else math.inf):
            key = (r.at_s, r.culprit, r.generation)
            if math.isfinite(r.total_s) and key not in self._over:
                self._over.add(key)
                found.append(_make_incident(seq, r, self.step))
        return found


def _make(entry: JournalEntry, kind: str, step: int, text: str) -> Mark:
    return Mark(entry.seq, kind, entry.at_s, step, make_plain(text, TEXT_MAX), {})


def _by(who: str) -> str:
    return f", by {who}" if who else ""


def describe_change(change: Change) -> str:
    """Return which settings were changed, from what to what, from which step on, by whom and why.

    >>> describe_change(Change(epoch=1, step=7, values={"lr": 0.5}, before={"lr": 0.1}, who="al"))
    'lr 0.1 -> 0.5 from step 7 on, by al'
    """
    told = [
        f"{key} {change.before[key]} -> {value}" if key in change.before else f"{key} = {value}"
        for key, value in list(change.values.items())[:_VALUES_MAX]
    ]
    left = len(change.values) - len(told)
    more = f" and {left} more" if left else ""
    why = f": {change.why}" if change.why else ""
    return f"{', '.join(told)}{more} from step {change.step} on{_by(change.who)}{why}"


def _make_incident(seq: int, r: Recovery, step: int) -> Mark:
    kind, values = "incident", {"seconds_lost": r.total_s}
    parts = [f"{r.culprit}: {r.cause}{name_step(r.at_step)}"]
    if not r.failed:
        kind, values = "part" if r.rung == "none" else "join", {}
        parts.append(r.reason)
    else:
        parts.append(f"{r.rung}, {r.total_s:.2f} s lost")
        parts.append("steps lost unknown" if r.lost_steps is None else f"{r.lost_steps} steps lost")
        if r.lost_steps is not None:
            values["steps_lost"] = float(r.lost_steps)
    text = make_plain("; ".join(part for part in parts if part), TEXT_MAX)
    at_step = r.at_step if r.at_step >= 0 else step
    return Mark(seq, kind, r.at_s, at_step, text, values)
