"""A job told to an experiment tracker: what its journal says once, how it does from time to time.

The files that every command reads are followed, and nobody of the job is asked, so that a tracker
can be as slow as it likes: the journal is the queue. What was told last is written down beside the
job, for TensorBoard in the folder itself, after the tracker has taken it. So a mark is told at
least once; again only where this process dies in the moment between the two, and its number says
so. Samples of goodput are of their moment, and none is made up for later.
"""

import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import IO

import msgspec

from perdure.adapters.trackers import Place, Row, Tracker, make_key, name_folder, open_tracker
from perdure.cli.jobs import Job
from perdure.cli.looking.mirror import MirrorTail
from perdure.cli.looking.story import AGREEMENTS
from perdure.model.errors import PlatformError
from perdure.model.events import JournalEntry
from perdure.model.report import Snapshot
from perdure.service.jobfiles import read_document, write_document
from perdure.telemetry.accounting.ledger import LedgerFold
from perdure.telemetry.curves import Bucket
from perdure.telemetry.marks import Mark, MarkFold

_LOOK_S = 0.5
"""Between two looks at the journal."""
_SETTLED_S = 1.0
"""Values of `run.log` are told once nothing more is written of their moment."""
_SHARE = 0.05
"""Of the time, at most so much goes into samples: a long job's ledger takes a while."""
_SAMPLES = 10_000
"""A sample is taken once in so large a part of the job's time, so that a month has some 50,000."""
_LOCK_S = 10.0
"""Given to the process of a controller that has died to leave."""
_AT_ONCE = 10_000
"""Entries that are read before what they say is told."""
_VALUES = 2000
"""Of `run.log`, told at once: so much a tracker has `timeout_s` for, and it is not told again."""
_RING_S = 1.0
"""Between two alarms: a library may hold the first for an error of its own, and go on."""
_OVER = ("exited", "failed")
_LOST = ("lost_work", "startup", "idle", "unattributed")


class _Told(msgspec.Struct, frozen=True):
    """What a tracker has taken."""

    job: str
    """Which run of which job."""
    seq: int = 0
    marks: int = 0
    logged_s: float = 0.0
    """Job time of the newest value of `run.log`."""
    run: str = ""
    times: int = 0
    """How often the tracker was opened."""


