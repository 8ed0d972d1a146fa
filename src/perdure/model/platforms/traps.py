"""A trap of a platform, and what is done about it: the record behind `perdure doctor`."""

from typing import Literal

import msgspec

When = Literal["prevented", "detected", "watched", "diagnosed"]
"""`prevented`: what perdure renders or runs does not fall into it. `detected`: looked for before
a launch. `watched`: looked for while the job runs. `diagnosed`: named after a death."""
CheckState = Literal["ok", "degraded", "missing", "note"]
Scope = Literal["any", "ssh", "slurm", "kubernetes", "notebook", "nodes"]


class Trap(msgspec.Struct, frozen=True):
    """One trap. `how` names, for each time at which it is met, what does it."""

    id: str
    title: str
    scope: Scope
    how: dict[When, str]
    """Time -> `module:name` of what meets it there."""
    mend: str


class Symptom(msgspec.Struct, frozen=True):
    """Words in what a dead process left, and the trap that they speak of."""

    trap: str
    pattern: str
    """A regular expression."""
    says: str
    """In one sentence, for the person who finds it in the morning."""


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that perdure needs or profits from."""

    name: str
    state: CheckState
    """`degraded`: perdure goes on without it, and says what it then cannot do; `missing`: a job
    cannot run; `note`: neither good nor bad."""
    evidence: str
    """What was looked at, and what it said."""
    mend: str = ""
    """What to do about it; empty where nothing needs to be done."""
