"""What befell a job, a line each, while it runs: who, what, at which step, how soon it was back.

▲ rank 1: signal 9 (SIGKILL) at step 200 · back in 0.38 s · 38 steps lost · perdure diagnose demo

A hang that is not acted upon for long is no incident, and is what somebody who looks on wants to
know most: what is found, until when it is left alone, and how to end it now.
"""

from perdure.dash.live import render_count
from perdure.dash.text import render_skipped
from perdure.model.input.plain import name_step, shorten_line, show_controls
from perdure.model.report import IncidentRow, Snapshot
from perdure.model.verdicts import HANGS, Verdict

OPEN_S = 2.0
"""An incident that lasts longer is told before it is over as well."""
HANGS_S = 10.0
"""A hang that lasts longer, and is left alone for as long again, is told."""
_CAUSE_MAX = 120
_KEPT = 1000


class StoryTeller:
    """Takes snapshots; tells of each incident once it is over, and before if that takes long."""

    def __init__(self) -> None:
        """Begin before the first snapshot."""
        self._told: dict[tuple[float, str, str], bool] = {}
        self._hangs: dict[tuple[int, float, str], Verdict] = {}
        """Told, and not known to be over."""
        self._skipped_s = float("-inf")
        """Time of the newest checkpoint that was told not to be used."""

    def tell(self, snapshot: Snapshot) -> list[str]:
        """Return the lines that are new."""
        lines = self._tell_hangs(snapshot)
        new = [row for row in snapshot.skipped if row.at_s > self._skipped_s]
        lines += [f"▲ {render_skipped([row])}" for row in new]
        self._skipped_s = max([self._skipped_s, *(row.at_s for row in new)])
        for row in snapshot.recent:
            key, over = (row.at_s, row.culprit, row.cause), row.total_s is not None
            known = self._told.get(key)
            if known or (known is False and not over):
                continue
            if not over and snapshot.at_s - row.at_s < OPEN_S:
                continue
            self._told[key] = over
            lines.append(render_story(row, snapshot.job))
        while len(self._told) > _KEPT:
            del self._told[next(iter(self._told))]
        return lines

    def _tell_hangs(self, snapshot: Snapshot) -> list[str]:
        lines = []
        now_s = snapshot.at_s
        for verdict in snapshot.verdicts:
            if verdict.kind not in HANGS or verdict.generation != snapshot.generation:
                continue
            what = f"{verdict.kind} of {verdict.culprit}"
            key = (verdict.generation, verdict.first_seen_s, what)
            if "withdrawn" in verdict.evidence:
                if self._hangs.pop(key, None) is not None:
                    lines.append(f"▲ {verdict.culprit}: {verdict.kind} is over; nothing was done")
            elif key not in self._hangs and is_left_alone(verdict, now_s):
                self._hangs[key] = verdict
                lines += render_hang(verdict, snapshot)
        for key in [key for key in self._hangs if key[0] != snapshot.generation]:
            del self._hangs[key]
        while len(self._hangs) > _KEPT:
            del self._hangs[next(iter(self._hangs))]
        return lines


def is_left_alone(verdict: Verdict, now_s: float) -> bool:
    """Return whether a hang has lasted for long, and will last for long without somebody's word."""
    if verdict.actionable or now_s - verdict.first_seen_s < HANGS_S:
        return False
    return not verdict.ground or verdict.acts_s - now_s > HANGS_S


def render_hang(verdict: Verdict, snapshot: Snapshot) -> list[str]:
    """Return a hang that is left alone: what is found, until when, and how to end it now."""
    job, who = snapshot.job, verdict.culprit
    for_s = snapshot.at_s - verdict.first_seen_s
    reason = shorten_line(show_controls(verdict.reason), _CAUSE_MAX)
    lines = [f"▲ {who}: {verdict.kind} for {for_s:.0f} s: {reason} · perdure diagnose {job}"]
    if snapshot.observed:
        return lines
    until = f"for {verdict.acts_s - snapshot.at_s:.0f} s more at least" if verdict.ground else ""
    text = f"  it is left alone {until}".rstrip() + " (detect.hang_action_s of the job file)"
    if who.rank is not None:
        verb = f"inject {job} crash" if snapshot.replicas else f"restart {job} --now"
        text += f"; perdure {verb} --rank {who.rank} has it restarted now"
    return [*lines, text]


def render_story(row: IncidentRow, job: str) -> str:
    """Return an incident as one line.

    >>> render_story(IncidentRow(1.0, "signal 9", "rank 1", "restart", 0.38, 200, 38), "d")
    '▲ rank 1: signal 9 at step 200 · back in 0.38 s · 38 steps lost · perdure diagnose d'
    >>> render_story(IncidentRow(1.0, "join", "rank 4", "join", 0.1, 210), "d")
    '▲ rank 4: came in at step 210'
    """
    cause = shorten_line(show_controls(row.cause), _CAUSE_MAX)
    if row.rung == "join":
        return f"▲ {row.culprit}: came in{name_step(row.at_step)}"
    parts = [f"▲ {row.culprit}: {cause}{name_step(row.at_step)}"]
    if row.rung == "none":
        parts.append("training did not stop")
    elif row.rung == "give up":
        parts.append("given up")
    elif row.total_s is None:
        parts.append("not back yet")
    else:
        parts.append(f"back in {row.total_s:.2f} s")
        if row.lost_steps is None:
            parts.append("lost steps unknown")
        elif row.lost_steps:
            parts.append(f"{render_count(row.lost_steps, 'step')} lost")
    return " · ".join([*parts, f"perdure diagnose {job}"])
