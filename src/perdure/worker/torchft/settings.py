"""Live configuration of a torchft script: the same values in all replica groups at the same step.

    from perdure.torchft import config
    config.declare("lr", float, default=1e-3, min=0)     # before the first step

A change is agreed upon by all ranks that train: each promises it while its step is below S, and
one that comes to S waits for the decision, before it asks for the quorum of that step. A group
that heals takes the values over with the state, from the same peer at the same step, and with
them what that peer has promised: so it is bound as if it had been asked. A promise that was made
after the state was handed out names a quorum that the controller has not asked, and is void.

A checkpoint is what the Manager would hand to a healing peer, written down.
One group saves, since all have the same state at a step, before it begins that step. The next run
of the job loads it before a group's first quorum, unless others train already, from whom it then
heals. Random generators are each group's own and are left alone; where the data goes on is the
script's business, which knows it by `manager.current_step()`.
"""

import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from perdure.model.codec import decode, encode
from perdure.model.errors import ConfigError
from perdure.model.events import AnyEvent, BoundaryAnswered
from perdure.model.job import CheckpointConfig
from perdure.model.orders import ResumeRanks, SendBoundary
from perdure.model.steering import Change, Steering
from perdure.worker.control import Control
from perdure.worker.settings import plan_steering, read_checkpoint_url
from perdure.worker.steering.boundary import ORPHAN_S, PLANS, Agreed
from perdure.worker.steering.cells import open_cells
from perdure.worker.steering.config import Config
from perdure.worker.steering.executor import Depth, Executor
from perdure.worker.system.stderr import say


