"""Keeps what a command has found for `perdure dash`."""

from perdure.cli.speech.say import note
from perdure.model.errors import PerdureError
from perdure.service.jobfolders import resolve_home
from perdure.service.results import Kept, keep_result


def keep(result: Kept) -> None:
    """Keep a result; where that cannot be, say so, and hold up nothing."""
    try:
        keep_result(resolve_home(), result)
    except PerdureError as error:  # Also of a PERDURE_HOME that is none.
        note(f"not kept for `perdure dash`: {error.message}")
