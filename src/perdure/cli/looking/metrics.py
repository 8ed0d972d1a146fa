"""`perdure metrics`: a job's figures for the monitoring that is there already."""

from pathlib import Path
from typing import Annotated

import typer

from perdure.adapters.exporters import (
    PrometheusServer,
    Row,
    export_spans,
    make_otlp_exporter,
    render_prometheus,
    write_tensorboard,
    write_wandb,
)
from perdure.cli.jobs import find_job
from perdure.cli.looking.watch import look_again
from perdure.cli.speech.say import JobName, Json, answer, note, print_json
from perdure.model.events import JournalEntry, MetricsLogged
from perdure.telemetry import make_report
from perdure.telemetry.monitoring import RANKS_MAX, list_incident_spans, list_metrics


def metrics(
    job: JobName,
    port: Annotated[
        int | None,
        typer.Option("--port", min=0, max=65535, help="Serve /metrics until the job has ended."),
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to serve on.")] = "127.0.0.1",
    ranks_max: Annotated[
        int, typer.Option("--ranks-max", min=0, help="With more ranks, figures are by node.")
    ] = RANKS_MAX,
    traces: Annotated[
        str | None,
        typer.Option("--traces", metavar="URL", help="Send incidents to OpenTelemetry (OTLP)."),
    ] = None,
    tensorboard: Annotated[
        Path | None,
        typer.Option("--tensorboard", metavar="DIR", help="Write run.log for TensorBoard."),
    ] = None,
    wandb: Annotated[
        str | None,
        typer.Option("--wandb", metavar="PROJECT", help="Write run.log for Weights & Biases."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print a job's metrics for Prometheus, serve them, or hand its past to other tools."""
    found = find_job(job)
    done: dict[str, object] = {}
    if traces is not None or tensorboard is not None or wandb is not None:
        entries = found.entries()
        if traces is not None:
            spans = list_incident_spans(make_report(entries, found.now(entries)))
            start_s = entries[0].at_s if entries else 0.0
            export_spans(spans, f"{job}@{start_s}", make_otlp_exporter(traces))
            done["incidents"] = len(spans)
        rows = _collect_rows(entries)
        if tensorboard is not None:
            done["tensorboard_rows"] = write_tensorboard(str(tensorboard), rows)
        if wandb is not None:
            folder = str(Path(found.paths.root) / "wandb")
            done["wandb_rows"] = write_wandb(wandb, job, folder, rows)
            done["wandb_folder"] = folder
        answer(done, "  ".join(f"{name} {value}" for name, value in done.items()), as_json=as_json)
    elif port is not None:
        server = PrometheusServer(found.snapshot, host, port, ranks_max)
        try:
            note(f"serving http://{host}:{server.port}/metrics until {job} has ended")
            for _ in look_again(found, 1.0):
                pass
        finally:
            server.close()
    elif as_json:
        listed = list_metrics(found.snapshot(), ranks_max)
        print_json({"metrics": [metric._asdict() for metric in listed]})
    else:
        print(render_prometheus(found.snapshot(), ranks_max), end="")


def _collect_rows(entries: list[JournalEntry]) -> list[Row]:
    """Return what was logged by step; a step logged again after a restart counts once."""
    rows: dict[int, Row] = {}
    for entry in entries:
        if isinstance(entry.body, MetricsLogged):
            for step, values in entry.body.rows:
                before = rows[step][1] if step in rows else {}
                rows[step] = (step, before | values, entry.at_s)
    return [rows[step] for step in sorted(rows)]
