"""A job as the commands see it: files on disk, and its controller if one lives.

Every command waits until this module is imported, so what only some of them need is imported
where it is used.
"""

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from perdure.cli.speech.say import note
from perdure.model.errors import ConfigError, PerdureError, SafetyError
from perdure.model.paths import JobPaths
from perdure.service.jobfolders import ENDED as ENDED
from perdure.service.jobfolders import is_alive, list_jobs, paths_of, resolve_home

if TYPE_CHECKING:
    from perdure.model.chain import EntryReader, Tally
    from perdure.model.events import JournalEntry, Newest
    from perdure.model.job import JobSpec
    from perdure.model.platforms.launching import LaunchRecord
    from perdure.model.platforms.outcome import Outcome
    from perdure.model.platforms.slurm import Allocation
    from perdure.model.report import Snapshot
    from perdure.model.steering import Verb
    from perdure.telemetry.curves import Curves
    from perdure.telemetry.outcome import JobOutcome, Vanishing

LOST = "lost"
"""State of a job whose `perdure run` is gone without having ended it."""
LOST_REASON = "`perdure run` ended without ending the job; the same --name resumes it"
_STALLED_S = 300.0
"""Without a sign for so long a job is called stalled, where `hang_action_s` says nothing."""
_SILENT_S = 5.0
"""A controller that lives writes a picture twice a second."""


