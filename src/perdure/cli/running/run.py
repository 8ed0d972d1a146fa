"""`perdure run`: options to a job, checks, then the supervisor; at the end what it was worth."""

import os
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from perdure.adapters.notices import open_sources
from perdure.cli.jobs import find_here
from perdure.cli.running import options as o
from perdure.cli.running.jobspec import check_job, choose_name, make_spec
from perdure.cli.running.torchrun import parse_ranks, parse_streams
from perdure.cli.speech.say import answer, note
from perdure.cli.speech.unread import UnreadStream
from perdure.model.errors import ConfigError, PerdureError
from perdure.model.job import JobSpec
from perdure.model.report import Snapshot
from perdure.service.access.credentials import check_outside
from perdure.service.jobfiles import is_alive, paths_of, resolve_home, wait_for_start

CONTEXT: dict[str, Any] = {
    "allow_interspersed_args": False,
    "token_normalize_func": lambda token: token.replace("_", "-"),
}
"""What follows the script is the script's; underscores in options are dashes."""
_LINE = re.compile(r"\[rank (\d+)\] ")


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
    home = resolve_home(options.environ)
    spec, named, notes = make_spec(options)
    check_outside(spec)
    open_sources(spec.preemption, 0, {})  # What an agent could not open is said here.
    shown = choose_shown_ranks(spec, options)
    if options.placement and spec.groups:
        raise ConfigError(
            "--placement: torchft's replica groups are all on this machine, where their lighthouse "
            "is; no other machine reaches it yet",
            hint="leave --placement out, or perdure.elastic over several machines",
        )
    if not named:
        spec = choose_name(spec, home)
    elif is_alive(paths_of(home, spec.name)):
        raise ConfigError(
            f"job `{spec.name}` is running",
            hint=f"`perdure status {spec.name}`, `perdure stop {spec.name}`, or another --name",
        )
    notes += check_job(spec, home, options.environ)
    for text in notes:
        note(text)
    if options.detach:
        return _detach(spec, home, options)

    def is_shown(line: str) -> bool:
        match = _LINE.match(line)
        return match is None or int(match[1]) in shown

    return supervise(
        spec, home, as_json=options.json, placement=options.placement or "", shows=is_shown
    )


def choose_shown_ranks(spec: JobSpec, options: o.RunOptions) -> frozenset[int]:
    """Return the ranks whose lines are shown on the terminal, as torchrun's options choose.

    A rank that redirects both streams is silent unless it is tee'd as well. One of the streams
    alone cannot be hidden.
    """
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


def _detach(spec: JobSpec, home: str, options: o.RunOptions) -> int:
    from perdure.launch.local import render, submit

    placement = os.path.abspath(options.placement) if options.placement else ""
    plan = render(spec, home, placement=placement)
    pid = submit(plan)
    wait_for_start(paths_of(home, spec.name), pid)
    document = {"job": spec.name, "pid": pid, "log": plan.log, "attach": plan.attach}
    answer(document, f"job {spec.name} starts (pid {pid}); {plan.attach}", as_json=options.json)
    return 0


def supervise(
    spec: JobSpec,
    home: str,
    *,
    as_json: bool,
    placement: str = "",
    shows: Callable[[str], bool] = lambda _: True,
    tells: Callable[[Snapshot], Iterable[str]] = lambda _: (),
) -> int:
    """Supervise a job until it ends, print what it was worth, and return its exit code.

    Of its output a person sees the lines that `shows` names, and with each new status those that
    `tells` makes of it.

    Raises:
        PerdureError: it cannot be supervised.
    """
    from perdure.dash.live import LiveScreen
    from perdure.service import supervisor
    from perdure.service.placement import HERE, load_placement

    failure: PerdureError | None = None
    placed = load_placement(placement, spec.local_nodes) if placement else HERE
    with LiveScreen(sys.stderr if as_json else sys.stdout) as screen:

        def show_line(line: str) -> None:
            if shows(line):
                screen.show_line(line)

        def show_snapshot(snapshot: Snapshot) -> None:
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
    from perdure.cli.looking.story import tell_story
    from perdure.dash import render_text

    try:
        story = tell_story(find_here(name, resolve_home()), page=False)
    except PerdureError as error:
        note(f"no report: {error}")
        return
    text = render_text(story.report, story.series).removesuffix("\n")
    answer({"exit_code": code, **msgspec.to_builtins(story.report)}, text, as_json=as_json)
