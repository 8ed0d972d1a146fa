"""What messages and sums cost within a machine and between machines: real processes, real gloo.

A message is measured as the pipeline's runner sends one, packed and unpacked, with its receive
posted before; a sum as the elastic engine makes it. Every group size has its own processes among
those that there are, while the others wait.

One of these processes:

    python -m perdure.worker.profiling.links RANK SIZE HOST PORT

Between machines there is one on each; RANK is `next` on all but the first, which counts them.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import msgspec
import torch

from perdure import __version__
from perdure.model.codec import decode, encode
from perdure.model.errors import MeasureError, PlatformError
from perdure.model.input.plain import make_plain
from perdure.model.planning.costs import LINKS, AllReduce, Meeting, Place, Transfer
from perdure.plan.worlds.measures import fit_line, settle
from perdure.worker.elastic.communicators.gloo import connect
from perdure.worker.elastic.group import Group, PrefixStore, TCPStore
from perdure.worker.pipeline.messages import HEADER_BYTES, describe, pack, unpack
from perdure.worker.system.process import die_with

Found = dict[str, list[tuple[int, list[float]]]]
"""What was timed -> by bytes, the seconds of each repetition."""

_WHOLE_S = 300.0
_STORE = timedelta(seconds=60)
_LEAVE_S = 5.0


class LinkFigures(msgspec.Struct, frozen=True):
    """All figures that were measured of the links."""

    transfers: tuple[Transfer, ...]
    all_reduces: tuple[AllReduce, ...]
    spread: float
    spread_of: str


def list_groups(ranks: int) -> list[int]:
    """Return the group sizes to measure: powers of two, and all.

    >>> list_groups(6)
    [2, 4, 6]
    """
    found, size = [], 2
    while size < ranks:
        found.append(size)
        size *= 2
    return [*found, ranks] if ranks > 1 else []


def measure_links(
    ranks: int, say: Callable[[str], object], meeting: Meeting | None = None
) -> LinkFigures:
    """Measure with `ranks` processes of this machine, or with one of each that comes to `meeting`.

    Raises:
        PlatformError: they could not be started, one has failed, or a machine did not come.
        MeasureError: what they have measured is no cost.
    """
    host, port, mine = "127.0.0.1", 0, ranks
    if meeting is not None:
        host, port, ranks, mine = meeting.address, meeting.port, meeting.nodes, 1
    if ranks < 2:
        return LinkFigures((), (), 0.0, "")
    try:
        store = TCPStore(host, port, None, True, _STORE, wait_for_workers=False)
    except RuntimeError as error:
        why = str(error).strip().splitlines()[0]
        raise PlatformError(f"links: {host}:{port}: {why}", hint="another port") from None
    store.set("software", describe_software())
    store.set("size", str(ranks))
    if meeting is not None:
        _await_machines(store, meeting, say)
    say(f"links: {ranks} processes" if meeting is None else f"links: {ranks} nodes")
    children = [
        subprocess.Popen(
            [sys.executable, "-m", LINKS, str(rank), str(ranks), host, str(store.port)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=make_environment(meeting),
            preexec_fn=partial(die_with, os.getpid()),
        )
        for rank in range(mine)
    ]
    deadline = time.monotonic() + _WHOLE_S
    try:
        while not store.check(["done"]):
            if any(child.poll() for child in children) or time.monotonic() > deadline:
                raise PlatformError("links: a measuring process has failed", hint="see its output")
            time.sleep(0.05)
        found: Found = decode(store.get("done"), Found)
        if meeting is not None:  # The store ends with this process.
            deadline = time.monotonic() + _LEAVE_S
            while store.add("left", 0) < ranks - 1 and time.monotonic() < deadline:
                time.sleep(0.05)
    finally:
        for child in children:  # Those that have measured have nothing left to do.
            child.kill()
            child.wait()
    return _fit(found, "node" if meeting is None else "cluster")


def _await_machines(store: Any, meeting: Meeting, say: Callable[[str], object]) -> None:
    deadline, told = time.monotonic() + meeting.wait_s, -1
    while (there := int(store.add("came", 0))) < meeting.nodes - 1:
        if there != told:
            told = there
            say(f"links: {1 + there} of {meeting.nodes} nodes at {meeting.address}:{meeting.port}")
        if time.monotonic() > deadline:
            raise PlatformError(
                f"links: {1 + there} of {meeting.nodes} nodes came to "
                f"{meeting.address}:{meeting.port} in {meeting.wait_s:.0f} s",
                hint="the same command on every node, with its --node-rank",
            )
        time.sleep(0.1)


def describe_software() -> str:
    """Return the versions that all who measure together have to have."""
    return f"perdure {__version__}, torch {torch.__version__}"


def make_environment(meeting: Meeting | None) -> dict[str, str]:
    """Return the variables of a measuring process; gloo takes the interface of the meeting."""
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return env if meeting is None else env | {"GLOO_SOCKET_IFNAME": meeting.interface}


def _fit(found: Found, place: Place) -> LinkFigures:
    spreads = [(0.0, "")]
    lines: dict[str, tuple[float, float]] = {}
    for name, sizes in found.items():
        points = []
        for size, samples in sizes:
            what = f"{name} of {size} bytes"
            figure = settle(samples, what)
            points.append((float(size), figure.value))
            spreads.append((figure.spread, what))
        lines[name] = fit_line(points, name)
    sums = [
        AllReduce(place, int(name.rpartition(" ")[2]), *line)
        for name, line in lines.items()
        if name.startswith("all-reduce")
    ]
    if "message" not in lines:
        raise MeasureError("links: no message was measured")
    return LinkFigures((Transfer(place, *lines["message"]),), tuple(sums), *max(spreads))


MESSAGE_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 22)
SUM_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 23)
_TIMES = 15
_WARM = 2


def main(argv: Sequence[str]) -> None:
    """Be one of the processes."""
    number, total, host, port, *rest = argv
    wait = timedelta(seconds=float(rest[0])) if rest else _STORE
    size = int(total)
    store = TCPStore(host, int(port), None, False, wait)
    rank = store.add("came", 1) if number == "next" else int(number)
    expected = int(store.get("size"))
    if size != expected or rank >= size:
        sys.exit(f"links: {host}:{port} measures {expected} nodes, and this is number {rank + 1}")
    said = store.get("software") if store.check(["software"]) else b"an older perdure"
    theirs = make_plain(said, 80)  # Anybody may be there.
    if theirs != (ours := describe_software()):
        sys.exit(f"links: {host}:{port} has {theirs}, and this machine {ours}")
    torch.set_num_threads(1)
    store.add("ready", 1)  # A connection waits for few seconds, and an import of torch takes some.
    deadline = time.monotonic() + wait.total_seconds()
    while store.add("ready", 0) < size and time.monotonic() < deadline:
        time.sleep(0.02)
    groups = {
        count: Group(tuple(range(count)), rank, PrefixStore(f"group{count}", store), connect)
        for count in list_groups(size)
        if rank < count
    }
    whole = groups[size]
    found: Found = {}
    for count in list_groups(size):
        whole.meet()
        if rank < count:
            sums = [_time_sums(groups[count], nbytes) for nbytes in SUM_BYTES]
            found[f"all-reduce over {count}"] = list(zip(SUM_BYTES, sums, strict=True))
    whole.meet()
    if rank < 2:
        line = Group((0, 1), rank, PrefixStore("line", store), connect)
        sent = [_time_messages(groups[2], line, rank, nbytes) for nbytes in MESSAGE_BYTES]
        found["message"] = list(zip(MESSAGE_BYTES, sent, strict=True))
    whole.meet()
    if rank == 0:
        store.set("done", encode(found))
    else:
        store.add("left", 1)
    for group in groups.values():
        group.give_up()


def _time_sums(group: Group, nbytes: int) -> list[float]:
    tensor = torch.zeros(nbytes // 4)

    def once() -> float:
        group.meet()
        began = time.perf_counter()
        group.all_reduce(tensor)
        group.wait()
        return time.perf_counter() - began

    return _repeat(once)


def _time_messages(group: Group, line: Group, rank: int, nbytes: int) -> list[float]:
    """Return how long one takes over `line`, as half of there and back."""
    value = torch.zeros(nbytes // 4)
    layout = describe(value, [True])
    room, peer = layout.payload, 1 - rank
    buffers = [torch.empty(HEADER_BYTES + room, dtype=torch.uint8) for _ in range(_TIMES + _WARM)]
    tags = iter(range(2 * (_TIMES + _WARM)))

    def send(tag: int) -> Any:
        return line.send(pack([value], layout, header=True, room=room), peer, tag)

    def once() -> float:
        buffer, there, back = buffers.pop(), next(tags), next(tags)
        coming = line.receive(buffer, peer, back if rank == 0 else there)
        group.meet()
        began = time.perf_counter()
        sent: Any = send(there) if rank == 0 else None
        line.wait_for(coming)
        unpack(buffer[HEADER_BYTES:], layout, "cpu")
        if rank == 1:
            sent = send(back)
        line.wait_for(sent)
        return (time.perf_counter() - began) / 2

    return _repeat(once)


def _repeat(once: Callable[[], float]) -> list[float]:
    """Return equally many times on all ranks."""
    return [once() for _ in range(_TIMES + _WARM)][_WARM:]


if __name__ == "__main__":
    main(sys.argv[1:])
