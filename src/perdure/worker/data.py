"""Which samples a step uses: a pure function of (seed, step), whoever was restarted since.

The data is one endless stream: a permutation of the dataset, then another one, and so on; step k
uses positions k·G to (k+1)·G, where G is the global batch. So nothing is dropped at the end of a
pass, each sample is used once in every pass, and a loader is positioned by a number instead of by
a sampler's state, which would run ahead by what loader workers have prefetched.

Random augmentation is a function of (seed, position) too: while a sample is fetched, Python's,
NumPy's and torch's generators are seeded for it, and in the training process restored after it.
"""

import random
import sys
from collections.abc import Callable, Generator, Iterator
from hashlib import blake2b
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from perdure.model.errors import ConfigError

_REFUSED = ("sampler", "batch_sampler", "generator")


class SampleOrder:
    """The endless stream of samples of a dataset of `length`."""

    def __init__(self, length: int, *, seed: int, shuffle: bool) -> None:
        """Shuffle each pass by (`seed`, number of the pass), or never."""
        assert length > 0
        self._length = length
        self._seed = seed
        self._shuffle = shuffle
        self._pass = -1
        self._permutation: list[int] = []

    def __getitem__(self, position: int) -> int:
        """Return the index of the sample at `position`."""
        number, offset = divmod(position, self._length)
        if not self._shuffle:
            return offset
        if number != self._pass:
            generator = torch.Generator().manual_seed(derive_seed(self._seed, "pass", number))
            self._permutation = torch.randperm(self._length, generator=generator).tolist()
            self._pass = number
        return self._permutation[offset]


def derive_seed(*parts: object) -> int:
    """Return a 63-bit seed that depends on all of `parts`, the same on every machine."""
    digest = blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def open_batches(
    dataset: Any,
    *,
    batch_size: int,
    start: int,
    stop: int,
    rank: int,
    world_size: int,
    shuffle: bool,
    seed: int,
    accumulate: int,
    num_workers: int,
    collate_fn: Callable[[list[Any]], Any] | None,
    **loader: Any,
) -> Generator[Any, None, None]:
    """Return an iterator over this rank's batches of steps `start` to `stop`.

    Its loader exists when this returns, and has drawn nothing from the global generators.

    Raises:
        ConfigError: the data cannot be positioned; the message says why.
    """
    _check(dataset, loader, batch_size, accumulate)
    loader.pop("drop_last", None)  # There is no last batch: the stream goes on.
    order = SampleOrder(len(dataset), seed=seed, shuffle=shuffle)
    keys = _Keys(order, batch_size, accumulate, start, stop, rank, world_size)
    data_loader: DataLoader[Any] = DataLoader(
        SeededSamples(dataset, seed),
        batch_sampler=keys,
        num_workers=num_workers,
        collate_fn=collate_fn,
        generator=torch.Generator().manual_seed(derive_seed(seed, "loader")),
        **loader,
    )
    return _stream(iter(data_loader), accumulate)


def _stream(batches: Iterator[Any], accumulate: int) -> Generator[Any, None, None]:
    if accumulate == 1:
        yield from batches
        return
    while len(micro_batches := list(islice(batches, accumulate))) == accumulate:
        yield micro_batches


def _check(dataset: Any, loader: dict[str, Any], batch_size: int, accumulate: int) -> None:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise ConfigError(
            f"run.batches: {type(dataset).__name__} has no samples by index, so it cannot be "
            "positioned at a step",
            hint="use a map-style dataset, or run.steps() with data of your own",
        )
    for name in _REFUSED:
        if name in loader:
            raise ConfigError(f"run.batches: {name} is decided by (seed, step)", hint="drop it")
    if not len(dataset):
        raise ConfigError("run.batches: the dataset is empty")
    if batch_size < 1 or accumulate < 1:
        raise ConfigError("run.batches: batch_size and accumulate are at least 1")


class _Keys:
    """A batch sampler over (position, index); micro-batch by micro-batch, rank by rank."""

    def __init__(
        self,
        order: SampleOrder,
        batch_size: int,
        accumulate: int,
        start: int,
        stop: int,
        rank: int,
        world_size: int,
    ) -> None:
        self._order = order
        self._batch_size = batch_size
        self._stride = batch_size * world_size
        self._offset = rank * batch_size
        self._micro_batches = range(start * accumulate, stop * accumulate)

    def __len__(self) -> int:
        """Return how many micro-batches there are."""
        return len(self._micro_batches)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        """Yield the keys of each of this rank's micro-batches."""
        for micro_batch in self._micro_batches:
            first = micro_batch * self._stride + self._offset
            yield [(at, self._order[at]) for at in range(first, first + self._batch_size)]


class SeededSamples(Dataset[Any]):
    """The user's dataset by (position, index), its randomness a function of (seed, position)."""

    def __init__(self, dataset: Any, seed: int) -> None:
        """Draw from `dataset`."""
        self._dataset, self._seed = dataset, seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        """Return the sample of a key made by `_Keys`."""
        position, index = key
        if get_worker_info() is not None:
            _seed_all(derive_seed(self._seed, "sample", position))
            return self._dataset[index]
        kept = _keep()
        _seed_all(derive_seed(self._seed, "sample", position))
        try:
            return self._dataset[index]
        finally:
            _restore(kept)


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators, those of the current devices too."""
    _seed_all(seed)
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(seed)


def _seed_all(seed: int) -> None:
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


def _keep() -> tuple[Any, torch.Tensor, Any]:
    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy is not None else None
    return random.getstate(), torch.get_rng_state(), state


def _restore(kept: tuple[Any, torch.Tensor, Any]) -> None:
    random.setstate(kept[0])
    torch.set_rng_state(kept[1])
    if kept[2] is not None:
        sys.modules["numpy"].random.set_state(kept[2])