class JobTracking:
    """One job on its way to one tracker; `run` tells all there is, or follows to the end."""

    def __init__(self, job: Job, kind: str, target: str, *, run_log: bool) -> None:
        """Begin with nothing open."""
        self._job, self._kind, self._target, self._run_log = job, kind, target, run_log
        self._config = job.spec.tracking
        self._begin()
        self._tracker: Tracker | None = None
        self._told = _Told("")
        self._sample_s = 0.0
        self.left = False
        """It was asked to leave, and has not told all."""
        self.rows = self.marks = 0
        """Told by this process."""

    def _begin(self) -> None:
        self._ledger = LedgerFold()
        self._marks = MarkFold(self._job.name, self._ledger)
        self._seq = 0
        self._caught_up = False

    @property
    def run(self) -> str:
        """Return the tracker's id of the run, or its folder."""
        return self._tracker.run if self._tracker is not None else ""

    def follow(self, pause: Callable[[float], object] = time.sleep) -> None:
        """Tell until the job has ended, or SIGTERM; what is written already too.

        Raises:
            PlatformError: the tracker takes no more, or another process tells it of this job.
        """
        tail, begun = MirrorTail(self._job.paths.journal, AGREEMENTS), 0
        old = signal.signal(signal.SIGTERM, self._ask_to_leave)
        try:
            with self._locked(_LOCK_S):
                while not self.left:
                    alive = self._job.alive
                    while entries := tail.poll_piece():
                        if tail.begun != begun:
                            begun = tail.begun
                            self._begin()
                        self._take(self._complete(entries))
                    if not alive or self._ledger.history.ended is not None:
                        break
                    self._sample(over=False)
                    pause(_LOOK_S)
                self._end()
        finally:
            signal.signal(signal.SIGTERM, old)

    def tell(self) -> None:
        """Tell what there is to tell of a job as it is now.

        Raises:
            PlatformError: the tracker does not take it, or another process tells it of this job.
        """
        with self._locked():
            entries = self._job.complete(self._job.read(without=AGREEMENTS))
            while piece := list(islice(entries, _AT_ONCE)):
                self._take(piece)
            self._end()

    def _ask_to_leave(self, number: int, frame: object) -> None:
        self.left = True

    def _complete(self, entries: list[JournalEntry]) -> Iterable[JournalEntry]:
        """Return entries behind the job's beginning, also where that is lost."""
        return entries if self._ledger.history.spec else self._job.complete(entries)

    # --- what is told -------------------------------------------------------------------------

    def _take(self, entries: Iterable[JournalEntry]) -> None:
        """Take the next entries, and tell the marks among them that were not told yet."""
        found: list[Mark] = []
        for entry in entries:
            self._open(entry)
            if not self._caught_up and entry.seq > self._told.seq:
                self._marks.list_over(self._seq)  # They were told.
                self._caught_up = True
            self._ledger.add(entry)
            mark = self._marks.add(entry)
            if mark is not None and self._caught_up:
                found.append(mark)
            self._seq = max(self._seq, entry.seq)
        over = self._marks.list_over(self._seq)
        if self._caught_up:
            self._put([], [*found, *over])

    def _sample(self, *, over: bool) -> None:
        """Tell how the job does, if it is time to."""
        begun_s = time.monotonic()
        if self._ledger.history.spec is None or (begun_s < self._sample_s and not over):
            return
        picture, now = self._job.snapshot(), self._job.now(self._ledger.history.last_s)
        if picture.step >= 0:
            self._marks.step = picture.step
        self._ledger.take_newest(self._job.read_newest().progress)
        sample = self._make_sample(picture, now)
        logged = self._list_logged(float("inf") if over else now) if self._run_log else {}
        for piece in cut_logged(logged, _VALUES):
            if self.left:
                return
            rows = collect_rows(piece)
            self._put(rows, [], max(bucket.at_s for values in piece.values() for bucket in values))
            self.rows += len(rows)
        self._put([sample], [])
        took_s, age_s = time.monotonic() - begun_s, now - self._ledger.history.start_s
        pause_s = max(self._config.every_s, took_s / _SHARE, age_s / _SAMPLES)
        self._sample_s = time.monotonic() + pause_s

    def _make_sample(self, picture: Snapshot, now: float) -> Row:
        report = self._ledger.report(now)
        lost = [a.fraction for name, a in report.ledger.items() if name.startswith("reconf")]
        lost += [report.ledger[name].fraction for name in _LOST]
        values = {
            "perdure/goodput": report.goodput,
            "perdure/lost_share": sum(lost),
            "perdure/ranks_alive": float(sum(row.state not in _OVER for row in picture.ranks)),
            "perdure/steps_per_second": picture.steps_per_s,
            "perdure/incidents": float(report.incidents),
            "perdure/restarts": float(picture.restarts),
        }
        return picture.step, values, now

    def _list_logged(self, now: float) -> dict[str, list[Bucket]]:
        """Return the values of `run.log` that were not told yet."""
        since_s, until_s = self._told.logged_s, now - _SETTLED_S
        return {
            name: [bucket for bucket in buckets if since_s < bucket.at_s <= until_s]
            for name, buckets in self._job.read_curves().list_buckets().items()
        }

    def _put(self, rows: list[Row], marks: list[Mark], logged_s: float = 0.0) -> None:
        """Tell, and write down what was told."""
        assert self._tracker is not None, "it was opened with the first entry"
        told = self._told
        numbered = list(enumerate(marks, told.marks + 1))
        if rows or marks:
            with _alarm(self._config.timeout_s, self._kind):
                self._tracker.put(rows, numbered)
        self.marks += len(marks)
        self._told = msgspec.structs.replace(
            told,
            seq=max(told.seq, self._seq),
            marks=told.marks + len(marks),
            logged_s=max(told.logged_s, logged_s),
            run=self._tracker.run,
        )
        if self._told != told:
            write_document(self._path, self._told)

    def _end(self) -> None:
        ended = self._ledger.history.ended
        if self._tracker is None:
            return
        if not self.left:
            self._sample(over=True)
        with _alarm(self._config.timeout_s, self._kind):
            self._tracker.close(ended.status if ended is not None else "")

    # --- whom it is told ----------------------------------------------------------------------

    @property
    def _path(self) -> str:
        """Return where what was told is written down."""
        if self._kind == "tensorboard":  # Whoever removes the folder wants all of it again.
            return os.path.join(name_folder(self._target, self._job.name), "perdure.json")
        name = f"{self._kind}-{make_key(self._target, 0.0)}.json"
        return os.path.join(self._job.paths.tracking, name)

    @contextmanager
    def _locked(self, wait_s: float = 0.0) -> Iterator[None]:
        """Be the only process that tells this tracker of this job; the one before may leave yet.

        Raises:
            PlatformError: another one does, or the file cannot be written.
        """
        try:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            lock: IO[str] = open(f"{self._path}.lock", "w")  # noqa: SIM115
        except OSError as error:
            what = f"cannot write {error.filename}: {error.strerror}"
            raise PlatformError(what, hint="another folder") from error
        with lock:
            deadline_s = time.monotonic() + wait_s
            while not _take_lock(lock):
                if self.left or time.monotonic() >= deadline_s:
                    raise PlatformError(
                        f"another process tells {self._kind} of this job already",
                        hint="[tracking] of its job file does so while it runs",
                    )
                time.sleep(_LOOK_S)
            yield

    def _open(self, first: JournalEntry) -> None:
        """Have the tracker open, with what it was told of this run of the job.

        Raises:
            PlatformError: it does not open, or this is another run of the job meanwhile.
        """
        if self._ledger.history.spec is not None:
            return
        key = make_key(self._job.name, first.at_s)
        if self._tracker is not None:
            if key != self._told.job:
                hint = "what it does from now on is told by its own [tracking]"
                raise PlatformError(f"{self._job.name} has begun again", hint=hint)
            return
        known = read_document(self._path, _Told)
        self._told = known if known is not None and known.job == key else _Told(key)
        environ = {**os.environ, **self._job.spec.env}
        told, folder = self._told, self._job.paths.tracking
        place = Place(self._target, self._job.name, key, folder, environ, told.run, told.times)
        with _alarm(self._config.timeout_s, self._kind):
            self._tracker = open_tracker(self._kind, place)
        self._told = msgspec.structs.replace(told, run=self._tracker.run, times=told.times + 1)
        write_document(self._path, self._told)


