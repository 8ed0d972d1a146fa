"""The same machines under a virtual clock, with seeded faults."""

from tests.simulator.network import Weather
from tests.simulator.simulation import InvariantViolated, Scenario, Simulation

__all__ = ["InvariantViolated", "Scenario", "Simulation", "Weather"]
