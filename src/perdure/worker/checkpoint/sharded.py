"""Tensors in and out of torch.distributed.checkpoint's format, without a collective.

Who writes what is planned from every rank's list of tensors. The lists are exchanged as files in
the checkpoint's own temporary directory by the background threads: collectives would take turns
with the training's, would look like hangs to a watcher, and would hang if a rank died. Each rank
then writes its own file, and rank 0 the index from the results that the others leave in files.

Torch's index is a pickle, and is read as data (`index`).
"""

import dataclasses
import io
import os
import pickle
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
    _StoragePrefix,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load

from perdure.model.errors import ConfigError
from perdure.worker.checkpoint.index import read_index, read_plain


def in_group() -> bool:
    """Return whether a default process group of several ranks is up."""
    return bool(dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


class SavePlanCache:
    """The agreed plan, kept while no rank's list of tensors changes."""

    def __init__(self, rank: int) -> None:
        """Plan for global rank `rank`."""
        self._rank = rank
        self._lists: list[bytes] = []
        self._shape: tuple[Any, ...] = ()
        self._mine = b""
        self.plan: SavePlan | None = None
        self.metadata: Metadata | None = None

    def describe(self, state: dict[str, Tensor]) -> bytes:
        """Return this rank's list, for the others."""
        shape = tuple((key, tuple(v.shape), v.dtype) for key, v in state.items())
        if shape != self._shape or not self._mine:
            self._mine = pickle.dumps(_make_planner(state).create_local_plan())
            self._shape = shape
        return self._mine

    def agree(self, lists: list[bytes]) -> None:
        """Plan from all ranks' lists. Every rank comes to the same plan by itself."""
        if lists == self._lists:
            return
        told = [read_plain(row) for row in lists]
        plans, self.metadata = _make_planner({}).create_global_plan(told)
        prefix = _StoragePrefix(f"__{self._rank}_")
        self.plan = dataclasses.replace(plans[self._rank], storage_data=prefix)
        self._lists = lists


def write_tensors(
    folder: Path,
    cache: SavePlanCache,
    state: dict[str, Tensor],
    give_way: Callable[[], object] = bool,
) -> tuple[bytes, dict[str, str]]:
    """Write this rank's share of `state`, synced; return its results, and hashes by file.

    The hashes are of what was to be written; what is on the disk is compared later. `give_way`
    is called before every write.
    """
    assert cache.plan is not None
    writer = FileSystemWriter(folder, sync_files=True, thread_count=1)
    writer.fs = hashing = _HashingFiles(give_way)
    results = writer.write_data(cache.plan, _make_planner(state)).wait()
    return pickle.dumps(results), hashing.hashes


def write_index(folder: Path, metadata: Metadata, results: Sequence[bytes]) -> None:
    """Write torch's index of all ranks' results."""
    metadata = dataclasses.replace(metadata)
    FileSystemWriter(folder, sync_files=True).finish(metadata, [read_plain(row) for row in results])


def read_tensors(folder: Path, state: dict[str, Tensor]) -> None:
    """Load the tensors of `state` in place from a checkpoint; each rank reads what it needs.

    Raises:
        ConfigError: a tensor is not in the checkpoint.
    """
    reader = _Reader(folder)
    missing = sorted(set(state) - set(reader.read_metadata().state_dict_metadata))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(f"{missing[0]}{more} is not in the checkpoint")
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of torch's own making: a single process is no fault.
        load(cast(dict[str, Any], state), storage_reader=reader, planner=planner, no_dist=True)


def _make_planner(state: dict[str, Tensor]) -> DefaultSavePlanner:
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(cast(dict[str, Any], state), is_coordinator=True)
    return planner


class _Reader(FileSystemReader):
    """Torch's reader, which reads the index without trusting it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index."""
        metadata = read_index(Path(self.path))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _HashingFiles(FileSystem):
    """Torch's file system, which hashes what is written on its way."""

    def __init__(self, give_way: Callable[[], object]) -> None:
        self.hashes: dict[str, str] = {}
        self._give_way = give_way

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        """Open a file; its hash is in `hashes` by its name once it is closed."""
        digest = xxhash.xxh3_128()
        with open(path, mode) as file:
            stream = _HashingStream(cast(BinaryIO, file), digest.update, self._give_way)
            try:
                yield cast(io.IOBase, stream)
            except RuntimeError:  # Torch says of a full disk only `unexpected pos`.
                raise stream.error or RuntimeError(f"{path} could not be written") from None
        self.hashes[Path(path).name] = digest.hexdigest()


class _HashingStream:
    """The five calls that torch makes of a stream."""

    def __init__(
        self, file: BinaryIO, update: Callable[[Any], None], give_way: Callable[[], object]
    ) -> None:
        self._file = file
        self._update, self._give_way = update, give_way
        self.error: OSError | None = None
        self.tell, self.flush, self.close = file.tell, file.flush, file.close

    def write(self, data: Any) -> int:
        """Write and hash."""
        self._give_way()
        self._update(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def fileno(self) -> int:
        """Return the descriptor, for fsync: torch forgets to flush before."""
        self._file.flush()
        return self._file.fileno()
