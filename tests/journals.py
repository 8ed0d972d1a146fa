"""Synthetic journals: a job told in stamps, so that the folds over it can be checked."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from perdure.model.chain import FIRST, seal
from perdure.model.codec import encode
from perdure.model.events import (
    AnyEvent,
    CheckpointRestored,
    CheckpointSaved,
    CommandReceived,
    ControllerLost,
    Decision,
    GenerationStepping,
    GenerationStopped,
    JobEnded,
    JobSubmitted,
    JournalEntry,
    MetricsLogged,
    NodeRegistered,
    ProgressNoted,
    RankExited,
    RanksStarted,
    StoreReady,
    VerdictReached,
)
from perdure.model.failures import ExitRecord
from perdure.model.job import JobSpec
from perdure.model.signals.progress import RankAccount
from perdure.model.verdicts import Culprit, Verdict
from perdure.service.curves import CurveFiles
from perdure.telemetry.curves import Curves
from perdure.telemetry.series import Series, SeriesFold
from tests.decider import Decider

_STAMPS = ("spawned", "script", "init", "group", "restored", "first_step")


@dataclass
class Story:
    """A job whose ranks step together; every method moves `now` on and writes entries."""

    nproc: int = 2
    nodes: int = 1
    spares: int = 0
    nodes_max: int = 0
    resumable: bool = True
    step_s: float = 0.2
    checkpoint_every: int = 5
    now: float = 1000.0
    entries: list[JournalEntry] = field(default_factory=list)
    drop: frozenset[str] = frozenset()
    """Names of stamps that are never written."""
    compile_s: float = 0.0
    """What torch compiles for in a rank's first step of each generation."""

    def __post_init__(self) -> None:
        self.spec = JobSpec(
            name="job", script="x.py", nproc=self.nproc, nodes=self.nodes, spares=self.spares,
            nodes_max=self.nodes_max,
        )  # fmt: skip
        self.generation = -1
        self.decider = Decider()
        self.step = self.saved = 0
        self.logged: list[tuple[float, MetricsLogged]] = []
        self.accounts: dict[int, RankAccount] = {}
        self.write(JobSubmitted(spec=self.spec, at_s=self.now))

    def write(self, body: AnyEvent | Decision, at_s: float | None = None) -> None:
        if type(body).__name__ not in self.drop:
            at = self.now if at_s is None else at_s
            self.entries.append(JournalEntry(seq=len(self.entries) + 1, at_s=at, body=body))
            for told in self.decider.take(self.entries[-1]):
                seq = len(self.entries) + 1
                self.entries.append(JournalEntry(seq=seq, at_s=at, body=told.body))

    def decide(self, summary: str) -> None:
        self.write(Decision(action="AssignNodes", summary=summary, reason=summary))

    def start(self) -> None:
        """Start the next generation and bring it to its first step."""
        self.generation += 1
        g = self.generation
        self.write(StoreReady(generation=g, host="127.0.0.1", port=1, agent_store=True))
        self.now += 0.01
        self.decide(f"run generation {g}")
        self.now += 0.05
        for node in range(self.nodes):
            pids = {r: 100 + r for r in self.spec.ranks_of(node)}
            self.write(RanksStarted(node=node, generation=g, pids=pids, at_s=self.now, warm=True))
        self.step = self.saved
        begun = self.now
        for rank in range(self.spec.world_size):
            late = 0.003 * rank
            stamps = {f"{n}_s": begun + 0.1 * i + late for i, n in enumerate(_STAMPS)}
            if not self.resumable:
                stamps = {}
            stamps = {n: s for n, s in stamps.items() if n not in self.drop}
            steps = {"start_step": self.step, "step": self.step} if self.resumable else {}
            self.accounts[rank] = RankAccount(**steps, **stamps)
            if self.resumable:
                restored = CheckpointRestored(
                    generation=g, rank=rank, step=self.step, path="p" if self.step else ""
                )
                self.write(restored)
        self.now = begun + 0.52
        self.note()
        stepping = GenerationStepping(
            generation=g, at_s=self.now, step=self.step, stamps={"first_step": self.now}
        )
        self.write(stepping)

    def note(self) -> None:
        step = self.step if self.resumable else -1
        accounts = dict(self.accounts)
        self.write(
            ProgressNoted(generation=self.generation, at_s=self.now, step=step, accounts=accounts)
        )

    def log(self, *values: dict[str, float]) -> None:
        """Have `run.log` tell values, from this step on."""
        rows = tuple(enumerate(values, self.step))
        self.logged.append((self.now, MetricsLogged(generation=self.generation, rows=rows)))

    @property
    def curves(self) -> Curves:
        """What was told, as curves."""
        curves = Curves()
        for at_s, event in self.logged:
            curves.take(at_s, "", event.rows, 0)
        return curves

    def lay_curves(self, folder: Path) -> None:
        """Write what was told to a job's folder."""
        files = CurveFiles(str(folder / "curves"), "test")
        for at_s, event in self.logged:
            files.append(at_s, "", event)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.now += self.step_s
            self.step += 1
            save = self.checkpoint_every and self.step % self.checkpoint_every == 0
            for rank, a in self.accounts.items():
                if not self.resumable:
                    continue
                covered = self.now - (a.last_step_s or a.first_step_s)
                stall = 0.01 if save else 0.0
                step_s = a.step_s + covered - stall - 0.001
                self.accounts[rank] = msgspec.structs.replace(
                    a,
                    step=self.step,
                    step_s=step_s,
                    checkpoint_s=a.checkpoint_s + stall,
                    overhead_s=a.overhead_s + 0.001,
                    last_step_s=self.now,
                    compile_s=self.compile_s,
                    marks=(*a.marks, (self.step, step_s)) if save else a.marks,
                )
            self.log({"loss": 5.0 / self.step})
            if save and self.resumable:
                self.saved = self.step
                self.write(
                    CheckpointSaved(
                        generation=self.generation,
                        step=self.step,
                        path=f"checkpoints/step-{self.step:08d}",
                        bytes=1000,
                        stall_s=0.01,
                        save_s=0.1,
                        at_s=self.now,
                    )
                )
            if self.step % 10 == 0:
                self.note()

    def exit(self, rank: int, at_s: float, *, code=0, signal=0, asked=False, error="") -> None:
        record = ExitRecord(
            rank=rank,
            generation=self.generation,
            pid=100 + rank,
            at_s=at_s,
            code=code,
            signal=signal,
            asked=asked,
            error=error,
        )
        node = self.spec.node_of(rank)
        account = self.accounts[rank]
        self.write(
            RankExited(node=node, record=record, account=account, detected_s=at_s + 0.01),
            at_s + 0.012,
        )

    def crash(self, rank: int = 0, signal: int = 9) -> float:
        """A rank dies in the middle of a step; the world goes down. Returns when it died."""
        self.now += self.step_s / 2
        died = self.now
        self.exit(rank, died, signal=signal)
        self.now += 0.02
        self._take_down(rank)
        return died

    def hang(self, rank: int = 0) -> float:
        """A rank is stopped in the middle of a step. Returns when it was last well."""
        verdict = self.suspect(rank)
        self.now += 0.5
        self.write(VerdictReached(verdict=msgspec.structs.replace(verdict, actionable=True)))
        self.now += 0.01
        self._take_down(None)
        return verdict.first_seen_s

    def suspect(self, rank: int = 0) -> Verdict:
        """A rank hangs in the middle of a step, and it is found."""
        self.now += self.step_s / 2
        well = self.now
        self.now += 1.2
        verdict = Verdict(
            kind="ComputeHang",
            culprit=Culprit(rank=rank),
            generation=self.generation,
            first_seen_s=well,
            confirmed_s=self.now,
            confidence=0.98,
            reason=f"rank {rank} is stopped",
            activity="stopped",
            step=self.step if self.resumable else -1,
        )
        self.write(VerdictReached(verdict=verdict))
        return verdict

    def stop(self) -> None:
        """Somebody ends the job, whose ranks are killed."""
        self.write(CommandReceived(id=f"stop-{self.now}", kind="kill", who="al", at_s=self.now))
        self._take_down(None)
        self.finish("stopped")

    def _take_down(self, dead: int | None) -> None:
        self.decide("restart the world")
        self.now += 0.08
        for rank in range(self.spec.world_size):
            if rank != dead:
                self.exit(rank, self.now, signal=9, asked=True)
        self.now += 0.02
        for node in range(self.nodes):
            self.write(GenerationStopped(node=node, generation=self.generation, at_s=self.now))

    def register(self, node: int, generation: int) -> None:
        """An agent comes, whose keeper has `generation`."""
        self.write(
            NodeRegistered(
                node=node, incarnation=f"a{len(self.entries)}", host="h", boot_id="b",
                slots=self.nproc, generation=generation,
            )
        )  # fmt: skip

    def lose_controller(self) -> None:
        self.write(
            ControllerLost(
                part="controller",
                at_s=self.now,
                pid=7,
                cause="signal 9 (SIGKILL)",
                restarted_s=self.now + 0.3,
            )
        )

    def finish(self, status="done") -> None:
        if status == "done":
            for rank, account in self.accounts.items():
                if self.resumable:
                    done = msgspec.structs.replace(account, finished_s=self.now + 0.001)
                    self.accounts[rank] = done
                self.exit(rank, self.now + 0.05)
            self.now += 0.1
            for node in range(self.nodes):
                stopped = GenerationStopped(node=node, generation=self.generation, at_s=self.now)
                self.write(stopped)
        self.now += 0.02
        code = 0 if status == "done" else 1
        self.write(JobEnded(status=status, exit_code=code, reason=status, at_s=self.now))

    def without(self, *names: str) -> "Story":
        """The same job, told anew by `tell`, with these stamps or events missing."""
        return replace(self, entries=[], drop=frozenset(names), now=1000.0)


