"""What the product itself says of a slow rank: simulated heartbeats through the real detector."""

from functools import cache

from msgspec.structs import replace

from perdure.model.verdicts import Culprit, Verdict
from tests.simulator.collectives import Layout, Noise
from tests.unit.detect.drive import FAULT_S, inject


@cache
def find_slowness(factor: float, kind: str = "slow-host", size: int = 4, **noise: float) -> Verdict:
    """Return the newest verdict on rank 1 made `factor` times as slow, once it may be acted upon.

    Of a link it is the one from rank 1 to rank 2.
    """
    run = inject(
        Layout(size), kind, 1, 55, peer=2, factor=factor, noise=Noise(**({"jitter": 0.03} | noise))
    )
    verdict = run.standing
    assert verdict is not None
    assert verdict.actionable
    return verdict


def move_verdict(
    verdict: Verdict, now: float, culprit: Culprit | None = None, generation: int = 0
) -> Verdict:
    """Return the same finding at another time and place: only who and when change."""
    shift = now - verdict.confirmed_s
    return replace(
        verdict,
        culprit=culprit or verdict.culprit,
        generation=generation,
        first_seen_s=verdict.first_seen_s + shift,
        confirmed_s=now,
    )


__all__ = ["FAULT_S", "find_slowness", "move_verdict"]
