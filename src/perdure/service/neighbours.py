"""Parts of other versions: they work together, or say at once that they do not."""

from perdure import __version__
from perdure.model.bus.version import Spoken, can_talk, make_spoken, name_older
from perdure.model.errors import PlatformError

MINE = make_spoken(__version__)


def check_spoken(theirs: Spoken, who: str) -> None:
    """Return where this version and `theirs` can work together.

    Raises:
        PlatformError: they cannot.
    """
    mine = MINE
    if not can_talk(mine, theirs):
        where = "here" if name_older(mine, theirs) == "mine" else f"where {who} runs"
        raise PlatformError(
            f"{who} runs {theirs}, and this is {mine}: they do not work together",
            hint=f"install the newer one {where}, and start it anew",
        )


def check_journal(written_by: Spoken) -> None:
    """Return where a controller of this version can go on with a journal.

    Raises:
        PlatformError: it was written by one that leaves out what this one needs.
    """
    if written_by.protocol_min > MINE.protocol:
        raise PlatformError(
            f"this journal was written by {written_by}, and this is {MINE}",
            hint="go on with the newer one, or run the job under another name",
        )
