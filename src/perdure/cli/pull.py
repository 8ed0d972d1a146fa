"""`perdure pull` and `perdure teardown`: results home, and only then the box given back."""

import os
import shlex
import subprocess
import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from perdure.cli.act import JobName
from perdure.cli.jobs import ENDED, find_here
from perdure.cli.launch import render_finding
from perdure.cli.options import Json
from perdure.cli.profiles import here, is_terminal
from perdure.cli.say import note, print_json
from perdure.launch.channel import Channel, UnreachedError
from perdure.launch.gate import find_neighbours, find_obstacles
from perdure.launch.platforms import Here, find_platform
from perdure.launch.pulling import (
    compare_files,
    find_loadable,
    find_roster,
    load_files,
    pull_files,
    read_manifest,
    read_verified,
    write_verified,
)
from perdure.launch.records import list_records, read_record, write_record
from perdure.launch.sources import open_sources
from perdure.model.errors import ConfigError, PlatformError, SafetyError
from perdure.model.launching import (
    PULL_VERIFIED,
    BoxState,
    Finding,
    LaunchRecord,
    PullManifest,
    PullVerified,
)
from perdure.service.jobfiles import resolve_home

_STOP_S = 900.0
_LEAVE_S = 20.0
"""Given to further boxes to leave a job that has ended on its first."""

DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done; change nothing.")]


