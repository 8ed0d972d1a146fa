"""What a job on other machines tells of itself, by a connection to where its controller is.

Its status is followed as `perdure watch --json` prints it there, over as many connections as it
takes. Job time and this machine's clock are brought together by what is printed there and read
here: it is later here than there, by the least delay that was seen.
"""

import contextlib
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from perdure.launch.channel import Channel, Done
from perdure.launch.exchange import UnreachedError, last_line
from perdure.launch.platforms import Here
from perdure.launch.ssh.ask import Carry, follow
from perdure.model.chain import EntryReader
from perdure.model.codec import decode
from perdure.model.errors import PerdureError, PlatformError, ProtocolError
from perdure.model.events import JournalEntry
from perdure.model.job import JobSpec
from perdure.model.platforms.launching import LaunchRecord
from perdure.model.report import Snapshot
from perdure.service.jobfiles import MINE
from perdure_lab.live.fleets.fleet import Fleet

T = TypeVar("T")
R = TypeVar("R")
_ENDED = ("done", "failed", "stopped", "lost")
_CLOCK = (
    "import sys, time; from perdure.service.jobfiles import load_endpoint; "
    "from perdure.service.jobfolders import paths_of, resolve_home; "
    "offset_s = load_endpoint(paths_of(resolve_home(), sys.argv[1])).clock_offset_s\n"
    "for _ in range(5): print(time.monotonic() + offset_s, flush=True); time.sleep(0.05)"
)
_FIRST_S = 60.0
"""For so long a job may have no status yet."""
_STOP_S = 120.0


class JobElsewhere:
    """One job, as its own machine tells of it."""

    def __init__(
        self,
        record: LaunchRecord,
        channel: Channel,
        carry: Carry,
        place: Callable[[str], str] = lambda script: script,
    ) -> None:
        """Ask nothing yet.

        `carry` runs a command of perdure's beside the job; `place` has a script run on the job's
        own machine, where the channel leads to another one.
        """
        self.record, self._channel, self._carry = record, channel, carry
        self._place = place
        self.newest: Snapshot | None = None
        self._lags: list[float] = []
        """Job time less the clock here, as read here: too little by a delay each time."""
        self._ended = threading.Event()
        self.lost = ""
        """Why nothing more is heard of it, where that is so."""
        self._follower: threading.Thread | None = None
        self.asking_s = 0.0
        """What a command beside the job takes."""

    def begin(self) -> None:
        """Follow the job from now on.

        Raises:
            PlatformError: it does not tell what time it is there, or has no status.
        """
        home, python = shlex.quote(self.record.home), shlex.quote(self.record.python)
        script = f"PERDURE_HOME={home} {python} -P -c {shlex.quote(_CLOCK)} {self.record.job}"
        began_s = time.monotonic()
        code = self._channel.stream(self._place(script), self._hear_clock, silence_s=_FIRST_S)
        self.asking_s = time.monotonic() - began_s
        if code or not self._lags:
            raise PlatformError(
                f"{self._channel.name} does not say what time it is there",
                hint=f"perdure status {self.record.job}",
            )
        self._follower = threading.Thread(target=self._follow, name="perdure-drive", daemon=True)
        self._follower.start()

    def _hear_clock(self, line: str) -> None:
        now_s = time.monotonic()
        with contextlib.suppress(ValueError):
            self._lags.append(float(line) - now_s)

    def _follow(self) -> None:
        argv = ["watch", self.record.job, "--json"]
        try:
            follow(self._channel, self.record, argv, self._carry, _Heard(self._hear))
        except PerdureError as error:
            self.lost = error.message
        self._ended.set()

    def _hear(self, line: str) -> None:
        with contextlib.suppress(ProtocolError):
            self.newest = decode(line, Snapshot)  # Also where a loss is not finite.
            self._lags = [max(*self._lags, self.newest.at_s - time.monotonic())]

    def compute_offset_s(self) -> float:
        """Return job time less CLOCK_MONOTONIC of this machine."""
        return max(self._lags, default=0.0)

    def over(self) -> bool:
        """Return whether the job has ended, or nothing more is heard of it."""
        now = self.newest
        return self._ended.is_set() or (now is not None and now.state in _ENDED)

    def run(self, argv: Sequence[str], timeout_s: float = 60.0) -> Done:
        """Run a command of perdure's beside the job, once.

        Raises:
            UnreachedError: it cannot be reached.
        """
        return self._channel.run(self._carry(self.record, argv), timeout_s=timeout_s)

    def notify(self, node: int, notice_s: float) -> None:
        """Announce that a node goes away: by what the announcement itself takes sooner.

        Raises:
            PlatformError: the job was not told.
        """
        grace_s = max(0.1, notice_s - self.asking_s)
        argv = ["node", "notify", self.record.job, "preemption", "--node", str(node), "--grace",
                f"{grace_s:.3f}", "--source", "trace"]  # fmt: skip
        done = self.run(argv)
        if done.code:
            raise PlatformError(f"node {node} was not told: {last_line(done.err)}")

    def read_entries(self, channel: Channel | None = None) -> list[JournalEntry]:
        """Return the job's journal, over another channel where one is given.

        Raises:
            PlatformError: it cannot be read.
        """
        channel = channel or self._channel
        lines: list[bytes] = []
        path = shlex.quote(f"{self.record.home}/jobs/{self.record.job}/journal.jsonl")
        code = channel.stream(
            f"cat {path}", lambda line: lines.append(line.encode()), silence_s=_FIRST_S
        )
        if code != 0:
            raise PlatformError(
                f"{self._channel.name}: the journal of {self.record.job} is cut off"
            )
        return list(EntryReader(lines, mine=MINE))

    def stop(self, is_over: Callable[[], bool]) -> None:
        """Have the job stop at an agreed step; at once where it comes to none, or on Ctrl-C."""
        for words in ((), ("--now",)):
            with contextlib.suppress(KeyboardInterrupt):
                if wait(is_over, 0.0):
                    return
                with contextlib.suppress(UnreachedError):
                    self.run(["stop", self.record.job, *words], timeout_s=_STOP_S)
                if wait(is_over, _STOP_S):
                    return


