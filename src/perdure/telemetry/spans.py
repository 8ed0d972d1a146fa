"""Incidents as spans of a trace: one trace an incident, one span a phase of its recovery."""

from typing import NamedTuple

from perdure.model.report import Recovery, Report

PHASES = ("detect", "decide", "abort", "communicator", "state", "warmup")


class IncidentSpan(NamedTuple):
    """One incident; `phases` follow one another from `start_s` on."""

    number: int
    """Of the job, from 1: with the job's name and start it makes the trace's id."""
    name: str
    start_s: float
    end_s: float
    attributes: dict[str, str | int | float]
    phases: tuple[tuple[str, float, float], ...]
    """(name, start, end), those that took any time."""


def find_spans(report: Report) -> list[IncidentSpan]:
    """Return the incidents of `report`, oldest first."""
    return [_make(report, r, number) for number, r in enumerate(report.recoveries, 1)]


def _make(report: Report, r: Recovery, number: int) -> IncidentSpan:
    at_s, phases = r.at_s, list[tuple[str, float, float]]()
    for name in PHASES:
        took_s: float = getattr(r, f"{name}_s")
        if took_s > 0:
            phases.append((name, at_s, at_s + took_s))
            at_s += took_s
    attributes: dict[str, str | int | float] = {
        "perdure.job": report.job,
        "perdure.cause": r.cause,
        "perdure.culprit": r.culprit,
        "perdure.rung": r.rung,
        "perdure.reason": r.reason,
        "perdure.step": r.at_step,
    }
    if r.lost_steps is not None:
        attributes["perdure.lost_steps"] = r.lost_steps
    name = f"{r.cause} of {r.culprit}"
    return IncidentSpan(number, name, r.at_s, r.at_s + r.total_s, attributes, tuple(phases))
