"""A picture made of kept rows equals the one that a fold makes that has kept nothing.

Whatever happened, in whatever order, and whenever somebody has looked in between.
"""

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.examples import examples

from perdure.model.events import (
    AnyEvent,
    Decision,
    DeviceReported,
    GenerationStepping,
    GenerationStopped,
    JobSubmitted,
    JournalEntry,
    KeeperLost,
    NodeCordoned,
    NodeDraining,
    NodeLost,
    NodeRegistered,
    NodeRestored,
    ProgressNoted,
    RankExited,
    RankJoined,
    RanksStarted,
    VerdictReached,
    VerdictWithdrawn,
)
from perdure.model.failures import ExitRecord
from perdure.model.job import JobSpec, TorchftConfig
from perdure.model.signals.devices import DeviceSample, Xid
from perdure.model.signals.progress import (
    CommProgress,
    NodeBeat,
    ProcSample,
    RankAccount,
    RankProgress,
)
from perdure.model.verdicts import Culprit, Verdict
from perdure.telemetry.live.snapshot import SnapshotFold

NPROC, NODES = 2, 3
WORLDS = {
    "ddp": JobSpec(name="j", script="x.py", nproc=NPROC, nodes=2, spares=1),
    "torchft": JobSpec(name="j", script="x.py", nproc=NPROC, torchft=TorchftConfig(replicas=3)),
}
PHASES = ("script", "init", "step", "checkpoint", "boundary", "paused", "finished")


