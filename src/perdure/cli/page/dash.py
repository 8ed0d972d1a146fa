"""`perdure dash`: a job, or all of them, as a page in a browser."""

import os
import signal
import subprocess
import sys
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from html import escape
from pathlib import Path
from secrets import token_urlsafe
from tempfile import TemporaryDirectory
from threading import Thread
from typing import IO, TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import msgspec
import typer

from perdure.adapters.listener import Listener
from perdure.cli.jobs import ElsewhereError, find_job
from perdure.cli.speech.say import Json, note, print_json
from perdure.launch import exchange
from perdure.model.codec import decode
from perdure.model.errors import ConfigError, PlatformError, ProtocolError
from perdure.model.input.plain import make_plain
from perdure.service.jobfolders import resolve_home

if TYPE_CHECKING:
    from perdure.cli.page.door import Access

PORT = 8787
_FORWARD_S = 60.0
_SILENCE_S = 60.0
"""A machine that is asked for a page, and says nothing for so long, is given up."""
_LINE_MAX = 65_536
_SERVING: dict[str, Any] = {
    "loop": "asyncio",  # Another one would not accept through `Listener`.
    "http": "h11",  # httptools has no bound on what a stranger's headers take.
    "ws": "none",
    "proxy_headers": False,  # They would let a client name its own address.
    "log_level": "error",  # It warns of each bad request of a stranger.
    "timeout_graceful_shutdown": 1,
    "server_header": False,
    "lifespan": "off",
}
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def dash(
    job: Annotated[
        str | None, typer.Argument(metavar="[JOB]", help="Only this one; else all of them.")
    ] = None,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port of the page; 0: a free one.")
    ] = PORT,
    host: Annotated[
        str, typer.Option("--host", help="Address to serve on; beyond loopback, with --cert.")
    ] = "127.0.0.1",
    operate: Annotated[
        bool, typer.Option("--operate", help="The address also lets others steer.")
    ] = False,
    cert: Annotated[
        Path | None,
        typer.Option("--cert", metavar="FILE", exists=True, help="Certificate, for TLS."),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option("--key", metavar="FILE", exists=True, help="With --cert: its key."),
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
    as_json: Json = False,
) -> int:
    """Show jobs as a live page in a browser, as they are or were.

    Curves, ranks, incidents, the ledger, at any past second. It reads what lies on the disk and
    asks the job nothing. Loopback serves the page, and its address has a token. With --operate, a
    second address also steers. For a job behind SSH, a server there serves the page, by a port
    here.
    """
    try:
        import uvicorn

        from perdure.cli.page.app import Site
        from perdure.cli.page.door import Access
    except ModuleNotFoundError as error:
        if error.name not in ("uvicorn", "starlette", "anyio"):
            raise
        raise ConfigError(f"no {error.name}", hint="pip install 'perdure[dash]'") from None
    if host not in _LOOPBACK and not (cert and key):
        raise ConfigError(
            f"--host {host} without TLS: the token would be read on its way",
            hint="--cert FILE --key FILE, or loopback and `ssh -L`",
        )
    try:
        name = find_job(job).name if job else ""
    except ElsewhereError as elsewhere:
        if host not in _LOOPBACK or cert is not None:
            raise ConfigError("--host and --cert are for jobs of this machine") from None
        return _show_there(elsewhere, port, operate=operate, open_=open_, as_json=as_json)
    listener = _listen(host, port)
    number = listener.getsockname()[1]
    access = Access(
        hosts=frozenset({"127.0.0.1", "localhost", "[::1]", _bracket(host).lower()}),
        port=number,
        viewer=token_urlsafe(24),
        operator=token_urlsafe(24) if operate else "",
        secure=cert is not None,
    )
    site = Site(home=resolve_home(), access=access, only=name, admit=listener.admit)
    urls = _say_where(host, access, f"jobs/{quote(name)}" if name else "", as_json=as_json)
    config = uvicorn.Config(
        site.app(), ssl_certfile=cert, ssl_keyfile=key, backlog=listener.backlog, **_SERVING
    )
    server = uvicorn.Server(config)
    site.is_ending = lambda: server.should_exit
    with open_browser(urls[-1]) if open_ else nullcontext():
        server.run(sockets=[listener])
    return 0


def _show_there(
    elsewhere: ElsewhereError, port: int, *, operate: bool, open_: bool, as_json: bool
) -> int:
    """Have a server of the job's own machine show it at `port` of this one, until either ends.

    Raises:
        ElsewhereError: that machine is not one behind SSH.
        PlatformError: it does not serve, says nothing, or the connection broke.
    """
    from perdure.launch.channel import Channel
    from perdure.launch.ssh.ask import run_beside

    record = elsewhere.record
    if record.profile.kind != "ssh":
        raise elsewhere
    with _listen("127.0.0.1", port) as listener:  # It has to be free, and is left to ssh.
        port = listener.getsockname()[1]
    words = ["dash", record.job, "--port", "0", "--json", *(["--operate"] if operate else [])]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    channel = Channel(record.profile.launch)
    way: subprocess.Popen[bytes] | None = None
    with channel.serve(run_beside(record, words)) as process:
        try:
            assert process.stdout is not None
            served = read_served(_hear(process.stdout, record.box), record.box)
            way = channel.connect_port(port, served.port)
            _wait_port(port, way)
            far, near = (f"://127.0.0.1:{number}/" for number in (served.port, port))
            urls = {what: url.replace(far, near, 1) for what, url in served.urls.items()}
            _print_urls({"port": port, "pid": os.getpid(), "urls": urls}, as_json=as_json)
            with open_browser(list(urls.values())[-1]) if open_ else nullcontext():
                while process.stdout.readline(_LINE_MAX):
                    pass
            raise PlatformError(
                f"the connection to {record.box} broke", hint="the same command shows it again"
            )
        except KeyboardInterrupt:
            return 0
        finally:
            for started in (process, way):
                if started is not None:
                    started.terminate()
            if way is not None:
                way.wait()


