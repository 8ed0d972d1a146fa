"""Links between ranks as NCCL's plugin counts them: cells of the delay matrix without a socket.

Over InfiniBand the kernel sees nothing of what NCCL sends. Its proxy thread does, and the plugin
keeps, for each communicator and peer, the bytes that it has handed to the network and how long the
network had something of it to send: what the kernel says of a socket that has not been
acknowledged. What they grew by since the last look becomes a sample like those of sockets. NCCL
knows no losses and no round trips, so these stay 0, and a peer that does not answer is not told.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from perdure.adapters.nccl_follow import find_ring_comm, read_comm
from perdure.adapters.network.links import MOVED_BYTES
from perdure.files.regular import open_regular
from perdure.model.signals.links import LinkSample
from perdure.model.signals.nccl import (
    HEADER_BYTES,
    LINK_BYTES,
    NcclComm,
    NcclLayout,
    parse_layout,
    parse_links,
)
from perdure.model.signals.progress import CommProgress

PLAUSIBLE_S = 0.05
"""A link may seem busy for so much longer than the window: two clocks were read one by one."""
STEP_BYTES_MIN = 256 * 1024
"""Of what goes in smaller steps latency is the cost, and not the network's pace."""
RANKS_A_SWEEP = 8
"""Of a node with more ranks than this, some are looked at in each sweep, and all in turn."""
_BYTES_MAX = 1 << 53
_SERIAL = (1 << 30) - 1
"""As much of a communicator's number as a link has in its own."""


class DeviceRank(NamedTuple):
    """A rank whose collectives run on a device."""

    ring: str
    """Path of its ring."""
    pid: int
    comms: Sequence[CommProgress]
    """Of its ring, which know the global ranks."""


class _Ends(NamedTuple):
    src: int
    dst: int
    comm: str
    """Name of the ring's communicator."""


_Key = tuple[int, int, int]
"""When the rank's file began; the communicator's number; the peer in it."""


class _Totals(NamedTuple):
    """What a link has done since its communicator began."""

    ends: _Ends
    bytes: int = 0
    steps: int = 0
    busy_s: float = 0.0

    def add(self, size: int, steps: int, busy_s: float) -> "_Totals":
        return _Totals(self.ends, self.bytes + size, self.steps + steps, self.busy_s + busy_s)


class _Look(NamedTuple):
    """One look at one rank's file."""

    at_s: float
    totals: dict[_Key, _Totals]


