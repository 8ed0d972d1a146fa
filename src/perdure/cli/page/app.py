"""The page's server: GET shows, server-sent events keep it fresh, POST steers with a credential.

    GET  /                           the jobs
    GET  /jobs/NAME                  a job; the query says what of it (`dash.sections.Asked`)
    GET  /jobs/NAME/live             the same page's sections, each whenever it has changed
    GET  /jobs/NAME/curves           curves and what happened beside them, as JSON
    GET  /jobs/NAME/report.html      the page of `perdure report --html`
    POST /jobs/NAME/ask              a verb, or what it would do
    GET  /results                    what traces, plays, plans and drills have shown
    GET  /results/live               the same list, whenever it has changed
    GET  /results/NAME               one of them
    GET  /static/...                 style and scripts

Whoever comes shows a token once, as `?token=`, and has it as a cookie from then on: one of a
viewer, or one of an operator, where the server was started to steer. What another site's page sends
is refused by the cookie (SameSite=Strict), by the request's Host and, of a POST, by its Origin
(`door`). The page loads nothing from elsewhere and runs no script but its own
(Content-Security-Policy), and what ranks have written is escaped by the templates.
"""

import asyncio
import contextlib
import json
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any
from urllib.parse import quote

import msgspec
from markupsafe import Markup
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from perdure.cli.jobs import find_here, list_jobs_elsewhere, list_local_jobs
from perdure.cli.looking.apart import run_apart
from perdure.cli.page.acts import ACTS, Act, ask
from perdure.cli.page.door import Access, Door, Role, Way, show_told
from perdure.cli.page.reading import JobReading
from perdure.cli.page.results import Results
from perdure.cli.page.runs import Snapshots
from perdure.dash.page import read_style, render_html
from perdure.dash.sections import BEAT_S, SAVED, Asked, Picture, list_marks, render, render_section
from perdure.dash.svg import thin
from perdure.model.errors import PerdureError
from perdure.model.report import Snapshot
from perdure.service.jobfolders import list_jobs
from perdure.service.results import KEPT_MAX, TOTAL_MAX, is_result
from perdure.telemetry.series import Series

PANELS = (
    ("now", "What is wrong now", "whole"),
    ("curves", "Curves", "wide-panel"),
    ("ledger", "Where the time went", "narrow"),
    ("ranktime", "Ranks over time", "whole"),
    ("rank", "This rank", "whole"),
    ("ranks", "Ranks", "half"),
    ("nodes", "Nodes and devices", "half"),
    ("incidents", "Incidents", "whole"),
    ("verdicts", "Verdicts and their evidence", "half"),
    ("links", "Links between ranks", "half"),
    ("settings", "Settings", "half"),
    ("checkpoints", "Checkpoints", "half"),
    ("notes", "Remarks", "half"),
    ("journal", "Journal", "half"),
    ("skipped", "Checkpoints not used", "half"),
    ("log", "Log", "whole"),
)
"""Section, its title, and how wide it is on a large screen."""
_OF_STORY = (
    "curves", "ledger", "ranktime", "incidents", "verdicts", "links", "checkpoints", "notes",
    "journal", "skipped",
)  # fmt: skip
"""Sections that change with the journal alone, not with every heartbeat."""
NODES_MAX = 24
LOOK_EVERY_S, LOOK_EVERY_S_MAX = 0.5, 10.0
"""Between two looks of an open page; of a large job more, see `_SHARE`."""
_SHARE = 0.2
"""Of the time, at most so much goes into looks: ranks may need the machine."""
READINGS_MAX = 32
"""Jobs whose journals are held folded; of more, the ones that were opened first are read again."""
_LOOKERS = 4
"""Looks at once."""
PAGES_MAX = 64
"""Open pages; more are refused."""


