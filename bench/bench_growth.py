"""What a month of a large job leaves on the disk, and how long it takes to read it again.

A made-up job of `--days` and `--ranks` writes what its controller would have journaled: progress
and links as seldom as `detect/progress.py` and `telemetry/links.py` note them, a checkpoint by
agreement every `--checkpoint-min`, a failure of one rank every `--failure-h` with the restart of
all, and `run.log` twice a second. Then the user's own commands read it (time, memory), and a
controller takes over: from a real nats-server, with the snapshot that its predecessor would have
left. Prints one JSON document. `--keep DIR` leaves the job there.
"""

import argparse
import asyncio
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench_journal import make_service, serve, timed
from sweep import sweep_after_me

from perdure.adapters.nats import NatsBus, NatsServer, NatsStream
from perdure.control.memory import Memory
from perdure.detect.progress import (
    ACCOUNT_BYTES,
    INTERVAL_S,
    INTERVAL_S_MAX,
    INTERVAL_SHARE,
    WHOLE_BYTES_A_S,
)
from perdure.model.bus.wire import Endpoint
from perdure.model.chain import FIRST, EntryReader, seal
from perdure.model.codec import encode
from perdure.model.events import (
    AnyEvent,
    BoundaryAnswered,
    BoundaryReached,
    CheckpointRestored,
    CheckpointSaved,
    ControllerStarted,
    Decision,
    FailureDecided,
    GenerationStepping,
    GenerationStopped,
    JobEnded,
    JobSubmitted,
    JournalEntry,
    LinksNoted,
    MetricsLogged,
    NodeRegistered,
    ProgressNoted,
    RankExited,
    RankJoined,
    RanksAgreed,
    RanksStarted,
    StoreReady,
    VerdictReached,
)
from perdure.model.failures import ExitRecord
from perdure.model.job import JobSpec, RestartConfig
from perdure.model.signals.links import LinkSample
from perdure.model.signals.progress import RankAccount
from perdure.model.verdicts import Culprit, Verdict
from perdure.service.controller.journal import Journal, Mirror
from perdure.service.controller.snapshots import EVERY, SnapshotFiles
from perdure.service.curves import CurveFiles
from perdure.service.jobfiles import write_document
from perdure.service.jobfolders import paths_of
from perdure.telemetry.links import LINKS_MAX, NOTE_BYTES_A_S

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


NAME = "month"
NPROC = 8
STEP_S = 2.0
BEGAN_S = 1_795_000_000.0
GROUP_BYTES = 400_000
FAILURE_H = 48.0
"""Between two failures of 1,000 ranks. Llama 3's 16,384 GPUs were interrupted 419 times in 54 days
unexpectedly (arXiv 2407.21783, table 5): once in 50,000 hours of a GPU."""
TOGETHER = 40
"""Ranks whose answers arrive between two turns: of five nodes."""
Told = tuple[float, AnyEvent | Decision, str, int]
"""When, what, and its source with the number there."""


