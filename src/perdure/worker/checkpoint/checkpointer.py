"""Saving and restoring one rank: snapshot, background write, verification, tag, retention.

A failed save never harms training: the previous checkpoint stays `latest`, and the failure is an
event. A rank that dies in between leaves a temporary directory, which the next generation removes.
"""

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from perdure.model.checkpoints import TEMPORARY, FileEntry, Manifest, Part, name_checkpoint
from perdure.model.codec import decode, encode
from perdure.model.errors import PlatformError, ProtocolError
from perdure.model.events import AnyEvent, CheckpointFailed, CheckpointRestored, CheckpointSaved
from perdure.model.job import CheckpointConfig
from perdure.worker.checkpoint.files import (
    apply_retention,
    describe_file,
    find_problem,
    list_checkpoints,
    publish,
    read_manifest,
    remove_temporaries,
    sync_file,
    tag_latest,
    write_synced,
)
from perdure.worker.checkpoint.registry import Registry
from perdure.worker.checkpoint.remote import open_place
from perdure.worker.checkpoint.sharded import (
    SavePlanCache,
    check_index,
    in_group,
    read_tensors,
    write_index,
    write_tensors,
)
from perdure.worker.checkpoint.staging import Staging
from perdure.worker.fingerprint import compare_fingerprints, take_fingerprint
from perdure.worker.rng import capture_rng, restore_rng

