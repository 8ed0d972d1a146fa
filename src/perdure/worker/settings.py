"""What a rank knows of its job from the files and variables that its agent has prepared.

Of it, it takes over changes agreed by older generations, and perdure's own keys.
"""

import functools
import logging
import os
from pathlib import Path
from typing import Any

from perdure.model.job import CheckpointConfig, JobSpec
from perdure.model.records import decode_record
from perdure.model.steering import KeySpec, Steering
from perdure.plan.settings import LOG_LEVELS
from perdure.worker.steering.boundary import Agreed, BoundaryGate
from perdure.worker.steering.config import Config

OWN = "perdure."
"""What the names of objects begin with that perdure itself registers."""


def read_steering() -> Steering:
    """Return what the agent has written down for this generation."""
    path = os.environ.get("PERDURE_STEERING", "")
    return decode_record(Path(path).read_bytes(), Steering) if path else Steering()


def plan_steering(gate: BoundaryGate, config: Config, committed: int, steering: Steering) -> None:
    """Plan what was agreed before this generation and its checkpoint has not seen.

    A change whose step is past is in force at once; others come at their very step, so that a
    step that is made again is made with the values of the first time.
    """
    seen = config.epoch
    for change in steering.changes:
        if change.step > committed:
            gate.plan(Agreed(f"e{change.epoch}", "set", change.step, change))
        elif change.epoch > seen:
            config.apply(change)
    if steering.pause:
        gate.plan(Agreed(steering.pause, "pause", max(steering.pause_step, committed)))


def declare_own_keys(config: Config, checkpoint: CheckpointConfig, loop: Any) -> None:
    """Declare perdure's own keys that ranks apply: how often to save, and the log level."""

    def set_log_level(value: str) -> None:
        if value:
            logging.getLogger().setLevel(value.upper())

    every = KeySpec(
        name="checkpoint.every_steps", type="int", default=checkpoint.every_steps, min=0
    )
    level = KeySpec(name="log_level", type="str", default="", choices=LOG_LEVELS)
    config.declare_own(every, functools.partial(setattr, loop, "every_steps"))
    config.declare_own(level, set_log_level)


def read_spec() -> JobSpec:
    """Return the job's specification; the defaults where perdure has not started this process.

    Raises:
        OSError: it cannot be read.
        ProtocolError: it is none.
    """
    path = os.environ.get("PERDURE_SPEC", "")
    return decode_record(Path(path).read_bytes(), JobSpec) if path else JobSpec(script="")


def read_checkpoint_url(config: CheckpointConfig) -> str:
    """Return where the job's checkpoints lie; empty where that is not known."""
    return os.environ.get("PERDURE_CHECKPOINT_URL", "") or config.url
