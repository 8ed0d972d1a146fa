"""A resume is exact as far as its losses are those of before, to the last bit."""

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from perdure.model.events import CheckpointRestored, MetricsLogged, ResumeCompared
from perdure.telemetry.exactness import STEPS_KEPT, ExactFold, LossComparison


def logged(generation: int, losses: dict[int, float], name: str = "loss") -> MetricsLogged:
    rows = tuple((step, {name: loss, "speed": 1.0 * generation}) for step, loss in losses.items())
    return MetricsLogged(generation=generation, rows=rows)


def test_equal_losses_of_a_step_that_was_made_again_are_found() -> None:
    losses = LossComparison()
    assert losses.take(logged(0, {0: 1.0, 1: 0.5, 2: 0.3, 3: 0.2})) is None
    assert losses.take(logged(1, {1: 0.5})) is None, "a step may be half logged"
    assert losses.take(logged(1, {2: 0.3})) == (1, "")
    assert losses.take(logged(1, {3: 0.7, 4: 0.1})) == (2, "")
    assert losses.take(logged(1, {5: 0.1})) is None, "step 3 was the newest one before the kill"


def test_another_loss_is_named() -> None:
    losses = LossComparison()
    losses.take(logged(0, {0: 1.0, 1: 0.5, 2: 0.3}))
    found = losses.take(logged(1, {0: 1.0, 1: 0.5000000000000001, 2: 0.3}))
    assert found == (1, "the loss of step 1 was 0.5 before the resume, and is 0.5000000000000001")


def test_nan_equals_itself_and_only_losses_count() -> None:
    losses = LossComparison()
    losses.take(logged(0, {0: float("nan"), 1: 1.0}))
    assert losses.take(logged(1, {0: float("nan"), 1: 1.0})) == (0, "")
    other = LossComparison()
    other.take(logged(0, {0: 1.0, 1: 1.0}, "accuracy"))
    assert other.take(logged(1, {0: 2.0, 1: 1.0}, "accuracy")) is None


def test_late_news_of_an_older_life_are_left_out() -> None:
    losses = LossComparison()
    losses.take(logged(0, {0: 1.0, 1: 1.0}))
    losses.take(logged(1, {0: 1.0}))
    assert losses.take(logged(0, {0: 9.0, 1: 9.0, 2: 9.0})) is None
    assert losses.take(logged(1, {1: 1.0})) == (0, "")


@settings(max_examples=examples(100))
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50_000)), max_size=60))
def test_what_is_kept_is_bounded(batches: list[tuple[int, int]]) -> None:
    losses = LossComparison()
    for generation, step in batches:
        losses.take(logged(generation, {step + n: 1.0 for n in range(0, 30_000, 1000)}))
    losses.take(logged(9, dict.fromkeys(range(2 * STEPS_KEPT), 1.0)))
    assert len(losses._now) <= STEPS_KEPT >= len(losses._before)


def restored(step: int, why: str = "", rank: int = 0) -> CheckpointRestored:
    return CheckpointRestored(generation=1, rank=rank, step=step, path="p", why_not_exact=why)


def test_the_verdict_has_three_values() -> None:
    fold = ExactFold()
    assert fold.judge() is None
    fold.take(restored(0))
    verdict = fold.judge()
    assert verdict is not None
    assert verdict.state == "expected"
    fold.take(ResumeCompared(generation=1, step=21, resumed=20))
    verdict = fold.judge()
    assert verdict is not None
    assert verdict.state == "proved"
    assert "step 21" in verdict.reason
    fold.take(restored(20, "torch was 2.9, is 2.13", rank=1))
    fold.take(ResumeCompared(generation=2, step=31, resumed=30))
    verdict = fold.judge()
    assert verdict is not None
    assert (verdict.state, verdict.reason) == ("not", "resumed at step 20: torch was 2.9, is 2.13")


def test_a_reason_that_is_known_before_a_resume_names_none() -> None:
    fold, why = ExactFold(), "the script changes what no checkpoint has: t"
    fold.take(CheckpointRestored(generation=0, rank=0, step=0, path="", why_not_exact=why))
    verdict = fold.judge()
    assert verdict is not None
    assert (verdict.state, verdict.reason) == ("not", why)
