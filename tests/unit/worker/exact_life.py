"""Lives of one training loop, in one process: each begins with fresh objects and restores."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perdure.model.events import AnyEvent, CheckpointFailed, CheckpointRestored
from perdure.model.job import CheckpointConfig
from perdure.worker.checkpoint import Checkpointer, attributes

attributes._LIBRARIES += (__file__,)  # Not the script's own.
STEPS, EVERY, KILLS = 20, 4, (7, 14)


class Life:
    """What a loop sees of perdure between its start and its end or kill."""

    __module__ = "perdure.worker"  # As `Run`: no library of the script.

    def __init__(self, url: str, number: int, ends_at: int, *, saves: bool) -> None:
        self.events: list[AnyEvent] = []
        self.saver = Checkpointer(
            url=url, config=CheckpointConfig(keep_last=2), rank=0, world_size=1,
            generation=number, emit=self.events.append, now=lambda: 0.0,
        )  # fmt: skip
        self._ends_at, self._committed, self._begun, self._saves = ends_at, 0, False, saves

    def register(self, **objects: Any) -> None:
        for name, value in objects.items():
            self.saver.register(name, value)

    def steps(self, until: int = STEPS) -> Iterator[int]:
        if not self._begun:
            self._begun = True
            self.saver.check()
            self._committed = self.saver.restore({})
        while self._committed < min(until, self._ends_at):
            self.saver.begin_step()
            yield self._committed
            self._committed += 1
            if self._saves and self._committed % EVERY == 0:
                self.saver.save(self._committed, reason="interval", extra={})
        if self._committed == self._ends_at:
            self.saver.close()

    def find(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def live(
    body: Callable[[Life], Iterator[Tensor]],
    url: str,
    number: int = 0,
    ends_at: int = STEPS,
    *,
    saves: bool = True,
) -> tuple[dict[int, str], Life]:
    """Run one life; return the loss of each step to the last bit, by step."""
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    life, losses = Life(url, number, ends_at, saves=saves), dict[int, str]()
    for loss in body(life):
        losses[life._committed] = float(loss.detach()).hex()
        if life._committed + 1 == ends_at and ends_at < STEPS:
            break  # Killed within the step.
    life.saver.close()
    assert not life.find(CheckpointFailed)
    return losses, life


def find_difference(body: Callable[[Life], Iterator[Tensor]], folder: str) -> tuple[list[int], str]:
    """Return the steps whose losses differ if the loop is killed twice, and what perdure says."""
    undisturbed, _ = live(body, f"{folder}/undisturbed", saves=False)
    losses: dict[int, str] = {}
    said = ""
    for number, ends_at in enumerate((*KILLS, STEPS)):
        found, life = live(body, f"{folder}/killed", number, ends_at)
        restored, *more = life.find(CheckpointRestored)
        assert restored.step == ((KILLS[number - 1] - 1) // EVERY * EVERY if number else 0)
        said = said or "; ".join(
            one.why_not_exact for one in (restored, *more) if one.why_not_exact
        )
        losses |= found
    assert undisturbed.keys() == losses.keys() == set(range(STEPS))
    return [step for step in undisturbed if losses[step] != undisturbed[step]], said
