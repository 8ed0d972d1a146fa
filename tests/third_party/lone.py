"""A rank in the test's own process: perdure's real loop and checkpoints, no job around it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from perdure.adapters.rings import read_ring
from perdure.model.codec import encode
from perdure.model.job import CheckpointConfig, JobSpec
from perdure.worker import attach
from perdure.worker import run as run_module
from perdure.worker.attach import Attachment
from perdure.worker.recording.stages import StepStamps
from perdure.worker.ring import RingWriter
from perdure.worker.run import Run
from perdure.worker.steering.config import Config
from tests.rings import read_stages


class Killed(Exception):
    """Ends a training in the middle of a step, as a kill would."""


def join(home: Path, patch: pytest.MonkeyPatch, every_steps: int, generation: int = 0) -> Run:
    """Let `perdure.init()` return a run that saves under `home`, as a new process would have it."""
    home.mkdir(exist_ok=True)
    spec = JobSpec(script="", checkpoint=CheckpointConfig(every_steps=every_steps))
    (home / "spec").write_bytes(encode(spec))
    patch.setenv("PERDURE_SPEC", str(home / "spec"))
    patch.setenv("PERDURE_CHECKPOINT_URL", str(home / "checkpoints"))
    ring = RingWriter.create(str(home / f"{generation}.ring"), rank=0, generation=generation)
    run = Run(Config(), Attachment(ring))
    patch.setattr(run_module, "_run", (os.getpid(), run))
    return run


class NeverBlocked:
    """A recorder of a rank that is alone."""

    def blocked_ns(self) -> int:
        return 0

    def begin_backward(self) -> None:
        pass

    def end_backward(self, began: int) -> int:
        return 0


def stamp_stages(run: Run) -> Callable[[], list[float]]:
    """Have the steps of `run` go into its ring; return what reads the work of each from there."""
    assert run.loop is not None
    attachment = run.loop._attachment
    attachment.stages = StepStamps(attachment.ring, NeverBlocked())
    return lambda: [stages.work for stages in read_stages(attachment.ring.path, 0.0)]


class DeclaredPhases:
    """What the ring says of busy phases at moments that have a name."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.phases: dict[str, set[str]] = {}

    def __call__(self, moment: str) -> None:
        self.phases.setdefault(moment, set()).add(self.phase())

    def phase(self) -> str:
        reading = read_ring(self.path, 0.0)
        assert reading is not None
        phase = reading.busy_phase
        return "" if phase is None else f"{phase.name} {phase.until_s - phase.since_s:.0f}"


def declared_phases(path: Path, patch: pytest.MonkeyPatch, run: Run) -> DeclaredPhases:
    """Let this process be the rank of `run`, with the ring at `path`."""
    assert run.loop is not None
    patch.setattr(attach, "_attachment", run.loop._attachment)
    return DeclaredPhases(path)
