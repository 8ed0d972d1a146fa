"""`perdure teardown`: a box given back, or its record closed.

Nothing that exists only on the box goes unseen: the gate is looked at before a person is asked,
and once more afterwards, while nothing can be started there.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perdure.cli.platforms.launch import render_finding
from perdure.cli.platforms.profiles import ask_person, here, is_terminal
from perdure.cli.platforms.pull import DryRun, Leave, read_launched_record
from perdure.cli.speech.say import JobName, Json, answer, keep_given, note, print_json
from perdure.launch.platforms import load_teardown
from perdure.launch.results.gone import fill_words
from perdure.model.errors import ConfigError, PlatformError, SafetyError

if TYPE_CHECKING:
    from perdure.launch.platforms import Here
    from perdure.model.platforms.launching import BoxState, Finding, LaunchRecord, PullManifest


@dataclass(frozen=True, slots=True)
class Waived:
    """The checks that a person waives by a flag."""

    leave: tuple[str, ...] = ()
    nothing_to_keep: bool = False
    others_agree: bool = False
    box_is_gone: bool = False


@dataclass(frozen=True, slots=True)
class Look:
    """One look of the gate, and what it has seen."""

    obstacles: "list[Finding]"
    rosters: "dict[str, PullManifest]"
    """Job -> all files on its boxes at that moment, the sent ones among them."""


Forgets = Annotated[
    bool,
    typer.Option(
        "--forget",
        help="Without --confirm, --leave, --nothing-to-keep, --others-agree, --with-volume, "
        "--by-hand or --id: forget a job whose box is gone, and its results; stop nothing.",
    ),
]
Unpulled = Annotated[
    bool, typer.Option("--yes", help="With --forget: also results that were never pulled.")
]


def teardown(
    job: JobName,
    confirm: Annotated[
        str | None, typer.Option("--confirm", metavar="JOB", help="The job's name, typed again.")
    ] = None,
    box_is_gone: Annotated[
        bool, typer.Option("--box-is-gone", help="The box was taken away and does not answer.")
    ] = False,
    leave: Leave = None,
    nothing_to_keep: Annotated[
        bool, typer.Option("--nothing-to-keep", help="Do not pull first.")
    ] = False,
    others_agree: Annotated[
        bool, typer.Option("--others-agree", help="The other users of the box let it go, too.")
    ] = False,
    with_volume: Annotated[
        bool, typer.Option("--with-volume", help="Without --by-hand: delete its Kubernetes claim.")
    ] = False,
    by_hand: Annotated[
        bool, typer.Option("--by-hand", help="You have stopped it yourself: close the record.")
    ] = False,
    ids: Annotated[
        list[str] | None,
        typer.Option("--id", metavar="ID", help="Id of the box on its platform; repeatable."),
    ] = None,
    forgets: Forgets = False,
    yes: Unpulled = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> int:
    """Stop the meter, once all was pulled and verified."""
    if forgets:
        return forget(job, yes=yes, box_is_gone=box_is_gone, dry_run=dry_run, as_json=as_json)
    place = here()
    record = name_boxes(read_launched_record(place.home, job), ids or [])
    deletion = load_teardown(record.profile.kind).render_deletion(record, with_volume=with_volume)
    if with_volume and not deletion:
        raise ConfigError("--with-volume is for jobs on Kubernetes")
    if not dry_run and _is_gone(record):
        return _close(place.home, record, {"job": job}, as_json=as_json)
    waived = Waived(tuple(leave or ()), nothing_to_keep, others_agree, box_is_gone)
    look = check_gate(record, place, waived)
    obstacles = look.obstacles
    boxes = (record, *record.others)
    commands = {box.box: fill_words(box, box.profile.teardown.stop_command) for box in boxes}
    told: dict[str, Any] = {"job": job, "obstacles": obstacles, "command": commands[record.box]}
    told |= keep_given(
        commands=commands if record.others else None, deletion=deletion if deletion else None
    )
    if not as_json:
        for obstacle in obstacles:
            note(render_finding(obstacle))
    if dry_run:
        _foretell(record, told, (deletion, *commands.values()), as_json=as_json)
        return 4 if obstacles else 0
    if obstacles:
        raise SafetyError(f"not torn down: {obstacles[0].text}", hint=obstacles[0].hint)
    if not (any(commands.values()) or deletion or by_hand or record.profile.ends_by_itself):
        lack = "id" if record.profile.teardown.stop_command else "stop_command"
        raise SafetyError(
            f"the profile has no teardown.{lack}; {_how(record)}",
            hint=f"then: perdure teardown {job} --by-hand; or "
            + ("--id ID, which the platform calls it" if lack == "id" else f"set teardown.{lack}"),
        )
    _ask_platform(record, place, waived)
    _ask_name(job, confirm, record)
    record = _stop_under_lock(record, place, waived, look, deletion, by_hand=by_hand)
    _await_end(record, place, by_hand=by_hand)
    return _close(place.home, record, told, as_json=as_json)


def name_boxes(record: "LaunchRecord", ids: list[str]) -> "LaunchRecord":
    """Return a job's record with what the platform calls its boxes, the first one first.

    Raises:
        ConfigError: they are not as many as the boxes, or cannot be ids.
    """
    import msgspec

    from perdure.model.platforms.profile import TeardownSection

    boxes = (record, *record.others)
    if not ids:
        return record
    if len(ids) != len(boxes):
        raise ConfigError(f"--id: {len(ids)} for {len(boxes)} boxes")
    named = []
    for box, name in zip(boxes, ids, strict=True):
        fields = msgspec.to_builtins(box.profile.teardown) | {"id": name}
        try:
            section = msgspec.convert(fields, TeardownSection)
        except msgspec.ValidationError:
            raise ConfigError(f"--id {name!r} cannot be an id of a platform") from None
        profile = msgspec.structs.replace(box.profile, teardown=section)
        named.append(msgspec.structs.replace(box, profile=profile))
    return msgspec.structs.replace(named[0], others=tuple(named[1:]))


def _stop_under_lock(
    record: "LaunchRecord",
    place: "Here",
    waived: Waived,
    look: Look,
    deletion: tuple[str, ...],
    *,
    by_hand: bool,
) -> "LaunchRecord":
    """Look at the boxes once more and stop them, while nothing can start there; return the record.

    Raises:
        SafetyError: something is otherwise than it was.
        PlatformError: a stop command failed.
    """
    import shlex

    from perdure.launch.platforms import load_teardown
    from perdure.launch.results import gone
    from perdure.launch.results.gone import fill_words

    with _hold(record, waived, by_hand=by_hand):
        _look_again(record, place, waived, look)
        record = _note_waived(place.home, record, waived, look)
        platform = load_teardown(record.profile.kind)
        for box in () if waived.box_is_gone else record.boxes:
            if trouble := platform.clean(box):
                note(trouble)
        if deletion and not by_hand:
            place.tell(f"running: {shlex.join(deletion)}")
            gone.run(deletion)
        ways = [fill_words(b, b.profile.teardown.stop_command) for b in (record, *record.others)]
        if any(ways) and not by_hand:
            record = _stop_all(place.home, record, place)
    return record


def _close(home: str, record: "LaunchRecord", told: dict[str, Any], *, as_json: bool) -> int:
    """Write down that a job is torn down, and say so."""
    import msgspec

    from perdure.launch.records import write_record

    write_record(home, msgspec.structs.replace(record, torn_down_s=time.time()))
    answer(
        {**told, "torn_down": True},
        f"{record.job}: torn down; still billed, if you have any: {_left(record)}",
        as_json=as_json,
    )
    return 0


_IS_IT_GONE = "look at the provider; --box-is-gone, once you have seen that it is"


def forget(job: str, *, yes: bool, box_is_gone: bool, dry_run: bool, as_json: bool) -> int:
    """Forget a job whose box is gone, and its results there.

    Nothing is stopped by it. The record is set aside, and the name is free again.
    """
    import msgspec

    from perdure.launch.records import forget_record, write_record
    from perdure.launch.results.gone import ask_gone

    place = here()
    record = read_launched_record(place.home, job)
    if record.profile.kind == "local":
        raise ConfigError(f"job `{job}` is on this machine, which answers")
    for box in record.boxes:
        answers, said = _hear(box, place)
        if answers:
            raise SafetyError(
                f"not forgotten: {box.box} {said}",
                hint=f"perdure pull {job} DIR, then perdure teardown {job}; "
                "--box-is-gone --nothing-to-keep lets all of it go",
            )
        if said and not box_is_gone:
            raise SafetyError(f"not forgotten: {box.box} {said}", hint=_IS_IT_GONE)
    denials, remains = [], []
    for box in () if box_is_gone else (record, *record.others):
        reply = ask_gone(box)
        if reply is None:
            remains.append(
                f"nobody has said that {box.box} is gone: what runs there in "
                f"{box.place} may go on, and be billed on"
            )
        elif not reply.gone:
            denials.append(
                f"{box.profile.platform} does not say that {box.box} is gone, which may "
                f"be billed on: {reply.said or 'it says nothing'}"
            )
    lines = [*denials, *remains, *describe_lost(record)]
    if not as_json:
        for line in lines:
            note(line)
    if denials:
        raise SafetyError(f"not forgotten: {denials[0]}", hint=_IS_IT_GONE)
    if dry_run:
        answer({"job": job, "lost": lines}, f"{job} would be forgotten", as_json=as_json)
        return 0
    if not yes and ask_person(f"type the job's name ({job}) to forget it: ") != job:
        raise SafetyError(f"job `{job}` was not forgotten: {lines[0]}", hint="--yes")
    at_s = time.time()
    said = f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime(at_s))} forget"
    write_record(place.home, msgspec.structs.replace(record, notes=(*record.notes, said)))
    aside = forget_record(place.home, job, at_s)
    answer(
        {"job": job, "lost": lines, "remains": remains, "record": str(aside)},
        f"{job}: forgotten; its record is {aside}",
        as_json=as_json,
    )
    return 0


def _hear(box: "LaunchRecord", place: "Here") -> tuple[bool, str]:
    """Return whether a box answers that is asked how the job is, and what is known of it.

    One over ssh whose program fails, or does not end, may well live, and is billed: its disk may be
    full, or its storage hang. Of one that is not reached nothing is known.
    """
    from perdure.cli.platforms.pull import query_state
    from perdure.launch.exchange import UnfinishedError, UnreachedError

    try:
        return True, f"answers, and says {query_state(box, place).state}"
    except PlatformError as error:
        fails = box.profile.kind == "ssh" and not isinstance(error, UnreachedError)
        if fails or isinstance(error, UnfinishedError):
            return False, f"is not known to be gone: {error}"
        place.tell(str(error))
    return False, ""


def describe_lost(record: "LaunchRecord") -> list[str]:
    """Return what was never brought home of a job whose box is gone, line by line."""
    from perdure.cli.platforms.pull import describe_files
    from perdure.launch.results.pulling import read_manifest, read_verified

    pulled = read_manifest(Path(record.pulled_to)) if record.pulled_to else None
    if pulled is None:
        lines = ["nothing of it was ever brought home"]
    else:
        at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(pulled.pulled_s))
        proof = "verified" if read_verified(Path(record.pulled_to)) else "never verified"
        lines = [
            f"whatever was written after the pull of {at} is lost; in {record.pulled_to} are "
            f"{describe_files(pulled.files)}, {proof}"
        ]
        if pulled.left:
            lines.append(f"left there were {describe_files(pulled.left)}")
    if not record.profile.ends_by_itself:
        lines.append(
            f"this stops no meter: {_how(record)}; still billed, if you have any: {_left(record)}"
        )
    return lines


def _foretell(
    record: "LaunchRecord",
    told: dict[str, Any],
    words: tuple[tuple[str, ...], ...],
    *,
    as_json: bool,
) -> None:
    """Say what would be run."""
    import shlex

    if as_json:
        print_json({**told, "dry_run": True})
    elif not told["obstacles"]:
        ways = "; ".join(shlex.join(way) for way in words if way)
        way = ways or f"nothing; by hand: {_how(record)}"
        print(f"the gate is open; after the name is typed, it would run: {way}")


def check_gate(record: "LaunchRecord", place: "Here", waived: Waived) -> Look:
    """Return why the box may not be given back yet, if it may not, and what was seen.

    What other jobs have on the same box goes with it, so they are looked at as well.
    """
    import msgspec

    from perdure.launch.records import list_records
    from perdure.launch.results.gate import list_known_jobs, list_neighbours

    records = list_records(place.home)
    known = list_known_jobs(record, records)
    rosters: dict[str, PullManifest] = {}
    found = _look(record, place, waived, rosters, known)
    if waived.box_is_gone:
        return Look(found, rosters)
    for other in list_neighbours(record, records):
        found += [
            msgspec.structs.replace(
                finding, text=f"job `{other.job}` is on the same box: {finding.text}"
            )
            for finding in _look(other, place, Waived(leave=waived.leave), rosters, known)
        ]
    if not waived.others_agree:
        found += _look_for_others(record)
    return Look(found, rosters)


def _look(
    record: "LaunchRecord",
    place: "Here",
    waived: Waived,
    rosters: "dict[str, PullManifest]",
    known: frozenset[str],
) -> "list[Finding]":
    from perdure.cli.platforms.pull import query_state
    from perdure.launch.exchange import UnreachedError
    from perdure.launch.results.gate import find_obstacles
    from perdure.launch.results.pulling import (
        build_roster,
        compare_files,
        drop_sent,
        open_sources,
        read_manifest,
        read_verified,
    )

    directory = Path(record.pulled_to) if record.pulled_to else None
    pulled = read_manifest(directory) if directory else None
    differences = compare_files(directory, pulled) if directory and pulled else []
    states: list[BoxState | None] = []
    on_box: PullManifest | None = None
    leave = (*waived.leave, *(pulled.leave if pulled else ()))
    try:
        if not waived.box_is_gone:
            states += [query_state(box, place) for box in record.boxes]
            with open_sources(record, place) as sources:
                rosters[record.job] = build_roster(record, sources, leave=leave)
            on_box = drop_sent(rosters[record.job], record.project)
    except UnreachedError as error:
        place.tell(str(error))
        states.append(None)
    return find_obstacles(
        record,
        states=states,
        on_box=on_box,
        pulled=pulled,
        verified=read_verified(directory) if directory else None,
        differences=differences,
        box_is_gone=waived.box_is_gone,
        known=known | frozenset(on_box.others if on_box and waived.others_agree else ()),
        nothing_to_keep=waived.nothing_to_keep,
    )


def _look_for_others(record: "LaunchRecord") -> "list[Finding]":
    """Return who else is on a machine that the stop verb takes: processes and logins."""
    from perdure.launch.exchange import UnreachedError
    from perdure.launch.platforms import load_teardown
    from perdure.model.platforms.launching import Finding

    platform, found = load_teardown(record.profile.kind), []
    hint = "--others-agree, once it may go with the box"
    for box in record.boxes:
        with contextlib.suppress(UnreachedError):  # Which is an obstacle already.
            users = platform.list_users(box)
            found += [Finding("error", f"{box.box}: {other}", hint, "GEN1") for other in users]
    return found


@contextlib.contextmanager
def _hold(record: "LaunchRecord", waived: Waived, *, by_hand: bool) -> Iterator[None]:
    """Let nothing start on the boxes of a job while the body runs.

    Raises:
        SafetyError: something has been started there meanwhile.
    """
    from perdure.launch.platforms import load_teardown

    platform = load_teardown(record.profile.kind)
    with contextlib.ExitStack() as stack:
        for box in () if waived.box_is_gone or by_hand else record.boxes:
            if why := stack.enter_context(platform.hold(box)):
                raise SafetyError(
                    f"not torn down: {box.box}: {why}", hint=f"perdure status {record.job}"
                )
        yield


def _look_again(record: "LaunchRecord", place: "Here", waived: Waived, before: Look) -> None:
    """Look at the boxes once more, after a person has taken their time to say yes.

    Raises:
        SafetyError: something is otherwise than it was.
    """
    from perdure.cli.platforms.pull import query_state
    from perdure.launch.exchange import name_first
    from perdure.launch.records import list_records
    from perdure.launch.results.gate import list_changed_files, list_neighbours
    from perdure.launch.results.pulling import build_roster, open_sources

    if waived.box_is_gone:
        return
    neighbours = list_neighbours(record, list_records(place.home))
    jobs = {other.job: other for other in (record, *neighbours)}
    for name, roster in before.rosters.items():
        for box in jobs[name].boxes if name in jobs else ():
            state = query_state(box, place)
            if not state.over:
                raise SafetyError(
                    f"not torn down: meanwhile `{name}` is {state.state}: {state.reason}",
                    hint=f"perdure stop {name}",
                )
        with open_sources(jobs[name], place) as sources:
            now = build_roster(jobs[name], sources, leave=roster.leave, hashes=False)
        changed = [] if waived.nothing_to_keep else list_changed_files(roster, now)
        if changed:
            raise SafetyError(
                f"not torn down: written meanwhile: {name_first(changed, 1)}",
                hint=f"perdure pull {name} {jobs[name].pulled_to}",
            )
    others = [] if waived.others_agree else _look_for_others(record)
    if others:
        raise SafetyError(f"not torn down: {others[0].text}", hint=others[0].hint)


def _note_waived(home: str, record: "LaunchRecord", waived: Waived, look: Look) -> "LaunchRecord":
    """Write down what a person has let go of; return the record."""
    import msgspec

    from perdure.launch.records import write_record

    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    roster = look.rosters.get(record.job)
    files, left = (roster.files, roster.left) if roster else ((), ())
    leave = roster.leave if roster else ()
    size, names = sum(file.bytes for file in files), ", ".join(file.path for file in left[:20])
    flags = (
        (
            waived.nothing_to_keep,
            f"--nothing-to-keep: {len(files)} files, {size} bytes were on the box",
        ),
        (leave, f"--leave {' '.join(leave)}: {len(left)} files: {names}"),
        (waived.others_agree, "--others-agree"),
        (waived.box_is_gone, "--box-is-gone"),
    )
    words = [word for let_go, word in flags if let_go]
    if words:
        record = msgspec.structs.replace(
            record, notes=(*record.notes, *(f"{at} teardown {word}" for word in words))
        )
        write_record(home, record)
    return record


def _how(record: "LaunchRecord") -> str:
    return record.profile.teardown.how or "see your provider"


def _left(record: "LaunchRecord") -> str:
    return record.profile.teardown.keeps_billing or "nothing that this profile knows of"


def _ask_name(job: str, confirm: str | None, record: "LaunchRecord") -> None:
    """Have a person type the job's name."""
    if confirm is None and is_terminal():
        undo = "its disk is deleted" if record.profile.meter_stop_irreversible else "the disk stays"
        names = ", ".join(box.box for box in (record, *record.others))
        note(f"{names}: {record.profile.meter_stop_verb}; {undo}")
        confirm = input(f"type the job's name ({job}) to go on: ").strip()
    if confirm != job:
        raise SafetyError("not torn down: the job's name was not typed", hint=f"--confirm {job}")


