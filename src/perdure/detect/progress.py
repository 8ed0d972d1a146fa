"""Progress worth journaling: heartbeats folded to one event (`ProgressNoted`) every few seconds.

Heartbeats themselves are never journaled. What decisions and the ledger need of them is: how
far every rank is, and the moment at which a new generation is training again.
"""

from collections.abc import Callable, Mapping

from perdure.detect.watch import RankWatch
from perdure.model.events import GenerationStepping, ProgressNoted
from perdure.model.job import JobSpec
from perdure.model.signals.progress import JobHabits, RankAccount

INTERVAL_S = 5.0
RANKS_AT_FULL_RATE = 1000
"""Above it the interval grows with the world, so that the journal does not."""
ALIVE_S = 1.0
"""A world that cannot show collectives (one rank, or no Python) trains once it lived so long."""
MUTE_S = 30.0
"""A Python world of several ranks that shows neither steps nor collectives, after so long."""

_STAMPS = ("spawned", "script", "init", "group", "restored", "first_step")


class ProgressNotes:
    """Turns the ranks of one generation into `ProgressNoted` and `GenerationStepping`."""

    def __init__(self, spec: JobSpec) -> None:
        """Begin before the first generation."""
        self._spec = spec
        self._interval_s = INTERVAL_S * max(1.0, spec.world_size / RANKS_AT_FULL_RATE)
        self.begin(-1, 0.0)

    def begin(self, generation: int, now: float) -> None:
        """Begin a new generation."""
        self._generation, self._noted_s = generation, now
        self._moved = self._stepping = False
        self._ready: dict[int, float] = {}
        self._epochs: dict[int, int] = {}
        """The newest epoch of each member of an elastic world."""

    def mark_noted(self, at_s: float) -> None:
        """A `ProgressNoted` of this generation is in the journal."""
        self._noted_s = max(self._noted_s, at_s)

    def mark_stepping(self) -> None:
        """A `GenerationStepping` of this generation is in the journal."""
        self._stepping = True

    def mark_ended(self, rank: int, at_s: float) -> None:
        """Note that a rank ended well: nobody waits for its first step any more."""
        self._ready.setdefault(rank, at_s)

    def mark_formed(self, rank: int, epoch: int) -> None:
        """A rank is a member of that epoch of an elastic world."""
        self._epochs[rank] = epoch

    def take(self, watch: RankWatch, moved: bool) -> None:
        """Look at one rank's newest heartbeat."""
        self._moved |= moved
        if not self._stepping and watch.rank not in self._ready:
            at_s = self._read_first_step_s(watch)
            if at_s:
                self._ready[watch.rank] = at_s

    def make(
        self,
        now: float,
        watches: Mapping[int, RankWatch],
        habits: Callable[[], JobHabits] = JobHabits,
    ) -> list[ProgressNoted | GenerationStepping]:
        """Return what is due; `habits` tells what is usual for the job."""
        if not self._stepping and watches and len(self._ready) >= self._spec.world_size:
            self._stepping, self._moved = True, True
            return [self._note(now, watches, habits()), self._say_stepping(watches)]
        if self._moved and now - self._noted_s >= self._interval_s:
            return [self._note(now, watches, habits())]
        return []

    def _read_first_step_s(self, watch: RankWatch) -> float:
        """Return when the rank began its first step, as well as can be told; 0 if not yet."""
        account = watch.account
        if account.first_step_s > 0:
            return account.first_step_s
        spawned_s = account.spawned_s + watch.clock_s if account.spawned_s else watch.began_s
        alive_s = watch.seen_s - spawned_s
        if not watch.joined:
            if _ended(watch) >= 1:
                return watch.progress_s
            alone = self._spec.world_size == 1 or self._spec.no_python
            if alone and not watch.collectives and alive_s >= ALIVE_S:
                return watch.seen_s
        return watch.seen_s if alive_s >= MUTE_S and watch.collectives == 0 else 0.0

    def _note(
        self, now: float, watches: Mapping[int, RankWatch], habits: JobHabits
    ) -> ProgressNoted:
        self._noted_s, self._moved = now, False
        accounts: dict[int, RankAccount] = {r: w.account for r, w in sorted(watches.items())}
        live = [w for w in watches.values() if not w.gone and not w.newest.unseen]
        size = self._spec.world_size  # Beyond it are members that came later, or are held.
        steps = [
            a.step
            for r, a in accounts.items()
            if (r < size or a.step >= 0)
            and not watches[r].newest.unseen
            and not (watches[r].gone and self._is_out(r))
        ]
        return ProgressNoted(
            generation=self._generation,
            at_s=now,
            step=min(steps, default=-1),
            accounts=accounts,
            collectives=min((_ended(w) for w in live), default=0),
            habits=habits,
        )

    def has_left(self, rank: int) -> bool:
        """Return whether it was a member of an epoch before the newest one."""
        return rank in self._epochs and self._is_out(rank)

    def _is_out(self, rank: int) -> bool:
        """Return whether the others have formed an epoch without it, and go on from its step."""
        return self._epochs.get(rank, 0) < max(self._epochs.values(), default=0)

    def _say_stepping(self, watches: Mapping[int, RankWatch]) -> GenerationStepping:
        accounts = [w.account for w in watches.values()]
        stamps = {name: max(getattr(a, f"{name}_s") for a in accounts) for name in _STAMPS}
        return GenerationStepping(
            generation=self._generation,
            at_s=max(self._ready.values()),
            step=min((w.account.step for w in watches.values() if not w.newest.unseen), default=-1),
            stamps={name: at_s for name, at_s in stamps.items() if at_s > 0},
        )


def _ended(watch: RankWatch) -> int:
    """Return the collectives that the rank has surely left: all but the last one entered."""
    return sum(c.ended_seq if c.ended_seq >= 0 else max(c.started_seq - 1, 0) for c in watch.comms)
