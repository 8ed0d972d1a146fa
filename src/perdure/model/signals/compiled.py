"""What agents say to each other of what torch has compiled: where it is sent, and what there is.

The question and its answer go over the bus, which knows who speaks; the files over a connection of
their own, which does not. What comes that way is believed by a key that only the answer had.
"""

import msgspec


def subject_compiled(job: str, node: int | str, asker: int | str) -> str:
    """Requests of `asker` to the agent of `node`: a `CompiledAsk`, answered by `CompiledDoor`."""
    return f"perdure.{job.replace('.', '_')}.compiled.{node}.{asker}"


class CompiledAsk(msgspec.Struct, frozen=True):
    """Open a door to what your node's ranks have compiled."""

    fingerprint: dict[str, str]
    """What its ranks compile with and for; where that is not the same, nothing is sent."""
    place: str = ""
    """Path of its cache."""
    folder_id: str = ""
    """Names that folder on the machines of the job; a folder that both have is not sent."""


class CompiledDoor(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where to connect; `error` where no door was opened."""

    fingerprint: dict[str, str] = {}
    host: str = ""
    port: int = 0
    token: str = ""
    key: str = ""
    """Of the hashes of all that is sent; it never goes over that connection."""
    error: str = ""
    busy: bool = False
    """Another question may be answered by a door."""


class CompiledFile(msgspec.Struct, frozen=True, array_like=True):
    """One file that may be sent; its name begins with that of a folder of the cache."""

    name: str
    size: int


def explain_difference(mine: dict[str, str], theirs: dict[str, str]) -> str:
    """Return why what was compiled with `theirs` is not for who has `mine`; empty where it is.

    >>> explain_difference({"torch": "2.13.0"}, {"torch": "2.12.0"})
    'torch is 2.12.0 there and 2.13.0 here'
    """
    return "; ".join(
        f"{name} is {theirs.get(name) or 'none'} there and {mine.get(name) or 'none'} here"
        for name in sorted({*mine, *theirs})
        if mine.get(name, "") != theirs.get(name, "")
    )
