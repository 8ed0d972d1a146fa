"""Which step an agreement is tried for first: the one that the ranks come to next."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.control.driver import Driver, one, started

from perdure.control.agreement.boundary import choose_next_step
from perdure.control.memory import Memory, decode_memory, encode_memory
from perdure.model.events import (
    BoundaryAnswered,
    CommandReceived,
    JournalEntry,
    KeysDeclared,
    ProgressNoted,
)
from perdure.model.orders import SendBoundary
from perdure.model.signals.progress import RankAccount
from perdure.model.steering import KeySpec, Pace


def trained(step: int = 100) -> Driver:
    driver = started()
    keys = (KeySpec(name="lr", type="float", default=0.1),)
    driver.do(KeysDeclared(generation=0, keys=keys))
    accounts = {rank: RankAccount(step=step) for rank in range(2)}
    driver.do(ProgressNoted(generation=0, at_s=driver.now, step=step, accounts=accounts))
    return driver


def pace(driver: Driver, step: int, *, age_s: float = 0.1, step_s: float = 0.1, generation=0):
    return Pace(generation=generation, step=step, at_s=driver.now - age_s, step_s=step_s)


def ask(driver: Driver, told: Pace | None, kind="set") -> SendBoundary:
    args = {"changes": {"lr": 0.5}} if kind == "set" else {}
    event = CommandReceived(id=f"{kind}-{driver.now}", kind=kind, args=args, pace=told)
    return one(driver.do(event), SendBoundary)


def answer(driver: Driver, order: SendBoundary, rank: int, step: int, ok: bool = True):
    return driver.do(BoundaryAnswered(id=order.id, rank=rank, ok=ok, step=step))


@pytest.mark.parametrize("kind", ["set", "pause", "checkpoint", "stop"])
def test_the_first_try_is_for_the_next_step(kind):
    driver = trained()
    # 30.5 steps on from the journal's; half a step is left, which is time enough to ask.
    assert ask(driver, pace(driver, 130, age_s=0.05), kind).step == 131


def test_a_step_that_is_about_to_end_is_left_to_end():
    driver = trained()
    assert ask(driver, pace(driver, 130, age_s=0.095)).step == 132


def test_short_steps_are_counted_by_the_time_that_asking_takes():
    driver = trained()
    step = ask(driver, pace(driver, 130, age_s=0.1, step_s=0.001)).step
    assert 236 <= step <= 245


@pytest.mark.parametrize(
    "told",
    [None, Pace(generation=-1, step=500, at_s=100.0, step_s=0.1),
     Pace(generation=0, step=500, at_s=90.0, step_s=0.1)],
)  # fmt: skip
def test_without_a_pace_of_now_it_is_a_look_ahead_from_the_journal(told):
    assert ask(trained(), told).step == 102


def test_a_veto_tells_more_and_the_next_try_looks_further():
    driver = trained()
    order = ask(driver, pace(driver, 130, age_s=0.05))
    driver.now += 0.02
    again = [a for a in answer(driver, order, 0, 140, ok=False) if isinstance(a, SendBoundary)]
    assert [(a.move, a.step) for a in again] == [("abort", 131), ("prepare", 142)]
    driver.now += 0.02
    again = answer(driver, again[1], 1, 171, ok=False)
    assert [a.step for a in again if isinstance(a, SendBoundary)][1] >= 175


def test_it_learns_how_long_asking_takes():
    driver = trained()
    steering = driver.controller.state.steering
    for number in range(20):
        driver.now += 10.0
        order = ask(driver, pace(driver, 1000 * number + 1000, age_s=0.0, step_s=0.01), "pause")
        driver.now += 0.2
        for rank in range(2):
            answer(driver, order, rank, order.step - 1)
        driver.controller.state.boundary = driver.controller.state.steering.pause = None
        driver.controller.state.commands.clear()
    assert steering.answer_s == pytest.approx(0.2, abs=0.01)
    driver.now += 10.0
    ahead = ask(driver, pace(driver, 90_000, age_s=0.0, step_s=0.01)).step - 90_000
    assert 20 <= ahead <= 22


def test_a_later_controller_asks_for_the_same_step():
    driver = trained()
    order = ask(driver, pace(driver, 130, age_s=0.05))
    memory = Memory(driver.spec)
    for seq, (now, event) in enumerate(driver.log, start=1):
        memory.replay(JournalEntry(seq=seq, at_s=now, body=event))
    for known in (memory, decode_memory(encode_memory(memory), driver.spec)):
        state = known.machine.state
        assert state.boundary is not None
        assert (state.boundary.step, state.steering.pace) == (
            order.step,
            pace(driver, 130, age_s=0.05),
        )


@given(
    known=st.integers(0, 10**6), ahead=st.integers(-10, 10**6), age_s=st.floats(-1.0, 100.0),
    step_s=st.floats(1e-4, 1e3), lead_s=st.floats(0.004, 1.0), tries=st.integers(1, 12),
)  # fmt: skip
def test_it_is_always_ahead_and_further_with_each_try(known, ahead, age_s, step_s, lead_s, tries):
    told = Pace(generation=0, step=max(0, known + ahead), at_s=1000.0, step_s=step_s)
    now = 1000.0 + age_s
    step = choose_next_step(told, known, now, lead_s, tries)
    assert step > known
    assert choose_next_step(told, known, now, lead_s, tries + 1) >= step
    assert choose_next_step(told, known, now, lead_s, 12) >= known + 2**10
