# ruff: noqa: ASYNC220, ASYNC230, ASYNC240
"""A command whose answer ends the job, and the server with it, is answered all the same."""

import asyncio
import subprocess
from pathlib import Path

import pytest

from perdure.adapters.nats import NatsBus, NatsServer
from perdure.files.private import locate_job
from perdure.model.bus.endpoint import Endpoint
from perdure.model.bus.wire import Command, CommandReply, subject_commands
from perdure.model.codec import decode, encode
from perdure.model.errors import PlatformError
from perdure.model.events import AnyEvent, Decision, JobEnded, JournalEntry
from perdure.model.orders import AnswerCommand
from perdure.model.paths import JobPaths
from perdure.service.commands import ask_controller
from perdure.service.ports import Reply
from tests.journals import render_journal
from tests.waiting import PATIENCE_S

STOP = Command(id="cli-1", kind="stop", who="me")


def journal(paths: JobPaths, answer: AnswerCommand | None) -> None:
    """Write the journal's copy down as the controller does before it answers."""
    bodies: list[AnyEvent | Decision] = [
        JobEnded(status="stopped", exit_code=0, reason="stopped", at_s=1.0)
    ]
    if answer is not None:
        told = Decision(
            action="AnswerCommand",
            summary=answer.describe(),
            reason=answer.reason,
            result=answer.result,
        )
        bodies.insert(0, told)
    entries = [JournalEntry(seq=n, at_s=1.0, body=body) for n, body in enumerate(bodies, 1)]
    Path(paths.journal).write_bytes(render_journal(entries))


async def ask_and_end(tmp_path: Path, answer: AnswerCommand | None) -> CommandReply:
    """Return what is said of a command that a controller takes, and whose server then ends."""
    paths = locate_job(str(tmp_path), "job")
    server = NatsServer(folder=str(tmp_path / "nats"), token="s3cr3t")
    command = server.command()
    with open(tmp_path / "nats.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        server.wait_ready(timeout_s=PATIENCE_S)
        endpoint = Endpoint(url=server.url, token="s3cr3t", clock_offset_s=0.0)
        Path(paths.root).mkdir(parents=True)
        Path(paths.endpoint).write_bytes(encode(endpoint))
        controller = await NatsBus.connect(endpoint, timeout_s=PATIENCE_S)

        def take(data: bytes, _: Reply) -> None:
            assert decode(data, Command) == STOP
            journal(paths, answer)
            process.kill()

        await controller.serve(subject_commands("job"), take)
        try:
            return await asyncio.to_thread(ask_controller, "job", paths, STOP, timeout_s=PATIENCE_S)
        finally:
            await controller.close()
    finally:
        process.kill()
        process.wait()


async def test_the_answer_is_read_from_the_journal_where_the_server_is_gone(
    tmp_path: Path,
) -> None:
    answer = AnswerCommand(id="cli-1", ok=True, result={"step": 7}, reason="stopped")
    assert await ask_and_end(tmp_path, answer) == CommandReply(
        "cli-1", True, "stopped", {"step": 7}
    )


async def test_a_refusal_is_read_as_one(tmp_path: Path) -> None:
    answer = AnswerCommand(id="cli-1", ok=False, reason="no")
    assert await ask_and_end(tmp_path, answer) == CommandReply("cli-1", False, "no")


async def test_what_others_were_answered_is_no_answer(tmp_path: Path) -> None:
    with pytest.raises(PlatformError, match="has ended without an answer"):
        await ask_and_end(tmp_path, AnswerCommand(id="cli-11", ok=True, reason="stopped"))
