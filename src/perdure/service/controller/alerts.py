"""Alerts on their way out: a command, a webhook, any service that apprise knows.

All of it is beside the loop and never in its way.

The queue is bounded, each attempt has a time-out, attempts are repeated with growing pauses, and
what cannot be delivered is logged and dropped. Above the rate limit, alerts are counted and told
of in one. Alerts of entries that a dying controller had just written may be lost: the journal has
them.
"""

import asyncio
import logging
import sys
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import tenacity

from perdure.model.codec import encode
from perdure.model.events import JournalEntry
from perdure.model.job import AlertsConfig
from perdure.service.part import wait_event
from perdure.telemetry.alerts import Alert, AlertFold

log = logging.getLogger("perdure.alerts")

QUEUE_MAX = 200
WINDOW_S = 60.0
PER_MINUTE = 12
"""Alerts within a minute; more than this are counted and told of in one."""
TIMEOUT_S = 10.0
"""Seconds for one attempt."""
ATTEMPTS = 5
"""Attempts, with growing pauses between them; then the alert is dropped."""
APPRISE = "perdure.service.controller.apprising"
"""The process that tells services by the library apprise."""
_LOADED_S = 20.0
"""How long that may take to begin, on a machine that is busy."""
_PAUSE_S = 0.5
_PAUSE_S_MAX = 30.0


class Alerter:
    """Takes entries, sends alerts."""

    def __init__(
        self,
        job: str,
        config: AlertsConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
        pause_s: float = _PAUSE_S,
    ) -> None:
        """Prepare; `run` sends."""
        self._config, self._clock, self._pause_s = config, clock, pause_s
        self._fold = AlertFold(job, frozenset(config.events))
        self._queue: deque[Alert] = deque()
        self._sent_s: deque[float] = deque()
        self._held: Alert | None = None
        """Those above the rate limit, in one."""
        self._wake, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()
        self.dropped = 0

    @property
    def wanted(self) -> bool:
        """Whether anybody is to be told."""
        return bool(self._config.command or self._config.webhook or self._config.apprise)

    def note(self, entries: Iterable[JournalEntry]) -> None:
        """Take entries that are in the journal by now. Returns at once."""
        if not self.wanted:
            return
        for entry in entries:
            alert = self._fold.add(entry)
            if alert is not None:
                self._put(alert)

    def _put(self, alert: Alert) -> None:
        now = self._clock()
        while self._sent_s and now - self._sent_s[0] > WINDOW_S:
            self._sent_s.popleft()
        urgent = alert.kind == "ended"
        full = len(self._queue) >= QUEUE_MAX
        if not urgent and (full or len(self._sent_s) >= PER_MINUTE):
            count = self._held.count + 1 if self._held is not None else 1
            text = f"{count} more, the newest: {alert.kind}: {alert.summary}"
            self._held = msgspec.structs.replace(alert, kind="more", summary=text, count=count)
        else:
            if self._held is not None and urgent:
                self._queue.append(self._held)
                self._held = None
            self._sent_s.append(now)
            self._queue.append(alert)
        self._idle.clear()
        self._wake.set()

    async def run(self) -> None:
        """Send, until cancelled."""
        while True:
            while self._queue:
                await self.send(self._queue[0])
                self._queue.popleft()
            self._idle.set()
            self._wake.clear()
            wait_s = None
            if self._held is not None and self._sent_s:
                wait_s = max(0.0, self._sent_s[0] + WINDOW_S - self._clock())
            if await wait_event(self._wake, wait_s):
                continue
            held, self._held = self._held, None
            if held is not None:
                self._sent_s.append(self._clock())
                self._queue.append(held)

    async def flush(self, timeout_s: float) -> None:
        """Wait until the queue is empty, for `timeout_s` at the most."""
        await wait_event(self._idle, timeout_s)

    async def send(self, alert: Alert) -> None:
        """Deliver one alert, of the journal or not; `dropped` counts those that were lost."""
        data = encode(alert)
        if self._config.command:
            await self._try(f"command {self._config.command[0]}", self._call, data)
        if self._config.webhook:
            await self._try("webhook", self._post, data)
        if self._config.apprise:
            await self._try("apprise", partial(self._notify, alert), data)

    async def _try(self, what: str, send: Callable[[bytes], Awaitable[None]], data: bytes) -> None:
        attempts = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(ATTEMPTS),
            wait=tenacity.wait_random_exponential(multiplier=self._pause_s, max=_PAUSE_S_MAX),
            retry=tenacity.retry_if_exception_type((OSError, ValueError)),
            reraise=True,
        )
        try:
            await attempts(send, data)
        except (OSError, ValueError) as error:
            self.dropped += 1
            log.error("alert not delivered by %s: %s", what, str(error) or "no end")

    async def _call(self, data: bytes) -> None:
        """Run the command once.

        Raises:
            OSError: it cannot be run, fails, or takes too long.
        """
        await self._run(self._config.command, data + b"\n")

    async def _run(self, command: Sequence[str], data: bytes, more_s: float = 0.0) -> None:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE if more_s else asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            async with asyncio.timeout(TIMEOUT_S + more_s):
                said, _ = await process.communicate(data)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            why = said.decode(errors="replace").strip() if said else ""
            raise OSError(why or f"exit code {process.returncode}")

    async def _post(self, data: bytes) -> None:
        """Post to the webhook once.

        Raises:
            OSError: it cannot be reached, or refuses.
            ValueError: there is no such URL.
        """
        url = read_url(self._config.webhook)
        request = urllib.request.Request(
            url, data=data, headers={"Content-Type": "application/json"}, method="POST"
        )
        await asyncio.to_thread(_open, request, TIMEOUT_S)

    async def _notify(self, alert: Alert, data: bytes) -> None:
        """Tell all addresses of apprise's once.

        It has a process of its own: the library takes a second and tens of megabytes to load.

        Raises:
            OSError: the library is not there, or one of them cannot be told.
        """
        asked = {
            "addresses": read_addresses(self._config.apprise),
            "title": f"perdure: {alert.job}: {alert.kind}",
            "body": alert.summary,
        }
        await self._run([sys.executable, "-m", APPRISE], encode(asked), _LOADED_S)


def read_addresses(apprise: str) -> list[str]:
    """Return the address that `apprise` is, or those that stand in its file.

    Raises:
        OSError: the file cannot be read.
    """
    text = Path(apprise[1:]).read_text() if apprise.startswith("@") else apprise
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def read_url(webhook: str) -> str:
    """Return the URL that `webhook` is, or that stands in its file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no web address. The message does not repeat it: it may be a secret.
    """
    url = Path(webhook[1:]).read_text().strip() if webhook.startswith("@") else webhook
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("alerts.webhook is no http or https URL")
    return url


def _open(request: urllib.request.Request, timeout_s: float) -> None:
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            answer.read(1024)
    except urllib.error.HTTPError as error:
        error.close()
        raise OSError(f"status {error.code}") from None
