"""How soon survivors of a stopped rank leave their collective after the order."""

from bench.gates.gate import Gate
from tests.interrupted import time_interrupt

GATES = (Gate("interrupt-in-rank", "s", bound=0.1, measure=time_interrupt),)
