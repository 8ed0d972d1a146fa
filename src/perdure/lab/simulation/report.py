"""What a simulation of policies on a trace shows. Its JSON is a contract."""

from typing import Annotated

import msgspec
from msgspec import Meta

Seconds = Annotated[float, Meta(ge=0)]


class Phases(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a change takes, by the ledger's accounts. Seconds in which nothing is trained."""

    detect_s: Seconds = 0.0
    decide_s: Seconds = 0.0
    abort_s: Seconds = 0.0
    communicator_s: Seconds = 0.0
    state_s: Seconds = 0.0
    warmup_s: Seconds = 0.0

    @property
    def total_s(self) -> float:
        """All of it."""
        return float(sum(getattr(self, name) for name in self.__struct_fields__))


PHASES = tuple(name.removesuffix("_s") for name in Phases.__struct_fields__)


class Physics(msgspec.Struct, frozen=True):
    """What nobody can beat, the oracle included."""

    bytes_per_s: float = 1.25e9
    """Of a node's link."""
    detect_s: float = 0.005
    """Least time to know that a node is gone without a word."""


class PolicyRow(msgspec.Struct, frozen=True):
    """What one policy made of a trace."""

    policy: str
    committed: float
    """Samples."""
    fraction_of_u1: float
    fraction_of_u2: float
    fraction_of_u2_online: float
    ledger: dict[str, float]
    """Share of the slot-seconds by account."""
    losses: int
    """Changes in which it lost a node that trained."""
    changes: int
    """Changes of its own will."""
    restarts: int
    """Losses after which nobody had the state."""
    source: str
    """Where its parameters come from."""


class SweepRow(msgspec.Struct, frozen=True):
    """What perdure would have, were its communicator formed in another time."""

    communicator_s: float
    fraction_of_u2: float
    u2_online_of_u2: float
    """What hindsight would have at the same cost."""


class Comparison(msgspec.Struct, frozen=True):
    """`perdure trace simulate --json`."""

    trace: str
    u1: float
    """Samples, as the two below."""
    u2: float
    u2_online: float
    policies: tuple[PolicyRow, ...]
    throughput: str
    """The table's name and source."""
    duration_s: float
    slot_s: float
    seed: int | None
    """Of the victims; None: as the trace names them."""
    physics: Physics
    sweep: tuple[SweepRow, ...] = ()
