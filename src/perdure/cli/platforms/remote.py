"""Jobs on other machines: commands carried there, `perdure attach` and `perdure node scale`.

How each box of such a job is, is told with when it was last seen from here. `perdure status` says
what they cost that nobody looks after.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perdure.cli.jobs import (
    ENDED,
    ElsewhereError,
    Job,
    find_job,
    find_launched,
    list_jobs_elsewhere,
)
from perdure.cli.speech.say import JobName, Json, answer, note, print_json
from perdure.model.errors import ConfigError, PlatformError

if TYPE_CHECKING:
    from perdure.launch.platforms import Here, Platform
    from perdure.model.platforms.launching import BoxRow, BoxState, LaunchRecord, Reminder


def look_at_boxes(record: "LaunchRecord", place: "Here") -> "list[BoxRow]":
    """Return how a job's part on each box is; all are asked at once.

    What was seen is remembered, beside the job's record: of a box that does not answer it is told
    when it last did, and as which boot.
    """
    from concurrent.futures import ThreadPoolExecutor

    import msgspec

    from perdure.launch.platforms import load_platform
    from perdure.model.platforms.launching import BoxRow
    from perdure.service.jobfiles import write_document

    platform = load_platform(record.profile.kind)
    path = _locate_seen(place.home, record.job)
    seen = {row.host: row for row in read_seen(place.home, record.job)}

    def look(box: "LaunchRecord") -> "BoxRow":
        try:
            state = platform.query_state(box, place)
        except PlatformError as error:
            known = seen.get(box.box) or _describe_launch(box)
            return msgspec.structs.replace(known, state="unreached", reason=str(error))
        return BoxRow(
            host=box.box,
            state=state.state,
            reason=state.reason,
            boot_id=state.boot_id,
            seen_s=time.time(),
            started_s=state.started_s,
            attempt=state.attempt,
            address=box.address,
            ended_s=state.ended_s,
            load=state.load,
        )

    with ThreadPoolExecutor(len(record.boxes)) as pool:
        rows = list(pool.map(look, record.boxes))
    with contextlib.suppress(PlatformError):  # A full disk here hides no box.
        write_document(str(path), rows)
    return rows


def read_seen(home: str, job: str) -> "list[BoxRow]":
    """Return how a job's boxes were when they were last asked."""
    from perdure.model.platforms.launching import BoxRow
    from perdure.service.jobfiles import read_document

    return read_document(str(_locate_seen(home, job)), list[BoxRow]) or []


def _locate_seen(home: str, job: str) -> Path:
    return Path(home, "launches", "seen", f"{job}.json")


def _describe_launch(box: "LaunchRecord") -> "BoxRow":
    """Return what is known of a box that has not answered since the launch."""
    from perdure.model.platforms.launching import BoxRow

    return BoxRow(
        host=box.box,
        state="unreached",
        boot_id=box.boot_id,
        seen_s=box.launched_s,
        started_s=box.launched_s,
        address=box.address,
    )


def tell_boxes(record: "LaunchRecord", place: "Here") -> None:
    """Say how each box is."""
    for row in look_at_boxes(record, place):
        note(describe_row(row))


def describe_row(row: "BoxRow") -> str:
    """Return in one sentence how a job's part on a box is."""
    if row.state == "unreached":
        ago_s = max(0.0, time.time() - row.seen_s)
        boot = f", boot {row.boot_id[:8]}" if row.boot_id else ""
        return f"{row.reason}; last seen {ago_s:.0f} s ago{boot}"
    more = "; the same `perdure launch` resumes it" if row.state in ("rebooted", "killed") else ""
    return f"{row.host}: {row.state}: {row.reason}{more}"


def print_status(record: "LaunchRecord", place: "Here", run: Callable[[], int]) -> int:
    """Print one document: what `run` prints of the job's own, and every box; return `run`'s code.

    Where the job's own box does not answer, the others are told all the same, with exit code 3.
    """
    import io
    import json

    printed, code = io.StringIO(), PlatformError.exit_code
    document: dict[str, Any] = {"job": record.job}
    try:
        with contextlib.redirect_stdout(printed):
            code = run()
        document = json.loads(printed.getvalue())
    except PlatformError as error:
        document |= {"state": "unreached", "reason": error.message, "hint": error.hint}
    except json.JSONDecodeError:
        document |= {"state": "unknown", "reason": printed.getvalue().strip()}
    rows = look_at_boxes(record, place)
    if not printed.getvalue() and code == 0:  # It has said nothing yet: what its platform says.
        document |= {"state": rows[0].state, "reason": rows[0].reason}
    print_json({**document, "boxes": rows})
    return code


