"""Random changes, undos, pauses and kills: no step ever runs with two values.

The real controller, and the real agreements and configurations of three ranks, in one thread;
messages are late and in any order between ranks. A step that is made again after a kill must run
with the values of the first time, and so must every rank.
"""

import contextlib
from collections import deque
from random import Random
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from perdure.control.machine import Controller
from perdure.model.events import (
    AnyEvent,
    CommandReceived,
    ControllerStarted,
    GenerationStepping,
    GenerationStopped,
    JobSubmitted,
    KeysDeclared,
    NodeRegistered,
    RankExited,
    RankJoined,
    RanksStarted,
    StoreReady,
)
from perdure.model.failures import ExitRecord
from perdure.model.job import JobSpec, RestartConfig
from perdure.model.orders import AnswerCommand, AssignNodes, ResumeRanks, SendBoundary
from perdure.model.signals.progress import Phase, RankAccount
from perdure.model.steering import Pace, Steering
from perdure.worker.progress import Spent
from perdure.worker.settings import plan_steering
from perdure.worker.steering.boundary import Agreed, Interrupted
from perdure.worker.steering.config import Config
from perdure.worker.steering.executor import Depth, Executor

RANKS = 3
SPEC = JobSpec(
    name="j", script="x", nproc=RANKS, restart=RestartConfig(max_restarts=999, same_fault_max=999)
)


class Rank(Depth):
    """What `worker.loop` does about agreements, without waiting."""

    speaks = False

    def __init__(self, cluster: "Cluster", rank: int, saved: tuple[int, Any]) -> None:
        self.cluster, self.rank = cluster, rank
        self.committed, state = saved
        self.config = Config().declare("lr", float, default=0.5, min=0, max=1)
        self.config.restore(state)
        self.executor = Executor(
            self, rank=rank, generation=0, emit=self.say, now=lambda: cluster.now
        )
        self.gate = self.executor.gate
        self.gate.hold = self.stand  # type: ignore[method-assign]
        self.inbox: deque[Any] = deque()
        plan_steering(self.gate, self.config, self.committed, cluster.steering)
        self.gate.advance(self.committed)

    def say(self, event: AnyEvent) -> None:
        self.cluster.outbox[self.rank].append(event)

    def account(self, kind: Spent, phase: Phase = "step") -> None:
        """Time is not looked at here."""

    def save(self, step: int, reason: str) -> None:
        raise AssertionError("nobody has asked for a checkpoint")

    def stand(self, committed: int, account: Any) -> list[Agreed]:
        """Stand in the place of `BoundaryGate.hold`: come back instead of waiting."""
        if committed < self.gate.next_step:
            raise Interrupted
        return self.gate.arrive(committed)

    def hear(self) -> None:
        if self.inbox:
            self.gate.handle(self.inbox.popleft())

    def move(self) -> None:
        """Make a step, unless an agreement or another rank has to be waited for."""
        open_ = [e for e in self.gate._open.values() if e.agreed.step <= self.committed]
        if any(not e.decision for e in open_):
            return
        if self.executor.is_due(self.committed):
            with contextlib.suppress(Interrupted):
                self.executor.stop_at(self.committed)
        if self.gate.holds or self.committed > min(r.committed for r in self.cluster.ranks):
            return
        if self.rank == 0 and self.committed % 7 == 0:
            self.cluster.save(self.committed, self.config.state())
        self.cluster.note(self.committed, self.config["lr"])
        self.committed += 1
        self.gate.advance(self.committed)


