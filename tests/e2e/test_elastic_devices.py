"""Elastic worlds of real processes over a device that misbehaves as NCCL's does (`docs/gpu.md`).

A member that dies says nothing to the others: only the order ends what they wait for, and what it
ends looks complete and is garbage.
"""

from typing import Any

import pytest

from perdure.model.errors import DeviceLostError
from tests.e2e.elastic_scenarios import STEPS, Outcomes, judge, make_outcomes, scenario, seeded
from tests.e2e.elastic_world import FORMED_AT, KILLED_AT

LATE = {"device": {"late_s": 0.003}}
PLACES = KILLED_AT[:6]
"""Where a rank of an undisturbed world comes by."""
SCENARIOS: dict[str, dict[str, Any]] = {
    one["name"]: one
    for one in (
        scenario("whole", 2, **LATE),
        *(scenario(f"kill-{p}", 3, kill={str(i % 3): f"{p} 4"}, **LATE)
          for i, p in enumerate(PLACES)),
        *(scenario(f"again-{p}", 4, kill={"0": "reduced 3", "1": f"{p} 1"}, **LATE)
          for p in FORMED_AT),
        scenario("cut", 3, cut=0, pace_s=0.05, **LATE),
        scenario("join", 2, joins=1, **LATE),
        scenario("replace", 3, joins=1, join_epoch=1, kill={"1": "backward 9"}, **LATE),
        scenario("exact-1", 1, exact=True),
        scenario("exact-killed", 4, exact=True, joins=1, join_epoch=1,
                 kill={"0": "reduced 3", "2": "optimizer 5"}, **LATE),
        scenario("lose", 3, lose={"1": "reduce 4"}, **LATE),
        scenario("hang", 4, hang={"1": "forward 3"}, kill={"0": "backward 6"}, **LATE),
        scenario("graphs", 3, capture={}, kill={"2": "reduce 4"}, joins=1, pace_s=0.02, **LATE),
        scenario("graph-lives", 3, capture={"1": "unregistered"}, kill={"2": "reduce 4"}, **LATE),
        scenario("split-kill", 3, split=True, joins=1, join_epoch=1, kill={"1": "reduce 4"},
                 **LATE),
        scenario("split-exact", 4, split=True, exact=True, joins=1, join_epoch=1,
                 kill={"0": "reduced 3", "2": "optimizer 5"}, **LATE),
        scenario("split-lose", 3, split=True, lose={"1": "reduce 4"}, **LATE),
        scenario("split-hang", 4, split=True, hang={"1": "forward 3"}, kill={"0": "backward 6"},
                 **LATE),
        scenario("split-stages", 4, split=True, stages=2, exact=True, joins=1, join_epoch=1,
                 kill={"3": "backward 7", "2": "optimizer 4"}, **LATE),
        scenario("split-shard", 4, split=True, shard=2, joins=1, join_epoch=1,
                 kill={"1": "reduced 41"}, **LATE),
        *(seeded(seed, **LATE) for seed in range(3)),
    )
}  # fmt: skip
LONG = {
    *("kill-backward", "kill-reduced", "kill-applied", "again-form", "again-connecting"),
    *("again-bring", "join", "kill-forward", "kill-optimizer", "seed-0", "seed-1", "seed-2"),
    "replace",  # `split-kill` has a kill and a join.
}
"""What differs from another scenario by a place or a number: for the campaign."""
NAMES = [[n for n in SCENARIOS if (n in LONG) == long] for long in (False, True)]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    batches = [[SCENARIOS[name] for name in names] for names in NAMES]
    return make_outcomes(tmp_path_factory, "devices", batches)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.long if n in LONG else ()) for n in SCENARIOS]
)
def test_survivors_commit_every_step_and_agree(outcomes: Outcomes, name: str) -> None:
    judge(outcomes[name])


def test_who_has_lost_its_device_ends_and_the_others_go_on(outcomes: Outcomes) -> None:
    for name in ("lose", "hang", "split-lose", "split-hang"):
        found = outcomes[name]
        ends = found["answer"]["ends"]
        assert ends["1"] == DeviceLostError.exit_code, f"{name}: {ends}\n{found['log'][-4000:]}"
        assert len(found["rows"]["1"]) < STEPS
    assert "does not become idle" in outcomes["hang"]["log"]
    assert "illegal memory access" in outcomes["lose"]["log"]


def test_a_graph_that_nobody_destroys_costs_its_process_the_device(
    outcomes: Outcomes,
) -> None:
    ends = outcomes["graph-lives"]["answer"]["ends"]
    assert (ends["0"], ends["1"]) == (0, DeviceLostError.exit_code)
    assert set(outcomes["graphs"]["answer"]["ends"].values()) == {0, -9}


def test_exact_losses_are_those_of_one_process(outcomes: Outcomes) -> None:
    (alone,) = outcomes["exact-1"]["rows"].values()
    for name in ("exact-killed", "split-exact"):
        found = outcomes[name]["rows"]["1"]
        assert [row["losses"] for row in found] == [row["losses"] for row in alone]
        assert found[-1]["hash"] == alone[-1]["hash"]
