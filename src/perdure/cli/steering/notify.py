"""`perdure notify`: what somebody outside knows of a machine, told to a job."""

from typing import Annotated, Any

import typer

from perdure.cli.jobs import find_job, send_command
from perdure.cli.running.options import Json
from perdure.cli.steering.act import JobName, Timeout, answer_of
from perdure.model.errors import ConfigError

KINDS = ("device-failed", "device-ok", "preemption", "preemption-withdrawn", "machine")


def notify(
    job: JobName,
    kind: Annotated[str, typer.Argument(metavar="KIND", help=" | ".join(KINDS))],
    device: Annotated[
        str | None, typer.Argument(metavar="DEVICE", help="Its id, as `perdure map` shows it.")
    ] = None,
    node: Annotated[int | None, typer.Option("--node", min=0, help="Instead of a device.")] = None,
    machine: Annotated[
        str | None,
        typer.Option("--machine", metavar="NAME", help="Instead of both: one that has joined."),
    ] = None,
    grace_s: Annotated[
        float, typer.Option("--grace", min=0, help="Of preemption: seconds until it is gone.")
    ] = 0.0,
    waits: Annotated[
        bool, typer.Option("--waits", help="Of preemption: it is to be left at once.")
    ] = False,
    reason: Annotated[str, typer.Option("--reason", help="Such as `XID 79`.")] = "",
    source: Annotated[str, typer.Option("--source", help="Who says so; default: you.")] = "",
    timeout_s: Timeout = 30.0,
    as_json: Json = False,
) -> None:
    """Tell a job of what it cannot see: a failed device, or a machine that will be taken away.

    A failed device makes the verdict UnhealthyDevice, which `policy.unhealthy_device` acts upon;
    a preemption has the node left within its grace, unless it is withdrawn; `machine` says why
    one is gone.
    """
    if kind not in KINDS:
        raise ConfigError(f"unknown notice `{kind}`", hint=f"one of {', '.join(KINDS)}")
    told = {"device": device, "node": node, "machine": machine}
    named = {key: value for key, value in told.items() if value is not None}
    if len(named) != 1:
        raise ConfigError(f"{kind} of what?", hint="a DEVICE, --node N or --machine NAME")
    if not kind.startswith("device") and device is not None:
        raise ConfigError(f"{kind} is of a node", hint="--node N or --machine NAME")
    args: dict[str, Any] = {"kind": kind, **named}
    args |= {"grace_s": grace_s} if kind == "preemption" else {}
    args |= {"waits": True} if waits else {}
    args |= {key: text for key, text in (("reason", reason), ("source", source)) if text}
    result = send_command(find_job(job), "notify", args, timeout_s=timeout_s)
    answer_of(job, result, result.get("reason", "told"), as_json)