def pull(
    job: JobName,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where it goes.")],
    live: Annotated[
        bool, typer.Option("--live", help="Also while the job runs: a copy, not the last one.")
    ] = False,
    gone: Annotated[
        list[str] | None,
        typer.Option("--gone", metavar="HOST", help="Of several boxes, one that was taken away."),
    ] = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> int:
    """Bring a job's checkpoints, journal, logs and outputs here from its box, or all of them.

    What has arrived stays: the same command goes on from there.
    """
    home = resolve_home()
    place, record = here(home), mark_gone(find_record(home, job), gone or [])
    for box in record.boxes:
        state = wait_over(box, place, 0.0 if live or box is record else _LEAVE_S)
        if not state.over and not live:
            raise SafetyError(
                f"job `{job}` is {state.state} on {box.box}: what is pulled now is not its end",
                hint=f"perdure stop {job} first, or --live for a copy of what there is",
            )
    if record.profile.kind == "notebook":
        from perdure.launch.notebook import fetch

        fetch(record, place)  # Its output has no machine that could be asked for a roster.
    with open_sources(record, place) as sources:
        manifest = find_roster(record, sources)
        if not dry_run:
            pull_files(record, manifest, directory, sources, place.tell)
    size = sum(file.bytes for file in manifest.files)
    text = f"{len(manifest.files)} files, {size / 1e6:.1f} MB, from {manifest.host}"
    if not dry_run:
        write_record(home, msgspec.structs.replace(record, pulled_to=str(directory.resolve())))
    if as_json:
        files = len(manifest.files)
        print_json({"job": job, "dir": str(directory), "files": files, "bytes": size,
                    "roots": manifest.roots, "dry_run": dry_run})  # fmt: skip
    else:
        verb = "would pull" if dry_run else "pulled"
        print(f"{verb} {text}; next: perdure verify {directory}")
    return 0


def wait_over(box: LaunchRecord, place: Here, for_s: float) -> BoxState:
    """Return how the job is on a box, after up to `for_s` in which it may end."""
    deadline = time.monotonic() + for_s
    while True:
        state = find_state(box, place)
        if state.over or time.monotonic() > deadline:
            return state
        time.sleep(0.5)


def mark_gone(record: LaunchRecord, hosts: list[str]) -> LaunchRecord:
    """Return a job's record with the boxes `hosts` as gone.

    Raises:
        ConfigError: one is not among them, or nothing would be left to ask.
    """
    names = [box.box for box in (record, *record.others)]
    unknown = next((host for host in hosts if host not in names), None)
    if unknown is not None:
        raise ConfigError(f"--gone {unknown}: not a box of the job", hint=", ".join(names))
    first, *others = (
        msgspec.structs.replace(box, gone=box.gone or box.box in hosts)
        for box in (record, *record.others)
    )
    record = msgspec.structs.replace(first, others=tuple(others))
    if not record.boxes:
        raise ConfigError("--gone: nothing is left to pull from", hint="perdure teardown "
                          f"{record.job} --box-is-gone closes the record")  # fmt: skip
    return record


def verify_pulled(
    directory: Path, manifest: PullManifest, *, allow_pickle: bool, as_json: bool
) -> int:
    """Compare a pulled directory with its roster, load what has tensors; return the exit code."""
    problems = compare_files(directory, manifest)
    loaded = 0
    if not problems:
        loaded, problems = load_files(find_loadable(directory, manifest), allow_pickle=allow_pickle)
    proof = None
    if not problems:
        proof = write_verified(directory, manifest, loaded, time.time())
    else:
        (directory / PULL_VERIFIED).unlink(missing_ok=True)
    size = sum(file.bytes for file in manifest.files)
    if as_json:
        print_json({"dir": str(directory), "job": manifest.job, "ok": not problems,
                    "files": len(manifest.files), "bytes": size, "loaded": loaded,
                    "problems": problems, "verified": proof})  # fmt: skip
    elif problems:
        print("\n".join(f"DAMAGED: {problem}" for problem in problems))
    else:
        print(f"ok: {len(manifest.files)} files, {size / 1e6:.1f} MB, none missing and none too "
              f"many, SHA-256 equal; {loaded} with tensors load with weights_only")  # fmt: skip
    return 3 if problems else 0


def teardown(
    job: JobName,
    confirm: Annotated[
        str | None, typer.Option("--confirm", metavar="JOB", help="The job's name, typed again.")
    ] = None,
    box_is_gone: Annotated[
        bool, typer.Option("--box-is-gone", help="It was taken away, and answers no more.")
    ] = False,
    with_volume: Annotated[
        bool,
        typer.Option("--with-volume", help="Kubernetes: also the claim that perdure has made."),
    ] = False,
    by_hand: Annotated[
        bool, typer.Option("--by-hand", help="You have stopped it yourself: close the record.")
    ] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> int:
    """Stop the meter: only when all was pulled and verified, and you have typed the job's name."""
    home = resolve_home()
    place, record = here(home), find_record(home, job)
    if with_volume and record.profile.kind != "kubernetes":
        raise ConfigError("--with-volume is for jobs on Kubernetes")
    obstacles = check_gate(record, place, box_is_gone=box_is_gone)
    commands = {box.box: fill_command(box) for box in (record, *record.others)}
    command = commands[record.box]
    told: dict[str, Any] = {"job": job, "obstacles": obstacles, "command": command}
    if record.others:
        told["commands"] = commands
    deletion = _find_deletion(record, with_volume)
    if deletion:
        told["deletion"] = deletion
    if not as_json:
        for obstacle in obstacles:
            note(render_finding(obstacle))
    if dry_run:
        if as_json:
            print_json({**told, "dry_run": True})
        elif not obstacles:
            ways = "; ".join(shlex.join(w) for w in (deletion, *commands.values()) if w)
            way = ways or f"nothing; by hand: {_how(record)}"
            print(f"the gate is open; after the name is typed, it would run: {way}")
        return 4 if obstacles else 0
    if obstacles:
        raise SafetyError(f"not torn down: {obstacles[0].text}", hint=obstacles[0].hint)
    if not (command or deletion or by_hand or record.profile.ends_by_itself):
        raise SafetyError(
            f"the profile has no stop command; {_how(record)}",
            hint=f"then: perdure teardown {job} --by-hand; or set teardown.stop_command",
        )
    _ask_name(job, confirm, record)
    if not box_is_gone and record.profile.kind in ("ssh", "slurm"):
        for box in record.boxes:
            _clean(box)
    if deletion and not by_hand:
        _stop(deletion, place)
    if command and not by_hand:
        _stop_all(commands, place)
    write_record(home, msgspec.structs.replace(record, torn_down_s=time.time()))
    if as_json:
        print_json({**told, "torn_down": True})
    else:
        print(f"{job}: torn down; still billed, if you have any: {_left(record)}")
    return 0


def find_record(home: str, job: str) -> LaunchRecord:
    """Return what is remembered of a launched job.

    Raises:
        ConfigError: there is none.
    """
    record = read_record(home, job)
    if record is None:
        raise ConfigError(f"job `{job}` was not launched from here",
                          hint="perdure ps lists the jobs of this machine")  # fmt: skip
    if record.torn_down_s:
        raise ConfigError(f"job `{job}` was torn down already")
    return record


def find_state(record: LaunchRecord, place: Here) -> BoxState:
    """Return how the job is, by its platform; of this machine's own, by the job's files.

    Raises:
        PlatformError: nobody answered, which says nothing about the job.
    """
    if record.profile.kind != "local":
        return find_platform(record.profile.kind).find_state(record, place)
    job = find_here(record.job, record.home)
    snapshot = job.snapshot()
    if job.alive:
        return BoxState(state="running", reason=snapshot.reason)
    ended = snapshot.state in ENDED
    return BoxState(
        state="ended" if ended else "killed",
        code=int(snapshot.state == "failed"),
        reason=snapshot.reason or snapshot.state,
    )


def check_gate(record: LaunchRecord, place: Here, *, box_is_gone: bool) -> list[Finding]:
    """Return why the box may not be given back yet; empty where it may.

    What other jobs have on the same box goes with it, so they are looked at as well.
    """
    found = _look(record, place, box_is_gone=box_is_gone)
    if box_is_gone:
        return found
    for other in find_neighbours(record, list_records(place.home)):
        found += [
            msgspec.structs.replace(
                finding, text=f"job `{other.job}` is on the same box: {finding.text}"
            )
            for finding in _look(other, place, box_is_gone=False)
        ]
    return found


def _look(record: LaunchRecord, place: Here, *, box_is_gone: bool) -> list[Finding]:
    directory = Path(record.pulled_to) if record.pulled_to else None
    pulled: PullManifest | None = None
    proof: PullVerified | None = None
    differences: list[str] = []
    if directory is not None:
        pulled, proof = read_manifest(directory), read_verified(directory)
        differences = compare_files(directory, pulled, hashes=False) if pulled else []
    states: list[BoxState | None] = []
    on_box: PullManifest | None = None
    try:
        if not box_is_gone:
            states += [find_state(box, place) for box in record.boxes]
            with open_sources(record, place) as sources:
                on_box = find_roster(record, sources)
    except UnreachedError as error:
        place.tell(str(error))
        states.append(None)
    return find_obstacles(
        record,
        states=states,
        on_box=on_box,
        pulled=pulled,
        verified=proof,
        differences=differences,
        box_is_gone=box_is_gone,
    )


def _find_deletion(record: LaunchRecord, with_volume: bool) -> tuple[str, ...]:
    """Return the command that ends a job's pods; empty where it has none."""
    if record.profile.kind != "kubernetes":
        return ()
    from perdure.launch.kubernetes import make_deletion

    return make_deletion(record, with_volume=with_volume)


def fill_command(record: LaunchRecord) -> tuple[str, ...]:
    """Return the profile's stop command for this job; empty where it has none."""
    values = {"{job}": record.job, "{host}": record.profile.launch.host}
    words = []
    for word in record.profile.teardown.stop_command:
        for name, value in values.items():
            word = word.replace(name, value)
        words.append(word)
    return tuple(words)


def _how(record: LaunchRecord) -> str:
    return record.profile.teardown.how or "see your provider"


def _left(record: LaunchRecord) -> str:
    return record.profile.teardown.keeps_billing or "nothing that this profile knows of"


def _ask_name(job: str, confirm: str | None, record: LaunchRecord) -> None:
    """Have a person type the job's name."""
    if confirm is None and is_terminal():
        undo = "its disk is deleted" if record.profile.meter_stop_irreversible else "the disk stays"
        names = ", ".join(box.box for box in (record, *record.others))
        note(f"{names}: {record.profile.meter_stop_verb}; {undo}")
        confirm = input(f"type the job's name ({job}) to go on: ").strip()
    if confirm != job:
        raise SafetyError("not torn down: the job's name was not typed", hint=f"--confirm {job}")


def _clean(record: LaunchRecord) -> None:
    """Take secrets and what starts the job again off the box; it may be about to be deleted."""
    from perdure.launch.ssh.ask import in_job

    script = "if [ -f launch/relaunch.sh ]; then sh launch/relaunch.sh off; fi; "
    script += 'rm -rf "$CRED_FILE" launch/credentials'
    channel = Channel(record.profile.launch)
    sent = (
        f'test -e "{record.place}/launch/env.sh" || exit 0; '  # Else it lies in the project here.
    )
    done = channel.ask(sent + in_job(record.place, script))
    if done.code:
        note(f"{channel.name}: {done.err}")
    channel.disconnect()


def _stop_all(commands: dict[str, tuple[str, ...]], place: Here) -> None:
    """Stop every box, also where one of them cannot be."""
    failed: list[PlatformError] = []
    for words in commands.values():
        try:
            _stop(words, place)
        except PlatformError as error:
            failed.append(error)
    if failed:
        raise failed[0]


def _stop(command: tuple[str, ...], place: Here) -> None:
    place.tell(f"running: {shlex.join(command)}")
    try:
        done = subprocess.run(command, timeout=_STOP_S, env=dict(os.environ), check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PlatformError(
            f"the stop command did not run to its end: {error}",
            hint="THE METER MAY STILL RUN: look at the provider",
        ) from error
    if done.returncode:
        raise PlatformError(
            f"the stop command ended with {done.returncode}",
            hint="THE METER MAY STILL RUN: look at the provider",
        )
