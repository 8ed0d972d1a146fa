"""A command to a job's controller, asked again until it is answered.

An answer may end the job, and its server with it before the answer is here: then it is read where
it was journaled.
"""

import asyncio
import contextlib
import time

from perdure.adapters.nats import NatsBus
from perdure.model.bus.wire import Command, CommandReply, subject_commands
from perdure.model.codec import decode, encode
from perdure.model.errors import PlatformError, ProtocolError, RequestError
from perdure.model.events import Decision
from perdure.model.orders import AnswerCommand
from perdure.model.paths import JobPaths
from perdure.service.jobfiles import load_endpoint, read_last_entries
from perdure.service.jobfolders import is_alive

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
                known = _read_answer(paths, command.id)
                if known is not None:
                    return known
                if not is_alive(paths):
                    raise PlatformError(
                        f"job `{job}` has ended without an answer", hint=f"perdure status {job}"
                    ) from error
                if time.monotonic() >= deadline:
                    raise PlatformError(
                        f"no answer from the controller of `{job}`: {error}",
                        hint=f"it may still happen: perdure events {job}; logs are in {paths.logs}",
                    ) from error
                await asyncio.sleep(_AGAIN_S)
    finally:
        await bus.close()


def _read_answer(paths: JobPaths, id_: str) -> CommandReply | None:
    """Return what the job's journal says that a command was answered; None where it does not."""
    words = {AnswerCommand(id=id_, ok=ok, reason="").describe(): ok for ok in (True, False)}
    with contextlib.suppress(OSError, ProtocolError):
        for entry in reversed(read_last_entries(paths)):
            told = entry.body
            if (
                isinstance(told, Decision)
                and told.action == "AnswerCommand"
                and told.summary in words
            ):
                return CommandReply(id_, words[told.summary], told.reason, told.result)
    return None
