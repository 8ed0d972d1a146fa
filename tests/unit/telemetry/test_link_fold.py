import msgspec

from perdure.model.events import JournalEntry, LinksNoted, VerdictReached
from perdure.model.signals.links import LinkEndpoint, LinkSample, LinkSweep
from perdure.model.signals.progress import CommProgress, NodeBeat, RankAccount, RankProgress
from perdure.model.verdicts import Culprit, Verdict
from perdure.telemetry.links import LinkFold, LinkJoin, make_delay_matrix, read_delay_matrix

MB = 1_000_000


def sample(src: int, dst: int, comm: str = "dp", **fields: object) -> LinkSample:
    whole: dict[str, object] = {
        "bytes_acked": 10 * MB,
        "busy_s": 0.02,
        "rtt_s": 0.0002,
        "retrans": 0,
        "unsent_bytes": 0,
        "backoff": 0,
        "last_ack_s": 0.0,
    }
    return LinkSample(src=src, dst=dst, comm=comm, **(whole | fields))  # type: ignore[arg-type]


def far(src: int, local: str, remote: str, comm: str = "") -> LinkSample:
    return sample(src, -1, comm, local=local, remote=remote)


def beat(
    node: int,
    *links: LinkSample,
    ends: tuple[LinkEndpoint, ...] = (),
    comms: tuple[CommProgress, ...] = (),
    generation: int = 0,
    note: str = "",
    sockets: int = 4,
) -> NodeBeat:
    rank = RankProgress(
        rank=node,
        pid=100 + node,
        phase="step",
        phase_since_s=0.0,
        heartbeat_s=0.0,
        account=RankAccount(),
        comms=comms,
    )
    sweep = LinkSweep(1.0, 1.0, links, endpoints=ends, note=note, sockets=sockets)
    return NodeBeat(node, "a", 1, 1.0, generation, (rank,), sweep=sweep)


def links_of(beat: NodeBeat) -> list[tuple[int, int, str]]:
    assert beat.sweep is not None
    return [(s.src, s.dst, s.comm) for s in beat.sweep.links]


# Rank 0 on node 0 listened on port 5000 for group "dp"; rank 3 on node 1 came from port 6000.
A, B = "10.0.0.1:5000", "10.0.0.2:6000"
END_0 = LinkEndpoint(0, A, B, "dp")
END_3 = LinkEndpoint(3, B, A)


def test_two_agents_ends_become_one_link_each_way() -> None:
    join = LinkJoin()
    assert links_of(join.resolve(beat(0, far(0, A, B, "dp"), ends=(END_0,)))) == []
    # The end that came names neither its peer nor the group: the listening end does.
    assert links_of(join.resolve(beat(1, far(3, B, A), ends=(END_3,)))) == [(3, 0, "dp")]
    assert links_of(join.resolve(beat(0, far(0, A, B, "dp")))) == [(0, 3, "dp")]


def test_a_late_name_replaces_none_and_is_not_taken_back() -> None:
    join = LinkJoin()
    join.resolve(beat(0, ends=(msgspec.structs.replace(END_0, comm=""),)))
    assert links_of(join.resolve(beat(1, far(3, B, A), ends=(END_3,)))) == [(3, 0, "")]
    join.resolve(beat(0, ends=(END_0,)))
    join.resolve(beat(0, ends=(msgspec.structs.replace(END_0, comm=""),)))
    assert links_of(join.resolve(beat(1, far(3, B, A)))) == [(3, 0, "dp")]


def test_the_only_communicator_of_both_ranks_is_it_and_two_are_none() -> None:
    world = CommProgress("world", 4, 1, 1, ranks=(0, 1, 2, 3))
    pair = CommProgress("pair", 2, 1, 1, ranks=(0, 1))
    nameless = (sample(0, 1, ""), sample(0, 2, ""))
    join = LinkJoin()
    assert links_of(join.resolve(beat(0, *nameless, comms=(world, pair)))) == [
        (0, 1, ""),
        (0, 2, "world"),
    ]


def test_sockets_of_one_link_are_summed_and_strangers_dropped() -> None:
    other = "10.0.0.2:6001"
    ends = (END_0, LinkEndpoint(0, A, other, "dp"))
    join = LinkJoin()
    join.resolve(beat(0, ends=ends))
    stranger = far(3, "10.0.0.2:7000", "203.0.113.9:443")
    joined = join.resolve(beat(1, far(3, B, A), far(3, other, A), stranger)).sweep
    assert joined is not None
    (link,) = joined.links
    assert (link.dst, link.bytes_acked, link.local) == (0, 20 * MB, "")


def test_what_nccl_tells_counts_where_the_kernel_tells_nothing_of_the_two() -> None:
    by_nccl = [
        sample(0, 3, "7", source="nccl", bytes_acked=1 * MB),
        sample(0, 5, "7", source="nccl", bytes_acked=2 * MB),
    ]
    sockets = (far(0, A, B, "dp"), sample(0, 3))
    told = beat(0, *sockets, ends=(END_0, END_3))
    assert told.sweep is not None
    sweep = msgspec.structs.replace(told.sweep, by_nccl=tuple(by_nccl))
    told = LinkJoin().resolve(msgspec.structs.replace(told, sweep=sweep))
    assert told.sweep is not None
    found = {(s.dst, s.comm, s.source): s.bytes_acked for s in told.sweep.links}
    assert found == {(3, "dp", "kernel"): 20 * MB, (5, "7", "nccl"): 2 * MB}