def _take_lock(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextmanager
def _alarm(timeout_s: float, kind: str) -> Iterator[None]:
    """Leave what takes longer, and again whoever holds out against it.

    Raises:
        PlatformError: it has.
    """

    def ring(number: int, frame: object) -> None:
        raise PlatformError(f"{kind} took nothing for {timeout_s:g} s", hint="is it reached?")

    old = signal.signal(signal.SIGALRM, ring)
    timer = signal.setitimer(signal.ITIMER_REAL, timeout_s, _RING_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, old)
        signal.setitimer(signal.ITIMER_REAL, *timer)  # Whose it was before.


def cut_logged(logged: dict[str, list[Bucket]], size: int) -> Iterator[dict[str, list[Bucket]]]:
    """Yield what was logged in the order of time, some `size` values at once; a moment is not cut.

    >>> a, b = (Bucket(1, 1, at_s, 1, 0, 0, 0, 0) for at_s in (5, 6))
    >>> [sorted(piece) for piece in cut_logged({"x": [a, b], "y": [a]}, 1)]
    [['x', 'y'], ['x']]
    """
    values = [(bucket.at_s, name, bucket) for name, kept in logged.items() for bucket in kept]
    values.sort(key=lambda value: value[0])
    begin = 0
    while begin < len(values):
        last_s = values[min(begin + size, len(values)) - 1][0]
        piece: dict[str, list[Bucket]] = {}
        for at_s, name, bucket in islice(values, begin, None):
            if at_s > last_s:
                break
            piece.setdefault(name, []).append(bucket)
            begin += 1
        yield piece


def collect_rows(logged: dict[str, list[Bucket]]) -> list[Row]:
    """Return what was logged by step: the newest singly, of older steps the means of some."""
    rows: dict[int, Row] = {}
    for name, buckets in logged.items():
        for bucket in buckets:
            step = int(bucket.step)
            values, at_s = rows[step][1:] if step in rows else ({}, bucket.at_s)
            rows[step] = (step, values | {name: bucket.mean}, at_s)
    return [rows[step] for step in sorted(rows)]
