import itertools

import pytest
from tests.rings import SpanWriter, read_spans, read_stages

from perdure.adapters.ring_follow import RingFollower, Stride
from perdure.adapters.rings import read_ring
from perdure.model import ring as layout

ALLREDUCE = layout.OP_INDEX["allreduce"] | (7 << 8)
SEND = layout.OP_INDEX["send"]


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "g0-r1.ring")


@pytest.fixture
def ring(path):
    writer = SpanWriter.create(path, rank=1, generation=0)
    writer.set_recorder("status")
    return writer


def test_a_span_is_reported_once_when_it_has_ended(path, ring):
    slot = ring.add_comm("0", 2, (4, 5))
    follower = RingFollower(path, 100.0)
    first = ring.begin_span(1, ALLREDUCE | slot << 16, 4096, 10**9, 9 << 32)
    assert follower.read(102.0).spans == ()
    ring.end_span(first, 2 * 10**9)
    ring._words[layout.span_at(first) // 8 + layout.S_WAIT] += 5 * 10**8
    (span,) = follower.read(103.0).spans
    assert (span.comm, span.seq, span.op, span.bytes) == (slot, 1, "allreduce", 4096)
    assert (span.start_s, span.end_s, span.wait_s) == (101.0, 102.0, 0.5)
    assert follower.read(104.0).spans == ()


def test_a_send_names_its_peers_global_rank_and_is_reported_while_it_hangs(path, ring):
    slot = ring.add_comm("1 p2p", 1, (4, 9))
    follower = RingFollower(path, 0.0)
    kind = SEND | slot << 16 | (1 + 1) << 32
    number = ring.begin_span(1, kind, 8, 10**9, layout.UNDER_WAY)
    assert follower.read(1.1).spans == ()
    (span,) = follower.read(1.5).spans
    assert (span.peer, span.end_s) == (9, 0.0)
    assert len(follower.read(1.7).spans) == 1
    ring.end_span(number, 3 * 10**9, layout.FAILED)
    assert [one.end_s for one in follower.read(3.0).spans] == [3.0]
    assert follower.read(3.2).spans == ()


def test_ranks_of_one_communicator_keep_the_same_collectives(tmp_path):
    kept = []
    for rank, cuts in enumerate(((0, 100, 200), (0, 90, 200))):
        path = str(tmp_path / f"g0-r{rank}.ring")
        ring = SpanWriter.create(path, rank=rank, generation=0)
        slot = ring.add_comm("0", 2, (0, 1))
        follower = RingFollower(path, 0.0)
        seqs = set()
        for low, high in itertools.pairwise(cuts):
            for seq in range(low, high):
                ring.end_span(ring.begin_span(seq, ALLREDUCE | slot << 16, 4, 1, 0), 2)
            seqs |= {span.seq for span in follower.read(0.0).spans}
        kept.append(seqs)
    assert all(len(seqs) <= 20 for seqs in kept)
    assert len(kept[0] & kept[1]) >= 12


def test_the_last_collective_before_a_silence_is_told_of_though_thinned_out(path, ring):
    slot = ring.add_comm("0", 2, (0, 1))
    follower = RingFollower(path, 0.0)
    for seq in range(1, 36):
        ring.end_span(ring.begin_span(seq, ALLREDUCE | slot << 16, 8, seq * 10**6, 0), 10**8)
    assert 35 not in [span.seq for span in follower.read(1.0).spans]
    assert [span.seq for span in follower.read(1.2).spans] == [35]
    assert follower.read(1.4).spans == ()


def test_a_collective_that_hangs_behind_a_newer_one_is_reported_while_it_does(path, ring):
    slot = ring.add_comm("0", 2, (0, 1))
    follower = RingFollower(path, 0.0)
    for seq in (1, 2):
        number = ring.begin_span(seq, ALLREDUCE | slot << 16, 8, 10**9, layout.UNDER_WAY)
        ring.set_comm(slot, seq, 0, 10**9)
    assert follower.read(1.1).spans == ()
    for now in (1.5, 1.7):
        assert [(one.seq, one.end_s) for one in follower.read(now).spans] == [(1, 0.0)]
    ring.end_span(number - 1, 2 * 10**9)
    assert [(one.seq, one.end_s) for one in follower.read(2.1).spans] == [(1, 2.0)]
    assert follower.read(2.3).spans == ()


def test_spans_that_were_overwritten_are_left_out(path, ring):
    follower = RingFollower(path, 0.0)
    lost = ring.begin_span(1, ALLREDUCE, 4, 1, 0)
    follower.read(0.0)
    for seq in range(2, 5000):
        ring.end_span(ring.begin_span(seq, ALLREDUCE, 4, seq, 0), seq + 1)
    ring.end_span(lost, 7)  # Its place is another's: nothing may change.
    seqs = [span.seq for span in follower.read(0.0).spans]
    assert seqs
    assert min(seqs) > 4998 - layout.SPANS_MAX
    spans = read_spans(path, 0.0)
    assert len(spans) == layout.SPANS_MAX
    assert [one.span.seq for one in spans] == list(range(5000 - layout.SPANS_MAX, 5000))
    assert all(one.span.end_s * 1e9 == pytest.approx(one.span.seq + 1) for one in spans)


def test_a_span_under_construction_is_not_read(path, ring):
    number = ring.begin_span(1, ALLREDUCE, 4, 10**9, 0)
    ring._words[layout.span_at(number) // 8] = 0
    assert read_spans(path, 0.0) == ()
    follower = RingFollower(path, 0.0)
    assert follower.read(0.0).spans == ()
    ring._words[layout.span_at(number) // 8] = number + 1
    ring.end_span(number, 2 * 10**9)
    assert len(follower.read(0.0).spans) == 1  # It was looked for again.


def test_stages_add_up_and_are_thinned_by_step(path, ring):
    follower = RingFollower(path, 0.0)
    for step in range(100):
        ring.add_stages(step, step * 100, step * 100 + 60, (10, 10, 20, 5, 10, 5))
    stages = follower.read(0.0).stages
    assert [one.step for one in stages] == [0, 16, 32, 48, 64, 80, 96]
    for one in stages:
        parts = one.data_s + one.forward_s + one.backward_s + one.optimizer_s
        assert parts + one.wait_s + one.other_s == pytest.approx(one.end_s - one.begin_s)
    assert follower.read(0.0).stages == ()
    assert len(read_stages(path, 0.0)) == 100


def test_a_ring_made_anew_is_followed_from_its_beginning(path, ring):
    follower = RingFollower(path, 0.0)
    for seq in range(8):
        ring.end_span(ring.begin_span(seq, ALLREDUCE, 4, 1, 0), 2)
    assert len(follower.read(0.0).spans) == 8
    again = SpanWriter.create(path, rank=1, generation=0)
    again.end_span(again.begin_span(1, ALLREDUCE, 4, 1, 0), 2)
    assert [span.seq for span in follower.read(0.0).spans] == [1]


def test_strides_grow_at_once_and_shrink_slowly():
    stride = Stride(8)
    assert stride.note(100) == 16
    assert [stride.note(0) for _ in range(11)][-2:] == [8, 8]


def test_large_communicators_are_kept_as_ranges(path, ring):
    ring.add_comm("dp", 1000, range(3, 8003, 8))
    ring.add_comm("odd", 65, [*range(64), 100])
    slot = ring.add_comm("late", 2, ())
    ring.replace_comm(slot, "late", 2, (0, 7))
    ring.set_comm_kind(slot, 64, ALLREDUCE)
    dp, odd, late = read_ring(path, 0.0).comms
    assert dp.ranks == tuple(range(3, 8003, 8))
    assert odd.ranks == ()
    assert (late.ranks, late.bytes, late.op, late.dtype) == ((0, 7), 64, "allreduce", "float32")
