"""The simulated training: what one generation of ranks achieves, as a function of time.

Synchronous steps of equal length, from the last verified checkpoint on; the first rank that dies
or stops freezes all of them, because the others wait for it.
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Disk:
    """What outlives every process."""

    verified: int = 0
    """Step of the newest verified checkpoint."""


@dataclass(slots=True)
class World:
    """One generation."""

    generation: int
    size: int
    target: int
    step_s: float
    startup_s: float
    save_every: int
    save_s: float
    disk: Disk
    spawned: dict[int, float] = field(default_factory=dict)
    first_step_s: float = 0.0
    start_step: int = 0
    frozen_s: float | None = None

    def spawn(self, rank: int, now: float) -> bool:
        """Add a rank; True once the world is whole, which fixes when its first step begins."""
        self.spawned[rank] = now
        if len(self.spawned) < self.size:
            return False
        self.first_step_s = now + self.startup_s
        self.start_step = self.disk.verified
        return True

    def step_at(self, now: float) -> int:
        """Return the committed steps at `now`."""
        if not self.first_step_s or now < self.first_step_s:
            return self.start_step
        end = now if self.frozen_s is None else min(now, self.frozen_s)
        done = int(max(0.0, end - self.first_step_s) / self.step_s + 1e-9)
        return min(self.target, self.start_step + done)

    def finish_s(self) -> float:
        """Return when the last step will be committed, if nothing happens."""
        return self.first_step_s + (self.target - self.start_step) * self.step_s

    def freeze(self, now: float) -> None:
        """Stop all progress; what was verified by now stays."""
        if self.frozen_s is None:
            self.flush(now)
            self.frozen_s = now

    def flush(self, now: float) -> None:
        """Bring the disk up to date: a checkpoint counts `save_s` after its step."""
        if self.first_step_s:
            saved = self.step_at(now - self.save_s) // self.save_every * self.save_every
            self.disk.verified = max(self.disk.verified, saved)
