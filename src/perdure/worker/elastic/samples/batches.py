"""The samples of one micro-batch: a function of (seed, step, micro-batch) alone.

A dataset with a length is shuffled anew for each pass; one without is an endless stream, whose
sample at each position is asked for by its number.

Loaded where it is computed, by whichever rank that is; a redone micro-batch is loaded again and
is the same, augmentation included, because each sample's randomness depends on its position.
"""

import sys
from collections.abc import Callable
from typing import Any

from torch.utils.data import IterableDataset, default_collate

from perdure.model.errors import ConfigError
from perdure.plan.elastic.microbatches import BatchPlan
from perdure.worker.data import SampleOrder, seed_samples


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
        self._samples = seed_samples(dataset, seed)
        self._collate = collate_fn or default_collate

    def indices(self, step: int, micro_batch: int) -> list[int]:
        """Return the dataset's indices of a micro-batch."""
        return [self._order[at] for at in self._plan.positions(step, micro_batch)]

    def load(self, step: int, micro_batch: int) -> Any:
        """Return the micro-batch, collated."""
        keys = [(at, self._order[at]) for at in self._plan.positions(step, micro_batch)]
        return self._collate([self._samples[key] for key in keys])
