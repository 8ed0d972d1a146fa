"""`perdure run`: options to a job, checks, then the supervisor; at the end what it was worth."""

import math
import os
import re
import select
import stat
import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from perdure.cli.jobs import find_here
from perdure.cli.running import options as o
from perdure.cli.speech.say import answer, note
from perdure.cli.speech.unread import UnreadStream
from perdure.model.errors import ConfigError, PerdureError, PlatformError
from perdure.model.input.plain import REASON_MAX, shorten_line
from perdure.service.jobfolders import is_alive, paths_of, resolve_home

if TYPE_CHECKING:
    from perdure.cli.jobs import Job
    from perdure.cli.running.torchrun import Rendezvous
    from perdure.model.job import JobSpec
    from perdure.model.report import Report, Snapshot

CONTEXT: dict[str, Any] = {
    "allow_interspersed_args": False,
    "token_normalize_func": lambda token: token.replace("_", "-"),
}
"""What follows the script is the script's; underscores in options are dashes."""
_DOOR = re.compile(r"export TORCHFT_LIGHTHOUSE=(\S+)\n")
_DOOR_S = 30.0
_OUTPUT_MAX = 1 << 20
_LINE = re.compile(r"\[rank (\d+)\] ")
_RANK = re.compile(r"\brank (\d+)\b")


@o.take_options(o.RunOptions)
def run(**given: Any) -> int:
    """Run a training script on this machine, and keep it running.

    Takes torchrun's options, sets torchrun's environment variables, and leaves with the exit code
    of the rank that failed, or 0. SIGINT or SIGTERM stops the job at an agreed step; a second one
    ends it at once.
    """
    return start(o.RunOptions(**given, environ=dict(os.environ)))


def start(options: o.RunOptions) -> int:
    """Check everything, then run the job to its end; return the exit code.

    Raises:
        PerdureError: it was not started, or perdure itself cannot go on.
    """
    from perdure.adapters.notices import open_sources  # With http, which help needs not.
    from perdure.cli.running.jobspec import check_job, choose_name, make_spec
    from perdure.cli.running.nodes import name_job
    from perdure.cli.running.torchrun import read_rendezvous
    from perdure.model.input.raw import carry_job
    from perdure.service.access.credentials import check_outside  # With NATS.
    from perdure.service.starts import compare_start

    environ = options.environ
    home = resolve_home(environ)
    spec, named, notes = make_spec(options)
    check_outside(spec)
    open_sources(spec.preemption, 0, environ)  # What an agent could not open is said here.
    choose_shown_ranks(spec, options)
    if options.placement and spec.groups:
        raise ConfigError(
            "--placement: torchft's replica groups are all on this machine, where their lighthouse "
            "is; no other machine reaches it yet",
            hint="leave --placement out, or perdure.elastic over several machines",
        )
    met = read_rendezvous(options.map_rendezvous(), options.environ)
    if met is not None:
        return start_node(spec if named else name_job(spec, met), met, options, home, notes)
    if not named:
        spec = choose_name(spec, home)
    else:
        refuse_twin(spec, home)
        notes += recall_end(spec, home) + compare_start(spec, paths_of(home, spec.name), environ)
    for text in [*notes, *check_job(spec, home, options.environ)]:
        note(text)
    if (spec.world_size > 1 or options.detach) and has_input():
        note("no rank reads standard input: only the first life of a job of one rank does")
    spec = carry_job(spec)
    if options.detach:
        placement = os.path.abspath(options.placement) if options.placement else ""
        return detach(spec, home, placement=placement, as_json=options.json)
    return watch_over(spec, home, options, placement=options.placement or "")


def has_input() -> bool:
    """Return whether standard input is a pipe or a file with something in it."""
    try:
        found = os.fstat(0)
        if stat.S_ISREG(found.st_mode):
            return found.st_size > os.lseek(0, 0, os.SEEK_CUR)
        return stat.S_ISFIFO(found.st_mode) and bool(select.select([0], [], [], 0)[0])
    except OSError:
        return False


def refuse_twin(spec: "JobSpec", home: str) -> None:
    """Refuse a job of a name that runs.

    Raises:
        ConfigError: it does.
    """
    if is_alive(paths_of(home, spec.name)):
        raise ConfigError(
            f"job `{spec.name}` is running",
            hint=f"`perdure status {spec.name}`, `perdure stop {spec.name}`, or another --name",
        )


def recall_end(spec: "JobSpec", home: str) -> list[str]:
    """Return what to know of a job that is done and started again; nothing of any other.

    One that has no step left ends at once, and would seem to have trained.
    """
    from perdure.service.jobfiles import load_snapshot

    before = load_snapshot(paths_of(home, spec.name))
    if before is None or before.state != "done" or before.step <= 0 or spec.groups:
        return []  # A group's checkpoints are its script's own.
    saved = max((int(str(row["step"])) for row in before.checkpoints), default=0)
    anew = f"`perdure rm {spec.name}`, or another --name, begins anew"
    if saved >= before.step:
        what = f"goes on from there if its script asks for more steps; {anew}"
    elif saved:
        what = f"goes on from its newest checkpoint, of step {saved}; {anew}"
    else:
        what = "left no checkpoint: it begins at step 0"
    return [f"job `{spec.name}` had finished at step {before.step}, and {what}"]


