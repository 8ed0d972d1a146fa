"""Live configuration of a torchft script: the same values in all replica groups at the same step.

    from perdure.torchft import config
    config.declare("lr", float, default=1e-3, min=0)     # before the first step

A change is agreed upon by all ranks that train: each promises it while its step is below S, and
one that comes to S waits for the decision, before it asks for the quorum of that step. A group
that heals takes the values over with the state, from the same peer at the same step, and with
them what that peer has promised: so it is bound as if it had been asked. A promise that was made
after the state was handed out names a quorum that the controller has not asked, and is void.
"""

import json
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from perdure.model.actions import ResumeRanks, SendBoundary
from perdure.model.codec import decode, encode
from perdure.model.errors import ConfigError
from perdure.model.events import (
    AnyEvent,
    BoundaryAnswered,
    BoundaryReached,
    CheckpointFailed,
    KeysDeclared,
)
from perdure.model.settings import Change, Steering
from perdure.worker.boundary import PLANS, Agreed, BoundaryGate
from perdure.worker.config import Config
from perdure.worker.settings import plan_steering
from perdure.worker.torchft.checkpoint import ReplicaCheckpoints

STATE_KEY = "perdure"
"""Of the manager's state: what a healing group gets beside the script's own."""
_APPLIED_MAX = 500


class ReplicaConfig:
    """The settings of this rank, and what it has promised about them."""

    def __init__(self) -> None:
        """Hold the script's defaults; `join` connects them to the job."""
        self.config = Config()
        self._gate: BoundaryGate | None = None
        self._emit: Callable[[AnyEvent], object] = lambda event: None
        self._now: Callable[[], float] = lambda: 0.0
        self._quorum_id: Callable[[], int] = lambda: -1
        self._rank = self._generation = -1
        self._group = ""
        self._declares = self._heals = False
        self._checkpoints: ReplicaCheckpoints | None = None
        self._begun = False
        self._told = False
        """The controller knows of the keys."""
        self._applied: list[int] = []
        """Epochs that the values have seen, as far as they can still be told of again."""
        self._lock = threading.Lock()

    def join(
        self,
        *,
        rank: int,
        generation: int,
        nproc: int,
        emit: Callable[[AnyEvent], object],
        ask: Callable[[str], object],
        now: Callable[[], float],
        quorum_id: Callable[[], int],
        steering: Steering,
        checkpoints: ReplicaCheckpoints | None = None,
    ) -> None:
        """Take part in the job's agreements as `rank`; `steering` was agreed upon before."""
        self._checkpoints, self._heals = checkpoints, steering.heals
        self._emit, self._now, self._quorum_id = emit, now, quorum_id
        self._rank, self._generation = rank, generation
        self._group, self._declares = str(rank // nproc), rank % nproc == 0
        gate = BoundaryGate(
            rank=rank, emit=self._answer, ask=ask, check=self.config.find_veto, now=now,
            plans=(*PLANS, "checkpoint"),
        )  # fmt: skip
        plan_steering(gate, self.config, 0, steering)
        self._gate = gate

    # --- control thread -----------------------------------------------------------------------

    def take(self, order: SendBoundary | ResumeRanks) -> None:
        """Take one move of an agreement; a decision concerns also who was not asked."""
        gate = self._gate
        if gate is None or isinstance(order, ResumeRanks):
            return
        with self._lock:
            if order.move == "commit" and order.change is not None and not gate.knows(order.id):
                gate.plan(Agreed(order.id, order.kind, order.step, order.change))
                self._answer(
                    BoundaryAnswered(
                        id=order.id, rank=self._rank, ok=True, step=-1, planned=True
                    )
                )  # fmt: skip
                return
        gate.handle(order)

    def _answer(self, event: AnyEvent) -> None:
        if isinstance(event, BoundaryAnswered):  # Read after the promise was made.
            event = msgspec.structs.replace(event, quorum_id=self._quorum_id())
        self._emit(event)

    # --- training thread ----------------------------------------------------------------------

    def begin_step(self, manager: Any, *, committed: bool) -> None:
        """Come to a step of `manager`: what was agreed for it is in force when this returns.

        `committed` says that this process has committed a step: its values are the job's.
        """
        gate = self._gate
        if not self._begun:
            self._begun = True
            if self.config.specs():
                manager.register_state_dict_fn(STATE_KEY, self.load, self.save)
            self.config.when_declared(_refuse)
            if self._checkpoints is not None and not self._heals:
                self._checkpoints.load(manager)
        if gate is None:
            return
        step = int(manager.current_step())
        if gate.advance(step):
            due = gate.arrive(step)
            self._tell_missed(gate)
            if self._checkpoints is not None and any(a.kind == "checkpoint" for a in due):
                self._checkpoints.save(manager, step)
            for agreed in due:
                if agreed.kind == "checkpoint":
                    self._reach(agreed, step)
                else:
                    self._apply(agreed, step)
        if committed and self._declares and not self._told:
            self._told = True
            self._emit(
                KeysDeclared(
                    generation=self._generation,
                    keys=self.config.specs(),
                    epoch=self.config.epoch,
                    values=dict(self.config),
                    step=step,
                )
            )

    def _tell_missed(self, gate: BoundaryGate) -> None:
        """A checkpoint that was promised will not come."""
        missed = [a.step for a in gate.missed if a.kind == "checkpoint" and self._declares]
        gate.missed.clear()
        for step in missed:
            why = f"the group was left out before step {step}, and has healed past it"
            self._emit(
                CheckpointFailed(
                    generation=self._generation, step=step, error=why, at_s=self._now()
                )
            )

    def _apply(self, agreed: Agreed, step: int) -> None:
        change = agreed.change
        if change is None or change.epoch in self._applied:
            return  # It came with the state that was healed from.
        self.config.apply(change)
        self._applied = [*self._applied[-_APPLIED_MAX:], change.epoch]
        self._reach(agreed, step)

    def _reach(self, agreed: Agreed, step: int) -> None:
        self._emit(BoundaryReached(id=agreed.id, rank=self._rank, step=step, at_s=self._now()))

    # --- healing ------------------------------------------------------------------------------

    def save(self) -> dict[str, str]:
        """Return what a healing peer needs. Called beside training, at the begin of a step."""
        promises = self._gate.promises() if self._gate is not None else ()
        promises = tuple(p for p in promises if p[0].change is not None)
        state = {
            "epoch": self.config.epoch,
            "values": dict(self.config),
            "applied": self._applied,
            "promises": [(encode(agreed).decode(), decided) for agreed, decided in promises],
        }
        return {"state": json.dumps(state)}

    def load(self, saved: dict[str, str]) -> None:
        """Take over a peer's values and promises."""
        state = json.loads(saved["state"])
        values = {n: v for n, v in state["values"].items() if self.config.get(n) != v}
        self.config.apply(Change(epoch=state["epoch"], step=0, values=values))
        self._applied = list(state["applied"])
        if self._gate is None:
            return
        for text, decided in state["promises"]:
            agreed: Agreed = decode(text.encode(), Agreed)
            name = agreed.id.partition("@")[0]
            mine = msgspec.structs.replace(agreed, id=f"{name}@{self._group}")
            with self._lock:
                if self._gate.knows(mine.id):
                    continue
                (self._gate.plan if decided else self._gate.promise)(mine)


def _refuse() -> None:
    raise ConfigError(
        "a setting was declared after the first step",
        hint="declare before it: a group that heals takes settings over with the state",
    )


settings = ReplicaConfig()
"""The one of this process."""
