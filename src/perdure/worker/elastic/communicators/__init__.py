"""What moves tensors between the members of one epoch, and what every engine for that promises.

A communicator decides nothing. `Group` holds one, says when it is broken, and judges what has
happened; the engines (`gloo`, `lone`, `nccl`, and `fake` for tests) say only what they see.

No engine is asked to wait for an end: a wait that ends by the clock would abort NCCL's communicator
for good, and would close all connections of a transfer of gloo's. Whoever waits looks (`poll`) and
lets time pass (`rest`).

An end that is seen proves nothing by itself. What NCCL aborts leaves its kernel in an ordinary way,
and looks as if it were complete; only that nothing was broken until after its end proves that it
has ended by itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

State = Literal["running", "done", "failed"]
Kind = Literal["collective", "send", "receive"]


@dataclass(slots=True, eq=False)
class Ticket:
    """One operation that was begun; only the communicator that has given it understands it."""

    kind: Kind
    work: Any
    """What the engine knows it by."""
    state: State = "running"
    """As it was last seen."""
    error: str = ""
    """Why it has failed."""
    waiter: Any = None
    """The future of a thread that waits for it, where the engine needs one."""

    def end(self, error: str = "") -> None:
        """Note its end, which is a failure if there is an error."""
        self.state, self.error = "failed" if error else "done", error.partition("\n")[0]


class Communicator(Protocol):
    """The members of one epoch, over one engine; a member is named by its place among them.

    Members begin the operations of all in the same order. A tensor belongs to the engine from the
    beginning of an operation until its end is seen, or until `drained` has returned true.
    """

    heard: bool
    """A break here ends what other members wait for. Where it does not, each breaks its own."""
    told: bool
    """`rest` returns at an operation's very end, so that nothing is gained by looking often."""

    def all_reduce(self, tensor: Tensor) -> Ticket:
        """Begin to sum `tensor` over the members, in place.

        Raises:
            Broken: it cannot begin any more. So says every operation.
        """

    def broadcast(self, tensor: Tensor, source: int) -> Ticket:
        """Begin to copy the tensor of member `source` into everyone's."""

    def all_gather(self, output: Tensor, part: Tensor) -> Ticket:
        """Begin to fill `output` with every member's `part`, in order."""

    def send(self, tensor: Tensor, to: int, tag: int) -> Ticket:
        """Begin to send `tensor` to a member; an engine without tags keeps their order."""

    def receive(self, tensor: Tensor, source: int, tag: int) -> Ticket:
        """Begin to receive a member's tensor."""

    def poll(self, ticket: Ticket) -> State:
        """Return how an operation looks now; this never waits."""

    def rest(self, ticket: Ticket, at_most_s: float) -> None:
        """Let time pass while an operation runs.

        An engine that is told of ends returns at this one's end or at a break, and may take as
        long as that; any other returns after `at_most_s`.
        """

    def break_(self) -> None:
        """End whatever runs; by any thread, any number of times, and without waiting for it."""

    def drained(self, timeout_s: float) -> bool:
        """Return, after a break, whether nothing of this runs any more; all tickets have ended.

        It takes `timeout_s` at most. Where it is false, the device is lost to this process.
        """

    def close(self) -> None:
        """Disconnect. Nothing is under way any more, or it was broken."""


Connect = Callable[[Any, int, int, Callable[[], bool]], Communicator]
"""(store, own place, members, what hears of a newer order) -> a communicator, once all are there"""