def start_node(
    spec: "JobSpec", met: "Rendezvous", options: o.RunOptions, home: str, notes: list[str]
) -> int:
    """Run a job of several nodes if this is the first one, else join it; return the exit code.

    Raises:
        PerdureError: the nodes share no secret, do not come in time, or the job was not started.
    """
    from perdure.cli.running.jobspec import check_job
    from perdure.cli.running.nodes import find_place, is_here, join_first, keep_checkpoints
    from perdure.model.input.raw import carry_job
    from perdure.service.access.rendezvous import FirstNode, find_secret, write_placement
    from perdure.service.starts import compare_start

    place = find_place(met)
    secret = find_secret(os.environ, met.secret_file, home, place.address)
    spec = keep_checkpoints(spec, home, place)
    for text in [*notes, *check_job(spec, home, options.environ)]:
        note(text)
    spec = carry_job(spec)
    # On loopback all nodes are here, and whoever comes first is the first one.
    claim = FirstNode(place.address, met.port) if met.rank is None and is_here(place) else None
    if not place.first and not (claim is not None and claim.taken):
        shows = choose_lines(spec, options)
        return join_first(spec, met, place, home, secret, as_json=options.json, shows=shows)
    try:
        refuse_twin(spec, home)
        differing = compare_start(spec, paths_of(home, spec.name), os.environ)
        for text in [*recall_end(spec, home), *differing]:
            note(text)
        path = write_placement(secret, spec.name, home, place.address, met.port)
        others = spec.remote if spec.remote == spec.first_nodes - 1 else f"up to {spec.remote}"
        note(f"this is the first node of {spec.name}, and {others} join it by the same command")
        note(say_what_a_loss_costs(home))
        return watch_over(spec, home, options, placement=path, join_s=met.join_s)
    finally:
        if claim is not None:
            claim.release()


def say_what_a_loss_costs(home: str) -> str:
    """Return in a line where a job goes on if the machine of its first node is lost."""
    from perdure.adapters.health import NETWORK_KINDS, find_filesystem

    if find_filesystem(home) in NETWORK_KINDS:
        return f"the journal is in {home}, a shared folder: a lost first node costs no history"
    return (
        f"the journal is in {home}, on a disk of this machine: if the machine is lost, the job "
        "starts from its newest checkpoint"
    )


def watch_over(
    spec: "JobSpec", home: str, options: o.RunOptions, *, placement: str, join_s: float = math.inf
) -> int:
    """Supervise a job that was checked, and tell of what is odd; return its exit code.

    Raises:
        PerdureError: it cannot be supervised, or its nodes have not come within `join_s`.
    """
    from perdure.cli.running.nodes import Muster
    from perdure.dash.stories import StoryTeller
    from perdure.service.restarts import RestartWatch
    from perdure.service.starts import FileWatch
    from perdure.telemetry.lonely import LonelyWatch

    restarts, lonely = RestartWatch(paths_of(home, spec.name), spec), LonelyWatch()
    files = FileWatch(spec)
    stories, muster = StoryTeller(), Muster(spec, join_s)
    watched = spec.env.get("PERDURE_RECORDER", os.environ.get("PERDURE_RECORDER")) != "off"

    def tell(snapshot: "Snapshot") -> Iterable[str]:
        declares = snapshot.step >= 0
        told = restarts.tell(snapshot.generation, declares_steps=declares, now_s=snapshot.at_s)
        alone = lonely.look(snapshot) if watched else ""
        absent = muster.look(snapshot) if join_s < math.inf else ""
        edited = files.tell(snapshot.generation)
        lines = [*stories.tell(snapshot), edited, told, alone, absent]
        return [f"[perdure] {line}" for line in lines if line]

    code = supervise(
        spec,
        home,
        as_json=options.json,
        placement=placement,
        shows=choose_lines(spec, options),
        tells=tell,
    )
    muster.judge_end()
    if code == 0 and (text := lonely.judge_end()):
        note(text)
    return code


def choose_lines(spec: "JobSpec", options: o.RunOptions) -> Callable[[str], bool]:
    """Return which of the lines of a job a person sees, by the rank at their beginning."""
    shown = choose_shown_ranks(spec, options)

    def is_shown(line: str) -> bool:
        match = _LINE.match(line)
        return match is None or int(match[1]) in shown

    return is_shown


def choose_shown_ranks(spec: "JobSpec", options: o.RunOptions) -> frozenset[int]:
    """Return the ranks whose lines are shown on the terminal, as torchrun's options choose.

    A rank that redirects both streams is silent unless it is tee'd as well. One of the streams
    alone cannot be hidden.
    """
    from perdure.cli.running.torchrun import parse_ranks, parse_streams

    redirects = parse_streams("--redirects", options.redirects or "0", spec.nproc)
    tee = parse_streams("--tee", options.tee or "0", spec.nproc)
    local = frozenset(
        rank for rank in range(spec.nproc) if redirects.get(rank, 0) != 3 or tee.get(rank, 0)
    )
    if options.local_ranks_filter:
        local &= parse_ranks("--local-ranks-filter", options.local_ranks_filter)
    if spec.tee == "none":
        local = frozenset()
    return frozenset(rank for rank in range(spec.world_size) if rank % spec.nproc in local)


