"""Which recorder a machine gets and what it costs, said without torch."""

import math
import os
from pathlib import Path

import pytest
from tests.waiting import PATIENCE_S

from perdure.cli.looking import doctor
from perdure.worker.native import build


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library in a cache of its own, of the name that this torch and source would get."""
    torch = build.find_torch()
    if torch is None:
        pytest.skip("torch is not installed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("PERDURE_RECORDER", raising=False)
    path = tmp_path / "perdure" / "native" / build.library_name(torch)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"no library")
    return path


def test_the_figure_is_the_one_kept_beside_the_library(library: Path) -> None:
    library.with_suffix(".json").write_text('{"collective_us":1.5,"spread_us":0.2,"bare_us":12}')
    found = build.status()
    assert (found.kind, found.cost) == ("compiled", "1.5 µs a collective of 12 µs")
    check = doctor.check_recorder()
    assert check.state == "ok"
    assert "1.5 µs a collective" in check.evidence


def test_a_cost_within_the_spread_is_not_resolved() -> None:
    assert "not resolved" in str(build.Cost(collective_us=0.2, spread_us=0.3, bare_us=12.0))


@pytest.mark.torch
def test_a_library_that_does_not_load_is_said(library: Path) -> None:
    check = doctor.check_recorder()
    assert check.state == "degraded"
    assert "does not work" in check.evidence
    assert not library.with_suffix(".json").exists()


def test_without_library_or_compiler(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.unlink(library)
    check = doctor.check_recorder()
    assert check.evidence.startswith("status (it is not built yet")
    assert check.mend == build.build_command()
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    check = doctor.check_recorder()
    assert "no C++ compiler" in check.evidence
    assert check.mend.startswith("install g++")


def test_a_choice_is_said_as_such(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERDURE_RECORDER", "status")
    check = doctor.check_recorder()
    assert check.evidence.startswith("status (PERDURE_RECORDER=status)")
    assert check.mend == "unset PERDURE_RECORDER"


def test_plugin_in_a_cache_that_is_empty(library: Path) -> None:
    check = doctor.check_nccl_plugin()
    assert check.state in ("note", "degraded")
    assert "not built" in check.evidence


@pytest.mark.torch
def test_measured_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    library = build.find_library()
    if library is None:
        pytest.skip("the compiled recorder is not built")
    monkeypatch.setattr(build, "_TIMEOUT_S", PATIENCE_S)
    cost = build.measure_cost(library)
    assert isinstance(cost, build.Cost), cost
    assert cost.bare_us > 0.0
    assert math.isfinite(cost.collective_us)