def _ask_platform(record: "LaunchRecord", place: "Here", waived: Waived) -> None:
    """Say what the platform says of each box before anything is stopped.

    Raises:
        SafetyError: it does not know one: it is another's name, or another account's.
    """
    from perdure.launch.results.gone import ask_gone

    for box in (record, *record.others):
        answer = ask_gone(box)
        if answer is None:
            continue
        place.tell(
            f"{box.profile.platform} says of {box.profile.teardown.id or box.box}: {answer.said}"
        )
        if answer.gone and not waived.box_is_gone and not record.stop_asked_s and not box.gone:
            raise SafetyError(
                f"not torn down: {box.box} answers, and {box.profile.platform} says that there is "
                f"no {box.profile.teardown.id or box.box}",
                hint="is teardown.id the box's own, and the key of that account?",
            )


def _stop_all(home: str, record: "LaunchRecord", place: "Here") -> "LaunchRecord":
    """Stop every box, also where one of them cannot be; return the record."""
    import msgspec

    from perdure.launch.records import write_record
    from perdure.launch.results import gone

    record = msgspec.structs.replace(record, stop_asked_s=time.time())
    write_record(home, record)  # Before it is: whatever breaks now, somebody looks after it.
    failed: list[PlatformError] = []
    for box in (record, *record.others):
        try:
            gone.stop(box, place.tell)
        except PlatformError as error:
            failed.append(error)
    if failed:
        raise failed[0]
    return record


