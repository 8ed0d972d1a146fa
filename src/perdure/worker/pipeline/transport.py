"""Tensors from one member to another: what the runner asks of a network.

`send` and `receive` begin and return at once, in any order, each pair matched by its tag; a
receive may be posted long before its send. Only `wait` waits, and only a receive that was posted,
or a send that the other end has posted its receive for, may be waited for. What is sent is not
altered before that. On gloo a message leaves when its receive has been posted; nobody waits for a
send that nobody receives, so that orders which `simulate` can carry out can not deadlock here.
"""

from typing import Any, Protocol

from torch import Tensor


class Transport(Protocol):
    """Point-to-point transfers between the members of one world.

    Each method raises `Broken` once a member was lost or the world was ordered to change.
    """

    def send(self, tensor: Tensor, to: int, tag: int) -> Any:
        """Begin to send `tensor` to the member `to`; return what `wait_for` takes."""

    def receive(self, tensor: Tensor, source: int, tag: int) -> Any:
        """Begin to fill `tensor` with what the member `source` sends under `tag`."""

    def wait_for(self, work: Any) -> None:
        """Wait until one transfer has ended."""

    def interrupt(self) -> None:
        """End all transfers that are under way, here and at the others: each raises `Broken`."""
