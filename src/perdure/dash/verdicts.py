"""Verdicts as text: culprit, evidence, who waits for whom, and stacks that stand alike together."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from perdure.model.codec import encode
from perdure.model.input.plain import REASON_MAX, make_plain, name_step, shorten_line, shorten_lines
from perdure.model.report import Report, Snapshot
from perdure.model.verdicts import Slowness, Verdict

if TYPE_CHECKING:
    from perdure.telemetry.curves import DroppedCount

INDENT = " " * 13
_WAITS_MAX = 12


def describe_verdict(verdict: Verdict) -> str:
    """Return a verdict as one line."""
    over = " (withdrawn)" if "withdrawn" in verdict.evidence else ""
    reason = shorten_line(verdict.reason, REASON_MAX)
    return f"{verdict.kind} of {verdict.culprit}: {reason}{over}"


def render_verdict(verdict: Verdict, start_s: float) -> str:
    """Return a verdict and its evidence as text; `start_s` is the job's first instant."""
    lines = [
        f"{verdict.first_seen_s - start_s:9.1f} s  {describe_verdict(verdict)}",
        f"{INDENT}confirmed after {verdict.confirmed_s - verdict.first_seen_s:.2f} s, "
        f"confidence {verdict.confidence:.0%}, generation {verdict.generation}",
    ]
    costs = f"costs {describe_slowness(verdict.slowness)}" if verdict.slowness else ""
    lines += [f"{INDENT}{text}" for text in (describe_grounds(verdict), costs) if text]
    for name, value in verdict.evidence.items():
        lines += render_evidence(name, value)
    return "\n".join(lines)


def render_dropped(source: str, dropped: "DroppedCount", start_s: float) -> str:
    """Return how many metrics of one source were dropped as text."""
    from perdure.telemetry.curves import UNREADABLE

    what = "values of run.log: no numbers, or too many or too large"
    if source == UNREADABLE:
        what = "lines or files of curves that cannot be read, or could not be written"
    at_s = dropped.first_s - start_s
    return f"{at_s:9.1f} s  dropped: {dropped.count:,} of {make_plain(source)}: {what}"


def describe_grounds(verdict: Verdict) -> str:
    """Return why it was acted upon, or when that may be; empty where nothing is to be said."""
    if not verdict.ground or "withdrawn" in verdict.evidence:
        return ""
    certain = "certain" if verdict.certain else "not certain"
    if verdict.actionable:
        return f"{certain}; acted upon, because {verdict.acts_why}"
    wait_s = max(0.0, verdict.acts_s - verdict.confirmed_s)
    return f"{certain}; acts at the earliest {wait_s:.0f} s after that: {verdict.acts_why}"


def describe_slowness(slow: Slowness) -> str:
    """Return what a slowness costs, such as `45% of every step (at least 44%)`."""
    return (
        f"{slow.share:.0%} of every step (at least {slow.share_low:.0%}), "
        f"{slow.lost_s_per_hour:.0f} s an hour; {slow.ratio:.2f} times as slow "
        f"({slow.ratio_low:.2f} to {slow.ratio_high:.2f})"
    )


def render_withheld(told: Snapshot | Report) -> list[str]:
    """Return in lines that a job is only observed, and what would have been done; else none."""
    lines = ["Observed only: nothing was ever acted upon."] if told.observed else []
    for row in told.withheld:
        reason = shorten_line(f"{row.cause} of {row.culprit}: {row.reason}", REASON_MAX)
        lines.append(f"  would have {row.would}{name_step(row.step)}: {reason}")
    return lines


def render_evidence(name: str, value: Any) -> list[str]:
    """Return one piece of evidence as indented lines, of a long text its beginning and its end."""
    if isinstance(value, list | tuple | dict | str) and not value:
        return []
    if name == "nothing_done" and isinstance(value, list | tuple):
        return [f"{INDENT}nothing was done: {why}" for why in value]
    if name == "waits" and isinstance(value, list | tuple):
        return _render_block("who waits for whom", render_waits(value))
    if name == "stacks" and isinstance(value, dict):
        texts = {str(rank): str(text) for rank, text in value.items()}
        from perdure.telemetry.stacks import render_stacks  # With the parser of stacks.

        return _render_block("stacks", render_stacks(texts))
    if isinstance(value, str) and "\n" in value:
        return _render_block(name, shorten_lines(value.rstrip().splitlines()))
    if isinstance(value, dict) and any("\n" in str(item) for item in value.values()):
        return [
            line for key, item in value.items() for line in render_evidence(f"{name} {key}", item)
        ]
    if isinstance(value, list | tuple) and all(isinstance(v, str) for v in value):
        return _render_block(name, shorten_lines(value))
    if isinstance(value, float):
        value = round(value, 3)
    if isinstance(value, dict | list | tuple):
        value = encode(value).decode()
    return [f"{INDENT}{name}: {shorten_line(str(value), REASON_MAX)}"]


def render_waits(edges: Iterable[Any]) -> list[str]:
    """Return the wait-for graph: the waiters of each rank and collective on one line.

    An edge is [waiter, holder, communicator, operation, sequence number].
    """
    waiters: dict[tuple[Any, ...], list[int]] = {}
    for edge in edges:
        if isinstance(edge, list | tuple) and len(edge) == 5:
            waiter, *rest = edge
            waiters.setdefault(tuple(rest), []).append(waiter)
    lines = []
    for (holder, comm, op, seq), ranks in sorted(waiters.items(), key=lambda e: -len(e[1])):
        plural = "s" if len(ranks) > 1 else ""
        verb = "wait" if plural else "waits"
        who = ",".join(str(rank) for rank in sorted(ranks))
        lines.append(f"rank{plural} {who} {verb} for rank {holder} in {op} #{seq} of {comm}")
    more = len(lines) - _WAITS_MAX
    return lines[:_WAITS_MAX] + [f"and {more} more"] * (more > 0)


def _render_block(name: str, lines: Iterable[str]) -> list[str]:
    return [f"{INDENT}{name}:", *(f"{INDENT}  {line}" for line in lines)]
