"""How soon survivors of a stopped rank raise, once the agent has told them to."""

from bench.gates.gate import Gate
from tests.interrupted import time_interrupt

GATES = (Gate("interrupt-in-rank", "s", bound=0.1, measure=time_interrupt),)
