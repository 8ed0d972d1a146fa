"""An elastic job under virtual time whose nodes come and go as a trace of availability says.

All nodes are there at first, since a job begins with its whole world; those that the trace does
not have at 0 leave once it trains. When the trace has ended all are back, so that the job can end.
"""

from perdure.lab.simulation.schedule import Schedule, plan_schedule
from perdure.lab.traces import AvailabilityTrace
from perdure.sim.elastic_job import ElasticSimulation
from perdure.sim.simulation import Scenario

_TRAINS_S = 3.0
"""From the job's begin until the trace's."""


class TracedSimulation(ElasticSimulation):
    """One run of an elastic job on one trace, a rank a node."""

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
