"""One save of one rank, in its background thread: from the snapshot to the tag.

Ranks meet in files of the checkpoint's temporary directory: `plan-R` what rank R holds, `part-R`
that its share is on the disk, read back and found equal (or why not). Rank 0 gathers the parts,
publishes, tags. Whatever a rank waits for is bounded, and ends when another rank has failed.
"""

import contextlib
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perdure.files import replace_file, sync_path
from perdure.model.checkpoints import TEMPORARY, FileEntry, Manifest, Part, name_checkpoint
from perdure.model.codec import decode, encode
from perdure.model.errors import PlatformError
from perdure.worker.checkpoint.files import (
    Remote,
    describe_file,
    drop_cached,
    publish,
    remove_temporaries,
    tag_latest,
)
from perdure.worker.checkpoint.index import INDEX
from perdure.worker.checkpoint.sharded import (
    SavePlanCache,
    check_index,
    write_index,
    write_tensors,
)
from perdure.worker.checkpoint.staging import Staging

TIMEOUT_S = 300.0
_POLL_S = 0.01
_FREE_MIN = 64 << 10


class SaveAbandoned(Exception):
    """Raised where another rank has failed, which says so itself."""


class SaveTask:
    """One rank's part in one checkpoint."""

    def __init__(
        self,
        *,
        root: Path,
        remote: Remote | None,
        step: int,
        attempt: str,
        rank: int,
        world_size: int,
        reason: str,
        allow_pickle: bool,
    ) -> None:
        """Write the checkpoint of `step` under `root`; nothing is touched yet.

        `attempt` is the same on all ranks and never used twice.
        """
        self._root, self._remote = root, remote
        self.folder = root / f"{name_checkpoint(step)}.{attempt}{TEMPORARY}"
        self._failed = root / f"{name_checkpoint(step)}.{attempt}.failed{TEMPORARY}"
        self._step, self._reason = step, reason
        self._rank, self._world_size = rank, world_size
        self._allow_pickle = allow_pickle
        self._begun = False

    def write(
        self,
        staging: Staging,
        cache: SavePlanCache,
        tensors: dict[str, Tensor],
        own: dict[str, Any],
    ) -> Manifest | None:
        """Carry it out; return what was published, on rank 0.

        Raises:
            SaveAbandoned: another rank has failed.
            Exception: whatever prevents it here.
        """
        staging.run()
        with contextlib.suppress(OSError):
            os.nice(10)  # This thread's: training goes first. More would starve beside it.
        self.folder.mkdir(parents=True, exist_ok=True)
        self._begun = True
        self._agree(cache, tensors)
        self._write_share(staging, cache, tensors, own)
        return self._finish(cache, own) if self._rank == 0 else None

    def fail(self, text: str) -> bool:
        """Clean up, and leave word for rank 0; return whether this rank must speak up itself."""
        if self._rank == 0:
            self._leave_word()
            return True
        if self._abandoned:
            return False
        with contextlib.suppress(OSError):  # First, so that there is room for the word.
            for path in self.folder.glob(f"__{self._rank}_*"):
                path.unlink()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_file(
                self.folder / _part(self._rank), encode(Part(self._rank, (), text)), synced=True
            )
        except OSError:
            return True
        return False

    def _leave_word(self) -> None:
        """Rename rank 0's directory: a rank that comes later must not wait for a plan in it."""
        if self._world_size > 1:
            with contextlib.suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
                self.folder.rename(self._failed)
            for path in list(self._failed.glob("*")):
                with contextlib.suppress(OSError):
                    path.unlink()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def _abandoned(self) -> bool:
        """Whether rank 0 has given this checkpoint up."""
        return self._failed.exists() or (self._begun and not self.folder.exists())

    def explain(self, error: BaseException) -> str:
        """Return one line that names the place."""
        with contextlib.suppress(OSError):
            if shutil.disk_usage(self._root).free < _FREE_MIN:
                return f"No space left on the device of {self._root}"
        if isinstance(error, OSError) and error.strerror:
            return f"{error.strerror}: {error.filename or self._root}"
        lines = str(error).strip().splitlines()
        return lines[0] if lines else type(error).__name__

    def _agree(self, cache: SavePlanCache, tensors: dict[str, Tensor]) -> None:
        mine = cache.describe(tensors)
        if self._world_size == 1:
            cache.agree([mine])
            return
        path = self.folder / _plan(self._rank)
        path.with_suffix(".new").write_bytes(mine)
        path.with_suffix(".new").rename(path)
        ranks = range(self._world_size)
        cache.agree([self._wait(self.folder / _plan(r), r).read_bytes() for r in ranks])

    def _write_share(
        self,
        staging: Staging,
        cache: SavePlanCache,
        tensors: dict[str, Tensor],
        own: dict[str, Any],
    ) -> None:
        """Write this rank's files, read them back, and report them."""
        results, hashes = write_tensors(self.folder, cache, tensors, staging.give_way)
        name = f"rank-{self._rank}.pt"
        with open(self.folder / name, "wb") as file:  # Not a path: torch would keep the GIL.
            torch.save(own, file)
        sync_path(self.folder / name)
        torch.load(self.folder / name, weights_only=not self._allow_pickle, map_location="cpu")
        (self.folder / _results(self._rank)).write_bytes(results)
        files = []
        for path in [name, *sorted(hashes)]:
            drop_cached(self.folder / path)
            entry = describe_file(self.folder, path, staging.give_way)
            if entry.xxh3_128 != hashes.get(path, entry.xxh3_128):
                raise PlatformError(f"{path} is not on the disk what was written")
            files.append(entry)
        sync_path(self.folder)
        part = encode(Part(self._rank, tuple(files)))
        replace_file(self.folder / _part(self._rank), part, synced=True)
        sync_path(self.folder)

    def _finish(self, cache: SavePlanCache, own: dict[str, Any]) -> Manifest:
        """Gather all parts, publish, check, tag."""
        ranks = range(self._world_size)
        files: list[FileEntry] = []
        for rank in ranks:
            part = self._read_part(self._wait(self.folder / _part(rank), rank))
            files.extend(part.files)
        assert cache.metadata is not None
        results = [(self.folder / _results(rank)).read_bytes() for rank in ranks]
        write_index(self.folder, cache.metadata, results)
        check_index(self.folder)
        files.append(describe_file(self.folder, INDEX))
        roster = {entry.path for entry in files}
        for path in list(self.folder.iterdir()):
            if path.name not in roster:
                path.unlink()
        manifest = Manifest(
            step=self._step,
            world_size=self._world_size,
            files=tuple(files),
            fingerprint=own["fingerprint"],
            metrics=dict(own["extra"].get("metrics", {})),
            reason=self._reason,
        )
        final = publish(self.folder, self._root, self._step, manifest)
        if self._remote:
            self._remote.upload(final, manifest)
        tag_latest(self._root, final)
        remove_temporaries(self._root, self._step)  # Of attempts that failed: all are past them.
        return manifest

    def _wait(self, path: Path, rank: int) -> Path:
        """Wait for a file of `rank`; end when this checkpoint cannot be any more."""
        deadline = time.monotonic() + TIMEOUT_S
        while not path.exists():
            if self._rank != 0 and self._abandoned:
                raise SaveAbandoned
            part = self.folder / _part(rank)
            if part.exists():
                self._read_part(part)
            if time.monotonic() > deadline:
                raise PlatformError(f"rank {rank} did not finish its share in {TIMEOUT_S:.0f} s")
            time.sleep(_POLL_S)
        return path

    def _read_part(self, path: Path) -> Part:
        part: Part = decode(path.read_bytes(), Part)
        if part.error and self._rank != 0:
            raise SaveAbandoned
        if part.error:
            raise PlatformError(f"rank {part.rank}: {part.error}")
        return part


def _part(rank: int) -> str:
    return f"part-{rank}.json"


def _plan(rank: int) -> str:
    return f"plan-{rank}.bin"


def _results(rank: int) -> str:
    return f"results-{rank}.bin"
