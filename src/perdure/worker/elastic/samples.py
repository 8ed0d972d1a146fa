"""Samples of micro-batches, and loading them before their turn.

The samples of one micro-batch: a function of (seed, step, micro-batch) alone.

A dataset with a length is shuffled anew for each pass; one without is an endless stream, whose
sample at each position is asked for by its number.

Loaded where it is computed, by whichever rank that is; a redone micro-batch is loaded again and
is the same, augmentation included, because each sample's randomness depends on its position.

Micro-batches loaded before their turn, in processes beside the rank.

What a rank loads in a step is, as long as the world stays what it is, what it loaded in the step
before. So the next ones are guessed from that, and asked for while others are computed. A change
of the world makes some guesses wrong: what was not guessed is loaded by the rank itself, and what
was loaded in vain is dropped when its step is over. A micro-batch is the same wherever it is
loaded (see `data`), so nothing depends on a guess.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import count, islice
from typing import Any

import torch
import torch.multiprocessing as _registers  # noqa: F401  Tensors cross in shared memory.
from torch.utils.data import IterableDataset, default_collate

from perdure.model.errors import ConfigError
from perdure.plan.elastic.microbatches import BatchPlan
from perdure.worker.data import SampleOrder, SeededSamples
from perdure.worker.process import set_death_signal
from perdure.worker.stderr import say


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
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise ConfigError(
                f"elastic: {type(dataset).__name__} has no samples by index, so that a lost "
                "micro-batch could not be redone",
                hint="use a map-style dataset, or a stream with __getitem__(position)",
            )
        self._plan = plan
        self._order: SampleOrder | range = range(sys.maxsize)
        if hasattr(dataset, "__len__"):
            if not len(dataset):
                raise ConfigError("elastic: the dataset is empty")
            self._order = SampleOrder(len(dataset), seed=seed, shuffle=shuffle)
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
            self._pool.submit(int).result()
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
                self._ask(self._pool)
                if coming is not None:
                    return coming.result()
            except BrokenProcessPool:
                self._give_up()
        return self._direct(step, micro_batch)

    def _begin_step(self, step: int) -> None:
        self._share = self._loaded if step == self._step + 1 else []
        self._step, self._loaded = step, []
        for key in [key for key in self._coming if key[0] < step]:
            self._coming.pop(key).cancel()

    def _ask(self, pool: ProcessPoolExecutor) -> None:
        """Have the next micro-batches loaded, as many as may be under way."""
        for key in islice(self._guess(), self._most):
            if key not in self._coming:
                self._coming[key] = pool.submit(_run, *key)

    def _guess(self) -> Iterator[tuple[int, int]]:
        """Yield what this rank is to load next, without an end."""
        rest = [number for number in self._share if number not in self._loaded]
        yield from ((self._step, number) for number in rest)
        share = self._share if rest else self._loaded
        yield from ((step, number) for step in count(self._step + 1) for number in share)

    def _give_up(self) -> None:
        self.close()
        self._coming.clear()
        say(
            "a process that loaded data has died (out of memory?): this rank loads its own from now"
        )


def _begin(load: Load, parent: int) -> None:
    """Become a loading process: one thread, and no longer there than the rank."""
    global _load
    set_death_signal(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    _load = load


def _run(step: int, micro_batch: int) -> Any:
    return _load(step, micro_batch)
