"""`perdure diagnose`: each verdict with its culprit and evidence, live or after the fact."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perdure.cli.jobs import (
    find_job,
    read_start_s,
    say_damage,
)
from perdure.cli.looking.story import AGREEMENTS
from perdure.cli.speech.say import (
    AnyJob,
    Json,
    print_json,
)
from perdure.model.input.plain import REASON_MAX, shorten_line

if TYPE_CHECKING:
    from perdure.model.platforms.outcome import Outcome
    from perdure.model.report import Snapshot
    from perdure.telemetry.outcome import JobOutcome, Vanishing

_BULK = (*AGREEMENTS, "ProgressNoted", "RankJoined", "CheckpointRestored", "RanksStarted")
"""Entries that no verdict and no outcome is made from."""
_NATIVE_TIMEOUT_S = 30.0
"""Symbols of torch's libraries are read from disk at first."""


def diagnose(
    job: AnyJob,
    native: Annotated[
        bool,
        typer.Option("--native", help="Stacks of all living ranks now, with native frames."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Say what went wrong: each verdict with culprit and evidence."""
    from perdure.dash.links import render_links
    from perdure.dash.live import describe_late
    from perdure.dash.verdicts import render_dropped, render_verdict, render_withheld
    from perdure.telemetry.links import read_delay_matrix
    from perdure.telemetry.outcome import collect_last_words
    from perdure.telemetry.stacks import render_stacks
    from perdure.telemetry.verdicts import list_verdicts
    from perdure.traps import find_trap, name_symptoms

    found = find_job(job)
    stacks = _take_native_stacks(found.snapshot()) if native else {}
    reader = found.read(without=_BULK)
    entries = list(reader)
    verdicts = list_verdicts(entries)
    vanished = None if found.alive else found.explain_vanishing(entries)
    outcome = found.judge_outcome(entries)
    named = [  # The traps that the last words of ranks that failed speak of.
        {"trap": s.trap, "says": s.says, "line": line, "mend": find_trap(s.trap).mend}
        for s, line in name_symptoms(collect_last_words(entries))
    ]
    attempts, dropped = found.list_attempts(), found.read_curves().dropped
    snapshot = found.snapshot()
    damage = say_damage(reader.tally)
    if as_json:
        more: dict[str, Any] = {
            **damage,
            "vanished": vanished,
            "native_stacks": stacks,
            "traps": named,
            "slurm": attempts,
            "observed": snapshot.observed,
            "withheld": snapshot.withheld,
            "mended": snapshot.mended,
            "skipped": snapshot.skipped,
            "hung_saves": snapshot.hung_saves,
            "empty_slots": snapshot.empty_slots,
            "dropped_values": dropped,
        }
        document = {"verdicts": verdicts, "fate": outcome}
        print_json(document | {k: v for k, v in more.items() if v})
        return
    _print_end(snapshot, outcome, named, vanished, attempts)
    start_s = read_start_s(entries[0]) if entries else 0.0
    if withheld := render_withheld(snapshot):
        print("\n".join(withheld) + "\n")
    late = [describe_late(row) for row in snapshot.replicas if row.late]
    if verdicts or late:
        print("\n\n".join([*late, *(render_verdict(verdict, start_s) for verdict in verdicts)]))
    elif not snapshot.withheld:
        reason = shorten_line(snapshot.reason, REASON_MAX)
        print(f"{job}: {snapshot.state}; nothing was found wrong. {reason}".rstrip())
    if native:
        print("\nstacks now, with native frames")
        print("\n".join(f"  {line}" for line in render_stacks(stacks)) or "  no rank is alive")
    rendered = (render_dropped(*row, start_s) for row in sorted(dropped.items()))
    for block in (*rendered, *_render_checkpoints(snapshot)):
        print("\n" + block)
    print("\n" + render_links(read_delay_matrix(entries, found.read_newest().links), 100))


def _render_checkpoints(snapshot: "Snapshot") -> Iterator[str]:
    """Yield what is wrong with the journal and with checkpoints, a block each."""
    from perdure.dash.text import (
        render_empty_slots,
        render_hung_saves,
        render_mended,
    )

    if snapshot.mended:
        yield render_mended(snapshot.mended)
    if snapshot.hung_saves:
        yield render_hung_saves(snapshot.hung_saves)
    if snapshot.empty_slots:
        yield render_empty_slots(snapshot.job, snapshot.empty_slots)


def _print_end(
    snapshot: "Snapshot",
    outcome: "JobOutcome",
    named: list[dict[str, str]],
    vanished: "Vanishing | None",
    attempts: "list[Outcome]",
) -> None:
    """Print what ended the job, or its attempts before, where something has."""
    from perdure.dash.text import render_skipped
    from perdure.dash.verdicts import render_evidence

    if snapshot.skipped:
        print(render_skipped(snapshot.skipped) + "\n")
    if outcome.state in ("dead", "stalled"):
        print(f"{snapshot.job} is {outcome.state}: {outcome.reason}\n")
    for row in named:
        print(f"{row['trap']}: {row['says']}: {shorten_line(row['line'])}\n  mend: {row['mend']}\n")
    if vanished is not None:
        print(f"`perdure run` is gone: {vanished.cause}: {vanished.reason}")
        for name, value in vanished.evidence.items():
            print("\n".join(render_evidence(name, value)))
        print()
    for number, end in enumerate(attempts):
        where = f" on {end.nodes}" if end.nodes else ""
        print(
            f"Slurm, attempt {number}: {end.state}{where}, {end.start} to {end.end}: {end.reason}"
        )


def _take_native_stacks(snapshot: "Snapshot") -> dict[str, str]:
    """Return the stacks of the ranks that are alive, by rank."""
    import asyncio

    from perdure.adapters.stacks import dump_stack

    alive = [row for row in snapshot.ranks if row.pid and row.state not in ("exited", "failed")]

    async def take() -> list[str]:
        dumps = [
            dump_stack(
                row.pid,
                nonblocking=row.state == "suspected",
                native=True,
                timeout_s=_NATIVE_TIMEOUT_S,
            )
            for row in alive
        ]
        return list(await asyncio.gather(*dumps))

    return dict(zip((str(row.rank) for row in alive), asyncio.run(take()), strict=True))
