"""What others on the same machine take from the ranks: time ready to run, and no CPU to run on.

Whoever waits for a CPU computes late and answers the network late, and nothing is wrong with it.
What is usual is left out: also an idle machine makes threads wait for one another.
"""

from dataclasses import dataclass, field

from perdure.detect.persistence import Baseline

STARVED = 0.05
"""Share of the time without a CPU from which it may be felt elsewhere."""
CHAIN = 4
"""Ranks whose waits add up: in a ring the next one waits for each of them."""
SAMPLE_S = 1.0
FADE = 0.7
"""Neighbours come and go: what they took is forgotten slowly."""


@dataclass(slots=True)
class _Cpu:
    at_s: float
    run_delay_s: float
    usual: Baseline = field(default_factory=Baseline)
    share: float = 0.0
    waited: float = 0.0
    """Without a CPU altogether, what is usual included."""


class Neighbours:
    """Shares of the time beyond what is usual, by rank; all threads of it together."""

    def __init__(self) -> None:
        """Begin a generation."""
        self._cpu: dict[int, _Cpu] = {}

    def take(self, rank: int, sent_s: float, run_delay_s: float) -> None:
        """Take what a heartbeat says."""
        cpu = self._cpu.get(rank)
        if cpu is None:
            self._cpu[rank] = _Cpu(sent_s, run_delay_s)
        elif sent_s - cpu.at_s >= SAMPLE_S:
            share = (run_delay_s - cpu.run_delay_s) / (sent_s - cpu.at_s)
            cpu.waited = max(share, FADE * cpu.waited)
            cpu.usual.add(sent_s, max(share, STARVED), 1.5)
            share = max(share - cpu.usual.value, 0.0) if cpu.usual.known else 0.0
            cpu.at_s, cpu.run_delay_s = sent_s, run_delay_s
            cpu.share = max(share, FADE * cpu.share)

    def taken_from(self, rank: int) -> float | None:
        """Return the share taken from a rank; None where unknown."""
        cpu = self._cpu.get(rank)
        return None if cpu is None else cpu.share

    def is_starved(self, rank: int) -> bool:
        """Return whether a rank had to wait for a CPU for long enough to be felt, by whomever."""
        cpu = self._cpu.get(rank)
        return cpu is not None and cpu.waited >= STARVED

    def take_more_from(self, rank: int) -> float:
        """Return how much more is taken from a rank than from the others."""
        cpu = self._cpu.get(rank)
        if cpu is None:
            return 0.0
        others = sorted(c.share for r, c in self._cpu.items() if r != rank)
        return cpu.share - (others[len(others) // 2] if others else 0.0)

    def sum_up(self, ranks: set[int]) -> tuple[float, float]:
        """Return the shares taken from a few ranks in a row, and from one; no ranks mean all."""
        shares = [c.share for r, c in self._cpu.items() if not ranks or r in ranks]
        shares.sort(reverse=True)
        return sum(shares[:CHAIN]), max(shares, default=0.0)
