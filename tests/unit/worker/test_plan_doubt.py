"""A dataset that draws by a generator of its own is named before the first step."""

from typing import Any

import numpy as np
import torch

from perdure.worker.checkpoint.registry import Registry
from perdure.worker.checkpoint.script import list_generators
from perdure.worker.data import Plan


class Inner:
    def __init__(self) -> None:
        self.torch = torch.Generator()


class Rows:
    def __init__(self) -> None:
        self.rng, self.transforms, self.name = np.random.default_rng(1), [Inner()], "rows"


def test_generators_of_a_dataset_are_found_in_what_it_has() -> None:
    assert list(list_generators("dataset", Rows())) == ["dataset.rng", "dataset.transforms.0.torch"]
    assert list_generators("dataset", [1, 2]) == {}


def test_a_plan_s_doubt_is_known_before_the_first_step() -> None:
    registry, plan = Registry(), Plan(8, seed=0, shuffle=True, batch=4)
    registry.add("plan", plan)
    assert registry.try_twins() == []
    plan.doubt = "no checkpoint has the generator dataset.rng"
    found: list[Any] = registry.try_twins()
    assert found == [plan.doubt]
