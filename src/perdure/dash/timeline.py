"""A step of a pipeline as text: a line for each device, time to the right."""

import math
from collections.abc import Sequence

from perdure.model.planning.pipeline import Timeline

_NAMES = "0123456789abcdefghijklmnopqrstuvwxyz"
_IDLE, _WEIGHTS, _REDUCE, _UPDATE = "·", "w", "=", "+"
LEGEND = (
    f"0-9a-z forward, ▒ before its backward, {_WEIGHTS} weights, {_REDUCE} all-reduce, {_IDLE} idle"
)


def render_timeline(line: Timeline, names: Sequence[str], width: int = 100) -> str:
    """Return the step in at most `width` columns."""
    left = max(map(len, names), default=0) + 2
    room = max(10, width - left)
    scale = room / line.step_s if line.step_s else 0.0
    rows = []
    for name, cell in zip(names, line.cells, strict=True):
        row = [_IDLE] * room
        for entry in cell.executed:
            mark = _NAMES[entry.action.micro_batch % len(_NAMES)]
            begin, end = _span(entry.begin_s, entry.end_s, scale, room)
            if entry.action.kind == "F":
                row[begin:end] = mark * (end - begin)
            elif entry.action.kind == "B":
                row[begin:end] = mark.rjust(end - begin, "▒")
            else:
                row[begin:end] = _WEIGHTS * (end - begin)
        end = math.floor(cell.end_s * scale)
        if cell.update_s:
            begin, _ = _span(cell.end_s - cell.update_s, cell.end_s, scale, room)
            row[begin:end] = _UPDATE * (end - begin)
            end = begin
        if cell.reduce_s:
            begin, _ = _span((end / scale) - cell.reduce_s, end / scale, scale, room)
            row[begin:end] = _REDUCE * (end - begin)
        rows.append(name.ljust(left) + "".join(row))
    return "\n".join(rows)


def _span(begin_s: float, end_s: float, scale: float, room: int) -> tuple[int, int]:
    """Return the columns of a time, at least one."""
    begin = min(room - 1, max(0, round(begin_s * scale)))
    return begin, max(begin + 1, min(room, round(end_s * scale)))