class NcclLinkReader:
    """Looks at the files of one node's ranks again and again."""

    def __init__(self, clock_offset_s: float) -> None:
        """Begin with nothing known: the first look is what the next is compared with."""
        self._offset_s = clock_offset_s
        self._looks: dict[int, _Look] = {}
        self._swept_s = 0.0
        self._turn = 0

    def read(self, ranks: Mapping[int, DeviceRank], now: float) -> tuple[LinkSample, ...]:
        """Return what each link of `ranks` has moved in a sweep, where it was much.

        A rank that was looked at some sweeps ago has moved as much in each. Nothing is told of a
        file that another process wrote, or that says what cannot be.
        """
        sweep_s, self._swept_s = now - self._swept_s, now
        turns = max(1, -(-len(ranks) // RANKS_A_SWEEP))
        self._turn += 1
        self._looks = {rank: look for rank, look in self._looks.items() if rank in ranks}
        found: list[LinkSample] = []
        for place, rank in enumerate(sorted(ranks)):
            if (self._turn + place) % turns == 0:
                before = self._looks.get(rank)
                look = self._looks[rank] = self._look(rank, ranks[rank], now)
                if before is not None and now > before.at_s:
                    found += _compare(before, look, sweep_s)
        return tuple(found)

    def _look(self, rank: int, of: DeviceRank, now: float) -> _Look:
        totals: dict[_Key, _Totals] = {}
        for key, ends, size, steps, busy_s in self._list_links(rank, of, now):
            totals[key] = totals.get(key, _Totals(ends)).add(size, steps, busy_s)
        return _Look(now, totals)

    def _list_links(
        self, rank: int, of: DeviceRank, now: float
    ) -> Iterator[tuple[_Key, _Ends, int, int, float]]:
        """Yield each link that `rank` sends by: bytes, steps and busy seconds since it began."""
        try:
            fd = open_regular(f"{of.ring}.nccl")
        except OSError:
            return
        try:
            layout = parse_layout(os.pread(fd, HEADER_BYTES, 0))
            if layout is None or layout.pid != of.pid:
                return
            data = os.pread(fd, layout.num_links * LINK_BYTES, layout.links_at)
            comms = _Comms(fd, layout, rank, of.comms)
            for link in parse_links(data, self._offset_s):
                found = comms.find(link.comm) if link.is_send else None
                if found is None or not 0 <= link.peer < found[0].num_ranks:
                    continue
                comm, progress = found
                if link.serial != comm.serial & _SERIAL:
                    continue
                busy_s = link.busy_s
                if 0.0 < link.busy_since_s < now:
                    busy_s += now - link.busy_since_s
                dst = progress.ranks[link.peer]
                counts = (link.bytes, link.steps)
                if dst != rank and 0 <= min(counts) <= max(counts) < _BYTES_MAX and busy_s >= 0.0:
                    key = (layout.started_ns, comm.serial, link.peer)
                    yield key, _Ends(rank, dst, progress.name), *counts, busy_s
        except OSError:
            return
        finally:
            os.close(fd)


class _Comms:
    """NCCL's communicators of one file, each with the ring's that has the same ranks."""

    def __init__(
        self, fd: int, layout: NcclLayout, rank: int, ring: Sequence[CommProgress]
    ) -> None:
        self._fd, self._layout, self._rank, self._ring = fd, layout, rank, ring
        self._found: dict[int, tuple[NcclComm, CommProgress] | None] = {}

    def find(self, slot: int) -> tuple[NcclComm, CommProgress] | None:
        """Return the one in `slot`; None where it is closed, or its ranks are not certain."""
        if slot not in self._found:
            self._found[slot] = self._look(slot)
        return self._found[slot]

    def _look(self, slot: int) -> tuple[NcclComm, CommProgress] | None:
        if not 0 <= slot < self._layout.num_comms:
            return None
        comm = read_comm(self._fd, self._layout, slot)
        if comm is None or comm.closed_s:
            return None
        index = find_ring_comm(self._rank, comm, self._ring)
        return None if index is None else (comm, self._ring[index])


def _compare(before: _Look, look: _Look, sweep_s: float) -> Iterator[LinkSample]:
    """Yield what the links of one rank have moved from look to look, for as long as a sweep."""
    window_s = look.at_s - before.at_s
    grown: dict[_Ends, _Totals] = {}
    for key, now in look.totals.items():
        last = before.totals.get(key)
        if last is None:
            continue
        size, steps, busy_s = (
            now.bytes - last.bytes,
            now.steps - last.steps,
            now.busy_s - last.busy_s,
        )
        if min(size, steps) >= 0 and -1e-6 <= busy_s <= window_s + PLAUSIBLE_S:
            grown[now.ends] = grown.get(now.ends, _Totals(now.ends)).add(size, steps, busy_s)
    share = min(1.0, sweep_s / window_s)
    for of in grown.values():
        much = of.bytes >= MOVED_BYTES * min(1.0, window_s) or of.busy_s > 0.5 * window_s
        if of.bytes and much and of.bytes >= STEP_BYTES_MIN * of.steps:
            yield _make_sample(of.ends, int(of.bytes * share), max(of.busy_s, 0.0) * share)


def _make_sample(ends: _Ends, moved: int, busy_s: float) -> LinkSample:
    return LinkSample(
        src=ends.src,
        dst=ends.dst,
        comm=ends.comm,
        bytes_acked=moved,
        busy_s=busy_s,
        rtt_s=0.0,
        retrans=0,
        unsent_bytes=0,
        backoff=0,
        last_ack_s=0.0,
        source="nccl",
    )
