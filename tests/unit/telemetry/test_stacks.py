"""Stacks: perdure's own part left out, equal ones together, common outer frames once."""

import re
from importlib.util import find_spec

import pytest

from perdure.telemetry.stacks import group_stacks, render_stacks

MAIN = """Process 7: perdure rank j g0 r{rank}: train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 7 (idle): "MainThread"
    {inner}
    backward (torch/_tensor.py:623)
    step (train.py:125)
    main (train.py:182)
    <module> (train.py:187)
    _run_path (perdure/keeper/bootstrap.py:197)
    run_rank (perdure/keeper/bootstrap.py:51)
    main (perdure/keeper/zygote.py:139)
    <module> (<string>:1)
Thread 9 (idle): "perdure-control"
    _serve (perdure/worker/control.py:155)
    run (threading.py:982)
"""


def make(rank, inner):
    return MAIN.format(rank=rank, inner=inner)


def test_equal_stacks_are_one_group_whatever_the_pid():
    one, other = (
        make(0, "wait (a.py:1)"),
        make(2, "wait (a.py:1)").replace("Process 7", "Process 8"),
    )
    groups = group_stacks({"0": one, "1": make(1, "sleep (b.py:2)"), "2": other})
    assert [g.ranks for g in groups] == [("0", "2"), ("1",)]


STARTED_COLD = """Process 8: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 8 (idle): "MainThread"
    <module> (train.py:187)
    main (perdure/worker/start/cold.py:164)
"""


@pytest.mark.parametrize("text", [MAIN.format(rank=0, inner="wait (a.py:1)"), STARTED_COLD])
def test_the_files_that_start_a_script_are_left_out_under_their_names_of_today(text):
    for name in re.findall(r"\((perdure/\S+)\.py:", text):
        assert find_spec(name.replace("/", ".")), name
    ((thread, *_),) = (group.threads for group in group_stacks({"0": text}))
    assert thread.frames[-1] == "<module> (train.py:187)"


def test_perdures_own_threads_and_starting_frames_are_left_out():
    (group,) = group_stacks({"0": make(0, "wait (a.py:1)")})
    (thread,) = group.threads
    assert thread.frames[0] == "wait (a.py:1)"
    assert thread.frames[-1] == "<module> (train.py:187)"


def test_common_outer_frames_are_said_once():
    lines = render_stacks({"0": make(0, "wait (a.py:1)"), "1": make(1, "sleep (b.py:2)")})
    assert lines == [
        "rank 0 (idle):",
        "    wait (a.py:1)",
        "    backward (torch/_tensor.py:623)",
        "    step (train.py:125)",
        "    main (train.py:182)",
        "    <module> (train.py:187)",
        "rank 1 (idle):",
        "    sleep (b.py:2)",
        "    and 4 outer frames as above",
    ]


def test_a_missing_stack_says_why():
    assert render_stacks({"0": "no stack: py-spy is not installed"}) == [
        "rank 0: no stack: py-spy is not installed"
    ]
