"""What perdure's recording costs a rank: the record of a step, and that of a collective."""

import tempfile

from bench.gates.gate import Gate, measure_cpu, time_spin

from perdure.worker.native import build
from perdure.worker.ring import RingWriter

STEPS = 20_000


def measure_step_records() -> float:
    """Return the CPU seconds of the records of 20,000 steps."""
    with tempfile.TemporaryDirectory() as folder:
        ring = RingWriter.create(f"{folder}/g0-r0.ring", rank=0, generation=0)

        def commit() -> None:
            for step in range(STEPS):
                ring.commit(step, step, step + 1, (1, 0, 0, 0), phase=5)

        try:
            return measure_cpu(commit)
        finally:
            ring.close()


def measure_collective() -> float:
    """Return what recording adds to a collective, as a share of the bare one."""
    library = build.find_library()
    if library is None:
        raise RuntimeError(f"the compiled recorder is not built: {build.build_command()}")
    cost = build.measure_cost(library)
    if isinstance(cost, str):
        raise RuntimeError(cost)
    return cost.collective_us / cost.bare_us


GATES = (
    # 20 µs for each step on a machine that spins in 0.1 s: four times the target.
    Gate("rank-step-records", "spins for 20,000 steps", 4.0, measure_step_records, time_spin),
    Gate("rank-collective-record", "of a bare collective", 1.0, measure_collective, pairs=3),
)
