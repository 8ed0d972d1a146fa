"""What two parts of different versions have to have in common.

`PROTOCOL` is a number that grows whenever an older part could not work with a newer one: a subject
that is named otherwise, a message that has to be answered. A part speaks all numbers from
`PROTOCOL_MIN` on. A field, or a type of event or order, that an older part does not know is no
reason: fields are passed over, events and orders set aside (`MessagesSetAside`).

    protocol   perdure   what is new
    0          0.1       events and beats on one subject each
    1          later     subjects carry the node; invitations have an id
    2          later     what is ordered of a node is a list of tagged orders
"""

import msgspec

PROTOCOL = 2
PROTOCOL_MIN = 2
"""The oldest that this version still speaks."""


class Spoken(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a part speaks. The defaults are those of 0.1, which did not say."""

    protocol: int = 0
    protocol_min: int = 0
    version: str = ""
    """Of perdure, for people."""

    def __str__(self) -> str:
        """Return it in words, such as `perdure 0.2.0 (protocol 1)`."""
        low, high = self.protocol_min, self.protocol
        numbers = f"protocol {high}" if low >= high else f"protocols {low} to {high}"
        return f"perdure {self.version or '0.1'} ({numbers})"


def make_spoken(version: str) -> Spoken:
    """Return what this version speaks."""
    return Spoken(PROTOCOL, PROTOCOL_MIN, version)


def can_talk(mine: Spoken, theirs: Spoken) -> bool:
    """Return whether there is a number that both speak."""
    low = max(mine.protocol_min, theirs.protocol_min)
    return low <= min(mine.protocol, theirs.protocol)


def name_older(mine: Spoken, theirs: Spoken) -> str:
    """Return which of two that cannot talk has to be upgraded: `mine` or `theirs`."""
    return "mine" if mine.protocol < theirs.protocol_min else "theirs"
