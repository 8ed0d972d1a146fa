"""Each bit of what a job leaves on disk is flipped, each file cut: is anything lost without a word?

A real job of two ranks, of which one is killed, leaves its directory. Then, file by file:

    read      each bit of `journal.jsonl`: what the commands read, and what they say
    compare   each bit of stream and mirror: what the next controller makes of both
    record    each bit of every other document, curves and a queue's journal among them: what its
              own reader returns
    cut       the journal's copies cut at every place, every document as well
    server    sampled bits and cuts of the files of a real nats-server, which was killed or stopped:
              what the next controller makes of it, writes on, and finds again after a kill
    full      a small disk with room for 0, 1, 2, ... more pages: mirror, stream and snapshots

A fault is `mended` (everything is there), `said` (something is missing, and is said), or `silent`:
something is missing or other than it was written, and nobody says so. Files above 64 kB are
sampled. Pieces are lines of `--out`, with seed, commit and load; those that are there are not done
again. The table counts faults; with a silent one the exit code is 1.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from failpoints.jobs import DEPTHS, SNAPSHOTS, Run
from sweep import sweep_after_me

from perdure.adapters.nats import NatsBus, NatsServer, NatsStream
from perdure.keeper.exits import write_record
from perdure.model.bus.lighthouse import Member
from perdure.model.bus.wire import Endpoint
from perdure.model.chain import EntryReader
from perdure.model.errors import PerdureError
from perdure.model.events import Decision, JournalEntry, MetricsLogged, Newest
from perdure.model.orders import Assignment
from perdure.model.paths import JobPaths
from perdure.model.queue import Claim, Ended, Ending, Item, Put, Started
from perdure.model.steering import Change, Steering
from perdure.service.access.credentials import KeptEndpoint, keep_endpoint
from perdure.service.agent.beats import _read_record
from perdure.service.controller.comparison import compare
from perdure.service.controller.journal import Journal, Mirror
from perdure.service.controller.snapshots import SnapshotFiles
from perdure.service.curves import CurveFiles, read_curves
from perdure.service.jobfiles import (
    load_endpoint,
    load_parts,
    load_snapshot,
    load_spec,
    read_document,
    read_mirror,
    write_document,
    write_steering,
)
from perdure.service.jobfolders import paths_of
from perdure.service.lighthouse.remembered import LighthouseFile
from perdure.service.queue.store import CLAIM, ENDING, QueueStore, create_once
from perdure.telemetry.curves import UNREADABLE
from perdure.worker.settings import read_steering

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.fakes import FakeStream

ALL_BYTES = 64_000
"""Of larger files places are sampled."""
SAMPLED = 2_000
PIECE = 20_000
"""Faults of a line of `--out`."""
NAME = "job"
Judge = Callable[[bytes], str]
"""Of a file's damaged bytes: mended, said or silent."""


def flips(size: int, chance: random.Random) -> list[int]:
    """Return the bits of a file that are flipped, one at a time."""
    if size <= ALL_BYTES:
        return list(range(8 * size))
    return sorted(chance.sample(range(8 * size), SAMPLED))


def flip(data: bytes, bit: int) -> bytes:
    """Return `data` with one bit flipped."""
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


