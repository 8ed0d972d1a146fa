"""The dialog before each act: what it would do, in the controller's words; only then it is done."""

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import msgspec
from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Static

from perdure.cli.jobs import Job
from perdure.cli.looking.apart import run_apart
from perdure.cli.page.acts import Act
from perdure.cli.watching.looking import describe_error
from perdure.cli.watching.table import plain
from perdure.model.errors import PerdureError

Asks = Callable[[Job, Act], str]
"""What carries an act to a job's controller, and returns what that says: `page.acts.ask`."""
_TYPED_S = 0.3
"""After the last key of a value, until it is asked what that would do."""


class Question(NamedTuple):
    """An act as it is asked about."""

    title: str
    act: Act
    field: str = ""
    """What of the act is typed: `value` or `text`; empty: nothing is left open."""
    grave: bool = False
    """It ends something: the answer at hand is no."""


class AskScreen(ModalScreen[Act | None]):
    """Shows what an act would do; is left with the act once it is confirmed, else with None."""

    BINDINGS: ClassVar[Any] = [
        Binding("escape,n", "no", "no"),
        Binding("y", "yes", "yes"),
    ]

    def __init__(self, job: Job, question: Question, asks: Asks) -> None:
        """Ask about `question` of a job."""
        super().__init__()
        self._job, self._question, self._asks = job, question, asks
        self._act = question.act

    def compose(self) -> ComposeResult:
        """Title, what is typed, what the controller says, and the two answers."""
        with Vertical(id="ask"):
            yield Static(plain(self._question.title, "bold"), id="ask-title")
            if self._question.field:
                yield Input(getattr(self._act, self._question.field), id="ask-field")
            yield Static("", id="ask-said", markup=False)
            with Horizontal(id="ask-answers"):
                grave = self._question.grave
                kind: Any = "error" if grave else "primary"
                yield Button("Do it (y)", id="ask-yes", variant=kind, disabled=True)
                yield Button("Cancel (n)", id="ask-no")

    def on_mount(self) -> None:
        """Ask the controller."""
        if self._question.field:
            self.query_one("#ask-field").focus()
        else:
            self.query_one("#ask-no").focus()
        self._preview(0.0)

    @on(Input.Changed, "#ask-field")
    def _type(self, event: Input.Changed) -> None:
        changed: Any = {self._question.field: event.value}
        self._act = msgspec.structs.replace(self._act, **changed)
        self._preview(_TYPED_S)

    @work(exclusive=True)
    async def _preview(self, pause_s: float) -> None:
        yes, said = self.query_one("#ask-yes", Button), self.query_one("#ask-said", Static)
        yes.disabled = True
        said.update(plain("The controller is asked what that would do.", "dim"))
        await asyncio.sleep(pause_s)
        try:
            text = await run_apart(self._asks, self._job, self._act)
        except (PerdureError, OSError) as error:
            said.update(plain(describe_error(error), "bold red"))
            return
        said.update(plain(text))
        yes.disabled = False
        if not (self._question.field or self._question.grave):
            yes.focus()

    @on(Input.Submitted, "#ask-field")
    def _go_on(self) -> None:
        yes = self.query_one("#ask-yes", Button)
        if not yes.disabled:
            yes.focus()

    @on(Button.Pressed, "#ask-yes")
    def action_yes(self) -> None:
        """Confirm it, where it may be done."""
        if not self.query_one("#ask-yes", Button).disabled:
            self.dismiss(msgspec.structs.replace(self._act, preview=False))

    @on(Button.Pressed, "#ask-no")
    def action_no(self) -> None:
        """Do nothing."""
        self.dismiss(None)
