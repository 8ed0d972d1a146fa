"""All traps, in one table."""

from perdure.model.platforms.traps import Trap
from perdure.traps.platforms import GENERIC, KUBERNETES, NOTEBOOK, SLURM
from perdure.traps.universal import NODES, UNIVERSAL, Row

TRAPS: tuple[Row, ...] = (*GENERIC, *SLURM, *KUBERNETES, *NOTEBOOK, *UNIVERSAL, *NODES)
_BY_ID = {trap.id: trap for trap, _ in TRAPS}


def find_trap(id: str) -> Trap:
    """Return the trap of that id.

    Raises:
        KeyError: there is none.
    """
    return _BY_ID[id]


def render_table() -> str:
    """Return the table of `docs/doctor.md`."""
    lines = [
        "| id | trap | prevented | detected | watched | diagnosed | mend |",
        "|---|---|---|---|---|---|---|",
    ]
    for trap, _ in TRAPS:
        times = [_show(trap.how.get(when, "")) for when in ("prevented", "detected")]
        times += [_show(trap.how.get(when, "")) for when in ("watched", "diagnosed")]
        mend = trap.mend + (" (`--fix`)" if trap.fix else "")
        if trap.lack:
            mend += f". **Not yet: {trap.lack}**"
        cells = [trap.id, trap.title, *times, mend]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    met = sum(bool(trap.how) for trap, _ in TRAPS)
    lines += ["", f"{met} of {len(TRAPS)} are met somewhere; {len(TRAPS) - met} are not yet."]
    return "\n".join(lines) + "\n"


def _show(how: str) -> str:
    module, _, name = how.partition(":")
    return f"`{module.removeprefix('perdure.')}.{name}`" if how else ""
