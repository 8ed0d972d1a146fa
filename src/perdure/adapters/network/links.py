"""The connections between ranks, read off the kernel once a second: cells of the delay matrix.

`inet_diag` names a connection by its inode, `/proc/PID/fd` says which rank holds the inode, and
the other end is the one with the mirrored addresses: another rank of this node, or one of
another node, which only the controller can join (`telemetry.links`). The descriptors are read
only when a connection appears that was never seen, and never for more than a share of a core.

gloo listens on a port of its own for each process group in each rank. A rank notes which group
opened which port (`worker.recording.groups`, a small file beside its ring); whichever end of a
connection was the listening one names the communicator for both. Where no end can tell (NCCL's
socket transport, a script without perdure's hook) the communicator stays empty, and the controller
fills it in where only one contains both ranks.

Works for whatever the ranks' user may see. Connections of ranks in another network namespace
need CAP_SYS_ADMIN; what is missing is said in `LinkSweep.note`.
"""

import ipaddress
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from perdure.adapters.network.netlink import Address, Numbers, SockDiag
from perdure.model.errors import PlatformError
from perdure.model.signals.links import LinkEndpoint, LinkSample, LinkSweep

MOVED_BYTES = 1_000_000
"""Acknowledged in a second: less is left out, unless something is unusual."""
STALE_ACK_MS = 500
_REFRESH_SHARE = 400
"""Reading descriptors is followed by this many times its duration without another: 0.25 %."""
_NAMING_SWEEPS = 20
"""A process group's note follows its connections; afterwards, names are not looked for again."""
_ENDPOINTS_MAX = 2000
_TURNS = 20
"""Sweeps in which every endpoint is repeated once."""
_FOREIGN_MAX = 200_000
_V6_TURNS = 5
"""IPv6 is looked at in every fifth sweep while no rank uses it."""

Groups = Callable[[int], Mapping[int, str]]
"""Rank -> the ports on which its process groups listen, with the group's name."""


@dataclass(slots=True)
class _Socket:
    """One end, held by a rank of this node."""

    rank: int
    address: Address
    numbers: Numbers
    """The numbers of the sweep before."""
    sweep: int
    dst: int = -1
    comm: str = ""


@dataclass(slots=True)
class _Sums:
    """The sockets of one link."""

    acked: int = 0
    busy_us: int = 0
    retrans: int = 0
    unsent: int = 0
    unread: int = 0
    backoff: int = 0
    last_ack_ms: int = 0
    rtt_us: int = 0
    min_rtt_us: int = 0

    def add(self, now: Numbers, before: Numbers) -> None:
        """Add a socket's growth, and its state where that is worse."""
        unread, _, _, _, backoff, last_ack, rtt, retrans, acked, unsent, min_rtt, busy = now
        self.acked += acked - before[8]
        self.busy_us += busy - before[11]
        self.retrans += retrans - before[7]
        self.unsent += unsent
        self.unread += unread
        self.backoff = max(self.backoff, backoff)
        self.last_ack_ms = max(self.last_ack_ms, last_ack)
        self.rtt_us = max(self.rtt_us, rtt)
        self.min_rtt_us = max(self.min_rtt_us, min_rtt)


_Link = tuple[int, int, str, str, str]
"""src, dst, comm; and the addresses where `dst` is not known."""