class Month:
    """What happens in the job, told in the order in which it is journaled."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Tell of a job as `args` describe it."""
        self.ranks = range(args.ranks)
        self.nodes = range(-(-args.ranks // NPROC))
        self.spec = JobSpec(
            name=NAME, script="train.py", nproc=NPROC, nodes=len(self.nodes),
            restart=RestartConfig(max_restarts=10**6, window_max=10**6, same_fault_max=10**6),
        )  # fmt: skip
        self.end_s = BEGAN_S + args.days * 86400.0
        self.failure_s = args.failure_h * 3600.0
        self.checkpoint_s = args.checkpoint_min * 60.0
        self.now, self.step, self.saved, self.generation = BEGAN_S, 0, 0, -1
        self.numbers: Counter[str] = Counter()

    def tell(self) -> Iterator[Told]:
        """Yield the whole month."""
        yield self._say(JobSubmitted(spec=self.spec, at_s=self.now))
        yield self._say(ControllerStarted(incarnation="c1"))
        for node in self.nodes:
            registered = NodeRegistered(
                node=node, incarnation=f"a{node}", host=f"host-{node}", boot_id="b", slots=NPROC
            )
            yield self._of_node(node, registered)
        while self.now < self.end_s:
            yield from self._live()
        yield self._say(JobEnded(status="stopped", exit_code=0, reason="stopped", at_s=self.now))

    def _live(self) -> Iterator[Told]:
        """One generation, up to the failure of a rank."""
        self.generation += 1
        g, self.step = self.generation, self.saved
        for node in self.nodes:
            yield self._of_node(node, GenerationStopped(node=node, generation=g - 1, at_s=self.now))
        yield self._of_node(0, StoreReady(generation=g, host="h", port=1, agent_store=True))
        yield self._say(Decision(action="AssignNodes", summary=f"run {g}", reason="stopped"))
        self.now += 5.0
        for node in self.nodes:
            pids = {rank: 1000 + rank for rank in self.ranks if rank // NPROC == node}
            started = RanksStarted(node=node, generation=g, pids=pids, at_s=self.now, warm=True)
            yield self._of_node(node, started)
        began_s = self.now
        self.now += 30.0
        for rank in self.ranks:
            yield self._of_rank(rank, RankJoined(generation=g, rank=rank, start_step=self.step))
            restored = CheckpointRestored(
                generation=g, rank=rank, step=self.step, path=f"checkpoints/step-{self.step:08d}"
            )
            yield self._of_rank(rank, restored)
        first_s, start = self.now, self.step
        account = self._account(start, began_s, first_s)
        yield self._progress(account, whole=not g)
        yield self._say(GenerationStepping(generation=g, at_s=self.now, step=self.step))
        noted_s = whole_s = self.now
        links_s, saves_s = self.now + 10.0, self.now + self.checkpoint_s
        until_s = min(began_s + self.failure_s, self.end_s)
        while self.now < until_s:
            age_s = self.now - began_s
            noted_s += min(max(INTERVAL_S, age_s * INTERVAL_SHARE), INTERVAL_S_MAX)
            self.now = noted_s
            self.step = start + int((self.now - first_s) / STEP_S)
            account = self._account(start, began_s, first_s)
            whole = self.now - whole_s >= len(self.ranks) * ACCOUNT_BYTES / WHOLE_BYTES_A_S
            yield self._progress(account, whole=whole)
            whole_s = self.now if whole else whole_s
            if self.now >= links_s:
                links = self._links()
                links_s = self.now + max(60.0, 110 * len(links) / NOTE_BYTES_A_S)
                noted = LinksNoted(generation=g, at_s=self.now, window_s=60.0, links=links)
                yield self._say(noted)
            if self.now >= saves_s:
                saves_s += self.checkpoint_s
                yield from self._checkpoint()
        yield from self._fail(account)

    def _fail(self, account: RankAccount) -> Iterator[Told]:
        g, culprit = self.generation, self.generation * 37 % len(self.ranks)
        verdict = Verdict(
            kind="Crash", culprit=Culprit(rank=culprit), generation=g, first_seen_s=self.now,
            confirmed_s=self.now, confidence=1.0, reason=f"rank {culprit} ended with signal 9",
            step=self.step,
        )  # fmt: skip
        yield self._exit(culprit, account, asked=False)
        yield self._progress(account, whole=True)
        yield self._say(VerdictReached(verdict=verdict))
        failure = FailureDecided(
            id=f"f{g}", world=g, cause="signal 9 (SIGKILL)", culprit=f"rank {culprit}",
            at_step=self.step, failure_s=self.now, detected_s=self.now + 0.1, at_s=self.now + 0.2,
            rung="restart", reason=f"rank {culprit} ended with signal 9 (SIGKILL)",
        )  # fmt: skip
        yield self._say(failure)
        yield self._say(Decision(action="AssignNodes", summary="store", reason=failure.reason))
        self.now += 1.0
        for rank in self.ranks:
            if rank != culprit:
                yield self._exit(rank, account, asked=True)

    def _checkpoint(self) -> Iterator[Told]:
        id_, g, step = f"b{self.now:.0f}", self.generation, self.step + 3
        yield self._say(Decision(action="SendBoundary", summary="prepare", reason="the interval"))
        yield from self._agree(
            [BoundaryAnswered(id=id_, rank=r, ok=True, step=self.step) for r in self.ranks]
        )
        yield self._say(Decision(action="SendBoundary", summary="commit", reason="all agreed"))
        yield from self._agree(
            [BoundaryReached(id=id_, rank=r, step=step, at_s=self.now) for r in self.ranks]
        )
        saved = CheckpointSaved(
            generation=g, step=step, path=f"checkpoints/step-{step:08d}", bytes=10**11,
            stall_s=0.2, save_s=60.0, at_s=self.now,
        )  # fmt: skip
        yield self._of_rank(0, saved)
        self.saved = step

    def _agree(self, events: Sequence[BoundaryAnswered | BoundaryReached]) -> Iterator[Told]:
        """What the ranks of some nodes say comes in one turn of the controller's loop."""
        for first in range(0, len(events), TOGETHER):
            told = []
            for event in events[first : first + TOGETHER]:
                _, _, source, number = self._of_rank(event.rank, event)
                told.append((source, number, event))
            yield self._say(RanksAgreed.join(told))

    def _account(self, start: int, began_s: float, first_s: float) -> RankAccount:
        return RankAccount(
            start_step=start, step=self.step, step_s=(self.step - start) * STEP_S * 0.999,
            overhead_s=(self.step - start) * STEP_S * 0.001, spawned_s=began_s + 0.123456,
            script_s=began_s + 1.234567, init_s=began_s + 2.345678, group_s=began_s + 8.123456,
            restored_s=began_s + 20.123456, first_step_s=first_s,
            last_step_s=first_s + (self.step - start) * STEP_S,
        )  # fmt: skip

    def _progress(self, account: RankAccount, *, whole: bool) -> Told:
        accounts = dict.fromkeys(self.ranks if whole else (0,), account)
        noted = ProgressNoted(
            generation=self.generation, at_s=self.now, step=self.step, accounts=accounts,
            whole=whole,
        )  # fmt: skip
        return self._say(noted)

    def _links(self) -> tuple[LinkSample, ...]:
        pairs = [(rank, (rank + hop) % len(self.ranks)) for rank in self.ranks for hop in (1, 8)]
        return tuple(
            LinkSample(a, b, "default_pg", 123_456_789, 0.123, 0.00012, 3, 0, 0, 0.01)
            for a, b in pairs[:LINKS_MAX]
        )

    def _exit(self, rank: int, account: RankAccount, *, asked: bool) -> Told:
        record = ExitRecord(
            rank=rank, generation=self.generation, pid=1000 + rank, at_s=self.now, signal=9,
            asked=asked, cpu_s=12345.678, max_rss_bytes=3 * 10**10,
            last_output=("step 123456 loss 2.345", "saved a checkpoint"),
        )  # fmt: skip
        end = RankExited(
            node=rank // NPROC, record=record, account=account, detected_s=self.now + 0.01
        )
        return self._of_node(rank // NPROC, end)

    def _say(self, body: AnyEvent | Decision) -> Told:
        return self.now, body, "", 0

    def _of_node(self, node: int, body: AnyEvent) -> Told:
        return self._of(f"a{node}-1234", body)

    def _of_rank(self, rank: int, body: AnyEvent) -> Told:
        return self._of(f"g{self.generation}-r{rank}-p{1000 + rank}", body)

    def _of(self, source: str, body: AnyEvent) -> Told:
        self.numbers[source] += 1
        return self.now, body, source, self.numbers[source]


def write_journal(month: Month, path: str) -> dict[str, Any]:
    """Write the job's journal; return what is in it, by type."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    after = FIRST
    with open(path, "wb") as file:
        for seq, (at_s, body, source, number) in enumerate(month.tell(), 1):
            line, after = seal(encode(JournalEntry(seq, at_s, body, source, number)), after)
            kind = type(body).__name__
            counts[kind] += 1
            sizes[kind] += len(line)
            file.write(line)
    kinds = {k: [counts[k], round(sizes[k] / 1e6, 1)] for k, _ in sizes.most_common(12)}
    return {
        "entries": sum(counts.values()),
        "MB": round(sum(sizes.values()) / 1e6, 1),
        "generations": month.generation + 1,
        "kinds": kinds,
    }


def write_curves(folder: str, month: Month, a_second: float) -> dict[str, Any]:
    """Log for the whole month, as often as `a_second`; return the cost."""
    files = CurveFiles(folder, "c1")
    began_s, batches = time.process_time(), 0
    for number in range(int((month.end_s - BEGAN_S) * a_second)):
        at_s = BEGAN_S + number / a_second
        values = {"loss": 2.0 + 100.0 / (1 + number), "lr": 1e-4}
        event = MetricsLogged(generation=0, rows=((number, values),))
        files.append(at_s, "g0-r0-p1000", event)
        batches += 1
        if files.is_due():
            files.fold(files.begin_next())
    spent_s = time.process_time() - began_s
    return {
        "batches": batches,
        "cpu_us_a_batch": round(spent_s / max(batches, 1) * 1e6, 1),
        "MB": round(sum(p.stat().st_size for p in Path(folder).glob("*")) / 1e6, 2),
    }


def time_command(home: Path, *words: str) -> dict[str, float]:
    """Run a command of perdure's; return seconds, CPU seconds and MB of memory."""
    program = [sys.executable, "-m", "perdure", *words]
    env = os.environ | {"PERDURE_HOME": str(home), "COLUMNS": "120"}
    began_s = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(program, env=env, stdout=output, stderr=output)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        if process.returncode:
            raise SystemExit(f"{words}: {output.read()[-2000:].decode()}")
    return {
        "s": round(time.monotonic() - began_s, 2),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 2),
        "MB": round(usage.ru_maxrss / 1000),
    }


async def measure_takeover(server: NatsServer, folder: Path, month: Month) -> dict[str, Any]:
    """Fill a real stream with the journal, and replay it as a new controller does."""
    spec = month.spec
    journal_path = folder / "jobs" / NAME / "journal.jsonl"
    total = journal_path.read_bytes().count(b"\n") - 1  # All but the job's end.
    before = max(total - EVERY + 1, 1)
    bus = await NatsBus.connect(Endpoint(server.url, server.token, 0.0), timeout_s=10)
    stream = await NatsStream.open(bus, spec.name)
    memory, waiting, size, groups = Memory(spec), list[bytes](), 0, 0
    files = SnapshotFiles(str(folder / "snapshots"))
    snapshot: tuple[int, bytes] | None = None

    async def flush() -> bytes:
        nonlocal groups, size
        data = b"".join(waiting)
        groups += 1
        await stream.append(data, expected_last=groups - 1, message_id=f"g{groups}")
        waiting.clear()
        size = 0
        return data

    with open(journal_path, "rb") as file:  # noqa: ASYNC230 (nothing else goes on)
        journal = Journal(stream, writer="bench", mirror=Mirror(str(folder / "copy.jsonl")))
        for line, entry in EntryReader(file).pairs():
            if isinstance(entry.body, JobEnded):
                break
            waiting.append(line)
            size += len(line)
            if entry.seq <= before:
                memory.replay(entry)
            if size > GROUP_BYTES or entry.seq in (before, total):
                await flush()
            if entry.seq == before:
                journal = Journal(stream, writer="bench", mirror=Mirror(str(folder / "copy.jsonl")))
                await journal.open()
                snapshot = files.render(memory, journal.position())
                files.write(*snapshot)
    result: dict[str, Any] = {"entries": total, "snapshot_MB": 0.0}
    if snapshot is not None:
        result["snapshot_MB"] = round(len(snapshot[1]) / 1e6, 2)
    for name, used in (("with_snapshot", True), ("from_first", False)):
        service = make_service(spec, stream, folder, snapshots=used)
        took_s, cpu_s = await timed(service._remember())
        result[name] = {"s": round(took_s, 2), "cpu_s": round(cpu_s, 2)}
        await service._journal.settle()
    await bus.close()
    return result


def measure(args: argparse.Namespace, home: Path) -> dict[str, Any]:
    """Make the job, then read it."""
    month = Month(args)
    paths = paths_of(str(home), NAME)
    os.makedirs(paths.root)
    write_document(paths.spec, month.spec)
    result: dict[str, Any] = {"journal": write_journal(month, paths.journal)}
    result["curves"] = write_curves(paths.curves, month, args.log_a_second)
    write_document(paths.endpoint, Endpoint("nats://127.0.0.1:1", "x", 0.0))
    result["load"] = round(os.getloadavg()[0], 1)
    page = str(home / "page.html")
    for words in (
        ("report", NAME), ("report", NAME, "--html", page), ("status", NAME), ("diagnose", NAME),
        ("events", NAME), ("metrics", NAME, "--curves"),
    ):  # fmt: skip
        result[" ".join(words[::2])] = time_command(home, *words)
    result["page_MB"] = round(os.path.getsize(page) / 1e6, 2)
    if not args.no_takeover:
        with serve(home) as server:
            result["takeover"] = asyncio.run(measure_takeover(server, home, month))
    result["peak_MB_of_bench"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000
    return result


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=float, default=30.0)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--failure-h", type=float, default=FAILURE_H)
    parser.add_argument("--checkpoint-min", type=float, default=30.0)
    parser.add_argument("--log-a-second", type=float, default=2.0)
    parser.add_argument("--no-takeover", action="store_true")
    parser.add_argument("--keep", type=Path)
    args = parser.parse_args()
    folder = args.keep or Path(tempfile.mkdtemp(prefix="perdure-growth-"))
    try:
        print(json.dumps(measure(args, folder)))
    finally:
        if args.keep is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sweep_after_me()
    main()
