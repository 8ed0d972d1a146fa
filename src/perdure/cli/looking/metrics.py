"""`perdure metrics`: a job's figures for the monitoring that is there already."""

import contextlib
import faulthandler
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perdure.cli.jobs import Job, find_job
from perdure.cli.speech.say import JobName, Json, answer, keep_given, note, print_json
from perdure.model.errors import ConfigError
from perdure.telemetry.monitoring import RANKS_MAX

if TYPE_CHECKING:
    from perdure.telemetry.curves import Bucket

_LEAVE_S = 10.0
_NICE = 10
"""Of a process that the controller has started: ranks come first."""
_SPARED_LAST = 800
"""Of such a process: where memory runs out, the kernel is to kill it before any rank."""

RunLog = Annotated[
    bool,
    typer.Option(
        "--run-log/--no-run-log",
        help="With --tensorboard, --wandb or --mlflow: values of run.log as well.",
    ),
]
Port = Annotated[
    int | None,
    typer.Option(
        "--port",
        min=0,
        max=65535,
        help="Without --tensorboard, --wandb or --mlflow: serve /metrics until the job has ended.",
    ),
]
RanksMax = Annotated[
    int,
    typer.Option(
        "--ranks-max",
        min=0,
        help="Without --tensorboard, --wandb or --mlflow: with more ranks than this, "
        "figures are by node.",
    ),
]


def metrics(
    job: JobName,
    port: Port = None,
    host: Annotated[
        str, typer.Option("--host", help="With --port: address to serve on.")
    ] = "127.0.0.1",
    ranks_max: RanksMax = RANKS_MAX,
    tensorboard: Annotated[
        Path | None,
        typer.Option("--tensorboard", metavar="DIR", help="Tell TensorBoard of it."),
    ] = None,
    wandb: Annotated[
        str | None,
        typer.Option("--wandb", metavar="PROJECT", help="Tell Weights & Biases of it."),
    ] = None,
    mlflow: Annotated[
        str | None, typer.Option("--mlflow", metavar="URL", help="Tell MLflow of it.")
    ] = None,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            "-f",
            help="With --tensorboard, --wandb or --mlflow: tell it until the job has ended.",
        ),
    ] = False,
    run_log: RunLog = True,
    curves: Annotated[
        bool,
        typer.Option("--curves", help="Alone: print run.log, a line for some steps of a name."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Hand a job's metrics to Prometheus, TensorBoard and others."""
    from perdure.adapters import exporters
    from perdure.cli.looking.watch import look_again
    from perdure.telemetry.monitoring import list_metrics

    found = find_job(job)
    if curves:
        _print_curves(found.read_curves().list_buckets(), as_json=as_json)
        return
    folder = str(tensorboard.absolute()) if tensorboard else ""
    targets = keep_given(tensorboard=folder, wandb=wandb, mlflow=mlflow)
    done: dict[str, object] = {}
    if follow and len(targets) != 1:
        raise ConfigError("--follow tells one tracker at a time", hint="two commands for two")
    if targets:
        for kind, target in targets.items():
            done |= _tell(found, kind, target, follow=follow, run_log=run_log)
        answer(done, "  ".join(f"{name} {value}" for name, value in done.items()), as_json=as_json)
    elif port is not None:
        server = exporters.PrometheusServer(found.snapshot, host, port, ranks_max)
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
        print(exporters.render_prometheus(found.snapshot(), ranks_max), end="")


def _print_curves(logged: "dict[str, list[Bucket]]", *, as_json: bool) -> None:
    from perdure.model.codec import encode
    from perdure.telemetry.curves import Bucket

    if not as_json:
        print(",".join(("name", *Bucket._fields)))
    for name, buckets in logged.items():
        for bucket in buckets:
            if as_json:
                print(encode({"name": name, **bucket._asdict()}).decode())
            else:
                print(",".join((f'"{name.replace(chr(34), chr(34) * 2)}"', *map(str, bucket))))


def _tell(found: Job, kind: str, target: str, *, follow: bool, run_log: bool) -> dict[str, object]:
    """Tell a tracker what it does not know of a job yet; return what that was.

    A library may hang once more as the process ends: a controller's is then ended by force.
    """
    from perdure.cli.looking.tracking import JobTracking
    from perdure.service.controller.tracking import CONTROLLER_PID
    from perdure.worker.system.process import die_with

    if controller := os.environ.get(CONTROLLER_PID):
        die_with(int(controller), signal.SIGTERM)
        os.nice(_NICE)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(str(_SPARED_LAST))
    tracking = JobTracking(found, kind, target, run_log=run_log)
    try:
        if follow:
            tracking.follow()
        else:
            tracking.tell()
    except Exception:
        if controller:
            faulthandler.dump_traceback_later(_LEAVE_S, exit=True)
        raise
    if tracking.left:  # Whoever waits for this process is not to think that all was told.
        raise typer.Exit(128 + signal.SIGTERM)
    run = {} if kind == "tensorboard" else {f"{kind}_run": tracking.run}
    run |= {"wandb_folder": found.paths.tracking} if kind == "wandb" else {}
    return {f"{kind}_rows": tracking.rows, f"{kind}_marks": tracking.marks, **run}