class Said(logging.Handler):
    """Counts what is said in logs, of which nothing is shown."""

    def __init__(self) -> None:
        """Count warnings and errors."""
        super().__init__(logging.WARNING)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Count one."""
        self.count += 1


SAID = Said()


class Base:
    """What the job has left, and what is true of it."""

    def __init__(self, home: Path) -> None:
        """Read it."""
        self.home = home
        self.paths: JobPaths = paths_of(str(home), NAME)
        self.data = Path(self.paths.journal).read_bytes()
        self.entries = list(EntryReader(self.data.splitlines(keepends=True)))
        lines = self.data.splitlines(keepends=True)
        self.groups = [b"".join(lines[n : n + 3]) for n in range(0, len(lines), 3)]

    def judge(self, entries: list[JournalEntry], said: bool) -> str:
        """Return what became of the entries."""
        if any(entry not in self.entries for entry in entries[-1:]) or not self._holds(entries):
            return "silent"
        whole = len(entries) == len(self.entries)
        return "mended" if whole else "said" if said else "silent"

    def _holds(self, entries: list[JournalEntry]) -> bool:
        known = {entry.seq: entry for entry in self.entries}
        return all(known.get(entry.seq) == entry for entry in entries)

    def judge_read(self, data: bytes) -> str:
        """Have the commands read a damaged mirror."""
        Path(self.paths.journal).write_bytes(data)
        reader = read_mirror(self.paths)
        assert reader is not None
        return self.judge(list(reader), bool(reader.tally.describe()))

    def judge_mirror(self, data: bytes) -> str:
        """Compare the stream with a damaged mirror."""
        found = compare(self.groups, data)
        cut = self.data.startswith(data)  # As one that lags: nothing to be said.
        mended = self.judge(found.entries, bool(found.describe()))
        return mended if found.describe() or cut or data == self.data else "silent"

    def judge_stream(self, number: int, data: bytes) -> str:
        """Compare the mirror with a stream of which message `number` is damaged."""
        groups = [*self.groups[:number], data, *self.groups[number + 1 :]]
        found = compare(groups, self.data)
        placed = b"".join(found.groups) + found.more
        if placed != self.data or not found.describe():
            return "silent"
        return self.judge(found.entries, True)


def judge_record(path: Path, read: Callable[[], object]) -> Judge:
    """Return the judge of a document with its reader: another value is silent, none is said."""
    truth = read()
    assert truth is not None, f"{path}: left by other code? --out is to be another"

    def judge(data: bytes) -> str:
        path.write_bytes(data)
        before = SAID.count
        try:
            found = read()
        except PerdureError:
            return "said"
        return (
            "mended"
            if found == truth
            else "said"
            if found is None or SAID.count > before
            else "silent"
        )

    return judge


def write_others(base: Base) -> None:
    """Write what this job had no need of, by its own writers."""
    paths, queue = base.paths, QueueStore(str(base.home), NAME)
    members = tuple(Member(f"g{n}:a", "s", 7, False, 0, b"raw" * 9) for n in range(2))
    write_document(paths.lighthouse, LighthouseFile(7, 100, 3, members, silences=(0.25, 1.5)))
    write_document(paths.newest, Newest())
    changes = (Change(epoch=2, step=12, values={"lr": 0.125}, who="operator"),)
    steering = Steering(changes=changes, pause="p1", pause_step=40)
    write_steering(paths, 0, Assignment(number=1, generation=1, phase="run", steering=steering))
    keep_endpoint(NatsServer(folder=paths.nats, token="x"), kept_endpoint(base), certificate=False)
    curves, numbers = CurveFiles(paths.curves, "campaign"), iter(range(10**6))
    for piece in range(2):
        for _ in range(60):
            step = next(numbers)
            event = MetricsLogged(generation=0, rows=((step, {"loss": 1.0 / (step + 1)}),))
            curves.append(1.0 + step, "g0-r0-p1", event)
        if not piece:
            curves.fold(curves.begin_next())
    with queue.writing() as writer:
        for name in "abc":
            writer.append(Put(1.0, Item(name=name, command=("true", name))))
            writer.append(Started(2.0, name, 1, ("cpu-0",)))
        writer.append(Ended("a", 1, Ending(at_s=3.0, code=0)))
    folder = queue.attempt("a", 1)
    folder.mkdir(parents=True)
    create_once(folder / CLAIM, Claim(boot_id="b", holder=3, holder_start=4))
    create_once(folder / ENDING, Ending(at_s=3.0, code=0))


def kept_endpoint(base: Base) -> str:
    """Return where an endpoint is kept over a job's runs."""
    return str(base.home / "joining" / "kept-endpoint.json")


def read_queue(base: Base) -> object:
    """Return what is known of a queue's items."""
    lines = QueueStore(str(base.home), NAME).read().lines
    return {name: (line.state, line.attempts, line.item.command) for name, line in lines.items()}


def read_all_curves(base: Base) -> object:
    """Return what curves show; what is not to be read is counted, which `diagnose` shows."""
    found = read_curves(base.paths.curves)
    SAID.count += UNREADABLE in found.dropped
    return {name: tuple(curve) for name, curve in found.curves.items()}


