"""A compilation by torch is a busy phase while it lasts, and no longer."""

import _thread
import importlib
import sys
import threading
import time
import types
from typing import Any

import pytest
import torch
import torch._dynamo.callback as callbacks
from tests.unit.worker.test_busy import ring  # noqa: F401
from tests.waiting import PATIENCE_S

from perdure.worker import attach
from perdure.worker.busy import declare_busy
from perdure.worker.compiling import Compilation, Tally, declare_compilations
from perdure.worker.progress import Progress
from perdure.worker.start.cold import after_import, while_importing


@pytest.fixture(autouse=True)
def forgotten():
    """Leave no listener and no compiled code to other tests."""
    yield
    callbacks.callback_handler.__dict__.pop("clear", None)
    torch._dynamo.reset()


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


def test_a_script_that_makes_dynamo_forget_everything_is_watched_on(ring):  # noqa: F811
    declare_compilations(callbacks)
    torch._dynamo.reset()
    torch._dynamo.reset()
    shown = []
    torch.compile(lambda x: 3 * x, backend=lambda g, _: shown.append(ring().busy_phase) or g)(
        torch.ones(2)
    )
    assert [phase.name for phase in shown] == ["compile"]
    assert len(callbacks.callback_handler.start_callbacks) == 1
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


@pytest.fixture
def compiler(ring, tmp_path, monkeypatch):  # noqa: F811
    """Return the name of a module that notes, as it is imported, what the rank is busy with."""
    (tmp_path / "compiler.py").write_text("import shown\nat_import = shown.look()\n")
    shown: Any = types.ModuleType("shown")
    shown.look = lambda: ring().busy_phase
    monkeypatch.setitem(sys.modules, "shown", shown)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    yield "compiler"
    sys.modules.pop("compiler", None)


@pytest.mark.parametrize(("beside", "busy"), [(False, "compile"), (True, "")])
def test_the_main_threads_import_of_what_compiles_is_shown_too(
    ring,  # noqa: F811
    compiler,
    beside,
    busy,
):
    """It takes seconds in mid-training; beside another thread's the main one may hang."""
    done: list[types.ModuleType] = []
    while_importing((compiler,), declare_busy("compile", at_most_s=60))
    after_import(compiler, done.append)
    if beside:
        thread = threading.Thread(target=importlib.import_module, args=(compiler,))
        thread.start()
        thread.join(PATIENCE_S)
    else:
        importlib.import_module(compiler)
    assert [getattr(module.at_import, "name", "") for module in done] == [busy]
    assert ring().busy_phase is None


def test_a_finder_of_an_older_python_is_passed_over_as_python_does(
    ring,  # noqa: F811
    compiler,
):
    """A script that nobody here wrote may bring one."""
    done: list[types.ModuleType] = []
    while_importing((compiler,), declare_busy("compile", at_most_s=60))
    after_import(compiler, done.append)
    sys.meta_path.append(types.SimpleNamespace(find_module=lambda *_: None))  # type: ignore[arg-type]
    sys.meta_path.insert(2, sys.meta_path.pop())
    importlib.import_module(compiler)
    assert [module.at_import.name for module in done] == ["compile"]


class Clock:
    """The monotonic clock of this process, which goes on when it is told to."""

    def __init__(self) -> None:
        self.now_ns = 10**9

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, ms: int) -> None:
        self.now_ns += ms * 1_000_000


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "monotonic_ns", clock)
    return clock


def test_the_time_of_the_first_steps_compilations_is_told_and_later_ones_are_training(
    ring,  # noqa: F811
    clock,
):
    """Up to a step without one; what was compiled before the first step is none of theirs."""
    progress = Progress(attach._attachment)
    with Compilation():
        clock.advance(20)
    progress.resume(0)
    for step, compile_ms in enumerate((30, 20, 0, 50)):
        progress.begin(step)
        clock.advance(1)
        if compile_ms:
            with Compilation(), Compilation():  # What overlaps counts once.
                clock.advance(compile_ms)
        progress.commit(step + 1)
    account = ring().account
    assert account.compile_s == pytest.approx(0.05)
    assert account.step_s == pytest.approx(0.104)


def test_an_end_that_is_never_told_costs_nothing_nor_does_one_without_a_beginning(clock):
    tally = Tally()
    tally.end()
    tally.begin()
    clock.advance(10)
    tally.end()
    assert tally.read_ns() == 10_000_000
    tally.begin()
    clock.advance(10)
    tally.begin()
    tally.end()
    assert tally.read_ns() == 10_000_000


@pytest.mark.parametrize(("beside", "told_s"), [(True, 0.0), (False, 0.008)])
def test_what_a_thread_compiles_beside_training_is_no_warm_up(
    ring,  # noqa: F811
    clock,
    beside,
    told_s,
):
    """Each step has the end of some compilation, and none has waited for it."""

    def compile_a_model() -> None:
        with Compilation():
            clock.advance(2)

    progress = Progress(attach._attachment)
    progress.resume(0)
    for step in range(4):
        progress.begin(step)
        clock.advance(20)
        if beside:
            thread = threading.Thread(target=compile_a_model)
            thread.start()
            thread.join(PATIENCE_S)
        else:
            compile_a_model()
        progress.commit(step + 1)
    assert ring().account.compile_s == pytest.approx(told_s)


@pytest.mark.parametrize("kind", ["the one that steps", "autograd's"])
def test_training_waits_for_what_these_threads_compile(kind, clock):
    """Python knows of a thread that torch has made only once that asks for its own name."""
    tally = Tally()

    def compile_here() -> None:
        if kind == "the one that steps":
            tally.follow()
        else:
            threading.current_thread()
        tally.begin()
        clock.advance(5)
        tally.end()

    if kind == "the one that steps":
        thread = threading.Thread(target=compile_here)
        thread.start()
        thread.join()
    else:
        over = threading.Event()
        _thread.start_new_thread(lambda: (compile_here(), over.set()), ())
        assert over.wait(PATIENCE_S)
    assert tally.read_ns() == 5_000_000
