"""One epoch's process group: built over a store's prefix of its own, and given up as a whole.

The members meet at the store first: each writes how far it is, and reads what the others wrote.
That is rendezvous and report in one, so that every member decides from the same reports; and it
waits by looking, so that a newer order can end it, which a blocking wait would not hear.
"""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from perdure.model.codec import decode, encode
from perdure.model.errors import DeviceLostError
from perdure.plan.elastic.commit import MemberProgress
from perdure.plan.elastic.shards import ShardProgress
from perdure.plan.elastic.stage_commit import StageProgress
from perdure.worker.elastic.apart import Broken as Broken
from perdure.worker.elastic.apart import breaking as breaking
from perdure.worker.elastic.communicators import Communicator, Connect, Ticket
from perdure.worker.elastic.communicators.gloo import GlooComm
from perdure.worker.elastic.communicators.gloo import connect as connect_gloo
from perdure.worker.elastic.communicators.lone import LoneComm

_LOOK_S = 0.0002
_LOOK_S_MAX = 0.002
_QUICK_LOOKS = 20
"""How often an operation is looked at before time is let pass, where nothing tells of its end."""
_REST_S = 0.00005
_REST_S_MAX = 0.001
_LEFT_S = 0.25
"""How long a member that does not hear of others' breaks waits on, once it is called away."""
_DRAIN_S = 5.0
_BACKEND = "perdure"
PrefixStore: Any = vars(dist)["PrefixStore"]
TCPStore: Any = vars(dist)["TCPStore"]

AnyProgress = TypeVar("AnyProgress", MemberProgress, ShardProgress, StageProgress)
Opened = TypeVar("Opened", bound="Group")


class Captures:
    """What has captured a world's communicators, such as CUDA graphs, and has to go before them.

    An abort waits for as long as one of them lives.
    """

    def __init__(self) -> None:
        """Know of none."""
        self._lock = threading.Lock()
        self._kept: list[Callable[[], object]] = []
        self.destroyed = False
        """Whether something was, so that what would use it fails."""

    def add(self, destroy: Callable[[], object]) -> None:
        """Have `destroy` called once, when the world is left, in any thread."""
        with self._lock:
            self._kept.append(destroy)

    def destroy(self) -> None:
        """Destroy what there is; one that fails leaves its graph, and so its device, behind."""
        while True:
            with self._lock:
                if not self._kept:
                    return
                first = self._kept.pop(0)
                self.destroyed = True
            with contextlib.suppress(Exception):
                first()

    def destroy_apart(self) -> None:
        """Have a thread destroy what there is: it may wait for what is about to be aborted."""
        with self._lock:
            if not self._kept:
                return
        threading.Thread(target=self.destroy, name="perdure-captures", daemon=True).start()

    @contextlib.contextmanager
    def breaking(self) -> Iterator[None]:
        """Turn the error of who uses what was destroyed into `Broken`: its world is left.

        An error of another cause is raised again by who does the same in the next world.
        """
        try:
            yield
        except RuntimeError as error:
            if type(error) is not RuntimeError or not self.destroyed:
                raise
            raise Broken(f"a graph is gone: {error}".partition("\n")[0]) from None


