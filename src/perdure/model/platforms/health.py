"""What `perdure doctor` finds: one check, its evidence, and how to mend it."""

from typing import Literal

import msgspec


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that perdure needs or profits from."""

    name: str
    state: Literal["ok", "degraded", "missing", "note"]
    """`degraded`: perdure goes on without it, and says what it then cannot do; `missing`: a job
    cannot run; `note`: neither good nor bad."""
    evidence: str
    """What was looked at, and what it said."""
    mend: str = ""
    """What to do about it; empty where nothing needs to be done."""