def find_box(record: "LaunchRecord", host: str | None) -> "LaunchRecord":
    """Return the job's box of that name; its first one without a name.

    Raises:
        ConfigError: none of them is called so.
    """
    if host is None:
        return record
    names = {box.box: box for box in record.boxes}
    if host not in names:
        raise ConfigError(f"--host {host}: not a box of {record.job}", hint=", ".join(names))
    return names[host]


AGAIN_S = 24 * 3600.0
"""An alert of the same kind for the same job is sent again after this."""


def list_reminders(record: "LaunchRecord", home: str) -> "list[Reminder]":
    """Return what a person should look after, by what was last seen; nobody is asked."""
    from perdure.launch.reminding import collect_reminders

    return collect_reminders(record, read_seen(home, record.job), time.time())


def print_reminders(as_json: bool) -> int:
    """List what costs money while no job runs on it, and send it to the jobs' alerts.

    It asks every box of a launched job. Each reminder goes to the job's own [alerts] once a day:
    cron may run this. Nothing is ever stopped by it.
    """
    from perdure.cli.platforms.profiles import here

    place = here()
    found: list[Reminder] = []
    undelivered = 0
    for record in list_jobs_elsewhere():
        if not record.profile.ends_by_itself:
            look_at_boxes(record, place)
        mine = list_reminders(record, place.home)
        found += mine
        undelivered += _send(record, mine, place)
    lines = [f"{reminder.job}: {reminder.text}" for reminder in found] or ["nothing to look after"]
    answer({"reminders": found, "undelivered": undelivered}, "\n".join(lines), as_json=as_json)
    return 3 if undelivered else 0


def _send(record: "LaunchRecord", reminders: "list[Reminder]", place: "Here") -> int:
    """Send each reminder to the job's alerts, unless it was a day ago or less; return the lost."""
    import asyncio

    from perdure.service.controller.alerts import Alerter  # With a library of retries.
    from perdure.service.jobfiles import read_document, write_document
    from perdure.telemetry.alerts import Alert

    alerter = Alerter(record.job, record.alerts)
    path = Path(place.home, "launches", "seen", f"{record.job}.reminded.json")
    sent = read_document(str(path), dict[str, float]) or {}
    now_s = time.time()
    due = [r for r in reminders if now_s - sent.get(r.kind, 0.0) > AGAIN_S]
    if not alerter.wanted or "meter" not in record.alerts.events or not due:
        return 0

    async def deliver() -> None:
        for reminder in due:
            before = alerter.dropped
            text = reminder.text
            await alerter.send(Alert(job=record.job, kind="meter", summary=text, at_s=now_s))
            if alerter.dropped == before:
                sent[reminder.kind] = now_s
            else:
                place.tell(f"{record.job}: the alert was not delivered: {text}")

    asyncio.run(deliver())
    with contextlib.suppress(PlatformError):  # A full disk here hides no reminder.
        write_document(str(path), sent)
    return alerter.dropped


_POLL_S = 0.5
_POLLS_AT_END = 60
"""After a job's last line its supervisor, or the platform, may take so long to say so."""


def run_there(record: "LaunchRecord", argv: Sequence[str]) -> int:
    """Run a command line where its job is; return its exit code."""
    from perdure.cli.platforms.profiles import here
    from perdure.launch.platforms import load_platform

    platform, place = load_platform(record.profile.kind), here()
    pods = record.profile.kind == "kubernetes"
    parts = {"--devices", "--links"} & set(argv)
    if (
        argv[0] == "status"
        and not parts
        and "--json" in argv
        and record.profile.kind in ("ssh", "slurm")
    ):
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


