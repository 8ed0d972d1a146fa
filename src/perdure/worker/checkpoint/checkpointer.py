"""Saving and restoring one rank: snapshot on the training thread, everything else beside it.

A failed save never harms training: the previous checkpoint stays `latest`, and the failure is an
event. A rank that dies in between leaves a temporary directory, which the next generation removes.
"""

import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from perdure.model.checkpoints import Manifest, name_checkpoint
from perdure.model.errors import ConfigError, PerdureError, ProtocolError
from perdure.model.events import AnyEvent, CheckpointFailed, CheckpointRestored, CheckpointSaved
from perdure.model.job import CheckpointConfig
from perdure.worker.checkpoint.files import (
    apply_retention,
    find_problem,
    list_checkpoints,
    open_place,
    read_manifest,
    remove_temporaries,
)
from perdure.worker.checkpoint.registry import Registry
from perdure.worker.checkpoint.sharded import SavePlanCache, in_group, read_tensors
from perdure.worker.checkpoint.staging import Staging, copy_plain
from perdure.worker.checkpoint.writing import SaveAbandoned, SaveTask
from perdure.worker.rng import capture_rng, compare_fingerprints, restore_rng, take_fingerprint
from perdure.worker.stderr import say


class _Found(NamedTuple):
    """The newest usable checkpoint."""

    step: int
    """0 where there is none."""
    folder: Path | None
    skipped: list[str]
    """Newer ones, each with the reason why it cannot be used."""
    own: dict[str, Any]
    """What this rank has kept of its own."""


