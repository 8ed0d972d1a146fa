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
from perdure.cli.jobs import Job, find_job
from perdure.cli.looking.story import AGREEMENTS, tell_story
from perdure.cli.looking.watch import look_again
from perdure.cli.speech.say import JobName, Json, answer, note, print_json
from perdure.model.codec import encode
from perdure.model.events import MetricsLogged
from perdure.telemetry.curves import Bucket, Curves, list_buckets
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
    curves: Annotated[
        bool, typer.Option("--curves", help="Print run.log: a line for some steps of a name.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Print a job's metrics for Prometheus, serve them, or hand its past to other tools."""
    found = find_job(job)
    if curves:
        _print_curves(read_logged(found), as_json=as_json)
        return
    done: dict[str, object] = {}
    if traces is not None or tensorboard is not None or wandb is not None:
        if traces is not None:
            story = tell_story(found, page=False)
            spans = list_incident_spans(story.report)
            export_spans(spans, f"{job}@{story.first_s}", make_otlp_exporter(traces))
            done["incidents"] = len(spans)
        rows = _collect_rows(read_logged(found))
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


def read_logged(job: Job) -> dict[str, list[Bucket]]:
    """Return what was logged under each name, by step: of an older job what its journal has."""
    logged = Curves()
    for entry in job.read(without=(*AGREEMENTS, "ProgressNoted", "LinksNoted", "RankExited")):
        if isinstance(entry.body, MetricsLogged):
            logged.take(entry.at_s, entry.source, entry.body.rows, 0)
    return list_buckets(logged, job.read_curves())


def _print_curves(logged: dict[str, list[Bucket]], *, as_json: bool) -> None:
    if not as_json:
        print(",".join(("name", *Bucket._fields)))
    for name, buckets in logged.items():
        for bucket in buckets:
            if as_json:
                print(encode({"name": name, **bucket._asdict()}).decode())
            else:
                print(",".join((f'"{name.replace(chr(34), chr(34) * 2)}"', *map(str, bucket))))


def _collect_rows(logged: dict[str, list[Bucket]]) -> list[Row]:
    """Return what was logged by step: the newest singly, of older steps the means of some."""
    rows: dict[int, Row] = {}
    for name, buckets in logged.items():
        for bucket in buckets:
            step = int(bucket.step)
            values, at_s = rows[step][1:] if step in rows else ({}, bucket.at_s)
            rows[step] = (step, values | {name: bucket.mean}, at_s)
    return [rows[step] for step in sorted(rows)]
