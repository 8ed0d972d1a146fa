"""One epoch's process group: built over a store's prefix of its own, and given up as a whole.

The members meet at the store first: each writes how far it is, and reads what the others wrote.
That is rendezvous and report in one, so that every member decides from the same reports; and it
waits by looking, so that a newer order can end it, which a blocking wait would not hear.
"""

import contextlib
import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from perdure.model.codec import decode, encode
from perdure.plan.elastic.commit import MemberProgress
from perdure.plan.elastic.shards import ShardProgress
from perdure.plan.elastic.stage_commit import StageProgress
from perdure.worker.interrupt import shut_down_gloo

_BUILD_S = 10.0
"""Bound for the connections of a group whose members were all there a moment ago."""
_COLLECTIVE_S = 24 * 3600.0
"""Who is dead or hangs is the controller's to say, and not a clock's."""
_SLICE_S = 0.05
"""How often a collective that is waited for is asked whether its group was abandoned."""
_LOOK_S = 0.0002
_LOOK_S_MAX = 0.002
_APART_LOOK_S = 0.005
_BACKEND = "perdure"
PrefixStore: Any = vars(dist)["PrefixStore"]
TCPStore: Any = vars(dist)["TCPStore"]

AnyProgress = TypeVar("AnyProgress", MemberProgress, ShardProgress, StageProgress)
Made = TypeVar("Made")
Opened = TypeVar("Opened", bound="Group")

Kind = Literal["collective", "send", "receive"]


class Broken(Exception):
    """The group has lost a member, or its members were called into a newer epoch."""


class Group:
    """The members of one epoch, in order; `index` is this process's place among them."""

    def __init__(
        self,
        members: tuple[int, ...],
        me: int,
        store: Any,
        device: Any,
        overtaken: Callable[[], bool] = lambda: False,
    ) -> None:
        """Connect. With one member there is nothing to connect.

        Raises:
            Broken: a member was lost meanwhile, or `overtaken()` became true.
        """
        self.members, self.me = members, me
        self.index = members.index(me)
        self.store, self.overtaken = store, overtaken
        self._device = device
        self._works: list[tuple[Any, Kind]] = []
        """What was begun."""
        self._abandoned = False
        self._interrupted = False
        self.waits_since_s = 0.0
        """Monotonic time at which the wait under way, or the one that failed, began."""
        self._group: Any = None
        if len(members) > 1:
            self._group = _connect(store, self.index, len(members), device, overtaken)

    def open(self, kind: "type[Opened]", name: str, members: tuple[int, ...] = ()) -> "Opened":
        """Return a group of these members, or of all, beside this one.

        Raises:
            Broken: a member was lost meanwhile.
        """
        store = PrefixStore(name, self.store)
        return kind(members or self.members, self.me, store, self._device, self.overtaken)

    def read(self, keys: Sequence[str]) -> list[bytes]:
        """Return what members have written into the store, once it is there.

        Raises:
            Broken: a newer epoch was ordered first.
        """
        return read_keys(self.store, keys, self.overtaken)

    def all_reduce(self, tensor: Tensor) -> None:
        """Begin to sum `tensor` over the members, in place; `wait` ends it."""
        if self._group is not None:
            self._begin("collective", self._group.allreduce, [tensor])

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Begin to copy member `source`'s `tensor` into everyone's."""
        if self._group is not None:
            self._begin("collective", self._group.broadcast, tensor, self.members.index(source))

    def all_gather(self, output: Tensor, part: Tensor) -> None:
        """Begin to fill `output` with every member's `part`, in order."""
        self._begin("collective", self._group._allgather_base, output, part)

    def meet(self) -> None:
        """Wait until every member has come here.

        Raises:
            Broken: a member was lost.
        """
        self.all_reduce(torch.zeros(1))
        self.wait()

    def send(self, tensor: Tensor, to: int, tag: int) -> Any:
        """Begin to send `tensor` to a member; return what `wait_for` takes."""
        return self._begin("send", self._group.send, [tensor], self.members.index(to), tag)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Any:
        """Begin to receive a member's tensor; return what `wait_for` takes."""
        return self._begin("receive", self._group.recv, [tensor], self.members.index(source), tag)

    def _begin(self, kind: Kind, call: Callable[..., Any], *args: Any) -> Any:
        """Have gloo begin something, which `wait` ends.

        Raises:
            Broken: a connection is gone.
        """
        with breaking(RuntimeError):
            work = call(*args)
        self._works.append((work, kind))
        return work

    def wait_for(self, work: Any) -> None:
        """Wait for one transfer; what else was begun goes on.

        Raises:
            Broken: it failed. The others may still be under way: `give_up` ends them.
        """
        others = [pair for pair in self._works if pair[0] is not work]
        self._works = [pair for pair in self._works if pair[0] is work]
        try:
            self.wait()
        finally:
            self._works = others

    def interrupt(self) -> None:
        """Shut the connections: our peers wait for us as we have waited for a lost one.

        A transfer that does not learn of it is then given a moment only: when a wait for it ends
        by the clock, gloo closes the pairs.
        """
        self._interrupted = True
        with contextlib.suppress(OSError):
            shut_down_gloo()

    def wait(self) -> None:
        """Wait for all that was begun.

        Raises:
            Broken: one of it failed. None of it is under way any more then, so that the
                tensors may be used again.
        """
        self.waits_since_s = time.monotonic()
        begun, self._works = self._works, []
        failed: Exception | None = None
        for work, kind in begun:
            try:
                self._end(work, kind)
            except (RuntimeError, Broken) as error:
                if failed is None:
                    self.interrupt()
                failed = failed or error
        if failed is not None:
            raise Broken(str(failed).splitlines()[0])
        self.waits_since_s = 0.0

    def _end(self, work: Any, kind: Kind) -> None:
        if kind == "send":
            return self._end_send(work)
        direct = kind == "receive"
        whole = direct and not self._interrupted
        while True:
            try:
                if work.wait(timedelta(seconds=_COLLECTIVE_S if whole else _SLICE_S)):
                    return
                raise Broken("a transfer was aborted")
            except RuntimeError:
                if direct:
                    raise
            if work.is_completed():  # It may have ended since the slice did: well, or not.
                work.wait()
                return
            if self._abandoned:
                self._leave_behind()
                raise Broken("a collective was abandoned")

    def _end_send(self, work: Any) -> None:
        """Wait for a send in another thread: gloo may have forgotten it.

        It tells a pair's failure to what waits in its queues, and not to a transfer that it was
        just beginning to write, which then waits for ever; and a wait for a transfer that ends by
        the clock closes all pairs.
        """
        ended = start(lambda: work.wait(timedelta(seconds=_COLLECTIVE_S)), "perdure-send")
        while not wait([ended], _SLICE_S).done:
            if self._abandoned or self._interrupted:
                self._leave_behind()
                raise Broken("a transfer was abandoned")
        if not ended.result():
            raise Broken("a transfer was aborted")

    def _leave_behind(self) -> None:
        """See that the group's destructor, which would wait for what never ends, never runs."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))

    def abandon(self) -> None:
        """End what still waits although its connections are shut down; by any thread.

        Nothing moves on closed connections, so its tensors are as safe as after an error.
        """
        self._abandoned = True

    def give_up(self) -> None:
        """Wait until nothing is under way, and disconnect: whoever waits for us learns of it."""
        with contextlib.suppress(Broken):
            self.wait()
        self._group = None


class ShardGroup(Group):
    """The members that together hold one copy of a sharded state.

    It is torch's default process group, because a device mesh asks for that.
    """

    def __init__(
        self,
        members: tuple[int, ...],
        me: int,
        store: Any,
        device: Any,
        overtaken: Callable[[], bool],
    ) -> None:
        """Connect, also where there is but one member.

        Raises:
            Broken: a member was lost meanwhile, or `overtaken()` became true.
        """
        super().__init__(members, me, store, device, overtaken)
        if self._group is None:
            self._group = _connect(store, 0, 1, device, overtaken)
        _register_backend()
        with breaking(RuntimeError):
            # What torch would connect by itself hears of no order meanwhile.
            dist.init_process_group(
                _BACKEND,
                store=store,
                rank=self.index,
                world_size=len(members),
                pg_options=self._group,
            )

    def give_up(self) -> None:
        """Wait until nothing is under way, disconnect, and forget torch's default group.

        Modules and meshes still refer to it, so that its connections would stay open, and those
        who wait for this member would not learn that it has left.
        """
        super().give_up()
        with contextlib.suppress(OSError):
            shut_down_gloo()
        if dist.is_initialized():
            dist.destroy_process_group()


def make_device() -> Any:
    """Return gloo's listener, which all groups of this process share."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if name:
        return dist.ProcessGroupGloo.create_device(interface=name)
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    if host in ("127.0.0.1", "localhost"):
        return dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
    return dist.ProcessGroupGloo.create_default_device()


