"""Plays the rest of the world to a controller."""

from typing import Any

from msgspec import convert

from perdure.control.machine import Controller
from perdure.model.events import (
    BoundaryAnswered,
    ControllerStarted,
    GenerationStepping,
    GenerationStopped,
    JobSubmitted,
    NodeRegistered,
    OwnChecked,
    RankExited,
    RankJoined,
    RanksStarted,
    StoreReady,
    VerdictReached,
)
from perdure.model.failures import ExitRecord
from perdure.model.job import JobSpec
from perdure.model.orders import AnyAction, SendBoundary
from perdure.model.signals.progress import RankAccount
from perdure.model.verdicts import Culprit, Verdict


class Driver:
    """Plays the rest of the world."""

    def __init__(self, **spec: Any) -> None:
        self.spec = convert({"name": "j", "script": "train.py", "nproc": 2} | spec, JobSpec)
        self.controller = Controller()
        self.now = 100.0
        self.log: list[Any] = []
        self.do(JobSubmitted(spec=self.spec, at_s=self.now))
        self.do(ControllerStarted(incarnation="c1"))

    def do(self, event: Any) -> list[AnyAction]:
        self.log.append((self.now, event))
        return self.controller.handle(self.now, event)

    def register(self, node: int = 0, **fields: Any) -> list[AnyAction]:
        known = {"incarnation": f"a{node}", "host": "h", "boot_id": "b", "slots": 2}
        return self.do(NodeRegistered(node=node, **known | fields))

    def run(self) -> None:
        """Bring the newest generation to its first step."""
        generation = self.controller.state.generation
        nodes = range(self.spec.nodes)
        for node in nodes:
            self.do(GenerationStopped(node=node, generation=generation - 1, at_s=self.now))
        self.do(StoreReady(generation=generation, host="h", port=7, agent_store=True))
        for node in nodes if self.spec.checkpoint.own else ():
            self.do(OwnChecked(node=node, generation=generation, at_s=self.now))
        for node in nodes:
            pids = {rank: 1000 + rank for rank in self.spec.ranks_of(node)}
            self.do(
                RanksStarted(node=node, generation=generation, pids=pids, at_s=self.now, warm=True)
            )
        for rank in range(self.spec.world_size):
            self.do(RankJoined(generation=generation, rank=rank))
        self.do(GenerationStepping(generation=generation, at_s=self.now, step=0))

    def exit(self, rank: int, step: int = 10, **how: Any) -> list[AnyAction]:
        generation = self.controller.state.generation
        record = ExitRecord(rank=rank, generation=generation, pid=1, at_s=self.now, **how)
        account = RankAccount(step=step)
        return self.do(RankExited(node=0, record=record, account=account, detected_s=self.now))


def one(actions: list[AnyAction], kind: type) -> Any:
    """Return the only action of `kind`."""
    found = [action for action in actions if isinstance(action, kind)]
    assert len(found) == 1, actions
    return found[0]


def started(**spec: Any) -> Driver:
    driver = Driver(**spec)
    for node in range(driver.spec.nodes):
        driver.register(node)
    driver.run()
    assert driver.controller.state.phase == "running"
    return driver


def agree(driver: Driver, sent: SendBoundary, step: int = 0) -> SendBoundary:
    """Let all ranks say yes; return the commit."""
    driver.do(BoundaryAnswered(id=sent.id, rank=0, ok=True, step=step))
    commit = one(driver.do(BoundaryAnswered(id=sent.id, rank=1, ok=True, step=step)), SendBoundary)
    assert commit.move == "commit"
    return commit


def verdict(actionable: bool) -> VerdictReached:
    return VerdictReached(
        verdict=Verdict(
            kind="ComputeHang", culprit=Culprit(rank=1), generation=0, first_seen_s=1.0,
            confirmed_s=2.0, confidence=0.9, reason="r", actionable=actionable, activity="stopped",
        )
    )  # fmt: skip