@dataclass(slots=True)
class Site:
    """All jobs of a state directory, as pages."""

    home: str
    access: Access
    only: str = ""
    """The one job that is shown; empty: all."""
    admit: Callable[[tuple[str, int]], None] = lambda address: None
    """Is called with the address of each connection that has shown a token."""
    readings: dict[str, JobReading] = field(default_factory=dict)
    pages: int = 0
    is_ending: Callable[[], bool] = lambda: False
    """Whether the server is to end: nothing stays open then."""
    places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_LOOKERS))
    """Of those who look at once."""
    result_places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    """Of those who look at results, whatever lies there: jobs are not to wait for them."""
    _kept: dict[Any, tuple[Series, dict[str, str]]] = field(default_factory=dict)
    """What was asked for -> what was drawn of it last, of which story."""
    snapshots: Snapshots = field(default_factory=Snapshots)
    results: Results = field(init=False)
    _static: StaticFiles = field(init=False)

    def __post_init__(self) -> None:
        """Begin with no result read."""
        self.results = Results(self.home)
        self._static = StaticFiles(directory=str(files("perdure.dash") / "static"))

    def app(self) -> ASGIApp:
        """Return the application."""
        viewer, operator, anybody = Role.VIEWER, Role.OPERATOR, Role.STRANGER
        routes = [
            Way("/", self.show_jobs, viewer),
            Way("/live", self.stream_jobs, viewer),
            Way("/jobs/{name}", self.show_job, viewer),
            Way("/jobs/{name}/live", self.stream_job, viewer),
            Way("/jobs/{name}/curves", self.show_curves, viewer),
            Way("/jobs/{name}/report.html", self.show_report, viewer),
            Way("/jobs/{name}/ask", self.steer, operator, method="POST"),
            Way("/results", self.show_results, viewer),
            Way("/results/live", self.stream_results, viewer),
            Way("/results/{name}", self.show_result, viewer),
            Way("/static/style.css", self.show_style, anybody),
            Way("/static/{path:path}", self.show_static, anybody),
        ]
        return Door(routes, {PerdureError: _tell_error}, self.access, self.admit)

    # --- pages -------------------------------------------------------------------------------

    async def show_jobs(self, request: Request) -> Response:
        """Show all jobs, or the only one."""
        if self.only:
            return RedirectResponse(f"/jobs/{quote(self.only)}", 303)
        parts = await self._run(self._render_jobs)
        return HTMLResponse(render("jobs.html", home=self.home, parts=_mark_up(parts)))

    async def show_job(self, request: Request) -> Response:
        """Show a job as it is, or was."""
        reading, asked = await self._find(request), _read_asked(request.query_params)
        picture, parts = await self._run(self._render, reading, asked, _is_operator(request))
        others = [] if self.only else await self._run(self._list_others, reading.job.name)
        ended_s = picture.report.wall_s if asked.at is None else await self._measure(reading)
        page = render(
            "job.html",
            report=picture.report,
            snapshot=picture.snapshot,
            parts=_mark_up(parts),
            panels=PANELS,
            asked=asked,
            asked_fields=[(k, v) for k, v in request.query_params.items() if k != "token"],
            others=others,
            length_s=ended_s,
        )
        return HTMLResponse(page)

    async def show_report(self, request: Request) -> Response:
        """Show the page of `perdure report --html`, whose style lies inside it."""
        reading = await self._find(request)
        picture = await self._run(reading.look)
        page = render_html(
            picture.report, picture.snapshot, picture.series, picture.matrix, picture.own
        )
        name = quote(f"{reading.job.name}.html")
        return Response(
            page,
            media_type="text/html; charset=utf-8",
            headers={"content-disposition": f"attachment; filename*=UTF-8''{name}"},
        )

    async def show_results(self, request: Request) -> Response:
        """Show what was kept of traces, plays, plans and drills."""
        self._check_all()
        parts = await self._run(self._render_results, places=self.result_places)
        folder = str(self.results.folder)
        return HTMLResponse(render("results.html", folder=folder, parts=_mark_up(parts)))

    async def show_result(self, request: Request) -> Response:
        """Show one of them."""
        self._check_all()
        name, places = request.path_params["name"], self.result_places
        return HTMLResponse(await self._run(self._render_result, name, places=places))

    async def show_style(self, request: Request) -> Response:
        """Show the style that all pages have."""
        return Response(read_style(), media_type="text/css")

    async def show_static(self, request: Request) -> Response:
        """Show a script or a style of this package."""
        return await self._static.get_response(request.path_params["path"], request.scope)

    async def show_curves(self, request: Request) -> Response:
        """Answer with curves by step, all or those of a `name`, and marks."""
        reading, asked = await self._find(request), _read_asked(request.query_params)
        names = frozenset(request.query_params.getlist("name"))
        return JSONResponse(await self._run(self._make_curves, reading, asked, names))

    # --- what stays open -----------------------------------------------------------------------

    async def stream_jobs(self, request: Request) -> Response:
        """Send the list of jobs whenever it has changed, where more than one is shown."""
        self._check_all()
        return self._stream(request, self._render_jobs)

    async def stream_results(self, request: Request) -> Response:
        """Send the list of results whenever it has changed."""
        self._check_all()
        return self._stream(request, self._render_results, places=self.result_places)

    async def stream_job(self, request: Request) -> Response:
        """Send a job's sections, each whenever it has changed."""
        reading, asked = await self._find(request), _read_asked(request.query_params)
        name, role = reading.job.name, _is_operator(request)

        def look() -> dict[str, str]:
            return self._render(self._open(name), asked, role)[1]  # It may be another job by now.

        return self._stream(request, look, once=asked.at is not None)

    def _stream(
        self,
        request: Request,
        look: Any,
        *,
        once: bool = False,
        places: asyncio.Semaphore | None = None,
    ) -> Response:
        if self.pages >= PAGES_MAX:
            raise HTTPException(503, f"{PAGES_MAX} pages are open already")
        return StreamingResponse(
            self._list_news(request, look, once=once, places=places),
            media_type="text/event-stream",
        )

    async def _list_news(
        self, request: Request, look: Any, *, once: bool, places: asyncio.Semaphore | None = None
    ) -> AsyncIterator[str]:
        """Yield what has changed since it was sent last; of the past there are no news."""
        self.pages += 1
        try:
            sent: dict[str, str] = {}
            sent_s = 0.0
            while not (self.is_ending() or await request.is_disconnected()):
                begun_s = time.monotonic()
                try:
                    parts = await self._run(look, places=places)
                    took_s = time.monotonic() - begun_s
                except (PerdureError, HTTPException, OSError) as error:
                    yield f"event: trouble\ndata: {json.dumps(_describe(error))}\n\n"
                    return
                news = {name: part for name, part in parts.items() if sent.get(name) != part}
                if news or begun_s - sent_s >= BEAT_S:
                    yield f"event: sections\ndata: {json.dumps(news)}\n\n"
                    sent, sent_s = parts, begun_s
                if once:
                    yield "event: whole\ndata: {}\n\n"
                    return
                pause_s = max(LOOK_EVERY_S, took_s * (1 / _SHARE - 1))
                await asyncio.sleep(min(pause_s, LOOK_EVERY_S_MAX))
        finally:
            self.pages -= 1

    # --- steering ------------------------------------------------------------------------------

    async def steer(self, request: Request) -> Response:
        """Say what a verb would do, or have it done."""
        reading = await self._find(request)
        try:
            body = b""
            async for piece in request.stream():
                body += piece
                if len(body) > 65_536:
                    raise ValueError("too much is asked for")
            act = msgspec.json.decode(body, type=Act)
        except (ValueError, msgspec.MsgspecError) as error:
            return JSONResponse({"ok": False, "text": f"Not understood: {error}"}, 400)
        try:
            # In no place of those who look: a controller that hangs holds it for a minute.
            text = await run_apart(ask, reading.job, act)
        except PerdureError as error:
            hint = f" ({error.hint})" if error.hint else ""
            return JSONResponse({"ok": False, "text": f"{error.message}{hint}"})
        return JSONResponse({"ok": True, "text": text})

    # --- what is read, in threads ----------------------------------------------------------------

    async def _run(self, function: Any, *args: Any, places: asyncio.Semaphore | None = None) -> Any:
        """Return what `function` returns. On a disk that hangs it may last, and hold its place.

        The place is one of `places`, by default of those that all pages of jobs share.
        """
        places = places or self.places
        await places.acquire()

        def leave(looking: "asyncio.Future[Any]") -> None:
            places.release()
            if not looking.cancelled():
                looking.exception()  # Whoever asked may be gone.

        looking = asyncio.ensure_future(run_apart(function, *args))
        looking.add_done_callback(leave)
        return await asyncio.shield(looking)

    async def _find(self, request: Request) -> JobReading:
        found: JobReading = await self._run(self._open, request.path_params["name"])
        return found

    def _open(self, name: str) -> JobReading:
        known = self.readings.get(name)
        if known is not None and known.is_of_now():
            return known
        if self.only and name != self.only:
            raise HTTPException(404, "Only one job is shown here.")
        if name not in list_jobs(self.home):
            raise HTTPException(404, "There is no job of this name.")
        reading = JobReading(find_here(name, self.home))
        self.readings.pop(name, None)
        self.readings[name] = reading
        while len(self.readings) > READINGS_MAX:
            self.readings.pop(next(iter(self.readings)))
        return reading

    def _check_all(self) -> None:
        if self.only:
            raise HTTPException(404, "Only one job is shown here.")

    async def _measure(self, reading: JobReading) -> float:
        picture: Picture = await self._run(reading.look)
        return picture.report.wall_s

    def _list_others(self, name: str) -> list[str]:
        return [job.name for job in list_local_jobs(self.home) if job.name != name][-50:]

    def _render_jobs(self) -> dict[str, str]:
        rows: list[tuple[str, Snapshot]] = []
        for job in reversed(list_local_jobs(self.home)):
            with contextlib.suppress(PerdureError, OSError):
                rows.append((job.name, self.snapshots.take(job)))
        elsewhere = list_jobs_elsewhere(self.home)
        return {"jobs": render("sections/jobs.html", rows=rows, elsewhere=elsewhere)}

    def _render_results(self) -> dict[str, str]:
        listing = self.results.look()
        values = {"listing": listing, "kinds": self.results.kinds, "limits": (KEPT_MAX, TOTAL_MAX)}
        return {"results": render("sections/results.html", **values)}

    def _render_result(self, name: str) -> str:
        if not is_result(name):
            raise HTTPException(404, "There is no result of this name.")
        try:
            row, document = self.results.open(name)
        except FileNotFoundError:
            raise HTTPException(404, "There is no result of this name.") from None
        kind = name.partition("-")[0]
        return render("result.html", row=row, document=document, kind=kind)

    def _render(
        self, reading: JobReading, asked: Asked, steers: bool
    ) -> tuple[Picture, dict[str, str]]:
        picture = reading.look() if asked.at is None else reading.look_back(asked.at)
        over, past = reading.is_over(), asked.at is not None
        more = {
            "live": True,
            "served": reading.job.spec.served,
            "over": over,
            "verbs": ACTS if steers and not over and not past else (),
            "nodes_max": NODES_MAX,
            "run": reading.run,
            "lines": [] if past else reading.read_log(asked.rank, asked.search),
        }
        place = (reading.job.name, asked, bool(more["verbs"]))
        kept = self._kept.pop(place, None)
        parts = dict(kept[1]) if kept and kept[0] is picture.series else {}
        names = ["bar", "moment", *(name for name, _, _ in PANELS)]
        for name in names:
            if name not in parts:
                parts[name] = _draw(name, picture, asked, more)
        if past:
            parts["log"] = ""  # What was written has no times.
        self._kept[place] = (picture.series, {n: parts[n] for n in _OF_STORY})
        while len(self._kept) > PAGES_MAX:
            self._kept.pop(next(iter(self._kept)))
        return picture, parts

    def _make_curves(
        self, reading: JobReading, asked: Asked, names: frozenset[str]
    ) -> dict[str, Any]:
        picture = reading.look() if asked.at is None else reading.look_back(asked.at)
        curves = {}
        for name, rows in picture.series.metrics.items():
            if names and name not in names:
                continue
            tame = [(s, v) for s, v in thin([(float(s), _tame(v)) for s, v in rows])]
            curves[name] = {
                "x": [step for step, _ in tame],
                "y": [value if math.isfinite(value) else None for _, value in tame],
            }
        marks = [msgspec.to_builtins(mark) for mark in list_marks(picture, by_step=True)]
        saved = [c.step for c in picture.series.checkpoints][-500:]
        return {
            "job": reading.job.name,
            "curves": curves,
            "marks": marks,
            "checkpoints": saved,
            "checkpoint_color": SAVED,
        }