def _await_end(record: "LaunchRecord", place: "Here", *, by_hand: bool) -> None:
    """Wait until the platform says of every box that it is gone.

    Raises:
        PlatformError: it does not, or cannot be asked; the meter may still run.
    """
    from perdure.launch.results import gone
    from perdure.launch.results.gone import fill_words

    for box in (record, *record.others):
        answer = gone.wait_gone(box, place.tell)
        if answer is not None and not answer.gone:
            raise PlatformError(
                f"stop was asked for; {box.profile.platform} does not say that {box.box} is gone: "
                f"{answer.said or 'it says nothing'}",
                hint="THE METER MAY STILL RUN: look at the provider; the same command asks again",
            )
        if answer is None and not by_hand and fill_words(box, box.profile.teardown.stop_command):
            raise PlatformError(
                f"stop was asked for; nobody says that {box.box} is gone: the profile has no "
                "teardown.gone_command",
                hint=f"look at the provider; once it is gone: perdure teardown {record.job} "
                "--by-hand",
            )


def _is_gone(record: "LaunchRecord") -> bool:
    """Return whether a stop was asked for, and the platform says by now that all is gone."""
    from perdure.launch.results.gone import ask_gone

    if not record.stop_asked_s:
        return False
    answers = [ask_gone(box) for box in (record, *record.others)]
    return all(answer is not None and answer.gone for answer in answers)
