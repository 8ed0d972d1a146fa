"""Messages between the simulated parts: late, twice, or never; and outages of the server."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from perdure.sim.clock import VirtualClock


@dataclass(frozen=True, slots=True)
class Weather:
    """How bad the network is."""

    delay_s: float = 0.002
    """Mean; exponentially distributed."""
    loss: float = 0.0
    duplicate: float = 0.0


class Network:
    """Delivers, or does not."""

    def __init__(self, clock: VirtualClock, chance: random.Random, weather: Weather) -> None:
        """Draw every misfortune from `chance`."""
        self._clock, self._chance, self._weather = clock, chance, weather
        self._down_until_s = 0.0

    def cut(self, duration_s: float) -> None:
        """Lose everything for a while: the NATS server is down."""
        self._down_until_s = max(self._down_until_s, self._clock.now + duration_s)

    def send(self, deliver: Callable[[], None]) -> None:
        """Call `deliver` some time later: usually once."""
        copies = 2 if self._chance.random() < self._weather.duplicate else 1
        for _ in range(copies):
            delay_s = self._chance.expovariate(1.0 / self._weather.delay_s)
            lost = self._chance.random() < self._weather.loss
            if not lost and self._clock.now >= self._down_until_s:
                self._clock.after(delay_s, deliver)