def _connect(store: Any, index: int, size: int, device: Any, overtaken: Callable[[], bool]) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [device or make_device()]
    options._timeout = timedelta(seconds=_BUILD_S)
    options._threads = 2

    def connect() -> Any:
        return dist.ProcessGroupGloo(store, index, size, options)

    with breaking(RuntimeError, what="no connections: "):
        group = make_apart(connect, overtaken, "perdure-connect")
    group._set_default_timeout(timedelta(seconds=_COLLECTIVE_S))
    return group


@functools.cache
def _register_backend() -> None:
    """Have torch take a group that is connected, given as its options, for its default one."""
    dist.Backend.register_backend(
        _BACKEND, lambda _, connected: connected, extended_api=True, devices=["cpu"]
    )


def make_apart(make: Callable[[], Made], overtaken: Callable[[], bool], name: str) -> Made:
    """Return what `make()` returns, which waits for others and hears of no order meanwhile.

    It runs in a thread, which a newer order leaves behind to its own time-out. The interpreter
    waits for it when it ends: a thread that came back from native code later would abort it.

    Raises:
        Broken: `overtaken()` became true first.
        Exception: what `make()` has raised.
    """
    made = start(make, name, daemon=False)
    while not wait([made], _APART_LOOK_S).done:
        if overtaken():
            raise Broken("a newer epoch was ordered")
    return made.result()


def start(make: Callable[[], Made], name: str, *, daemon: bool = True) -> Future[Made]:
    """Begin `make()` in a thread of its own; the interpreter waits for none that is a `daemon`."""
    made: Future[Made] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except Exception as error:
            made.set_exception(error)

    threading.Thread(target=run, name=name, daemon=daemon).start()
    return made


@contextlib.contextmanager
def breaking(*kinds: type[RuntimeError], what: str = "") -> Iterator[None]:
    """Turn errors of these kinds into `Broken`: a member, or `what` it served, is lost."""
    try:
        yield
    except kinds as error:
        raise Broken(what + str(error).partition("\n")[0]) from None


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
