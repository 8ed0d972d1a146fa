"""A job as page and screen show it: as it is now, or at any past instant, from the journal.

Nobody is asked: what lies on the disk is read, in a process that is none of the job's. The journal
is folded as it grows; an instant of the past is made of its beginning again, or of what was folded
for an earlier one that was looked at before, and the last few are kept. Heartbeats are not
journaled, so a picture of the past has the ranks' steps as far as facts tell them.
"""

import gc
import os
import re
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from perdure.cli.jobs import ENDED, LOST, Job, read_start_s
from perdure.cli.looking.mirror import MirrorTail
from perdure.cli.looking.output import Stream, list_streams
from perdure.cli.looking.own import OwnLine
from perdure.cli.looking.story import AGREEMENTS, Story, StoryFold
from perdure.cli.page.runs import name_run
from perdure.dash.sections import LOG_LINES, LogLine, Picture
from perdure.files.rotation import list_parts_of, read_piece, read_pieces
from perdure.model.chain import Tally
from perdure.model.events import JournalEntry, Newest
from perdure.model.job import JobSpec
from perdure.model.report import Snapshot
from perdure.telemetry.live.snapshot import SnapshotFold

STORY_EVERY_S = 1.0
"""Between two stories of a job that lives; of a large one more, see `_STORY_SHARE`."""
_STORY_SHARE = 0.2
"""Of the time, at most so much goes into stories."""
_PAST_KEPT = 16
_LOG_PIECE, _LOG_SEARCHED = 1 << 20, 64 << 20
"""Bytes of a log that are read at once, and that a search goes back at most."""
_LINE_MAX = 4000


