"""Tests of how a state is taken apart to travel: what it may be made of."""

import io
from typing import Any, NamedTuple

import pytest

from perdure.model.errors import ConfigError

numpy = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

from perdure.worker.elastic.moving import (  # noqa: E402
    check_sendable,
    collect_tensors,
    map_tensors,
    open_plain,
    open_state,
    pack_plain,
    pack_state,
)


class Averages(NamedTuple):
    fast: torch.Tensor
    slow: torch.Tensor


def test_a_named_tuple_is_a_collection_too() -> None:
    kept = {"averages": Averages(torch.ones(2), torch.zeros(3))}
    assert [one.numel() for one in collect_tensors(kept)] == [2, 3]
    doubled = map_tensors(kept, lambda one: one * 2)["averages"]
    assert isinstance(doubled, Averages)
    assert doubled.fast.tolist() == [2, 2]


class Sealed:
    """It can be pickled, and torch does not load it as data."""


@pytest.mark.parametrize("value", [numpy.float64(0.5), numpy.int32(3), numpy.bool_(True)])
def test_a_number_of_numpy_travels_and_keeps_its_type(value: Any) -> None:
    state = {"rates": [value, 1.0], "tensor": torch.ones(2)}
    skeleton, tensors = pack_state(state)
    opened, empty = open_state(skeleton)
    assert opened["rates"] == [value, 1.0]
    assert type(opened["rates"][0]) is type(value)
    assert [one.shape for one in empty] == [one.shape for one in tensors]
    assert open_plain(pack_plain({"rate": value})) == {"rate": value}


def test_an_array_of_numpy_travels() -> None:
    array = numpy.arange(6).reshape(2, 3)
    (opened,), _ = open_state(pack_state([array])[0])
    assert (opened == array).all()


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"model": {"extra": io.BytesIO(b"x")}}, "model.extra is of type _io.BytesIO"),
        ({"scheduler": {"last": [1.0, Sealed()]}}, "scheduler.last[1] is of type test"),
        (
            {"optimizer": {"state": {0: Averages(torch.ones(1), torch.ones(1))}}},
            "optimizer.state.0 is",
        ),
        ({"scheduler": {"call": lambda: 0}}, "scheduler.call is of type function"),
        ({"scheduler": {"a": {Sealed(): 1}}}, "scheduler.a: the key <test"),
    ],
)
def test_what_cannot_travel_is_refused_by_its_name(state: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_sendable(state | {"fine": {"rate": 0.1, "tensor": torch.ones(3)}})
    assert f"elastic: {said}" in str(raised.value)
    check_sendable({"fine": {"rate": numpy.float64(0.1), "tensor": torch.ones(3)}})
