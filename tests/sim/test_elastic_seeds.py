"""Elastic jobs under virtual time: the real controller and agents, played members, seeds."""

import pytest
from tests.simulator import InvariantViolated, Scenario, Weather, elastic
from tests.simulator.elastic import ElasticSimulation

from perdure.model.events import RankExited
from perdure.plan.elastic.commit import decide_reformation
from perdure.telemetry.accounting.ledger import make_report

KINDS = ("crash", "crash", "crash", "agent", "keeper", "controller", "halfway", "outage")


def run(seed: int, **changes: object) -> ElasticSimulation:
    settings: dict[str, object] = {
        "nodes": 4, "nproc": 1, "steps": 100, "step_s": 0.05, "faults": 4, "kinds": KINDS,
    }  # fmt: skip
    simulation = ElasticSimulation(Scenario(seed=seed, **(settings | changes)))  # type: ignore[arg-type]
    simulation.run()
    return simulation


def run_all(seeds: range, **changes: object) -> None:
    for seed in seeds:
        run(seed, **changes)


@pytest.mark.long
def test_four_members_lose_nothing_whatever_dies() -> None:
    runs = [run(seed) for seed in range(60)]
    assert sum(one.reformed for one in runs) > 60, "hardly anything happened in place"
    assert {max(one.truth) for one in runs} == {100}
    assert len({one.truth[100] for one in runs}) == 1, "the outcome depends on what died"


@pytest.mark.long
def test_eight_members_in_a_storm() -> None:
    storm = Weather(delay_s=0.02, loss=0.2, duplicate=0.2)
    run_all(range(500, 515), nproc=2, faults=10, weather=storm)


def test_the_loss_of_a_keeper_is_told_as_that_and_at_its_time() -> None:
    """It was told as a world that broke, or as the join of whoever came next; or when it was over.

    The dead keeper's ranks die with it, and their ends are told before the loss is.
    """
    for seed in range(20):
        one = run(seed, faults=1, kinds=("keeper",), weather=Weather())
        (struck,) = one.injected
        _, _, _, node, *_, at_s = struck.split()
        ends = [e.body.record for e in one.journal if isinstance(e.body, RankExited)]
        gone = [(end.rank, end.signal, end.asked) for end in ends if end.error == "keeper lost"]
        assert gone == [(int(node), 9, True)], seed
        lost = [r for r in make_report(one.journal, one.clock.now).recoveries if r.rung != "join"]
        told = [(r.cause, r.culprit, f"{r.at_s - one.start_s:.3f}") for r in lost]
        assert told == [("keeper lost", f"node {node}", at_s)], seed


def test_without_faults_the_world_is_formed_once() -> None:
    calm = run(1, faults=0, weather=Weather())
    assert (calm.reformed, len(calm.worlds)) == (0, 1)


def test_members_that_forget_what_was_finished_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The invariants can fail: survivors that go on without rolling forward violate one."""

    def forget(count, standings):  # type: ignore[no-untyped-def]
        behind = {r: type(s)(s.applied, s.done, False) for r, s in standings.items()}
        plan = decide_reformation(count, behind)
        return type(plan)(**{f: getattr(plan, f) for f in plan.__struct_fields__} | {"fresh": ()})

    monkeypatch.setattr(elastic, "decide_reformation", forget)
    with pytest.raises(InvariantViolated, match=r"the epoch at|of other parameters|differs"):
        run_all(range(20))


def test_a_kept_micro_batch_that_is_redone_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def redo_all(count, standings):  # type: ignore[no-untyped-def]
        return decide_reformation(
            count, {r: type(s)(s.applied, (), s.holds) for r, s in standings.items()}
        )

    monkeypatch.setattr(elastic, "decide_reformation", redo_all)
    with pytest.raises(InvariantViolated, match="counts twice"):
        run_all(range(20))


def test_spares_stand_in_and_any_node_may_be_lost() -> None:
    runs = [run(seed, spares=1, faults=6) for seed in range(700, 730)]
    assert sum(one.reformed for one in runs) > 30
    assert {max(one.truth) for one in runs} == {100}
