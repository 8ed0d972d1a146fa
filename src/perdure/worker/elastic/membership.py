"""Who belongs to the world: the controller's orders, as the training thread meets them.

An order is a level: the newest epoch counts. The control thread takes it, breaks what is in
flight, and never waits; the training thread looks at the newest number between two micro-batches
and wherever it would wait. Alone, or under torchrun, the first world is the only one.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from perdure.model.errors import PlatformError
from perdure.model.events import AnyEvent, RankJoined, WorldBroken
from perdure.model.orders import FollowWorld, ReformWorld
from perdure.model.steering import Steering
from perdure.worker.attach import Attachment, stand_alone
from perdure.worker.elastic.apart import make_apart
from perdure.worker.elastic.group import PrefixStore, TCPStore
from perdure.worker.elastic.survival import outlive_errors
from perdure.worker.interrupt import shut_down_gloo
from perdure.worker.settings import read_steering
from perdure.worker.store import bind_store, reach_store, serve_store
from perdure.worker.system.stderr import say

_ORDER_S = 60.0
"""How long a broken world waits for the next one before its ranks give up."""
_CONNECT_S = 10.0
_TRY_S = 0.5
_LOOK_S = 0.05
_BREAK_S_MAX = 0.5


class Membership:
    """One rank's view of the world that it is in."""

    def __init__(self, attachment: Attachment | None) -> None:
        """Join `attachment`'s job; with None, or without its control line, stand alone."""
        env = os.environ
        self.attachment = attachment = attachment or stand_alone()
        attachment.enter("init")
        outlive_errors(env, say)
        self.me = int(env.get("PERDURE_MEMBER", "") or env.get("RANK", "0"))
        self.generation = int(env.get("PERDURE_GENERATION", "0") or 0)
        self.epoch = -1
        """Of the world that this rank has formed, or is forming."""
        self.joins = "PERDURE_MEMBER" in env
        """Whether it comes into a world that exists already."""
        self.break_groups: Callable[[], object] = lambda: None
        """Breaks the groups of the world that this rank is in. It does not wait."""
        self.on_order: Callable[[], object] = lambda: None
        """Hears of a newer epoch, in the control thread."""
        self.on_join: Callable[[FollowWorld], object] = lambda order: None
        """Hears in the control thread of a rank that joins, if this rank is one of its donors."""
        self._changed = threading.Condition()
        self._order = ReformWorld(
            generation=self.generation,
            epoch=-1 if self.joins else 0,
            ranks=() if self.joins else tuple(range(int(env.get("WORLD_SIZE", "1")))),
            reason="the first world",
        )
        """The newest; of epoch -1 where none has come yet."""
        self._follow: FollowWorld | None = None
        self._coming = False
        """An order has come, and is being carried out before it can be read."""
        self._meet = ""
        """Address of the store of the world that this rank has formed, or is forming."""
        self._stores: dict[str, Any] = {}
        """Connections to stores, by address."""
        self._address = ""
        """Of the store that this rank serves."""
        self._served: Any = None
        self.supervised = attachment.control is not None
        attachment.obey(self.take, ReformWorld)
        attachment.obey(self.take_follow, FollowWorld)

    def now(self) -> float:
        """Return job time, or some time that only goes on."""
        return self.attachment.now()

    def emit(self, event: AnyEvent) -> None:
        """Tell the controller, where there is one."""
        self.attachment.emit(event)

    def announce(self, feed: str = "", state_bytes: int = 0) -> None:
        """Say that this rank is ready to be a member; `feed` is where it gives its state away."""
        if self.supervised and not self._address:
            self._address = self._serve()
        self.emit(
            RankJoined(
                generation=self.generation,
                rank=self.me,
                depth="elastic",
                store=self._address,
                feed=feed,
                state_bytes=state_bytes,
            )
        )

    def take(self, order: ReformWorld) -> None:
        """Take an order. Called in the control thread; never waits."""
        if order.generation != self.generation:
            return
        with self._changed:
            if order.epoch <= self._order.epoch:
                return
            self._coming = True
        if order.urgent:
            # Before the order can be read: what is built on it must not be broken.
            self._break()
        with self._changed:
            self._order, self._coming = order, False
            self._changed.notify_all()
        self.on_order()
        if order.urgent:
            threading.Thread(
                target=self._keep_breaking, args=(order.epoch,), name="perdure-break", daemon=True
            ).start()

    def take_follow(self, order: FollowWorld) -> None:
        """Take the order to follow the world, or to send a state to a rank that follows.

        Called in the control thread; never waits.
        """
        if order.generation != self.generation:
            return
        if order.rank != self.me:
            self.on_join(order)
            return
        with self._changed:
            held = (self._follow.epoch, self._follow.key) if self._follow is not None else (-1, "")
            # A new controller gives another key.
            if order.epoch > held[0] or (order.epoch == held[0] and order.key != held[1]):
                self._follow = order
                self._changed.notify_all()

    def wait_call(self, followed: int) -> FollowWorld | None:
        """Wait for the order to form a world, or to follow one (of epoch above `followed`).

        Returns the latter; None where the former has come.
        """
        with self._changed:
            while not self.overtaken():
                if self._follow is not None and self._follow.epoch > followed:
                    return self._follow
                self._changed.wait(_LOOK_S)
        return None

    def _keep_breaking(self, epoch: int) -> None:
        """Break the old world again until the training thread has left it.

        A group that was half connected when the order came keeps the connections that it made
        after the blow, and its first collective would wait on them for ever.
        """
        pause_s, deadline = _LOOK_S, time.monotonic() + _ORDER_S
        while time.monotonic() < deadline:
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _BREAK_S_MAX)
            with self._changed:  # While it is held, nobody begins to form the new world.
                if self.epoch >= epoch:
                    return
                self._break()

    def _break(self) -> None:
        """Break the world, and what is half connected of it."""
        self.break_groups()
        with contextlib.suppress(OSError):
            shut_down_gloo()

    @property
    def ordered(self) -> int:
        """Return the newest epoch that was ordered, formed or not."""
        return self._order.epoch

    @property
    def steering(self) -> Steering:
        """Return what was agreed before this rank could be asked."""
        order = self._order
        first = order.epoch < 0 or (order.epoch == 0 and not self.joins)
        return read_steering() if first else order.steering

    def overtaken(self) -> bool:
        """Return whether there is a newer world than the one that this rank is in."""
        return self._order.epoch > self.epoch

    def wait(self, broken: str = "") -> ReformWorld:
        """Return the newest order, once it is newer than the world that this rank is in.

        `broken` tells the controller why this rank has left that world.

        Raises:
            PlatformError: none came in time, or this rank is not in it.
        """
        if broken and not self._coming and not self.overtaken():
            if not self.supervised:
                raise PlatformError(
                    f"the world broke: {broken}",
                    hint="under `perdure run` the others would go on without the lost rank",
                )
            self.emit(
                WorldBroken(
                    generation=self.generation,
                    epoch=self.epoch,
                    rank=self.me,
                    at_s=self.now(),
                    error=broken[:300],
                )
            )
        deadline = None if self.epoch < 0 else time.monotonic() + _ORDER_S
        with self._changed:
            while not self.overtaken():
                if deadline is not None and time.monotonic() > deadline:
                    raise PlatformError(f"no new world within {_ORDER_S:g} s: {broken}")
                self._changed.wait(_LOOK_S)
            order = self._order
            if self.me not in order.ranks:
                raise PlatformError(f"epoch {order.epoch} goes on without rank {self.me}")
            self.epoch, self._meet = order.epoch, order.store
        return order

    def store(self) -> Any:
        """Return this epoch's part of the store at which its members meet.

        That is one member's, so that no loss but the last member's leaves nowhere to meet; at
        first it is the generation's. No two epochs have a key in common.

        Raises:
            DistNetworkError: it cannot be reached: its member is lost as well.
        """
        if self._meet not in self._stores:
            self._stores[self._meet] = self._reach() if self._meet else self._reach_first()
        return PrefixStore(f"perdure/g{self.generation}/e{self.epoch}", self._stores[self._meet])

    def find_store(self) -> str:
        """Return the address of this epoch's store."""
        env = os.environ
        first = f"{env.get('MASTER_ADDR', '127.0.0.1')}:{env.get('MASTER_PORT', '0') or 0}"
        return self._meet or first

    def drop_store(self) -> None:
        """Use this epoch's connection to its store no more.

        A thread that was left behind in the middle of forming the world may hold it for long.
        """
        self._stores.pop(self._meet, None)

    def _serve(self) -> str:
        """Serve a store of this rank's own; return its address, an empty string without one."""
        host = read_host_address()
        try:
            store, port = serve_store(host, int(os.environ.get("WORLD_SIZE", "1")))
        except (OSError, RuntimeError) as error:
            say(f"no store at {host}: {error}")
            return ""
        address = f"{host}:{port}"
        self._served = self._stores[address] = store
        return address

    def _reach_first(self) -> Any:
        """Connect to the generation's store, which may be still to come."""
        host, _, port = self.find_store().rpartition(":")
        apart = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True"
        serves = self.me == 0 and not apart
        listener = bind_store(host, int(port)) if serves else {}

        def make(timeout: timedelta) -> Any:
            return TCPStore(
                host,
                int(port),
                is_master=serves,
                wait_for_workers=False,
                timeout=timeout,
                **listener,
            )

        timeout = timedelta(seconds=60)
        return reach_store(make, host, int(port), timeout) if apart else make(timeout)

    def _reach(self) -> Any:
        """Connect to a member's store.

        It is there if its member lives. That is seen here first: TCPStore itself would go on
        trying for its whole time-out. It still does if the member dies in between, so it connects
        apart.
        """
        host, _, port = self._meet.rpartition(":")
        deadline = time.monotonic() + _CONNECT_S
        while True:
            try:
                socket.create_connection((host, int(port)), timeout=_TRY_S).close()
                break
            except OSError as error:
                gone = not isinstance(error, TimeoutError) or time.monotonic() > deadline
                if gone or self.overtaken():
                    raise dist.DistNetworkError(f"{self._meet}: {error}") from None
        timeout = timedelta(seconds=_CONNECT_S)

        def connect() -> Any:
            return TCPStore(
                host, int(port), is_master=False, wait_for_workers=False, timeout=timeout
            )

        return make_apart(connect, self.overtaken, "perdure-store")


def read_node_name() -> str:
    """Return the name of this rank's node; an empty string outside a job."""
    return os.environ.get("PERDURE_NODE", "")


def read_host_address() -> str:
    """Return the address at which other nodes reach this process."""
    return os.environ.get("PERDURE_NODE_ADDRESS", "") or "127.0.0.1"