class Cluster:
    """One controller, three ranks, and what lies between them."""

    def __init__(self, random: Random) -> None:
        self.random, self.now, self.commands = random, 100.0, 0
        self.machine, self.journal = Controller(), list[tuple[float, AnyEvent]]()
        self.ran: dict[int, Any] = {}
        self.answers: dict[str, AnswerCommand] = {}
        self.saved: tuple[int, Any] = (0, {})
        self.steering, self.ranks = Steering(), list[Rank]()
        self.outbox: list[deque[AnyEvent]] = [deque() for _ in range(RANKS)]
        self.do(JobSubmitted(spec=SPEC, at_s=self.now))
        self.do(ControllerStarted(incarnation="c"))
        self.do(NodeRegistered(node=0, incarnation="a", host="h", boot_id="b", slots=RANKS))
        self.begin()

    def note(self, step: int, value: Any) -> None:
        assert self.ran.setdefault(step, value) == value, f"step {step}: {value}"

    def save(self, step: int, state: Any) -> None:
        self.saved = (step, state)

    def do(self, event: AnyEvent) -> None:
        self.journal.append((self.now, event))
        for action in self.machine.handle(self.now, event):
            match action:
                case SendBoundary() | ResumeRanks():
                    for rank in self.ranks:
                        rank.inbox.append(action)
                case AssignNodes(assignment=assignment) if assignment.phase == "run":
                    self.steering = assignment.steering
                case AnswerCommand():
                    self.answers[action.id] = action
                case _:
                    pass

    def begin(self) -> None:
        """Form the next world, from the newest checkpoint that is not beyond what was made."""
        state = self.machine.state
        generation = state.generation
        self.do(GenerationStopped(node=0, generation=generation - 1, at_s=self.now))
        self.do(StoreReady(generation=generation, host="h", port=1, agent_store=True))
        self.outbox = [deque() for _ in range(RANKS)]
        step = self.saved[0]
        self.ranks = []
        self.ranks = [Rank(self, rank, self.saved) for rank in range(RANKS)]
        pids = dict.fromkeys(range(RANKS), 1)
        self.do(RanksStarted(node=0, generation=generation, pids=pids, at_s=self.now, warm=True))
        for rank in range(RANKS):
            self.do(RankJoined(generation=generation, rank=rank))
        config = self.ranks[0].config
        self.do(
            KeysDeclared(
                generation=generation, keys=config.specs(), epoch=config.epoch,
                values=dict(config), step=step,
            )
        )  # fmt: skip
        self.do(GenerationStepping(generation=generation, at_s=self.now, step=step))

    def kill(self) -> None:
        state = self.machine.state
        for rank in self.ranks:
            record = ExitRecord(
                rank=rank.rank, generation=state.generation, pid=1, at_s=self.now, signal=9
            )
            account = RankAccount(step=rank.committed)
            self.do(RankExited(node=0, record=record, account=account, detected_s=self.now))
        self.begin()

    def replace_controller(self) -> None:
        successor = Controller()
        for now, event in self.journal:
            successor.handle(now, event)
        assert repr(successor.state) == repr(self.machine.state)
        self.machine = successor
        self.do(ControllerStarted(incarnation="c"))

    def command(self, kind: Any, **args: Any) -> None:
        self.commands += 1
        id_ = f"{kind}{self.commands}"
        self.do(
            CommandReceived(
                id=id_, kind=kind, args=args, who="me", at_s=self.now, pace=self.guess()
            )
        )

    def guess(self) -> Pace | None:
        """Return what heartbeats might say of the ranks: nothing, the truth, or far from it."""
        step = max(r.committed for r in self.ranks) + self.random.choice((-3, 0, 0, 1, 40))
        step_s = self.random.choice((0.001, 0.01, 5.0))
        told = Pace(
            generation=self.machine.state.generation,
            step=max(0, step),
            at_s=self.now,
            step_s=step_s,
        )
        return self.random.choice((None, told, told))

    def act(self) -> None:
        self.now += 0.001
        what = self.random.choice("mmmmmmmmhhhhhhtttttttsuepkc")
        rank = self.random.randrange(RANKS)
        match what:
            case "m":
                self.ranks[rank].move()
            case "h":
                self.ranks[rank].hear()
            case "t":
                if self.outbox[rank]:
                    self.do(self.outbox[rank].popleft())
            case "s":
                self.command("set", changes={"lr": self.random.randrange(11) / 10})
            case "u":
                self.command("set", undo=True)
            case "e":
                at = max(r.committed for r in self.ranks) + self.random.randrange(1, 20)
                self.command("set", changes={"lr": self.random.randrange(11) / 10}, at=at)
            case "p":
                self.command(self.random.choice(["pause", "resume"]))
            case "k" if self.random.random() < 0.2:
                self.kill()
            case "c" if self.random.random() < 0.3:
                self.replace_controller()
            case _:
                pass


@given(st.integers(0, 10**9))
@example(709)
@settings(max_examples=6, deadline=None)
def test_no_step_runs_with_two_values(seed: int) -> None:
    cluster = Cluster(Random(seed))
    for _ in range(600):
        cluster.act()
    cluster.command("resume")
    for _ in range(400):
        for rank in range(RANKS):
            cluster.ranks[rank].hear()
            cluster.ranks[rank].move()
            if cluster.outbox[rank]:
                cluster.do(cluster.outbox[rank].popleft())
    open_ = [c for c in cluster.machine.state.commands.values() if "at" not in c.args]
    assert open_ == []
    lr = {
        rank.config["lr"] for rank in cluster.ranks if rank.committed == cluster.ranks[0].committed
    }
    assert len(lr) == 1