class Told:
    """Turns numbers into what may happen, and gives it to a fold."""

    def __init__(self, spec: JobSpec) -> None:
        self.spec, self.now, self.generation = spec, 100.0, 0
        self.said: list[JournalEntry | NodeBeat] = []

    def take(self, what: int, a: int, b: int) -> None:
        """Let something happen that depends on three numbers."""
        node, rank = a % NODES, (a // NODES) % (NODES * NPROC)
        self.now += (0.1, 0.5, 3.0, 70.0)[b % 4]
        if what < 8:
            self.said.append(self.beat(node, a, b))
            return
        event = self.event(what, node, rank, b)
        entry = JournalEntry(seq=len(self.said) + 1, at_s=self.now, body=event)
        self.said.append(entry)

    def beat(self, node: int, a: int, b: int) -> NodeBeat:
        ranks = []
        for slot in range(a % 4 and NPROC):
            rank = ((a // 5 if b % 7 == 0 else node) * NPROC + slot) % (NODES * NPROC)
            account = RankAccount(
                step=b // 3 - 1, init_s=float(b % 2), first_step_s=float(b % 3),
                last_step_s=self.now - b % 5,
            )  # fmt: skip
            comms = tuple(
                CommProgress(f"c{i}", 2, 7, 6 + b % 2, "allreduce", self.now - i - b % 3)
                for i in range(b % 3)
            )
            phase: Any = PHASES[(a + slot) % len(PHASES)]
            ranks.append(
                RankProgress(rank, 100 + a % 3, phase, 0.0, self.now, account, comms,
                             ProcSample("S", float(a), 0, a))
            )  # fmt: skip
        looks = tuple(
            DeviceSample(device=f"d{node}-{i}", at_s=self.now - 30 * (a % 2),
                         ranks=tuple(r.rank for r in ranks[: a % 3]),
                         xids=(Xid(13, 1.0),) if b % 5 == 0 else ())
            for i in range(b % 3)
        )  # fmt: skip
        generation = self.generation - (b % 11 == 0)
        return NodeBeat(
            node, "a", len(self.said), self.now, generation, tuple(ranks), devices=looks
        )

    def event(self, what: int, node: int, rank: int, b: int) -> AnyEvent | Decision:
        now, generation = self.now, self.generation
        culprit = Culprit(rank=rank) if b % 3 else Culprit(node=node)
        verdict = Verdict(
            kind="ComputeHang", culprit=culprit, generation=generation, first_seen_s=float(b % 4),
            confirmed_s=now, confidence=1.0, reason="stands", actionable=b % 2 == 0,
        )  # fmt: skip
        match what:
            case 8:
                ids = tuple(f"d{node}-{i % (b % 3 or 1)}" for i in range(NPROC))
                return NodeRegistered(
                    node=node,
                    incarnation="a",
                    host=f"h{b % 2}",
                    boot_id="b",
                    slots=NPROC,
                    device_ids=ids,
                )
            case 9:
                record = ExitRecord(generation=generation, rank=rank, pid=1, at_s=now, code=b % 2)
                return RankExited(
                    node=node, account=RankAccount(step=b), detected_s=now, record=record
                )
            case 10:
                return GenerationStepping(generation=generation, at_s=now)
            case 11:
                return VerdictReached(verdict=verdict)
            case 12:
                return VerdictWithdrawn(verdict=verdict, at_s=now, reason="moved")
            case 13:
                return NodeLost(node=node, at_s=now, reason="silent")
            case 14:
                return NodeCordoned(node=node, at_s=now, reason="sick")
            case 15:
                return NodeRestored(node=node, at_s=now, reason="well")
            case 16:
                return NodeDraining(node=node, at_s=now, reason="asked", over=b % 2 == 0)
            case 17:
                device = f"d{node}-{b % 2}" if b % 3 else f"node {node}"
                return DeviceReported(
                    device=device, node=node, at_s=now, healthy=b % 4 == 0, reason="XID 79"
                )
            case 18:
                accounts = {rank: RankAccount(step=b)}
                return ProgressNoted(generation=generation, at_s=now, step=b, accounts=accounts)
            case 19:
                return GenerationStopped(node=node, generation=generation, at_s=now)
            case 20:
                return KeeperLost(node=node, generation=generation, at_s=now)
            case 21:
                return RankJoined(generation=generation, rank=rank)
            case 22:
                return Decision(action="AssignNodes", summary="x", reason=f"because {b}")
            case _:
                return self.start(node, b)

    def start(self, node: int, b: int) -> RanksStarted:
        self.generation += b % 2
        pids = {(node * NPROC + slot + b % 2) % (NODES * NPROC): b for slot in range(NPROC)}
        return RanksStarted(node=(node + b % 3) % NODES, generation=self.generation, pids=pids,
                            at_s=self.now, warm=True)  # fmt: skip


def tell(fold: SnapshotFold, said: JournalEntry | NodeBeat) -> None:
    if isinstance(said, NodeBeat):
        fold.take_beat(said.sent_s, said)
    else:
        fold.add(said)


@pytest.mark.parametrize("world", sorted(WORLDS))
@settings(max_examples=examples(60), deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 25), st.integers(0, 400), st.integers(0, 60), st.booleans()),
        min_size=10,
        max_size=60,
    )
)
@example(  # A group begins anew, and tells of ranks of another one.
    steps=[(23, 308, 1, False), (9, 0, 1, False), (23, 189, 25, False), (0, 170, 1, True),
           (23, 253, 26, False)]
)  # fmt: skip
def test_kept_rows_are_those_that_a_new_fold_makes(
    world: str, steps: list[tuple[int, int, int, bool]]
) -> None:
    spec = WORLDS[world]
    told, fold, known = Told(spec), SnapshotFold(spec), 1
    told.said.append(JournalEntry(seq=1, at_s=100.0, body=JobSubmitted(spec=spec, at_s=100.0)))
    tell(fold, told.said[0])
    for what, a, b, look in [*steps, (0, 0, 0, True)]:
        told.take(what, a, b)
        tell(fold, told.said[known])
        known += 1
        if not look:
            continue
        scratch = SnapshotFold(spec)
        for said in told.said:
            tell(scratch, said)
        assert fold.snapshot(told.now) == scratch.snapshot(told.now)


def test_rows_that_did_not_change_are_the_same_objects() -> None:
    told = Told(WORLDS["ddp"])
    fold = SnapshotFold(told.spec)
    for node in range(2):
        told.take(8, node, 2)
        told.take(23, node, 6)
        told.take(0, node + 3 * NODES, 2)
    for said in told.said:
        tell(fold, said)
    first = fold.snapshot(told.now)
    fold.take_beat(told.now, told.beat(0, 3 * NODES, 2))
    second = fold.snapshot(told.now)
    kept = [row is old for row, old in zip(second.ranks, first.ranks, strict=True)]
    assert kept == [False, False, True, True]
    pairs = zip(second.devices, first.devices, strict=True)
    assert {(row.node, row is old) for row, old in pairs} == {(0, False), (1, True)}
