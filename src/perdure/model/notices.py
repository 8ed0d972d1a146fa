"""Events of a platform that takes machines away: what it announces, takes back, and has done."""

import msgspec

from perdure.model.event import Event
from perdure.model.exits import ExitRecord


class Announced(msgspec.Struct, frozen=True, kw_only=True):
    """What a source says of its machine at this moment."""

    id: str
    reason: str
    gone_s: float | None = None
    """When the machine goes away, seconds since 1970; None where the platform does not say."""
    grace_s: float | None = None
    """How long after the first sight of it, where `gone_s` is None; None: as configured."""
    certain: bool = True
    """False: a higher risk, and no more."""
    waits: bool = False
    """The machine goes away sooner where it is left sooner: whoever takes it waits for that."""


class PreemptionNoticed(Event, frozen=True, kw_only=True):
    """The platform will take the machine away."""

    node: int
    at_s: float
    grace_s: float
    """From `at_s` on; 0 where it is unknown, or over."""
    source: str
    """Such as `aws`, `file`, or a person's name."""
    id: str = ""
    """Of what was announced: the same one again is no other notice."""
    reason: str = ""
    """In the platform's words, such as `spot terminate`."""
    certain: bool = True
    """False: it is only at a higher risk than others (a rebalance recommendation)."""
    waits: bool = False
    """Whoever takes the machine waits until it is left, so that it is left at once."""


class PreemptionWithdrawn(Event, frozen=True, kw_only=True):
    """What was announced is not any more: the machine stays."""

    node: int
    at_s: float
    source: str
    id: str = ""
    reason: str = ""


class MachineReported(Event, frozen=True, kw_only=True):
    """The platform says what has become of a node's machine, such as a pod that was OOMKilled."""

    node: int
    at_s: float
    reason: str
    """In perdure's words and the platform's, such as `out of memory: OOMKilled`."""
    source: str
    machine: str = ""
    """Its name, such as the pod's: another may be that node by now."""
    ended_s: float = 0.0
    """When it ended, by the platform's clock; 0: it has not, or that is not known."""


LATE_S = 300.0
"""A machine that is there this long after it should have gone is not going any more."""
_NEAR_S = 5.0
_TAKEN = (9, 15)
"""SIGKILL, SIGTERM: what a rank dies of when its machine is shut down."""


def is_explained(record: ExitRecord, gone_s: float, *, here: bool) -> bool:
    """Return whether a rank's end is what a notice has announced.

    On the machine itself (`here`) that is an end from outside: a rank that raised an exception, or
    ran out of memory, has crashed there as it would elsewhere. On another machine it is the loss
    of a peer, about when the noticed one goes away.
    """
    if record.at_s > gone_s + LATE_S:
        return False
    if here:
        return record.signal in _TAKEN and not record.oom
    return record.lost_peer and record.at_s >= gone_s - _NEAR_S