def tell(story: Story) -> Story:
    """A job with a crash, a hang and a lost controller."""
    story.now += 1.0
    story.decide("first generation")
    story.start()
    story.train(23)
    story.crash(1 % story.spec.world_size)
    story.start()
    story.train(21)
    story.lose_controller()
    story.train(6)
    story.hang(0)
    story.start()
    story.train(60)
    story.finish()
    return story


def render_journal(entries: Iterable[JournalEntry]) -> bytes:
    """Return the lines of a journal that has these entries."""
    return b"".join(reseal([encode(entry) + b"\n" for entry in entries]))


def reseal(groups: Iterable[bytes], before: bytes = b"", after: bytes = b"") -> list[bytes]:
    """Return another journal's groups: the same, with `after` in the place of `before`."""
    sealed, hash_ = [], FIRST
    for group in groups:
        lines = []
        for line in group.replace(before, after).splitlines() if before else group.splitlines():
            text, _, _ = line.partition(b',"after":"')
            line, hash_ = seal(text + b"}" * (text != line), hash_)
            lines.append(line)
        sealed.append(b"".join(lines))
    return sealed


def make_series(
    entries: Iterable[JournalEntry], now: float, curves: Curves | None = None
) -> Series:
    """Return the series of a whole journal, and of what `run.log` has told."""
    fold = SeriesFold()
    for entry in entries:
        fold.add(entry)
    return fold.series(fold.ledger.segments(now), curves)
