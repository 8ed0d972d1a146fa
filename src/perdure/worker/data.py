"""Which samples a step uses: a function of the seed and of how many were used before.

The data is one endless stream: a permutation of the dataset, then another one, and so on. A step
uses the next G positions, where G is the global batch. So nothing is dropped at the end of a pass,
each sample is used once in every pass, and a loader is positioned by a number instead of by a
sampler's state, which would run ahead by what loader workers have prefetched.

Each checkpoint keeps this number, and what the stream is made of (`Plan`). So another batch size
neither skips nor repeats a sample. A dataset that has grown is shuffled as a whole from the next
pass on.

Random augmentation is a function of (seed, position) too: while a sample is fetched, Python's,
NumPy's and torch's generators are seeded for it, and in the training process restored after it.

In an elastic world the samples of one micro-batch are a function of (seed, step, micro-batch)
alone (`MicroBatches`). A dataset with a length is shuffled anew for each pass; one without is an
endless stream, whose sample at each position is asked for by its number. Samples are loaded where
they are computed, by whichever rank that is; a redone micro-batch is loaded again and is the same,
augmentation included.

Or micro-batches are loaded before their turn, in processes beside the rank (`Prefetcher`). What a
rank loads in a step is, as long as the world stays what it is, what it loaded in the step before.
So the next ones are guessed from that, and asked for while others are computed. A change of the
world makes some guesses wrong: what was not guessed is loaded by the rank itself, and what was
loaded in vain is dropped when its step is over. A micro-batch is the same wherever it is loaded,
so nothing depends on a guess.
"""

import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from hashlib import blake2b
from itertools import count, islice
from typing import Any

import torch
import torch.multiprocessing as _registers  # noqa: F401  Tensors cross in shared memory.
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    default_collate,
    get_worker_info,
)

from perdure.model.errors import ConfigError
from perdure.plan.elastic.microbatches import BatchPlan
from perdure.plan.training_plan import describe_changes
from perdure.worker.rng import keep_rng, put_back_rng
from perdure.worker.system.process import die_with
from perdure.worker.system.stderr import say

_REFUSED = ("sampler", "batch_sampler", "generator")


Stretch = tuple[int, int, int]
"""The first position of some passes, the number of the first one, and the length of each."""


class SampleOrder:
    """The endless stream of samples of a dataset of `length`."""

    def __init__(
        self, length: int, *, seed: int, shuffle: bool, stretches: Sequence[Stretch] = ()
    ) -> None:
        """Shuffle each pass by (`seed`, number of the pass), or never.

        The dataset had other lengths in `stretches`, if it has grown.
        """
        self._stretches = stretches or ((0, 0, length),)
        self._seed = seed
        self._shuffle = shuffle
        self._pass = -1
        self._permutation: list[int] = []

    def __getitem__(self, position: int) -> int:
        """Return the index of the sample at `position`."""
        first, number, length = next(s for s in reversed(self._stretches) if s[0] <= position)
        passes, offset = divmod(position - first, length)
        if not self._shuffle:
            return offset
        if number + passes != self._pass:
            self._pass = number + passes
            generator = torch.Generator().manual_seed(derive_seed(self._seed, "pass", self._pass))
            self._permutation = torch.randperm(length, generator=generator).tolist()
        return self._permutation[offset]


