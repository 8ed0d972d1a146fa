"""Orders of a step as one cell needs them: who has what it needs, and what its messages prove.

Every cell is given the orders of all, and derives from them alike which cell each of its messages
goes to. gloo tells the end of a send only to who waits for it, so that the memory of what was sent
is freed when something has come back that the receiver can only have sent afterwards; that, too,
is read off the orders.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from operator import itemgetter
from typing import Literal, NamedTuple

from perdure.model.errors import SafetyError
from perdure.model.planning.pipeline import Action, Orders
from perdure.plan.pipeline.simulate import FREE, Pipe, simulate
from perdure.plan.worlds.chain import StageCost

Direction = Literal["F", "B"]
Pair = tuple[int, int]
"""(stage, micro-batch)"""


class Message(NamedTuple):
    """Activations into `stage`, or the gradients of them on their way back."""

    direction: Direction
    stage: int
    micro_batch: int
    source: int
    """Cell."""
    target: int
    """Cell."""


class Schedule:
    """What all cells do in a step; the same in every process."""

    def __init__(self, orders: Orders, stages: int, members: Sequence[int]) -> None:
        """Check `orders` over `stages` stages; cell i is done by the member `members[i]`.

        Raises:
            SafetyError: some stage of a micro-batch is done twice, or not at all, or by two cells.
            DeadlockError: cells would wait for one another for ever.
        """
        self.orders, self.stages, self.members = orders, stages, tuple(members)
        self.homes: dict[Pair, int] = {}
        self.split: set[Pair] = set()
        """Whose gradients of weights are an action of their own."""
        kinds: dict[str, set[Pair]] = {"F": set(), "B": set(), "W": self.split}
        for cell, mine in enumerate(orders):
            for action in mine:
                pair = (action.stage, action.micro_batch)
                if pair in kinds[action.kind] or self.homes.setdefault(pair, cell) != cell:
                    raise SafetyError(f"{action} is ordered twice, or apart from its forward")
                kinds[action.kind].add(pair)
        self.micro_batches = tuple(sorted({m for _, m in kinds["F"]}))
        self.width = 1 + max(self.micro_batches, default=0)
        wanted = {(s, m) for s in range(stages) for m in self.micro_batches}
        if kinds["F"] != wanted or kinds["B"] != wanted or not self.split <= wanted:
            raise SafetyError("the orders are no step: a forward or a backward is missing")
        unit = StageCost(1.0, 1.0, 1.0, 0, 0, 0.0)
        simulate(orders, Pipe([unit] * stages, lambda *_: FREE, [0.0] * stages))

    def input_of(self, action: Action) -> Message | None:
        """Return the message that an action waits for; None where it needs none."""
        stage, m = action.stage, action.micro_batch
        if action.kind == "F" and stage > 0:
            return self._message("F", stage, m)
        if action.kind == "B" and stage + 1 < self.stages:
            return self._message("B", stage + 1, m)
        return None

    def output_of(self, action: Action) -> Message | None:
        """Return the message that an action makes; None where nobody else needs it."""
        stage, m = action.stage, action.micro_batch
        if action.kind == "F" and stage + 1 < self.stages:
            return self._message("F", stage + 1, m)
        if action.kind == "B" and stage > 0:
            return self._message("B", stage, m)
        return None

    def _message(self, direction: Direction, stage: int, m: int) -> Message | None:
        ends = self.homes[stage - 1, m], self.homes[stage, m]
        source, target = ends if direction == "F" else ends[::-1]
        return None if source == target else Message(direction, stage, m, source, target)

    def list_releases(self, cell: int) -> dict[Message, list[Message]]:
        """Return, by a message that comes to `cell`, those from it that had arrived before.

        What its receiver needed for an action has arrived when the receiver sends what it made
        in that action or a later one. Of such messages the first that this cell waits for counts.
        """
        releases: dict[Message, list[Message]] = {}
        arrivals = {}
        for at, action in enumerate(self.orders[cell]):
            message = self.input_of(action)
            if message is not None:
                arrivals[message] = at
        for peer in sorted({message.source for message in arrivals}):
            taken: list[tuple[int, Message]] = []
            given: list[tuple[int, Message]] = []
            for at, action in enumerate(self.orders[peer]):
                coming, leaving = self.input_of(action), self.output_of(action)
                if coming is not None and coming.source == cell:
                    taken.append((at, coming))
                if leaving is not None and leaving.target == cell:
                    given.append((at, leaving))
            answers = [message for _, message in reversed(given)]
            first = list(accumulate(answers, partial(min, key=arrivals.__getitem__)))
            for at, message in taken:
                later = len(given) - bisect_left(given, at, key=itemgetter(0))
                if later:
                    releases.setdefault(first[later - 1], []).append(message)
        return releases
