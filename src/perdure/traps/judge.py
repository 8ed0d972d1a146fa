"""Facts and the table of traps, to the rows that `perdure doctor` shows."""

from perdure.model.platforms.box import BoxFacts
from perdure.model.platforms.health import Check
from perdure.model.platforms.traps import Scope, Trap
from perdure.traps.table import TRAPS


def judge(facts: BoxFacts, scopes: frozenset[Scope]) -> tuple[tuple[Trap, Check], ...]:
    """Return what the checks of all traps in `scopes` say, in the table's order."""
    rows = []
    for trap, check in TRAPS:
        if check is None or trap.scope not in scopes:
            continue
        found = check(facts)
        if found is not None:
            state, evidence = found
            rows.append(
                (trap, Check(name=trap.title, state=state, evidence=evidence, mend=trap.mend))
            )
    return tuple(rows)
