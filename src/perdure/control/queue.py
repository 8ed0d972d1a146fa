"""What a queue does next, from its records and the time; nothing here starts anything.

The records are the truth. `Book` folds them; `decide` says which attempts to start now, and
`explain` why an item does not run. An attempt is in the records before it is started, and its
number is never used again, so that a runner that died at any instant leaves one question only:
what became of the attempts that have not ended.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, assert_never

from perdure.model.queue import Again, Ended, Ending, Found, Item, Put, Record, Removed, Started

BACKOFF_S_MAX = 3600.0
State = Literal["waiting", "running", "done", "failed"]


@dataclass(slots=True)
class QueueEntry:
    """One item, and what became of it."""

    item: Item
    order: int
    state: State = "waiting"
    attempts: int = 0
    """Attempts ever started; the newest one's number."""
    failures: int = 0
    """Of attempts since a person last asked for it."""
    slots: tuple[str, ...] = ()
    """Held by the attempt that runs."""
    started_s: float = 0.0
    ending: Ending | None = None
    reason: str = ""
    again: bool = False
    """A person asked for it: files of an earlier attempt prove nothing."""
    removed: bool = False
    """Taken out while an attempt runs: gone once that has ended."""


@dataclass(frozen=True, slots=True)
class Start:
    """An attempt to start now."""

    name: str
    attempt: int
    slots: tuple[str, ...]


@dataclass(slots=True)
class Book:
    """A queue, folded from its records."""

    lines: dict[str, QueueEntry] = field(default_factory=dict)
    added: int = 0

    @classmethod
    def read(cls, records: Iterable[Record]) -> "Book":
        """Return the book of `records`."""
        book = cls()
        for record in records:
            book.add(record)
        return book

    def add(self, record: Record) -> None:
        """Fold one record; what does not fit the item's state changes nothing."""
        name = record.item.name if isinstance(record, Put) else record.name
        line = self.lines.get(name)
        match record:
            case Put(item=item) if line is None:
                self.added += 1
                self.lines[name] = QueueEntry(item, self.added)
            case _ if line is None:
                pass
            case Put(item=item):
                line.item = item if line.state != "running" else line.item
            case Removed():
                if line.state == "running":
                    line.removed = True
                else:
                    del self.lines[name]
            case Again():
                if line.state != "running":
                    line.state, line.failures, line.ending = "waiting", 0, None
                    line.again, line.reason = True, "asked for again"
            case Started(attempt=attempt, slots=slots, at_s=at_s):
                if attempt > line.attempts:
                    line.state, line.attempts, line.slots = "running", attempt, slots
                    line.started_s, line.reason, line.again = at_s, "", False
            case Ended(attempt=attempt, ending=ending):
                if line.state == "running" and attempt == line.attempts:
                    self._end(line, ending)
            case Found():
                if line.state == "waiting":
                    line.state, line.reason = "done", "its files are there"
            case _ as unreachable:
                assert_never(unreachable)

    def _end(self, line: QueueEntry, ending: Ending) -> None:
        line.slots, line.ending = (), ending
        if line.removed:
            del self.lines[line.item.name]
        elif ending.ok:
            line.state, line.reason = "done", ending.cause
        else:
            line.failures += 1
            final = ending.code in line.item.no_retry and not ending.signal
            line.state = "failed" if final or line.failures > line.item.retries else "waiting"
            why = (
                ": another attempt would end the same way"
                if final
                else f", attempt {line.attempts}"
            )
            line.reason = f"{ending.cause}{why}"

    def running(self) -> list[QueueEntry]:
        """Return the items that run, in the order in which they were added."""
        return [line for line in self.lines.values() if line.state == "running"]

    def unfinished(self) -> list[QueueEntry]:
        """Return the items that run, or may run yet."""
        return [
            line
            for line in self.lines.values()
            if line.state == "running" or (line.state == "waiting" and not self.find_block(line))
        ]

    def find_block(self, line: QueueEntry) -> str:
        """Return why an item can never run as things are; empty where it can."""
        seen, path = {line.item.name}, list(line.item.after)
        while path:
            name = path.pop()
            other = self.lines.get(name)
            if other is None:
                return f"needs `{name}`, which is not in the queue"
            if other.state == "failed":
                return f"needs `{name}`, which failed"
            if name == line.item.name:
                return "needs itself"
            if name not in seen and other.state == "waiting":
                seen.add(name)
                path += other.item.after
        return ""


def compute_ready_s(line: QueueEntry) -> float:
    """Return when an item may be tried next; 0: at once."""
    if line.ending is None or not line.failures:
        return 0.0
    delay_s = min(BACKOFF_S_MAX, line.item.backoff_s * 2.0 ** min(line.failures - 1, 20))
    return line.ending.at_s + delay_s


def explain(book: Book, line: QueueEntry, now_s: float) -> str:
    """Return why an item is as it is, in one line; empty where nothing holds it up but slots."""
    if line.state != "waiting":
        return line.reason
    block = book.find_block(line)
    if block:
        return block
    waits = [n for n in line.item.after if book.lines[n].state != "done"]
    if waits:
        return f"waits for {', '.join(waits)}"
    left_s = compute_ready_s(line) - now_s
    if left_s > 0:
        return f"{line.reason}; again in {left_s:.0f} s"
    return line.reason


def order_ready(book: Book, now_s: float) -> list[QueueEntry]:
    """Return the items that could be started now, the first to be started first."""
    ready = [
        line
        for line in book.lines.values()
        if line.state == "waiting"
        and all(n in book.lines and book.lines[n].state == "done" for n in line.item.after)
        # A clock that was set back must not hold an item up for longer than its backoff.
        and not (line.ending and line.ending.at_s <= now_s < compute_ready_s(line))
    ]
    return sorted(ready, key=lambda line: (-line.item.priority, line.order))


def decide(book: Book, now_s: float, slots: Sequence[str], busy: Iterable[str] = ()) -> list[Start]:
    """Return the attempts to start now on `slots`, of which others hold those in `busy`.

    An item that needs more slots than are free holds up those behind it: were they let past, it
    might never come to run. One that needs more than there are at all is passed over.
    """
    held = set(busy) | {slot for line in book.running() for slot in line.slots}
    free = [slot for slot in slots if slot not in held]
    starts: list[Start] = []
    for line in order_ready(book, now_s):
        need = line.item.gpus
        if need > len(slots):
            continue
        if need > len(free):
            break
        starts.append(Start(line.item.name, line.attempts + 1, tuple(free[:need])))
        free = free[need:]
    return starts


def list_oversized(book: Book, slots: Sequence[str]) -> list[QueueEntry]:
    """Return the items that wait for more slots than there are."""
    return [
        line
        for line in book.lines.values()
        if line.state == "waiting" and line.item.gpus > len(slots)
    ]


def next_deadline(book: Book, now_s: float) -> float | None:
    """Return when a retry falls due next; None where none is waited for."""
    times = [compute_ready_s(line) for line in book.lines.values() if line.state == "waiting"]
    return min((at_s for at_s in times if at_s > now_s), default=None)