def _tell_pods(record: "LaunchRecord", place: "Here") -> None:
    """Say how a job's pods are, and what happened to them and their nodes before."""
    from perdure.launch.kubernetes import list_past, query_state

    for line in (describe_state(record, query_state(record, place)), *list_past(record)):
        note(line)


def describe_state(record: "LaunchRecord", state: "BoxState") -> str:
    """Return in one sentence how a job is, by what its supervisor wrote down."""
    from perdure.model.platforms.launching import BoxRow

    return describe_row(BoxRow(host=record.box, state=state.state, reason=state.reason))


def attach(job: JobName, as_json: Json = False) -> int:
    """Follow a job's output to its end; leave with its exit code.

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


def follow_to_end(
    platform: "Platform",
    record: "LaunchRecord",
    words: Sequence[str],
    place: "Here",
    sleep: Callable[[float], None] = time.sleep,
) -> "BoxState":
    """Show what `words` print of a job, over all its lives; return its state once it is over.

    While it waits, each reason is told once.
    """
    state, told = platform.query_state(record, place), set[str]()
    while True:
        ended = False
        if state.state != "waiting":
            told.clear()
        elif (why := state.reason.partition(":")[0]) not in told:  # They come and go for hours.
            told.add(why)
            note(describe_state(record, state))
        if state.state != "waiting":
            # Where it broke off, the state says whether there is more to come.
            with contextlib.suppress(PlatformError):
                ended = platform.run(record, words, place) == 0
        before, state = state, platform.query_state(record, place)
        polls = _POLLS_AT_END if ended else 0
        while polls and not state.over and _name_life(state) == _name_life(before):
            sleep(_POLL_S)  # All of this life is shown: to ask again would repeat it.
            polls, state = polls - 1, platform.query_state(record, place)
        if state.over and before.state != "waiting":
            return state
        sleep(_POLL_S)


def _name_life(state: "BoxState") -> tuple[str, int]:
    return state.state, state.attempt


def _attach_there(record: "LaunchRecord", as_json: bool) -> int:
    from perdure.cli.platforms.profiles import here
    from perdure.launch.platforms import load_platform

    words = ["logs", record.job, "-f", *(["--json"] if as_json else [])]
    state = follow_to_end(load_platform(record.profile.kind), record, words, here())
    note(describe_state(record, state))
    if state.state != "ended":
        raise PlatformError(
            f"job `{record.job}` has not ended by itself: {state.reason}",
            hint="the same `perdure launch` resumes it",
        )
    return 128 + state.signal if state.signal else state.code


def print_forward(job: str, ports: list[int], host: str | None, as_json: bool) -> None:
    """Print the command that makes ports of the job's machine reachable here, on loopback."""
    import shlex

    record = find_launched(job, f"http://127.0.0.1:{ports[0]}")
    from perdure.launch import kubernetes
    from perdure.launch.channel import Channel

    if record.profile.kind not in ("ssh", "kubernetes"):
        raise ConfigError(f"no tunnels to a platform of kind {record.profile.kind}")
    box = find_box(record, host)
    if record.profile.kind == "ssh":
        command = Channel(box.profile.launch).render_forward(ports)
    else:
        command = kubernetes.render_forward(record, ports)
    document = {"job": job, "host": box.box, "command": command}
    answer(document, shlex.join(command), as_json=as_json)


def scale(
    job: JobName,
    pods: Annotated[int, typer.Argument(min=0, metavar="PODS", help="0 has it save and wait.")],
    as_json: Json = False,
) -> None:
    """Give a job on Kubernetes more or fewer pods as it trains.

    An elastic job grows up to `nodes_max` and shrinks to `nodes`. Pods that go leave at a step that
    all agree on: nothing is made again.
    """
    from perdure.cli.platforms.profiles import here

    record = find_launched(job, "perdure node join brings others")
    if record.profile.kind != "kubernetes":
        raise ConfigError(f"nothing to scale on a platform of kind {record.profile.kind}")
    from perdure.launch.kubernetes.scaling import scale as scale_pods  # PyYAML is slow to load.

    done = scale_pods(record, pods, here())
    changes = [f"{name} added" for name in done.added] + [f"{name} left" for name in done.removed]
    answer(
        done,
        "; ".join([f"{job}: {done.pods} pods, {done.before} before", *changes]),
        as_json=as_json,
    )
