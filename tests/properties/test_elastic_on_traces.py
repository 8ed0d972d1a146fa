"""Whatever a trace of availability does to an elastic job, nothing that counts is lost.

The real controller and agents, played members (`tests.simulator.elastic`), and nodes that vanish
and come back as the trace says. `Fabric` raises where a step is made of anything but every
micro-batch once; the simulation where a verified step is lost or the ledger does not close.
"""

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.simulator import Scenario, Weather
from tests.simulator.elastic import ElasticSimulation
from tests.traces import traces

from perdure_lab.live.live import Schedule, plan_schedule
from perdure_lab.traces import AvailabilityTrace, list_intervals
from perdure_lab.traces.transform import speed_up

STEPS = 200
_TRAINS_S = 3.0
"""From the job's begin until the trace's."""


class TracedSimulation(ElasticSimulation):
    """An elastic job under virtual time whose nodes come and go as a trace of availability says.

    All nodes are there at first, since a job begins with its whole world; those that the trace
    does not have at 0 leave once it trains. When the trace has ended all are back, so that the
    job can end.
    """

    def __init__(self, scenario: Scenario, trace: AvailabilityTrace) -> None:
        """Set everything up; `run` lets time pass."""
        super().__init__(scenario)
        self.schedule: Schedule = plan_schedule(trace)
        self.absent: set[int] = set()
        absent = set(range(scenario.nodes)) - set(self.schedule.first)
        self.clock.after(_TRAINS_S, lambda: self._lose(absent))
        for act in self.schedule.acts:
            call = {"leave": self._lose, "come": self._bring}.get(act.kind)
            if call is not None:
                places = set(act.places)
                self.clock.after(
                    _TRAINS_S + act.at_s,
                    lambda call=call, places=places: call(places),  # type: ignore[misc]
                )
        self.clock.after(_TRAINS_S + trace.duration_s, lambda: self._bring(set(self.absent)))

    def _lose(self, places: set[int]) -> None:
        """Let nodes vanish: agent, keeper and ranks at once, without a word."""
        if self.ended is not None:
            return
        self.absent |= places
        for place in sorted(places):
            self.injected.append(f"node {place} gone at {self.clock.now - self.start_s:.3f}")
            self.nodes[place].vanish()

    def _bring(self, places: set[int]) -> None:
        if self.ended is not None:
            return
        self.absent -= places
        for place in sorted(places):
            self.injected.append(f"node {place} back at {self.clock.now - self.start_s:.3f}")
            self.nodes[place].start_agent()


def play(trace: AvailabilityTrace, seed: int, speed: float) -> TracedSimulation:
    nodes = max(len(i.living) for i in list_intervals(trace))
    scenario = Scenario(
        seed=seed, nodes=nodes, nproc=1, steps=STEPS, step_s=0.05, faults=0, kinds=("crash",),
        weather=Weather(0.003, loss=0.02, duplicate=0.02), end_s=2000.0,
    )  # fmt: skip
    simulation = TracedSimulation(scenario, speed_up(trace, speed))
    simulation.run()
    assert sorted(simulation.truth) == list(range(STEPS + 1))
    return simulation


@settings(max_examples=examples(40), deadline=None)
@given(
    traces(nodes_max=5, stays_max=7, anchored=True),
    st.integers(0, 1000),
    st.sampled_from([80.0, 300.0]),
)
def test_every_sample_counts_once_and_the_ledger_closes(
    trace: AvailabilityTrace, seed: int, speed: float
) -> None:
    simulation = play(trace, seed, speed)
    assert len(simulation.worlds) == 1, "somebody was always there, and the world was restarted"


@settings(max_examples=20, deadline=None)
@given(traces(nodes_max=4, stays_max=7), st.integers(0, 1000), st.sampled_from([80.0, 300.0]))
def test_the_same_where_nobody_is_left_for_a_while(
    trace: AvailabilityTrace, seed: int, speed: float
) -> None:
    """Then the next generation goes on from the newest verified checkpoint, and no earlier."""
    play(trace, seed, speed)