def read_ranks_steering(base: Base) -> object:
    """Return what a rank reads of changes before its first step."""
    os.environ["PERDURE_STEERING"] = base.paths.steering(1, 0)
    return read_steering()


def list_others(base: Base) -> Iterator[tuple[str, Path, Judge]]:
    """Yield the same of documents that not every job has."""
    paths, queue = base.paths, QueueStore(str(base.home), NAME)
    attempt = queue.attempt("a", 1)
    documents: list[tuple[str, Callable[[], object]]] = [
        (paths.lighthouse, lambda: read_document(paths.lighthouse, LighthouseFile)),
        (paths.newest, lambda: read_document(paths.newest, Newest)),
        (paths.steering(1, 0), lambda: read_ranks_steering(base)),
        (kept_endpoint(base), lambda: read_document(kept_endpoint(base), KeptEndpoint)),
        (str(attempt / CLAIM), lambda: read_document(str(attempt / CLAIM), Claim)),
        (str(attempt / ENDING), lambda: read_document(str(attempt / ENDING), Ending)),
        (str(queue.root / "journal.jsonl"), lambda: read_queue(base)),
    ]
    documents += [
        (str(path), lambda: read_all_curves(base))
        for path in sorted(Path(paths.curves).iterdir())
        if path.stat().st_size
    ]
    for name, read in documents:
        yield "record", Path(name), judge_record(Path(name), read)


def list_judges(base: Base) -> Iterator[tuple[str, Path, Judge]]:
    """Yield each kind of look at each file."""
    paths = base.paths
    journal = Path(paths.journal)
    yield "read", journal, base.judge_read
    yield "compare", journal, base.judge_mirror
    for name, read in (
        (paths.spec, lambda: load_spec(paths)),
        (paths.parts, lambda: load_parts(paths)),
        (paths.snapshot, lambda: load_snapshot(paths)),
        (paths.endpoint, lambda: load_endpoint(paths)),
    ):
        yield "record", Path(name), judge_record(Path(name), read)
    for path in sorted(Path(paths.root, "exits").rglob("*.json"))[:2]:
        yield "record", path, judge_record(path, lambda path=path: _read_record(str(path)))  # type: ignore[misc]
    spec = load_spec(paths)
    folder = Path(paths.snapshots)
    for path in sorted(folder.glob("*.json"))[-1:]:
        for other in folder.glob("*.json"):
            if other != path:
                other.unlink()
        files = SnapshotFiles(str(folder))

        def read_one(files: SnapshotFiles = files) -> object:
            return next((position for _, position in files.read(spec)), None)

        yield "record", path, judge_record(path, read_one)


def try_all(judge: Judge, data: bytes, places: list[int], cut: bool) -> Counter[str]:
    """Return how many faults came out how."""
    counts: Counter[str] = Counter()
    for place in places:
        try:
            counts[judge(data[:place] if cut else flip(data, place))] += 1
        except Exception as error:
            counts[f"silent: {type(error).__name__}: {error}"[:200]] += 1
    return counts


# --- a real nats-server --------------------------------------------------------------------------


class Server:
    """A real server in a copy of the base."""

    def __init__(self, folder: Path) -> None:
        """Use the store below `folder`."""
        self.files = NatsServer(folder=str(folder), token="campaign", name=NAME)
        self.log = folder.parent / "nats.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Endpoint:
        """Start it."""
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(self.files.command(), stdout=log, stderr=log)
        self.files.wait_ready()
        return Endpoint(url=self.files.url, token="campaign", clock_offset_s=0.0)

    def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        """End it."""
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(20)


async def fill(endpoint: Endpoint, base: Base) -> None:
    """Have a server hold the base's journal."""
    bus = await NatsBus.connect(endpoint, timeout_s=10)
    stream = await NatsStream.open(bus, NAME)
    for number, data in enumerate(base.groups):
        await stream.append(data, expected_last=number, message_id=f"base-{number}")
    await bus.close()


async def read_through(journal: Journal) -> list[JournalEntry]:
    """Return all entries, as a controller that begins to act reads them."""
    entries = [entry async for entry in journal.read()]
    return entries if journal.agreed else await journal.open()


