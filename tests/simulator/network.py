"""Virtual time, and messages in it between the simulated parts: late, twice, or never; outages too.

An operator beyond it sends commands over the bad network until each is answered.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from perdure.model.bus.wire import Command, CommandReply

REPEAT_S = 2.0


class VirtualClock:
    """Time that stands still while somebody thinks, and jumps to what is next.

    Calls are made in the order of their time, and then of arrival.
    """

    def __init__(self, start_s: float = 1_000_000.0) -> None:
        """Begin at `start_s`, a job time."""
        self.now = start_s
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        """Have `call` made `delay_s` from now."""
        self._count += 1
        heapq.heappush(self._queue, (self.now + max(0.0, delay_s), self._count, call))

    def step(self) -> bool:
        """Make the next call; False where nothing is left."""
        if not self._queue:
            return False
        at_s, _, call = heapq.heappop(self._queue)
        self.now = max(self.now, at_s)
        call()
        return True


@dataclass(frozen=True, slots=True)
class Weather:
    """The state of the network: its delay, and how much it loses and duplicates."""

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


class Contradiction(Exception):
    """One command, two answers."""


@dataclass(slots=True)
class Operator:
    """Sends commands, and checks what became of each."""

    clock: VirtualClock
    send: Callable[[Command], None]
    """To the controller, if it arrives."""
    sent: dict[str, Command] = field(default_factory=dict)
    answers: dict[str, CommandReply] = field(default_factory=dict)

    def ask(self, command: Command) -> None:
        """Send `command`, again and again until it is answered."""
        self.sent.setdefault(command.id, command)
        if command.id not in self.answers:
            self.send(command)
            self.clock.after(REPEAT_S, lambda: self.ask(command))

    def hear(self, reply: CommandReply) -> None:
        """Take an answer, which may come twice and must not change."""
        known = self.answers.setdefault(reply.id, reply)
        if known != reply:
            raise Contradiction(f"{reply.id} was answered {known}, then {reply}")
