"""The page's door: it checks each request's Host, Origin, and token, and gives the request a role.

Each path demands a role (`Way`). Without a role, a path answers no request. Only the path that is
routed counts, never a URL: Starlette builds a URL from the Host header, which the client writes.
"""

import hmac
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from html import escape
from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from perdure.dash.sections import render

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    b"content-security-policy": _POLICY.encode(),
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
    b"cache-control": b"no-store",
}


class Role(IntEnum):
    """What a request may do; a path demands this much or more."""

    STRANGER = 0
    VIEWER = 1
    OPERATOR = 2
    NOBODY = 3
    """No request has this role."""


@dataclass(frozen=True, slots=True)
class Access:
    """The server's names, its port, and its tokens."""

    hosts: frozenset[str]
    """Names and addresses that a browser may use for this server, in lower case, without a port."""
    port: int
    viewer: str
    operator: str = ""
    """Empty: no token steers."""
    secure: bool = False
    """The server uses TLS."""

    def name_cookie(self, host: str) -> str:
        """Return the name of the cookie for a Host header.

        The name has the port that the browser uses. Two tunnels may lead to the same far port.
        """
        return f"perdure-{split_host(host)[1] or self.port}"

    def find_role(self, token: str) -> Role:
        """Return the role that a token gives."""
        if self.operator and hmac.compare_digest(token.encode(), self.operator.encode()):
            return Role.OPERATOR
        viewer = hmac.compare_digest(token.encode(), self.viewer.encode())
        return Role.VIEWER if viewer else Role.STRANGER


def split_host(host: str) -> tuple[str, str]:
    """Return name and port of a Host header.

    If no port of digits ends the header, all of it is the name.

    >>> split_host("[::1]:80"), split_host("[::1]"), split_host("a:1/static/?")
    (('[::1]', '80'), ('[::1]', ''), ('a:1/static/?', ''))
    """
    name, _, port = host.lower().rpartition(":")
    return (name, port) if port.isascii() and port.isdigit() else (host.lower(), "")


class Way(Route):
    """A path, its handler, and the role that a request needs; by default no request has it."""

    def __init__(
        self, path: str, handler: Any, role: Role = Role.NOBODY, *, method: str = "GET"
    ) -> None:
        """Lead from `path` to `handler`."""
        super().__init__(path, handler, methods=[method])
        self._role = role

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request if its role suffices; refuse it otherwise."""
        role = scope.get("role", Role.STRANGER)
        if role >= self._role:
            await super().handle(scope, receive, send)
        elif role == Role.STRANGER:
            await _ask_for_token()(scope, receive, send)
        else:
            refusal = JSONResponse({"ok": False, "text": "You may only look."}, 403)
            await refusal(scope, receive, send)


class Door:
    """All ways of the page, behind the checks that every request has to pass."""

    def __init__(
        self,
        ways: Sequence[Way],
        error_handlers: Mapping[Any, Any],
        access: Access,
        admit: Callable[[tuple[str, int]], None],
    ) -> None:
        """Stand before `ways`; `admit` gets the address of each client that shows a token."""
        handlers = {HTTPException: _tell_http_error, **error_handlers}
        self._app = Starlette(routes=ways, exception_handlers=handlers)
        self._app.router.redirect_slashes = False  # Its redirects repeat the Host header.
        self._access, self._admit = access, admit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, or pass it on with its role in the scope."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                kept = [h for h in message["headers"] if h[0].lower() not in _HEADERS]
                message = {**message, "headers": [*kept, *_HEADERS.items()]}
            await send(message)

        response = self._check(Request(scope))
        if scope.get("role") and scope.get("client"):
            self._admit(tuple(scope["client"]))
        await (response or self._app)(scope, receive, send_with_headers)

    def _check(self, request: Request) -> Response | None:
        access = self._access
        host = request.headers.get("host", "")
        if split_host(host)[0] not in access.hosts:
            return show_told(400, "Not this host", f"This server is not called {host[:100]!r}.")
        scheme = "https" if access.secure else "http"
        if request.method != "GET" and request.headers.get("origin") != f"{scheme}://{host}":
            return show_told(403, "Not from here", "Only this server's own page may ask that.")
        shown = request.query_params.get("token", "")
        role = access.find_role(shown)
        if role and request.method == "GET":
            request.scope["role"] = role
            rest = [(k, v) for k, v in request.query_params.multi_items() if k != "token"]
            query = "&".join(f"{quote(k)}={quote(v)}" for k, v in rest)
            path = "/" + quote(request.scope["path"].lstrip("/"))  # `//name` is another host.
            entered = _lead(request, path + (f"?{query}" if query else ""))
            entered.set_cookie(
                access.name_cookie(host), shown,
                httponly=True, samesite="strict", secure=access.secure,
            )  # fmt: skip
            return entered
        request.scope["role"] = access.find_role(request.cookies.get(access.name_cookie(host), ""))
        return None


def _lead(request: Request, place: str) -> Response:
    """Lead on to the page without its token.

    After a link of another site (a chat, a mail, the file of `--open`), a browser follows a
    redirect without the cookie (SameSite=Strict). A page of this server brings the cookie.
    """
    if request.headers.get("sec-fetch-site", "none") in ("none", "same-origin"):
        return RedirectResponse(place, 303)
    return HTMLResponse(
        f'<!doctype html><meta http-equiv="refresh" content="0; url={escape(place)}">'
    )


def _tell_http_error(request: Request, error: Exception) -> Response:
    """Return the page for an error; a stranger does not learn which paths there are."""
    assert isinstance(error, HTTPException)
    if request.scope.get("role", Role.STRANGER) == Role.STRANGER:
        return _ask_for_token()
    title = "There is no such page" if error.status_code == 404 else "Not now"
    return show_told(error.status_code, title, str(error.detail))


def _ask_for_token() -> HTMLResponse:
    hint = "Open the address that `perdure dash` has printed: the token is in it."
    return show_told(401, "Who are you?", "This page needs a token.", hint)


def show_told(status: int, title: str, text: str, hint: str = "") -> HTMLResponse:
    """Return a page of one sentence."""
    return HTMLResponse(render("told.html", title=title, text=text, hint=hint), status)
