"""What others have written as cells and lines of the screen, and the tables that they stand in.

Textual takes a string for markup, and a terminal takes some characters for commands. So whatever
comes from a job goes through `plain` or `plain_lines`, and is neither.
"""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

from rich.cells import cell_len
from rich.text import Text
from textual.binding import Binding
from textual.widgets import DataTable

from perdure.model.input.plain import REASON_MAX, shorten_line, show_controls

TEXT_MAX = 40_000
"""Characters of a text that is scrolled; `perdure diagnose` and `perdure logs` have the rest."""


def plain(text: object, style: str = "", *, right: bool = False) -> Text:
    """Return a text as one line that is no markup and does nothing to the terminal."""
    line = show_controls(shorten_line(str(text), REASON_MAX)).replace("\n", " ")
    return Text(
        line, style, justify="right" if right else "left", no_wrap=True, overflow="ellipsis", end=""
    )


def plain_lines(lines: Iterable[tuple[str, str]]) -> Text:
    """Return (text, style) as one text; of a very long one, its beginning."""
    shown = Text(end="")
    for text, style in lines:
        room = TEXT_MAX - len(shown)
        shown.append(show_controls(text[: max(0, room)]) + "\n", style)
        if len(text) > room:
            shown.append("... and more: perdure diagnose has it\n", "dim")
            break
    return shown


class Row(NamedTuple):
    """One row of a table."""

    key: str
    """What it is of, such as `node:3`; of one table no two are alike."""
    cells: tuple[str, ...]
    style: str = ""
    item: Any = None
    """What is shown of it, once it is entered."""


class Rows(DataTable[Text]):
    """A table that is told all of its rows at each look, and touches those that have changed."""

    BINDINGS: ClassVar[Any] = [
        Binding("j", "cursor_down", "down", show=False),
        Binding("k", "cursor_up", "up", show=False),
        Binding("g", "scroll_top", "first", show=False),
        Binding("G", "scroll_bottom", "last", show=False),
    ]

    def __init__(self, *heads: str, right: Sequence[str] = (), id: str) -> None:
        """Have columns named `heads`; those in `right` are numbers."""
        super().__init__(id=id, cursor_type="row")
        self._heads, self._right = heads, frozenset(right)
        self._told: Sequence[Row] = ()
        self._shown: dict[str, Row] = {}
        self._wanted = ""

    def on_mount(self) -> None:
        """Make the columns."""
        for head in self._heads:
            self.add_column(Text(head, justify="right" if head in self._right else "left"))

    @property
    def chosen(self) -> Row | None:
        """The row under the cursor."""
        if not self._shown or not self.is_valid_row_index(self.cursor_row):
            return None
        key = self.coordinate_to_cell_key(self.cursor_coordinate).row_key.value
        return self._shown.get(key or "")

    def find(self, key: str | None) -> Row | None:
        """Return the row of a key, where it is shown."""
        return self._shown.get(key or "")

    def search(self, wanted: str) -> None:
        """Show only rows with `wanted` in one of their cells, whatever their case."""
        self._wanted = wanted.lower()
        self.tell(self._told)

    def tell(self, rows: Sequence[Row]) -> None:
        """Show `rows`; the cursor stays on the row that it is on, where that is still there."""
        self._told = rows
        wanted = self._wanted
        found = {r.key: r for r in rows if not wanted or wanted in "\0".join(r.cells).lower()}
        if list(found) == list(self._shown):
            self._change(found)
            self._shown = found
            return
        chosen, at, left = self.chosen, self.cursor_row, self.scroll_x
        self.clear()
        self._shown = found
        for column in self.ordered_columns:
            column.content_width = cell_len(column.label.plain)
        for row in found.values():
            cells = self._draw(row)
            self.add_row(*cells, key=row.key)
            for column, cell in zip(self.ordered_columns, cells, strict=True):
                # Textual does so as well, once it is idle: a busy machine may not be.
                column.content_width = max(column.content_width, cell_len(cell.plain))
        if chosen is not None and chosen.key in found:
            at = list(found).index(chosen.key)
        self.move_cursor(row=min(at, max(0, len(found) - 1)), animate=False)
        self.scroll_to(x=left, animate=False)

    def _change(self, found: dict[str, Row]) -> None:
        for key, row in found.items():
            before = self._shown[key]
            if row.cells == before.cells and row.style == before.style:
                continue
            for index, column in enumerate(self.ordered_columns):
                cell = row.cells[index]
                if cell != before.cells[index] or row.style != before.style:
                    text = self._draw_cell(index, cell, row.style)
                    wider = cell_len(text.plain) > column.content_width
                    self.update_cell(key, column.key, text, update_width=wider)

    def _draw(self, row: Row) -> list[Text]:
        return [self._draw_cell(index, cell, row.style) for index, cell in enumerate(row.cells)]

    def _draw_cell(self, index: int, cell: str, style: str) -> Text:
        return plain(cell, style, right=self._heads[index] in self._right)
