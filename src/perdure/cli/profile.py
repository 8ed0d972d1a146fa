"""`perdure profile`: what a script's model and this machine cost, measured by the script itself."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from shutil import copyfile
from typing import Annotated, Any

import msgspec
import typer

from perdure.cli.speech.say import Json, answer, note, render_table
from perdure.model.codec import decode, encode
from perdure.model.errors import ConfigError, PerdureError
from perdure.model.planning.costs import (
    ASK,
    CostProfile,
    ProfileReport,
    ProfileRequest,
    read_profile,
)
from perdure.service.jobfiles import resolve_home

CONTEXT: dict[str, Any] = {"allow_interspersed_args": False}
"""What follows the script is the script's."""


def profile(
    script: Annotated[
        Path,
        typer.Argument(help="A Python file that calls perdure.elastic.train with blocks=[...]."),
    ],
    args: Annotated[list[str] | None, typer.Argument(help="Its arguments.")] = None,
    micro_batch: Annotated[
        list[int] | None,
        typer.Option(
            "--micro-batch",
            min=1,
            help="Samples; repeatable. Default: the script's, half and double.",
        ),
    ] = None,
    ranks: Annotated[
        int, typer.Option("--ranks", min=1, help="Processes of the largest group that is measured.")
    ] = 8,
    seconds: Annotated[
        float,
        typer.Option("--seconds", min=0.0, help="At least so long for each micro-batch size."),
    ] = 2.0,
    again: Annotated[
        bool, typer.Option("--again", help="Measure also what was measured before.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Also write the profile here.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure what a model's blocks and this machine's links cost, for `perdure plan`.

    Runs SCRIPT until it calls perdure.elastic.train, which measures and does not train. What was
    measured of the same model on the same machine is kept.
    """
    if not script.is_file():
        raise ConfigError(f"no such script: {script}")
    report = _run(script, args or [], tuple(sorted(set(micro_batch or ()))), ranks, seconds, again)
    for text in report.notes:
        note(text)
    if out is not None:
        copyfile(report.path, out)
    found = read_profile(Path(report.path).read_text(encoding="utf-8"), report.path)
    costs = {**msgspec.to_builtins(report), "fingerprint": found.fingerprint}
    document = {name: costs[name] for name in costs if name not in ("error", "hint")}
    answer(document, _render(found, report), as_json=as_json)


def _run(
    script: Path, args: list[str], sizes: tuple[int, ...], ranks: int, seconds: float, again: bool
) -> ProfileReport:
    with tempfile.TemporaryDirectory(prefix="perdure-profile-") as folder:
        report = Path(folder, "report")
        request = ProfileRequest(
            folder=str(Path(resolve_home(), "costs")),
            report=str(report),
            model=script.name,
            micro_batches=sizes,
            ranks=ranks,
            seconds=seconds,
            again=again,
        )
        env = {"OMP_NUM_THREADS": "1", **os.environ, ASK: encode(request).decode()}
        done = subprocess.run([sys.executable, str(script), *args], env=env, stdout=sys.stderr)
        if not report.exists():
            if done.returncode:
                raise PerdureError(
                    f"{script} failed with exit code {done.returncode}",
                    hint="what follows SCRIPT is the script's own; options of perdure go before it",
                )
            raise ConfigError(
                f"{script} has ended without a call of perdure.elastic.train",
                hint="its model is measured there: perdure.elastic.train(blocks=[...], ...)",
            )
        found: ProfileReport = decode(report.read_bytes(), ProfileReport)
    if found.error:
        error = PerdureError(found.error, hint=found.hint)
        error.exit_code = found.exit_code
        raise error
    return found


def _render(found: CostProfile, report: ProfileReport) -> str:
    size = found.micro_batches[-1]
    costs = [(block, block.costs[size]) for block in found.blocks]
    rows = [
        (
            block.name,
            round(1e3 * cost.forward_s, 3),
            round(1e3 * cost.backward_s, 3),
            "-" if cost.weight_s is None else round(1e3 * cost.weight_s, 3),
            cost.input_bytes,
            cost.stored_bytes,
            block.state_bytes,
        )
        for block, cost in costs
    ]
    what = ", ".join(report.measured) or "nothing: all was kept from before"
    head = ("block", "forward ms", "backward ms", "weights ms", "input B", "stored B", "state B")
    lines = [
        f"profile      {report.path}",
        f"machine      {found.machine}",
        f"measured     {what}; worst spread {report.spread:.0%} ({report.spread_of})",
        f"micro-batch  {', '.join(map(str, found.micro_batches))}; below: {size}\n",
        render_table(head, rows),
    ]
    lines += [
        f"\nmessage      {1e6 * t.latency_s:.0f} us + bytes at {t.bytes_per_s / 1e9:.2f} GB/s"
        for t in found.transfers
    ]
    lines += [
        f"all-reduce   over {a.group_size}: {1e6 * a.latency_s:.0f} us + bytes at "
        f"{a.bytes_per_s / 1e9:.2f} GB/s"
        for a in found.all_reduces
    ]
    return "\n".join(lines)
