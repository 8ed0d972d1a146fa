"""Progress worth journaling: heartbeats folded to one event (`ProgressNoted`) from time to time.

Heartbeats themselves are never journaled. What decisions and the ledger need of them is: how
far every rank is, and the moment at which a new generation is training again.

A journal of a month has to be read in seconds. So what is noted of all ranks comes the more seldom
the more ranks there are, and whenever one fails; in between two of them stand for all, the more
seldom the older the generation is.
"""

import math
from collections.abc import Callable, Mapping

from perdure.detect.watch import RankWatch
from perdure.model.events import GenerationStepping, ProgressNoted
from perdure.model.job import JobSpec
from perdure.model.signals.progress import JobHabits, RankAccount

INTERVAL_S, INTERVAL_S_MAX = 5.0, 60.0
INTERVAL_SHARE = 0.01
"""Of a generation's age: how long after it the next note comes."""
WHOLE_BYTES_A_S = 20.0
"""That all ranks' accounts may cost the journal."""
ACCOUNT_BYTES = 430
"""About, of one rank's account as JSON."""
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
        self._whole_every_s = spec.world_size * ACCOUNT_BYTES / WHOLE_BYTES_A_S
        self._whole_s = -math.inf
        """When all ranks were noted last, in whichever generation."""
        self.begin(-1, 0.0)

    def begin(self, generation: int, now: float) -> None:
        """Begin a new generation."""
        self._generation, self._began_s, self._noted_s = generation, now, now
        self._moved = self._moved_since_whole = self._stepping = False
        self._ready: dict[int, float] = {}
        self._epochs: dict[int, int] = {}
        """The newest epoch of each member of an elastic world."""

    def mark_noted(self, event: ProgressNoted) -> None:
        """A `ProgressNoted` of this generation is in the journal."""
        self._noted_s = max(self._noted_s, event.at_s)
        if event.whole:
            self._whole_s = max(self._whole_s, event.at_s)

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
        self._moved_since_whole |= moved
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
            self._stepping = True
            return [self._note(now, watches, habits()), self._say_stepping(watches)]
        age_s = now - self._began_s
        interval_s = min(max(INTERVAL_S, age_s * INTERVAL_SHARE), INTERVAL_S_MAX)
        if self._moved and now - self._noted_s >= interval_s:
            return [self._note(now, watches, habits())]
        return []

    def make_last(
        self, now: float, watches: Mapping[int, RankWatch], habits: Callable[[], JobHabits]
    ) -> list[ProgressNoted]:
        """Return what is to be kept of a generation in which something has failed."""
        if not self._moved_since_whole or not watches:
            return []
        return [self._note(now, watches, habits(), last=True)]

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
        self,
        now: float,
        watches: Mapping[int, RankWatch],
        habits: JobHabits,
        *,
        last: bool = False,
    ) -> ProgressNoted:
        """Return what the journal is told: of all ranks in the `last`, or when it is time."""
        whole = last or now - self._whole_s >= self._whole_every_s
        self._noted_s, self._moved = now, False
        if whole:
            self._whole_s, self._moved_since_whole = now, False
        return self._describe(now, watches, habits, whole=whole)

    def _describe(
        self, now: float, watches: Mapping[int, RankWatch], habits: JobHabits, *, whole: bool
    ) -> ProgressNoted:
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
        if not whole:
            furthest = max(accounts, key=lambda rank: accounts[rank].step)
            accounts = {rank: accounts[rank] for rank in sorted({min(accounts), furthest})}
        return ProgressNoted(
            generation=self._generation,
            at_s=now,
            step=min(steps, default=-1),
            accounts=accounts,
            collectives=min((_ended(w) for w in live), default=0),
            habits=habits,
            whole=whole,
        )

    def sum_up(
        self, now: float, watches: Mapping[int, RankWatch], habits: JobHabits
    ) -> ProgressNoted | None:
        """Return how far all ranks are, for who looks; None where none is there."""
        return self._describe(now, watches, habits, whole=True) if watches else None

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
