"""Families of noise: by how much the same work takes longer now than usually, by rank and step."""

import math
import random
from collections.abc import Sequence
from typing import Protocol


class Noise(Protocol):
    """Draws what every rank's work takes, as a multiple of what it usually does."""

    def draw(self, top_s: float) -> list[float]:
        """Return a factor for each rank, for the step that begins at about `top_s`."""
        ...


class Lognormal:
    """Independent from step to step and from rank to rank."""

    def __init__(self, chance: random.Random, ranks: int, sigma: float) -> None:
        """Spread by `sigma`."""
        self._chance, self._ranks, self._sigma = chance, ranks, sigma

    def draw(self, top_s: float) -> list[float]:
        """Return the factors."""
        draw, sigma = self._chance.gauss, self._sigma
        return [math.exp(sigma * draw(0.0, 1.0)) for _ in range(self._ranks)]


class Pareto:
    """Mostly alike, now and then many times as long: below an alpha of 2 without a variance."""

    def __init__(self, chance: random.Random, ranks: int, alpha: float) -> None:
        """With that exponent."""
        self._chance, self._ranks, self._alpha = chance, ranks, alpha

    def draw(self, top_s: float) -> list[float]:
        """Return the factors."""
        chance, alpha = self._chance, self._alpha
        return [min(0.9 + 0.1 * chance.paretovariate(alpha), 60.0) for _ in range(self._ranks)]


class Autoregressive:
    """Each step resembles the last one of its rank: the logarithms are AR(1)."""

    def __init__(self, chance: random.Random, ranks: int, sigma: float, rho: float) -> None:
        """`sigma` is of all steps; that of the innovations follows from `rho`."""
        self._chance, self._rho = chance, rho
        self._step_sigma = sigma * math.sqrt(1.0 - rho * rho)
        self._state = [sigma * chance.gauss(0.0, 1.0) for _ in range(ranks)]

    def draw(self, top_s: float) -> list[float]:
        """Return the factors."""
        rho, sigma, draw = self._rho, self._step_sigma, self._chance.gauss
        self._state = [rho * x + sigma * draw(0.0, 1.0) for x in self._state]
        return [math.exp(x) for x in self._state]


class Drift:
    """Each rank's work grows and shrinks slowly, each in its own time; and a little noise."""

    def __init__(self, chance: random.Random, ranks: int, amplitude: float) -> None:
        """By up to `amplitude` of it, in periods of 5 to 40 minutes."""
        self._chance = chance
        self._waves = [
            (amplitude * chance.random(), chance.uniform(300.0, 2400.0), chance.uniform(0.0, 6.28))
            for _ in range(ranks)
        ]

    def draw(self, top_s: float) -> list[float]:
        """Return the factors; a world that stands for ever (`top_s` infinite) has only noise."""
        draw = self._chance.gauss
        if not math.isfinite(top_s):
            return [math.exp(draw(0.0, 0.04)) for _ in self._waves]
        return [
            (1.0 + height * math.sin(6.2832 * top_s / period_s + phase)) * math.exp(draw(0.0, 0.04))
            for height, period_s, phase in self._waves
        ]


class Shared:
    """Load that all places have at the same time, of minutes; and a little noise of each rank."""

    def __init__(self, chance: random.Random, ranks: int) -> None:
        """Begin without load."""
        self._chance, self._ranks = chance, ranks
        self._factor, self._until_s = 1.0, 0.0

    def draw(self, top_s: float) -> list[float]:
        """Return the factors."""
        chance = self._chance
        if top_s >= self._until_s:
            self._factor = chance.choice((1.0, 1.0, 1.3, 1.6, 2.5))
            self._until_s = top_s + chance.expovariate(1.0 / 60.0)
        return [self._factor * math.exp(chance.gauss(0.0, 0.08)) for _ in range(self._ranks)]


class Recorded:
    """Blocks of steps as they were recorded in real jobs, of one rank each (block bootstrap).

    A block keeps what resembles the step before; where it begins is drawn anew for each rank.
    """

    def __init__(
        self, chance: random.Random, ranks: int, series: Sequence[Sequence[float]], block: int = 50
    ) -> None:
        """`series` are the step times of real ranks, each over its median."""
        self._chance, self._series, self._block = chance, series, block
        self._left: list[list[float]] = [[] for _ in range(ranks)]

    def draw(self, top_s: float) -> list[float]:
        """Return the factors."""
        for left in self._left:
            if not left:
                one = self._chance.choice(self._series)
                at = self._chance.randrange(max(1, len(one) - self._block))
                left += reversed(one[at : at + self._block])
        return [left.pop() for left in self._left]
