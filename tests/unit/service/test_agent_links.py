"""How often an agent sweeps, and what a heartbeat carries of it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure.model.orders import WatchClosely
from perdure.model.paths import JobPaths
from perdure.model.signals.progress import NodeBeat
from perdure.service.agent.sweeps import LinkTelemetry, Ranks
from perdure.worker.recording.groups import SUFFIX


@pytest.fixture
def telemetry(tmp_path: Path) -> Iterator[LinkTelemetry]:
    made = LinkTelemetry(JobPaths(*[str(tmp_path)] * 3), 0, 0.0, alone=False)
    yield made
    made.close()


def watch(until_s: float, node: int = 0) -> WatchClosely:
    return WatchClosely(nodes=(node,), until_s=until_s, reason="")


def test_once_a_second_and_five_times_while_watched(telemetry: LinkTelemetry) -> None:
    assert telemetry.period_s(100.0) == 1.0
    telemetry.watch(watch(110.0, node=1))  # Another node's order.
    assert telemetry.period_s(100.0) == 1.0
    telemetry.watch(watch(110.0))
    telemetry.watch(watch(105.0))  # An older order arrives late.
    assert telemetry.period_s(109.9) == 0.2
    assert telemetry.period_s(110.0) == 1.0


def test_sweeps_that_cost_much_come_less_often(telemetry: LinkTelemetry) -> None:
    telemetry._cost_s = 0.05
    assert telemetry.period_s(100.0) == pytest.approx(5.0)
    telemetry.watch(watch(110.0))
    assert telemetry.period_s(100.0) == pytest.approx(1.0)


def test_each_sweep_goes_with_one_heartbeat_of_its_generation(telemetry: LinkTelemetry) -> None:
    ranks = Ranks(3, {0: os.getpid()}, frozenset(), {})
    for at_s in (10.0, 11.0):
        telemetry.sweep(at_s, ranks)
    beat = NodeBeat(0, "a", 1, 11.0, 3)
    sweeps = [telemetry.join(beat).sweep for _ in range(3)]
    assert [sweep and sweep.at_s for sweep in sweeps] == [10.0, 11.0, None]
    telemetry.sweep(12.0, ranks)
    assert telemetry.join(NodeBeat(0, "a", 2, 12.0, 4)).sweep is None
    assert telemetry.join(beat).sweep is None  # It was of another generation, and is gone.


def test_the_note_beside_the_ring_names_groups(tmp_path: Path, telemetry: LinkTelemetry) -> None:
    note = tmp_path / "rings" / f"g3-r0.ring{SUFFIX}"
    note.parent.mkdir()
    telemetry.sweep(1.0, Ranks(3, {0: os.getpid()}, frozenset(), {}))
    assert telemetry.reader.groups(0) == {}
    note.write_text('{"4711": "tp"}')
    assert telemetry.reader.groups(0) == {4711: "tp"}
    note.write_text("{broken")
    assert telemetry.reader.groups(0) == {}
    note.write_text("[1]")
    assert telemetry.reader.groups(0) == {}
