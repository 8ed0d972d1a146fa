"""Checkpoints of a pipelined state: the first copy of each stage saves its blocks, by their names.

A checkpoint does not know of stages: it is read into any layout, by each member what it needs.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perdure.worker.checkpoint.registry import Registry
from perdure.worker.elastic.state.blocks import BlockState, StagedReplica

_SEPARATOR = "/"
"""Between a parameter's name and the key of its optimizer's state."""


class StageRegistry(Registry):
    """What a member has of a pipelined state."""

    def __init__(self, replica: StagedReplica, number: int, count: int) -> None:
        """Save and restore `replica`, which has stage `number` of `count`."""
        super().__init__(number, count)
        self._replica = replica
        self._targets: dict[str, Tensor] = {}

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors of its blocks."""
        return {path: value for path, value in self._list() if isinstance(value, Tensor)}

    def _list(self) -> Iterator[tuple[str, Any]]:
        """Yield all of its blocks' state, by paths that no other block has."""
        for block in self._replica.mine:
            for name, values in self._replica.state_of(block).items():
                for key, value in values.items():
                    yield f"{block}.{name}{_SEPARATOR}{key}", value

    def gated(self, tensors: Iterable[str]) -> set[str]:
        """Return all of them: nothing but the optimizer's step changes any."""
        return set(tensors)

    def own(self) -> dict[str, Any]:
        """Return the rest of its state, and what the tensors are."""
        kinds = {key: (list(t.shape), t.dtype) for key, t in self.tensors().items()}
        numbers: dict[str, dict[str, Any]] = {}
        for path, value in self._list():
            name, _, key = path.rpartition(_SEPARATOR)
            entries = numbers.setdefault(name, {})
            if not isinstance(value, Tensor):
                entries[key] = value
        return {"stage": {"numbers": numbers, "kinds": kinds}, "plain": self._replica.plain()}

    def list_own(self, folder: Path) -> list[Path]:
        """Return the files of all stages."""
        return sorted(folder.glob("rank-*.pt"), key=lambda p: int(re.sub(r"\D", "", p.stem)))

    def merge(self, found: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the first stage's file, with what all of them say of their blocks."""
        stages = [one["stage"] for one in found]
        stage = {what: {k: v for s in stages for k, v in s[what].items()} for what in stages[0]}
        return {**found[0], "stage": stage}

    def replay(self, own: dict[str, Any]) -> list[str]:
        """Return nothing: no buckets are in an order of their own."""
        return []

    def targets(self, own: dict[str, Any]) -> dict[str, Tensor]:
        """Return tensors for what this member needs of a checkpoint.

        Raises:
            KeyError: it has a block less.
        """
        mine = self._replica.mine
        kinds = own["stage"]["kinds"]
        self._targets = {
            key: torch.empty(shape, dtype=dtype)
            for key, (shape, dtype) in kinds.items()
            if int(key.partition(".")[0]) in mine
        }
        for block in mine:
            for name in self._replica.shapes[block]:
                if (
                    self._targets[f"{block}.{name}{_SEPARATOR}"].shape
                    != (self._replica.shapes[block][name])
                ):
                    raise ValueError(f"block {block}: {name} has another shape")
        return self._targets

    def load_own(self, own: dict[str, Any]) -> list[str]:
        """Become what was read."""
        numbers = own["stage"]["numbers"]
        states: dict[int, BlockState] = {block: {} for block in self._replica.mine}
        for path, tensor in self._targets.items():
            full, _, key = path.rpartition(_SEPARATOR)
            block, _, name = full.partition(".")
            states[int(block)].setdefault(name, dict(numbers.get(full, {})))[key] = tensor
        self._targets = {}
        self._replica.adopt(self._replica.runs, states, own["plain"])
        return []
