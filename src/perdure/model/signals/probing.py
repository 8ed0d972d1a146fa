"""What two agents say to each other when they test the path between them.

The sending node asks on the bus; the other opens a listening socket for this one transfer and
answers where. Nothing listens while no probe is open, and who does not know the token is refused.
"""

import msgspec


def subject_probe(job: str, node: int) -> str:
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
