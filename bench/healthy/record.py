"""Heartbeats of a real job, as its agents send them.

They are taken off the job's own bus, with the controller's login, and written one a line. The
simulated ones of `training` are compared with these, field by field (`tests/contract`).
"""

import asyncio
import os
import time
from collections.abc import Iterable

import msgspec

from perdure.adapters.nats import NatsBus
from perdure.files.private import locate_job
from perdure.model.bus.wire import subject_beats
from perdure.model.codec import decode
from perdure.model.errors import ConfigError
from perdure.model.signals.progress import NodeBeat
from perdure.service.jobfiles import load_endpoint

START_S = 30.0


async def record_beats(home: str, job: str, seconds: float) -> list[NodeBeat]:
    """Return what the agents of `job` send within `seconds` from the first heartbeat on.

    Raises:
        TimeoutError: no heartbeat came within `START_S`.
    """
    paths = locate_job(home, job)
    deadline = time.monotonic() + START_S
    while not os.path.exists(paths.credential("controller")):  # noqa: ASYNC240
        if time.monotonic() > deadline:
            raise TimeoutError(f"the job {job} has not started within {START_S:g} s")
        await asyncio.sleep(0.05)
    try:
        endpoint = load_endpoint(paths, "controller")
    except ConfigError as error:
        raise TimeoutError(error.message) from None
    bus = await NatsBus.connect(endpoint, name="recorder", timeout_s=START_S)
    beats: list[NodeBeat] = []
    first = asyncio.Event()

    def take(data: bytes) -> None:
        beats.append(decode(data, NodeBeat))
        first.set()

    try:
        await bus.subscribe(subject_beats(job, "*"), take)
        await asyncio.wait_for(first.wait(), START_S)
        await asyncio.sleep(seconds)
    finally:
        await bus.close()
    return beats


def list_fields(beats: Iterable[NodeBeat]) -> set[str]:
    """Return the fields of heartbeats that ever hold more than nothing or their default."""
    found: set[str] = set()
    for beat in beats:
        _add_fields("", beat, found)
    return found


def _add_fields(prefix: str, value: object, found: set[str]) -> None:
    assert isinstance(value, msgspec.Struct)
    for field in msgspec.structs.fields(value):
        held = getattr(value, field.name)
        if not held or held == field.default:
            continue
        name = f"{prefix}{field.name}"
        found.add(name)
        for each in held if isinstance(held, tuple) else (held,):
            if isinstance(each, msgspec.Struct):
                _add_fields(f"{name}.", each, found)


def list_step_times(beats: Iterable[NodeBeat]) -> dict[int, list[float]]:
    """Return what each rank's own work took in each step that its heartbeats show, seconds."""
    own: dict[int, list[float]] = {}
    for beat in beats:
        for progress in beat.ranks:
            own.setdefault(progress.rank, []).extend(
                s.data_s + s.forward_s + s.backward_s + s.optimizer_s for s in progress.stages
            )
    return own