async def take_over(endpoint: Endpoint, mirror: Path, words: str) -> tuple[list[JournalEntry], str]:
    """Open the journal as the next controller, and append; return it and what is said of it."""
    bus = await NatsBus.connect(endpoint, timeout_s=10)
    try:
        stream = await NatsStream.open(bus, NAME)
        journal = Journal(stream, writer=words, mirror=Mirror(str(mirror)))
        async with asyncio.timeout(30):
            entries = await read_through(journal)
            body = Decision(action="A", summary=words, reason="campaign")
            await journal.append([JournalEntry(journal.last_seq + 1, 1.0, body)])
        return entries, "; ".join(each.reason for each in journal.take_damage())  # type: ignore[union-attr]
    finally:
        await bus.close()


def try_server(base: Base, chance: random.Random, count: int) -> Iterator[tuple[str, Counter[str]]]:
    """Yield, of each file of a store that was killed or stopped, how sampled faults came out."""
    for ended in (signal.SIGKILL, signal.SIGTERM):
        with tempfile.TemporaryDirectory(prefix="perdure-cj-") as folder:
            store, work = Path(folder, "base", "nats"), Path(folder, "work")
            store.mkdir(parents=True)
            server = Server(store)
            asyncio.run(fill(server.start(), base))
            server.end(ended)
            names = [p.relative_to(store) for p in store.rglob("jetstream/**/*") if p.is_file()]
            for name in sorted(names):
                counts: Counter[str] = Counter()
                for number in range(count):
                    shutil.rmtree(work, ignore_errors=True)
                    shutil.copytree(store.parent, work)
                    path = work / "nats" / name
                    data = path.read_bytes()
                    cut = number % 4 == 3
                    place = chance.randrange(len(data) * (1 if cut else 8))
                    path.write_bytes(data[:place] if cut else flip(data, place))
                    counts[_look_at(base, work)] += 1
                yield f"{name.name}, {'killed' if ended == signal.SIGKILL else 'stopped'}", counts


def _look_at(base: Base, work: Path) -> str:
    """Return how one fault came out: two controllers one after the other, a kill between them."""
    mirror = work / "journal.jsonl"
    mirror.write_bytes(base.data)
    server = Server(work / "nats")
    try:
        entries, said = asyncio.run(take_over(server.start(), mirror, "first"))
        verdict = base.judge(entries, bool(said))
        server.end()
        entries, _ = asyncio.run(take_over(server.start(), mirror, "second"))
        whole = [entry.seq for entry in entries] == list(range(1, len(base.entries) + 2))
        return verdict if whole else f"silent: the second found {len(entries)}"
    except Exception as error:
        return f"silent: {type(error).__name__}: {error}"[:200]
    finally:
        server.end()


# --- a full disk ---------------------------------------------------------------------------------


def try_full(base: Base, pages: int) -> Iterator[tuple[str, Counter[str]]]:
    """Yield what a disk with room for 0, 1, 2, ... more pages makes of the copies on it."""
    with tempfile.TemporaryDirectory(prefix="perdure-cj-") as folder:
        disk = Path(folder, "disk")
        disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)]
        if subprocess.run(mount, capture_output=True).returncode:
            yield "no small disk can be mounted here (needs root)", Counter()
            return
        try:
            mirrors, streams, records = Counter[str](), Counter[str](), Counter[str]()
            for room in range(pages):
                mirrors[asyncio.run(_fill_mirror(disk, room))] += 1
                records[_fill_record(disk, room, base)] += 1
            yield "mirror", mirrors
            yield "exit record and state.json", records
            for room in range(0, 2 * pages, 4):
                streams[asyncio.run(_fill_stream(disk, room))] += 1
            yield "stream of a real nats-server", streams
        finally:
            subprocess.run(["umount", "-l", str(disk)], check=True)


@contextlib.contextmanager
def leave(disk: Path, room: int) -> Iterator[None]:
    """Leave `room` pages of the disk free meanwhile."""
    ballast = disk / "ballast"
    with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    size = max(0, ballast.stat().st_size - 4096 * room)
    os.truncate(ballast, size)
    try:
        yield
    finally:
        ballast.unlink()


async def _write_on(journal: Journal, count: int) -> None:
    for _ in range(count):
        body = Decision(action="A", summary="x" * 700, reason="campaign")
        await journal.append([JournalEntry(journal.last_seq + 1, 1.0, body)])


