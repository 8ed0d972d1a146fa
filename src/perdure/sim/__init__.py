"""The same machines under a virtual clock, with seeded faults."""

from perdure.sim.network import Weather
from perdure.sim.simulation import InvariantViolated, Scenario, Simulation

__all__ = ["InvariantViolated", "Scenario", "Simulation", "Weather"]
