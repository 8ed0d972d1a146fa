"""Jobs on other machines: commands carried there, `perdure attach`, `tunnel` and `scale`."""

import contextlib
import time
from collections.abc import Sequence
from typing import Annotated

import typer

from perdure.cli.jobs import ENDED, ElsewhereError, Job, find_job
from perdure.cli.platforms.boxes import (
    describe_row,
    find_box,
    list_reminders,
    print_status,
    tell_boxes,
)
from perdure.cli.platforms.profiles import here
from perdure.cli.running.options import Json
from perdure.cli.speech.say import answer, note
from perdure.cli.steering.act import JobName
from perdure.launch.platforms import Here, find_platform
from perdure.model.errors import ConfigError, PlatformError
from perdure.model.platforms.launching import BoxRow, BoxState, LaunchRecord
from perdure.service.jobfiles import resolve_home

_POLL_S = 0.5


def run_there(record: LaunchRecord, argv: Sequence[str]) -> int:
    """Run a command line where its job is; return its exit code."""
    platform, place = find_platform(record.profile.kind), here(resolve_home())
    pods = record.profile.kind == "kubernetes"
    if argv[0] == "status" and "--json" in argv and record.profile.kind == "ssh":
        return print_status(record, place, lambda: platform.run(record, argv, place))
    told = argv[0] in ("status", "diagnose") and "--json" not in argv
    try:
        return platform.run(record, argv, place)
    finally:
        if told and pods:
            _tell_pods(record, place)
        elif told:
            tell_boxes(record, place)
        if told:
            for reminder in list_reminders(record, place.home):
                note(reminder.text)


def _tell_pods(record: LaunchRecord, place: Here) -> None:
    """Say how a job's pods are, and what happened to them and their nodes before."""
    from perdure.launch.kubernetes import find_past, find_state

    note(describe_state(record, find_state(record, place)))
    for line in find_past(record):
        note(line)


def describe_state(record: LaunchRecord, state: BoxState) -> str:
    """Return in one sentence how a job is, by what its supervisor wrote down."""
    return describe_row(BoxRow(host=record.box, state=state.state, reason=state.reason))


def attach(job: JobName, as_json: Json = False) -> int:
    """Follow a job's output until it ends, wherever it runs; leave with its exit code.

    A connection that breaks is made again, and the output goes on where it was. Ctrl-C leaves the
    job running.
    """
    try:
        try:
            found = find_job(job)
        except ElsewhereError as elsewhere:
            return _attach_there(elsewhere.record, as_json)
        return _attach_here(found, as_json)
    except KeyboardInterrupt:
        note(f"the job goes on; perdure attach {job}")
        return 130


def _attach_here(found: Job, as_json: bool) -> int:
    from perdure.cli.looking.output import logs

    logs(found.name, follow=True, as_json=as_json)
    snapshot = found.snapshot()
    if snapshot.state not in ENDED:
        note(snapshot.reason)
    return 0 if snapshot.state in ("done", "stopped") else 1


def _attach_there(record: LaunchRecord, as_json: bool) -> int:
    platform, place = find_platform(record.profile.kind), here(resolve_home())
    words = ["logs", record.job, "-f", *(["--json"] if as_json else [])]
    state = platform.find_state(record, place)
    while True:
        if state.state != "waiting":
            # Where it broke off, the state says whether there is more to come.
            with contextlib.suppress(PlatformError):
                platform.run(record, words, place)
        before, state = state, platform.find_state(record, place)
        if state.over and before.state != "waiting":
            break
        if state.state == "waiting" and before.state != "waiting":
            note(describe_state(record, state))
        time.sleep(_POLL_S)
    note(describe_state(record, state))
    if state.state != "ended":
        raise PlatformError(
            f"job `{record.job}` has not ended by itself: {state.reason}",
            hint="the same `perdure launch` resumes it",
        )
    return 128 + state.signal if state.signal else state.code


def _find_launched(job: str, hint: str) -> LaunchRecord:
    """Return what is remembered of a job that runs elsewhere.

    Raises:
        ConfigError: it is on this machine, or there is none; of the former, `hint` says more.
    """
    try:
        find_job(job)
    except ElsewhereError as elsewhere:
        return elsewhere.record
    raise ConfigError(f"job `{job}` is on this machine", hint=hint)


def tunnel(
    job: JobName,
    port: Annotated[
        list[int], typer.Option("--port", min=1, max=65535, help="On the box; may be repeated.")
    ],
    host: Annotated[
        str | None,
        typer.Option("--host", metavar="ALIAS", help="Which of its boxes; else the first."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Make ports of the box reachable here, on loopback, until Ctrl-C; made again when broken."""
    record = _find_launched(job, f"http://127.0.0.1:{port[0]}")
    from perdure.launch import kubernetes
    from perdure.launch.channel import Channel

    if record.profile.kind not in ("ssh", "kubernetes"):
        raise ConfigError(f"no tunnels to a platform of kind {record.profile.kind}")
    box = find_box(record, host)
    urls = [f"http://127.0.0.1:{number}" for number in port]
    answer({"job": job, "host": box.box, "urls": urls}, "\n".join(urls), as_json=as_json)
    try:
        if record.profile.kind == "kubernetes":
            return kubernetes.tunnel(record, port)
        return Channel(box.profile.launch).forward(port)
    except KeyboardInterrupt:
        return 0


def scale(
    job: JobName,
    pods: Annotated[int, typer.Argument(min=0, metavar="PODS", help="0 has it save and wait.")],
    as_json: Json = False,
) -> None:
    """Give a job on Kubernetes more or fewer pods while it trains on.

    An elastic job grows up to `nodes_max` and shrinks to `nodes`. Pods that go leave at a step that
    all agree on: nothing is made again.
    """
    record = _find_launched(job, "perdure join brings others")
    if record.profile.kind != "kubernetes":
        raise ConfigError(f"nothing to scale on a platform of kind {record.profile.kind}")
    from perdure.launch.kubernetes.scaling import scale as scale_pods

    done = scale_pods(record, pods, here(resolve_home()))
    changes = [f"{name} added" for name in done.added] + [f"{name} left" for name in done.removed]
    text = "; ".join([f"{job}: {done.pods} pods, {done.before} before", *changes])
    answer(done, text, as_json=as_json)
