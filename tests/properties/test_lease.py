"""Never two controllers act, whatever happens to them and between them."""

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.leases import FAULTS_S, TIMES, Process, World, check, simulate


@given(st.integers(min_value=0, max_value=2**32))
@settings(max_examples=examples(40), deadline=None)
def test_never_two_act_and_at_last_one_does(seed: int) -> None:
    check(simulate(World(seed), 3))


def test_a_dead_holder_is_followed_within_the_times_alone() -> None:
    world = World(1)
    world.now = FAULTS_S + 1  # No losses: how long is a matter of the times.
    world.processes = [Process(world, slot) for slot in range(2)]
    world.run(world.now + 3)
    [holder] = [p for p in world.processes if p.may_act()]
    holder.alive = False
    world.processes.remove(holder)
    died_s = world.now
    while not any(p.may_act() for p in world.processes):
        world.run(world.now + 0.01)
        assert world.now < died_s + 5.0
    assert world.now - died_s <= TIMES.ttl_s + TIMES.margin_s + 2 * TIMES.renew_s + 0.2