def detach(spec: "JobSpec", home: str, *, as_json: bool, placement: str = "") -> int:
    """Have another process supervise the job, and return once it has taken it.

    Raises:
        PlatformError: it cannot be started.
    """
    from perdure.launch.local import render, submit
    from perdure.service.jobfiles import wait_for_start

    plan = render(spec, home, placement=placement)
    pid = submit(plan)
    wait_for_start(paths_of(home, spec.name), pid)
    document = {"job": spec.name, "pid": pid, "log": plan.log, "attach": plan.attach}
    text = f"job {spec.name} starts (pid {pid}); {plan.attach}"
    if spec.served:
        document["lighthouse"] = url = wait_for_door(plan.log, pid)
        text += f"\nexport TORCHFT_LIGHTHOUSE={url}"
    answer(document, text, as_json=as_json)
    return 0


def wait_for_door(log: str, pid: int) -> str:
    """Return the URL of the lighthouse that process `pid` says in its output that it serves.

    Raises:
        PlatformError: it does not in time, or has ended.
    """
    from perdure.adapters.host import read_state

    deadline = time.monotonic() + _DOOR_S
    while time.monotonic() < deadline:
        alive = os.path.exists(f"/proc/{pid}") and read_state(pid) not in "XZ"
        with open(log, encoding="utf-8", errors="replace") as file:
            text = file.read(_OUTPUT_MAX)
        if found := _DOOR.search(text):
            return found[1]
        if not alive:
            break
        time.sleep(0.05)
    said = next((line for line in text.splitlines() if "error: " in line), "no lighthouse yet")
    raise PlatformError(f"it does not serve: {said.rpartition('error: ')[2]}", hint=f"see {log}")


def supervise(
    spec: "JobSpec",
    home: str,
    *,
    as_json: bool,
    placement: str = "",
    shows: Callable[[str], bool] = lambda _: True,
    tells: "Callable[[Snapshot], Iterable[str]]" = lambda _: (),
) -> int:
    """Supervise a job until it ends, print what it was worth, and return its exit code.

    Of its output a person sees the lines that `shows` names, and with each new status those that
    `tells` makes of it.

    Raises:
        PerdureError: it cannot be supervised.
    """
    from perdure.cli.running.nodes import find_unseen_checkpoints
    from perdure.dash.live import LiveScreen
    from perdure.service import supervisor
    from perdure.service.placement import HERE, load_placement

    failure: PerdureError | None = None
    placed = load_placement(placement, spec.local_nodes) if placement else HERE
    if unseen := find_unseen_checkpoints(spec, home, placed.bind):
        note(unseen)
    with LiveScreen(sys.stderr if as_json else sys.stdout) as screen:

        def show_line(line: str) -> None:
            if shows(line):
                screen.show_line(line)

        def show_snapshot(snapshot: "Snapshot") -> None:
            for line in tells(snapshot):
                screen.show_line(line)
            screen.show_snapshot(snapshot)

        try:
            code = supervisor.run(
                spec,
                home=home,
                nats_url=spec.nats.url or None,
                placement=placed,
                on_line=show_line,
                on_snapshot=show_snapshot,
            )
        except PerdureError as error:
            failure = error
    if isinstance(sys.stdout, UnreadStream):
        sys.stdout.keep_all()
    if failure is not None:
        raise failure
    summarize(spec.name, code, as_json)
    return code


def summarize(name: str, code: int, as_json: bool) -> None:
    """Print what the run was worth; a ledger that cannot be read is no reason to fail."""
    import msgspec

    from perdure.cli.looking.story import tell_story
    from perdure.dash.text import render_text

    try:
        job = find_here(name, resolve_home())
        story = tell_story(job, page=False)
    except PerdureError as error:
        note(f"no report: {error}")
        return
    trained = story.report.state != "failed" or story.report.goodput > 0
    text = render_text(story.report, story.series, ledger=trained).removesuffix("\n")
    if story.report.state == "failed":
        text = "\n".join([text, "", *describe_failure(job, story.report)])
    answer({"exit_code": code, **msgspec.to_builtins(story.report)}, text, as_json=as_json)


def describe_failure(job: "Job", report: "Report") -> list[str]:
    """Return what a failed job ended of, and where more of it stands: the last that is read."""
    lines = [f"{report.job} failed: {shorten_line(report.reason, REASON_MAX)}"]
    found = [r for r in report.recoveries if r.failed][-1:]
    for recovery in found:
        rank = _RANK.search(recovery.culprit)
        if rank is None or recovery.generation < 0:
            continue
        for name in ("err", "out"):
            path = job.paths.stream(recovery.generation, int(rank[1]), name, job.spec.log_dir)
            if os.path.exists(path) and os.path.getsize(path):
                lines.append(f"  what rank {rank[1]} has written: {path}")
                break
    return [*lines, f"  all that is known of it: perdure diagnose {report.job}"]