def _hear(pipe: IO[bytes], box: str) -> bytes:
    """Return the first line that may be a server's own; of one that ends without, its last.

    Raises:
        UnfinishedError: it says nothing, and does not end.
    """
    said, lines = b"", exchange.listen(pipe, _SILENCE_S)
    try:
        while not said.startswith(b'{"') and (line := lines.readline(_LINE_MAX)):
            said = line.strip() or said
    except subprocess.TimeoutExpired:
        raise exchange.UnfinishedError(
            f"{box} shows no page: it says nothing for {_SILENCE_S:g} s",
            hint=f"this says nothing about the job; does `ssh {box} true` end?",
        ) from None
    return said


class Served(msgspec.Struct, frozen=True):
    """What the server of another machine says of itself."""

    port: int
    urls: dict[str, str]


def read_served(said: bytes, box: str) -> Served:
    """Return what a server on `box` has said; nothing but addresses of its own are taken from it.

    They are printed here, and opened in this person's browser.

    Raises:
        PlatformError: it has said something else.
    """
    try:
        served: Served = decode(said, Served)
    except ProtocolError:
        words = make_plain(said, 500) or "no connection"
        raise PlatformError(f"{box} shows no page: {words}") from None
    own = f"http://127.0.0.1:{served.port}/"
    if not served.urls or not all(_is_plain_url(u, own) for u in served.urls.values()):
        raise PlatformError(f"{box} shows a page that is not its own")
    return served


def _is_plain_url(url: str, own: str) -> bool:
    return url.startswith(own) and url.isascii() and url.isprintable() and " " not in url


def _wait_port(port: int, way: "subprocess.Popen[bytes]") -> None:
    """Wait until `way` says that it listens at `port` of this machine.

    A connection to the port would not tell: another user may have taken the port meanwhile.

    Raises:
        PlatformError: it has ended instead, or does not in time.
    """
    assert way.stdout is not None
    with suppress(subprocess.TimeoutExpired), way.stdout:
        if exchange.listen(way.stdout, _FORWARD_S).readline(_LINE_MAX):
            return
    raise PlatformError(f"port {port} cannot be forwarded", hint="--port 0: any free one")


@contextmanager
def open_browser(url: str) -> Iterator[None]:
    """Open `url` in a browser by way of a file that none but this user may read.

    The browser's command line, which everybody on the machine may read, has the file's name and
    not the token. By a signal, or a terminal that is closed, the file is removed as well.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    with TemporaryDirectory(prefix="perdure-dash-") as folder:
        door = Path(folder, "door.html")
        door.write_text(
            f'<!doctype html><meta http-equiv="refresh" content="0; url={escape(url)}">',
            encoding="utf-8",
        )
        Thread(target=_start_browser, args=(door.as_uri(),), daemon=True).start()
        yield


def _start_browser(address: str) -> None:
    """Open `address`, and be there until a browser that is not in the background is left."""
    try:
        opened = webbrowser.open(address)
    except (webbrowser.Error, ValueError):  # BROWSER may be anything.
        opened = False
    if not opened:
        note("no browser was opened: the address is above")


def _say_where(host: str, access: "Access", path: str, *, as_json: bool) -> list[str]:
    """Print the addresses by which to come in, and return them."""
    # Another user may listen at [::1], where a browser looks for localhost first.
    host = "127.0.0.1" if host == "localhost" and not access.secure else host
    place = f"{'https' if access.secure else 'http'}://{_bracket(host)}:{access.port}/{path}"
    urls = {"view": f"{place}?token={access.viewer}"}
    urls |= {"operate": f"{place}?token={access.operator}"} if access.operator else {}
    told = {"port": access.port, "pid": os.getpid(), "urls": urls}
    _print_urls(told, as_json=as_json)
    return list(urls.values())


def _bracket(host: str) -> str:
    """Return a host as URLs and Host headers have it."""
    return f"[{host}]" if ":" in host else host


def _print_urls(told: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(told)
    else:
        for what, url in told["urls"].items():
            print(f"{what}: {url}")
        note("Ctrl-C ends it; jobs are not touched by that")
    sys.stdout.flush()


def _listen(host: str, port: int) -> Listener:
    try:
        return Listener(host, port)
    except OSError as error:
        raise PlatformError(
            f"{host}:{port} cannot be listened on: {error.strerror}", hint="--port 0: any free one"
        ) from None
