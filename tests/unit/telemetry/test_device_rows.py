"""The map of devices: many to many, through restarts, and what is said of the sick ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perdure.model.events import DeviceReported, NodeRegistered, NodeRestored
from perdure.model.job import JobSpec, TorchftConfig
from perdure.model.report import RankRow
from perdure.model.signals.devices import HW_THERMAL, POWER_CAP, DeviceSample, Xid
from perdure.model.signals.progress import NodeBeat
from perdure.telemetry.live.devices import (
    STALE_S,
    DeviceFold,
    DeviceView,
    NodeStates,
    describe_device_state,
    find_warning,
)

SPEC = JobSpec(name="j", script="x.py", nproc=2, nodes=2)
WELL = NodeStates(set(), set(), set())
RANKS = tuple(RankRow(r, r // 2, 9, "running", "step", 1, 1.0, "", 0.0, 0) for r in range(4))


def registered(node, *devices, host="h"):
    return NodeRegistered(
        node=node, incarnation="a", host=host, boot_id="b", slots=2, device_ids=devices
    )


def reported(device, node=0, healthy=False, reason="XID 79"):
    return DeviceReported(
        device=device, node=node, at_s=1.0, healthy=healthy, reason=reason, source="dcgm"
    )


def beat(node, *looks):
    return NodeBeat(node, "a", 1, 1.0, 0, (), devices=looks)


class Map:
    """The map of two nodes of two slots each; `rows` is a picture."""

    def __init__(self, *events, spec=SPEC):
        self.fold, self.view = DeviceFold(), DeviceView(spec)
        self.add(registered(0, "g0", "g1"), registered(1, "g2", "g3"), *events)

    def add(self, *events):
        for event in events:
            self.fold.add(event)

    def rows(self, now=10.0, ranks=RANKS, states=WELL):
        return {
            (row.node, row.device): row
            for row in self.view.make_rows(now, self.fold, ranks, states)
        }


def test_a_slot_is_its_ranks_where_nothing_else_is_known():
    rows = Map().rows()
    assert {key: row.ranks for key, row in rows.items()} == {
        (0, "g0"): (0,), (0, "g1"): (1,), (1, "g2"): (2,), (1, "g3"): (3,),
    }  # fmt: skip
    assert {row.state for row in rows.values()} == {"in use"}
    assert rows[0, "g1"].slots == ("node0/slot1",)
    assert rows[0, "g1"].host == "h"


def test_a_node_that_has_not_registered_has_slots_of_its_own_name():
    view = DeviceView(SPEC)
    rows = view.make_rows(1.0, DeviceFold(), RANKS[:3], WELL)
    assert [(row.device, row.ranks) for row in rows] == [
        ("node0/slot0", (0,)), ("node0/slot1", (1,)), ("node1/slot0", (2,)),
    ]  # fmt: skip


def test_slots_share_a_device():
    rows = Map(registered(0, "g0", "g0")).rows()
    assert rows[0, "g0"].ranks == (0, 1)
    assert rows[0, "g0"].slots == ("node0/slot0", "node0/slot1")


def test_what_nvml_sees_is_believed_until_it_is_old():
    known = Map()
    look = DeviceSample(device="g0", at_s=10.0, ranks=(0, 1), name="H200")
    known.view.take_beat(beat(0, look, DeviceSample(device="g1", at_s=10.0)))
    rows = known.rows(now=10.0 + STALE_S)
    assert (rows[0, "g0"].ranks, rows[0, "g1"].ranks) == ((0, 1), ())
    assert (rows[0, "g0"].name, rows[0, "g0"].kind, rows[0, "g0"].health) == ("H200", "gpu", "ok")
    assert rows[0, "g1"].state == "spare"
    assert rows[1, "g2"].ranks == (2,)
    rows = known.rows(now=10.1 + STALE_S)
    assert (rows[0, "g0"].ranks, rows[0, "g0"].sample, rows[0, "g0"].health) == ((0,), None, "")


def test_where_nvml_sees_no_process_of_ours_slots_count():
    known = Map()
    looks = [DeviceSample(device=device, at_s=10.0) for device in ("g0", "g1")]
    known.view.take_beat(beat(0, *looks))
    assert known.rows()[0, "g1"].ranks == (1,)


def test_the_same_id_on_two_nodes_is_two_devices():
    known = Map(registered(1, "g0", "g1"))
    known.view.take_beat(beat(1, DeviceSample(device="g0", at_s=10.0, ranks=(3,))))
    rows = known.rows()
    assert (rows[0, "g0"].ranks, rows[1, "g0"].ranks) == ((0,), (3,))


def test_ranks_that_moved_or_ended_are_where_they_are_now():
    known = Map()
    known.rows()
    moved = RankRow(3, 0, 9, "exited", "", 1, 0.0, "", 0.0, 0)
    rows = known.rows(ranks=(*RANKS[:3], moved))
    assert (rows[0, "g1"].ranks, rows[0, "g1"].state) == ((1, 3), "in use")
    assert (rows[1, "g3"].ranks, rows[1, "g3"].state) == ((), "spare")
    over = tuple(RankRow(r, r // 2, 9, "exited", "", 1, 0.0, "", 0.0, 0) for r in range(4))
    assert {row.state for row in known.rows(ranks=over).values()} == {"idle"}


def test_a_device_that_its_node_no_longer_has_is_gone():
    known = Map(reported("g1"))
    assert known.rows()[0, "g1"].health == "failed"
    known.add(registered(0, "g0", "g9"))
    rows = known.rows()
    assert (0, "g1") not in rows
    assert rows[0, "g9"].ranks == (1,)
    known.add(registered(0, "g0", "g1"))
    assert known.rows()[0, "g1"].health == ""


@pytest.mark.parametrize("end", [reported("g0", healthy=True),
                                 NodeRestored(node=0, at_s=1.0, reason="mended")])  # fmt: skip
def test_a_fault_stays_until_somebody_says_otherwise(end):
    known = Map(reported("g0"))
    known.add(registered(0, "g0", "g1"))  # A restarted agent is no repair.
    row = known.rows()[0, "g0"]
    assert (row.health, row.why) == ("failed", "XID 79 (dcgm)")
    known.add(end)
    assert known.rows()[0, "g0"].health == ""


def test_a_fault_of_a_node_is_one_of_all_its_devices():
    rows = Map(reported("node 1", node=1)).rows()
    assert [rows[key].health for key in sorted(rows)] == ["", "", "failed", "failed"]


def test_the_ranks_of_a_lost_node_are_nowhere():
    rows = Map().rows(states=NodeStates({1}, set(), set()))
    assert (rows[1, "g2"].state, rows[1, "g2"].ranks) == ("lost", ())
    assert rows[0, "g0"].state == "in use"


@pytest.mark.parametrize(
    ("ranks", "states", "words"),
    [
        ({}, WELL, "spare"),
        ({}, NodeStates(set(), {0}, set()), "cordoned"),
        ({0: False}, NodeStates(set(), {0}, set()), "in use, cordoned"),
        ({0: True}, NodeStates(set(), {0}, set()), "idle, cordoned"),
        ({0: True, 1: False}, WELL, "in use"),
        ({0: False}, NodeStates(set(), {0}, {0}), "draining"),
        ({0: False}, NodeStates({0}, {0}, {0}), "lost"),
    ],
)
def test_states(ranks, states, words):
    assert describe_device_state(0, ranks, states) == words


def test_groups_are_named_in_a_job_of_groups():
    spec = JobSpec(name="j", script="x.py", nproc=2, torchft=TorchftConfig(replicas=2))
    assert Map(spec=spec).rows()[1, "g3"].replicas == (1,)
    assert Map().rows()[1, "g3"].replicas == ()


@pytest.mark.parametrize(
    ("look", "words"),
    [
        (DeviceSample(device="g", at_s=1.0), ""),
        (DeviceSample(device="g", at_s=1.0, error="lost: no answer"), "lost: no answer"),
        (DeviceSample(device="g", at_s=1.0, ecc_uncorrected=2, remap_pending=True),
         "a memory row is remapped with its next reset; 2 uncorrectable memory errors"),
        (DeviceSample(device="g", at_s=1.0, xids=(Xid(31, 2.0), Xid(13, 3.0), Xid(31, 4.0))),
         "XID 13, 31"),
        (DeviceSample(device="g", at_s=1.0, throttle=POWER_CAP, ranks=(0,)), ""),
        (DeviceSample(device="g", at_s=1.0, throttle=HW_THERMAL), ""),
        (DeviceSample(device="g", at_s=1.0, throttle=HW_THERMAL | POWER_CAP, ranks=(0,)),
         "hardware thermal slowdown"),
    ],
)  # fmt: skip
def test_warnings_are_of_what_deserves_a_look(look, words):
    assert find_warning(look) == words


@given(
    homes=st.lists(st.integers(0, 2), min_size=6, max_size=6),
    devices=st.lists(st.lists(st.sampled_from("abc"), min_size=2, max_size=2), max_size=3),
)
def test_each_slot_is_on_one_device_and_no_rank_is_lost(homes, devices):
    spec = JobSpec(name="j", script="x.py", nproc=2, nodes=3)
    known, view = DeviceFold(), DeviceView(spec)
    for node, ids in enumerate(devices):
        known.add(registered(node, *ids))
    ranks = tuple(
        RankRow(r, home, 9, "running", "step", 1, 1.0, "", 0.0, 0) for r, home in enumerate(homes)
    )
    rows = view.make_rows(1.0, known, ranks, WELL)
    slots = [slot for row in rows for slot in row.slots]
    assert len(slots) == len(set(slots))
    assert sorted(r for row in rows for r in row.ranks) == list(range(6))
    assert all(ranks[r].node == row.node for row in rows for r in row.ranks)
    assert [row.node for row in rows] == sorted(row.node for row in rows)
