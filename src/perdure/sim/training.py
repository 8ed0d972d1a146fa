"""The simulated training: what one generation of ranks achieves, as a function of time.

Synchronous steps of equal length, from the last verified checkpoint on; the first rank that dies
or stops freezes all of them, because the others wait for it. A rank that waits at a boundary holds
all of them up in the same way, until it knows the decision.
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Disk:
    """What outlives every process."""

    verified: int = 0
    """Step of the newest verified checkpoint."""
    agreed: set[tuple[int, int]] = field(default_factory=set)
    """(Generation, step) of every verified checkpoint that was agreed on."""


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
    holds: dict[int, int] = field(default_factory=dict)
    """Rank -> step that it does not pass without a decision."""
    paused_s: float = 0.0
    """Waited at boundaries so far."""
    agreed: dict[int, list[float]] = field(default_factory=dict)
    """Step -> when each rank began the checkpoint that was agreed on for it."""

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
        done = int(max(0.0, end - self.first_step_s - self.paused_s) / self.step_s + 1e-9)
        return min([self.target, self.start_step + done, *self.holds.values()])

    def time_of(self, step: int) -> float:
        """Return when `step` was, or would be, committed."""
        return self.first_step_s + self.paused_s + (step - self.start_step) * self.step_s

    def hold(self, rank: int, step: int | None, now: float) -> None:
        """Have `rank` wait at `step`, or at none; time spent waiting is lost to all."""
        before = min(self.holds.values(), default=None)
        if step is None:
            self.holds.pop(rank, None)
        else:
            self.holds[rank] = step
        after = min(self.holds.values(), default=None)
        until_s = now if self.frozen_s is None else min(now, self.frozen_s)
        if before is not None and (after is None or after > before) and self.first_step_s:
            self.paused_s += max(0.0, until_s - self.time_of(before))

    def freeze(self, now: float) -> None:
        """Stop all progress; what was verified by now stays."""
        if self.frozen_s is None:
            self.flush(now)
            self.frozen_s = now

    def save_at(self, step: int, now: float) -> None:
        """Let one rank begin its part of the checkpoint that was agreed on for `step`."""
        self.agreed.setdefault(step, []).append(now)

    def flush(self, now: float) -> None:
        """Bring the disk up to date: a checkpoint counts `save_s` after its step."""
        if not self.first_step_s:
            return
        saved = self.step_at(now - self.save_s) // self.save_every * self.save_every
        self.disk.verified = max(self.disk.verified, saved)
        end = now if self.frozen_s is None else min(now, self.frozen_s)
        for step, begun in self.agreed.items():
            if len(begun) == self.size and max(begun) + self.save_s <= end:
                self.disk.verified = max(self.disk.verified, step)
                self.disk.agreed.add((self.generation, step))