async def _fill_mirror(disk: Path, room: int) -> str:
    mirror = disk / "journal.jsonl"
    mirror.unlink(missing_ok=True)
    stream = FakeStream()
    journal = Journal(stream, writer="one", mirror=Mirror(str(mirror)))
    await read_through(journal)
    await _write_on(journal, 5)
    before = mirror.read_bytes()
    with leave(disk, room):
        await _write_on(journal, 20)
        if not b"".join(stream.messages).startswith(mirror.read_bytes()[: len(before)]):
            return "silent"
        taken = Journal(stream, writer="two", mirror=Mirror(str(mirror)))
        await read_through(taken)
        if len(mirror.read_bytes()) < len(before):
            return "silent: the mirror was cut"
        await _write_on(taken, 3)
    await asyncio.sleep(1.05)
    await _write_on(taken, 1)
    return "mended" if mirror.read_bytes() == b"".join(stream.messages) else "silent"


async def _fill_stream(disk: Path, room: int) -> str:
    shutil.rmtree(disk / "nats", ignore_errors=True)
    (disk / "nats").mkdir()
    server = Server(disk / "nats")
    server.log = disk.parent / "nats.log"
    mirror = disk.parent / "journal.jsonl"
    mirror.unlink(missing_ok=True)
    acknowledged = 0
    try:
        bus = await NatsBus.connect(server.start(), timeout_s=10)
        stream = await NatsStream.open(bus, NAME)
        journal = Journal(stream, writer="one", mirror=Mirror(str(mirror)))
        await read_through(journal)
        await _write_on(journal, 5)
        with leave(disk, room), contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2):
                await _write_on(journal, 40)
        acknowledged = journal.last_seq
        await bus.close()
        server.end()
        entries, _ = await take_over(server.start(), mirror, "two")
        return "mended" if len(entries) >= acknowledged else f"silent: {len(entries)} entries"
    except Exception as error:
        return f"silent: {type(error).__name__}: {error}"[:200]
    finally:
        server.end()


def _fill_record(disk: Path, room: int, base: Base) -> str:
    """Write over what is there where there may be no room: the old one or the new one is read."""
    path, state = disk / "exit.json", disk / "state.json"
    records = [e.body.record for e in base.entries if hasattr(e.body, "record")]
    snapshot = load_snapshot(base.paths)
    write_record(str(path), records[0])
    write_document(str(state), snapshot)
    with leave(disk, room):
        with contextlib.suppress(OSError):
            write_record(str(path), records[-1])
        with contextlib.suppress(PerdureError):
            write_document(str(state), snapshot)
        if _read_record(str(path)) not in (records[0], records[-1]):
            return "silent"
    return "mended" if state.stat().st_size and _read_record(str(path)) else "silent"


# --- the campaign --------------------------------------------------------------------------------


class Ledger:
    """The lines of `--out`: what was done, and how it came out."""

    def __init__(self, path: Path, seed: int) -> None:
        """Read what is there."""
        self._path, self._seed = path, seed
        words = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
        self._commit = subprocess.run(words, capture_output=True, text=True).stdout.strip()
        lines = path.read_text().splitlines() if path.exists() else []
        self.rows = [json.loads(line) for line in lines]
        self._done = {row["piece"] for row in self.rows}

    def has(self, piece: str) -> bool:
        """Return whether a piece was done."""
        return piece in self._done

    def add(self, piece: str, kind: str, file: str, counts: Counter[str]) -> None:
        """Write a piece down."""
        load = round(os.getloadavg()[0], 1)
        row = {"piece": piece, "kind": kind, "file": file, "counts": counts, "seed": self._seed,
               "commit": self._commit, "load": load}  # fmt: skip
        self.rows.append(row)
        with open(self._path, "a") as file_:
            print(json.dumps(row), file=file_)
        print(f"{piece}: {dict(counts)}", file=sys.stderr, flush=True)

    def render(self) -> str:
        """Return the table."""
        total: dict[tuple[str, str], Counter[str]] = {}
        for row in self.rows:
            total.setdefault((row["kind"], row["file"]), Counter()).update(row["counts"])
        lines = ["| what | file | faults | mended | said | silent |", "|---|---|---|---|---|---|"]
        for (kind, file), counts in total.items():
            silent = sum(n for name, n in counts.items() if name.startswith("silent"))
            lines.append(
                f"| {kind} | {file} | {counts.total():,} | {counts['mended']:,} | "
                f"{counts['said']:,} | {silent:,} |"
            )
        return "\n".join(lines)

    @property
    def silent(self) -> int:
        """How many faults nobody speaks of."""
        return sum(
            count
            for row in self.rows
            for name, count in row["counts"].items()
            if name.startswith("silent")
        )


