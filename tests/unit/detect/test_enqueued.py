"""Where a host runs ahead of its device, its stamps blame nobody for being slow."""

import random

import pytest
from msgspec.structs import replace
from tests.unit.detect.drive import BEGIN_S, FAULT_S, Fault, Layout, Run

from perdure.detect.slowness.timed import keep_timed
from perdure.model import ring
from perdure.model.events import NodeLost
from perdure.model.job import DetectConfig
from perdure.model.signals.progress import CollectiveSpan, CommProgress, DeviceComm


def say_enqueued(beat):
    ranks = (
        replace(rank, comms=tuple(replace(comm, stamps="enqueued") for comm in rank.comms))
        for rank in beat.ranks
    )
    return replace(beat, ranks=tuple(ranks))


@pytest.mark.parametrize("kind", ["slow-forward", "slow-host"])
def test_stamps_of_enqueuing_name_no_slow_rank(kind):
    fault = Fault(kind, FAULT_S, 1, 0, 1.6, float("inf"))
    told, untold = (Run(Layout(2), fault) for _ in range(2))
    told.run(FAULT_S - BEGIN_S + 6)
    untold.run(FAULT_S - BEGIN_S + 6, say_enqueued)
    assert told.verdicts[0].culprit.rank == 1
    assert untold.verdicts == []


def test_an_older_ring_is_read_as_the_hosts_and_an_unknown_source_as_none():
    data = bytearray(ring.RECORDS_AT)
    for word, value in (
        (ring.W_MAGIC, ring.MAGIC),
        (ring.W_VERSION, ring.VERSION),
        (ring.W_NUM_COMMS, 1),
    ):
        data[8 * word : 8 * word + 8] = value.to_bytes(8, "little")
    assert ring.parse_ring(bytes(data), 0.0).comms[0].stamps == "host"
    at = ring.comm_at(0) + 8 * ring.C_STAMPS
    for number, stamps in ((1, "enqueued"), (2, "device"), (9, "enqueued")):
        data[at] = number
        assert ring.parse_ring(bytes(data), 0.0).comms[0].stamps == stamps


# --- with the device's times ----------------------------------------------------------------------


def run_ahead(beat, *, timed, waiter=0, seed=5):
    """Return what is told of hosts that run ahead of their devices.

    Each collective is enqueued in no time, but that the host of `waiter` waits here and there,
    as long as it likes. Where they are `timed`, the device's times are told beside.
    """
    rng = random.Random(f"{seed} {beat.seq}")
    ranks = []
    for told in beat.ranks:
        device = {slot: [] for slot in range(len(told.comms))}
        spans = []
        for span in told.spans:
            if span.peer < 0:
                device[span.comm].append(span)
            wait_s = rng.choice((0.0, 0.2, 0.4)) if told.rank == waiter else 0.0
            spans.append(replace(span, start_s=span.end_s - 1e-4 - wait_s))
        found = tuple(
            DeviceComm(f"{told.comms[slot].name} AllReduce 0abc", slot, tuple(ended))
            for slot, ended in device.items()
        )
        ranks.append(replace(told, spans=tuple(spans), device=found if timed else ()))
    return say_enqueued(replace(beat, ranks=tuple(ranks)))


ACTS = DetectConfig(slow_action_s=8.0)


def run(fault, seconds=20.0, *, timed, detect=ACTS, lay=None):
    found = Run(lay or Layout(2), fault, detect=detect)
    return found.run(FAULT_S - BEGIN_S + seconds, lambda beat: run_ahead(beat, timed=timed))


@pytest.mark.parametrize("data", [2, 4])
@pytest.mark.parametrize("kind", ["slow-forward", "slow-host"])
def test_times_of_the_device_name_the_slow_rank(kind, data):
    fault = Fault(kind, FAULT_S, 1, 0, 1.6, float("inf"))
    assert run(fault, timed=False, lay=Layout(data)).verdicts == []
    told = run(fault, timed=True, lay=Layout(data))
    assert {(v.kind, v.culprit.rank) for v in told.verdicts} == {("Straggler", 1)}
    assert told.standing is not None


def test_times_of_the_device_tell_of_slow_communication():
    fault = Fault("slow-link", FAULT_S, 0, 1, 3.0, float("inf"))
    found = Run(Layout(2), fault, detect=ACTS, links=False)
    told = found.run(FAULT_S - BEGIN_S + 40, lambda beat: run_ahead(beat, timed=True))
    assert {v.kind for v in told.verdicts} == {"CommSlow"}
    assert told.acted == []
    assert all("probe" not in v.evidence for v in told.verdicts)


@pytest.mark.parametrize("seed", range(4))
def test_hosts_that_run_ahead_of_a_healthy_device_are_not_blamed(seed):
    healthy = Run(Layout(4), None, detect=ACTS, seed=seed)
    healthy.run(90, lambda beat: run_ahead(beat, timed=True, waiter=seed % 4, seed=seed))
    assert healthy.verdicts == []


def test_what_the_device_tells_is_acted_upon_only_where_the_job_says_so():
    fault = Fault("slow-host", FAULT_S, 1, 0, 2.0, float("inf"))
    told = run(fault, 60.0, timed=True)
    assert told.standing is not None
    assert told.standing.evidence["stamps"] == "device"
    assert told.acted == []
    acted = run(fault, 60.0, timed=True, detect=replace(ACTS, act_on_device_times=True))
    assert {v.verdict.culprit.rank for v in acted.acted} == {1}


@pytest.mark.parametrize("kind", ["stop", "spin", "drop-link", "other-op", "other-bytes"])
def test_a_hang_is_told_alike_with_and_without_the_devices_times(kind):
    fault = Fault(kind, FAULT_S, 1, 0, 1.0, float("inf"))
    with_times, without = (run(fault, 30.0, timed=timed) for timed in (True, False))
    assert without.verdicts
    assert with_times.summary == without.summary
    assert not any(isinstance(event, NodeLost) for event in with_times.acted)


def test_what_is_timed_of_ranks_that_nobody_knows_is_not_compared():
    ended = CollectiveSpan(0, 7, "AllReduce", 8, 10.0, 10.5)
    known = CommProgress("world", 2, 7, 7, ranks=(0, 1), stamps="enqueued")
    progress = next(Run(Layout(2)).training.run(1.0))[1].ranks[0]

    def keep(*comms, slot=0):
        device = (DeviceComm("world AllReduce 0abc", slot, (ended,)),)
        return keep_timed(replace(progress, comms=comms, spans=(), device=device))

    found = keep(known)
    assert (found.comms[1].stamps, found.comms[1].ranks, found.spans[0].comm) == (
        "device", (0, 1), 1,
    )  # fmt: skip
    assert keep(replace(known, ranks=())).spans == ()
    assert keep(replace(known, ranks=(0,))).spans == ()
    assert keep(replace(known, stamps="host")).spans == ()
    assert keep(known, slot=9).spans == ()


def test_who_sends_and_receives_is_known_beside_the_devices_times():
    """Stages of a pipeline do not work alike; when they sent is not taken from the host."""
    staged = Run(Layout(data=2, pipeline=2), None, detect=ACTS)
    staged.run(60, lambda beat: run_ahead(beat, timed=True))
    assert staged.verdicts == []
    assert staged.detector._slow.collectives.senders == {0, 1, 2, 3}
