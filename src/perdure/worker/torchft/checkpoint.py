"""Checkpoints of a torchft job: what its Manager would hand to a healing peer, written down.

One group saves, since all have the same state at a step, before it begins that step. The next run
of the job loads it before a group's first quorum, unless others train already, from whom it then
heals. Random generators are each group's own and are left alone; where the data goes on is the
script's business, which knows it by `manager.current_step()`.
"""

import os
from collections.abc import Callable
from typing import Any

from perdure.model.events import AnyEvent
from perdure.model.job import CheckpointConfig
from perdure.worker.spec import find_checkpoint_url
from perdure.worker.stderr import say


class _State:
    """The manager's state, with its own step, as something that is saved and loaded."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._manager._manager_state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        user = state["user"]
        for key, load in self._manager._load_state_dict_fns.items():
            if key in user:
                load(user[key])
        self._manager.load_state_dict(state["torchft"])


class ReplicaCheckpoints:
    """Of one rank of a replica group; nothing is touched before the first is wanted."""

    def __init__(
        self,
        *,
        rank: int,
        generation: int,
        nproc: int,
        emit: Callable[[AnyEvent], object],
        now: Callable[[], float],
        config: CheckpointConfig,
    ) -> None:
        """Save and load as local rank of `rank`."""
        self._local, self._nproc, self._generation = rank % nproc, nproc, generation
        self._emit, self._now, self._config = emit, now, config
        self._made: Any = None

    def _open(self, manager: Any) -> Any:
        if self._made is None:
            from perdure.worker.checkpoint import Checkpointer

            self._made = Checkpointer(
                url=find_checkpoint_url(self._config),
                config=self._config,
                rank=self._local,
                world_size=self._nproc,
                generation=self._generation,
                emit=self._emit,
                now=self._now,
            )
            self._made.register("torchft", _State(manager))
        return self._made

    def save(self, manager: Any, step: int) -> None:
        """Begin to save; only the copy is waited for. A failure is told of, and harms nothing."""
        self._open(manager).save(step, reason="command", extra={})

    def load(self, manager: Any) -> None:
        """Load the newest checkpoint, where there is one and the script has loaded none itself."""
        url = find_checkpoint_url(self._config)
        if manager.current_step() != 0 or not _holds_any(url):
            return
        from perdure.worker.rng import capture_rng, restore_rng

        own = capture_rng()
        step = self._open(manager).restore({})
        restore_rng(own)
        if step:
            say(f"goes on from the checkpoint of step {step}")


def _holds_any(url: str) -> bool:
    """Whether there may be a checkpoint; of what is no directory here it is not known."""
    if not url:
        return False
    if "://" in url and not url.startswith("file://"):
        return True
    folder = url.removeprefix("file://")
    return os.path.isdir(folder) and bool(os.listdir(folder))