class Plan:
    """How many samples a run has used, and what its stream is made of. An object to register."""

    def __init__(self, length: int, *, seed: int, shuffle: bool, batch: int) -> None:
        """Begin with a dataset of `length`; `batch` samples are a step's, 0 if that changes."""
        self.samples = -1
        """Samples used so far; -1 until somebody says so."""
        self.stretches: list[Stretch] = [(0, 0, length)]
        self.why_not_exact = ""
        """What differs from the run that the checkpoint is of."""
        self.doubt = ""
        """Why no resume can be exact, known before the first step."""
        self._now = {"length": length, "seed": seed, "shuffle": shuffle, "batch": batch}

    def state_dict(self) -> dict[str, Any]:
        """Return all of it."""
        return {"samples": self.samples, "stretches": self.stretches, **self._now}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on where `saved` was."""
        self.samples, self.stretches = saved["samples"], [(*one,) for one in saved["stretches"]]
        self.why_not_exact = describe_changes(saved, self._now)
        length = self._now["length"]
        if saved["length"] != length:
            first, number, before = self.stretches[-1]
            passes = -(-(self.samples - first) // before)
            begun = first + passes * before
            # A shorter one cannot end the pass: its indices are of what is gone.
            self.stretches.append(
                (begun if length > before else self.samples, number + passes, length)
            )


def derive_seed(*parts: object) -> int:
    """Return a 63-bit seed that depends on all of `parts`, the same on every machine."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


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
    plan: Plan | None = None,
    **loader: Any,
) -> Generator[Any, None, None]:
    """Return an iterator over this rank's batches of steps `start` to `stop`.

    `plan` says how many samples were used before; without it, `start` steps of this size.

    Its loader exists when this returns, and has drawn nothing from the global generators.

    Raises:
        ConfigError: the data cannot be positioned; the message says why.
    """
    length = count_samples(dataset)
    _check(loader, batch_size, accumulate)
    loader.pop("drop_last", None)  # There is no last batch: the stream goes on.
    step = batch_size * accumulate * world_size
    begun = start * step if plan is None else plan.samples
    stretches = plan.stretches if plan is not None else ()
    order = SampleOrder(length, seed=seed, shuffle=shuffle, stretches=stretches)
    positions = range(begun, begun + (stop - start) * step, batch_size * world_size)
    keys = _Keys(order, batch_size, positions, rank * batch_size)
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


def _refuse_unindexed(dataset: Any, why: str, hint: str) -> None:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise ConfigError(why.format(type(dataset).__name__), hint=hint)


def count_samples(dataset: Any) -> int:
    """Return how many samples a dataset has.

    Raises:
        ConfigError: none, or they cannot be had by their index.
    """
    _refuse_unindexed(
        dataset,
        "run.batches: {} has no samples by index, so it cannot be positioned at a step",
        "use a map-style dataset, or run.steps() with data of your own",
    )
    if not len(dataset):
        raise ConfigError("run.batches: the dataset is empty")
    return len(dataset)


def _check(loader: dict[str, Any], batch_size: int, accumulate: int) -> None:
    for name in _REFUSED:
        if name in loader:
            raise ConfigError(f"run.batches: {name} is decided by the seed", hint="drop it")
    if batch_size < 1 or accumulate < 1:
        raise ConfigError("run.batches: batch_size and accumulate are at least 1")


class _Keys:
    """A batch sampler over (position, index); micro-batch by micro-batch, rank by rank."""

    def __init__(self, order: SampleOrder, batch_size: int, positions: range, offset: int) -> None:
        self._order, self._batch_size = order, batch_size
        self._positions, self._offset = positions, offset
        """Where each micro-batch begins, and where this rank's share of it does."""

    def __len__(self) -> int:
        """Return how many micro-batches there are."""
        return len(self._positions)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        """Yield the keys of each of this rank's micro-batches."""
        for position in self._positions:
            first = position + self._offset
            yield [(at, self._order[at]) for at in range(first, first + self._batch_size)]


class SeededSamples(Dataset[Any]):
    """The user's dataset by (position, index), its randomness a function of (seed, position)."""

    def __init__(self, dataset: Any, seed: int) -> None:
        """Draw from `dataset`."""
        self._dataset, self._seed = dataset, seed

    def __getitem__(self, key: tuple[int, int]) -> Any:
        """Return the sample of a key made by `_Keys`."""
        position, index = key
        kept = keep_rng() if get_worker_info() is None else None
        _seed_all(derive_seed(self._seed, "sample", position))
        try:
            return self._dataset[index]
        finally:
            if kept is not None:
                put_back_rng(kept)


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


# --- of an elastic world -----------------------------------------------------------------------


