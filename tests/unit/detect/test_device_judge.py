"""Which counters make a device sick, and which are how it works."""

import msgspec
import pytest

from perdure.detect.devices import DeviceJudge
from perdure.model.events import DeviceReported, NodeRegistered, NodeRestored
from perdure.model.signals.devices import HW_THERMAL, POWER_CAP, DeviceSample, Xid
from perdure.model.signals.progress import NodeBeat

WELL = DeviceSample(
    device="GPU-a", at_s=0.0, name="H200", ranks=(0,), ecc_uncorrected=0, remapped_rows=0,
    sm_clock_mhz=1980, sm_clock_max_mhz=1980, power_w=600, power_limit_w=700, temperature_c=60,
)  # fmt: skip


def look(judge, now, *samples, node=0):
    samples = tuple(msgspec.structs.replace(sample, at_s=now) for sample in samples)
    out = judge.take_beat(now, NodeBeat(node, "a", 1, now, 0, (), devices=samples))
    for event in out:
        judge.note(event)
    return [(event.healthy, event.reason) for event in out]


def changed(**values):
    return msgspec.structs.replace(WELL, **values)


@pytest.mark.parametrize(
    ("sick", "word"),
    [
        (changed(xids=(Xid(79, 4.0),)), "XID 79: GPU has fallen off the bus"),
        (changed(error="lost: GPU is lost"), "device lost"),
        (changed(ecc_uncorrected=2), "2 uncorrectable memory errors"),
        (changed(remap_failed=True), "cannot be remapped"),
    ],
)
def test_errors_are_reported_once(sick, word):
    judge = DeviceJudge()
    assert look(judge, 0.0, WELL) == []
    ((healthy, reason),) = look(judge, 5.0, sick)
    assert not healthy
    assert word in reason
    assert look(judge, 10.0, sick) == []


@pytest.mark.parametrize(
    "well",
    [
        changed(xids=(Xid(13, 4.0), Xid(31, 4.0), Xid(43, 4.0), Xid(63, 4.0))),
        changed(remap_pending=True, ecc_corrected=9000),
        changed(throttle=POWER_CAP, sm_clock_mhz=1300, power_w=699),
        changed(throttle=HW_THERMAL, sm_clock_mhz=345, ranks=()),
    ],
    ids=["the script's own XIDs", "mended by itself", "at its power limit", "idle"],
)
def test_what_is_no_failure(well):
    judge = DeviceJudge()
    look(judge, 0.0, WELL)
    assert [look(judge, now, well) for now in (5.0, 40.0, 80.0)] == [[], [], []]


def test_a_hot_device_is_slow_after_a_while_and_well_again_later():
    judge, hot = DeviceJudge(), changed(throttle=HW_THERMAL, sm_clock_mhz=345)
    assert look(judge, 0.0, hot) == look(judge, 29.0, hot) == []
    ((healthy, reason),) = look(judge, 30.0, hot)
    assert (healthy, reason[:20]) == (False, "slow clock for 30 s:")
    assert "hardware thermal slowdown, 345 of 1980 MHz" in reason
    assert look(judge, 40.0, WELL) == look(judge, 99.0, WELL) == []
    assert look(judge, 100.0, WELL) == [(True, "its clock is up again")]


def test_a_low_clock_that_nobody_explains_is_seen_beside_its_peers():
    judge = DeviceJudge()
    peers = [changed(device=f"GPU-{i}") for i in range(3)]
    slow = changed(sm_clock_mhz=800, power_w=250)
    for now in (0.0, 15.0):
        assert look(judge, now, *peers, slow) == []
    ((healthy, reason),) = look(judge, 30.0, *peers, slow)
    assert not healthy
    assert "its peers run at 1980 MHz" in reason


def test_an_error_comes_through_a_new_controller_and_a_restore_forgives_it():
    sick = changed(xids=(Xid(48, 4.0),))
    journal = DeviceReported(
        device="GPU-a", node=0, at_s=5.0, healthy=False, reason="XID 48: x", source="nvml"
    )
    judge = DeviceJudge()
    judge.note(journal)
    assert look(judge, 6.0, sick) == []
    judge.note(NodeRestored(node=0, at_s=9.0, reason="", who="ann"))
    assert look(judge, 10.0, sick) == []  # The same error, from before.
    again = changed(xids=(Xid(48, 4.0), Xid(48, 12.0)))
    assert len(look(judge, 12.5, again)) == 1


def test_what_an_outside_monitor_says_only_it_takes_back():
    judge = DeviceJudge()
    report = DeviceReported(
        device="GPU-a", node=0, at_s=1.0, healthy=False, reason="slow clock, says IT", source="it"
    )
    judge.note(report)
    assert [look(judge, float(t), WELL) for t in range(2, 200, 5)] == [[]] * 40
    other = NodeRegistered(
        node=0, incarnation="b", host="h", boot_id="", slots=1, device_ids=("GPU-b",)
    )
    judge.note(other)  # It was exchanged.
    assert len(look(judge, 300.0, changed(xids=(Xid(79, 299.0),)))) == 1
