"""Live configuration: the keys that may change while a job runs, and the changes made to them."""

from typing import Any, Literal

import msgspec

Value = bool | int | float | str
"""What a key may hold."""


class KeySpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One key, as the script (or perdure itself) declares it."""

    name: str
    type: Literal["bool", "int", "float", "str"]
    default: Value
    min: float | None = None
    max: float | None = None
    choices: tuple[Value, ...] = ()
    note: str = ""
    """What it does, in one line."""
    owner: Literal["script", "perdure"] = "script"


class Change(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One agreed change: the same values on every rank from the beginning of step `step`."""

    epoch: int
    """Numbers the changes of a job from 1; the epoch in force is part of every checkpoint."""
    step: int
    """The first step that runs with it."""
    values: dict[str, Any]
    before: dict[str, Any] = {}
    """What it replaced: what `--undo` sets again."""
    undoes: int = 0
    """The epoch that it takes back; 0 for none."""
    who: str = ""
    why: str = ""
    at_s: float = 0.0
