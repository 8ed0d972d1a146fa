"""The loop of `perdure queue run`: what became of the attempts, what is started next.

It may be killed at any instant. `Started` is on disk before a holder is spawned; a runner that
finds an attempt without a claim spawns a holder for the same number, and if the first one should
yet come to life, the claim lets only one of the two go on.
"""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial

from perdure.adapters.devices import Nvml
from perdure.adapters.host import send_signal
from perdure.control.queue import (
    Book,
    QueueEntry,
    Start,
    compute_ready_s,
    decide,
    list_oversized,
    next_deadline,
)
from perdure.failpoints import failpoint
from perdure.files import is_locked
from perdure.model.errors import PlatformError
from perdure.model.queue import Attempt, Claim, Ended, Ending, Found, Started
from perdure.service.jobfiles import keep_trying, write_document
from perdure.service.queue.holder import CPU_SLOT, locate_locks
from perdure.service.queue.store import (
    ATTEMPT,
    CLAIM,
    ENDING,
    OUTPUT,
    QueueStore,
    RunnerLock,
    create_once,
    find_carrier,
    has_proof,
    look_at_attempt,
)

POLL_S = 0.2
CLAIM_S = 30.0
"""A holder that has made no claim after so long is spawned again."""
SPAWNS_MAX = 3
_BUSY_S = 5.0
"""How often GPUs are looked at for foreign holders."""


