"""The real controller, agents and detector under virtual time: seeds and their invariants."""

import os
import subprocess
import sys

import pytest
from tests.simulator import InvariantViolated, Scenario, Simulation, Weather
from tests.waiting import PATIENCE_S

from perdure.agent.messages import KeeperSaid
from perdure.model.bus.wire import KeeperStopped
from perdure.model.job import RestartConfig

GENTLE = range(0, 150)
STORMY = range(1000, 1060)
HALFWAY = range(2000, 2050)


def run(seed: int, **changes: object) -> Simulation:
    simulation = Simulation(Scenario(seed=seed, **changes))  # type: ignore[arg-type]
    simulation.run()
    return simulation


def run_all(seeds: range, **changes: object) -> None:
    for seed in seeds:
        run(seed, **changes)


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in GENTLE[5::5])]
)
def test_64_ranks_survive_five_faults(first: int) -> None:
    for seed in range(first, first + 5):
        run(seed)


@pytest.mark.parametrize(
    "first", [1000, *(pytest.param(seed, marks=pytest.mark.long) for seed in STORMY[5::5])]
)
def test_16_ranks_survive_fourteen_faults_in_a_storm(first: int) -> None:
    storm = Weather(delay_s=0.02, loss=0.2, duplicate=0.2)
    for seed in range(first, first + 5):
        run(seed, nodes=4, nproc=4, faults=14, weather=storm)


@pytest.mark.parametrize(
    "first", [2000, *(pytest.param(seed, marks=pytest.mark.long) for seed in HALFWAY[15::15])]
)
def test_a_controller_that_dies_between_an_event_and_its_decision_forgets_nothing(
    first: int,
) -> None:
    kinds = ("crash", "halfway", "halfway", "leave")
    for seed in HALFWAY[first - HALFWAY[0] :][:15]:
        run(seed, nodes=2, nproc=2, faults=12, kinds=kinds)


def test_the_scripts_own_bug_ends_the_job_with_the_step_and_the_rank() -> None:
    for seed in range(3000, 3010):
        simulation = run(seed, nodes=2, nproc=2, faults=0, bug_at_step=37, restart=RestartConfig())
        assert simulation.ended is not None
        assert simulation.ended.exit_code == 128 + 11
        assert "3 times at step 37: rank 0" in simulation.ended.reason
        assert max(simulation.worlds) == 2


def test_without_faults_nothing_is_restarted_and_the_ledger_says_so() -> None:
    simulation = Simulation(Scenario(seed=1, nodes=2, nproc=2, faults=0, weather=Weather()))
    report = simulation.run()
    assert max(simulation.worlds) == 0
    assert report.recoveries == ()
    assert report.ledger["lost_work"].s == 0.0
    assert report.ledger["useful"].s == pytest.approx(4 * 150 * 0.4, rel=1e-6)
    assert abs(report.ledger["unattributed"].fraction) <= 0.005


@pytest.mark.parametrize("seeds", [range(7), pytest.param(range(7, 20), marks=pytest.mark.long)])
def test_every_crash_is_a_recovery_in_the_ledger(seeds: range) -> None:
    for seed in seeds:
        simulation = Simulation(Scenario(seed=seed, nodes=2, nproc=2))
        report = simulation.run()
        worlds = len(simulation.worlds) - 1
        assert sum(row.rung == "restart" for row in report.recoveries) == worlds, seed
        assert abs(report.ledger["unattributed"].fraction) <= 0.005, seed


def test_a_keeper_that_lies_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The invariants can fail: ranks that are said to be gone and are not violate one."""

    def kill(node, agent, generation):  # type: ignore[no-untyped-def]
        said = KeeperSaid(message=KeeperStopped(generation))
        node._feed_same(agent, said)

    monkeypatch.setattr("tests.simulator.node.Node._kill", kill)
    with pytest.raises(InvariantViolated, match=r"live at once|did not end|outlived"):
        run_all(range(20), nodes=2, nproc=2)


@pytest.mark.parametrize("hash_seed", ["0", "1", "4711"])
def test_same_seed_same_actions_under_any_hash_seed(hash_seed: str) -> None:
    code = (
        "from tests.simulator import Scenario, Simulation\n"
        "s = Simulation(Scenario(seed=5, nodes=3, nproc=2)); s.run(); print(s.actions.hexdigest())"
    )
    env = dict(os.environ, PYTHONHASHSEED=hash_seed)
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=PATIENCE_S
    )
    here = Simulation(Scenario(seed=5, nodes=3, nproc=2))
    here.run()
    assert done.stdout.strip() == here.actions.hexdigest(), done.stderr