class MicroBatches:
    """A dataset, cut as `plan` says."""

    def __init__(
        self,
        dataset: Any,
        plan: BatchPlan,
        *,
        seed: int,
        shuffle: bool,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        """Order `dataset` by (seed, pass); without a length, take its samples one after another.

        Raises:
            ConfigError: its samples cannot be had by their index, or there are none.
        """
        _refuse_unindexed(
            dataset,
            "elastic: {} has no samples by index, so that a lost micro-batch could not be redone",
            "use a map-style dataset, or a stream with __getitem__(position)",
        )
        self._plan = plan
        self._order: SampleOrder | range = range(sys.maxsize)
        if hasattr(dataset, "__len__"):
            if not len(dataset):
                raise ConfigError("elastic: the dataset is empty")
            self._order = SampleOrder(len(dataset), seed=seed, shuffle=shuffle)
        self.plan: dict[str, Any] = {
            "length": str(len(dataset)) if hasattr(dataset, "__len__") else "endless",
            "global_batch": str(plan.global_batch),
            "micro_batch": str(plan.micro_batch),
            "shuffle": str(shuffle),
        }
        """What decides which samples a micro-batch has."""
        self._samples = SeededSamples(dataset, seed)
        self._collate = collate_fn or default_collate

    def load(self, step: int, micro_batch: int) -> Any:
        """Return the micro-batch, collated."""
        keys = [(at, self._order[at]) for at in self._plan.positions(step, micro_batch)]
        return self._collate([self._samples[key] for key in keys])


Load = Callable[[int, int], Any]
"""(step, micro-batch) -> the micro-batch."""

_AHEAD = 2
"""Micro-batches under way for each process, as with torch's DataLoader."""

_LOOK_S = 1.0
"""After so long without a micro-batch it is looked whether its process lives."""

_load: Load
"""In a loading process: what it calls."""


class Prefetcher:
    """`load`, by `workers` processes before it is asked for; by none, as it is."""

    def __init__(self, load: Load, workers: int) -> None:
        """Fork the processes: before there are connections that they would hold open."""
        self._direct, self._most = load, _AHEAD * workers
        self._pool: ProcessPoolExecutor | None = None
        if workers:
            self._pool = ProcessPoolExecutor(
                workers,
                mp_context=multiprocessing.get_context("fork"),
                initializer=_begin,
                initargs=(load, os.getpid()),
            )
            before = multiprocessing.active_children()
            self._pool.submit(int).result()
            self._workers = [p for p in multiprocessing.active_children() if p not in before]
        self._coming: dict[tuple[int, int], Future[Any]] = {}
        self._step = -1
        self._share: list[int] = []
        """What was loaded in the step before, in order."""
        self._loaded: list[int] = []
        """The same of this step."""

    def close(self) -> None:
        """End the processes."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    def load(self, step: int, micro_batch: int) -> Any:
        """Return a micro-batch.

        Raises whatever the dataset raises for it.
        """
        if self._pool is not None:
            if step != self._step:
                self._begin_step(step)
            self._loaded.append(micro_batch)
            coming = self._coming.pop((step, micro_batch), None)
            try:
                for key in islice(self._guess(), self._most):  # As many as may be under way.
                    if key not in self._coming:
                        self._coming[key] = self._pool.submit(_run, *key)
                if coming is not None:
                    return self._take(coming)
            except BrokenProcessPool:
                self.close()
                self._coming.clear()
                say(
                    "a process that loaded data has died (out of memory?): "
                    "this rank loads its own from now"
                )
        return self._direct(step, micro_batch)

    def _take(self, coming: Future[Any]) -> Any:
        """Return a result, also where the pool tells nobody that its process has died.

        Python 3.11's does not, of what is submitted in that instant, and of nothing any more once
        a cancelled call was among what waited.
        """
        while not wait([coming], _LOOK_S).done:
            if not all(worker.is_alive() for worker in self._workers):
                raise BrokenProcessPool
        return coming.result()

    def _begin_step(self, step: int) -> None:
        self._share = self._loaded if step == self._step + 1 else []
        self._step, self._loaded = step, []
        for key in [key for key in self._coming if key[0] < step]:
            self._coming.pop(key).cancel()

    def _guess(self) -> Iterator[tuple[int, int]]:
        """Yield what this rank is to load next, without an end."""
        rest = [number for number in self._share if number not in self._loaded]
        yield from ((self._step, number) for number in rest)
        share = self._share if rest else self._loaded
        yield from ((step, number) for step in count(self._step + 1) for number in share)


def _begin(load: Load, parent: int) -> None:
    """Become a loading process: one thread, and no longer there than the rank."""
    global _load
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    _load = load


def _run(step: int, micro_batch: int) -> Any:
    return _load(step, micro_batch)
