"""Commands that move work off nodes: drain, cordon, evict, restore."""

from typing import Annotated, Any, Literal

import typer

from perdure.cli.jobs import find_job, send_command
from perdure.cli.running.options import Json
from perdure.cli.steering.act import JobName, answer_of
from perdure.model.steering import LEAVE_DEADLINE_S

Targets = Annotated[
    list[str],
    typer.Argument(metavar="TARGET...", help="node:1 (or 1), rank:3, replica:2, or a device's id."),
]
Deadline = Annotated[
    float | None,
    typer.Option("--deadline", metavar="S", min=0.1, help="Seconds; then it is taken back."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would happen; change nothing.")]
Why = Annotated[str, typer.Option("--why", metavar="TEXT", help="For the journal.")]
Wait = Annotated[bool, typer.Option("--wait", help="For a spare node, should none be ready.")]

_ANSWER_S = 15.0


def drain(
    job: JobName,
    targets: Targets,
    deadline: Deadline = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Evict where it cannot be drained, or not in time."),
    ] = False,
    wait: Wait = False,
    dry_run: DryRun = False,
    why: Why = "",
    as_json: Json = False,
) -> None:
    """Move the ranks off a node after a checkpoint, so that no committed step is lost.

    All ranks agree on a step, save, and make no step after it; a spare node stands in, and the
    new world goes on from there. Refused where no spare node is ready, and where the script does
    not call perdure.init().
    """
    _send(job, "drain", targets, deadline, why, dry_run, as_json, force=force, wait=wait)


def cordon(
    job: JobName,
    targets: Targets,
    dry_run: DryRun = False,
    why: Why = "",
    as_json: Json = False,
) -> None:
    """Let a node take no new ranks from the next world on; those that run there stay."""
    _send(job, "cordon", targets, None, why, dry_run, as_json)


def evict(
    job: JobName,
    targets: Targets,
    deadline: Deadline = None,
    wait: Wait = False,
    dry_run: DryRun = False,
    why: Why = "",
    as_json: Json = False,
) -> None:
    """End the ranks on a node now; a spare node stands in, from the newest checkpoint."""
    _send(job, "evict", targets, deadline, why, dry_run, as_json, wait=wait)


def restore(
    job: JobName,
    targets: Targets,
    dry_run: DryRun = False,
    why: Why = "",
    as_json: Json = False,
) -> None:
    """Let a node run ranks again: undoes cordon, drain and evict."""
    _send(job, "restore", targets, None, why, dry_run, as_json)


def _send(
    job: str,
    verb: Literal["drain", "cordon", "evict", "restore"],
    targets: list[str],
    deadline_s: float | None,
    why: str,
    dry_run: bool,
    as_json: bool,
    **flags: bool,
) -> None:
    args: dict[str, Any] = {"targets": targets}
    args |= {name: True for name, value in flags.items() if value}
    args |= {"dry_run": True} if dry_run else {}
    args |= {"why": why} if why else {}
    args |= {"deadline_s": deadline_s} if deadline_s is not None else {}
    timeout_s = _ANSWER_S + (deadline_s or LEAVE_DEADLINE_S)
    result = send_command(find_job(job), verb, args, timeout_s=timeout_s)
    text = f"{f'{verb} would' if dry_run else verb}: {result.get('reason', 'done')}"
    answer_of(job, result, text, as_json)
