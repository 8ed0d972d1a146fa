"""A look at what a loop uses changes nothing of the script."""

import pytest

pytest.importorskip("torch")

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
