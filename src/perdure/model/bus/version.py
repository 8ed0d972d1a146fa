"""What two parts of different versions have to have in common.

`PROTOCOL` is a number that grows whenever an older part could not work with a newer one: a subject
that is named otherwise, a message that has to be answered. A part speaks all numbers from
`PROTOCOL_MIN` on. A field, or a type of event or order, that an older part does not know is no
reason: fields are passed over, events and orders dropped.

Protocols 0 and 1 were those of perdure 0.1.
"""

import msgspec

from perdure.model.errors import PlatformError

PROTOCOL = 2
PROTOCOL_MIN = 2
"""The oldest that this version still speaks."""


class Spoken(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a part speaks. The defaults are those of a part that does not say."""

    protocol: int = 0
    protocol_min: int = 0
    version: str = ""
    """Of perdure, for people."""

    def __str__(self) -> str:
        """Return it in words, such as `perdure 0.2.0 (protocol 1)`."""
        low, high = self.protocol_min, self.protocol
        numbers = f"protocol {high}" if low >= high else f"protocols {low} to {high}"
        return f"perdure {self.version or 'of no version'} ({numbers})"


def can_talk(mine: Spoken, theirs: Spoken) -> bool:
    """Return whether there is a number that both speak."""
    low = max(mine.protocol_min, theirs.protocol_min)
    return low <= min(mine.protocol, theirs.protocol)


def check_spoken(mine: Spoken, theirs: Spoken, who: str) -> None:
    """Return where this version and that of `who` can work together.

    Raises:
        PlatformError: they cannot.
    """
    if not can_talk(mine, theirs):
        where = "here" if mine.protocol < theirs.protocol_min else f"where {who} runs"
        raise PlatformError(
            f"{who} runs {theirs}, and this is {mine}: they do not work together",
            hint=f"install the newer one {where}, and start it anew",
        )


def check_journal(mine: Spoken, written_by: Spoken) -> None:
    """Return where a controller of this version can go on with a journal.

    Raises:
        PlatformError: it was written by one that leaves out what this one needs.
    """
    if written_by.protocol_min > mine.protocol:
        raise PlatformError(
            f"this journal was written by {written_by}, and this is {mine}",
            hint="go on with the newer one, or run the job under another name",
        )
