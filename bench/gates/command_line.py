"""What `perdure --help` costs a person who waits for it."""

import resource
import subprocess
import sys

from bench.gates.gate import Gate, time_spin


def measure_help() -> float:
    """Return the CPU seconds of `perdure --help`."""
    before_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    subprocess.run([sys.executable, "-m", "perdure", "--help"], check=True, capture_output=True)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before_s


# Measured: 0.9 spins on a quiet machine.
GATES = (Gate("help", "spins", 4.0, measure_help, time_spin),)