class _State:
    """The manager's state, with its own step, as something that is saved and loaded."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def state_dict(self) -> dict[str, Any]:
        return dict(self._manager._manager_state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        user = state["user"]
        for key, load in self._manager._load_state_dict_fns.items():
            if key in user:
                load(user[key])
        self._manager.load_state_dict(state["torchft"])


def _holds_any(url: str) -> bool:
    """Whether there may be a checkpoint; of what is no directory here it is not known."""
    if not url:
        return False
    if "://" in url and not url.startswith("file://"):
        return True
    try:
        return bool(os.listdir(url.removeprefix("file://")))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


STATE_KEY = "perdure"
"""Of the manager's state: what a healing group gets beside the script's own."""
_APPLIED_MAX = 500


class ReplicaConfig(Depth):
    """The settings of this rank, and what it has promised about them."""

    def __init__(self) -> None:
        """Hold the script's defaults; `join` connects them to the job."""
        self.config = Config()
        self._emit: Callable[[AnyEvent], object] = lambda event: None
        self._quorum_id: Callable[[], int] = lambda: -1
        self._executor = self._make_executor(-1, 0, time.monotonic, None)
        """Of a script alone, nobody asks it anything."""
        self._manager: Any = None
        """The one that has come to a step, while it is there."""
        self._rank = -1
        self._group = ""
        self._speaks = self._heals = False
        self._saves: dict[str, Any] | None = None
        """Which checkpoints there are: those of this rank of the group."""
        self._saver: Any = None
        """What saves and loads them; not there before the first is wanted."""
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
        now: Callable[[], float],
        quorum_id: Callable[[], int],
        steering: Steering,
        line: Control | None = None,
        checkpoint: CheckpointConfig | None = None,
        orphan_s: float = ORPHAN_S,
    ) -> None:
        """Take part in the job's agreements as `rank`; `steering` was agreed upon before.

        With `checkpoint` the state of the group is saved and loaded. A decision is waited for at
        most `orphan_s`.
        """
        self._heals = steering.heals
        self._emit, self._quorum_id, self._rank = emit, quorum_id, rank
        self._group, self._speaks = str(rank // nproc), rank % nproc == 0
        self._executor = self._make_executor(rank, generation, now, line, orphan_s)
        if checkpoint is not None:
            self._saves = {
                "url": read_checkpoint_url(checkpoint),
                "config": checkpoint,
                "rank": rank % nproc,
                "world_size": nproc,
                "generation": generation,
                "emit": emit,
                "now": now,
                "open_cells": open_cells,
            }
        plan_steering(self._executor.gate, self.config, 0, steering)

    def _make_executor(
        self,
        rank: int,
        generation: int,
        now: Callable[[], float],
        line: Control | None,
        orphan_s: float = ORPHAN_S,
    ) -> Executor:
        return Executor(
            self,
            rank=rank,
            generation=generation,
            emit=self._answer,
            now=now,
            line=line,
            plans=(*PLANS, "checkpoint"),
            orphan_s=orphan_s,
        )

    # --- control thread -----------------------------------------------------------------------

    def take(self, order: SendBoundary | ResumeRanks) -> None:
        """Take one move of an agreement; a decision concerns also who was not asked."""
        gate = self._executor.gate
        if isinstance(order, ResumeRanks):
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
        if not self._begun:
            self._begun = True
            if self.config.specs():
                manager.register_state_dict_fn(STATE_KEY, self.load_state, self.save_state)
            self.config.when_declared(_refuse)
            self._load(manager)
        executor, step = self._executor, int(manager.current_step())
        if executor.is_due(step):
            self._manager = manager
            executor.stop_at(step)
            self._manager = None
            self._tell_missed(executor)
        if committed and not self._told:
            self._told = True
            executor.declare(again=False)

    def _tell_missed(self, executor: Executor) -> None:
        """A checkpoint that was promised will not come."""
        missed = [one.step for one in executor.gate.missed if one.kind == "checkpoint"]
        executor.gate.missed.clear()
        for step in missed:
            why = f"the group was left out before step {step}, and has healed past it"
            executor.tell_failed(step, why)

    def _load(self, manager: Any) -> None:
        """Load the newest checkpoint, where there is one and the script has loaded none itself."""
        if self._saves is None or self._heals or manager.current_step() != 0:
            return
        if _holds_any(self._saves["url"]):
            from perdure.worker.rng import capture_rng, restore_rng

            own = capture_rng()
            step = self._open(manager).restore({})
            restore_rng(own)
            if step:
                say(f"goes on from the checkpoint of step {step}")

    def _open(self, manager: Any) -> Any:
        if self._saver is None and self._saves is not None:
            from perdure.worker.checkpoint import Checkpointer

            self._saver = Checkpointer(**self._saves)
            self._saver.register("torchft", _State(manager))
        return self._saver

    # --- as a depth ---------------------------------------------------------------------------

    @property
    def speaks(self) -> bool:
        """Whether this rank is the first of its group."""
        return self._speaks

    def apply(self, change: Change) -> bool:
        """Put `change` in force, unless it came with the state that was healed from."""
        if change.epoch in self._applied:
            return False
        self.config.apply(change)
        self._applied = [*self._applied[-_APPLIED_MAX:], change.epoch]
        return True

    def save(self, step: int, reason: str) -> None:
        """Begin to save what the manager would hand to a healing peer; the copy is waited for."""
        if self._saves is not None:
            self._open(self._manager).save(step, reason="command", extra={})

    # --- healing ------------------------------------------------------------------------------

    def save_state(self) -> dict[str, str]:
        """Return what a healing peer needs. Called beside training, at the begin of a step."""
        promises = [p for p in self._executor.gate.promises() if p[0].change is not None]
        state = {
            "epoch": self.config.epoch,
            "values": dict(self.config),
            "applied": self._applied,
            "promises": [(encode(agreed).decode(), decided) for agreed, decided in promises],
        }
        return {"state": json.dumps(state)}

    def complete(self, user: dict[str, Any]) -> None:
        """Have `user`, the state of a peer whose script has no settings, leave ours as they are."""
        if self._begun and self.config.specs() and STATE_KEY not in user:
            say("healed from a group that has no settings: this one keeps its own")
            user[STATE_KEY] = self.save_state()

    def load_state(self, saved: dict[str, str]) -> None:
        """Take over a peer's values and promises."""
        state = json.loads(saved["state"])
        values = {n: v for n, v in state["values"].items() if self.config.get(n) != v}
        self.config.apply(Change(epoch=state["epoch"], step=0, values=values))
        self._applied, gate = list(state["applied"]), self._executor.gate
        if self._rank < 0:  # Alone, it would never hear what was decided.
            return
        for text, decided in state["promises"]:
            agreed: Agreed = decode(text.encode(), Agreed)
            name = agreed.id.partition("@")[0]
            mine = msgspec.structs.replace(agreed, id=f"{name}@{self._group}")
            with self._lock:
                if not gate.knows(mine.id):
                    gate.plan(mine, decided=decided)


def _refuse() -> None:
    raise ConfigError(
        "a setting was declared after the first step",
        hint="declare before it: a group that heals takes settings over with the state",
    )


settings = ReplicaConfig()
"""The one of this process."""
