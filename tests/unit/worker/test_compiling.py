"""A compilation by torch is a busy phase while it lasts, and no longer."""

import types

import pytest
import torch
import torch._dynamo.callback as callbacks
from tests.unit.worker.test_busy import ring  # noqa: F401

from perdure.worker.compiling import declare_compilations


@pytest.fixture(autouse=True)
def forgotten():
    """Leave no listener and no compiled code to other tests."""
    yield
    torch._dynamo.reset()
    callbacks.callback_handler.clear()


def test_a_compilation_is_shown_and_is_over_with_its_end(ring):  # noqa: F811
    declare_compilations(callbacks)
    shown = []

    def backend(graph, _):
        shown.append(ring().busy_phase)
        return graph

    double = torch.compile(lambda x: 2 * x, backend=backend, dynamic=False)
    assert double(torch.ones(2)).sum() == 4
    assert shown[0].name == "compile"
    assert ring().busy_phase is None
    double(torch.ones(2))  # Compiled already.
    assert len(shown) == 1
    double(torch.ones(3))
    assert len(shown) == 2
    assert ring().busy_phase is None


def test_a_compilation_that_fails_is_over_too(ring):  # noqa: F811
    declare_compilations(callbacks)

    def backend(graph, _):
        assert ring().busy_phase is not None
        raise ZeroDivisionError

    with pytest.raises(Exception, match="ZeroDivisionError"):
        torch.compile(lambda x: 2 * x, backend=backend)(torch.ones(2))
    assert ring().busy_phase is None


def test_a_torch_without_callbacks_is_left_as_it_is():
    declare_compilations(types.ModuleType("callback"))
