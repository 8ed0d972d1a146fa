"""The perdure that is judged: this tree's names, or those of an older one (d36469f).

The same workloads run before either: `bench_healthy.py --tree PATH` starts itself anew with that
tree's `src` before its own. What an older tree's messages have no field for is left out, as its
agent would leave it out.
"""

import importlib
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace
from tests.simulator.shell import Disk, Shell

from perdure.adapters.ring_follow import SPANS_A_BEAT, STAGES_A_BEAT, Stride
from perdure.model.job import DetectConfig, JobSpec
from perdure.model.verdicts import Verdict


def find(name: str, *modules: str) -> Any:
    """Return what is called `name` in the first of `modules` that this tree has."""
    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)
        except (ModuleNotFoundError, AttributeError):
            continue
    return None


_PROGRESS = ("perdure.model.signals.progress", "perdure.model.progress")
_SPANS = ("perdure.model.signals.progress", "perdure.model.collectives")
_LINKS = ("perdure.model.signals.links", "perdure.model.links")
BusyPhase = find("BusyPhase", *_PROGRESS)
CommProgress = find("CommProgress", *_PROGRESS)
ProcSample = find("ProcSample", *_PROGRESS)
RankAccount = find("RankAccount", *_PROGRESS)
RankProgress = find("RankProgress", *_PROGRESS)
NodeBeat = find("NodeBeat", *_PROGRESS)
HostLoad = find("HostLoad", *_PROGRESS)
CollectiveSpan = find("CollectiveSpan", *_SPANS)
StepStages = find("StepStages", *_SPANS)
DeviceComm = find("DeviceComm", *_PROGRESS)
LinkSample = find("LinkSample", *_LINKS)
LinkSweep = find("LinkSweep", *_LINKS)
PairProbe = find("PairProbe", *_LINKS)
HostProbe = find("HostProbe", *_LINKS)
VirtualClock = find("VirtualClock", "tests.simulator.network", "tests.simulator.clock")

TIMEOUT_KNOWN = "timeout_s" in CommProgress.__struct_fields__
AWAITED_KNOWN = "awaited" in CollectiveSpan.__struct_fields__
WORK_FIELD = next(
    (n for n in ("work", "tokens", "samples") if n in StepStages.__struct_fields__), ""
)
"""How the tree's steps name the work that a script has declared for them; empty where none can."""


_FIELDS: dict[Any, frozenset[str]] = {}


def make(kind: Any, **said: Any) -> Any:
    """Return a message of `kind` with as much of what is `said` as this tree has fields for."""
    known = _FIELDS.get(kind)
    if known is None:
        known = _FIELDS[kind] = frozenset(kind.__struct_fields__)
    if known.issuperset(said):
        return kind(**said)
    return kind(**{name: value for name, value in said.items() if name in known})


def find_maker(kind: Any, *names: str) -> Callable[..., Any]:
    """Return what makes a message of `kind` from the values of `names`, in their order.

    It does what `make` does. Where these are the tree's first fields it is the kind itself, which
    takes a sixth of the time: heartbeats are millions.
    """
    if kind.__struct_fields__[: len(names)] == names:
        return kind  # type: ignore[no-any-return]
    return lambda *values: make(kind, **dict(zip(names, values, strict=True)))


def make_event(name: str, **said: Any) -> Any:
    """Return the event called `name`."""
    return make(find(name, "perdure.model.events"), **said)


def take_beat(shell: Any, now: float, beat: Any) -> list[Any]:
    """Hand a heartbeat to the shell's detector; return what follows."""
    detector = shell.detector
    return list((getattr(detector, "take_beat", None) or detector.observe)(now, beat))


__all__ = [
    "AWAITED_KNOWN",
    "SPANS_A_BEAT", "STAGES_A_BEAT", "TIMEOUT_KNOWN", "WORK_FIELD", "BusyPhase", "CollectiveSpan",
    "CommProgress", "DetectConfig", "DeviceComm", "Disk", "HostLoad", "HostProbe", "JobSpec",
    "LinkSample", "LinkSweep", "NodeBeat", "PairProbe", "ProcSample", "RankAccount",
    "RankProgress", "Shell", "StepStages", "Stride", "Verdict", "VirtualClock", "find",
    "find_maker", "make", "make_event", "replace", "take_beat",
]  # fmt: skip
