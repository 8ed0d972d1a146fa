"""A torchft job's controller and the rest of the world."""

from typing import Any

from perdure.control.machine import Controller
from perdure.model.events import (
    AnyEvent,
    CommandReceived,
    GenerationStopped,
    JobSubmitted,
    NodeRegistered,
    QuorumFormed,
    RankExited,
    RanksStarted,
    ReplicaSeen,
    StoreReady,
)
from perdure.model.failures import ExitRecord
from perdure.model.job import JobSpec, TorchftConfig
from perdure.model.orders import AnswerCommand, AnyAction
from perdure.model.signals.progress import RankAccount
from perdure.model.steering import Pace


class Lab:
    def __init__(
        self, spares: int = 0, *, observe: bool = False, nproc: int = 1, **config: Any
    ) -> None:
        self.machine, self.now, self.actions = Controller(), 100.0, list[AnyAction]()
        self.log: list[tuple[float, AnyEvent]] = []
        self.count = 3 + spares
        torchft = TorchftConfig(replicas=3, **config)
        self.spec = spec = JobSpec(
            script="x.py", nodes=3, nproc=nproc, spares=spares * nproc, torchft=torchft,
            observe=observe,
        )  # fmt: skip
        self.add(JobSubmitted(spec=spec, at_s=100.0))
        for node in range(self.count):
            self.add(
                NodeRegistered(node=node, incarnation="a", host="127.0.0.1", boot_id="b", slots=1)
            )
        for group in range(self.count):
            self.start(group)
            if torchft.lighthouse == "perdure":
                self.see(group)
        if torchft.lighthouse == "perdure":
            self.form(0, 1, 2)

    def add(self, event: AnyEvent) -> list[AnyAction]:
        self.now += 0.01
        self.log.append((self.now, event))
        self.actions = self.machine.handle(self.now, event)
        return self.actions

    def generation(self, group: int) -> int:
        return self.machine.state.worlds[group].generation

    def name(self, group: int) -> str:
        return f"t_{group}:{self.generation(group)}"

    def start(self, group: int) -> list[AnyAction]:
        number = self.generation(group)
        self.add(GenerationStopped(node=group, generation=number - 1, at_s=self.now))
        ready = self.add(
            StoreReady(generation=number, host="127.0.0.1", port=4000 + number, agent_store=True)
        )
        self.add(
            RanksStarted(node=group, generation=number, pids={group: 9}, at_s=self.now, warm=True)
        )
        return ready

    def see(self, group: int, **more: Any) -> list[AnyAction]:
        return self.add(ReplicaSeen(replica=self.name(group), group=group, at_s=self.now, **more))

    def form(self, *groups: int, step: int = 10) -> None:
        names = tuple(self.name(group) for group in groups)
        self.add(QuorumFormed(quorum_id=5, step=step, members=names, at_s=self.now))

    def exit(
        self, group: int, *, local: int = 0, generation: int = -1, step: int = -1, **how: Any
    ) -> list[AnyAction]:
        how = {"at_s": self.now, **how}
        record = ExitRecord(
            rank=group * self.spec.nproc + local,
            generation=generation if generation >= 0 else self.generation(group),
            pid=9,
            **how,
        )
        return self.add(
            RankExited(
                node=group, record=record, account=RankAccount(step=step), detected_s=self.now
            )
        )

    def find(self, kind: type) -> Any:
        return next((a for a in self.actions if isinstance(a, kind)), None)

    def ask(
        self, kind: Any, *targets: str, id_: str = "", pace: Pace | None = None, **args: Any
    ) -> AnswerCommand | None:
        """Give a command; return its answer, if there is one already."""
        given = {"targets": list(targets), **args} if targets else args
        id_ = id_ or f"{kind}-{self.now}"
        self.add(CommandReceived(id=id_, kind=kind, args=given, who="me", pace=pace))
        return self.answer()

    def answer(self) -> AnswerCommand | None:
        found = self.find(AnswerCommand)
        assert found is None or isinstance(found, AnswerCommand)
        return found

    def stop(self, group: int) -> AnswerCommand | None:
        """Say that nothing of the group's newest generation is left."""
        number = self.generation(group)
        self.add(GenerationStopped(node=group, generation=number, at_s=self.now))
        return self.answer()

    def phases(self) -> list[str]:
        return [g.phase for _, g in sorted(self.machine.state.worlds.items())]