_PARTS_TIMEOUT_S = 300.0
_POLL_S = 0.02
_METADATA = ".metadata"
_FREE_MIN = 64 << 10


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
    ) -> None:
        """Save under `url`, a directory or an fsspec URL; nothing is touched yet."""
        self._root, self._remote = open_place(url)
        self._config = config
        self._rank, self._world_size, self._generation = rank, world_size, generation
        self._emit, self._now = emit, now
        self._registry = Registry()
        self._staging = Staging()
        self._cache = SavePlanCache(rank)
        self._writer: threading.Thread | None = None
        self.gate_s = 0.0
        """Seconds waited at gates so far."""

    def register(self, name: str, value: Any) -> None:
        """Save and restore `value` under `name`; an optimizer's step becomes a gate."""
        self._registry.add(name, value)
        if isinstance(value, torch.optim.Optimizer):
            value.register_step_pre_hook(lambda *_: self._pass_gate())

    def _pass_gate(self) -> None:
        self.gate_s += self._staging.wait()

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
        state = self._registry.tensors()
        self._cache.agree(state)
        own = {
            "rng": capture_rng(),
            "extra": extra,
            "fingerprint": take_fingerprint(self._world_size),
            **self._registry.own(),
        }
        staged = self._staging.begin(
            {"tensors": state, "own": own},
            lambda path: (
                path.startswith("/own") or self._registry.is_volatile(path.removeprefix("/tensors"))
            ),
        )
        stall_s = time.monotonic() - began
        self._writer = threading.Thread(
            target=self._write,
            args=(step, staged, reason, stall_s, began),
            name="perdure-checkpoint",
            daemon=True,
        )
        self._writer.start()
        if wait:
            self.close()
            stall_s = time.monotonic() - began
        return stall_s

    def _write(
        self, step: int, staged: dict[str, Any], reason: str, stall_s: float, began: float
    ) -> None:
        """Write this rank's share; on rank 0 also finish the checkpoint."""
        folder = self._root / f"{name_checkpoint(step)}.g{self._generation}{TEMPORARY}"
        try:
            self._staging.run()
            if self._staging.error is not None:
                raise self._staging.error
            with contextlib.suppress(OSError):
                os.nice(5)  # This thread's: training goes first.
            self._write_part(folder, staged)
            if self._rank != 0:
                return
            final = self._finish(folder, step, staged["own"], reason)
            size = sum(entry.bytes for entry in read_manifest(final).files)
            self._emit(
                CheckpointSaved(
                    generation=self._generation,
                    step=step,
                    path=self._remote.show(final) if self._remote else str(final),
                    bytes=size,
                    stall_s=stall_s,
                    save_s=time.monotonic() - began,
                    at_s=self._now(),
                    reason=reason,
                )
            )
            apply_retention(self._root, self._config)
            if self._remote:
                self._remote.apply_retention(self._root)
        except BaseException as error:
            self._fail(folder, step, error)

    def _fail(self, folder: Path, step: int, error: BaseException) -> None:
        """Say that this save came to nothing; the previous one stays what it was."""
        text = _explain(error, self._root)
        print(f"perdure: checkpoint of step {step} failed: {text}", file=sys.stderr)
        if self._rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                write_synced(folder / _part(self._rank), encode(Part(self._rank, (), text)))
        self._emit(
            CheckpointFailed(generation=self._generation, step=step, error=text, at_s=self._now())
        )

    def _write_part(self, folder: Path, staged: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        results = write_tensors(folder, self._cache, staged["tensors"])
        own = folder / _own(self._rank)
        torch.save(staged["own"], own)
        sync_file(own)
        (folder / _results(self._rank)).write_bytes(results)
        share = os.environ.get("RANK", str(self._rank)) if in_group() else "0"
        names = [_own(self._rank)]
        names += sorted(p.name for p in folder.glob(f"__{share}_*.distcp"))
        files = tuple(describe_file(folder, name) for name in names)
        write_synced(folder / _part(self._rank), encode(Part(self._rank, files)))

    def _finish(self, folder: Path, step: int, own: dict[str, Any], reason: str) -> Path:
        """Gather all parts, publish, verify by reading back, tag; return the final directory."""
        files = self._wait_parts(folder)
        assert self._cache.metadata is not None
        results = [(folder / _results(r)).read_bytes() for r in range(self._world_size)]
        write_index(folder, self._cache.metadata, results)
        for rank in range(self._world_size):
            (folder / _results(rank)).unlink()
            (folder / _part(rank)).unlink()
        files.append(describe_file(folder, _METADATA))
        manifest = Manifest(
            step=step,
            world_size=self._world_size,
            files=tuple(files),
            fingerprint=own["fingerprint"],
            metrics=dict(own["extra"].get("metrics", {})),
            reason=reason,
        )
        final = publish(folder, self._root, step, manifest)
        problem = find_problem(final, manifest)
        if problem:
            shutil.rmtree(final, ignore_errors=True)
            raise PlatformError(f"what was written cannot be read back: {problem}")
        check_index(final)
        torch.load(final / _own(0), weights_only=True, map_location="cpu")
        if self._remote:
            self._remote.upload(final, manifest)
        tag_latest(self._root, final)
        return final

    def _wait_parts(self, folder: Path) -> list[FileEntry]:
        deadline = time.monotonic() + _PARTS_TIMEOUT_S
        files: list[FileEntry] = []
        for rank in range(self._world_size):
            path = folder / _part(rank)
            while not path.exists():
                if time.monotonic() > deadline:
                    raise PlatformError(f"rank {rank} did not finish its share")
                time.sleep(_POLL_S)
            part: Part = decode(path.read_bytes(), Part)
            if part.error:
                raise PlatformError(f"rank {rank}: {part.error}")
            files.extend(part.files)
        return files

    # --- restoring ---------------------------------------------------------------------------

    def restore(self, extra: dict[str, Any]) -> int:
        """Load the newest usable checkpoint into what was registered; return its step, or 0.

        Fills `extra` with what was saved beside it. All ranks take the same one: rank 0 chooses
        where a process group is up, otherwise each comes to the same choice. One that cannot be
        used is skipped with a line that says why.
        """
        step, folder, skipped = self._choose()
        why = ""
        if folder is not None:
            why = self._load(folder, extra)
        self._emit(
            CheckpointRestored(
                generation=self._generation,
                rank=self._rank,
                step=step,
                path=str(folder) if folder is not None else "",
                skipped=tuple(skipped),
                exact=not why,
                why_not_exact=why,
            )
        )
        return step

    def _choose(self) -> tuple[int, Path | None, list[str]]:
        choice: list[Any] = [None]
        if self._rank == 0 or not in_group():
            if self._rank == 0:
                remove_temporaries(self._root)
                if self._remote:
                    self._remote.download(self._root)
            choice = [self._find_usable()]
        if in_group():
            dist.broadcast_object_list(choice, src=0)
        step, name, skipped = choice[0]
        if self._rank == 0:
            for line in skipped:
                print(f"perdure: checkpoint skipped: {line}", file=sys.stderr)
        return step, self._root / name if name else None, skipped

    def _find_usable(self) -> tuple[int, str, list[str]]:
        skipped: list[str] = []
        for step, path in list_checkpoints(self._root):
            try:
                problem = find_problem(path, read_manifest(path))
            except ProtocolError as error:
                problem = error.message
            if not problem:
                return step, path.name, skipped
            skipped.append(f"{path}: {problem}")
        return 0, "", skipped

    def _load(self, folder: Path, extra: dict[str, Any]) -> str:
        """Load one checkpoint; return why the resume is not exact, empty where it is."""
        why = []
        path = folder / _own(self._rank)
        if not path.exists():
            path = folder / _own(0)
        own = torch.load(path, map_location="cpu", weights_only=not self._config.allow_pickle)
        self._registry.replay(own)
        state = self._registry.tensors()
        read_tensors(folder, state)
        self._registry.load_tensors(state)
        missing = self._registry.load_own(own)
        if missing:
            why.append(f"not in the checkpoint: {', '.join(missing)}")
        extra.update(own["extra"])
        differs = compare_fingerprints(own["fingerprint"], take_fingerprint(self._world_size))
        if differs:
            why.append(differs)
        restore_rng(own["rng"])
        return "; ".join(why)


def _own(rank: int) -> str:
    return f"rank-{rank}.pt"


def _part(rank: int) -> str:
    return f"part-{rank}.json"


def _results(rank: int) -> str:
    return f"results-{rank}.bin"


def _explain(error: BaseException, root: Path) -> str:
    """Return one line that names the place; torch says of a full disk only `unexpected pos`."""
    with contextlib.suppress(OSError):
        if shutil.disk_usage(root).free < _FREE_MIN:
            return f"No space left on the device of {root}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
