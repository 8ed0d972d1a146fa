"""What Prometheus and Grafana get to see of a job."""

import json
import re
from pathlib import Path

import msgspec
import pytest
from tests.journals import Story, tell

from perdure.model.report import DeviceRow, RankRow, ReplicaRow
from perdure.model.signals.devices import DeviceSample
from perdure.telemetry.accounting.ledger import LedgerFold
from perdure.telemetry.live.snapshot import SnapshotFold
from perdure.telemetry.monitoring import list_metrics

ROOT = Path(__file__).resolve().parents[3]


def fold(story):
    snapshot, ledger = SnapshotFold(story.spec), LedgerFold()
    for entry in story.entries:
        snapshot.add(entry)
        ledger.add(entry)
    return snapshot.snapshot(story.now), ledger.report(story.now)


@pytest.fixture(scope="module")
def told():
    return fold(tell(Story()))


def full(snapshot):
    look = DeviceSample(device="GPU-a", at_s=1.0, sm_clock_mhz=1, power_w=1, temperature_c=1,
                        memory_bytes=1, ecc_uncorrected=0, remapped_rows=0)  # fmt: skip
    return msgspec.structs.replace(
        snapshot,
        devices=(DeviceRow("GPU-a", 0, (0,), (), "in use", health="failed", sample=look),),
        replicas=(ReplicaRow(0, "train_0", 0, "training", 3, 1),),
        settings={"lr": 0.1, "name": "x"},
    )


def values(metrics, name):
    return {s[0][1:]: s[1] for m in metrics if m.name == name for s in m.samples}


def test_figures_of_a_job(told):
    metrics = list_metrics(full(told[0]))
    assert values(metrics, "perdure_step") == {(): 105}
    assert values(metrics, "perdure_job_state")[("done",)] == 1
    assert values(metrics, "perdure_ranks")[("exited",)] == 2
    assert values(metrics, "perdure_rank_step") == {("0", "0"): 105, ("1", "0"): 105}
    assert values(metrics, "perdure_setting") == {("lr",): 0.1}
    assert values(metrics, "perdure_device_healthy") == {("0", "GPU-a"): 0}
    assert values(metrics, "perdure_last_recovery_seconds")[()] == pytest.approx(2.373)


def test_ten_thousand_ranks_are_told_of_by_node(told):
    rows = tuple(
        RankRow(i, i // 8, 1, "running", "step", i, 1.0, "", 2.0, 3) for i in range(10_000)
    )
    metrics = list_metrics(msgspec.structs.replace(told[0], ranks=rows))
    assert not values(metrics, "perdure_rank_step")
    by_node = values(metrics, "perdure_node_resident_bytes")
    assert len(by_node) == 1250
    assert by_node[("7",)] == 24
    assert sum(len(m.samples) for m in metrics) < 6000


def test_the_dashboard_asks_for_metrics_that_there_are(told):
    many = msgspec.structs.replace(
        full(told[0]), ranks=tuple(RankRow(i, 0, 1, "running", "step", 1, 1.0, "", 2.0, 3)
                                   for i in range(600))
    )  # fmt: skip
    metrics = [*list_metrics(full(told[0])), *list_metrics(many)]
    known = {m.name: set(m.labels) for m in metrics}
    board = json.loads((ROOT / "docs" / "grafana.json").read_text())
    asked = set()
    for panel in board["panels"]:
        for target in panel["targets"]:
            (name,) = re.findall(r"perdure_\w+", target["expr"])
            asked.add(name)
            used = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert name in known
            assert used <= known[name], name
    assert len(asked) > 12
    text = (ROOT / "docs" / "observability.md").read_text()
    assert {name for name in known if f"`{name}`" not in text} == set()
