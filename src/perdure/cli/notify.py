"""`perdure notify`: what somebody outside knows of a machine, told to a job."""

from typing import Annotated, Any

import typer

from perdure.cli.act import JobName, Timeout
from perdure.cli.jobs import find_job, send_command
from perdure.cli.options import Json
from perdure.cli.say import print_json
from perdure.model.errors import ConfigError

KINDS = ("device-failed", "device-ok", "preemption", "preemption-withdrawn")


def notify(
    job: JobName,
    kind: Annotated[str, typer.Argument(metavar="KIND", help=" | ".join(KINDS))],
    device: Annotated[
        str | None, typer.Argument(metavar="DEVICE", help="Its id, as `perdure map` shows it.")
    ] = None,
    node: Annotated[int | None, typer.Option("--node", min=0, help="Instead of a device.")] = None,
    grace_s: Annotated[
        float, typer.Option("--grace", min=0, help="Of preemption: seconds until it is gone.")
    ] = 0.0,
    reason: Annotated[str, typer.Option("--reason", help="Such as `XID 79`.")] = "",
    source: Annotated[str, typer.Option("--source", help="Who says so; default: you.")] = "",
    timeout_s: Timeout = 30.0,
    as_json: Json = False,
) -> None:
    """Tell a job of what it cannot see: a failed device, or a machine that will be taken away.

    A failed device makes the verdict UnhealthyDevice, which `policy.unhealthy_device` acts upon;
    a preemption has the node left within its grace, unless it is withdrawn.
    """
    if kind not in KINDS:
        raise ConfigError(f"unknown notice `{kind}`", hint=f"one of {', '.join(KINDS)}")
    if (device is None) == (node is None):
        raise ConfigError(f"{kind} of what?", hint="a DEVICE, or --node N")
    if kind.startswith("preemption") and device is not None:
        raise ConfigError("a preemption is of a node", hint="--node N --grace SECONDS")
    args: dict[str, Any] = {"kind": kind}
    args |= {"device": device} if device is not None else {"node": node}
    args |= {"grace_s": grace_s} if kind == "preemption" else {}
    args |= {key: text for key, text in (("reason", reason), ("source", source)) if text}
    result = send_command(find_job(job), "notify", args, timeout_s=timeout_s)
    if as_json:
        print_json({"job": job, "ok": True, **result})
    else:
        print(f"{job}: {result.get('reason', 'told')}")
