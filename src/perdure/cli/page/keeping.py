"""Keeps what a command has found for `perdure dash`."""

from typing import TYPE_CHECKING

from perdure.cli.speech.say import note
from perdure.model.errors import PerdureError
from perdure.service.jobfolders import resolve_home

if TYPE_CHECKING:
    from perdure_lab.results import Result


def keep(result: "Result") -> None:
    """Keep a result; where that cannot be, say so, and hold up nothing."""
    from perdure.service.results import keep_result

    try:
        keep_result(resolve_home(), result)
    except PerdureError as error:  # Also of a PERDURE_HOME that is none.
        note(f"not kept for `perdure dash`: {error.message}")
