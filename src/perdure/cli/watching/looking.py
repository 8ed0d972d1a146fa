"""What all screens share: they look again and again in a thread, find by `/`, and say trouble."""

import asyncio
import contextlib
import time
from itertools import zip_longest
from typing import Any, ClassVar

from rich.text import Text
from textual import on, work
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import Input, Static

from perdure.cli.looking.apart import run_apart
from perdure.cli.watching.table import Rows, plain
from perdure.model.errors import PerdureError

_TEXTUALS = ("Focus Next", "Focus Previous", "Copy selected text", "Quit")
_SHARE = 0.2
"""Of the time, at most so much goes into looking."""
_PATIENCE_S = 5.0
"""With one look; then it is said that it takes long."""


def describe_error(error: Exception) -> str:
    """Return an error in words."""
    if isinstance(error, PerdureError):
        return f"{error.message}{f' ({error.hint})' if error.hint else ''}"
    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{error.strerror or error}"
    return f"{type(error).__name__}: {error}"


class LookingScreen(Screen[None]):
    """A screen that is told what `read` returns, for as long as it is there."""

    BINDINGS: ClassVar[Any] = [
        Binding("slash", "find", "find"),
        Binding("escape", "back", "back"),
    ]

    def __init__(self, every: float) -> None:
        """Look each `every` seconds, and more seldom where a look takes long."""
        super().__init__()
        self._every = every
        self._again = asyncio.Event()
        self._texts: dict[str, Text] = {}

    def read(self) -> Any:
        """Return what is to be shown; called in a thread."""
        return None

    def show(self, found: Any) -> None:
        """Show what was read."""

    def search(self, wanted: str) -> None:
        """Show only what has `wanted` in it."""
        for table in self.query(Rows):
            table.search(wanted)

    def on_mount(self) -> None:
        """Begin to look."""
        self._follow()

    def on_screen_resume(self) -> None:
        """Look at once."""
        self._again.set()

    @work
    async def _follow(self) -> None:
        while True:
            begun_s = time.monotonic()
            if self.is_current or self.looks_behind:
                await self._look()
            pause_s = max(self._every, (time.monotonic() - begun_s) * (1 / _SHARE - 1))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._again.wait(), pause_s)
            self._again.clear()

    looks_behind: ClassVar[bool] = False
    """Whether it looks while another screen covers it."""

    async def _look(self) -> None:
        trouble = ""
        try:
            found = await self._read_on()
            if self.query("#trouble"):  # It may have been left meanwhile.
                self.show(found)
        except Exception as error:  # The next look may find it again: a screen outlives a fault.
            trouble = describe_error(error)
        if self.query("#trouble"):
            self.tell_trouble(trouble)

    async def _read_on(self) -> Any:
        """Return what `read` returns; while that takes long, say so: what is seen is old."""
        reading, begun_s = asyncio.ensure_future(run_apart(self.read)), time.monotonic()
        try:
            while not (await asyncio.wait((reading,), timeout=_PATIENCE_S))[0]:
                if self.query("#trouble"):
                    long = f"{time.monotonic() - begun_s:.0f} s"
                    self.tell_trouble(
                        f"not read in {long}: the disk hangs, or there is much to read"
                    )
            return reading.result()
        finally:
            reading.cancel()

    def put(self, name: str, text: Text) -> None:
        """Show a text, once its place is there; one that is shown already costs no new layout."""
        if self._texts.get(name) != text:
            for place in self.query(f"#{name}").results(Static):
                place.update(text)
                self._texts[name] = text

    def tell_trouble(self, text: str) -> None:
        """Show why nothing new is shown; an empty text ends that."""
        self.query_one("#trouble", Static).display = bool(text)
        self.put("trouble", plain(f"Nothing new can be read: {text}", "bold red"))

    # --- finding -----------------------------------------------------------------------------

    def action_find(self) -> None:
        """Ask what is looked for."""
        field = self.query_one("#find", Input)
        field.display = True
        field.focus()

    @on(Input.Changed, "#find")
    def _search(self, event: Input.Changed) -> None:
        self.search(event.value)

    @on(Input.Submitted, "#find")
    def _leave_field(self) -> None:
        self.focus_main()

    def focus_main(self) -> None:
        """Have the keys go to what is shown."""
        tables = [table for table in self.query(Rows) if table.is_on_screen]
        if tables:
            tables[0].focus()

    def end_search(self) -> bool:
        """Show everything again; return whether something was left out."""
        field = self.query_one("#find", Input)
        was = field.display
        field.display = False
        if field.value:
            field.value = ""
            self.search("")
        if was:
            self.focus_main()
        return bool(was)

    def action_back(self) -> None:
        """End the search, else leave the screen."""
        if not self.end_search():
            self.leave()

    def leave(self) -> None:
        """Go back to where this screen was entered from."""
        self.dismiss()

    def list_keys(self) -> list[tuple[str, str]]:
        """Return (key, what it does) of perdure's own keys that may be pressed now."""
        own = (
            (self.app.get_key_display(a.binding), a.binding.description)
            for a in self.active_bindings.values()
            if a.enabled and isinstance(a.node, LookingScreen | App) and not a.binding.system
        )
        return [("enter", "go in"), *((k, text) for k, text in own if text not in _TEXTUALS)]


class KeysScreen(ModalScreen[None]):
    """The keys of the screen below."""

    BINDINGS: ClassVar[Any] = [Binding("escape,question_mark,enter", "dismiss", "close")]

    def __init__(self, keys: list[tuple[str, str]]) -> None:
        """Show `keys`."""
        super().__init__()
        self._keys = keys

    def compose(self) -> ComposeResult:
        """Compose a line a key."""
        with VerticalScroll(id="keys"):
            cells = [f"{key:>6}  {text:<24}" for key, text in self._keys]
            half = (len(cells) + 1) // 2
            columns = zip_longest(cells[:half], cells[half:], fillvalue="")
            yield Static("\n".join(map("".join, columns)), markup=False)


def make_find_field(placeholder: str) -> Input:
    """Return the field of `/`, which is not seen until it is asked for."""
    field = Input(placeholder=placeholder, id="find", max_length=200)
    field.display = False
    return field


def make_trouble() -> Static:
    """Return the line that says why nothing new is shown."""
    line = Static(id="trouble", markup=False)
    line.display = False
    return line
