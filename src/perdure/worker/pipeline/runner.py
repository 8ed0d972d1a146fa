"""One cell's part of a step: its action list carried out, over any transport.

A receive is posted a few actions before its turn, so that a message is there when it is needed; a
send is begun and left. Between two actions a newer order ends the attempt with `Broken`, as a lost
member does; then what `done` says is in the gradients, wholly, and nothing else is: a backward
pass contains no communication and is never left half-way.

Of a `Group`, or whatever else is a network, this is asked: `send` and `receive` begin and return at
once, in any order, each pair matched by its tag; a receive may be posted long before its send. Only
`wait` waits, and only a receive that was posted, or a send that the other end has posted its
receive for, may be waited for. What is sent is not altered before that. On gloo a message leaves
when its receive has been posted; nobody waits for a send that nobody receives, so that orders which
`simulate` can carry out can not deadlock here.

Every cell is given the orders of all (`Schedule`), and derives from them alike which cell each of
its messages goes to. gloo tells the end of a send only to who waits for it, so that the memory of
what was sent is freed when something has come back that the receiver can only have sent afterwards;
that, too, is read off the orders.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import accumulate
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from perdure.model.errors import SafetyError
from perdure.model.planning.pipeline import Action, Executed, Orders
from perdure.plan.pipeline.simulate import FREE, Pipe, simulate
from perdure.plan.worlds.chain import StageCost
from perdure.worker.elastic.gradients import GradientTree
from perdure.worker.elastic.group import Broken, Group
from perdure.worker.pipeline.messages import (
    HEADER_BYTES,
    Layout,
    describe,
    list_tensors,
    pack,
    read_layout,
    unpack,
)
from perdure.worker.pipeline.stage import Gradients, Loss, Pass, StageBlocks, Want

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
        return self._find_message(action, action.stage + (action.kind == "B"))

    def output_of(self, action: Action) -> Message | None:
        """Return the message that an action makes; None where nobody else needs it."""
        return self._find_message(action, action.stage + (action.kind == "F"))

    def _find_message(self, action: Action, stage: int) -> Message | None:
        """Return what goes into `stage`, or comes back out of it, for this action or by it."""
        if action.kind == "W" or not 0 < stage < self.stages:
            return None
        m = action.micro_batch
        ends = self.homes[stage - 1, m], self.homes[stage, m]
        source, target = ends if action.kind == "F" else ends[::-1]
        return None if source == target else Message(action.kind, stage, m, source, target)

    def list_releases(self, cell: int) -> dict[Message, list[Message]]:
        """Return, by a message that comes to `cell`, those from it that had arrived before.

        What its receiver needed for an action has arrived when the receiver sends what it made
        in that action or a later one. Of such messages the first that this cell waits for counts.
        """
        releases: dict[Message, list[Message]] = {}
        arrivals = {
            message: at
            for at, action in enumerate(self.orders[cell])
            if (message := self.input_of(action)) is not None
        }
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


AHEAD = 3
"""How many messages may be waited for before their turn."""
_STEPS = 4
"""Tags repeat after so many steps, long after the messages of a step have all come."""
_KINDS = {"F": 0, "B": 1, "rest": 2}

Edge = tuple[int, int, int]
"""(stage, source, target)"""


class Runner:
    """Carries out the actions of one cell, step after step in one world."""

    def __init__(
        self,
        schedule: Schedule,
        cell: int,
        parts: Sequence[StageBlocks],
        transport: Group,
        *,
        load: Callable[[int, int], Any],
        loss: Loss,
        seed: int,
        trees: Mapping[int, GradientTree] | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        """Run cell number `cell` of `schedule`, which holds `parts`.

        `load(step, micro_batch)` returns (inputs, targets); `loss(output, targets)` a mean.
        With `trees`, one a block, gradients go there micro-batch by micro-batch and not to
        `p.grad`: their sums are then the same in every world.
        """
        self.schedule, self.cell, self.device = schedule, cell, device
        self.done: set[Pair] = set()
        """(stage, micro-batch) whose gradients of weights are all added."""
        self.losses: dict[int, Tensor] = {}
        """Of the step under way, where this cell has the last stage."""
        self.executed: list[Executed] = []
        """The step's actions; seconds from its beginning, an action's once its input was there."""
        self.before: Callable[[Action], object] = lambda action: None
        """Called before each action, after its input has come."""
        self._parts = {part.stage: part for part in parts}
        self._transport, self._load, self._trees = transport, load, trees
        for part in parts:
            part.seed, part.apart = seed, trees is not None
            part.loss = loss if part.stage == schedule.stages - 1 else None
        self._mine = schedule.orders[cell]
        self._coming = [m for a in self._mine if (m := schedule.input_of(a)) is not None]
        self._releases = schedule.list_releases(cell)
        self._reserved_bytes: dict[Edge, int] = {}
        """Bytes of payload that an edge's messages have room for; the same at both ends."""
        self._reset(0)

    def run(
        self,
        step: int,
        overtaken: Callable[[], bool] = lambda: False,
        *,
        counted: Collection[Pair] = (),
    ) -> dict[int, float]:
        """Do a step; return the losses of the micro-batches whose last stage is here.

        `counted` are (stage, micro-batch) whose gradients the blocks have already, from an
        earlier attempt: only what others need of them is computed.

        Raises:
            Broken: the world has changed; `done` says what was finished.
        """
        self._reset(step, counted)
        try:
            self._carry_out(overtaken)
        except BaseException:
            self._forget()
            raise
        for edge, size in self._largest.items():
            self._reserved_bytes[edge] = max(size, self._reserved_bytes.get(edge, 0))
        return {m: float(loss) for m, loss in self.losses.items()}

    def list_adding(self) -> list[Action]:
        """Return the actions of a step that add to gradients of weights, in order."""
        split = self.schedule.split
        return [
            a for a in self._mine
            if a.kind == ("W" if (a.stage, a.micro_batch) in split else "B")
        ]  # fmt: skip

    def _carry_out(self, overtaken: Callable[[], bool]) -> None:
        began = time.monotonic()
        for action in self._mine:
            if overtaken():
                self._transport.break_()
                raise Broken("a new world was ordered")
            self._await_input(action)
            self.before(action)
            begin_s = time.monotonic() - began
            match action.kind:
                case "F":
                    self._forward(action)
                case "B":
                    self._backward(action)
                case "W":
                    self._weights(action)
            self.executed.append(Executed(action, begin_s, time.monotonic() - began))
        for works in self._sent.values():
            for work, _ in works:
                self._transport.wait_for(work)
        self._sent.clear()

    # --- actions ------------------------------------------------------------------------------

    def _reset(self, step: int, counted: Collection[Pair] = ()) -> None:
        self._step, self._counted = step, frozenset(counted)
        self.done, self.losses, self.executed = set(), {}, []
        self._largest: dict[Edge, int] = {}
        self._next = 0
        self._forget()

    def _forget(self) -> None:
        """Hold nothing that a step needs only until its end."""
        self._passes: dict[Pair, Pass] = {}
        self._values: dict[tuple[Direction, int, int], Any] = {}
        """What a stage here made for another one here, or what has come for it."""
        self._layouts: dict[Pair, Layout] = {}
        """Of the inputs of a stage: of what was received, and of what was sent on."""
        self._loaded: dict[int, Any] = {}
        self._posted: dict[Message, tuple[Tensor, Any]] = {}
        self._sent: dict[Message, list[tuple[Any, Tensor]]] = {}

    def _forward(self, action: Action) -> None:
        stage, m = action.stage, action.micro_batch
        part, kept = self._parts[stage], Pass(self._step, m)
        self._passes[stage, m] = kept
        last = stage + 1 == self.schedule.stages
        if last:
            kept.target = self._take_sample(m, 1)
        taken = self._values.pop(("F", stage, m)) if stage > 0 else self._take_sample(m, 0)
        output = part.forward(taken, kept, grads=stage > 0)
        if last:
            self.losses[m] = output.detach()
            return
        layout = describe(output, part.mark_differing(output, kept))
        self._layouts[stage + 1, m] = layout
        message = self.schedule.output_of(action)
        if message is None:
            tensors = [t.detach() for t in list_tensors(output)]
            self._values["F", stage + 1, m] = _restore(tensors, layout)
            return
        edge = (stage + 1, message.source, message.target)
        room = self._reserve_bytes(edge, layout)
        tensors = list(list_tensors(output))
        self._send(message, pack(tensors, layout, header=True, room=room), "F")
        if layout.payload > room:
            rest = pack(tensors, layout, header=False, room=layout.payload)
            self._send(message, rest, "rest")

    def _backward(self, action: Action) -> None:
        stage, m = action.stage, action.micro_batch
        part, kept = self._parts[stage], self._passes[stage, m]
        split = (stage, m) in self.schedule.split
        want: Want = "split" if split else "all"
        if (stage, m) in self._counted:
            want = "inputs"
        grads: Gradients | None = None
        if stage + 1 < self.schedule.stages:
            given = iter(self._values.pop(("B", stage + 1, m)))
            layout = self._layouts.pop((stage + 1, m))
            grads = [next(given) if kind.differs else None for kind in layout.kinds]
        found = part.backward(grads, kept, want)
        if not split:
            self._finish(stage, m)
        if stage == 0:
            return
        layout = self._layouts.pop((stage, m))
        wanted: Any = [
            grad if grad is not None else torch.zeros(kind.shape, dtype=getattr(torch, kind.dtype))
            for kind, grad in zip(layout.kinds, found, strict=True)
            if kind.differs
        ]
        message = self.schedule.output_of(action)
        if message is None:
            self._layouts[stage, m] = layout
            self._values["B", stage, m] = wanted
            return
        back = layout.gradients()
        if back.payload:
            self._send(message, pack(wanted, back, header=False, room=back.payload), "B")

    def _weights(self, action: Action) -> None:
        stage, m = action.stage, action.micro_batch
        self._parts[stage].backward_weights(self._passes[stage, m])
        self._finish(stage, m)

    def _finish(self, stage: int, m: int) -> None:
        """All of a micro-batch's gradients are there: forget the rest of it."""
        kept = self._passes.pop((stage, m))
        if (stage, m) in self._counted:
            return
        if self._trees is not None:
            for number, gradients in sorted(kept.gradients.items()):
                self._trees[number].add((0, m), gradients)
        self.done.add((stage, m))

    def _take_sample(self, m: int, which: int) -> Any:
        """Return inputs (0) or targets (1); loaded once where this cell needs both."""
        if m not in self._loaded:
            loaded = self._load(self._step, m)
            homes, last = self.schedule.homes, self.schedule.stages - 1
            if homes[0, m] == homes[last, m]:
                self._loaded[m] = loaded
            return loaded[which]
        return self._loaded.pop(m)[which]

    # --- messages -----------------------------------------------------------------------------

    def _await_input(self, action: Action) -> None:
        """Wait for what an action needs, and post receives for those that follow."""
        message = self.schedule.input_of(action)
        if message is None:
            return
        while self._next < len(self._coming) and len(self._posted) < AHEAD:
            if not self._post(self._coming[self._next]):
                break
            self._next += 1
        stage, m = message.stage, message.micro_batch
        buffer, work = self._posted.pop(message)
        if work is not None:
            self._transport.wait_for(work)
        if message.direction == "B":
            self._values["B", stage, m] = unpack(
                buffer, self._layouts[stage, m].gradients(), self.device
            )
        else:
            layout = self._layouts[stage, m] = read_layout(buffer)
            room = self._reserve_bytes((stage, message.source, message.target), layout)
            payload = buffer[HEADER_BYTES:]
            if layout.payload > room:
                payload = torch.empty(layout.payload, dtype=torch.uint8)
                source = self.schedule.members[message.source]
                tag = self._tag("rest", stage, m)
                self._transport.wait_for(self._transport.receive(payload, source, tag))
            self._values["F", stage, m] = _restore(unpack(payload, layout, self.device), layout)
        for sent in self._releases.get(message, ()):
            for work, _ in self._sent.pop(sent, ()):
                self._transport.wait_for(work)

    def _post(self, message: Message) -> bool:
        """Begin to receive; return whether it is known how much will come."""
        stage, m = message.stage, message.micro_batch
        if message.direction == "B":
            layout = self._layouts.get((stage, m))
            if layout is None:
                return False
            size = layout.gradients().payload
        else:
            size = HEADER_BYTES + self._reserved_bytes.get(
                (stage, message.source, message.target), 0
            )
        buffer, work = torch.empty(size, dtype=torch.uint8), None
        if size:
            source = self.schedule.members[message.source]
            tag = self._tag(message.direction, stage, m)
            work = self._transport.receive(buffer, source, tag)
        self._posted[message] = buffer, work
        return True

    def _reserve_bytes(self, edge: Edge, layout: Layout) -> int:
        self._largest[edge] = max(layout.payload, self._largest.get(edge, 0))
        return self._reserved_bytes.get(edge, 0)

    def _send(self, message: Message, buffer: Tensor, kind: str) -> None:
        tag = self._tag(kind, message.stage, message.micro_batch)
        work = self._transport.send(buffer, self.schedule.members[message.target], tag)
        self._sent.setdefault(message, []).append((work, buffer))

    def _tag(self, kind: str, stage: int, micro_batch: int) -> int:
        place = (self._step % _STEPS) * len(_KINDS) + _KINDS[kind]
        return (place * self.schedule.stages + stage) * self.schedule.width + micro_batch


def _restore(tensors: Sequence[Tensor], layout: Layout) -> Any:
    """Return what a block takes: tensors that say whether a gradient of them is wanted."""
    for tensor, kind in zip(tensors, layout.kinds, strict=True):
        tensor.requires_grad_(kind.differs)
    return tensors[0] if layout.single else tuple(tensors)