class FleetElsewhere(Fleet):
    """What a fleet elsewhere answers in its job's words: all of a `Fleet` that is not of its place.

    Before the job is followed, nothing is known of it.
    """

    def __init__(self, spec: JobSpec, here: Here, record: LaunchRecord | None = None) -> None:
        """Know no job yet; `record` says where it runs, if it does."""
        self.spec, self._here, self._record = spec, here, record
        self._job: JobElsewhere | None = None
        self._troubles: list[PerdureError] = []
        """What could not be given back."""

    def _of(self) -> LaunchRecord:
        assert self._record is not None
        return self._record

    def find_trouble(self) -> PerdureError | None:
        """Return why a node could not be given back, or the job is not heard any more."""
        lost = self._job.lost if self._job else ""
        return next(iter(self._troubles), PlatformError(lost) if lost else None)

    def read_snapshot(self) -> Snapshot | None:
        """Return the newest status that has come."""
        return self._job.newest if self._job else None

    def compute_offset_s(self) -> float:
        """Return job time less CLOCK_MONOTONIC here."""
        return self._job.compute_offset_s() if self._job else 0.0

    def read_entries(self) -> list[JournalEntry]:
        """Return the job's journal.

        Raises:
            PlatformError: it cannot be read.
        """
        return self._job.read_entries() if self._job else []

    def over(self) -> bool:
        """Return whether the job has ended, or is not heard any more."""
        return self._job is not None and self._job.over()


def wait(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Return whether a condition comes about in time; no answer is none."""
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(PlatformError):
            if condition():
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)


class _Heard:
    """Lines of a stream that is followed; each connection tells the newest."""

    def __init__(self, hear: Callable[[str], None]) -> None:
        self.shown, self._hear = 0, hear

    def begin(self) -> None:
        """Begin with another connection."""

    def __call__(self, line: str) -> None:
        self.shown += 1
        self._hear(line)


def run_aside(act: Callable[[], object], failed: Callable[[PerdureError], object]) -> None:
    """Do what the trace does not wait for; `failed` is told where it cannot be done."""

    def do() -> None:
        try:
            act()
        except PerdureError as error:
            failed(error)

    threading.Thread(target=do, name="perdure-aside", daemon=True).start()


def at_once(act: Callable[[T], R], each: Sequence[T]) -> list[R]:
    """Return what `act` returns of each, done side by side."""
    with ThreadPoolExecutor(max(1, len(each))) as pool:
        return list(pool.map(act, each))
