"""Events of a platform that takes machines away: what was announced, and what was taken back."""

import msgspec

from perdure.model.event import Event


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


class PreemptionWithdrawn(Event, frozen=True, kw_only=True):
    """What was announced is not any more: the machine stays."""

    node: int
    at_s: float
    source: str
    id: str = ""
    reason: str = ""
