"""A launched job asked on its box: its state, and any perdure command beside it.

A command runs on the box, next to the job's files and its bus, and not here over a forwarded port:
credentials never leave the box, the versions of both ends agree, and what the command needs (the
journal, the ranks' streams) need not be carried. Each is one short connection.
"""

import os
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence

from perdure.launch.channel import ATTEMPTS, Channel
from perdure.launch.exchange import FOLLOWS, SILENCE_S, Lines, UnreachedError, make_lines
from perdure.launch.platforms import Here
from perdure.model.errors import PerdureError
from perdure.model.platforms.launching import BoxState, LaunchRecord

LOOKING = ("status", "diagnose", "report", "logs", "events", "doctor")
"""Commands that may be run twice: they change nothing."""
_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""Before a broken stream that is followed is taken up again; then it is left."""


def in_job(place: str, script: str) -> str:
    """Return `script` with the variables of the job's env.sh, in the job's folder."""
    return f'. "{place}/launch/env.sh" && cd "$JOB_DIR" && {script}'


def query_state(record: LaunchRecord, here: Here) -> BoxState:
    """Return how the job is, by what its supervisor wrote down."""
    return ask_state(Channel(record.profile.launch), record)


def ask_state(channel: Channel, record: LaunchRecord) -> BoxState:
    """Return how the job is, over `channel`."""
    folder = shlex.quote(record.place)
    return channel.query(f"python3 {folder}/launch/box.py state {folder}/launch", BoxState)


Carry = Callable[[LaunchRecord, Sequence[str]], str]
"""The shell script that runs a command line beside a job."""


def run_beside(record: LaunchRecord, argv: Sequence[str]) -> str:
    """Return the script that runs a command line on the job's box."""
    return in_job(
        record.place, f'{show_columns()} exec "$PERDURE_PYTHON" -P -m perdure {shlex.join(argv)}'
    )


def show_columns() -> str:
    """Return the assignment that has a command there write for this terminal."""
    return f"COLUMNS={shutil.get_terminal_size().columns}"


def run(record: LaunchRecord, argv: Sequence[str], here: Here, *, carry: Carry = run_beside) -> int:
    """Run one perdure command line on the box, as `carry` has it; return its exit code.

    What only looks is asked again when the connection breaks, a stream goes on where it was. What
    acts is sent once, over a connection that has just been proved: nobody knows whether a command
    whose answer was lost has been carried out.

    Raises:
        UnreachedError: no connection; this says nothing about the job.
    """
    command, rest = argv[0], list(argv[1:])
    if command == "logs" and len(record.boxes) > 1 and "--part" not in rest:
        return _read_all_logs(record, argv)
    channel = Channel(record.profile.launch)
    if "--html" in rest:
        return _fetch_page(channel, record, argv, carry)
    if command == "watch" and "--json" not in rest:
        return _watch(channel, carry(record, argv))
    if command in ("watch", "logs", "events") or FOLLOWS & set(rest):
        return follow(channel, record, argv, carry)
    script = carry(record, argv)
    if command in LOOKING:
        done = channel.ask(script, timeout_s=120)
    else:
        channel.ask("true")
        try:
            done = channel.run(script, timeout_s=900)
        except UnreachedError as error:
            raise UnreachedError(
                f"the answer was lost: {error}",
                hint=f"it may have been done all the same: perdure events {record.job}",
            ) from error
    print(done.out, end="", flush=True)
    if done.err:
        print(done.err, file=sys.stderr, flush=True)
    return done.code


def _watch(channel: Channel, script: str) -> int:
    """Show the screen of the box's own command; come back to it when the connection breaks."""
    for pause_s in (*_PAUSES_S, None):
        code = channel.attend(script)
        if code != 255 or pause_s is None or not channel.host:
            return code
        time.sleep(pause_s)
        channel.disconnect()
    raise AssertionError


def follow(
    channel: Channel,
    record: LaunchRecord,
    argv: Sequence[str],
    carry: Carry,
    show: Lines | None = None,
) -> int:
    """Follow a stream to its end, over as many connections as it takes; no line comes twice.

    `show` is of an earlier call, where this one goes on with the same stream. Without an option of
    `FOLLOWS`, `argv` asks for what is there now: fewer connections are tried, and silence is none.

    Raises:
        UnreachedError: connections bring nothing more.
        UnfinishedError: a box that is not followed hangs.
    """
    endless = argv[0] == "watch" or bool(FOLLOWS & set(argv))
    pauses_s = _PAUSES_S if endless else [2.0**attempt for attempt in range(ATTEMPTS - 1)]
    show = show or make_lines(argv)
    if argv[0] == "logs" and "--json" not in argv:
        argv = [*argv, "--json"]
    broken = 0
    while True:
        before = show.shown
        show.begin()
        code = channel.stream(carry(record, argv), show, silence_s=None if endless else SILENCE_S)
        if code is not None:
            return code
        broken = 0 if show.shown > before else broken
        if broken == len(pauses_s):
            raise UnreachedError(
                f"{channel.name} does not answer any more",
                hint=f"this says nothing about the job: perdure status {record.job}",
            )
        again = f"{channel.name}: no connection; it is asked again in {pauses_s[broken]:g} s"
        print(again, file=sys.stderr, flush=True)
        time.sleep(pauses_s[broken])
        broken += 1
        channel.disconnect()


def _read_all_logs(record: LaunchRecord, argv: Sequence[str]) -> int:
    """Show the ranks' output of every box, each where it is; a rank's lines stay in order.

    All boxes are asked at once. Where they are not followed, the lines of one come after those of
    the one before: until then they wait at the box, since nobody knows how many they are. A box
    that does not answer is named, and the others' lines come all the same.
    """
    outcomes: list[int | PerdureError] = []
    through = [threading.Event() for _ in record.boxes]

    def read(number: int, box: LaunchRecord) -> None:
        waits = number > 0 and not FOLLOWS & set(argv)
        show = make_lines(argv, through[number - 1] if waits else None)
        try:
            outcomes.append(follow(Channel(box.profile.launch), box, argv, run_beside, show))
        except PerdureError as error:
            print(f"{box.box}: {error}", file=sys.stderr, flush=True)
            outcomes.append(error)
        finally:
            if waits:
                through[number - 1].wait()
            through[number].set()

    readers = [
        threading.Thread(target=read, args=job, name=f"perdure-logs-{job[1].box}", daemon=True)
        for job in enumerate(record.boxes)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    codes = [outcome for outcome in outcomes if isinstance(outcome, int)]
    if not codes:
        raise next(outcome for outcome in outcomes if isinstance(outcome, PerdureError))
    return max(codes)


def _fetch_page(channel: Channel, record: LaunchRecord, argv: Sequence[str], carry: Carry) -> int:
    """Run `report --html FILE` with the page written here."""
    words = list(argv)
    index = words.index("--html") + 1
    local, words[index] = words[index], f"{record.home}/jobs/{record.job}/report.html"
    done = channel.ask(carry(record, words), timeout_s=120)
    print(done.out, end="", flush=True)
    if done.code == 0:
        page = channel.ask(f"cat {shlex.quote(words[index])}")
        with open(os.path.expanduser(local), "w", encoding="utf-8") as file:
            file.write(page.out)
    return done.code
