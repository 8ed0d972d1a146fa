"""One job: ranks, nodes, devices, incidents, settings, checkpoints, log, time; and its keys.

Where it has replica groups, or stages, they have a tab as well.
"""

import os
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Footer, Static, TabbedContent, TabPane

from perdure.cli.jobs import Job, find_here
from perdure.cli.looking.apart import run_apart
from perdure.cli.page.acts import Act, Asking
from perdure.cli.page.runs import name_run
from perdure.cli.watching import views
from perdure.cli.watching.asking import Asks, AskScreen, Question
from perdure.cli.watching.looking import (
    LookingScreen,
    describe_error,
    make_find_field,
    make_trouble,
)
from perdure.cli.watching.rank import LogTail, RankScreen
from perdure.cli.watching.table import Row, Rows
from perdure.dash.sections import LogLine, Picture
from perdure.model.errors import PerdureError, PlatformError
from perdure.model.report import Snapshot

if TYPE_CHECKING:
    from perdure.cli.page.reading import JobReading
    from perdure.telemetry.series import Series

TABS = (
    "ranks", "nodes", "devices", "incidents", "settings", "checkpoints", "log", "time", "groups",
)  # fmt: skip
_ACTING = ("verb", "move", "kill_rank", "set")
_OF_NODE: dict[Asking, str] = {
    "drain": "Move the ranks off {}?",
    "cordon": "Let {} take no new ranks?",
    "evict": "End the ranks on {} now?",
    "restore": "Let {} run ranks again?",
}
_OF_JOB: dict[Asking, str] = {
    "pause": "Pause the job?",
    "resume": "Let the job go on?",
    "checkpoint": "Save a checkpoint?",
    "note": "Keep a remark in the journal:",
    "undo": "Take the newest change of settings back?",
    "stop": "End the job, after a checkpoint?",
}
_GRAVE = ("stop", "evict", "inject")


