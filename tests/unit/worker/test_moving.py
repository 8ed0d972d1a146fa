"""Tests of how a state is taken apart to travel: what it may be made of."""

from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")

from perdure.worker.elastic.moving import collect_tensors, map_tensors  # noqa: E402


class Averages(NamedTuple):
    fast: torch.Tensor
    slow: torch.Tensor


def test_a_named_tuple_is_a_collection_too() -> None:
    kept = {"averages": Averages(torch.ones(2), torch.zeros(3))}
    assert [one.numel() for one in collect_tensors(kept)] == [2, 3]
    doubled = map_tensors(kept, lambda one: one * 2)["averages"]
    assert isinstance(doubled, Averages)
    assert doubled.fast.tolist() == [2, 2]
