"""`perdure profile` and the script that it runs: what is asked for, and what was found."""

import msgspec

ASK = "PERDURE_PROFILE"
"""Environment variable with a `ProfileRequest`: `perdure.elastic.train` measures, and ends."""


class ProfileRequest(msgspec.Struct, frozen=True):
    """What to measure."""

    folder: str
    """Where profiles are kept."""
    report: str
    """File for the `ProfileReport`."""
    model: str
    """What to call it."""
    micro_batches: tuple[int, ...] = ()
    """Sizes, samples; none: the script's own, its half and its double."""
    ranks: int = 8
    """Devices of the largest group whose all-reduce is measured."""
    seconds: float = 2.0
    """At least so long for each micro-batch size."""
    again: bool = False
    """Measure also what was measured before."""


class ProfileReport(msgspec.Struct, frozen=True):
    """What was found."""

    path: str = ""
    """The cost profile's."""
    measured: tuple[str, ...] = ()
    """What was measured for it, `blocks` and `links`; the rest was kept from before."""
    spread: float = 0.0
    """Half of the measurements of a figure lie within this share of it: the worst figure's."""
    spread_of: str = ""
    """Which figure that is."""
    notes: tuple[str, ...] = ()
    error: str = ""
    """Why there is no profile."""
    hint: str = ""
    exit_code: int = 0
