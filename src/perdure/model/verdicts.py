"""What the detectors say: kind, culprit, evidence, and since when."""

from typing import Any, Literal

import msgspec

VerdictKind = Literal[
    "Crash",
    "CommHang",
    "ComputeHang",
    "CommSlow",
    "Straggler",
    "Desync",
    "UnhealthyDevice",
    "NodeLost",
    "Preemption",
    "EarlyExit",
    "Unresponsive",
    "HostBusy",
]
"""`EarlyExit`: a rank ended with exit code 0 while others wait for it in a collective.
`Unresponsive`: a part of perdure itself lives on that node and does not answer.
`HostBusy`: work that is not the job's keeps its ranks from their CPUs."""

EXIT_SKEW_S = 5.0
"""Seconds that others may wait for a rank that has ended, or raised, before it is acted upon."""

HANGS = ("CommHang", "ComputeHang")
"""No progress beyond what the job's own steps have taught."""

Activity = Literal["gone", "stopped", "quiet", "busy", "blocked"]
"""What a culprit's process does: nothing any more, state T, alive but still, burning CPU or I/O,
state D (it waits in the kernel, mostly for a disk)."""

Ground = Literal[
    "",
    "stopped",
    "ended",
    "desync",
    "link",
    "circle",
    "platform",
    "timeout",
    "habit",
    "job file",
]
"""Why a verdict may be acted upon; empty: nothing allows it as things look.

The first six are facts. `stopped`: state T. `ended`: a process has ended, or its connections.
`desync`: records show different collectives. `link`: the kernel's TCP gets no answer, or a probe
has settled it. `circle`: ranks are blocked in a circle. `platform`: the kernel, a device or the
platform says so. The others are patience that has run out. `timeout`: nothing has changed for
longer than the process group's own time-out. `habit`: nothing has changed for ten times the job's
longest silence. `job file`: an explicit number in it says so."""


INSIDE = "recorded_inside"
"""Evidence: the record of a rank that waits can tell ends, and says that it is in the collective.

It is no word on the verdict, which may be uncertain all the same."""


class Culprit(msgspec.Struct, frozen=True, omit_defaults=True):
    """Exactly one of the four is set; `link` is directed, from rank to rank."""

    rank: int | None = None
    node: int | None = None
    device: str | None = None
    link: tuple[int, int] | None = None

    def __str__(self) -> str:
        """Return it in words, such as `rank 3`."""
        if self.rank is not None:
            return f"rank {self.rank}"
        if self.node is not None:
            return f"node {self.node}"
        if self.device is not None:
            return f"device {self.device}"
        return f"link {self.link[0]}->{self.link[1]}" if self.link else "the job"


class Slowness(msgspec.Struct, frozen=True, kw_only=True):
    """How slow a culprit is, and what that costs the job: medians, and the ends of an interval.

    The ratio is the culprit's own: of its work to that of its peers, or of a collective to what it
    usually takes. What counts for the job is the share of every step that would be won by a
    replacement, which may be far less, because a step is more than that work.
    """

    ratio: float
    ratio_low: float
    ratio_high: float
    share: float
    """Of every step, 0 to 1: what the step would be shorter by without the culprit."""
    share_low: float
    """The lower end of its interval, which is what decisions are made from."""

    @property
    def lost_s_per_hour(self) -> float:
        """Return the seconds of every hour that the culprit costs the whole job."""
        return 3600.0 * self.share

    @property
    def step_ratio_low(self) -> float:
        """Return how many times as long a step takes at the least because of the culprit."""
        return 1.0 / max(1.0 - self.share_low, 1e-3)


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One finding. It is reported at once and acted upon only when `actionable`."""

    kind: VerdictKind
    culprit: Culprit
    generation: int
    first_seen_s: float
    """Job time of the last sign of health before it, or of the exit itself."""
    confirmed_s: float
    """Job time at which the detector was sure."""
    confidence: float
    """0 to 1."""
    reason: str
    """One sentence that a person can act on."""
    actionable: bool = False
    """Its action threshold has passed as well."""
    activity: Activity = "gone"
    step: int = -1
    """The culprit's last committed step; -1 where the script declares none."""
    evidence: dict[str, Any] = {}
    certain: bool = False
    """It rests on a fact: waiting longer could not show it to be wrong."""
    ground: Ground = ""
    """Why it is acted upon, or will be at `acts_s` if nothing changes until then."""
    acts_s: float = 0.0
    """Job time at which it is acted upon at the earliest, as things look; 0: not at all."""
    acts_why: str = ""
    """The same in words, such as `rank 1 is stopped`; without a ground: what speaks against it."""
    slowness: Slowness | None = None
    """Of `Straggler` and `CommSlow`; None where its cost could not be measured."""
