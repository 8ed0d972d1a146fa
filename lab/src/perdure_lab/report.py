"""What simulations of policies on a trace, and live replays of it, show; a contract, as JSON."""

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
        """Return all seconds that a change takes."""
        return float(sum(getattr(self, name) for name in self.__struct_fields__))


PHASES = tuple(name.removesuffix("_s") for name in Phases.__struct_fields__)


class Physics(msgspec.Struct, frozen=True):
    """What nobody can beat, the oracle included."""

    bytes_per_s: float = 1.25e9
    """The bandwidth of a node's link."""
    detect_s: float = 0.005
    """Least time to know that a node is gone without a word."""


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """A share of what was possible on a trace, as somebody made it."""

    committed: float
    """Samples."""
    fraction_of_u1: float
    fraction_of_u2: float
    fraction_of_u2_online: float
    ledger: dict[str, float]
    """Share of the slot-seconds by account."""
    losses: int
    """The changes, or instants, in which it lost a node that trained."""


class PolicyRow(Share, frozen=True, kw_only=True):
    """What one policy made of a trace."""

    policy: str
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


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds of what was possible on a trace."""

    trace: str
    u1: float
    """Samples, as the two below."""
    u2: float
    u2_online: float
    duration_s: float
    """The time that was played; less than the trace's where a replay was interrupted."""
    slot_s: float
    seed: int | None
    """Of the victims; None: as the trace names them."""

    def weigh(self, committed: float) -> dict[str, float]:
        """Return `committed` as a share of each bound, by the names of `Share`."""
        wholes = {name: getattr(self, name) for name in ("u1", "u2", "u2_online")}
        return {f"fraction_of_{k}": committed / v if v else 0.0 for k, v in wholes.items()}


class Comparison(Bounds, frozen=True, kw_only=True):
    """`perdure trace simulate --json`."""

    policies: tuple[PolicyRow, ...]
    throughput: str
    """The table's name and source."""
    physics: Physics
    sweep: tuple[SweepRow, ...] = ()


class MadeStep(msgspec.Struct, frozen=True):
    """A step that was committed, as a rank has noted it."""

    at_s: float
    """Seconds of CLOCK_MONOTONIC; of the replay, once it is read."""
    step: int
    samples: int
    places: tuple[int, ...]
    """Where the ranks that made it were."""


class MeasuredCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What changes cost perdure, measured on live kills and joins: medians."""

    source: str
    """What was run where, in a sentence."""
    losses: Annotated[int, Meta(ge=0)]
    """So many kills of a node that trained are behind `loss`."""
    joins: Annotated[int, Meta(ge=0)]
    loss: Phases
    join: Phases
    announced: Phases
    start_s: Seconds = 0.0
    """From a node's arrival until it can be taken in, while the others train."""
    steady: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Share of the time that steps took beyond their reference, changes aside."""


class ReplayRow(Share, frozen=True, kw_only=True):
    """What one system made of the trace, live."""

    system: str
    joins: int
    steps_again: int
    """Steps that were made more than once."""
    longest_gap_s: float
    """Between two committed steps."""
    load: float
    """Of the machine at the end (1 minute)."""
    recoveries_s: tuple[float, ...] = ()
    """Of each loss, as the job itself has stamped it (perdure)."""
    rates: tuple[tuple[float, float], ...] = ()
    """(seconds, committed samples a second from then on)."""
    pace: float = 0.0
    """Undisturbed steps took so many times as long as the reference's; 0 where there were none."""
    shapes: tuple["FormedShape", ...] = ()
    """Of a pipelined world, in the order of time."""


class FormedShape(msgspec.Struct, frozen=True):
    """A shape that a pipelined world took in the course of a replay."""

    at_s: float
    """When its last member was in it."""
    shape: str
    """Copies and stages, such as `2x3` or `(2,1)`."""
    morphed: bool
    """The model is cut into stages otherwise than before."""


class ReplayResult(Bounds, frozen=True, kw_only=True):
    """`perdure trace replay --json`."""

    complete: bool
    nodes_max: int
    speed: float
    notice_s: float
    throughput: dict[str, float]
    """Measured samples a second of the reference, by number of nodes."""
    systems: tuple[ReplayRow, ...]
    costs: MeasuredCosts | None = None
    """Of perdure, from this very replay."""
    simulated: PolicyRow | None = None
    """What `trace simulate` makes of the same trace with those costs."""
    counts: tuple[tuple[float, int], ...] = ()
    """(seconds, nodes from then on)."""
    reference: str = "perdure itself"
    """The job whose throughput that is; U1 and the others are made of it."""
    reference_spread: float = 0.0
    """Between two times that the reference was measured, at most."""
    unit: str = "samples"
    """What `committed` and the bounds count."""


class DriveResult(ReplayResult, frozen=True, kw_only=True):
    """`perdure trace drive --json`."""

    job: str
    assumed: tuple[int, ...] = ()
    """Numbers of nodes whose throughput is in proportion to the nearest that was seen."""
    ended: str = ""
    """How the job ended, where that was before the trace's end."""
    fixed: str = ""
    """For which part of the trace a world of a fixed size had enough nodes; empty of any other."""
    trouble: str = ""
    """Why the play could not go on, where it could not: a node that was not reached."""
