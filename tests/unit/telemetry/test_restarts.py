"""What a script printed says whether it began again from its start."""

import pytest

from perdure.telemetry.restarts import judge_restart, list_marks

HEAD = ["tokens per iteration will be: 65,536", "number of parameters: 10.65M", "iter 0: loss 4.28"]
TAIL = ["iter 190: loss 2.5, time 80ms", "saving checkpoint", "iter 200: loss 2.4, time 80ms"]


def test_the_same_first_line_again_is_its_start() -> None:
    began = judge_restart(HEAD, TAIL, HEAD)
    assert began is not None
    assert began.describe() == ("the script began again from its start: `iter 0` after `iter 200`")


def test_a_script_that_restores_its_own_checkpoint_goes_on() -> None:
    began = judge_restart(HEAD, TAIL, [*HEAD[:2], "iter 150: loss 2.6"])
    assert began is not None
    assert began.describe() == "the script went on by itself: `iter 150` after `iter 200`"


@pytest.mark.parametrize(
    ("head", "tail", "after"),
    [
        (HEAD, TAIL, HEAD[:2]),  # It has printed no progress yet.
        (HEAD[:2], [], HEAD),  # It never had.
        (HEAD, HEAD, HEAD),  # It died where it began: nothing is lost.
        ([], [], HEAD),
        (HEAD, ["epoch 3"], ["lr 0.3", "loss 12"]),
    ],
)
def test_otherwise_nothing_is_said(head: list[str], tail: list[str], after: list[str]) -> None:
    assert judge_restart(head, tail, after) is None


def test_epochs_and_steps_are_compared_together() -> None:
    head, tail = ["Epoch 0, step 10: loss 4"], ["Epoch 2, step 30: loss 3"]
    again = judge_restart(head, tail, ["Epoch 0, step 10: loss 4"])
    further = judge_restart(head, tail, ["Epoch 2, step 10: loss 3"])
    assert again is not None
    assert further is not None
    assert (again.where, further.where) == ("again", "further")


def test_a_bar_counts() -> None:
    head = ["  0%|          | 0/500 [00:00<?, ?it/s]", "  2%|▏         | 12/500 [00:01<00:40]"]
    began = judge_restart(head, ["40%|████      | 200/500 [00:20<00:30]"], head)
    assert began is not None
    assert began.before == "200/500"


def test_poison_is_shown_and_bounded() -> None:
    lines = [
        "step\x1b]0;x\x07 1",
        "iter 7" + "9" * 100_000,
        "step 9" * 1000,
        "step nan",
        "step 1.5",
    ]
    for mark in list_marks(lines):
        assert "\x1b" not in mark.said
        assert len(mark.said) < 200
