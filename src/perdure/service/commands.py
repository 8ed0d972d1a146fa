"""A command to a job's controller, asked again until it is answered."""

import asyncio
import time

from perdure.adapters.nats import NatsBus
from perdure.model.bus.wire import Command, CommandReply, subject_commands
from perdure.model.codec import decode, encode
from perdure.model.errors import PlatformError, RequestError
from perdure.model.paths import JobPaths
from perdure.service.jobfiles import is_alive, load_endpoint

_ATTEMPT_S = 5.0
_AGAIN_S = 0.3


def ask_controller(
    job: str, paths: JobPaths, command: Command, *, timeout_s: float
) -> CommandReply:
    """Return the controller's answer; while it is being restarted it is asked again.

    Raises:
        PlatformError: no answer in `timeout_s`, or the job has ended.
    """
    return asyncio.run(_ask(job, paths, command, timeout_s))


async def _ask(job: str, paths: JobPaths, command: Command, timeout_s: float) -> CommandReply:
    deadline = time.monotonic() + timeout_s
    endpoint = load_endpoint(paths)
    bus = await NatsBus.connect(endpoint, name="perdure cli", timeout_s=min(10.0, timeout_s))
    try:
        while True:
            left_s = deadline - time.monotonic()
            try:
                data = await bus.request(
                    subject_commands(job),
                    encode(command),
                    timeout_s=max(0.1, min(_ATTEMPT_S, left_s)),
                )
                reply: CommandReply = decode(data, CommandReply)
                return reply
            except RequestError as error:
                if time.monotonic() >= deadline or not is_alive(paths):
                    raise PlatformError(
                        f"no answer from the controller of `{job}`: {error}",
                        hint=f"it may still happen: perdure events {job}; logs are in {paths.logs}",
                    ) from error
                await asyncio.sleep(_AGAIN_S)
    finally:
        await bus.close()
