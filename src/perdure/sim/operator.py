"""An operator in the simulator: sends commands over a bad network until each is answered."""

from collections.abc import Callable
from dataclasses import dataclass, field

from perdure.model.bus.wire import Command, CommandReply
from perdure.sim.clock import VirtualClock

REPEAT_S = 2.0


class Contradiction(Exception):
    """One command, two answers."""


@dataclass(slots=True)
class Operator:
    """Who sent what, and what became of it."""

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
