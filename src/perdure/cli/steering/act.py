"""Commands that ask the controller for something, and wait for its answer."""

from typing import Annotated, Any

import typer

from perdure.cli.jobs import find_job, send_command
from perdure.cli.running.options import Json
from perdure.cli.speech.say import answer
from perdure.model.errors import ConfigError
from perdure.model.faults import FAULTS
from perdure.model.numbers import refuse_number
from perdure.model.steering import NOTE_MAX, find_note_fault

JobName = Annotated[str, typer.Argument(metavar="JOB", help="The job's name.")]
Timeout = Annotated[
    float, typer.Option("--timeout-s", min=0.1, help="How long to wait for the answer.")
]


def inject(
    job: JobName,
    fault: Annotated[str, typer.Argument(metavar="FAULT", help=" | ".join(FAULTS))],
    rank: Annotated[int, typer.Option("--rank", min=0, help="The rank that is harmed.")],
    at_step: Annotated[
        int | None, typer.Option("--at-step", min=0, help="When it begins this step; else now.")
    ] = None,
    arg: Annotated[
        list[str] | None,
        typer.Option(
            "--arg", metavar="K=V", help="Such as for_s=5, ms=20, code=3: see docs/lab.md."
        ),
    ] = None,
    timeout_s: Timeout = 30.0,
    as_json: Json = False,
) -> None:
    """Harm a rank on purpose, to see what happens.

    crash is SIGKILL, stop is SIGSTOP, spin burns CPU without progress, sleep and gil stand still,
    slow delays every step, slow-forward, slow-backward and slow-data one stage of it, exit leaves
    with an exit code, oom runs out of memory: killed by the kernel in a cgroup of its own where
    one can be made, else by a MemoryError. slow-link, drop-link and link-down need nodes with
    networks of their own. `--arg for_s=N` ends a fault, and so does heal.
    """
    if fault not in FAULTS:
        raise ConfigError(f"unknown fault `{fault}`", hint=f"one of {', '.join(FAULTS)}")
    given = _parse_args(arg or [])
    found = find_job(job)
    if rank >= found.spec.world_size:
        raise ConfigError(
            f"there is no rank {rank}", hint=f"the ranks are 0 to {found.spec.world_size - 1}"
        )
    args: dict[str, Any] = {**given, "rank": rank, "kind": fault}
    if at_step is not None:
        args["at_step"] = at_step
    result = send_command(found, "inject", args, timeout_s=timeout_s)
    when = "now" if at_step is None else f"at step {at_step}"
    note = f" ({result['note']})" if result.get("note") else ""
    answer_of(job, result, f"{fault} on rank {rank} {when}{note}", as_json)


def checkpoint(job: JobName, timeout_s: Timeout = 300.0, as_json: Json = False) -> None:
    """Save a checkpoint at a step that all ranks agree on."""
    result = send_command(find_job(job), "checkpoint", {}, timeout_s=timeout_s)
    answer_of(job, result, f"checkpoint at step {result.get('step', '?')}", as_json)


def note(
    job: JobName,
    text: Annotated[str, typer.Argument(metavar="TEXT", help=f"At most {NOTE_MAX} characters.")],
    timeout_s: Timeout = 30.0,
    as_json: Json = False,
) -> None:
    """Keep a remark in the job's journal: `report` shows it, and marks it on curves."""
    fault = find_note_fault(text)
    if fault:
        raise ConfigError(fault, hint=f"perdure note {job} TEXT")
    result = send_command(find_job(job), "note", {"text": text}, timeout_s=timeout_s)
    step = result.get("step", -1)
    answer_of(job, result, "noted" + (f" at step {step}" if step >= 0 else ""), as_json)


def stop(
    job: JobName,
    now: Annotated[
        bool, typer.Option("--now", help="Kill the ranks; work since the last checkpoint is lost.")
    ] = False,
    timeout_s: Timeout = 300.0,
    as_json: Json = False,
) -> None:
    """End the job after a checkpoint at a step that all ranks agree on.

    A script that does not call perdure.init() gets SIGTERM.
    """
    result = send_command(find_job(job), "kill" if now else "stop", {}, timeout_s=timeout_s)
    step = result.get("step")
    known = isinstance(step, int) and step >= 0
    answer_of(job, result, f"stopped at step {step}" if known else "stopped", as_json)


def _parse_args(pairs: list[str]) -> dict[str, Any]:
    args: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not key or not equals:
            raise ConfigError(f"--arg {pair}: no `=`", hint="--arg NAME=NUMBER")
        try:
            args[key] = float(text) if "." in text else int(text)
        except ValueError:
            raise ConfigError(f"--arg {pair}: not a number", hint="--arg NAME=NUMBER") from None
        if why := refuse_number(args[key]):
            raise ConfigError(f"--arg {key}: {why}", hint="--arg NAME=NUMBER")
    return args


def answer_of(job: str, result: dict[str, Any], text: str, as_json: bool) -> None:
    """Print what a job's controller has answered; `text` says it in words."""
    answer({"job": job, "ok": True, **result}, f"{job}: {text}", as_json=as_json)
