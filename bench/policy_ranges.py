"""The low and the high end of each cost that the policies of `perdure_lab` assume."""

from typing import Literal, NamedTuple

import msgspec

from perdure_lab.policies.policies import Policy, change_policy


class Range(NamedTuple):
    """A cost that is assumed, at its ends."""

    low: float
    """The least that it costs; of an efficiency, what is left then."""
    high: float
    fields: tuple[str, ...]
    """Names of the policy's fields that have this cost; all have its likely value."""
    source: str


_IN_PLACE = ("loss.communicator_s", "join.communicator_s")
_OUTAGE = Range(
    6.6,
    304.0,
    _IN_PLACE,
    "a whole outage: 71 s with Parcae's rendezvous of 6.6 s; median 112 s and p90 368 s in "
    "Varuna's published logs (102 outages)",
)
_START = Range(
    4.1,
    60.0,
    ("start_s",),
    "4.1 s here on a CPU; 28.8 to 37.6 s in Parcae's table for additions; assumed above that",
)
_SILENCE = Range(
    0.0,
    15.3,
    ("loss.detect_s",),
    "what is published is of processes that end; how a node that vanishes is known is not: "
    "perdure's own limit at the high end",
)
_TEMPLATES = Range(2.0, 10.0, _IN_PLACE, "Oobleck's paper: 2 to 10 s")

RANGES: dict[str, tuple[Range, ...]] = {
    "restart-hang": (
        _OUTAGE,
        Range(600.0, 1800.0, ("loss.detect_s",), "NCCL's time-out in torch: 600 s, 1,800 s once"),
    ),
    "restart": (_OUTAGE,),
    "varuna": (_OUTAGE._replace(fields=(*_IN_PLACE, "announced.communicator_s")),),
    "bamboo": (
        Range(10.0, 60.0, _IN_PLACE, "assumed"),
        Range(0.85, 0.32, ("efficiency",), "its paper; .32 in Oobleck's artifact"),
        _SILENCE,
        _START,
    ),
    "oobleck": (_TEMPLATES, _SILENCE, _START),
    "recycle": (_TEMPLATES._replace(source="assumed, as of Oobleck"), _SILENCE, _START),
    "torchft": (
        Range(0.5, 60.0, ("loss.detect_s",), "its time-outs tuned short, and at their defaults"),
        Range(2.0, 10.0, ("join.communicator_s",), "assumed"),
        _START,
    ),
    "in-memory": (
        Range(20.0, 150.0, _IN_PLACE, "TrainMover: 20 s at 1,024 GPUs; FlashRecovery: 150 s"),
        _SILENCE,
        _START,
    ),
    "perdure": (
        Range(
            0.9,
            20.3,
            ("loss.detect_s",),
            "0.9 s after the connections of its peers end; node_lost_s: 15.3 s; "
            "a controller lost with the node: 5 s more",
        ),
        Range(
            0.007,
            6.6,
            (*_IN_PLACE, "announced.communicator_s"),
            "gloo here on a CPU; NCCL's shrink at 32 ranks (1.53 s, NeMo-RL#3186); Parcae's "
            "rendezvous on V100 nodes",
        ),
        Range(
            0.017,
            1.0,
            ("loss.warmup_s", "join.warmup_s", "announced.warmup_s"),
            "here on a CPU; Parcae's start of a process group (0.24 s); assumed above that",
        ),
        Range(
            1.0, 0.96, ("efficiency",), "a step beside DDP's, here on a CPU: 1.018 (1.002 to 1.041)"
        ),
        _START,
    ),
}
"""By policy; who would have to pay everything at its high end at once is a bound, no forecast."""


def take_end(policy: Policy, end: Literal["low", "high"]) -> Policy:
    """Return `policy` with every assumed cost at one end of its range."""
    changed = [policy]
    for known in RANGES.get(policy.name, ()):
        for name in known.fields:
            changed = change_policy(changed, f"{policy.name}.{name}={getattr(known, end)}")
    return msgspec.structs.replace(changed[0], source=policy.source)