def _draw(name: str, picture: Picture, asked: Asked, more: Mapping[str, Any]) -> str:
    """Return a section's HTML; one that cannot be drawn says so, and the others are there."""
    try:
        return render_section(name, picture, asked, **more)
    except Exception as error:
        logging.getLogger(__name__).exception("section %s of %s", name, picture.report.job)
        return render("sections/fault.html", what=f"{type(error).__name__}: {error}"[:300])


def _tame(value: float) -> float:
    """Return a value that sorts among others: what is no number is infinite."""
    return value if value == value else math.inf


def _read_asked(query: QueryParams) -> Asked:
    """Return what a query asks for; what cannot be read is not asked for.

    >>> _read_asked(QueryParams("rank=3&at=x&begin=nan"))
    Asked(rank=3)
    """
    fields: dict[str, Any] = {}
    for name in ("at", "begin", "end"):
        with contextlib.suppress(KeyError, ValueError):
            value = float(query[name])
            if math.isfinite(value):
                fields[name] = value
    for name in ("node", "rank"):
        with contextlib.suppress(KeyError, ValueError):
            fields[name] = int(query[name])
    fields |= {name: query.get(name, "")[:200] for name in ("search", "curves")}
    return Asked(**fields)


def _mark_up(parts: Mapping[str, str]) -> dict[str, Markup]:
    """Return parts as what they are: HTML, escaped where it was made."""
    return {name: Markup(part) for name, part in parts.items()}


def _is_operator(request: Request) -> bool:
    return bool(request.scope.get("role") == Role.OPERATOR)


def _describe(error: Exception) -> str:
    return error.detail if isinstance(error, HTTPException) else str(error)


async def _tell_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PerdureError)
    return show_told(500, "That could not be read", error.message, error.hint or "")
