"""What an optimizer takes over from another part of the model, whose groups may be others."""

from typing import Any

import pytest
import torch
from torch import nn

from perdure.worker.elastic.state import load_settings, match_groups, read_settings

DECAY, NONE = {"weight_decay": 0.1}, {"weight_decay": 0.0}


def make(*groups: dict[str, Any], lr: float = 1.0) -> tuple[torch.optim.Optimizer, Any]:
    sets = [{"params": [nn.Parameter(torch.zeros(2))], **group} for group in groups]
    optimizer = torch.optim.AdamW(sets, lr=lr)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def test_a_stage_without_norms_takes_the_settings_of_what_is_like_its_own() -> None:
    first, schedule = make({**NONE, "lr": 2.0}, {**DECAY, "lr": 3.0})
    first.step()
    schedule.step()
    known = read_settings(first, schedule)
    last, its_own = make({**DECAY, "lr": 9.0})
    load_settings(last, its_own, known)
    (group,) = last.param_groups
    assert (group["lr"], group["initial_lr"], group["weight_decay"]) == (1.5, 3.0, 0.1)
    assert its_own.last_epoch == 1
    assert its_own.base_lrs == [3.0]
    last.step()
    its_own.step()
    assert group["lr"] == 0.75

    wider, schedule = make({**DECAY, "lr": 9.0}, {**NONE, "lr": 9.0})
    load_settings(wider, schedule, read_settings(last, its_own))
    assert [g["lr"] for g in wider.param_groups] == [0.75, 0.75], "there is no other"
    assert [g["weight_decay"] for g in wider.param_groups] == [0.1, 0.0]


@pytest.mark.parametrize(
    ("groups", "saved", "numbers"),
    [
        ([DECAY, NONE], [DECAY, NONE], [0, 1]),
        ([DECAY, NONE], [NONE, DECAY], [0, 1]),
        ([{"name": "b"}], [{"name": "a"}, {"name": "b"}], [1]),
        ([{"name": "c"}], [{"name": "a"}, {"name": "b"}], [0]),
        ([NONE], [DECAY, NONE], [1]),
        ([DECAY, NONE], [{**NONE, "lr": 1}, DECAY, DECAY], [1, 0]),
        ([DECAY], [], []),
    ],
)
def test_groups_are_matched_by_name_then_by_place_then_by_what_is_alike(
    groups: list[dict[str, Any]], saved: list[dict[str, Any]], numbers: list[int]
) -> None:
    assert match_groups(groups, saved) == numbers