class JobReading:
    """One job's pictures. All calls may come from any thread; one at a time reads the journal."""

    def __init__(self, job: Job) -> None:
        """Begin with nothing read."""
        self.job = job
        self.run = name_run(job)
        self._lock = threading.Lock()
        self._own = OwnLine(job.spec)
        self._tail = MirrorTail(job.paths.journal, AGREEMENTS)
        self._begun = 0
        self._fold = StoryFold()
        self._moment: SnapshotFold | None = None
        self._story: Story | None = None
        self._told_s, self._cost_s = 0.0, 0.0
        self._over = False
        self._last: Picture | None = None
        self._past: OrderedDict[float, Picture] = OrderedDict()
        self._walk: _Walk | None = None
        """Where the last look back has come to: a later instant is gone on to from there."""
        self._lines: tuple[Any, list[LogLine]] | None = None
        """What of the log was asked for last, of files of which lengths, and what was found."""

    def is_of_now(self) -> bool:
        """Return whether the job of this name is still the one that was read."""
        return name_run(self.job) == self.run and os.path.isdir(self.job.paths.root)

    def look(self) -> Picture:
        """Return the job as it is now."""
        with self._lock, _collect_nothing():
            if self._last is not None and self._over and not self.job.alive:
                return self._show(self._last)
            begun_s = time.monotonic()
            snapshot = self.job.snapshot(self._fold_moment)
            over = snapshot.state in (*ENDED, LOST)
            pause_s = max(STORY_EVERY_S, self._cost_s / _STORY_SHARE)
            if self._story is None or self._over != over or begun_s - self._told_s > pause_s:
                self._tell()
                self._told_s = time.monotonic()
                self._cost_s = self._told_s - begun_s
            assert self._story is not None
            self._over = over
            return self._show(_make_picture(self._story, snapshot))

    def _show(self, picture: Picture) -> Picture:
        """Return a picture of now with the script's own checkpoints."""
        own = self._own.read()
        self._last = picture if picture.own == own else picture._replace(own=own)
        return self._last

    def _fold_moment(self) -> Snapshot:
        """Return the picture that the journal tells, where no controller has left the last one."""
        if self._moment is None:  # It is folded beside the story, in one reading.
            self._tail, self._begun = MirrorTail(self.job.paths.journal, AGREEMENTS), 0
            self._fold = StoryFold()
            self._moment = SnapshotFold(self.job.spec, beside=self._fold.series)
        self._read()
        self._moment.know_metrics(self.job.read_curves().list_newest())
        return self._moment.snapshot(self._fold.last_s)

    def _read(self) -> None:
        """Fold what the journal has grown by."""
        while entries := self._tail.poll_piece():
            if self._tail.begun != self._begun:
                self._begun, self._fold = self._tail.begun, StoryFold()
                if self._moment is not None:
                    self._moment = SnapshotFold(self.job.spec, beside=self._fold.series)
            if not self._fold.first_s:  # The journal's own beginning may be lost.
                entries = list(self.job.complete(entries))
            self._add(entries)
        if not self._fold.first_s:  # It is still to come.
            self._add(self.job.complete(()))

    def _add(self, entries: Iterable[JournalEntry]) -> None:
        for entry in entries:
            self._fold.add(entry)
            if self._moment is not None:
                self._moment.add(entry)

    def _tell(self) -> None:
        self._read()
        now = self.job.now(self._fold.last_s)
        newest, curves = self.job.read_newest(), self.job.read_curves()
        tally = Tally()
        tally.add(self._tail.tally)
        self._story = self._fold.tell(self.job, now, tally, newest, curves)

    def is_over(self) -> bool:
        """Return whether the job has ended, or its `perdure run` is gone."""
        last = self._last or self.look()
        return self._over or last.report.state in ENDED

    def look_back(self, at_s: float) -> Picture:
        """Return the job as it was `at_s` seconds after its start."""
        at_s = round(max(0.0, at_s), 2)
        if at_s > (now := self.look()).report.wall_s:
            return now  # It is still to come, or the job had ended by then.
        with self._lock:
            known = self._past.get(at_s)
        if known is not None:
            return known
        with self._lock:
            walk, self._walk = self._walk, None
        if walk is None or at_s < walk.at_s or (walk.is_at_end and not self._over):
            walk = _Walk(self.job)
        with _collect_nothing():
            picture = walk.look(at_s)
        with self._lock:
            self._past[at_s] = picture
            self._walk = walk
            while len(self._past) > _PAST_KEPT:
                self._past.popitem(last=False)
        return picture

    def read_log(self, rank: int | None, search: str) -> list[LogLine]:
        """Return the last lines that a rank, or any, has written; of those with `search` in them.

        They are of the newest generation, where nobody searches; of each replica group's own.
        """
        folder = self.job.spec.log_dir or os.path.join(self.job.paths.logs, "ranks")
        streams = [s for s in list_streams(folder) if rank is None or s.rank == rank]
        if not search:
            streams = _choose_newest(streams, self.job.spec)
        most = max(8, LOG_LINES // max(1, len(streams))) if rank is None else LOG_LINES
        room = _LOG_SEARCHED // max(1, len(streams)) if search else _LOG_PIECE // 4
        shown = streams[-64:]
        ends = {path: parts[-1].end for path, parts in list_parts_of(s.path for s in shown).items()}
        asked = (rank, search, tuple(ends.items()))
        with self._lock:
            known = self._lines
        if known is not None and known[0] == asked:
            return known[1]
        found: list[LogLine] = []
        begins = {path: max(0, end - room) for path, end in ends.items()}
        firsts = read_pieces(begins, min(room, _LOG_PIECE))
        for stream in shown:
            lines = _read_last(stream.path, most, search, firsts[stream.path], ends[stream.path])
            found += [LogLine(stream.generation, stream.rank, stream.name, t) for t in lines]
        found = found[-2 * LOG_LINES :]
        with self._lock:
            self._lines = (asked, found)
        return found


class _Walk:
    """A journal folded from its beginning, as far as the instant that was looked at last."""

    def __init__(self, job: Job) -> None:
        """Stand before the first entry."""
        self.at_s = -1.0
        self._job = job
        self._fold = StoryFold()
        self._moment = SnapshotFold(job.spec, beside=self._fold.series)
        self._reader = job.read(without=AGREEMENTS)
        self._rest = job.complete(self._reader)
        self._next = next(self._rest, None)
        self._start_s = read_start_s(self._next) if self._next is not None else 0.0

    def look(self, at_s: float) -> Picture:
        """Return the job `at_s` seconds after its start, not before the last such instant."""
        self.at_s, until_s = at_s, self._start_s + at_s
        first = not self._fold.first_s  # It is always taken.
        while self._next is not None and (first or self._next.at_s <= until_s):
            self._fold.add(self._next)
            self._moment.add(self._next)
            self._next, first = next(self._rest, None), False
        curves = self._job.read_curves().list_until(until_s)
        story = self._fold.tell(self._job, until_s, self._reader.tally, Newest(), curves)
        snapshot = self._moment.snapshot(until_s)
        metrics = dict(sorted((snapshot.metrics | curves.list_newest()).items()))
        return _make_picture(story, msgspec.structs.replace(snapshot, metrics=metrics))

    @property
    def is_at_end(self) -> bool:
        """Return whether all was read that there was: of a job that runs there is more by now."""
        return self._next is None


@contextmanager
def _collect_nothing() -> Iterator[None]:
    """Keep the collector of cycles from looking through what is folded, again and again.

    There are none in it, and at 10,000 ranks its looks are a fifth of the time.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _choose_newest(streams: list[Stream], spec: JobSpec) -> list[Stream]:
    """Return the streams of the newest generation: each replica group has one of its own."""
    group = {s.rank: s.rank // spec.nproc if spec.groups else 0 for s in streams}
    newest: dict[int, int] = {}
    for s in streams:
        newest[group[s.rank]] = max(s.generation, newest.get(group[s.rank], -1))
    return [s for s in streams if s.generation == newest[group[s.rank]]]


def _make_picture(story: Story, snapshot: Snapshot) -> Picture:
    # The journal's last word on the state is a turn of the controller older than the snapshot's.
    report = msgspec.structs.replace(story.report, state=snapshot.state)
    damage = story.tally.describe()
    return Picture(report, snapshot, story.series, story.matrix, damage)


def _read_last(path: str, most: int, search: str, first: tuple[int, bytes], end: int) -> list[str]:
    """Return at most `most` last lines of a file up to `end`, from its piece `first` on."""
    wanted = re.compile(re.escape(search), re.IGNORECASE) if search else None
    kept: deque[str] = deque(maxlen=most)
    begin, data = first
    at, rest = begin, b""
    while data:
        at = begin + len(data)
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            text = line[:_LINE_MAX].decode(errors="replace")
            if wanted is None or wanted.search(text):
                kept.append(text)
        rest = rest[-_LINE_MAX:]
        if at >= end:
            break
        begin, data = read_piece(path, at, min(_LOG_PIECE, end - at))
    if rest and (wanted is None or wanted.search(rest.decode(errors="replace"))):
        kept.append(rest.decode(errors="replace"))
    return list(kept)