class Group:
    """The members of one epoch, in order; `index` is this process's place among them."""

    def __init__(
        self,
        members: tuple[int, ...],
        me: int,
        store: Any,
        connect: Connect | None,
        overtaken: Callable[[], bool] = lambda: False,
    ) -> None:
        """Connect. With one member there is nothing to connect.

        Raises:
            Broken: a member was lost meanwhile, or `overtaken()` became true.
        """
        self.members, self.me = members, me
        self.index = members.index(me)
        self.store, self.overtaken = store, overtaken
        self._connect = connect
        self._begun: list[Ticket] = []
        """What nobody has waited for yet."""
        self._lock = threading.Lock()
        self._broken = False
        self.waits_since_s = 0.0
        """Monotonic time at which the wait under way, or the one that failed, began."""
        self.captures = Captures()
        """Of this group, and of those that were opened beside it."""
        self.comm: Communicator = LoneComm()
        if len(members) > 1:
            assert connect is not None
            self.comm = connect(store, self.index, len(members), overtaken)

    def open(self, kind: "type[Opened]", name: str, members: tuple[int, ...] = ()) -> "Opened":
        """Return a group of these members, or of all, beside this one.

        Raises:
            Broken: a member was lost meanwhile.
        """
        store = PrefixStore(name, self.store)
        group = kind(members or self.members, self.me, store, self._connect, self.overtaken)
        group.captures = self.captures
        return group

    def read(self, keys: Sequence[str]) -> list[bytes]:
        """Return what members have written into the store, once it is there.

        Raises:
            Broken: a newer epoch was ordered first.
        """
        return read_keys(self.store, keys, self.overtaken)

    def all_reduce(self, tensor: Tensor) -> None:
        """Begin to sum `tensor` over the members, in place; `wait` ends it."""
        self._begin(lambda: self.comm.all_reduce(tensor))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Begin to copy member `source`'s `tensor` into everyone's."""
        self._begin(lambda: self.comm.broadcast(tensor, self.members.index(source)))

    def all_gather(self, output: Tensor, part: Tensor) -> None:
        """Begin to fill `output` with every member's `part`, in order."""
        self._begin(lambda: self.comm.all_gather(output, part))

    def send(self, tensor: Tensor, to: int, tag: int) -> Ticket:
        """Begin to send `tensor` to a member; return what `wait_for` takes."""
        return self._begin(lambda: self.comm.send(tensor, self.members.index(to), tag))

    def receive(self, tensor: Tensor, source: int, tag: int) -> Ticket:
        """Begin to receive a member's tensor; return what `wait_for` takes."""
        return self._begin(lambda: self.comm.receive(tensor, self.members.index(source), tag))

    def _begin(self, begin: Callable[[], Ticket]) -> Ticket:
        """Have the engine begin something, which `wait` ends.

        Raises:
            Broken: the group is, or a connection is gone.
        """
        if self._broken:
            raise Broken("the world is left")
        ticket = begin()
        self._begun.append(ticket)
        return ticket

    def meet(self) -> None:
        """Wait until every member has come here.

        Raises:
            Broken: a member was lost.
        """
        self.all_reduce(torch.zeros(1))
        self.wait()

    def wait(self) -> None:
        """Wait for all that was begun.

        Raises:
            Broken: one of it has not happened. None of it is under way any more then, so that
                the tensors may be used again.
        """
        begun, self._begun = self._begun, []
        self._end(begun)

    def wait_for(self, ticket: Ticket) -> None:
        """Wait for one transfer that nobody has waited for; what else was begun goes on.

        Raises:
            Broken: it has not happened, and nothing is under way any more.
        """
        if ticket not in self._begun and not self._broken:
            raise ValueError("this was begun in another epoch, or has been waited for")
        self._begun = [one for one in self._begun if one is not ticket]
        self._end([ticket])

    def _end(self, tickets: Sequence[Ticket]) -> None:
        """Wait for these, and judge whether they have happened on this member.

        They have, if their ends were seen and the group was not broken by then: whatever is broken
        may look as if it were complete.

        Raises:
            Broken: they have not.
            DeviceLostError: no operation on the device ends any more.
        """
        self.waits_since_s = time.monotonic()
        for ticket in tickets:
            self._see_end(ticket)
        with self._lock:
            happened = not self._broken
        if not happened:
            self._drain(tickets)
            raise Broken(_find_error(tickets) or "the world was broken")
        self.waits_since_s = 0.0

    def _see_end(self, ticket: Ticket) -> None:
        """Look at an operation until it has ended, or the group is broken; a failure breaks it."""
        looks, rest_s, called_s = _QUICK_LOOKS if self.comm.told else 0, _REST_S, 0.0
        while not self._broken:
            state = self.comm.poll(ticket)
            if state == "failed":
                self.break_()
            if state != "running":
                return
            looks += 1
            if looks <= _QUICK_LOOKS:
                continue
            if not self.comm.heard and self.overtaken():
                # Who has left already tells nobody.
                called_s = called_s or time.monotonic()
                if time.monotonic() - called_s > _LEFT_S:
                    self.break_()
            self.comm.rest(ticket, rest_s)
            rest_s = min(2 * rest_s, _REST_S_MAX)

    def break_(self) -> None:
        """Give the epoch up: what runs ends, and has not happened. By any thread, at once."""
        with self._lock:
            if self._broken:
                return
            self._broken = True
        # Not one after the other: to destroy a graph may take until its kernels see the abort,
        # and the abort takes until the graph is gone.
        self.captures.destroy_apart()
        self.comm.break_()

    def _drain(self, tickets: Sequence[Ticket] = ()) -> None:
        """Wait until nothing is under way in this broken group, `tickets` among it.

        Raises:
            DeviceLostError: something never ends, or the device has an error.
        """
        self._begun = []
        self.comm.break_()  # Another thread may be about to do so.
        self.captures.destroy_apart()  # Of what was captured since the break as well.
        if not self.comm.drained(_DRAIN_S):
            raise DeviceLostError(
                _find_error(tickets) or f"it does not become idle within {_DRAIN_S:g} s of a break",
                hint="this process has lost its device; another one takes its place",
            )

    def give_up(self) -> None:
        """End what is under way, and disconnect: whoever waits for us learns of it."""
        if self._begun:
            self.break_()
        with self._lock:
            broken, self._broken = self._broken, True
        if broken:
            self._drain()
        self.captures.destroy()
        self.comm.close()


