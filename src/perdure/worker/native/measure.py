"""What the compiled recorder costs on this machine: measured once, kept beside the library.

A process of its own makes a gloo group of one rank and all-reduces one number, in blocks with
the recorder's kernel and blocks that pass it by: a dispatch key left out in this thread is as if
no kernel were registered, so both kinds of block alternate within the same second and process.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from perdure.files import replace_file

BLOCKS = 200
BLOCK = 50
_TIMEOUT_S = 120.0
_VARIABLES = ("PERDURE_RING", "PERDURE_SOCKET", "PERDURE_RECORDER", "TORCH_DISTRIBUTED_DEBUG")


class Cost(msgspec.Struct, frozen=True):
    """Microseconds of one collective."""

    collective_us: float
    """Added by the recorder: lower quartile of blocks with it less that of blocks without.

    What else runs on the machine only ever adds, so the lower quartile is the quietest figure
    that still rests on many blocks.
    """
    spread_us: float
    """The same difference between blocks without it: below this nothing is resolved."""
    bare_us: float
    """The collective itself."""

    def __str__(self) -> str:
        """Return the figure, or that it is lost in the machine's noise."""
        if self.collective_us <= self.spread_us:
            return f"below {self.spread_us:.1f} µs a collective: not resolved on this machine"
        return f"{self.collective_us:.1f} µs a collective of {self.bare_us:.0f} µs"


def load_cost(library: Path) -> Cost | None:
    """Return what was measured when `library` was built; None where it was not built here."""
    try:
        return msgspec.json.decode(library.with_suffix(".json").read_bytes(), type=Cost)
    except (OSError, msgspec.MsgspecError):
        return None


def measure_cost(library: Path) -> Cost | str:
    """Measure `library`, a few seconds, and keep the figure; return why not where it fails."""
    environ = {name: value for name, value in os.environ.items() if name not in _VARIABLES}
    command = [sys.executable, "-P", "-m", "perdure.worker.native.measure", str(library)]
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"its self-test took longer than {_TIMEOUT_S:.0f} s"
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        return lines[-1] if lines else f"its self-test ended with {done.returncode}"
    cost = msgspec.json.decode(done.stdout, type=Cost)
    with contextlib.suppress(OSError):  # A wheel's directory may not be ours to write in.
        replace_file(library.with_suffix(".json"), msgspec.json.encode(cost))
    return cost


def _measure(library: str) -> Cost:
    """Measure in this process.

    Raises:
        RuntimeError: it records nothing, or something else than what was done.
    """
    import time

    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    from perdure.model.ring import parse_ring
    from perdure.worker.native.recorder import NativeLibrary
    from perdure.worker.ring import RingWriter

    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect)
    number = torch.ones(1)

    def time_block() -> float:
        begun = time.perf_counter()
        for _ in range(BLOCK):
            dist.all_reduce(number)
        return (time.perf_counter() - begun) / BLOCK * 1e6

    def time_bare() -> float:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return time_block()

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "ring")
        RingWriter.create(path, rank=0, generation=0).close()
        native = NativeLibrary(Path(library))
        native.attach(path)
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        for _ in range(3):  # Warm.
            time_block()
            time_bare()
        rows = [(time_bare(), time_block(), time_bare()) for _ in range(BLOCKS)]
        found = parse_ring(Path(path).read_bytes(), 0.0).num_spans
        dist.destroy_process_group()
    expected = (BLOCKS + 3) * BLOCK
    if found != expected:
        raise RuntimeError(f"it recorded {found} of {expected} collectives")
    before, on, after = (statistics.quantiles(column, n=4)[0] for column in zip(*rows, strict=True))
    bare = (before + after) / 2
    return Cost(
        collective_us=round(on - bare, 2),
        spread_us=round(abs(before - after), 2),
        bare_us=round(bare, 1),
    )


if __name__ == "__main__":
    print(json.dumps(msgspec.to_builtins(_measure(sys.argv[1]))))
