"""Probes of simulated networks: what is slow is found, what is not is not."""

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from perdure.model.events import ProbeEnded
from perdure.model.orders import RunProbe
from perdure.model.signals.links import HostProbe, PairProbe, ProbeFinding
from perdure.plan.probe import ProbeSession, judge

BASE_S = 0.02
NOISE = st.floats(1.0, 1.4)


def run_probe(
    data: st.DataObject,
    nodes: list[int],
    *,
    card: int = -1,
    link: tuple[int, int] = (-1, -1),
    host: int = -1,
    factor: float = 1.0,
    suspects: tuple[int, ...] = (),
    links: tuple[tuple[int, int], ...] = (),
) -> ProbeFinding:
    def cost(src: int, dst: int) -> float:
        slow = card in (src, dst) or (src, dst) == link
        return BASE_S * data.draw(NOISE) * (factor if slow else 1.0)

    session = ProbeSession("p")
    step: RunProbe | ProbeFinding | None = session.start(0.0, nodes, suspects, links)
    for _ in range(5):
        assert isinstance(step, RunProbe)
        order, step = step, None
        busy = [node for pair in order.pairs for node in pair]
        assert len(busy) == len(set(busy))  # No node is in two pairs.
        for node in sorted({*busy, *order.hosts}):
            pairs = tuple(
                PairProbe(order.round, a, b, order.bytes, cost(a, b))
                for src, dst in order.pairs
                if src == node
                for a, b in ((src, dst), (dst, src))
            )
            hosts = tuple(
                HostProbe(order.round, node, "cpu", 0.1 * (factor if node == host else 1.0))
                for _ in range(node in order.hosts)
            )
            assert step is None
            step = session.take(
                0.1,
                ProbeEnded(
                    id="p", node=node, round=order.round, at_s=0.1, pairs=pairs, hosts=hosts
                ),
            )
        if isinstance(step, ProbeFinding):
            return step
    raise AssertionError("the probe does not end")


worlds = st.lists(st.integers(0, 500), min_size=3, max_size=14, unique=True)
factors = st.floats(3.0, 100.0)


@given(st.data(), worlds)
@settings(max_examples=examples(60), deadline=None)
def test_nothing_slow_is_nothing(data: st.DataObject, nodes: list[int]) -> None:
    suspects = tuple(data.draw(st.lists(st.sampled_from(nodes), unique=True)))
    assert run_probe(data, nodes, suspects=suspects).kind == "nothing"


@given(st.data(), worlds, factors)
@settings(max_examples=examples(60), deadline=None)
def test_a_suspected_slow_card_is_found(
    data: st.DataObject, nodes: list[int], factor: float
) -> None:
    card = data.draw(st.sampled_from(nodes))
    found = run_probe(data, nodes, card=card, factor=factor, suspects=(card,))
    assert (found.kind, found.node) == ("slow NIC", card)


@given(st.data(), worlds, factors)
@settings(max_examples=examples(60), deadline=None)
def test_a_suspected_slow_link_is_found_with_its_direction(
    data: st.DataObject, nodes: list[int], factor: float
) -> None:
    src, dst = data.draw(st.permutations(nodes))[:2]
    found = run_probe(data, nodes, link=(src, dst), factor=factor, links=((src, dst),))
    assert (found.kind, found.link) == ("slow link", (src, dst))


@given(st.data(), worlds, factors)
@settings(max_examples=examples(60), deadline=None)
def test_a_slow_host_is_found_among_fast_links(
    data: st.DataObject, nodes: list[int], factor: float
) -> None:
    host = data.draw(st.sampled_from(nodes))
    found = run_probe(data, nodes, host=host, factor=factor)
    assert (found.kind, found.node) == ("slow host", host)


@given(st.data())
@settings(max_examples=examples(100), deadline=None)
def test_relabelling_nodes_relabels_the_finding(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 6))
    times = st.floats(0.001, 2.0)
    keys = [(a, b) for a in range(size) for b in range(size) if a != b]
    chosen = data.draw(st.lists(st.sampled_from(keys), unique=True, min_size=1))
    values = data.draw(st.lists(times, unique=True, min_size=len(chosen), max_size=len(chosen)))
    names = data.draw(st.permutations(range(size)))
    one = judge(PairProbe(1, a, b, 1, s) for (a, b), s in zip(chosen, values, strict=True))
    other = judge(
        PairProbe(1, names[a], names[b], 1, s) for (a, b), s in zip(chosen, values, strict=True)
    )
    assert other.kind == one.kind
    if one.link is not None:
        assert other.link == (names[one.link[0]], names[one.link[1]])