@dataclass(frozen=True, slots=True)
class Job:
    """One job under the state directory."""

    name: str
    home: str
    paths: JobPaths
    spec: "JobSpec"

    @property
    def alive(self) -> bool:
        """Whether its `perdure run` lives."""
        return is_alive(self.paths)

    @property
    def checkpoints(self) -> str:
        """Return where its checkpoints land: a directory or a URL."""
        return self.spec.checkpoint.url or self.paths.checkpoints

    def read(self, *, without: Collection[str] = ()) -> "EntryReader":
        """Return a reader of its journal, which skips what is broken and counts it.

        Entries of types in `without` may be left out: a month has very many of some.
        """
        from perdure.service.controller.journal import read_journal

        return read_journal(self.paths, without)

    def entries(self) -> "Iterator[JournalEntry]":
        """Yield its journal; at its end, say what of it cannot be read."""
        reader = self.read()
        yield from self.complete(reader)
        say_damage(reader.tally)

    def read_curves(self) -> "Curves":
        """Return what `run.log` has told."""
        from perdure.service.curves import read_curves

        return read_curves(self.paths.curves)

    def complete(self, entries: "Iterable[JournalEntry]") -> "Iterator[JournalEntry]":
        """Yield entries of its journal behind its `JobSubmitted`, also where that is lost."""
        from perdure.model.events import JobSubmitted, JournalEntry

        rest = iter(entries)
        first = next(rest, None)
        if first is None or not isinstance(first.body, JobSubmitted):
            at_s = self.now() if first is None else first.at_s
            yield JournalEntry(seq=0, at_s=at_s, body=JobSubmitted(spec=self.spec, at_s=at_s))
        if first is not None:
            yield first
        yield from rest

    def read_newest(self) -> "Newest":
        """Return what the journal is told seldom, as it was when a controller looked last."""
        from perdure.model.events import Newest
        from perdure.service.jobfiles import read_document

        return read_document(self.paths.newest, Newest) or Newest()

    def now(self, last_s: float = 0.0) -> float:
        """Return job time: of this moment while it lives, else of its last event, `last_s`."""
        from perdure.service.jobfiles import load_endpoint

        if self.alive:
            return time.monotonic() + load_endpoint(self.paths).clock_offset_s
        return last_s

    def explain_vanishing(self, entries: "list[JournalEntry]") -> "Vanishing | None":
        """Return why a job that does not run has not ended; None where it has."""
        import socket

        from perdure.adapters.host import read_boot_id, read_kernel_kills
        from perdure.launch.ssh import box
        from perdure.service.jobfiles import load_parts
        from perdure.telemetry.outcome import HostFacts, explain_vanishing

        parts, place = load_parts(self.paths), os.environ.get("JOB_DIR")
        folder = os.path.join(place, "launch") if place else os.devnull  # Not on a box: no files.
        offset_s = time.time() - time.monotonic()
        began_s = parts.started_s - offset_s if parts else 0.0
        lines, readable = read_kernel_kills(began_s)
        facts = HostFacts(
            boot_id=read_boot_id(),
            kernel_log=lines,
            log_readable=readable,
            memory_kills=box.count_kills(folder),
            boot_id_before=(box.read(folder, "start.json") or {}).get("boot_id", ""),
            elsewhere=parts.host if parts and parts.host != socket.gethostname() else "",
            slurm=self._ask_slurm(parts.slurm) if parts and parts.slurm else None,
        )
        pids = [parts.run, parts.nats, parts.controller, *parts.agents.values()] if parts else []
        return explain_vanishing(entries, facts, (pid for pid in pids if pid))

    def _ask_slurm(self, allocation: "Allocation") -> "Outcome":
        from perdure.launch.slurm.client import Slurm
        from perdure.model.platforms.outcome import Outcome

        try:
            return Slurm().query_end(allocation)
        except PerdureError as error:
            return Outcome(state="unknown", reason=str(error))

    def list_attempts(self) -> "list[Outcome]":
        """Return how its attempts under Slurm ended, oldest first; none without accounting."""
        from perdure.service.jobfiles import load_parts

        parts = load_parts(self.paths)
        if parts and parts.slurm:
            from perdure.launch.slurm.client import Slurm

            with contextlib.suppress(PerdureError):
                return Slurm().list_attempts(parts.slurm.job)
        return []

    def judge_outcome(self, entries: "list[JournalEntry]") -> "JobOutcome":
        """Return whether it finished, died, stalled or runs, by what lies on the disk."""
        from perdure.adapters.rings import read_ring
        from perdure.service.jobfiles import load_endpoint
        from perdure.telemetry.outcome import Signs, judge_outcome

        root = Path(self.paths.root)
        streams = Path(self.spec.log_dir or root / "logs" / "ranks").glob("g*/rank-*")
        url = self.checkpoints
        checkpoints = [] if "://" in url else Path(url).glob("step-*")
        beats = []
        if self.alive:
            offset_s = load_endpoint(self.paths).clock_offset_s
            shift_s = time.time() - (time.monotonic() + offset_s)
            rings = Path(self.paths.ring(0, 0)).parent.glob("g*-r*.ring")
            readings = (read_ring(str(p), offset_s) for p in rings)
            beats = [r.heartbeat_s + shift_s for r in readings if r is not None and r.pid]
        signs = Signs(
            now_s=time.time(),
            alive=self.alive,
            outputs_s=read_newest_change_s(streams),
            checkpoints_s=read_newest_change_s(checkpoints),
            loops_s=max(beats, default=0.0),
        )
        return judge_outcome(entries, signs, self.spec.detect.hang_action_s or _STALLED_S)

    def snapshot(self, fold: "Callable[[], Snapshot] | None" = None) -> "Snapshot":
        """Return the newest picture; from the journal where no controller has written one.

        Whoever reads the journal anyway says by `fold` what it tells.
        """
        import msgspec

        from perdure.service.jobfiles import load_snapshot

        alive = self.alive
        snapshot = seen = load_snapshot(self.paths)
        told = snapshot is not None and (alive or snapshot.state in ENDED)
        if not told and fold is not None and os.path.exists(self.paths.journal):
            snapshot = fold()
        elif not told:
            from perdure.telemetry.live.snapshot import (
                SnapshotFold,  # All of telemetry, 30 modules.
            )

            moment, last_s = SnapshotFold(self.spec), 0.0
            for entry in self.entries() if os.path.exists(self.paths.endpoint) else ():
                moment.add(entry)
                last_s = entry.at_s
            moment.know_metrics(self.read_curves().list_newest())
            snapshot = moment.snapshot(last_s)
        assert snapshot is not None
        if not told and seen is not None and seen.generation == snapshot.generation:
            snapshot = recall_steps(snapshot, seen)
        if not alive and snapshot.state not in ENDED:
            return msgspec.structs.replace(snapshot, state=LOST, reason=LOST_REASON)
        silent_s = self.now() - snapshot.at_s if alive and snapshot.state not in ENDED else 0.0
        if snapshot.at_s > 0 and silent_s > _SILENT_S:
            reason = f"the controller has said nothing for {silent_s:.0f} s; this is how it was"
            return msgspec.structs.replace(snapshot, reason=reason, left_s=None)
        return snapshot


def recall_steps(folded: "Snapshot", seen: "Snapshot") -> "Snapshot":
    """Return a picture made of the journal with what only heartbeats told: how far ranks were.

    `seen` is the last picture that a controller has made, of the same generation.
    """
    import msgspec

    last = {row.rank: row for row in seen.ranks}
    ranks = tuple(
        last.get(row.rank, row) if row.state == "starting" else row for row in folded.ranks
    )
    return msgspec.structs.replace(folded, step=max(folded.step, seen.step), ranks=ranks)


def say_damage(tally: "Tally") -> dict[str, Any]:
    """Say what of a journal cannot be read; return it as it stands in a command's document."""
    import msgspec

    if tally.whole:
        return {}
    what = f"the journal is damaged: {tally.describe()}; this is made of the rest"
    note(f"{what} (docs/journal.md)")
    return {"journal": {"damage": tally.describe(), **msgspec.structs.asdict(tally)}}


class ElsewhereError(PerdureError):
    """The job runs on another machine: the command line belongs there, as it is."""

    def __init__(self, record: "LaunchRecord") -> None:
        """Keep where it was launched."""
        super().__init__(f"job `{record.job}` is on {record.profile.platform}")
        self.record = record


