"""Iterators of DataLoaders: how many persist, and which are read across steps.

Persistent workers draw from the generators once in a life.

Their iterator draws a seed for the workers when it is made. A script that was not killed makes it
once, and resets it in each pass. After a resume it is made again: the seed is drawn once more, and
the order of samples and each dropout would be others. So a checkpoint has the number of such
iterators, and as many draws are taken back after a resume.
"""

import functools
import weakref
from typing import Any

import torch
from torch.utils.data import dataloader

_live: "weakref.WeakSet[Any]" = weakref.WeakSet()
_open: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()
"""Iterator that was made -> its loader, weakly."""
_left = 0
"""Iterators that are still to be made again."""


def watch_loaders() -> None:
    """See each iterator that is made from now on."""
    kind: Any = dataloader._BaseDataLoaderIter
    make = kind.__init__
    if hasattr(make, "__wrapped__"):
        return

    @functools.wraps(make)
    def make_and_note(self: Any, loader: Any) -> None:
        global _left
        persists = loader.persistent_workers and loader.generator is None
        before = torch.get_rng_state() if persists and _left else None
        make(self, loader)
        _open[self] = weakref.ref(loader)
        if persists:
            _live.add(self)
        if before is not None:
            _left -= 1
            torch.set_rng_state(before)

    kind.__init__ = make_and_note


def count_loaders() -> int:
    """Return how many iterators there are that a resume would make again."""
    return len(_live)


def resume_loaders(count: int) -> None:
    """Take back the draws of the next `count` iterators that are made."""
    global _left
    _left = max(0, count - len(_live))


def list_open_loaders(kept: set[int]) -> list[str]:
    """Return what DataLoaders are read across steps, but for those that have one of the ids."""
    for iterator, loader in list(_open.items()):
        made, data = loader(), type(iterator._dataset)
        if id(made) in kept or data.__module__.startswith("perdure."):
            continue
        try:
            length: float = len(made if made is not None else iterator._index_sampler)
        except TypeError:  # Its data are iterable only.
            length = float("inf")
        if 0 < iterator._num_yielded < length:
            return ["the place in a DataLoader"]
    return []