def test_a_new_generation_forgets_the_ends_of_the_old_one() -> None:
    join = LinkJoin()
    join.resolve(beat(0, ends=(END_0,)))
    assert links_of(join.resolve(beat(1, far(3, B, A), generation=1))) == []


def test_a_cell_is_the_median_and_bytes_are_the_sum() -> None:
    fold = LinkFold()
    for at_s, busy_s in ((0.0, 0.02), (1.0, 0.9), (2.0, 0.02)):
        fold.take_beat(at_s, beat(0, sample(0, 1, busy_s=busy_s, retrans=2)))
    assert fold.tick(9.0) == []
    (noted,) = fold.tick(10.0)
    assert isinstance(noted, LinksNoted)
    (link,) = noted.links
    assert (link.bytes_acked, link.retrans) == (30 * MB, 6)
    assert abs(link.busy_ms_per_mb - 2.0) < 1e-9  # Not (0.02 + 0.9 + 0.02) / 30.
    assert fold.next_deadline() == 70.0


def test_small_messages_make_no_cell_but_a_link_that_is_held_up_does() -> None:
    fold = LinkFold()
    small, held_up = (
        sample(0, dst, bytes_acked=200_000, busy_s=busy_s, retrans=1)
        for dst, busy_s in ((1, 0.06), (2, 0.8))
    )
    for at_s in range(8):
        fold.take_beat(float(at_s), beat(0, small, held_up))
    cells = {s.dst: s.busy_ms_per_mb for s in fold.samples()}
    assert cells == {1: 0.0, 2: 4000.0}


def test_a_verdict_about_communication_keeps_the_matrix_at_once() -> None:
    def reached(kind: str, culprit: Culprit) -> VerdictReached:
        return VerdictReached(
            verdict=Verdict(
                kind=kind,  # type: ignore[arg-type]
                culprit=culprit,
                generation=0,
                first_seen_s=1.0,
                confirmed_s=2.0,
                confidence=1.0,
                reason="",
            )
        )

    fold = LinkFold()
    slow = reached("CommSlow", Culprit(link=(0, 1)))
    assert fold.note(1.0, slow) == []  # Nothing is known yet.
    fold.take_beat(1.0, beat(0, sample(0, 1, backoff=3)))
    assert fold.note(2.0, reached("Straggler", Culprit(rank=1))) == []
    (noted,) = fold.note(2.5, slow)
    assert isinstance(noted, LinksNoted)
    assert noted.links[0].backoff == 3
    assert fold.note(3.0, slow) == []  # Just told.


def test_a_note_soon_after_another_still_knows_the_last_minute() -> None:
    fold = LinkFold()
    for at_s in range(11):
        fold.take_beat(float(at_s), beat(0, sample(0, 1)))
    (first,) = fold.tick(10.0)
    fold.take_beat(12.0, beat(0, sample(0, 1, bytes_acked=0, busy_s=1.0, backoff=5)))
    link = fold.samples()[0]
    assert isinstance(first, LinksNoted)
    assert (link.bytes_acked, link.backoff) == (110 * MB, 5)
    assert abs(link.busy_ms_per_mb - 2.0) < 1e-9
    fold.tick(71.5)
    assert fold.samples() == (msgspec.structs.replace(link, bytes_acked=0, busy_s=0.0),)
    fold.tick(140.0)
    assert fold.samples() == ()


def test_what_is_missing_is_said_once() -> None:
    fold = LinkFold()
    fold.take_beat(0.0, beat(0, note="the descriptors of rank 0 cannot be read", sockets=0))
    (noted,) = fold.tick(10.0)
    assert isinstance(noted, LinksNoted)
    assert noted.note == "node 0: the descriptors of rank 0 cannot be read"
    assert fold.tick(70.0) == []


def test_an_empty_matrix_says_why() -> None:
    assert "no links were noted" in read_delay_matrix([]).note
    fold = LinkFold()
    fold.take_beat(0.0, beat(0, sockets=12))
    (noted,) = fold.tick(10.0)
    assert isinstance(noted, LinksNoted)
    entry = JournalEntry(seq=1, at_s=10.0, body=noted)
    assert read_delay_matrix([entry]).note.startswith("12 connections between ranks, none")


def test_pairs_over_all_communicators() -> None:
    noted = LinksNoted(
        generation=2,
        at_s=1.0,
        window_s=60.0,
        links=(sample(1, 0, "tp", busy_s=0.01), sample(0, 1, "dp"), sample(0, 1, "tp")),
    )
    matrix = make_delay_matrix(noted)
    assert [(s.src, s.dst, s.bytes_acked) for s in matrix.links] == [
        (0, 1, 20 * MB),
        (1, 0, 10 * MB),
    ]
    assert [s.comm for s in matrix.comms] == ["dp", "tp", "tp"]