class Checkpointer:
    """Checkpoints of one rank in one generation."""

    def __init__(
        self,
        *,
        url: str,
        config: CheckpointConfig,
        rank: int,
        world_size: int,
        generation: int,
        emit: Callable[[AnyEvent], object],
        now: Callable[[], float],
        world: str = "",
        registry: Registry | None = None,
    ) -> None:
        """Save under `url`, a directory or an fsspec URL; nothing is touched yet.

        `world` tells this object's attempts from those of others of the same generation;
        `registry` is for states of another kind than models and optimizers.
        """
        self._root, self._remote = open_place(url)
        self._config = config
        self._rank, self._world_size, self._generation = rank, world_size, generation
        self._emit, self._now, self._world = emit, now, world
        self._registry = registry or Registry(rank, world_size)
        self._staging = Staging()
        self._cache = SavePlanCache(rank)
        self._writer: threading.Thread | None = None
        self._attempts = 0
        self._found: _Found | None = None
        self.gate_s = 0.0
        """Seconds waited at gates so far."""

    def register(self, name: str, value: Any) -> None:
        """Save and restore `value` under `name`; an optimizer's step becomes a gate."""
        self._registry.add(name, value)
        if isinstance(value, torch.optim.Optimizer):
            value.register_step_pre_hook(lambda *_: self._pass_gate())
            value.register_step_post_hook(lambda *_: self._staging.leave_update())

    def _pass_gate(self) -> None:
        self.gate_s += self._staging.enter_update()

    def settle(self) -> None:
        """Wait until what was begun is copied: the state may change, by whatever means."""
        self._staging.wait()

    def close(self) -> None:
        """Wait until what was begun is written (or has failed)."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    # --- saving ------------------------------------------------------------------------------

    def save(self, step: int, *, reason: str, extra: dict[str, Any], wait: bool = False) -> float:
        """Take a snapshot of `step` and begin to write it; return the seconds it stalled.

        A save that is still being written is waited for first. With `wait`, this one is too.
        All ranks call it at the same step.
        """
        began = time.monotonic()
        self.close()
        self._staging.wait()
        self._attempts += 1
        task = SaveTask(
            root=self._root,
            remote=self._remote,
            step=step,
            attempt=f"g{self._generation}{self._world}.{self._attempts}",
            rank=self._rank,
            world_size=self._world_size,
            reason=reason,
            allow_pickle=self._config.allow_pickle,
        )
        try:
            tensors, own = self._take_snapshot(extra)
        except Exception as error:  # The script's own state_dict() among others.
            self._fail(task, step, error)
            return time.monotonic() - began
        stall_s = time.monotonic() - began
        self._writer = threading.Thread(
            target=self._write,
            args=(task, step, tensors, own, reason, stall_s, began),
            name="perdure-checkpoint",
            daemon=True,
        )
        self._writer.start()
        if wait:
            self.close()
            stall_s = time.monotonic() - began
        return stall_s

    def _take_snapshot(self, extra: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        own = copy_plain(
            {
                "rng": capture_rng(),
                "extra": extra,
                "fingerprint": take_fingerprint(self._world_size),
                **self._registry.own(),
            }
        )
        tensors = self._registry.tensors()
        late = set() if self._staging.torn else self._registry.gated(tensors)
        return self._staging.begin(tensors, late), own

    def _write(
        self,
        task: SaveTask,
        step: int,
        tensors: dict[str, Tensor],
        own: dict[str, Any],
        reason: str,
        stall_s: float,
        began: float,
    ) -> None:
        gate_s = self.gate_s
        try:
            manifest = task.write(self._staging, self._cache, tensors, own)
            if manifest is None:
                return
            final = self._root / name_checkpoint(step)
            self._emit(
                CheckpointSaved(
                    generation=self._generation,
                    step=step,
                    path=self._remote.show(final) if self._remote else str(final),
                    bytes=sum(entry.bytes for entry in manifest.files),
                    stall_s=stall_s + self.gate_s - gate_s,
                    save_s=time.monotonic() - began,
                    at_s=self._now(),
                    reason=reason,
                )
            )
            apply_retention(self._root, self._config, step)
            if self._remote:
                self._remote.apply_retention(self._config, step)
        except SaveAbandoned:
            task.fail("another rank failed")
        except BaseException as error:
            self._fail(task, step, error)

    def _fail(self, task: SaveTask, step: int, error: BaseException) -> None:
        """Say that this save came to nothing; the previous one stays what it was."""
        text = task.explain(error)
        if not task.fail(text):
            return
        say(f"checkpoint of step {step} failed: {text}")
        self._emit(
            CheckpointFailed(generation=self._generation, step=step, error=text, at_s=self._now())
        )

    # --- restoring ---------------------------------------------------------------------------

    def read_newest(self) -> tuple[int, dict[str, Any]]:
        """Return what `restore` will load: its step (0 for none) and the states of its objects.

        Objects are all but models and optimizers. All ranks take the same checkpoint: rank 0
        chooses where a process group is up, otherwise each comes to the same choice. One that
        cannot be used is skipped with a line that says why.

        Raises:
            ConfigError: it holds pickles, and `checkpoint.allow_pickle` is off.
        """
        if self._found is None:
            self._found = self._choose()
        return self._found.step, self._found.own.get("objects", {})

    def restore(self, extra: dict[str, Any]) -> int:
        """Load what `read_newest` returns into what was registered; return its step, or 0.

        Fills `extra` with what was saved beside it.

        Raises:
            ConfigError: the checkpoint is whole but does not fit what was registered.
        """
        self.read_newest()
        assert self._found is not None
        step, folder, skipped, own = self._found
        self._found = None
        why: list[str] = []
        if folder is not None:
            try:
                why = self._load(folder, own, extra)
            except (RuntimeError, KeyError, ValueError, PerdureError) as error:
                raise ConfigError(
                    f"{folder.name} does not fit the script: {str(error).strip() or repr(error)}",
                    hint="give the changed script a new job name or checkpoint url",
                ) from error
        self._emit(
            CheckpointRestored(
                generation=self._generation,
                rank=self._rank,
                step=step,
                path=str(folder) if folder is not None else "",
                skipped=tuple(skipped),
                exact=not why,
                why_not_exact="; ".join(why),
            )
        )
        return step

    def _choose(self) -> _Found:
        if self._rank == 0:
            remove_temporaries(self._root)
        group = in_group()
        skipped: list[str] = []
        for name in self._agree_on(self._list_names() if self._rank == 0 or not group else []):
            problem = self._check(name, group)
            if not problem:
                folder = self._root / name
                return _Found(int(name.rsplit("-", 1)[1]), folder, skipped, self._read_own(folder))
            skipped.append(f"{self._root / name}: {problem}")
            if self._rank == 0:
                say(f"checkpoint skipped: {skipped[-1]}")
        return _Found(0, None, skipped, {})

    def _agree_on(self, value: Any) -> Any:
        if not in_group():
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def _list_names(self) -> list[str]:
        names = {path.name for _, path in list_checkpoints(self._root)}
        if self._remote:
            names |= set(self._remote.list_names())
        return sorted(names, reverse=True)

    def _check(self, name: str, group: bool) -> str:
        """Return what is wrong with a checkpoint; the ranks of a group share the reading."""
        problem = ""
        if self._remote and (self._rank == 0 or not group):
            problem = self._remote.fetch(self._root, name)
        problem = self._agree_on(problem)
        if not problem:
            problem = self._find_problem(name, group)
        if not group:
            return problem
        problems: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
        return next((text for text in problems if text), "")

    def _find_problem(self, name: str, group: bool) -> str:
        try:
            manifest: Manifest = read_manifest(self._root / name)
        except ProtocolError as error:
            return error.message
        share = (dist.get_rank(), dist.get_world_size()) if group else (0, 1)
        return find_problem(self._root / name, manifest, *share)

    def _read_own(self, folder: Path) -> dict[str, Any]:
        plain = not self._config.allow_pickle
        found: list[dict[str, Any]] = []
        for path in self._registry.list_own(folder):
            try:
                found.append(torch.load(path, map_location="cpu", weights_only=plain))
            except pickle.UnpicklingError as error:
                why = f"{path.name} needs pickle: set checkpoint.allow_pickle"
                raise ConfigError(why) from error
        return self._registry.merge(found)

    def _load(self, folder: Path, own: dict[str, Any], extra: dict[str, Any]) -> list[str]:
        """Load one checkpoint; return why the resume is not exact, empty where it is."""
        why = self._registry.replay(own)
        with torch.no_grad():
            read_tensors(folder, self._registry.targets(own))
            missing = self._registry.load_own(own)
        if missing:
            why.append(f"not in the checkpoint: {', '.join(missing)}")
        extra.update(own["extra"])
        differs = compare_fingerprints(own["fingerprint"], take_fingerprint(self._world_size))
        restore_rng(own["rng"])
        return [*why, differs] if differs else why