class Runner:
    """One `perdure queue run`."""

    def __init__(
        self,
        store: QueueStore,
        slots: tuple[str, ...],
        say: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Run `store` on `slots`: ids of GPUs, or `cpu-0`, `cpu-1`, ..."""
        self._store, self._slots, self._say, self._clock = store, slots, say, clock
        self._spawned: dict[tuple[str, int], tuple[float, int]] = {}
        self._stopped: set[tuple[str, int]] = set()
        self._holders: list[subprocess.Popen[bytes]] = []
        self._busy: tuple[str, ...] = ()
        self._busy_s = float("-inf")
        self._leave = False

    def run(self, *, keep: bool = False) -> Book:
        """Run until nothing is left to run (with `keep`: until a signal); return the book.

        Raises:
            ConfigError: the queue is being run already.
            PlatformError: its directory cannot be written.
        """
        lock = RunnerLock(self._store)
        before = {n: signal.signal(n, self._ask_leave) for n in (signal.SIGINT, signal.SIGTERM)}
        step: Callable[[], Book] = self.step
        """At first what cannot be written is told; then attempts run, and wait for nobody."""
        try:
            while not self._leave:
                book = step()
                step = partial(keep_trying, self.step, self._say, lambda: not self._leave)
                oversized = list_oversized(book, self._slots)
                if not keep and all(line in oversized for line in book.unfinished()):
                    break
                self._rest(book)
            left = self._store.book.running()
            if left:
                self._say(f"{len(left)} go on; `perdure queue run` takes them up again")
            return self._store.book
        finally:
            for holder in self._holders:
                if holder.poll() is None:
                    holder.returncode = 0  # It outlives us: nobody waits for it here.
            for number, handler in before.items():
                signal.signal(number, handler)
            lock.release()

    def step(self) -> Book:
        """Look once at everything, and start what can be started; return the book."""
        for holder in list(self._holders):
            if holder.poll() is not None:
                self._holders.remove(holder)
        book = self._store.read()
        endings = [(line, self._follow(line)) for line in book.running()]
        ended = [(line, ending) for line, ending in endings if ending is not None]
        now = self._clock()
        looked = [
            book.lines[s.name] for s in decide(book, now, self._slots, self._list_busy_slots())
        ]
        found = [line for line in looked if not line.again and has_proof(self._store, line.item)]
        if not ended and not looked:
            return book
        with self._store.writing() as writer:
            for line, ending in ended:
                self._settle(writer.append, line, ending)
            writer.append(*(Found(now, line.item.name) for line in found))
            for line in found:
                self._say(f"{line.item.name}: done, {line.reason}")
            names = {line.item.name for line in looked}
            ready = decide(writer.book, now, self._slots, self._busy)
            starts = [start for start in ready if start.name in names]
            writer.append(*(Started(now, s.name, s.attempt, s.slots) for s in starts))
        for start in starts:
            self._spawn(start)
        return self._store.book

    def _settle(self, append: Callable[..., None], line: QueueEntry, ending: Ending) -> None:
        name, attempt, began_s = line.item.name, line.attempts, line.started_s
        append(Ended(name, attempt, ending))
        self._spawned.pop((name, attempt), None)
        after = self._store.book.lines.get(name)
        state = "removed" if after is None else after.state
        again = ""
        if after is not None and state == "waiting":
            again = f"; again in {max(0.0, compute_ready_s(after) - self._clock()):.0f} s"
        took_s = max(0.0, ending.at_s - began_s)
        self._say(f"{name}: {state}, {ending.cause} after {took_s:.0f} s{again}")

    def _follow(self, line: QueueEntry) -> Ending | None:
        """Return how the running attempt of an item ended; None while it goes on."""
        key = (line.item.name, line.attempts)
        found = look_at_attempt(self._store, line.item, line.attempts)
        if isinstance(found, Ending):
            return found
        if isinstance(found, Claim):
            if line.removed and key not in self._stopped:
                self._stopped.add(key)
                # The holder ends the command; where that is gone it is told itself. Neither may
                # be there any more, and 0 would be this process with its whole group.
                if carrier := find_carrier(found):
                    send_signal(carrier, signal.SIGTERM)
            return None
        at_s, times = self._spawned.get(key, (float("-inf"), 0))
        if time.monotonic() - at_s < CLAIM_S:
            return None
        if times < SPAWNS_MAX:
            self._spawn(Start(*key, line.slots))
            return None
        ending = Ending(at_s=self._clock(), reason=f"no holder came up in {times} trials")
        # A holder that comes up yet finds this in its way: the attempt is over.
        return ending if self._close(key, ending) else None

    def _close(self, key: tuple[str, int], ending: Ending) -> bool:
        folder = self._store.attempt(*key)
        nobody = Claim(boot_id="", holder=0, holder_start=0)
        return create_once(folder / CLAIM, nobody) and create_once(folder / ENDING, ending)

    def _spawn(self, start: Start) -> None:
        """Spawn a holder of an attempt, in a session of its own."""
        line = self._store.book.lines[start.name]
        folder = self._store.attempt(start.name, start.attempt)
        given = Attempt(
            item=line.item, attempt=start.attempt, slots=start.slots, home=self._store.home
        )
        try:
            failpoint("queue/spawn", start.name)
            folder.mkdir(parents=True, exist_ok=True)
            write_document(str(folder / ATTEMPT), given)
            with open(folder / OUTPUT, "ab") as output:
                holder = subprocess.Popen(
                    [sys.executable, "-P", "-m", "perdure.service.queue.holder", str(folder)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        except OSError as error:
            raise PlatformError(
                f"cannot start {start.name}: {error}", hint=f"look at {folder}"
            ) from error
        self._holders.append(holder)
        _, times = self._spawned.get((start.name, start.attempt), (0.0, 0))
        self._spawned[start.name, start.attempt] = (time.monotonic(), times + 1)
        where = ", ".join(start.slots)
        self._say(f"{start.name}: attempt {start.attempt} on {where or 'no slot'}")

    def _list_busy_slots(self) -> tuple[str, ...]:
        now = time.monotonic()
        if now - self._busy_s >= _BUSY_S:
            self._busy_s = now
            busy = tuple(list_busy_slots(self._slots))
            ours = {slot for line in self._store.book.running() for slot in line.slots}
            fresh = set(busy) - set(self._busy) - ours
            if fresh:
                self._say(f"held by others: {', '.join(sorted(fresh))}")
            self._busy = busy
        return self._busy

    def _rest(self, book: Book) -> None:
        now = self._clock()
        due = next_deadline(book, now)
        time.sleep(POLL_S if due is None else max(0.01, min(POLL_S, due - now)))

    def _ask_leave(self, number: int, frame: object) -> None:
        self._leave = True


def list_busy_slots(slots: Iterable[str]) -> list[str]:
    """Return the GPUs that somebody uses: a lock is held, or NVML shows a process on it."""
    gpus = [slot for slot in slots if not slot.startswith(CPU_SLOT)]
    if not gpus:
        return []
    nvml = Nvml.open()
    used = nvml.list_used() if nvml is not None else frozenset()
    if nvml is not None:
        nvml.close()
    return [gpu for gpu in gpus if gpu in used or is_locked(locate_locks() / f"{gpu}.lock")]