def _find_error(tickets: Sequence[Ticket]) -> str:
    """Return why one of these has failed; empty where none is known to have."""
    return next((ticket.error for ticket in tickets if ticket.error), "")


class ShardGroup(Group):
    """The members that together hold one copy of a sharded state.

    It is torch's default process group, because a device mesh asks for one. Where the engine is
    not gloo, that one carries nothing.
    """

    def __init__(
        self,
        members: tuple[int, ...],
        me: int,
        store: Any,
        connect: Connect | None,
        overtaken: Callable[[], bool],
    ) -> None:
        """Connect, also where there is but one member.

        Raises:
            Broken: a member was lost meanwhile, or `overtaken()` became true.
        """
        super().__init__(members, me, store, connect, overtaken)
        self._plain = self.comm
        if not isinstance(self._plain, GlooComm):
            apart = PrefixStore("torch", store)
            self._plain = connect_gloo(apart, self.index, len(members), overtaken)
        _register_backend()
        with breaking(RuntimeError):
            # What torch would connect by itself hears of no order meanwhile.
            dist.init_process_group(
                _BACKEND,
                store=store,
                rank=self.index,
                world_size=len(members),
                pg_options=self._plain.group,
            )

    def give_up(self) -> None:
        """Wait until nothing is under way, disconnect, and forget torch's default group."""
        super().give_up()
        self._plain.close()
        if dist.is_initialized():
            dist.destroy_process_group()


@functools.cache
def _register_backend() -> None:
    """Have torch take a group that is connected, given as its options, for its default one."""
    dist.Backend.register_backend(
        _BACKEND, lambda _, connected: connected, extended_api=True, devices=["cpu"]
    )


def exchange_progress(
    store: Any,
    members: tuple[int, ...],
    me: int,
    member_progress: AnyProgress,
    overtaken: Callable[[], bool],
) -> dict[int, AnyProgress]:
    """Return every member's progress; `me` writes `member_progress`, once.

    Raises:
        Broken: `overtaken()` became true first: there is a newer epoch.
    """
    store.set(f"standing/{me}", encode(member_progress))
    return read_progress(store, members, type(member_progress), overtaken)


def read_progress(
    store: Any,
    members: Sequence[int],
    kind: type[AnyProgress],
    overtaken: Callable[[], bool],
) -> dict[int, AnyProgress]:
    """Return the progress of `members`, once they have written them.

    Raises:
        Broken: `overtaken()` became true first: there is a newer epoch.
    """
    values = read_keys(store, [f"standing/{rank}" for rank in members], overtaken)
    return {rank: decode(value, kind) for rank, value in zip(members, values, strict=True)}


def read_keys(store: Any, keys: Sequence[str], overtaken: Callable[[], bool]) -> list[bytes]:
    """Return what others have written into the store, once it is all there.

    Raises:
        Broken: `overtaken()` became true first.
    """
    pause_s = _LOOK_S
    while keys and not store.check(list(keys)):
        if overtaken():
            raise Broken("a newer epoch was ordered")
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LOOK_S_MAX)
    return list(store.multi_get(list(keys))) if keys else []
