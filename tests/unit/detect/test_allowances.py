"""How long a rank may be silent: what its job has shown sets it, and nothing shown lowers it."""

from perdure.detect.cadence import SETTLED, Cadence, Habits
from perdure.detect.watch import RankWatch
from perdure.model.job import DetectConfig
from perdure.model.signals.progress import CommProgress, RankAccount, RankProgress


class Expecting(Habits):
    """Habits that expect a silence of so long wherever training is."""

    due_s = 0.0

    def expected_s(self, position: int, tolerance: int = 0) -> float:
        return self.due_s


class Life:
    """One rank as its heartbeats show it, each at a move of its training."""

    def __init__(self, *, declared: bool) -> None:
        self.now, self.count, self.declared = 1000.0, 0, declared
        self.habits = Expecting()
        first = self.look()
        self.watch = RankWatch(0, 0, Cadence(), DetectConfig(), first)
        self.watch.begin(first, self.now)

    def look(self) -> RankProgress:
        step = self.count if self.declared else -1
        comm = CommProgress("world", 2, self.count, self.count - 1, since_s=self.now)
        account = RankAccount(
            start_step=0, step=step, first_step_s=1000.0, last_step_s=self.now
        )  # fmt: skip
        return RankProgress(0, 1, "training", 1000.0, self.now, account, (comm,))

    def move(self, *gaps_s: float) -> None:
        """Make one step, or collective, after each of these silences."""
        for gap_s in gaps_s:
            self.now += gap_s
            self.count += 1
            progress = self.look()
            self.watch.hear(self.now, self.now, moved=True)
            self.watch.follow(progress, self.now, self.habits)

    @property
    def allowed_s(self) -> float:
        return self.watch.compute_allowance(self.habits)[0]


def test_a_silence_that_is_expected_lowers_no_allowance() -> None:
    """Any two silences predict a third: of a noisy job, some short one of long ago often does."""
    life = Life(declared=True)
    life.move(*[1.0] * 40)
    for _ in range(2):
        life.move(9.0, *[1.0] * 30)
    noisy_s = life.allowed_s
    assert noisy_s > 12.0
    life.habits.due_s = 5.0
    assert life.allowed_s == noisy_s
    life.habits.due_s = 50.0
    assert life.allowed_s > 70.0


def test_a_silence_that_is_longer_than_the_one_expected_is_one_that_nothing_predicted() -> None:
    life = Life(declared=True)
    life.move(*[1.0] * 40)
    life.habits.due_s = 5.0
    for gap_s in (6.0, 7.0, 30.0, 30.0):
        life.move(gap_s, 1.0)
    assert life.habits.unexpected_s == 30.0
    life.habits.due_s = 30.0
    life.move(40.0, 1.0, 40.0, 1.0)
    assert life.habits.unexpected_s == 30.0


def test_noise_may_ask_for_as_many_steps_where_none_are_declared() -> None:
    """Of three collectives two follow at once: it was 18 times the time between two of one step."""
    told = {}
    for declared, pattern in ((True, [1.2]), (False, [0.1, 0.1, 1.0])):
        life = Life(declared=declared)
        life.move(*pattern * 30)
        for _ in range(2):
            life.move(12.0, *pattern * (30 // len(pattern)))
        told[declared] = life.allowed_s
    assert told[True] > 18.0
    assert told[False] > 0.75 * told[True]


def test_what_another_ranks_first_steps_took_is_allowed_until_a_rank_has_made_enough() -> None:
    slow, quick = Life(declared=True), Life(declared=True)
    quick.habits = slow.habits
    slow.move(10.0, 10.0, 10.0, 90.0)
    quick.move(*[10.0] * 6)
    assert quick.allowed_s > 90.0
    quick.move(*[10.0] * SETTLED)
    assert quick.allowed_s < 50.0