@dataclass(slots=True)
class LinkReader:
    """Sweeps over the connections of one node's ranks."""

    groups: Groups
    alone: bool = False
    """There is no other node: a connection whose other end is not here is none between ranks."""
    _pids: dict[int, int] = field(default_factory=dict)
    _diags: dict[int, SockDiag] = field(default_factory=dict)
    """Inode of the network namespace -> line into it; 0 is our own."""
    _spaces: dict[int, int] = field(default_factory=dict)
    """The same -> a rank's process in it."""
    _sockets: dict[int, _Socket] = field(default_factory=dict)
    _foreign: set[int] = field(default_factory=set)
    """Inodes that are no rank's."""
    _lone: list[_Socket] = field(default_factory=list)
    """Those whose other end is on no rank here."""
    hosts: Counter[str] = field(default_factory=Counter)
    """Addresses of this node's ends, with the number of connections."""
    _uses_v6: bool = False
    _number: int = 0
    _swept_s: float = 0.0
    _refresh_s: float = 0.0
    _naming: int = 0
    _fresh: list[_Socket] = field(default_factory=list)
    """Ends to be told of: the other end is on no rank here."""
    _notes: dict[str, str] = field(default_factory=dict)

    def sweep(
        self, now: float, pids: Mapping[int, int], ignored_ports: frozenset[int] = frozenset()
    ) -> LinkSweep:
        """Look at all connections of the processes `pids` (rank -> pid).

        `ignored_ports` are those of the rendezvous store, which rank 0 may host.
        """
        began_s = time.thread_time()
        if dict(pids) != self._pids:
            self._begin(pids)
        self._number += 1
        window_s = now - self._swept_s if self._swept_s else 0.0
        self._swept_s = now
        links: dict[_Link, _Sums] = {}
        seen = sent = 0
        self._notes.pop("diag", None)
        unknown: dict[int, tuple[Address, Numbers]] = {}
        for space in list(self._spaces):
            for family in self._families():
                seen_here, sent_here = self._look(space, family, window_s, links, unknown)
                seen, sent = seen + seen_here, sent + sent_here
        if seen < len(self._sockets) and "diag" not in self._notes:
            self._forget_closed()
        if unknown and now >= self._refresh_s:
            self._refresh(now, unknown, ignored_ports)
        if self._naming:
            self._naming -= 1
            self._name()
        return LinkSweep(
            at_s=now,
            window_s=window_s,
            links=tuple(_make_sample(link, sums) for link, sums in links.items()),
            cost_s=time.thread_time() - began_s,
            omitted=seen - sent,
            sockets=len(self._sockets),
            endpoints=() if self.alone else self._list_endpoints(),
            note="; ".join(note for _, note in sorted(self._notes.items())),
        )

    def choose_address(self, *, loopback: bool = False) -> str:
        """Return the address of this node by which most connections between ranks run; or ''.

        By `loopback` no other machine reaches it, and it is passed over unless that is allowed.
        """
        fit = [h for h in self.hosts if loopback or not ipaddress.ip_address(h).is_loopback]
        return max(fit, key=lambda host: (self.hosts[host], host), default="")

    def close(self) -> None:
        """Close the lines to the kernel."""
        for diag in self._diags.values():
            diag.close()
        self._diags.clear()

    # --- one look -----------------------------------------------------------------------------

    def _look(
        self,
        space: int,
        family: int,
        window_s: float,
        links: dict[_Link, _Sums],
        unknown: dict[int, tuple[Address, Numbers]],
    ) -> tuple[int, int]:
        """Add what grew or looks unusual to `links`; return (ranks' sockets, those added)."""
        sockets, foreign, number = self._sockets, self._foreign, self._number
        moved = int(MOVED_BYTES * min(1.0, window_s))
        busy = int(window_s * 500_000)
        seen = sent = 0
        try:
            dump = self._open(space).dump(family)
            for numbers in dump:
                inode = numbers[2]
                known = sockets.get(inode)
                if known is None:
                    if inode and inode not in foreign:  # 0: not accepted yet.
                        unknown[inode] = (dump.address(), numbers)
                    continue
                known.sweep = number
                seen += 1
                before, known.numbers = known.numbers, numbers
                if _is_worth_telling(numbers, before, moved, busy) and window_s:
                    sent += 1
                    links.setdefault(_link_of(known), _Sums()).add(numbers, before)
        except PlatformError as error:
            self._notes["diag"] = error.message
            if space in self._diags:
                self._diags.pop(space).close()  # Half an answer may be left in it.
        return seen, sent

    def _open(self, space: int) -> SockDiag:
        diag = self._diags.get(space)
        if diag is None:
            diag = self._diags[space] = SockDiag(self._spaces[space] if space else 0)
        return diag

    def _families(self) -> list[int]:
        v6 = self._uses_v6 or self._number % _V6_TURNS == 1 or not self._sockets
        return [socket.AF_INET, socket.AF_INET6] if v6 else [socket.AF_INET]

    # --- who is who ---------------------------------------------------------------------------

    def _begin(self, pids: Mapping[int, int]) -> None:
        """Other ranks: forget everything, and find their network namespaces."""
        self._pids = dict(pids)
        self._sockets.clear()
        self._foreign.clear()
        self._fresh.clear()
        self._take_stock()
        self._notes.clear()
        self._refresh_s = self._swept_s = 0.0
        own = _namespace_of("self")
        self._spaces = {}
        for pid in self._pids.values():
            space = _namespace_of(pid)
            self._spaces.setdefault(0 if space in (0, own) else space, pid)
        for gone in [space for space in self._diags if space not in self._spaces]:
            self._diags.pop(gone).close()

    def _forget_closed(self) -> None:
        for inode in [i for i, held in self._sockets.items() if held.sweep < self._number]:
            del self._sockets[inode]
        self._take_stock()

    def _take_stock(self) -> None:
        """Note what every sweep needs to know of all connections."""
        held = self._sockets.values()
        self._lone = [s for s in held if s.dst < 0]
        self.hosts = Counter(s.address.local.rpartition(":")[0] for s in held)
        self._uses_v6 = any(":" in host for host in self.hosts)

    def _refresh(
        self, now: float, unknown: dict[int, tuple[Address, Numbers]], ignored: frozenset[int]
    ) -> None:
        """Find the ranks that hold the connections `unknown`."""
        began_s = time.monotonic()
        if len(self._foreign) > _FOREIGN_MAX:
            self._foreign.clear()
        owners: dict[int, int] = {}
        for rank, pid in self._pids.items():
            try:
                owners |= dict.fromkeys(_list_sockets(pid), rank)
                self._notes.pop(f"rank {rank}", None)
            except FileNotFoundError:
                continue  # It has ended.
            except OSError as error:
                self._notes[f"rank {rank}"] = (
                    f"the descriptors of rank {rank} (pid {pid}) cannot be read: {error.strerror}"
                )
        fresh = []
        for inode, (address, numbers) in unknown.items():
            rank_ = owners.get(inode)
            ports = {int(a.rpartition(":")[2]) for a in (address.local, address.remote)}
            if rank_ is None or ports & ignored:
                self._foreign.add(inode)
                continue
            held = _Socket(rank_, address, numbers, self._number)
            self._sockets[inode] = held
            fresh.append(held)
        if fresh:
            self._pair(fresh)
            self._naming = _NAMING_SWEEPS
        self._refresh_s = now + _REFRESH_SHARE * (time.monotonic() - began_s)

    def _pair(self, fresh: list[_Socket]) -> None:
        """Find the other ends on this node; keep the rest, where there are other nodes."""
        ends = {(s.address.local, s.address.remote): s for s in self._sockets.values()}
        for held in fresh:
            other = ends.get((held.address.remote, held.address.local))
            if other is not None:
                held.dst, other.dst = other.rank, held.rank
        lone = {id(s) for s in fresh if s.dst < 0}
        useless = {id(s) for s in fresh if s.dst == s.rank} | (lone if self.alone else set())
        self._fresh += [s for s in fresh if id(s) in lone and not self.alone]
        for inode in [i for i, s in self._sockets.items() if id(s) in useless]:
            del self._sockets[inode]
            self._foreign.add(inode)
        self._take_stock()

    def _name(self) -> None:
        """Name the communicator of connections that have none, by the end that listened."""
        nameless = [s for s in self._sockets.values() if not s.comm]
        ports = {rank: self.groups(rank) for rank in sorted({s.rank for s in nameless})}
        ends = {(s.address.local, s.address.remote): s for s in self._sockets.values()}
        for held in nameless:
            comm = ports[held.rank].get(held.address.local_port, "")
            if not comm:
                continue
            held.comm = comm
            other = ends.get((held.address.remote, held.address.local))
            if other is not None:
                other.comm = comm
            elif not self.alone:
                self._fresh.append(held)  # Its other end is to hear of it.
        if not any(not s.comm for s in nameless):
            self._naming = 0

    def _list_endpoints(self) -> tuple[LinkEndpoint, ...]:
        """Return the ends that are new or whose turn it is."""
        turn = self._number % _TURNS
        told = [s for s in self._fresh if s.dst < 0][:_ENDPOINTS_MAX]
        del self._fresh[:_ENDPOINTS_MAX]
        told += self._lone[turn::_TURNS]
        return tuple(
            LinkEndpoint(s.rank, s.address.local, s.address.remote, s.comm)
            for s in {id(s): s for s in told}.values()
        )


