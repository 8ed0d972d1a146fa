"""Answers to operators: given once, and kept for a client that asks again."""

from typing import Any

from perdure.control.job import Answer, JobState
from perdure.model.actions import AnswerCommand, AnyAction


def answer(
    state: JobState, id_: str, ok: bool, reason: str, result: dict[str, Any]
) -> list[AnyAction]:
    """Close a command with its answer, which is kept for a client that asks again."""
    state.commands.pop(id_, None)
    state.answered[id_] = Answer(ok, reason, result)
    return [AnswerCommand(id=id_, ok=ok, result=result, reason=reason)]


def answer_again(state: JobState, id_: str) -> list[AnyAction]:
    """Return the answer that a command has got, for a client that asks once more."""
    ok, reason, result = state.answered[id_]
    return [AnswerCommand(id=id_, ok=ok, result=result, reason=reason)]


def answer_open(
    state: JobState, id_: str, ok: bool, reason: str, result: dict[str, Any]
) -> list[AnyAction]:
    """Close a command if it is still open; otherwise do nothing."""
    return answer(state, id_, ok, reason, result) if id_ in state.commands else []
