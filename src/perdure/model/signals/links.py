"""What the kernel says about the sockets between ranks, the cells of the delay matrix; and probes.

To test the path between two agents, the sending node asks on the bus; the other opens a listening
socket for this one transfer and answers where. Nothing listens while no probe is open, and who does
not know the token is refused.
"""

from typing import Any, Literal

import msgspec

LinkSource = Literal["kernel", "nccl"]
"""Who counted what a link moved: the kernel, of sockets, or NCCL's plugin, of what carries it."""


class LinkSample(msgspec.Struct, frozen=True, array_like=True):
    """One directed link (what `src` sends to `dst`) over one sweep, as seen at `src`.

    The sums are over the sockets of one communicator between the two ranks; counters are what
    they grew by in the sweep's window, the rest is the worst socket's state at its end. Source:
    TCP_INFO of `inet_diag`; `busy_s / bytes_acked` is the delay-matrix cell. Where no socket
    carries it (InfiniBand), NCCL's plugin tells bytes and busy time, and nothing else.
    """

    src: int
    dst: int
    comm: str
    """Name of the communicator; empty where it could not be told."""
    bytes_acked: int
    busy_s: float
    """Time with unacknowledged or unsent data in the socket."""
    rtt_s: float
    retrans: int
    """Segments sent again."""
    unsent_bytes: int
    """Waiting in the send queue now (`notsent`)."""
    backoff: int
    """Exponent of the retransmission timer: above 0, nobody answers."""
    last_ack_s: float
    """Age of the last acknowledgement."""
    unread_bytes: int = 0
    """In `src`'s receive queue, sent by `dst` and not read: `src` is the one that is behind."""
    min_rtt_s: float = 0.0
    local: str = ""
    """`address:port` of the socket at `src`, only where `dst` is not known to the agent (-1)."""
    remote: str = ""
    source: LinkSource = "kernel"

    @property
    def busy_ms_per_mb(self) -> float:
        """Return the delay-matrix cell in ms per 10^6 bytes; 0 where too little moved."""
        if self.bytes_acked < 100_000:
            return 0.0
        return self.busy_s * 1e9 / self.bytes_acked


class LinkEndpoint(msgspec.Struct, frozen=True, array_like=True):
    """One end of a connection whose other end is on no rank of the same node.

    Two agents each see one; the ends mirror each other's addresses, and so name each other.
    """

    rank: int
    local: str
    """`address:port`."""
    remote: str
    comm: str = ""
    """Communicator, where this end can tell (it is the one that listened)."""


class LinkSweep(msgspec.Struct, frozen=True):
    """One look at all sockets of a node's ranks."""

    at_s: float
    window_s: float
    """Since the sweep before it."""
    links: tuple[LinkSample, ...]
    cost_s: float = 0.0
    """CPU seconds that it took."""
    omitted: int = 0
    """Sockets between ranks that moved little and show nothing unusual, left out."""
    sockets: int = 0
    """Connections of the node's ranks that were looked at."""
    endpoints: tuple[LinkEndpoint, ...] = ()
    """New since the last sweep, and in turn some of the others, should a heartbeat be lost."""
    note: str = ""
    """What could not be seen, and why; empty where nothing is missing."""
    by_nccl: tuple[LinkSample, ...] = ()
    """Links as NCCL counts them. They are told apart from the others, so that a controller which
    knows nothing of them takes none for a socket."""


class PairProbe(msgspec.Struct, frozen=True, array_like=True):
    """One paired transfer of an active probe, outside the training's communicators."""

    round: int
    src: int
    """Node."""
    dst: int
    bytes: int
    seconds: float
    """0 where it did not end in time."""
    rtt_s: float = 0.0


class HostProbe(msgspec.Struct, frozen=True, array_like=True):
    """One fixed piece of arithmetic on one node (or device) during an active probe."""

    round: int
    node: int
    device: str
    """`cpu`, or the device's id."""
    seconds: float
    """0 where it did not end in time."""


class ProbeFinding(msgspec.Struct, frozen=True, kw_only=True):
    """What all rounds of an active probe together prove."""

    kind: Literal["slow link", "slow NIC", "slow host", "nothing"]
    reason: str
    node: int = -1
    """The node of a slow NIC or host."""
    link: tuple[int, int] | None = None
    """(sending node, receiving node) of a slow link."""
    confidence: float = 0.0
    evidence: dict[str, Any] = {}


def subject_probe(job: str, node: int | str) -> str:
    """Requests to the agent of `node`: a `ProbeAsk`, answered by `ProbeDoor`."""
    return f"perdure.{job.replace('.', '_')}.probe.{node}"


class ProbeAsk(msgspec.Struct, frozen=True):
    """Open a door for one transfer of `bytes` each way, for `deadline_s` seconds at the most."""

    id: str
    round: int
    src: int
    bytes: int
    deadline_s: float


class ProbeDoor(msgspec.Struct, frozen=True):
    """Where to connect; `error` where no door could be opened."""

    host: str = ""
    port: int = 0
    token: str = ""
    error: str = ""
