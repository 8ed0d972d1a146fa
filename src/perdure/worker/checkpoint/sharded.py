"""Tensors in and out of torch.distributed.checkpoint's format, without collectives in the back.

The planning of a save needs every rank's plan; it is gathered once on the training thread and
kept while the state's structure stays. Writing then needs nobody: each rank writes its own file,
and rank 0 writes the index from the results that the others leave in files. Background
collectives would look like hangs to a watcher, and would hang if a rank died.
"""

import pickle
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load


def in_group() -> bool:
    """Return whether a default process group of several ranks is up."""
    return bool(dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


class SavePlanCache:
    """The agreed plan of this state's structure."""

    def __init__(self, rank: int) -> None:
        """Plan for global rank `rank`."""
        self._rank = rank
        self._shape: tuple[Any, ...] = ()
        self.plan: SavePlan | None = None
        self.metadata: Metadata | None = None

    def agree(self, state: dict[str, Any]) -> None:
        """Plan who writes what, with all ranks; a small collective where nothing changed.

        Called on the training thread, by all ranks at the same step.
        """
        shape = _describe(state)
        known = shape == self._shape
        if in_group():
            flags: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(flags, known)
            known = all(flags)
        if known:
            return
        planner = DefaultSavePlanner()
        planner.set_up_planner(state, is_coordinator=self._rank == 0)
        local = planner.create_local_plan()
        plans: list[Any] = [local]
        if in_group():
            plans = [None] * dist.get_world_size()
            dist.all_gather_object(plans, local)
        plans, self.metadata = planner.create_global_plan(plans)
        writer = FileSystemWriter("unused")
        plans = writer.prepare_global_plan(plans)
        mine = plans[dist.get_rank()] if in_group() else plans[0]
        self.plan = planner.finish_plan(mine)
        self._shape = shape


def write_tensors(folder: Path, cache: SavePlanCache, state: dict[str, Any]) -> bytes:
    """Write this rank's share of `state`, synced; return its results for the index."""
    assert cache.plan is not None
    planner = DefaultSavePlanner()
    planner.set_up_planner(state)
    writer = FileSystemWriter(folder, sync_files=True, thread_count=1)
    results = writer.write_data(cache.plan, planner).wait()
    return pickle.dumps(results)


def write_index(folder: Path, metadata: Metadata, results: Sequence[bytes]) -> None:
    """Write torch's index of all ranks' results. They are this job's own, so unpickling is safe."""
    writer = FileSystemWriter(folder, sync_files=True)
    writer.finish(metadata, [pickle.loads(result) for result in results])


def read_tensors(folder: Path, state: dict[str, Any]) -> None:
    """Load the tensors of `state` in place from a checkpoint; all ranks call it together."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of torch's own making: a single process is no fault.
        load(state, storage_reader=FileSystemReader(folder), no_dist=not in_group())


def check_index(folder: Path) -> None:
    """Read torch's index; raises whatever it raises where it cannot be read."""
    FileSystemReader(folder).read_metadata()


def _describe(value: Any, path: str = "") -> tuple[Any, ...]:
    """Return a structure's keys, shapes and types: what a plan depends on."""
    if isinstance(value, dict):
        return tuple(row for k, v in value.items() for row in _describe(v, f"{path}/{k}"))
    if isinstance(value, list | tuple):
        return tuple(row for i, v in enumerate(value) for row in _describe(v, f"{path}/{i}"))
    if isinstance(value, Tensor):
        return ((path, tuple(value.shape), str(value.dtype)),)
    return ((path, type(value).__name__),)
