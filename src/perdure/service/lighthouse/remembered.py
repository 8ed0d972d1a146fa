"""What a lighthouse leaves to the next one."""

import msgspec

from perdure.model.bus.lighthouse import Member
from perdure.model.orders import ReplicaGroup


class LighthouseFile(msgspec.Struct, frozen=True):
    """`lighthouse.json`: what the next lighthouse has to know."""

    port: int
    ids_until: int = 0
    quorum_id: int = 0
    members: tuple[Member, ...] = ()
    homes: dict[str, tuple[int, int]] = {}
    """Member -> its group, and the generation of its processes."""
    groups: tuple[ReplicaGroup, ...] = ()
    """The controller's newest word on who is held, so that no spare slips in meanwhile."""
    silences: tuple[float, ...] = ()
    """How long members were late so far, seconds: what is patience for."""
    names: dict[str, int] = {}
    """Numbers of groups that others have started, by their names."""
    lives: int = 0
    """Of these groups so far."""
    line: str = ""
    """What their ranks name with each hello: lives of an earlier run had other numbers."""