def _is_worth_telling(now: Numbers, before: Numbers, moved: int, busy: int) -> bool:
    """Return whether a connection moved much, or shows anything unusual.

    What is usual comes first: of a thousand connections a dozen move at a time.
    """
    grown = now[8] - before[8]
    if not (grown or now[0] or now[1] or now[4]) and now[7] == before[7]:
        return False
    if grown < 0:
        return False  # Another connection with the same inode.
    if grown >= moved or now[0] or now[4] or now[7] > before[7]:
        return True
    if now[1] and now[5] > STALE_ACK_MS:
        return True
    return now[9] > before[9] or now[11] - before[11] > busy


def _link_of(held: _Socket) -> _Link:
    if held.dst >= 0:
        return (held.rank, held.dst, held.comm, "", "")
    return (held.rank, -1, held.comm, held.address.local, held.address.remote)


def _make_sample(link: _Link, sums: _Sums) -> LinkSample:
    src, dst, comm, local, remote = link
    return LinkSample(
        src=src,
        dst=dst,
        comm=comm,
        bytes_acked=sums.acked,
        busy_s=sums.busy_us / 1e6,
        rtt_s=sums.rtt_us / 1e6,
        retrans=sums.retrans,
        unsent_bytes=sums.unsent,
        backoff=sums.backoff,
        last_ack_s=sums.last_ack_ms / 1e3,
        unread_bytes=sums.unread,
        min_rtt_s=sums.min_rtt_us / 1e6,
        local=local,
        remote=remote,
    )


def _list_sockets(pid: int) -> list[int]:
    """Return the inodes of the sockets that `pid` holds.

    Raises:
        OSError: it is gone, or another user's.
    """
    found, directory = [], os.open(f"/proc/{pid}/fd", os.O_RDONLY | os.O_CLOEXEC)
    try:
        for name in os.listdir(directory):
            try:
                target = os.readlink(name, dir_fd=directory)
            except FileNotFoundError:
                continue
            if target.startswith("socket:["):
                found.append(int(target[8:-1]))
    finally:
        os.close(directory)
    return found


def _namespace_of(pid: int | str) -> int:
    """Return the inode of a process's network namespace; 0 where it cannot be told."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return 0