class JobScreen(LookingScreen):
    """A job. It looks on while a rank of it, or a dialog, covers it."""

    BINDINGS: ClassVar[Any] = [
        *(
            Binding(str(number), f"tab('{name}')", name, show=False)
            for number, name in enumerate(TABS, 1)
        ),
        Binding("p", "verb('pause')", "pause"),
        Binding("r", "verb('resume')", "resume"),
        Binding("c", "verb('checkpoint')", "checkpoint"),
        Binding("s", "set", "set"),
        Binding("d", "move('drain')", "drain"),
        Binding("K", "kill_rank", "kill a rank"),
        Binding("o", "move('cordon')", "cordon the node", show=False),
        Binding("e", "move('evict')", "evict the node", show=False),
        Binding("R", "move('restore')", "restore the node", show=False),
        Binding("u", "verb('undo')", "undo the newest change", show=False),
        Binding("n", "verb('note')", "keep a remark", show=False),
        Binding("S", "verb('stop')", "stop the job", show=False),
    ]
    looks_behind: ClassVar[bool] = True

    def __init__(self, job: Job, every: float, asks: Asks, tab: str = "") -> None:
        """Show a job, at first a tab of it."""
        super().__init__(every)
        self._asks = asks
        self.job, self._run = job, name_run(job)
        """The job that is shown, and which run of it."""
        self._reading: JobReading | None = None
        self._tab = tab
        self._node: int | None = None
        self._wanted = ""
        self._snapshot: Snapshot | None = None
        self._told: Series | None = None
        """Of the story that is shown; it is told anew once a second at most."""

    def compose(self) -> ComposeResult:
        """Compose the head, and a tab each."""
        yield Static("", id="head", markup=False)
        yield make_trouble()
        with TabbedContent(initial=self._tab or "ranks"):
            with TabPane("1 Ranks", id="ranks"):
                yield Rows(*views.RANKS, right=views.NUMBERS, id="ranks-table")
            with TabPane("2 Nodes", id="nodes"):
                yield Rows(*views.NODES, right=views.NUMBERS, id="nodes-table")
            with TabPane("3 Devices", id="devices"):
                heads, _ = views.list_device_rows(())
                yield Rows(*heads, id="devices-table")
            with TabPane("4 Incidents", id="incidents"):
                yield Rows(*views.INCIDENTS, right=views.NUMBERS, id="incidents-table")
                with VerticalScroll(id="incident"):
                    yield Static("", id="incident-text", markup=False)
            with TabPane("5 Settings", id="settings"):
                yield Rows(*views.SETTINGS, id="settings-table")
            with TabPane("6 Saves", id="checkpoints"):
                yield Rows(*views.CHECKPOINTS, right=views.NUMBERS, id="checkpoints-table")
            with TabPane("7 Log", id="log"):
                yield LogTail(ranks=True, id="lines")
            with TabPane("8 Time", id="time"), VerticalScroll():
                yield Static("", id="time-text", markup=False)
            with TabPane("9 Groups", id="groups"):
                yield Rows(*views.GROUPS, right=views.NUMBERS, id="groups-table")
        yield make_find_field("a part of any column, or of a line of the log")
        yield Footer(show_command_palette=False)

    # --- looking -----------------------------------------------------------------------------

    def read(self) -> tuple[Snapshot, Picture | None, list[LogLine] | None]:
        """Return the job as it is; at first without its journal, which may be long."""
        if not os.path.isdir(self.job.paths.root):
            raise PlatformError("the job's folder is gone; this is how the job was")
        if name_run(self.job) != self._run:  # It has begun again under its name.
            self.job = find_here(self.job.name, self.job.home)
            self._run, self._reading = name_run(self.job), None
            self._snapshot = None
        if self._snapshot is None:
            return self.job.snapshot(), None, None
        reading = self._open()
        picture = reading.look()
        asked = self.query_one(TabbedContent).active == "log"
        lines = reading.read_log(None, self._wanted) if asked else None
        return picture.snapshot or self.job.snapshot(), picture, lines

    def _open(self) -> "JobReading":
        """Return what reads this run's journal. It is imported once the screen is seen."""
        from perdure.cli.page.reading import JobReading

        if self._reading is None:
            self._reading = JobReading(self.job)
        return self._reading

    def show(self, found: Any) -> None:
        """Show all of it, on this screen and on that of a rank above it."""
        snapshot, picture, lines = found
        before, self._snapshot = self._snapshot, snapshot
        if before is None or _has_groups(before) != _has_groups(snapshot):
            self._offer_groups(_has_groups(snapshot))
        self.put("head", views.describe_job(snapshot, picture))
        self._show_now(snapshot)
        if picture is not None and picture.series is not self._told:
            self._told = picture.series
            self._show_story(picture)
        if lines is not None:
            self.query_one(LogTail).tell(lines)
        for screen in self.app.screen_stack:
            if isinstance(screen, RankScreen):
                screen.show_picture(snapshot, picture)
        if before is None:
            self._begin(snapshot)
        elif (before.state, before.paused) != (snapshot.state, snapshot.paused):
            self.refresh_bindings()  # Other keys may be pressed now.

    def _offer_groups(self, there: bool) -> None:
        """Have a tab of groups or stages, or none."""
        tabs = self.query_one(TabbedContent)
        if not there and tabs.active == "groups":
            tabs.active = "ranks"
        (tabs.show_tab if there else tabs.hide_tab)("groups")

    def _begin(self, snapshot: Snapshot) -> None:
        """Begin where most is to be seen, and read the journal at once."""
        if not self._tab and len(snapshot.ranks) > views.RANKS_ALONE:
            self.action_tab("nodes")
        elif self.focused is None or not isinstance(self.focused, Rows):
            self.focus_main()
        self.refresh_bindings()
        self._again.set()

    def _show_now(self, snapshot: Snapshot) -> None:
        """Show what changes with each heartbeat: of the tables that nobody sees, nothing."""
        match self.query_one(TabbedContent).active:
            case "ranks":
                self._tell("ranks", views.list_rank_rows(snapshot, self._node))
            case "nodes":
                self._tell("nodes", views.list_node_rows(snapshot))
            case "devices":
                self._tell("devices", views.list_device_rows(snapshot.devices)[1])
            case "groups":
                self._tell("groups", views.list_group_rows(snapshot))
            case "settings":
                self._tell("settings", views.list_setting_rows(snapshot))

    def _show_story(self, picture: Picture) -> None:
        rows = views.list_incident_rows(picture)
        self._tell("incidents", rows)
        if not rows:
            self.put("incident-text", views.describe_item(None))
        self._tell("checkpoints", views.list_checkpoint_rows(picture))
        width = self.size.width - 4
        self.put("time-text", views.describe_time(picture, width))

    def _tell(self, name: str, rows: list[Row]) -> None:
        self.query_one(f"#{name}-table", Rows).tell(rows)

    def search(self, wanted: str) -> None:
        """Show only rows, and lines of the log, with `wanted` in them."""
        super().search(wanted)
        self._wanted = wanted
        if self.query_one(TabbedContent).active == "log":
            self._again.set()

    # --- going about ---------------------------------------------------------------------------

    def action_tab(self, name: str) -> None:
        """Go to a tab, and have the next key go there already."""
        tabs = self.query_one(TabbedContent)
        if tabs.get_tab(name).display:
            tabs.active = name
            self._focus_in(name)

    @on(TabbedContent.TabActivated)
    def _show_tab(self) -> None:
        self._again.set()
        self.focus_main()

    def focus_main(self) -> None:
        """Have the keys go to what the tab shows first."""
        self._focus_in(self.query_one(TabbedContent).active)

    def _focus_in(self, name: str) -> None:
        if not self.query_one("#find").has_focus:
            self.set_focus(
                self.query(f"#{name} Rows, #{name} LogTail, #{name} VerticalScroll").first()
            )

    def leave(self) -> None:
        """Go from a node's ranks to the nodes, else to the jobs."""
        if self._node is not None and self.query_one(TabbedContent).active == "ranks":
            self._choose_node(None)
            self.action_tab("nodes")
            return
        self.dismiss()

    def _choose_node(self, node: int | None) -> None:
        self._node = node
        tab = self.query_one(TabbedContent).get_tab("ranks")
        tab.label = "1 Ranks" if node is None else f"1 Ranks of node {node}"

    @on(DataTable.RowSelected, "#nodes-table")
    def _enter_node(self, event: DataTable.RowSelected) -> None:
        row = self.query_one("#nodes-table", Rows).find(event.row_key.value)
        if row is not None:
            self.end_search()
            self._choose_node(row.item)
            self.action_tab("ranks")

    @on(DataTable.RowSelected, "#ranks-table")
    def _enter_rank(self, event: DataTable.RowSelected) -> None:
        row = self.query_one("#ranks-table", Rows).find(event.row_key.value)
        if row is None:
            return
        if len(row.item) > 1:
            self.action_tab("nodes")
            return
        self.app.push_screen(RankScreen(self._open(), row.item[0].rank, self._every))
        self._again.set()

    @on(DataTable.RowSelected, "#settings-table")
    def _enter_setting(self) -> None:
        self.action_set()

    @on(DataTable.RowHighlighted, "#incidents-table")
    def _show_incident(self, event: DataTable.RowHighlighted) -> None:
        row = self.query_one("#incidents-table", Rows).find(event.row_key.value)
        self.put("incident-text", views.describe_item(row))

    @on(DataTable.RowSelected, "#incidents-table")
    def _enter_incident(self) -> None:
        self.query_one("#incident").focus()

    # --- acting ----------------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return whether a key may be pressed now: of a job that is over, none that acts."""
        if action in _ACTING and self._snapshot is not None:
            if views.is_over(self._snapshot):
                return False
            if parameters == ("pause",):
                return not self._snapshot.paused
            if parameters == ("resume",):
                return self._snapshot.paused
        return True

    def action_verb(self, verb: Asking) -> None:
        """Ask about something that is done to the whole job."""
        field = "text" if verb == "note" else ""
        self._ask(Question(_OF_JOB[verb], Act(verb=verb), field, verb in _GRAVE))

    def action_move(self, verb: Asking) -> None:
        """Ask about something that is done to the node that is chosen."""
        target = self._find_target()
        if not target:
            self.notify(f"{verb} of what? Choose a node, rank, device or group.", markup=False)
            return
        title = _OF_NODE[verb].format(target.replace(":", " "))
        self._ask(Question(title, Act(verb=verb, target=target), grave=verb in _GRAVE))

    def _find_target(self) -> str:
        """Return what is chosen as a command names it; empty where it is none, or several."""
        active = self.query_one(TabbedContent).active
        if active not in ("ranks", "nodes", "devices", "groups"):
            return ""
        row = self.query_one(f"#{active}-table", Rows).chosen
        if row is None or row.key.startswith(("ranks:", "stage:")):
            return ""
        return str(row.item) if active == "devices" else row.key

    def action_kill_rank(self) -> None:
        """Ask whether the rank that is chosen is to be killed."""
        target = self._find_target()
        if not target.startswith("rank:"):
            self.notify("Kill which rank? Choose one of the ranks.", markup=False)
            return
        self.ask_to_kill(int(target.removeprefix("rank:")))

    def ask_to_kill(self, rank: int) -> None:
        """Ask whether a rank is to be killed."""
        act = Act(verb="inject", target=f"rank:{rank}")
        self._ask(Question(f"Kill rank {rank}?", act, grave=True))

    def action_set(self) -> None:
        """Ask for the new value of the setting that is chosen."""
        if self.query_one(TabbedContent).active != "settings":
            self.action_tab("settings")
            return
        row = self.query_one("#settings-table", Rows).chosen
        if row is not None and self.check_action("set", ()):
            act = Act(verb="set", key=row.key, value=row.item)
            self._ask(Question(f"Set {row.key} to:", act, "value"))

    def _ask(self, question: Question) -> None:
        def act(answer: Act | None) -> None:
            if answer is not None:
                self._carry_out(answer)

        asked = msgspec.structs.replace(question.act, run=self._run)
        self.app.push_screen(AskScreen(self.job, question._replace(act=asked), self._asks), act)

    @work
    async def _carry_out(self, act: Act) -> None:
        """Have it done, and say what came of it; nobody waits for it."""
        self.notify(f"{_name(act)}: asked for", markup=False, timeout=3)
        try:
            said = await run_apart(self._asks, self.job, act)
        except (PerdureError, OSError) as error:
            said, severity = f"{_name(act)}: {describe_error(error)}", "error"
        else:
            severity = "information"
        self.notify(said[:1000], severity=severity, markup=False, timeout=10)  # type: ignore[arg-type]
        self._again.set()


def _has_groups(snapshot: Snapshot) -> bool:
    return bool(snapshot.replicas or snapshot.world)


def _name(act: Act) -> str:
    return "kill" if act.verb == "inject" else act.verb
