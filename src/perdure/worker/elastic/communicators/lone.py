"""The communicator of a world of one member: nothing moves, so that everything has happened."""

from torch import Tensor

from perdure.worker.elastic.communicators import State, Ticket


class LoneComm:
    """One member."""

    heard = told = True

    def all_reduce(self, tensor: Tensor) -> Ticket:
        """Leave the tensor as it is: it is the sum."""
        return Ticket("collective", None, "done")

    def broadcast(self, tensor: Tensor, source: int) -> Ticket:
        """Leave the tensor as it is."""
        return Ticket("collective", None, "done")

    def all_gather(self, output: Tensor, part: Tensor) -> Ticket:
        """Copy the only part."""
        output.copy_(part.view_as(output))
        return Ticket("collective", None, "done")

    def send(self, tensor: Tensor, to: int, tag: int) -> Ticket:
        """Refuse: there is nobody."""
        raise AssertionError("a lone member sends to nobody")

    def receive(self, tensor: Tensor, source: int, tag: int) -> Ticket:
        """Refuse: there is nobody."""
        raise AssertionError("a lone member receives from nobody")

    def poll(self, ticket: Ticket) -> State:
        """Return that it is done."""
        return ticket.state

    def rest(self, ticket: Ticket, at_most_s: float) -> None:
        """Return at once: nothing runs."""

    def break_(self) -> None:
        """Do nothing: nothing runs."""

    def drained(self, timeout_s: float) -> bool:
        """Return that nothing runs."""
        return True

    def close(self) -> None:
        """Do nothing: nobody is connected."""