def _is_here(record: "LaunchRecord", home: str) -> bool:
    """Return whether the job's own state directory is this one: a command has arrived."""
    return not record.profile.launch.host and record.home == home


def read_newest_change_s(paths: Iterable[Path]) -> float:
    """Return when the newest of `paths` was changed; 0 for none."""
    newest = 0.0
    for path in paths:
        with contextlib.suppress(OSError):
            newest = max(newest, path.stat().st_mtime)
    return newest


def find_job(name: str) -> Job:
    """Return the job `name` of this machine.

    Raises:
        ConfigError: there is none; the hint names similar ones.
        ElsewhereError: it was launched to another machine, and not yet torn down.
    """
    from perdure.launch.records import read_remote

    home = resolve_home()
    record = read_remote(home, name)
    if record is not None and not record.torn_down_s and not _is_here(record, home):
        raise ElsewhereError(record)
    try:
        return find_here(name, home)
    except ConfigError as error:
        if record is None or not record.torn_down_s:
            raise
        results = f"; its results are in {record.pulled_to}" if record.pulled_to else ""
        raise ConfigError(f"job `{name}` was torn down{results}", hint=error.hint) from None


def find_launched(job: str, hint: str) -> "LaunchRecord":
    """Return what is remembered of a job that runs elsewhere.

    Raises:
        ConfigError: it is on this machine, or there is none; of the former, `hint` says more.
    """
    try:
        find_job(job)
    except ElsewhereError as elsewhere:
        return elsewhere.record
    raise ConfigError(f"job `{job}` is on this machine", hint=hint)


def find_here(name: str, home: str) -> Job:
    """Return the job `name` below `home`, whatever of that name was launched elsewhere.

    One whose own document is damaged is what its journal says that it was when it began.

    Raises:
        ConfigError: there is none; the hint names similar ones.
        PlatformError: its document is damaged, and the journal's beginning is lost as well.
    """
    from difflib import get_close_matches

    from perdure.service.jobfiles import load_spec

    paths = paths_of(home, name)
    try:
        return Job(name, home, paths, load_spec(paths, note))
    except ConfigError:
        names = list_jobs(home)
        near = get_close_matches(name, names, n=3) or names[-3:]
        hint = f"there is {', '.join(near)}" if near else f"there are no jobs under {home}"
        raise ConfigError(f"unknown job `{name}`", hint=hint) from None


def read_start_s(first: "JournalEntry") -> float:
    """Return when the job was begun, by the first entry of its journal: as `report` counts."""
    from perdure.model.events import JobSubmitted

    return first.body.at_s if isinstance(first.body, JobSubmitted) else first.at_s


def list_local_jobs(home: str = "") -> list[Job]:
    """Return all jobs below `home`, oldest first; say which of them cannot be read.

    An empty `home` is this user's.
    """
    home, found = home or resolve_home(), []
    for name in list_jobs(home):
        try:
            found.append(find_here(name, home))
        except (PerdureError, OSError) as error:
            note(f"{name}: {error}")
    return found


def name_running() -> str:
    """Return the names of the jobs that run on this machine, of many the newest."""
    home = resolve_home()
    running = [name for name in list_jobs(home) if is_alive(paths_of(home, name))]
    return ", ".join(running[-3:])


def list_jobs_elsewhere(home: str = "") -> "list[LaunchRecord]":
    """Return the jobs that were launched to other machines and not yet torn down.

    An empty `home` is this user's.
    """
    from perdure.launch.records import list_records

    home = home or resolve_home()
    found = list_records(home, note)
    records = [r for r in found if r.profile.kind != "local" and not r.torn_down_s]
    return [record for record in records if not _is_here(record, home)]


def send_command(
    job: Job,
    kind: "Verb | Literal['ping']",
    args: dict[str, Any],
    *,
    timeout_s: float,
) -> dict[str, Any]:
    """Ask the job's controller, again while it is being restarted; return its result.

    Raises:
        ConfigError: the job does not run.
        SafetyError: the controller refuses; the message has its reason.
        PlatformError: no answer in `timeout_s`.
    """
    from secrets import token_hex

    from perdure.model.bus.wire import Command
    from perdure.service.commands import ask_controller

    if not job.alive:
        state = job.snapshot().state
        raise ConfigError(
            f"job `{job.name}` does not run: {state}", hint=f"perdure report {job.name}"
        )
    command = Command(id=f"cli-{token_hex(6)}", kind=kind, args=args, who=_read_user())
    reply = ask_controller(job.name, job.paths, command, timeout_s=timeout_s)
    if not reply.ok:
        raise SafetyError(f"refused: {reply.reason}", hint=f"perdure status {job.name}")
    return {**reply.result, "reason": reply.reason} if reply.reason else dict(reply.result)


def _read_user() -> str:
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
