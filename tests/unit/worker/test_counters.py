"""A look at what a loop uses changes nothing of the script."""

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from perdure.worker.checkpoint.script import Functions, ScriptState, _Walk  # noqa: E402

LOOP = """
import sys
from perdure.worker.checkpoint.counters import Names
losses = [0.5]
Names(sys._getframe(), ("losses",), set())
found = losses
"""


def test_names_of_a_script_that_is_executed_in_two_namespaces_stay() -> None:
    """A launcher gave `exec` a namespace of its own: the look emptied it."""
    space: dict[str, object] = {}
    exec(LOOP, {}, space)
    assert space["found"] == [0.5]


class Long(dict[int, int]):
    read = 0

    def items(self) -> Iterator[tuple[int, int]]:  # type: ignore[override]
        for number in range(1_000_000):
            self.read += 1
            yield number, number


def test_a_long_container_is_not_read_whole() -> None:
    """Before each save a history of a million entries took seconds."""
    long = Long()
    _Walk({}, set())._visit_all("long", long)
    assert long.read <= 4096


class Late:
    def update(self, value: float, n: int = 1, name: Any = None) -> None:
        """Do nothing."""


late: list[Any] = []


def test_a_class_that_is_used_later_has_changed_nothing() -> None:
    functions = Functions(use=lambda: late)
    late.append(Late())
    assert functions.look(set()) == []
    late.clear()


def hand_on(value: Any) -> Any:
    return value


def test_a_name_that_is_only_shown_at_first_has_not_changed() -> None:
    """nanoGPT's `always_save_checkpoint` was named when its best loss had become a tensor."""
    state, said, limit, other = ScriptState(), list[str](), 5, torch.tensor(0.0)
    for step in range(3):
        said.append(state.look({}, set()))
        if limit < 3:
            hand_on(other)
        other = torch.zeros(4) + step
    assert "other" in " ".join(said)
    assert "limit" not in " ".join(said)
