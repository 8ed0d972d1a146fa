from perdure.model.events import ProbeEnded
from perdure.model.orders import RunProbe
from perdure.model.signals.links import HostProbe, PairProbe, ProbeFinding
from perdure.plan.probe import ProbeSession, judge, plan_first, plan_next


def both(round_: int, a: int, b: int, there: float = 0.01, back: float = 0.01) -> list[PairProbe]:
    return [PairProbe(round_, a, b, 8_000_000, there), PairProbe(round_, b, a, 8_000_000, back)]


def test_suspects_are_paired_with_others_and_suspected_links_as_they_are() -> None:
    assert plan_first(range(6), suspects=[4, 5]) == ((4, 0), (5, 1), (2, 3))
    assert plan_first(range(4), links=[(2, 0)]) == ((2, 0), (1, 3))
    assert plan_first([7, 9], suspects=[7, 9]) == ((7, 9),)
    assert plan_first([3]) == ()


def test_the_slowest_are_paired_again_with_the_fastest() -> None:
    first = both(1, 0, 1, there=0.9) + both(1, 2, 3) + both(1, 4, 5, there=0.02)
    assert plan_next(range(6), first) == ((0, 2), (1, 3), (4, 5))


def test_three_nodes_meet_in_three_rounds() -> None:
    first = both(1, 0, 1)
    second = both(2, 0, 2)
    assert plan_next(range(3), first) == ((0, 2),)
    assert plan_next(range(3), first + second) == ((2, 1),)


def test_a_card_is_slow_with_every_partner() -> None:
    pairs = both(1, 0, 1, 0.3, 0.3) + both(1, 2, 3) + both(2, 0, 2, 0.3, 0.3) + both(2, 1, 3)
    found = judge(pairs)
    assert (found.kind, found.node) == ("slow NIC", 0)
    assert found.reason == "node 0 is slow both ways with each of its 2 partners"


def test_a_card_that_is_slow_one_way() -> None:
    pairs = both(1, 0, 1, 0.3) + both(1, 2, 3) + both(2, 0, 2, 0.3) + both(2, 1, 3)
    assert "slow in sending with" in judge(pairs).reason


def test_a_link_is_slow_only_between_its_ends_and_has_a_direction() -> None:
    pairs = both(1, 0, 1, back=0.3) + both(1, 2, 3) + both(2, 0, 2) + both(2, 1, 3)
    found = judge(pairs)
    assert (found.kind, found.link, found.confidence) == ("slow link", (1, 0), 0.9)
    assert found.reason.endswith("both are fast with others")


def test_two_nodes_tell_a_direction_and_no_card() -> None:
    found = judge(both(1, 0, 1, there=0.3) + both(2, 0, 1, there=0.31))
    assert (found.kind, found.link, found.confidence) == ("slow link", (0, 1), 0.6)
    assert judge(both(1, 0, 1, 0.3, 0.3)).kind == "nothing"


def test_a_transfer_that_never_ended_is_slow() -> None:
    pairs = both(1, 0, 1, 0.0, 0.0) + both(1, 2, 3) + both(2, 0, 2) + both(2, 1, 3)
    found = judge(pairs)
    assert found.kind == "slow link"
    assert found.evidence["pairs"][0] == [0, 1, None]


def test_a_slow_host_with_and_without_slow_transfers() -> None:
    hosts = [HostProbe(1, node, "cpu", 0.4 if node == 2 else 0.1) for node in range(4)]
    fine = both(1, 0, 1) + both(1, 2, 3)
    assert (judge(fine, hosts).kind, judge(fine, hosts).node) == ("slow host", 2)
    assert "took 4.0 times on node 2" in judge(fine, hosts).reason
    slow = both(1, 0, 2, 0.2, 0.2) + both(1, 1, 3) + both(2, 1, 2, 0.2, 0.2) + both(2, 0, 3)
    assert (judge(slow, hosts).kind, judge(slow, hosts).node) == ("slow host", 2)


def test_nothing_slow_and_nothing_measured() -> None:
    assert judge(both(1, 0, 1) + both(1, 2, 3)).kind == "nothing"
    assert judge([]).reason == "nothing was measured: no node answered"


# --- a session -----------------------------------------------------------------------------------


def answer(order: RunProbe, node: int, slow: int = -1) -> ProbeEnded:
    pairs = [
        probe
        for src, dst in order.pairs
        if src == node
        for probe in both(order.round, src, dst, *[0.3 if slow in (src, dst) else 0.01] * 2)
    ]
    hosts = [HostProbe(order.round, node, "cpu", 0.1)] if node in order.hosts else []
    return ProbeEnded(
        id=order.id, node=node, round=order.round, at_s=1.0, pairs=tuple(pairs), hosts=tuple(hosts)
    )


def test_a_session_from_order_to_finding() -> None:
    session = ProbeSession("p1")
    order = session.start(10.0, range(4), suspects=[1])
    assert (order.pairs, order.hosts, order.round) == (((1, 0), (2, 3)), (0, 1, 2, 3), 1)
    assert session.due_s == 13.5
    for node in (0, 1, 2):
        assert session.take(10.5, answer(order, node, slow=1)) is None
    second = session.take(10.6, answer(order, 3, slow=1))
    assert isinstance(second, RunProbe)
    assert (second.round, second.hosts) == (2, ())
    assert session.take(10.7, answer(order, 3, slow=1)) is None  # Repeated.
    results = [session.take(11.0, answer(second, node, slow=1)) for node in range(4)]
    assert results[:3] == [None] * 3
    third = results[3]
    assert isinstance(third, RunProbe)
    assert (third.round, third.pairs) == (3, ((1, 3),))  # What seemed slow, once more and alone.
    assert session.take(11.5, answer(third, 1, slow=1)) is None
    found = session.take(11.6, answer(third, 3, slow=1))
    assert isinstance(found, ProbeFinding)
    assert (found.kind, found.node) == ("slow NIC", 1)
    assert session.due_s is None
    assert session.take(12.0, answer(second, 0)) is None


def test_a_silent_node_does_not_hold_a_session_up() -> None:
    session = ProbeSession("p1")
    order = session.start(10.0, [0, 1])
    assert session.take(10.1, answer(order, 0)) is None
    assert session.tick(13.4) is None
    second = session.tick(13.5)
    assert isinstance(second, RunProbe)
    found = session.tick(17.0)
    assert isinstance(found, ProbeFinding)
    assert found.kind == "nothing"
    assert found.evidence["silent"] == [0, 1]


def test_one_node_and_an_unknown_probe() -> None:
    session = ProbeSession("p1")
    order = session.start(10.0, [5])
    assert (order.pairs, order.hosts) == ((), (5,))
    other = ProbeEnded(id="p0", node=5, round=1, at_s=1.0)
    assert session.take(10.0, other) is None
    found = session.take(10.0, answer(order, 5))
    assert isinstance(found, ProbeFinding)
    assert found.reason == "one node alone cannot be compared"


def test_a_neighbours_burst_is_not_seen_twice() -> None:
    session = ProbeSession("p1")
    order: RunProbe | ProbeFinding | None = session.start(10.0, range(4))
    slow = 1
    for _ in range(3):
        assert isinstance(order, RunProbe)
        asked, order = order, None
        for node in sorted({n for pair in asked.pairs for n in pair} | set(asked.hosts)):
            order = session.take(11.0, answer(asked, node, slow=slow if asked.round < 3 else -1))
        if asked.round == 1:
            slow = -1
    assert isinstance(order, ProbeFinding)
    assert order.kind == "nothing"