def try_bits(base: Base, ledger: Ledger, seed: int, share: int) -> None:
    """Flip bits and cut files, in process."""
    write_others(base)
    for kind, path, judge in (*list_judges(base), *list_others(base)):
        data = path.read_bytes()
        bits = flips(len(data), random.Random(seed))
        cuts = [bit // 8 for bit in bits[:: 8 if len(data) <= ALL_BYTES else 1]]
        appended = path.suffix == ".jsonl" and kind == "record"  # Its end is never known.
        for word, places in (("flip", bits), ("cut", [] if appended else cuts)):
            _try_pieces(ledger, f"{kind}, {word}", path.name, judge, data, places[::share])
        path.write_bytes(data)
    data = b"".join(base.groups)
    places = flips(len(data), random.Random(seed + 1))[::share]
    ends, end = [], 0
    for group in base.groups:
        end += len(group)
        ends.append(end)

    def judge_stream(damaged: bytes) -> str:
        at = next(n for n, (a, b) in enumerate(zip(data, damaged, strict=True)) if a != b)
        number = next(n for n, end in enumerate(ends) if at < end)
        end = ends[number]
        return base.judge_stream(number, damaged[end - len(base.groups[number]) : end])

    _try_pieces(ledger, "compare, flip", "stream", judge_stream, data, places)
    gone = Counter(base.judge_stream(number, b"") for number in range(len(base.groups)))
    if not ledger.has("compare, gone/stream"):
        ledger.add("compare, gone/stream", "compare, gone", "stream", gone)


def _try_pieces(
    ledger: Ledger, kind: str, file: str, judge: Judge, data: bytes, places: list[int]
) -> None:
    for start in range(0, len(places), PIECE):
        piece = f"{kind}/{file}/{start}"
        if not ledger.has(piece):
            counts = try_all(judge, data, places[start : start + PIECE], "cut" in kind)
            ledger.add(piece, kind, file, counts)


def main() -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/campaign-journal"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--share", type=int, default=1, help="every N-th bit only")
    parser.add_argument("--server", type=int, default=100, help="faults a file of a real server")
    parser.add_argument("--pages", type=int, default=40)
    args = parser.parse_args()
    logging.getLogger().addHandler(SAID)
    args.out.mkdir(parents=True, exist_ok=True)
    kept, ledger = args.out / "base", Ledger(args.out / "pieces.jsonl", args.seed)
    if not kept.exists():
        run = Run(next(depth for depth in DEPTHS if depth.name == "resumable"), SNAPSHOTS)
        wrong = run.run(300)
        if wrong:
            print("\n".join(wrong), file=sys.stderr)
            return 1
        shutil.copytree(run.home / "state", kept, ignore=shutil.ignore_patterns("nats", "*.sock"))
        shutil.rmtree(run.home)
    with tempfile.TemporaryDirectory(prefix="perdure-cj-") as folder:
        home = Path(folder, "state")
        shutil.copytree(kept, home)
        base = Base(home)
        try_bits(base, ledger, args.seed, args.share)
        if not ledger.has("server"):
            for file, counts in try_server(base, random.Random(args.seed), args.server):
                ledger.add(f"server/{file}", "server", file, counts)
            ledger.add("server", "server", "all", Counter())
        if not ledger.has("full"):
            for file, counts in try_full(base, args.pages):
                ledger.add(f"full/{file}", "full disk", file, counts)
            ledger.add("full", "full disk", "all", Counter())
    print(ledger.render())
    return 1 if ledger.silent else 0


if __name__ == "__main__":
    sweep_after_me()
    sys.exit(main())
