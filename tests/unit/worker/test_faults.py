import threading
import time
from typing import Any

import pytest

from perdure.model.orders import InjectFault
from perdure.worker.steering.harm import (
    NEVER,
    Faults,
    exhaust_memory,
    hold_interpreter,
    press_memory,
    spin,
)


@pytest.fixture
def faults():
    told = []
    faults: Any = Faults(
        rank=1, generation=4, emit=told.append, drain=lambda s: True, now=lambda: 12.0
    )
    faults.told = told
    return faults


def order(kind, at_step=-1, generation=4, id="f1", **args):
    return InjectFault(
        id=id, generation=generation, rank=1, kind=kind, at_step=at_step, args=args, reason="test"
    )


def test_a_fault_waits_for_its_step_and_is_told_before_it_happens(faults):
    faults.step = 3
    faults.handle(order("exit", at_step=5, code=9))
    assert faults.next_step == 5
    faults.act(4)
    assert faults.told == []
    with pytest.raises(SystemExit) as exit:
        faults.act(5)
    assert exit.value.code == 9
    assert (faults.told[0].id, faults.told[0].at_s, faults.told[0].error) == ("f1", 12.0, "")


def test_a_fault_for_a_step_is_kept_until_there_are_steps(faults):
    """It was asked for while the script still imported, or built its model with collectives."""
    armed: list[object] = []
    faults.arm_collectives = armed.append
    faults.handle(order("exit", at_step=5, code=9))
    assert (faults.told, armed) == ([], [])
    faults.handle(order("slow", id="f2", s=0.0, steps=1))
    armed[-1]()  # A collective before the first step.
    assert [told.id for told in faults.told] == ["f2"]
    faults.step = 4
    assert faults.next_step == 5
    faults.act(4)
    with pytest.raises(SystemExit):
        faults.act(5)


def test_a_fault_for_a_step_that_the_first_one_is_beyond_is_refused(faults):
    """It was asked for before the script had resumed from its checkpoint."""
    faults.handle(order("exit", at_step=5, code=9))
    faults.step = 40
    assert faults.next_step <= 40
    faults.act(40)
    assert [told.error for told in faults.told] == ["already at step 40"]


def test_it_happens_once_however_often_it_is_asked_for(faults):
    faults.step = 0
    faults.handle(order("slow", s=0.0, steps=1))
    faults.handle(order("slow", s=0.0, steps=1))
    faults.act(0)
    assert len(faults.told) == 1
    assert faults.next_step == NEVER


def test_slow_lasts_its_steps(faults):
    faults.step = 0
    faults.handle(order("slow", s=0.0, steps=3))
    for step in range(3):
        assert step >= faults.next_step
        faults.act(step)
    assert faults.next_step == NEVER


def test_a_fault_for_another_generation_is_not_for_this_process(faults):
    faults.step = 0
    faults.handle(order("exit", generation=3))
    assert faults.told == []
    assert faults.next_step == NEVER


@pytest.mark.parametrize(
    ("step", "asked", "why"),
    [
        (-1, order("spin"), "needs run.steps"),
        (7, order("stop", at_step=6), "already at step 7"),
        (7, order("earthquake"), "unknown fault"),
    ],
)
def test_what_cannot_be_done_is_answered_with_the_reason(faults, step, asked, why):
    faults.step = step
    faults.handle(asked)
    assert why in faults.told[0].error
    assert faults.next_step == NEVER


def test_without_steps_the_next_collective_is_the_place(faults):
    armed = []
    faults.arm_collectives = armed.append
    faults.handle(order("slow", s=0.0, steps=1))
    assert len(armed) == 1
    armed[0]()
    assert faults.told[0].kind == "slow"
    assert armed[-1] is None  # Disarmed: collectives are fast again.


def test_memory_runs_out_by_an_error_and_the_limit_is_lifted():
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(MemoryError, match="injected by perdure: "):
        exhaust_memory(64)
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_without_a_recorder_that_calls_the_next_forward_pass_is_the_place(faults):
    armed = []
    faults.arm_forward = lambda before: armed.append(before) or True
    faults.handle(order("slow", s=0.0, steps=1))
    armed[0]()
    assert faults.told[0].kind == "slow"


def test_network_faults_are_refused_outside_a_laboratory(faults):
    faults.handle(order("link-down"))
    assert "docs/lab.md" in faults.told[0].error


def test_healing_ends_what_spins_and_what_is_slow(faults):
    over = threading.Event()
    faults._healed = over
    faults.step = 0
    faults.handle(order("slow", s=0.0, steps=9))
    faults.act(0)
    faults.heal()
    assert over.is_set()
    spin(3600.0, over)
    press_memory(1, 3600.0, over)
    faults.act(1)
    assert faults.next_step == NEVER


def test_native_code_holds_the_interpreter_for_so_long():
    began_s = time.monotonic()
    hold_interpreter(0.02)
    assert time.monotonic() - began_s >= 0.02
