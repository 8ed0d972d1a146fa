"""`perdure pull`: results home, with what nobody had named, before a box is given back."""

import contextlib
import os
import re
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perdure.cli.jobs import ENDED, find_here
from perdure.cli.platforms.profiles import here
from perdure.cli.speech.say import JobName, Json, answer
from perdure.launch.records import write_record
from perdure.model.errors import ConfigError, SafetyError

if TYPE_CHECKING:
    from perdure.launch.platforms import Here
    from perdure.launch.results.pulling import Sources
    from perdure.model.platforms.launching import BoxState, LaunchRecord, PulledFile, PullManifest

_LEAVE_S = 20.0
"""Given to further boxes to leave a job that has ended on its first."""
_TOLD = ("roots", "sent", "unread", "excluded", "others", "changed")
"""Of a roster, what --json tells as it is."""
_SHOWN_MAX = 8
"""Of folders with files that nobody named so many are shown, the largest first."""

DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be done; change nothing.")]
Leave = Annotated[
    list[str] | None,
    typer.Option(
        "--leave",
        metavar="PATTERN",
        help="Files that stay on the box, such as data/sets or *.core.",
    ),
]


def pull(
    job: JobName,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where it goes.")],
    live: Annotated[
        bool, typer.Option("--live", help="Also while the job runs: a copy, not the last one.")
    ] = False,
    gone: Annotated[
        list[str] | None,
        typer.Option("--gone", metavar="HOST", help="A box of several that was taken away."),
    ] = None,
    leave: Leave = None,
    up_to_gb: Annotated[
        float,
        typer.Option(
            "--up-to",
            min=0,
            metavar="GB",
            help="Ask before pulling more than this beyond the named results.",
        ),
    ] = 20.0,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask, whatever the size.")] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> int:
    """Bring a job's checkpoints, journal, logs and outputs here.

    It also brings each file of the project and the data folders that differs from what was sent,
    except caches, environments, and `.ssh`. The same command resumes after an interruption.
    """
    import msgspec

    from perdure.launch.results.pulling import describe_changed, open_sources

    place = here()
    record = mark_gone(read_launched_record(place.home, job), gone or [])
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
        manifest = _make_roster(record, sources, tuple(leave or ()), place)
        _ask_size(record, manifest, up_to_gb, yes=yes or dry_run)
        if not dry_run:
            manifest = _bring(record, manifest, directory, sources, place, live, as_json)
    if manifest.changed:
        place.tell(f"{describe_changed(manifest.changed)} while the job runs: here as they arrived")
    if not dry_run:
        write_record(
            place.home, msgspec.structs.replace(record, pulled_to=str(directory.resolve()))
        )
    document = {
        "job": job,
        "dir": str(directory),
        "files": len(manifest.files),
        "bytes": sum(file.bytes for file in manifest.files),
        "dry_run": dry_run,
        "left": [file.path for file in manifest.left],
        **{name: getattr(manifest, name) for name in _TOLD},
    }
    what = f"{describe_files(manifest.files)}, from {manifest.host}"
    verb = "would pull" if dry_run else "pulled"
    answer(document, f"{verb} {what}; next: perdure verify {directory}", as_json=as_json)
    return 0


def _bring(
    record: "LaunchRecord",
    manifest: "PullManifest",
    directory: Path,
    sources: "Sources",
    place: "Here",
    live: bool,
    as_json: bool,
) -> "PullManifest":
    """Pull the files, and show on a terminal how far that is, by what lies here already."""
    from perdure.cli.speech.bar import Bar
    from perdure.launch.results.pulling import pull_files

    def measure() -> float:
        here = 0
        for folder, _, names in os.walk(directory):
            for name in names:
                with contextlib.suppress(OSError):
                    here += os.stat(os.path.join(folder, name)).st_size
        return here

    with Bar(as_json=as_json) as bar:
        bar.watch("pull", sum(file.bytes for file in manifest.files), measure)
        return pull_files(record, manifest, directory, sources, place.tell, live=live)


def describe_files(files: "Sequence[PulledFile]") -> str:
    """Return how many files they are, and how large together."""
    return f"{len(files)} files, {sum(file.bytes for file in files) / 1e6:.1f} MB"


def _make_roster(
    record: "LaunchRecord", sources: "Sources", leave: tuple[str, ...], place: "Here"
) -> "PullManifest":
    """Return what is to be brought, with hashes; what nobody named is told first, by its size."""
    from perdure.launch.results.pulling import build_roster, drop_sent, list_areas

    if any(list_areas(box) for box in record.boxes):
        sizes = build_roster(record, sources, leave=leave, hashes=False)
        for line in describe_finds(record, drop_sent(sizes, record.project, hashes=False)):
            place.tell(line)
    return drop_sent(build_roster(record, sources, leave=leave), record.project)


def list_unnamed_files(record: "LaunchRecord", manifest: "PullManifest") -> "list[PulledFile]":
    """Return the files that nobody named as results."""
    from perdure.launch.results.pulling import list_areas

    areas = {area for box in record.boxes for area in set(list_areas(box)) - set(box.roots)}
    names = {label: re.sub("^boxes/[^/]*/", "", label) for label in manifest.roots}
    labels = tuple(f"{label}/" for label, name in names.items() if name in areas)
    return [file for file in manifest.files if file.path.startswith(labels)]


def describe_finds(record: "LaunchRecord", manifest: "PullManifest") -> list[str]:
    """Return what lies on the box beside the results, line by line, the largest folders first."""
    from perdure.launch.exchange import name_first

    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for file in list_unnamed_files(record, manifest):
        folder = "/".join(file.path.split("/")[:-1][:3])
        sizes[folder] += file.bytes
        counts[folder] += 1
    lines = [
        f"not named as a result: {folder}: {counts[folder]} files, {size / 1e6:.1f} MB"
        for folder, size in sizes.most_common(_SHOWN_MAX)
    ]
    rest = [size for _, size in sizes.most_common()[_SHOWN_MAX:]]
    more = (
        (rest, f"and {len(rest)} more folders, {sum(rest) / 1e6:.1f} MB"),
        (manifest.sent, f"{manifest.sent} files of the project are here as they are there"),
        (manifest.left, f"left there as you say: {describe_files(manifest.left)}"),
        (
            manifest.excluded,
            f"not looked into (caches, environments, secrets): {name_first(manifest.excluded)}",
        ),
        *((True, f"cannot be brought: {why}") for why in manifest.unread),
    )
    return [*lines, *(text for there, text in more if there)]


def _ask_size(
    record: "LaunchRecord", manifest: "PullManifest", up_to_gb: float, *, yes: bool
) -> None:
    """Ask a person before much comes that nobody named.

    Raises:
        SafetyError: there is nobody who could be asked, or who does not want it.
    """
    from perdure.cli.platforms.profiles import ask_person

    size = sum(file.bytes for file in list_unnamed_files(record, manifest))
    if yes or size <= up_to_gb * 1e9:
        return
    text = f"{size / 1e9:.1f} GB on the box were not named as results"
    if ask_person(f"{text}; bring them? [y/N] ").lower() in ("y", "yes"):
        return
    raise SafetyError(
        f"not pulled: {text}",
        hint="--yes brings them, --leave PATTERN leaves some "
        "of them there, --up-to GB sets the bound",
    )


def wait_over(box: "LaunchRecord", place: "Here", for_s: float) -> "BoxState":
    """Return how the job is on a box, after up to `for_s` in which it may end."""
    deadline = time.monotonic() + for_s
    while True:
        state = query_state(box, place)
        if state.over or time.monotonic() > deadline:
            return state
        time.sleep(0.5)


def mark_gone(record: "LaunchRecord", hosts: list[str]) -> "LaunchRecord":
    """Return a job's record with the boxes `hosts` as gone.

    Raises:
        ConfigError: one is not among them, or nothing would be left to ask.
    """
    import msgspec

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
        raise ConfigError(
            "--gone: nothing is left to pull from",
            hint=f"perdure teardown {record.job} --box-is-gone closes the record",
        )
    return record


def verify_pulled(
    directory: Path,
    manifest: "PullManifest",
    *,
    allow_pickle: bool,
    nothing_to_keep: bool,
    as_json: bool,
) -> int:
    """Compare a pulled directory with its roster, load what has tensors; return the exit code."""
    from perdure.cli.speech.bar import Bar
    from perdure.launch.exchange import name_first
    from perdure.launch.results.pulling import (
        Found,
        compare_files,
        describe_changed,
        look_into,
        write_verified,
    )
    from perdure.model.platforms.launching import PULL_VERIFIED

    with Bar(as_json=as_json) as bar:
        problems = compare_files(
            directory, manifest, lambda done, total: bar.count("verify", done, total)
        )
    found = Found() if problems else look_into(directory, manifest, allow_pickle=allow_pickle)
    problems += found.problems
    if not (problems or found.tensors or nothing_to_keep):
        problems = [
            "no file that was pulled has a tensor in it; --nothing-to-keep, if that is right"
        ]
    proof = None
    if problems:
        (directory / PULL_VERIFIED).unlink(missing_ok=True)
    else:
        proof = write_verified(
            directory, manifest, found.loaded, time.time(),
            tensors=found.tensors, nothing_to_keep=nothing_to_keep,
        )  # fmt: skip
    document = {
        "dir": str(directory),
        "job": manifest.job,
        "ok": not problems,
        "files": len(manifest.files),
        "bytes": sum(file.bytes for file in manifest.files),
        "loaded": found.loaded,
        "tensors": found.tensors,
        "unknown": found.unknown,
        "changed": manifest.changed,
        "problems": problems,
        "verified": proof,
    }
    lines = [f"DAMAGED: {problem}" for problem in problems]
    if found.unknown:
        lines = [f"not understood, compared by SHA-256 only: {name_first(found.unknown)}", *lines]
    if not problems:
        moved = f"{describe_changed(manifest.changed)} while the job ran: here as they arrived"
        lines += [moved] if manifest.changed else []
        lines.append(
            f"ok: {describe_files(manifest.files)}, none missing and none too many, SHA-256 "
            f"equal; {found.tensors} tensors in {found.loaded} files and checkpoints load with "
            "weights_only"
        )
    answer(document, "\n".join(lines), as_json=as_json)
    return 3 if problems else 0


def read_launched_record(home: str, job: str) -> "LaunchRecord":
    """Return what is remembered of a launched job.

    Raises:
        ConfigError: there is none.
    """
    from perdure.launch.records import read_record

    record = read_record(home, job)
    if record is None:
        raise ConfigError(
            f"job `{job}` was not launched from here",
            hint="perdure status lists the jobs of this machine",
        )
    if record.torn_down_s:
        raise ConfigError(f"job `{job}` was torn down already")
    return record


def query_state(record: "LaunchRecord", place: "Here") -> "BoxState":
    """Return how the job is, by its platform; of this machine's own, by the job's files.

    Raises:
        PlatformError: nobody answered, which says nothing about the job.
    """
    from perdure.launch.platforms import load_platform
    from perdure.model.platforms.launching import BoxState

    if record.profile.kind != "local":
        return load_platform(record.profile.kind).query_state(record, place)
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
